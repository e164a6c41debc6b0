"""Checkpoints as files that other programs read, and back: safetensors, `torch.save`, `torch.distributed.checkpoint`.

Nothing here imports a framework, and nothing that is read is ever executed.
"""
