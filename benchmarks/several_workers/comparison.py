"""Lets the contenders of several workers take turns, each in a job of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import page_cache
from benchmarks.contender import ContenderError
from benchmarks.results import LIMITS, Shape
from benchmarks.rounds import MAX_RESIDENT
from benchmarks.several_workers import (
    DCP_SYNC,
    JOBS,
    STAYING,
    TRAINING,
    TRAINING_JOBS,
    TRAINING_WORKERS,
    Setup,
    list_setups,
    name_restore,
    other_number,
)
from benchmarks.several_workers.jobs import Jobs, open_jobs
from benchmarks.several_workers.orders import WorkerReply, WorkersOrder
from benchmarks.turns import Bench, in_turn

Measure = Callable[[str, int], dict[str, float]]
"""Gives the figures of a contender in a round."""

_PATIENCE_SECONDS: Final = 30.0
"""One whose round takes longer is not so close to the others that its median would need more rounds."""
_PAUSE_SECONDS: Final = 1.0
_CHAIN_SAVES: Final = 3
_PARTS_OF_SAVES: Final = 4
"""A setup's saves may take so many times as long as its restores by another number of workers."""
_ROUND_STEPS: Final = 10
"""More saves than one contender makes in a round."""


MOST_ROUNDS: Final = 3
"""More would make the whole comparison take much longer."""


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """How much is done.

    Attributes:
        rounds: How many rounds count; one more comes before them.
        most_seconds: About how long it may all take: once a setup has had its share of what is left, no further round
            of it begins. One round counts at least.
        training_seconds: After so long no further round of training begins.
        interval_steps: How many steps of training lie between two saves.
        setups: What is saved, by name; empty for all.
        has_others: Whether another number of workers restores, too.
    """

    rounds: int = MOST_ROUNDS
    most_seconds: float = 540.0
    training_seconds: float = 90.0
    interval_steps: int = 10
    setups: Sequence[str] = ()
    has_others: bool = True


@dataclass(slots=True)
class _Left:
    """What the contenders have left of a setup, for another number of workers: the step and the version of each."""

    setup: Setup
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Shares:
    """Divides the time that is left among what is still to be measured."""

    def __init__(self, most_seconds: float, parts: int) -> None:
        """So many parts have so much time together."""
        self._ends_at = time.monotonic() + most_seconds
        self._parts = parts

    def take(self, parts: int) -> float:
        """How many seconds the next parts may take."""
        seconds = max(0.0, self._ends_at - time.monotonic()) * parts / max(self._parts, 1)
        self._parts -= parts
        return seconds


def compare_workers(bench: Bench, names: Sequence[str], plan: WorkersPlan) -> None:
    """Measures saves by 2 and by 4 workers, and restores by as many and by another number of workers."""
    setups = [setup for setup in list_setups(bench.results.scale) if setup.name in plan.setups or not plan.setups]
    members = _members(JOBS, names)
    waiting: list[_Left] = []
    shares = _Shares(plan.most_seconds, len(setups) * (_PARTS_OF_SAVES + (1 if plan.has_others else 0)))
    for workers in dict.fromkeys(setup.workers for setup in setups):
        with open_jobs(bench, workers, members) as jobs:
            if plan.has_others:
                waiting = _restore_left(bench, jobs, waiting, workers, plan, shares)
            for setup in setups:
                if setup.workers == workers:
                    waiting.append(_compare_setup(bench, jobs, setup, names, plan.rounds, shares))
    if plan.has_others:
        for workers in dict.fromkeys(other_number(left.setup.workers) for left in waiting):
            with open_jobs(bench, workers, members) as jobs:
                waiting = _restore_left(bench, jobs, waiting, workers, plan, shares)


def compare_workers_training(bench: Bench, names: Sequence[str], plan: WorkersPlan) -> None:
    """Measures what a save takes from a training loop of two workers."""
    members = _members(TRAINING_JOBS, names)

    def open_one(name: str) -> WorkersOrder:
        place = _place(bench, TRAINING, name)
        return WorkersOrder(verb="open_training", way=name, directory=str(place), scale=bench.results.scale)

    def train(name: str, number: int) -> dict[str, float]:
        # To warm up takes the saves, not the steps between them.
        order = WorkersOrder(
            verb="train",
            way=name,
            step=number * _ROUND_STEPS + 1,
            count=1,
            interval_steps=plan.interval_steps if number > 0 else 1,
        )
        replies = jobs.order(name, order)
        held_bytes = sum(reply.figures.pop("held_bytes")[0] for reply in replies)
        bench.results.shapes[TRAINING] = Shape(
            title=f"a model in training by FSDP2, 2 workers, a save every {plan.interval_steps} steps",
            size_bytes=int(held_bytes),
            tensors=0,
        )
        return {key: values[0] for key, values in _slowest(replies).items()}

    try:
        with open_jobs(bench, TRAINING_WORKERS, members) as jobs:
            with jobs.opened(TRAINING, [name for some in members.values() for name in some], open_one):
                _go_round(jobs, TRAINING, plan.rounds, plan.training_seconds, train)
    finally:
        shutil.rmtree(bench.directory / TRAINING, ignore_errors=True)


def _compare_setup(bench: Bench, jobs: Jobs, setup: Setup, names: Sequence[str], rounds: int, shares: _Shares) -> _Left:
    left, most_seconds = _Left(setup), shares.take(_PARTS_OF_SAVES)

    def measure(name: str, number: int) -> dict[str, float]:
        if name == LIMITS:
            return _bare(jobs, full=True)
        figures, step, version = _save_and_restore(bench, jobs, setup, name, number)
        left.steps[name] = step, version
        return figures

    with jobs.opened(setup.name, [LIMITS, *names], partial(_open_order, bench, setup)) as said:
        _note_shape(bench, setup, said)
        _go_round(jobs, setup.name, rounds, most_seconds, measure)
    return left


