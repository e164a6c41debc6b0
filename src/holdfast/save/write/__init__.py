"""Writes a snapshot's files: all of it, or what has changed."""
