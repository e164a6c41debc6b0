"""Saving, from live objects to a checkpoint: capture, stage, write, commit, retain, sweep."""
