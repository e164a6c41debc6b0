"""A training program that is killed: `program.py WAY DIRECTORY NOTES WIDTH`. It notes times in a file, in each start.

WAY is `holdfast`, `overlap` (with an overlapped copy), `auto` (that, at the intervals of
`Auto`), `memory` (kept in memory as well), `memory-overlap` (both), `torch` or `dcp`. With several workers each has the
whole model, and the first one notes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SAVE_SECONDS = 2.0
LAYERS = 4
BATCH = 32


def main(way: str, directory: Path, notes: Path, width: int) -> None:
    """Trains until it is killed."""
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(*words: object) -> None:
        os.write(file, f"{time.monotonic():.4f} {' '.join(map(str, words))}\n".encode())

    if (workers := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        torch.distributed.init_process_group("gloo")
    if (rank := int(os.environ.get("RANK", "0"))) == 0:
        note("begun", os.getpid())
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(step: int) -> None:
        optimizer.zero_grad()
        batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))
        trained(batch).square().mean().backward()
        optimizer.step()
        if rank == 0:
            note("step", step)

    trained = model if workers == 1 else torch.nn.parallel.DistributedDataParallel(model)
    if way in ("holdfast", "overlap", "auto", "memory", "memory-overlap"):
        _train_resumable(way, directory, model, optimizer, train, note)
    else:
        _train_with_files(way, directory, model, optimizer, train, note)


def _train_resumable(
    way: str,
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Callable[[int], None],
    note: Callable[..., None],
) -> None:
    import holdfast as hf

    chosen: dict[str, Any] = {"save_every": hf.Seconds(SAVE_SECONDS)}
    if way.endswith("overlap"):
        chosen["overlap_copy"] = True
    elif way == "auto":
        chosen = {"save_every": hf.Auto(), "overlap_copy": True}
    place = hf.Tiers(hf.HostMemory(), directory) if way.startswith("memory") else directory
    at = time.monotonic()
    with hf.resumable(place, model=model, optimizer=optimizer, keep=hf.Latest(2), **chosen) as run:
        if int(os.environ.get("RANK", "0")) == 0:
            note("read", time.monotonic() - at)
        for step in run.steps(1 << 40):
            train(step)


def _train_with_files(
    way: str,
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Callable[[int], None],
    note: Callable[..., None],
) -> None:
    """The newest checkpoint that is whole is renamed to its name; two are kept."""
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    directory.mkdir(parents=True, exist_ok=True)
    at, step = time.monotonic(), 0
    found = sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    if found:
        newest, step = directory / str(found[-1]), found[-1]
        if way == "torch":
            state = torch.load(newest)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            states = get_state_dict(model, optimizer)
            load({"model": states[0], "optimizer": states[1]}, checkpoint_id=newest)
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    note("read", time.monotonic() - at)
    saved_at = time.monotonic()
    while True:
        train(step)
        step += 1
        if time.monotonic() - saved_at < SAVE_SECONDS:
            continue
        part = directory / "part"
        if way == "torch":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
            with part.open("rb") as written:
                os.fsync(written.fileno())
        else:
            states = get_state_dict(model, optimizer)
            save({"model": states[0], "optimizer": states[1]}, checkpoint_id=part)
        part.rename(directory / str(step))
        for old in sorted((path for path in directory.iterdir() if path.name.isdecimal()), key=lambda p: int(p.name))[
            :-2
        ]:
            if way == "torch":
                old.unlink()
            else:
                import shutil

                shutil.rmtree(old)
        saved_at = time.monotonic()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
