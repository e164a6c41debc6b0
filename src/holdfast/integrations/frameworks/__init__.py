"""Integrations of frameworks that own the training loop."""
