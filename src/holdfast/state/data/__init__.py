"""The place in the data: which samples come next, and in which order."""
