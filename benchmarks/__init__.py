"""Measures holdfast against other ways of saving, and all of them against what the machine can do at best."""
