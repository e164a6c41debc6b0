"""One of several workers that share nothing but a bucket: `bucket_workers.py URL STEPS [KILL_RANK KILL_STEP]`."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast

ROWS = 13  # It divides by no number of workers.


def main(url: str, steps: int, kill_rank: int = -1, kill_step: int = -1) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "sharded": distribute_tensor(torch.arange(ROWS * 5000.0).reshape(ROWS, 5000), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.ones(20_000), mesh, [Replicate()]),
        "plain": torch.zeros(1000),
    }
    with holdfast.resumable(url, state=state, save_every=holdfast.Steps(2), keep=holdfast.Latest(2)) as run:
        for step in run.steps(steps):
            if step % 4 == 0:
                run.manager.wait(60)
            if (dist.get_rank(), step) == (kill_rank, kill_step):
                os.kill(os.getpid(), signal.SIGKILL)
            for tensor in state.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.mul_(1.25).add_(step)
            dist.barrier()
    digest = hashlib.sha256()
    for tensor in state.values():
        digest.update((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().tobytes())
    print("end", digest.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
