"""Checkpoints of training frameworks, read as data: finds the model, the optimizer and so on."""
