"""The position in the data: which samples come next, and in which order."""
