"""Lets the contenders of several workers take turns, each in a job of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness import page_cache
from benchmarks.harness.contender import Contender, ContenderError
from benchmarks.harness.messages import Reply
from benchmarks.harness.results import LIMITS, Shape
from benchmarks.harness.turns import Bench, MakeOrder, Stretch, make_cold
from benchmarks.several_workers import (
    ALSO,
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

_ORDER_SECONDS: Final = 90.0
_PATIENCE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 1.0
_CHAIN_SAVES: Final = 3
_PARTS_OF_SAVES: Final = 4
"""A setup's saves may take so many times as long as its restores by another number of workers."""
_ROUND_STEPS: Final = 10
"""More saves than one contender makes in a round."""
_DUTIES: Final = "benchmarks.several_workers.duties"

MOST_ROUNDS: Final = 3
"""More would make the whole comparison take much longer."""


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """How much is done.

    Attributes:
        rounds: How many rounds count; one more comes before them.
        most_seconds: About how long it may all take: once a setup has had its share of the remaining time, no further
            round of it begins. One round counts at least.
        training_seconds: After so long no further round of training begins.
        interval_steps: How many steps of training there are between two saves.
        setups: The setups to measure, by name; empty for all.
        has_others: Whether another number of workers restores, too.
    """

    rounds: int = MOST_ROUNDS
    most_seconds: float = 540.0
    training_seconds: float = 90.0
    interval_steps: int = 10
    setups: Sequence[str] = ()
    has_others: bool = True


class Jobs:
    """Jobs side by side, which stay for several setups; one that has failed is started again for the next setup."""

    def __init__(self, bench: Bench, workers: int, members: Mapping[str, Sequence[str]]) -> None:
        """Starts the jobs, all at once: most of a start is reading libraries.

        Args:
            bench: The run.
            workers: How many workers each job has.
            members: The contenders of each job.
        """
        self._bench, self._workers, self._members = bench, workers, members
        self._broken: dict[str, str] = {}
        self._jobs = {job: self._start(job) for job in members}
        for job in members:
            self._wait_started(job)

    @contextmanager
    def opened(
        self, workload: str, names: Sequence[str], make: MakeOrder, saved: str = ""
    ) -> Iterator[tuple[Stretch, dict[str, list[Reply]]]]:
        """Has the jobs make their state, and those of the contenders open that can; closes them.

        Args:
            workload: What they are measured with.
            names: Their names.
            make: What the state is, and what it is made with.
            saved: The workload whose checkpoints they restore; by itself the same.

        Returns:
            Those that are open, and what the workers of each job hold.
        """
        self._bench.slice += 1
        stretch = Stretch(self._bench, workload, {})
        held: dict[str, list[Reply]] = {}
        for job, members in self._members.items():
            if asked := [name for name in members if name in names]:
                self._open(stretch, saved or workload, job, asked, make, held)
        try:
            yield stretch, held
        finally:
            for contender in dict.fromkeys(stretch.live.values()):
                try:
                    contender.order_each("close")
                except ContenderError as error:
                    self._bench.say(f"{workload}, {contender.name}: failed when it was closed: {error}")

    def _open(
        self,
        stretch: Stretch,
        saved: str,
        job: str,
        names: Sequence[str],
        make: MakeOrder,
        held: dict[str, list[Reply]],
    ) -> None:
        if job not in self._broken and self._jobs[job].has_ended:
            self._jobs[job] = self._start(job)
            self._wait_started(job)
        if job in self._broken:
            for name in names:
                self._bench.fail(stretch.workload, name, self._broken[job])
            return
        contender, (place, arguments) = self._jobs[job], make
        stretch.live |= dict.fromkeys(names, contender)

        def make_state() -> None:
            contender.order_each("make", place=f"{_DUTIES}:{place}", **arguments)
            held[job] = contender.order_each("measure_size")

        def open_way(name: str) -> str:
            directory = str(_place(self._bench, saved, name))
            contender.order_each("open_way", way=name, directory=directory)
            return contender.note

        if stretch.admit(names[0], make_state):
            for name in names:
                if name in stretch.live:
                    stretch.admit(name, partial(open_way, name))

    def _start(self, job: str) -> Contender:
        return self._bench.start(f"job-of-{self._workers}", job, workers=self._workers, order_seconds=_ORDER_SECONDS)

    def _wait_started(self, job: str) -> None:
        try:
            self._jobs[job].wait_started()
        except ContenderError as error:
            # Another try would take as long again.
            self._broken[job] = str(error)

    def end(self, end: Callable[[Contender], None]) -> None:
        """Ends all jobs."""
        for contender in self._jobs.values():
            end(contender)
            shutil.rmtree(contender.directory, ignore_errors=True)


