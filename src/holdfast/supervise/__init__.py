"""Processes beside a trainer, which use the standard library only and nothing else of holdfast, to start quickly."""
