"""What becomes of files that are written: a checkpoint, and what is kept."""
