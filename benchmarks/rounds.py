"""Compares saves and restores, and what saves cost in training."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from benchmarks import page_cache
from benchmarks.contender import Contender, ContenderError
from benchmarks.messages import Order
from benchmarks.peers import PEERS
from benchmarks.results import LIMITS, Shape
from benchmarks.turns import Bench, in_groups, in_turn
from benchmarks.values import Values
from benchmarks.workloads import Workload, make_workload, place_tensors, state_bytes, state_shapes

MAX_RESIDENT = 0.01
"""A restore counts as cold if no larger share of its files is in the page cache."""
_PATIENCE_SECONDS = 60.0
"""One whose round takes longer is not so close to the others that its median would need more rounds."""
_INTERVAL_STEPS = 10
_PAIRS = 3


def compare_saves(bench: Bench, workload_name: str, contenders: Sequence[str], rounds: int) -> None:
    """Measures stall, time until durable, restores and memory, and the machine's limits.

    All contenders save the same tensors in one piece of shared memory. Each round changes them; after each restore they
    are compared with what was saved.
    """
    with open_values(bench, make_workload(workload_name, bench.results.scale)) as (values, memory):
        for group in in_groups(contenders):
            with bench.started(
                workload_name,
                [LIMITS, *group],
                lambda name: bench.start(name, workload_name, memory, keep=1 if "holdfast" in name else None),
            ) as live:
                for number in range(rounds + 1):
                    values.change()
                    for name in in_turn(live, number):
                        begun_at = time.monotonic()
                        bench.attempt(workload_name, live, name, number, lambda one, n: _one(one, n, values))
                        if number > 0 and name in live and time.monotonic() - begun_at > _PATIENCE_SECONDS:
                            bench.dismiss(workload_name, live, name)


def compare_training(bench: Bench, contenders: Sequence[str], rounds: int) -> None:
    """Measures what a save takes from a training loop."""

    def train(contender: Contender, number: int) -> dict[str, float]:
        # To warm up takes the saves, not the steps between them.
        interval_steps = _INTERVAL_STEPS if number > 0 else 1
        figures = contender.order(
            Order(verb="train", step=number * 2 * _PAIRS + 1, pairs=_PAIRS, interval_steps=interval_steps)
        )
        size_bytes = int(figures.pop("size_bytes"))
        bench.results.shapes["training"] = Shape(
            title=f"a model in training, a save every {_INTERVAL_STEPS} steps", size_bytes=size_bytes, tensors=0
        )
        return figures

    with bench.started("training", contenders, lambda name: bench.start(name, "training")) as live:
        for number in range(rounds + 1):
            for name in in_turn(live, number):
                bench.attempt("training", live, name, number, train)


@contextmanager
def open_values(bench: Bench, workload: Workload) -> Iterator[tuple[Values, int]]:
    """The values of a workload, and the descriptor of the memory that they lie in; notes its shape.

    Behind them there is as much memory again, which bare copies go to.
    """
    places, memory_bytes = place_tensors(state_shapes(workload))
    bench.results.shapes[workload.name] = Shape(
        title=workload.title, size_bytes=state_bytes(places), tensors=len(places)
    )
    descriptor = os.memfd_create(f"holdfast-{workload.name}")
    try:
        os.ftruncate(descriptor, 2 * memory_bytes)
        with mmap.mmap(descriptor, memory_bytes) as memory:
            values = Values(memory, places)
            values.change()
            try:
                yield values, descriptor
            finally:
                values.release()
    finally:
        os.close(descriptor)


def restore_checked(contender: Contender, step: int, values: Values, warmth: str) -> dict[str, float]:
    """One restore, cold or warm, of what lies in the contender's directory; checks what came back."""
    if warmth == "cold":
        resident = page_cache.drop(contender.directory)
        if resident > MAX_RESIDENT:
            raise ContenderError(f"{resident:.0%} of its files cannot be dropped from the page cache")
    else:
        page_cache.fill(contender.directory)
    values.wipe()
    figures = contender.order(Order(verb="restore", step=step))
    if not values.are_back():
        raise ContenderError("what was restored is not what was saved")
    return figures


def _one(contender: Contender, number: int, values: Values) -> dict[str, float]:
    """One contender's part of one round; the one that warms up has no restore."""
    if contender.name == LIMITS:
        return contender.order(Order(verb="measure"))
    step = number * 10 + 1
    # Two bare copies for each save, under the same conditions: in the same process, of tensors that were just read, one
    # right before it, into memory that was last touched a round ago as the save's was, and one right after it. The pace
    # of the memory changes from second to second, and one alone would say little.
    contender.order(Order(verb="touch"))
    before = contender.order(Order(verb="copy"))
    saved = contender.order(Order(verb="save", step=step))
    after = contender.order(Order(verb="copy"))
    if number == 0:
        for again in range(1, int(saved["settling_saves"])):
            contender.order(Order(verb="remove", step=step))
            step += again
            contender.order(Order(verb="save", step=step))
    figures = {key: saved[key] for key in ("stall", "held", "durable")}
    figures["copy"] = fmean([before["copy"], after["copy"]])
    figures["save_extra_bytes"] = saved["extra_bytes"]
    figures["disk_bytes"] = float(page_cache.count_bytes(contender.directory))
    same_reader = bool(PEERS[contender.name].reads_as)
    if same_reader and number == 1:
        restore_checked(contender, step, values, "warm")
    if not same_reader and number > 0:
        for warmth in ("cold", "warm"):
            restored = restore_checked(contender, step, values, warmth)
            figures[f"restore_{warmth}"] = restored.pop("restore")
            figures["restore_extra_bytes"] = max(figures.get("restore_extra_bytes", 0.0), restored.pop("extra_bytes"))
            figures |= {f"{part}_{warmth}": seconds for part, seconds in restored.items()}
    contender.order(Order(verb="remove", step=step))
    return figures
