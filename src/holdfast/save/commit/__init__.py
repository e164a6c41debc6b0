"""Commits written files as a checkpoint, and removes checkpoints that are not kept."""
