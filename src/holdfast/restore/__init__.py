"""The way back: choose, verify, plan, read, apply; from a checkpoint to live objects."""