@contextmanager
def _open_jobs(bench: Bench, workers: int, members: Mapping[str, Sequence[str]]) -> Iterator[Jobs]:
    """Jobs that are ready; ends them."""
    jobs = Jobs(bench, workers, members)
    try:
        yield jobs
        jobs.end(Contender.close)
    finally:
        jobs.end(Contender.kill)


@dataclass(slots=True)
class _Left:
    """The checkpoints of a setup, for another number of workers: step and version of each contender."""

    setup: Setup
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Shares:
    """Divides the remaining time among all that is still to be measured."""

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
        with _open_jobs(bench, workers, members) as jobs:
            if plan.has_others:
                waiting = _restore_left(bench, jobs, waiting, workers, plan, shares)
            for setup in setups:
                if setup.workers == workers:
                    waiting.append(_compare_setup(bench, jobs, setup, names, plan.rounds, shares))
    if plan.has_others:
        for workers in dict.fromkeys(other_number(left.setup.workers) for left in waiting):
            with _open_jobs(bench, workers, members) as jobs:
                waiting = _restore_left(bench, jobs, waiting, workers, plan, shares)


def compare_workers_training(bench: Bench, names: Sequence[str], plan: WorkersPlan) -> None:
    """Measures what a save takes from a training loop of two workers."""
    members = _members(TRAINING_JOBS, names)
    asked = [name for some in members.values() for name in some]
    try:
        with _open_jobs(bench, TRAINING_WORKERS, members) as jobs:
            make = ("WorkersTrainingDuties", {"scale": bench.results.scale})
            with jobs.opened(TRAINING, asked, make) as (stretch, held):
                for replies in held.values():
                    bench.results.shapes[TRAINING] = Shape(
                        title=f"a model in training by FSDP2, 2 workers, a save every {plan.interval_steps} steps",
                        size_bytes=int(sum(reply.figures["held_bytes"] for reply in replies)),
                        tensors=0,
                    )

                def train(name: str, number: int) -> dict[str, float]:
                    return stretch.live[name].order(
                        "train",
                        way=name,
                        first_step=number * _ROUND_STEPS + 1,
                        pairs=1,
                        # To warm up takes the saves, not the steps between them.
                        interval_steps=plan.interval_steps if number > 0 else 1,
                    )

                stretch.go_rounds(
                    plan.rounds, train, patience_seconds=_PATIENCE_SECONDS, most_seconds=plan.training_seconds
                )
    finally:
        shutil.rmtree(bench.directory / TRAINING, ignore_errors=True)


def _compare_setup(bench: Bench, jobs: Jobs, setup: Setup, names: Sequence[str], rounds: int, shares: _Shares) -> _Left:
    left, most_seconds = _Left(setup), shares.take(_PARTS_OF_SAVES)
    with jobs.opened(setup.name, [LIMITS, *names], _make_state(setup)) as (stretch, held):
        for replies in held.values():
            sizes = [reply.figures["held_bytes"] for reply in replies]
            size_bytes = max(sizes) if setup.is_replicated else sum(sizes)
            tensors = round(replies[0].figures["tensors"])
            bench.results.shapes[setup.name] = Shape(title=setup.title, size_bytes=int(size_bytes), tensors=tensors)

        def measure(name: str, number: int) -> dict[str, float]:
            if name == LIMITS:
                return stretch.live[name].order("bare")
            figures, step, version = _save_and_restore(bench, stretch.live[name], setup, name, number)
            left.steps[name] = step, version
            return figures

        stretch.go_rounds(rounds, measure, patience_seconds=_PATIENCE_SECONDS, most_seconds=most_seconds)
    return left


