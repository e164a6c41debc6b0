"""Checkpoints of training frameworks, read as data: what in them is the model, the optimizer and so on."""
