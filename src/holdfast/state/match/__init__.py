"""Compares stored state with live objects, and puts it into them."""
