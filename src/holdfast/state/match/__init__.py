"""Stored state held against live objects, and put into them."""
