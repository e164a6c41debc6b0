"""`python -m benchmarks.finite`: what it costs that a save looks for numbers that are not finite.

The same tensors are saved by turns as the parameters of a module, which must be finite, and as a plain dictionary, of
which nothing is expected. What differs is how long a save takes until it is durable.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import click
import torch

import holdfast as hf

_WIDTH: Final = 4096
_WAYS: Final = ("looked through", "not looked through")


def measure(place: Path, megabytes: int, turns: int) -> dict[str, list[float]]:
    """**Blocks.** Returns how long each save took until it was durable, in seconds, by way."""
    layers = max(round(megabytes * 1e6 / (4 * _WIDTH * _WIDTH)), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    objects = (model, dict(model.state_dict()))
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    managers = {
        way: hf.CheckpointManager(place / str(number), hf.Checkpoint(state=state), keep=hf.Latest(1), cluster="alone")
        for number, (way, state) in enumerate(zip(_WAYS, objects, strict=True))
    }
    for turn in range(turns + 2):
        for way in _WAYS if turn % 2 else reversed(_WAYS):
            begun = time.perf_counter()
            managers[way].save(turn).wait_committed()
            seconds = time.perf_counter() - begun
            managers[way].wait()
            if turn > 1:  # The first ones touch fresh memory.
                found[way].append(seconds)
    for manager in managers.values():
        manager.close()
    return found


@click.command()
@click.option("--megabytes", default=500, show_default=True, help="The size of the tensors.")
@click.option("--turns", default=15, show_default=True, help="How many saves of each are measured.")
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Where to save.")
def main(megabytes: int, turns: int, directory: Path | None) -> None:
    """Saves by turns, and prints the medians of the durable times."""
    with tempfile.TemporaryDirectory(prefix="holdfast-finite-", dir=directory) as place:
        found = measure(Path(place), megabytes, turns)
    middle = {way: median(seconds) for way, seconds in found.items()}
    for way, seconds in found.items():
        click.echo(f"{way}: {middle[way]:.4f} s in the median, {min(seconds):.4f} s at best, {len(seconds)} saves")
    apart = [with_look / without - 1 for with_look, without in zip(*found.values(), strict=True)]
    click.echo(f"more: {median(apart):.1%} in the median of the turns")


if __name__ == "__main__":
    main()