def _save_and_restore(
    bench: Bench, jobs: Jobs, setup: Setup, name: str, number: int
) -> tuple[dict[str, float], int, int]:
    """One contender's part of one round; the one that warms up has saves alone.

    Returns:
        Its figures, the step that it leaves, and the version of the values in it.
    """
    step, version = number * _ROUND_STEPS + 1, number + 1
    jobs.order(name, WorkersOrder(verb="change", version=version))
    # One that is synchronous has nothing that a third save could meet.
    count = _CHAIN_SAVES - 1 if name == DCP_SYNC else _CHAIN_SAVES
    chain = _slowest(jobs.order(name, WorkersOrder(verb="save", way=name, step=step, count=count)))
    step += count - 1
    # In the first round it is the first save of all that says something; later, those that have one right before them.
    figures = {key: median(values[:1] if number == 0 else values[1:]) for key, values in chain.items()}
    if number > 0 and name != DCP_SYNC:
        step += 1
        order = WorkersOrder(verb="save", way=name, step=step, count=1, pause_seconds=_PAUSE_SECONDS)
        apart = _slowest(jobs.order(name, order))
        figures |= {f"{key}_apart": values[0] for key, values in apart.items()}
    jobs.order(name, WorkersOrder(verb="retain", way=name, step=step))
    if name == DCP_SYNC:
        # Its files are those of DCP's other ways, and the code that reads them, too.
        if number == 1:
            _restore(bench, jobs, setup, name, step, version, "warm")
    elif number > 0:
        for warmth in ("cold",) if setup.model else ("cold", "warm"):
            figures[f"restore_{warmth}"] = _restore(bench, jobs, setup, name, step, version, warmth)
    return figures, step, version


def _restore(bench: Bench, jobs: Jobs, setup: Setup, name: str, step: int, version: int, warmth: str) -> float:
    """One restore by the slowest worker, in seconds; what came back has been compared."""
    place = _place(bench, setup.name, name)
    if warmth == "warm":
        page_cache.fill(place)
    elif (resident := page_cache.drop(place)) > MAX_RESIDENT:
        raise ContenderError(f"{resident:.0%} of its files cannot be dropped from the page cache")
    order = WorkersOrder(verb="restore", way=name, step=step, version=version)
    return _slowest(jobs.order(name, order))["restore"][0]


def _restore_left(
    bench: Bench, jobs: Jobs, waiting: list[_Left], workers: int, plan: WorkersPlan, shares: _Shares
) -> list[_Left]:
    """Restores what jobs of another number of workers have left; gives what still waits for yet another number."""
    rest = []
    for left in waiting:
        setup, workload = left.setup, name_restore(left.setup)
        if other_number(setup.workers) != workers:
            rest.append(left)
            continue

        def measure(name: str, number: int, left: _Left = left) -> dict[str, float]:
            if name == LIMITS:
                return _bare(jobs, full=False)
            return {"restore_cold": _restore(bench, jobs, left.setup, name, *left.steps[name], "cold")}

        names = [name for name in left.steps if name not in (DCP_SYNC, *STAYING)]
        bench.results.failures += [(workload, name, why) for name, why in STAYING.items() if name in left.steps]
        with jobs.opened(workload, [LIMITS, *names], partial(_open_order, bench, setup)):
            _go_round(jobs, workload, max(1, plan.rounds - 1), shares.take(1), measure)
        shutil.rmtree(bench.directory / setup.name, ignore_errors=True)
    return rest


def _go_round(jobs: Jobs, workload: str, rounds: int, most_seconds: float, measure: Measure) -> None:
    begun_at = time.monotonic()
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() - begun_at > most_seconds:
            return
        for name in in_turn(jobs.live, number):
            if name in jobs.live:
                turned_at = time.monotonic()
                jobs.attempt(workload, name, number, measure)
                if number > 0 and name in jobs.live and time.monotonic() - turned_at > _PATIENCE_SECONDS:
                    jobs.dismiss(workload, name)


def _bare(jobs: Jobs, *, full: bool) -> dict[str, float]:
    replies = jobs.order(LIMITS, WorkersOrder(verb="bare", way=LIMITS, count=int(full)))
    return {key: values[0] for key, values in _slowest(replies).items()}


def _slowest(replies: Sequence[WorkerReply]) -> dict[str, list[float]]:
    """**Pure.** What the slowest worker took, each time."""
    keys = replies[0].figures
    return {key: [max(values) for values in zip(*(one.figures[key] for one in replies), strict=True)] for key in keys}


def _open_order(bench: Bench, setup: Setup, name: str) -> WorkersOrder:
    return WorkersOrder(verb="open", way=name, directory=str(_place(bench, setup.name, name)), setup=setup)


def _note_shape(bench: Bench, setup: Setup, said: Mapping[str, Sequence[WorkerReply]]) -> None:
    for replies in said.values():
        held = [reply.figures["held_bytes"][0] for reply in replies]
        size_bytes = max(held) if setup.is_replicated else sum(held)
        tensors = round(replies[0].figures["tensors"][0])
        bench.results.shapes[setup.name] = Shape(title=setup.title, size_bytes=int(size_bytes), tensors=tensors)


def _members(jobs: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """The contenders of each job that were asked for; without them the job is not needed."""
    chosen = {job: [name for name in some if name == LIMITS or name in names] for job, some in jobs.items()}
    return {job: some for job, some in chosen.items() if some}


def _place(bench: Bench, workload: str, name: str) -> Path:
    return bench.directory / workload / name.replace(" ", "-").replace(",", "")
