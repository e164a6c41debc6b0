"""Lets the ways of saving a framework's fit take turns, each in a fresh process a round."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frameworks import FRAMEWORKS, NOTHING
from benchmarks.harness.contender import Contender
from benchmarks.harness.results import LIMITS
from benchmarks.harness.turns import Bench, MakeOrder, Stretch, in_turn, make_cold
from benchmarks.one_process.parts import start_on_values


def name_restarts(framework: str, *, is_stream: bool = False) -> str:
    """**Pure.** The name of the restarts of a framework's fit in the results."""
    return f"{framework} restart{' of a stream' if is_stream else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done.

    Attributes:
        rounds: How many rounds there are.
        saves: How many saves of each fit count.
        interval_steps: How many steps there are between two saves.
        trained_steps: How many steps of the epoch were trained before a restart.
    """

    rounds: int = 5
    saves: int = 3
    interval_steps: int = 16
    trained_steps: int = 2000


def compare(bench: Bench, framework: str, plan: Plan, memory: int) -> None:
    """Measures restarts within an epoch, then what a save takes from training, and the machine's own limits.

    A restart is the first thing that its process does.
    """
    with _prepared(bench, framework, plan, is_stream=False) as left:
        for number in range(1, plan.rounds + 1):
            with _started(bench, framework, [LIMITS, NOTHING, *left], memory) as stretch:
                _measure_restarts(bench, framework, stretch, number, plan, left, is_stream=False)
                _measure_saves(stretch, number, plan)


def compare_streams(bench: Bench, framework: str, plan: Plan) -> None:
    """Measures restarts of a job whose samples come as a stream."""
    with _prepared(bench, framework, plan, is_stream=True) as left:
        for number in range(1, plan.rounds + 1):
            with _started(bench, framework, [NOTHING, *left]) as stretch:
                _measure_restarts(bench, framework, stretch, number, plan, left, is_stream=True)


@contextmanager
def _prepared(bench: Bench, framework: str, plan: Plan, *, is_stream: bool) -> Iterator[dict[str, Path]]:
    """The checkpoints of jobs that came to their end in the middle of an epoch, by the way of saving."""
    left = {name: bench.directory / f"{framework}-{name}-left" for name in FRAMEWORKS[framework].ways}
    try:
        with _started(bench, framework, list(left)) as stretch, ThreadPoolExecutor() as pool:
            live = stretch.live
            restarts = stretch.rename(name_restarts(framework, is_stream=is_stream))

            def prepare(name: str, number: int) -> dict[str, float]:
                contender = live[name]
                contender.order("prepare", steps=plan.trained_steps, is_stream=is_stream)
                _copy_names(contender.directory, left[name])
                return {}

            # Together, as nothing is measured, and most of the time goes by while samples are loaded.
            list(pool.map(lambda name: restarts.attempt(name, 0, prepare), list(live)))
        yield {name: place for name, place in left.items() if place.exists()}
    finally:
        for place in left.values():
            shutil.rmtree(place, ignore_errors=True)


def _measure_restarts(
    bench: Bench,
    framework: str,
    stretch: Stretch,
    number: int,
    plan: Plan,
    left: Mapping[str, Path],
    *,
    is_stream: bool,
) -> None:
    how = {"steps": plan.trained_steps, "is_stream": is_stream}

    def measure(name: str, number: int) -> dict[str, float]:
        contender = stretch.live[name]
        if name == NOTHING:
            return contender.order("begin", **how)
        # Each restart is that of the same job.
        _copy_names(left[name], contender.directory)
        make_cold(contender.directory)
        figures = contender.order("restart", **how)
        for entry in contender.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return figures

    restarts = stretch.rename(name_restarts(framework, is_stream=is_stream))
    for name in in_turn(stretch.live, number):
        if name != LIMITS:
            restarts.attempt(name, number, measure)


def _measure_saves(stretch: Stretch, number: int, plan: Plan) -> None:
    def measure(name: str, number: int) -> dict[str, float]:
        if name == LIMITS:
            return stretch.live[name].order("measure")
        return stretch.live[name].order("lose", saves=plan.saves, interval_steps=plan.interval_steps)

    for name in in_turn(stretch.live, number):
        if name != NOTHING:
            stretch.attempt(name, number, measure)


def _started(bench: Bench, framework: str, names: Sequence[str], memory: int = -1) -> AbstractContextManager[Stretch]:
    start_limits, make_limits = start_on_values(bench, "fit", memory)

    def start(name: str) -> Contender:
        return start_limits(name) if name == LIMITS else bench.start(framework, name)

    def make(name: str) -> MakeOrder:
        if name == LIMITS:
            return make_limits(name)
        place = str(bench.place(framework, name))
        fit = {"framework": framework, "way": name, "directory": place, "scale": bench.results.scale}
        return "benchmarks.frameworks.duties:FitDuties", fit

    return bench.started(framework, names, start, make)


def _copy_names(source: Path, target: Path) -> None:
    """Links to the saved files: a restart saves nothing, so that it stays as it is."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
