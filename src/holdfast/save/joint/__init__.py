"""Saves that several workers make together."""
