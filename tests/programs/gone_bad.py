"""Trains with DDP, or alone, until a batch makes a gradient of one worker nan. Run as under torchrun, or imported.

    python gone_bad.py DIRECTORY ON_NONFINITE STEPS RANK BATCH LOOP [STEP:COUNT...]

The batch of that number is the bad one on that worker. LOOP is how batches are taken: `steps`, `epochs` or `own`. It
saves each third step. Where training has STEP complete steps, COUNT batches are drawn and left out; none is bad then.
It prints the step, the digest of all that it ends with, where it has gone back to, and in what repeated steps agree.
KILLED=step kills it at that step once it has gone back, and KILLED=going kills it while it goes back.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.events import Event, Restored, WitnessAgreed, WitnessDiffers


def train(
    directory: Path,
    on_nonfinite: str,
    steps: int,
    loop: str,
    *,
    bad: tuple[int, int] = (0, 0),
    left_out: dict[int, int] | None = None,
    killed: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Returns what it ends with; `bad` is the rank and the number of the bad batch."""
    is_joint = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_joint else (0, 1)
    left_out = dict(left_out or {})
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG()}
    loader: Any
    if loop == "own":
        loader = DataLoader(data, batch_size=6, shuffle=True)  # Its order is drawn from the generator of training.
    else:
        loader = holdfast.ResumableDataLoader(data, batch_size=6, seed=2, rank=rank, world_size=world_size)
        objects["loader"] = loader
    back: list[int] = []
    agreed: list[str] = []
    drawn = 0

    def see(event: Event) -> None:
        if isinstance(event, WitnessDiffers):
            back.append(-1)
        if isinstance(event, WitnessAgreed):
            agreed.append(event.what)
        if isinstance(event, Restored):
            back.append(event.step)
            if killed == "going":
                os.kill(os.getpid(), signal.SIGKILL)

    def update(inputs: torch.Tensor) -> None:
        nonlocal drawn
        drawn += 1
        loss = model(inputs).square().mean()
        if (rank, drawn) == bad:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if back and str(run.step) == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    def take(batches: Iterator[Any]) -> torch.Tensor | None:
        """Returns the next batch; None for one that is left out."""
        (inputs,) = next(batches)
        if left_out.get(run.step, 0):
            left_out[run.step] -= 1
            return None
        return torch.as_tensor(inputs)

    keep = holdfast.LastGood(2) | holdfast.Latest(2)
    settings = {
        "save_every": 3,
        "keep": keep,
        "quiet": True,
        "on_nonfinite": on_nonfinite,
        "preemption": "off",
        **options,
    }

    def take_steps() -> None:
        if loop == "steps":
            batches = loader.stream()
            for _ in run.steps(steps):
                while (inputs := take(batches)) is None:
                    pass
                update(inputs)
        else:
            for _ in loader.epochs(1000) if loop == "epochs" else run.epochs(1000):
                batches = iter(loader) if loop == "epochs" else run.batches(loader)
                while run.step < steps:
                    try:
                        inputs = take(batches)
                    except StopIteration:
                        break
                    if inputs is not None:
                        update(inputs)
                        run.finish_step()
                if run.step >= steps:
                    break

    run = holdfast.resumable(directory, **objects, **settings, sinks=[see])
    try:
        with run:
            take_steps()
    except holdfast.errors.NotFiniteError:
        print(json.dumps({"step": run.step}), flush=True)
        raise
    values = [*model.state_dict().values(), torch.get_rng_state()]
    values += [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    return {"step": run.step, "digest": digest, "back": back, "drawn": drawn, "agreed": agreed}


if __name__ == "__main__":
    where, what, total, rank_of_bad, batch, how, *parts = sys.argv[1:]
    if "RANK" in os.environ:
        holdfast.init_process_group("gloo")
    without = {int(step): int(count) for step, _, count in (part.partition(":") for part in parts)}
    wrong = (0, 0) if without else (int(rank_of_bad), int(batch))
    torch.set_num_threads(1)
    kill = os.environ.get("KILLED", "")
    found = train(Path(where), what, int(total), how, bad=wrong, left_out=without, killed=kill, quiet=False)
    print(json.dumps(found), flush=True)
