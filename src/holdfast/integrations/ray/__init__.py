"""Epoch jobs on Ray: nodes are actors, and the driver is the master."""