def _save_and_restore(
    bench: Bench, contender: Contender, setup: Setup, name: str, number: int
) -> tuple[dict[str, float], int, int]:
    """One contender's part of one round; the one that warms up has saves alone.

    Returns:
        Its figures, the step that it leaves, and the version of the values in it.
    """
    step, version = number * _ROUND_STEPS + 1, number + 1
    contender.order("change", version=version)
    # One that is synchronous has nothing that a third save could meet.
    count = _CHAIN_SAVES - 1 if name == DCP_SYNC else _CHAIN_SAVES
    chain = contender.order("save", way=name, step=step, count=count)
    step += count - 1
    # In the first round it is the first save of all that counts; later, those that have one right before them.
    counted = range(1) if number == 0 else range(1, count)
    figures = {key: median(chain[f"{key} {each}"] for each in counted) for key in ("stall", "durable")}
    if number > 0 and name != DCP_SYNC:
        step += 1
        alone = contender.order("save", way=name, step=step, count=1, pause_seconds=_PAUSE_SECONDS)
        figures |= {f"{key}_apart": alone[f"{key} 0"] for key in ("stall", "durable")}
    contender.order("retain", way=name, step=step)
    if name == DCP_SYNC:
        # Its files are those of DCP's other ways, and the code that reads them, too.
        if number == 1:
            _restore(bench, contender, setup, name, step, version, "warm")
    elif number > 0:
        for warmth in ("cold",) if setup.model else ("cold", "warm"):
            figures[f"restore_{warmth}"] = _restore(bench, contender, setup, name, step, version, warmth)
    return figures, step, version


def _restore(
    bench: Bench, contender: Contender, setup: Setup, name: str, step: int, version: int, warmth: str
) -> float:
    """One restore by the slowest worker, in seconds; what came back has been compared."""
    place = _place(bench, setup.name, name)
    (make_cold if warmth == "cold" else page_cache.fill)(place)
    return contender.order("restore", way=name, step=step, version=version)["restore"]


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
        names = [name for name in left.steps if name not in (DCP_SYNC, *STAYING)]
        bench.results.failures += [(workload, name, why) for name, why in STAYING.items() if name in left.steps]
        with jobs.opened(workload, [LIMITS, *names], _make_state(setup), setup.name) as (stretch, _):

            def measure(name: str, number: int, left: _Left = left, stretch: Stretch = stretch) -> dict[str, float]:
                contender = stretch.live[name]
                if name == LIMITS:
                    return contender.order("bare", reads_only=True)
                return {"restore_cold": _restore(bench, contender, left.setup, name, *left.steps[name], "cold")}

            seconds = shares.take(1)
            stretch.go_rounds(
                max(1, plan.rounds - 1), measure, patience_seconds=_PATIENCE_SECONDS, most_seconds=seconds
            )
        shutil.rmtree(bench.directory / setup.name, ignore_errors=True)
    return rest


def _make_state(setup: Setup) -> MakeOrder:
    return "WorkersDuties", {"setup": setup}


def _members(jobs: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """The contenders of each job that were asked for; without them the job is not needed."""
    known = {job: dict.fromkeys([*some, *ALSO.get(job, ())]) for job, some in jobs.items()}
    chosen = {job: [name for name in some if name == LIMITS or name in names] for job, some in known.items()}
    return {job: some for job, some in chosen.items() if some}


def _place(bench: Bench, workload: str, name: str) -> Path:
    return bench.directory / workload / name.replace(" ", "-").replace(",", "")
