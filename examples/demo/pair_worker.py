"""One of the two workers of the demo's second part: data-parallel training, in a program as a user would write it.

    torchrun --nproc-per-node=2 -m demo.pair_worker STEPS SEED [DIRECTORY]

Without a directory nothing is saved. What it does is told on standard output, in lines of JSON.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from demo.reports import PairEnded, PairHeard, PairLeft, PairReport, PairStep
from holdfast.events import Event, Leaving, NoticeHeard

_WIDTH = 256
_SAMPLES = 4800
_BATCH = 96


def main(steps: int, seed: int, directory: str | None) -> None:
    """Trains a network to tell whether a point lies in a circle, each worker on its half of each batch."""
    holdfast.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(seed)

    def tell(report: PairReport) -> None:
        # One call: both workers write to the same pipe.
        os.write(1, msgspec.json.encode(report) + b"\n")

    def tell_event(event: Event) -> None:
        if isinstance(event, NoticeHeard):
            tell(PairHeard(rank=rank, at_unix_seconds=event.at_unix_seconds))
        elif isinstance(event, Leaving):
            tell(PairLeft(rank=rank, step=event.step, exit_code=event.exit_code))

    points = torch.rand(_SAMPLES, 2) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.5).float()
    layers = (nn.Linear(2, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(_WIDTH, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    loader = holdfast.ResumableDataLoader(
        TensorDataset(points, inside), batch_size=_BATCH, seed=seed, rank=rank, world_size=dist.get_world_size()
    )
    batches = loader.stream()
    # Each worker hides other neurons from its part of the batch.
    torch.manual_seed(seed + rank)

    def learn(step: int) -> None:
        inputs, targets = next(batches)
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(PairStep(rank=rank, process=os.getpid(), step=step + 1, loss=float(loss.item()).hex()))

    if directory is None:
        for step in range(steps):
            learn(step)
    else:
        kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "rng": holdfast.RNG()}
        with holdfast.resumable(directory, save_every=holdfast.Steps(10 * steps), sinks=[tell_event], **kept) as run:
            for step in run.steps(steps):
                learn(step)
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    digests = {
        "weights": _digest(model.state_dict().values()),
        "optimizer state": _digest(moments),
        "random generator": _digest([torch.get_rng_state()]),
    }
    tell(PairEnded(rank=rank, digests=digests))
    dist.barrier()


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    code = 0
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    except SystemExit as leaving:
        code = int(str(leaving.code))
    # The end of a process group of Gloo may hang, and there is nothing left to do.
    sys.stderr.flush()
    os._exit(code)
