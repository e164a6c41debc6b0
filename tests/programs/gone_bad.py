"""A worker that trains with DDP, or alone, until a batch makes a gradient of one worker nan. Run as under torchrun.

    python gone_bad.py DIRECTORY ON_NONFINITE STEPS RANK BATCH LOOP [STEP:COUNT...]

The batch of that number is the bad one on that worker. LOOP is how batches are taken: `steps`, `epochs` or `own`. It
saves each third step. Where training has STEP complete steps, COUNT batches are drawn and left out; none is bad then.
It prints the step, the digest of all that it ends with, and where it has gone back to.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.events import Event, Restored

directory, on_nonfinite, steps, bad_rank, bad_batch, loop, *left_out = sys.argv[1:]
if "RANK" in os.environ:
    holdfast.init_process_group("gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if "RANK" in os.environ else (0, 1)
leaves_out = {int(step): int(count) for step, _, count in (part.partition(":") for part in left_out)}
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
if world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
objects: dict[str, Any] = {}
loader: Any
if loop == "own":
    generator = torch.Generator().manual_seed(2 + rank)
    loader = DataLoader(data, batch_size=6, shuffle=True, generator=generator)
else:
    loader = holdfast.ResumableDataLoader(data, batch_size=6, seed=2, rank=rank, world_size=world_size)
    objects["loader"] = loader
gone_back: list[Any] = []
drawn = 0


def see(event: Event) -> None:
    if isinstance(event, Restored):
        gone_back.append(event.step)


def train(inputs: torch.Tensor) -> None:
    global drawn
    drawn += 1
    loss = model(inputs).square().mean()
    if drawn == int(bad_batch) and rank == int(bad_rank) and not left_out:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def take(batches: Iterator[Any]) -> torch.Tensor:
    for _ in range(leaves_out.pop(run.step, 0)):
        next(batches)
    (inputs,) = next(batches)
    return torch.as_tensor(inputs)


state = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG(), **objects}
with holdfast.resumable(
    directory,
    **state,
    save_every=3,
    keep=holdfast.LastGood(2) | holdfast.Latest(2),
    on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
    preemption="off",
    sinks=[see],
) as run:
    try:
        if loop == "steps":
            batches = loader.stream()
            for _ in run.steps(int(steps)):
                train(take(batches))
        else:
            epochs = loader.epochs(1000) if loop == "epochs" else run.epochs(1000)
            for _ in epochs:
                batches = iter(loader) if loop == "epochs" else run.batches(loader)
                while run.step < int(steps):
                    try:
                        inputs = take(batches)
                    except StopIteration:
                        break
                    train(inputs)
                    run.finish_step()
                if run.step >= int(steps):
                    break
    finally:
        values = [*model.state_dict().values(), torch.get_rng_state()]
        values += [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
        print(json.dumps({"step": run.step, "digest": digest, "back": gone_back, "drawn": drawn}), flush=True)
