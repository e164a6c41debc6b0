"""`python -m benchmarks.finite`: what it costs that a save looks for numbers that are not finite.

The same tensors are saved by turns as the parameters of a module, which must be finite, and as its buffers, which need
not be. What differs is how long a save takes until it is durable, and the time of the processor.
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


class Module(torch.nn.Module):
    """A module of parameters or of buffers."""

    def __init__(self, count: int, *, is_trained: bool) -> None:
        super().__init__()
        for number in range(count):
            tensor = torch.randn(_WIDTH, _WIDTH)
            if is_trained:
                self.register_parameter(f"t{number}", torch.nn.Parameter(tensor))
            else:
                self.register_buffer(f"t{number}", tensor)


def measure(place: Path, megabytes: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """**Blocks.** Returns for each save how long it took until durable, and the processor's time, by way."""
    count = max(round(megabytes * 1e6 / (4 * _WIDTH * _WIDTH)), 1)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    managers = {
        way: hf.CheckpointManager(
            place / str(number),
            hf.Checkpoint(module=Module(count, is_trained=number == 0)),
            keep=hf.Latest(1),
            cluster="alone",
        )
        for number, way in enumerate(_WAYS)
    }
    for turn in range(turns + 2):
        for way in _WAYS if turn % 2 else reversed(_WAYS):
            begun, worked = time.perf_counter(), time.process_time()
            managers[way].save(turn).wait_committed()
            durable = time.perf_counter() - begun
            managers[way].wait()
            if turn > 1:  # The first ones touch fresh memory.
                found[way].append((durable, time.process_time() - worked))
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
    for number, what in enumerate(("durable", "processor")):
        looked, left = ([save[number] for save in found[way]] for way in _WAYS)
        more = median(one / other - 1 for one, other in zip(looked, left, strict=True))
        click.echo(f"{what}: {median(looked):.4f} s looked through, {median(left):.4f} s not: {more:+.1%} by turns")


if __name__ == "__main__":
    main()
