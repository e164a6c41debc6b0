"""The process group of a job that torchrun may have restarted."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def join() -> None:
    """Makes the process group of this start.

    torchrun gives a restarted job the store as it was, and torch 2.13 tells its starts not apart there: a worker that
    is quicker than another one would find the address of the dead one, and wait for half an hour.
    """
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
