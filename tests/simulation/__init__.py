"""Simulates jobs, readers and clean-up on one storage, call by call: `python -m simulation`."""
