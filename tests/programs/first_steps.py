"""Says whether the first square roots that a fresh process computes are those that it computes afterwards."""

import sys

import torch

import holdfast

with holdfast.CheckpointManager(sys.argv[1], holdfast.Checkpoint(values=torch.zeros(1))):
    values = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
    first, second = values.sqrt(), values.sqrt()
print("same" if torch.equal(first, second) else "other")
