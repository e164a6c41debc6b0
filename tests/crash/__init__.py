"""Drivers that kill saving jobs at random moments and check what is left: `make crash`, or one by `python -m`."""
