"""The process group of a job that torchrun may have restarted."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

# What it exports depends on how torch was built, so that it has no types to go by.
dist: Any = torch.distributed


def join() -> None:
    """Makes the process group of this start, with a part of the store that is its own.

    torchrun gives a restarted job the store as it was, and gloo in torch 2.13 tells its starts not apart there: a
    worker that is quicker than another one finds the address of the dead one, and fails, or waits for half an hour.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
