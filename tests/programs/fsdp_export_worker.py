"""One worker of a job of FSDP2 that saves its state with holdfast and with `torch.distributed.checkpoint`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import fully_shard

import holdfast as hf


def main(place: str) -> None:
    directory = Path(place)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    with hf.CheckpointManager(directory / "run", hf.Checkpoint(model=model, optimizer=optimizer)) as manager:
        manager.save(1)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save_dcp(state, checkpoint_id=directory / "dcp")
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save({"model": whole}, directory / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
