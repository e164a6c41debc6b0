"""Restoring, from a checkpoint to live objects: choose, verify, plan, read, apply."""
