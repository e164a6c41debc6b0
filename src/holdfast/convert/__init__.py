"""Converts checkpoints to files that other programs read, and back: safetensors, `torch.save`, DCP and others.

Nothing here imports a framework, and nothing that is read is ever executed.
"""
