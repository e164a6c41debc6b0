"""Runs the contenders by turns, so that what drifts on the machine drifts under all of them alike."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import page_cache
from benchmarks.contender import Contender, ContenderError
from benchmarks.messages import Order, Start
from benchmarks.results import Results, Round, Shape
from benchmarks.workloads import make_workload, place_tensors, state_bytes, state_shapes

Say = Callable[[str], None]
MAX_RESIDENT = 0.01
"""A restore counts as cold if no larger share of its files is in the page cache."""


def compare_saves(
    results: Results, workload_name: str, contenders: Sequence[str], rounds: int, directory: Path, say: Say
) -> None:
    """Measures stall, time until durable, restores and memory, and the machine's limits, into `results`.

    All contenders save the same tensors in one piece of shared memory. Each round changes them; after each restore they
    are compared with what was saved.
    """
    workload = make_workload(workload_name, results.scale)
    places, memory_bytes = place_tensors(state_shapes(workload))
    results.shapes[workload_name] = Shape(title=workload.title, size_bytes=state_bytes(places), tensors=len(places))
    descriptor = os.memfd_create(f"holdfast-{workload_name}")
    try:
        os.ftruncate(descriptor, memory_bytes)
        with mmap.mmap(descriptor, memory_bytes) as memory:
            values = _Values(memory, [(place.begin, place.end) for place in places])
            values.change()

            def start(name: str) -> Contender:
                return Contender(
                    Start(
                        contender=name,
                        workload=workload_name,
                        scale=results.scale,
                        directory=str(directory / name.replace(" ", "-").replace(",", "")),
                        memory=descriptor,
                    )
                )

            with _started(results, workload_name, ["limits", *contenders], start, say) as live:
                for number in range(rounds + 1):
                    values.change()
                    for name in _in_turn(live, number):
                        _attempt(results, workload_name, live, name, number, say, lambda one, n: _one(one, n, values))
            values.release()
    finally:
        os.close(descriptor)


def compare_training(
    results: Results,
    contenders: Sequence[str],
    rounds: int,
    directory: Path,
    say: Say,
    *,
    saves: int = 2,
    interval_steps: int = 10,
) -> None:
    """Measures what a save takes from a training loop, into `results`."""

    def start(name: str) -> Contender:
        place = directory / f"training-{name.replace(' ', '-').replace(',', '')}"
        return Contender(
            Start(contender=name, workload="training", scale=results.scale, directory=str(place), memory=-1)
        )

    def train(contender: Contender, number: int) -> dict[str, float]:
        figures = contender.order(Order(verb="train", saves=saves, interval_steps=interval_steps))
        size_bytes = int(figures.pop("size_bytes"))
        results.shapes["training"] = Shape(
            title=f"a model in training, a save every {interval_steps} steps", size_bytes=size_bytes, tensors=0
        )
        return figures

    with _started(results, "training", contenders, start, say) as live:
        for number in range(rounds + 1):
            for name in _in_turn(live, number):
                _attempt(results, "training", live, name, number, say, train)


class _Values:
    """The bytes that all contenders save and restore."""

    def __init__(self, memory: mmap.mmap, places: Sequence[tuple[int, int]]) -> None:
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._places = places
        self._random = np.random.default_rng(0)
        self.digest = ""

    def change(self) -> None:
        """Gives every tensor new values that do not compress, and are numbers."""
        block = self._random.standard_normal(1 << 18, dtype=np.float32).view(np.uint8)
        for begin, end in self._places:
            for offset in range(begin, end, block.nbytes):
                part = min(block.nbytes, end - offset)
                self._bytes[offset : offset + part] = block[:part]
        self.digest = self._digest()

    def wipe(self) -> None:
        """Sets all to zero, so that what a restore leaves out shows."""
        self._bytes[:] = 0

    def check(self) -> None:
        """Compares with what was there when `change` was last called."""
        if self._digest() != self.digest:
            raise ContenderError("what was restored is not what was saved")

    def release(self) -> None:
        """Lets go of the memory, so that it can be closed."""
        del self._bytes

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._bytes.data)


def _one(contender: Contender, number: int, values: _Values) -> dict[str, float]:
    """One contender's part of one round."""
    if contender.name == "limits":
        return contender.order(Order(verb="measure"))
    saved = contender.order(Order(verb="save", step=number + 1))
    figures = {"stall": saved["stall"], "durable": saved["durable"], "save_extra_bytes": saved["extra_bytes"]}
    figures["disk_bytes"] = float(sum(path.stat().st_size for path in contender.directory.rglob("*") if path.is_file()))
    for warmth in ("cold", "warm"):
        if warmth == "cold":
            resident = page_cache.drop(contender.directory)
            if resident > MAX_RESIDENT:
                raise ContenderError(f"{resident:.0%} of its files cannot be dropped from the page cache")
        else:
            page_cache.fill(contender.directory)
        values.wipe()
        restored = contender.order(Order(verb="restore", step=number + 1))
        values.check()
        figures[f"restore_{warmth}"] = restored.pop("restore")
        figures["restore_extra_bytes"] = max(figures.get("restore_extra_bytes", 0.0), restored.pop("extra_bytes"))
        figures |= {f"{part}_{warmth}": seconds for part, seconds in restored.items()}
    contender.order(Order(verb="remove", step=number + 1))
    return figures


def _in_turn(live: dict[str, Contender], number: int) -> list[str]:
    """The contenders in the order of this round: the limits first, then the others, each time another one in front."""
    names = [name for name in live if name != "limits"]
    first = number % len(names) if names else 0
    return [*(["limits"] if "limits" in live else []), *names[first:], *names[:first]]


def _attempt(
    results: Results,
    workload: str,
    live: dict[str, Contender],
    name: str,
    number: int,
    say: Say,
    measure: Callable[[Contender, int], dict[str, float]],
) -> None:
    """Measures one contender; one that fails is out of this workload."""
    try:
        figures = measure(live[name], number)
    except ContenderError as error:
        contender = live.pop(name)
        contender.kill()
        shutil.rmtree(contender.directory, ignore_errors=True)
        results.failures.append((workload, name, str(error)))
        say(f"{workload}, {name}: failed: {error}")
        return
    results.rounds.append(Round(workload=workload, contender=name, number=number, figures=figures))
    shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.items() if not key.endswith("bytes"))
    say(f"{workload}, round {number}, {name}: {shown}")


@contextmanager
def _started(
    results: Results, workload: str, names: Sequence[str], start: Callable[[str], Contender], say: Say
) -> Iterator[dict[str, Contender]]:
    live: dict[str, Contender] = {}
    try:
        # All at once: most of a start is reading libraries.
        for name in names:
            live[name] = start(name)
        for name in names:
            try:
                note = live[name].wait_ready()
            except ContenderError as error:
                del live[name]
                results.failures.append((workload, name, str(error)))
                say(f"{workload}, {name}: cannot be measured: {error}")
            else:
                if note:
                    results.makes_last[name] = note
        yield live
    finally:
        for contender in live.values():
            contender.close()
            shutil.rmtree(contender.directory, ignore_errors=True)
