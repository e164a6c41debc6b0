"""Lets the ways of saving a framework's fit take turns, each in a fresh process a round."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page_cache
from benchmarks.contender import Contender, ContenderError
from benchmarks.frameworks import FRAMEWORKS, NOTHING
from benchmarks.messages import Order
from benchmarks.results import LIMITS
from benchmarks.rounds import MAX_RESIDENT
from benchmarks.turns import Bench, in_turn


def name_restarts(framework: str, *, is_stream: bool = False) -> str:
    """**Pure.** What the results call the restarts of a framework's fit."""
    return f"{framework} restart{' of a stream' if is_stream else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done.

    Attributes:
        rounds: How many rounds there are.
        saves: How many saves of each fit count.
        interval_steps: How many steps lie between two saves.
        trained_steps: How many steps of the epoch were trained before a restart.
    """

    rounds: int = 5
    saves: int = 3
    interval_steps: int = 16
    trained_steps: int = 2000


def compare(bench: Bench, framework: str, plan: Plan, memory: int) -> None:
    """Measures restarts within an epoch, then what a save takes from training, and the machine's own limits beside it.

    A restart is the first thing that its process does.
    """
    with _prepared(bench, framework, plan, is_stream=False) as left:
        for number in range(1, plan.rounds + 1):
            with _started(bench, framework, [LIMITS, NOTHING, *left], memory) as live:
                _measure_restarts(bench, framework, live, number, plan, left, is_stream=False)
                _measure_saves(bench, framework, live, number, plan)


def compare_streams(bench: Bench, framework: str, plan: Plan) -> None:
    """Measures restarts of a job whose samples come as a stream."""
    with _prepared(bench, framework, plan, is_stream=True) as left:
        for number in range(1, plan.rounds + 1):
            with _started(bench, framework, [NOTHING, *left]) as live:
                _measure_restarts(bench, framework, live, number, plan, left, is_stream=True)


@contextmanager
def _prepared(bench: Bench, framework: str, plan: Plan, *, is_stream: bool) -> Iterator[dict[str, Path]]:
    """What jobs have left that came to their end in the middle of an epoch, by the way of saving."""
    left = {name: bench.directory / f"{framework}-{name}-left" for name in FRAMEWORKS[framework].ways}

    def prepare(contender: Contender, number: int) -> dict[str, float]:
        contender.order(Order(verb="prepare", step=plan.trained_steps, is_stream=is_stream))
        _copy_names(contender.directory, left[contender.name])
        return {}

    part = name_restarts(framework, is_stream=is_stream)
    try:
        with _started(bench, framework, list(left)) as live, ThreadPoolExecutor() as pool:
            # Together, as nothing is measured, and most of the time goes by while samples are loaded.
            list(pool.map(lambda name: bench.attempt(part, live, name, 0, prepare), list(live)))
        yield {name: place for name, place in left.items() if place.exists()}
    finally:
        for place in left.values():
            shutil.rmtree(place, ignore_errors=True)


def _measure_restarts(
    bench: Bench,
    framework: str,
    live: dict[str, Contender],
    number: int,
    plan: Plan,
    left: Mapping[str, Path],
    *,
    is_stream: bool,
) -> None:
    def measure(contender: Contender, number: int) -> dict[str, float]:
        if contender.name == NOTHING:
            return contender.order(Order(verb="begin", step=plan.trained_steps, is_stream=is_stream))
        # Each restart is that of the same job.
        _copy_names(left[contender.name], contender.directory)
        resident = page_cache.drop(contender.directory)
        if resident > MAX_RESIDENT:
            raise ContenderError(f"{resident:.0%} of its files cannot be dropped from the page cache")
        figures = contender.order(Order(verb="restart", step=plan.trained_steps, is_stream=is_stream))
        for entry in contender.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return figures

    for name in in_turn(live, number):
        if name != LIMITS:
            bench.attempt(name_restarts(framework, is_stream=is_stream), live, name, number, measure)


def _measure_saves(bench: Bench, framework: str, live: dict[str, Contender], number: int, plan: Plan) -> None:
    def measure(contender: Contender, number: int) -> dict[str, float]:
        if contender.name == LIMITS:
            return contender.order(Order(verb="measure"))
        return contender.order(Order(verb="lose", saves=plan.saves, interval_steps=plan.interval_steps))

    for name in in_turn(live, number):
        if name != NOTHING:
            bench.attempt(framework, live, name, number, measure)


def _started(
    bench: Bench, framework: str, names: Sequence[str], memory: int = -1
) -> AbstractContextManager[dict[str, Contender]]:
    def start(name: str) -> Contender:
        return bench.start(name, "fit", memory) if name == LIMITS else bench.start(name, framework)

    return bench.started(framework, names, start)


def _copy_names(source: Path, target: Path) -> None:
    """What was saved under other names: a restart saves nothing, so that it stays as it is."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
