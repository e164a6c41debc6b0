"""Looks for parts that a program may have forgotten to save, before that costs training."""
