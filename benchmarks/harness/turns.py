"""Starts contenders, and lets them take turns: what drifts on the machine drifts under all of them."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import page_cache
from benchmarks.harness.contender import Contender, ContenderError, ContenderMissingError
from benchmarks.harness.guard import Guard, open_scratch
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import LIMITS, Results, Round, Shape
from benchmarks.states.values import Values
from benchmarks.states.workloads import Workload, place_tensors, state_bytes, state_shapes

Measure = Callable[[str, int], dict[str, float]]
"""Gives the figures of the contender of that name in a round of that number."""

_MAX_RESIDENT = 0.01
"""A restore counts as cold if no larger share of its files is in the page cache."""


@dataclass(slots=True)
class Bench:
    """One run.

    Attributes:
        results: What has been measured so far.
        directory: Where to write.
        guard: What cleans up if this process is killed.
        say: Called with a line about the progress.
        slice: Counts the stretches in which contenders ran side by side; ratios are taken within one.
    """

    results: Results
    directory: Path
    guard: Guard
    say: Callable[[str], None]
    slice: int = 0

    def place(self, workload: str, name: str) -> Path:
        """Where a contender writes."""
        return self.directory / f"{workload}-{name}".replace(" ", "-").replace(",", "")

    def start(self, workload: str, name: str, **options: Any) -> Contender:
        """Starts the process of one contender."""
        return Contender(name, self.place(workload, name), self.guard, **options)

    def keep(self, workload: str, name: str, number: int, figures: dict[str, float]) -> None:
        """Keeps the figures of a round."""
        self.results.rounds.append(
            Round(workload=workload, contender=name, number=number, slice=self.slice, figures=figures)
        )
        shown = [f"{key} {value:.3g}" for key, value in figures.items() if not key.endswith("bytes")]
        self.say(f"{workload}, round {number}, {name}: {', '.join(shown)}")

    def fail(self, workload: str, name: str, reason: str) -> None:
        """Keeps the reason why a contender has no figures."""
        self.results.failures.append((workload, name, reason))
        self.say(f"{workload}, {name}: failed: {reason}")

    @contextmanager
    def started(
        self, workload: str, names: Sequence[str], start: Callable[[str], Contender], make: Callable[[str], MakeOrder]
    ) -> Iterator[Stretch]:
        """Contenders that are ready, each in a process of its own; ends them.

        Args:
            workload: What they are measured with.
            names: Their names.
            start: Starts the process of one.
            make: What its duties are, and what they are made with.
        """
        contenders: dict[str, Contender] = {}
        try:
            # All at once: most of a start is reading libraries.
            for name in names:
                contenders[name] = start(name)
            yield self.open(workload, contenders, make)
            for contender in contenders.values():
                contender.close()
        finally:
            for contender in contenders.values():
                contender.kill()
                shutil.rmtree(contender.directory, ignore_errors=True)

    def open(self, workload: str, contenders: Mapping[str, Contender], make: Callable[[str], MakeOrder]) -> Stretch:
        """**Blocks.** Has contenders make their duties, all at once, and open what is measured one after the other."""
        self.slice += 1
        stretch = Stretch(self, workload, dict(contenders))
        for name, contender in contenders.items():
            place, arguments = make(name)
            if stretch.admit(name, contender.wait_started):
                contender.send("make", place=place, **arguments)
        for name, contender in list(stretch.live.items()):

            def begin(contender: Contender = contender) -> str:
                contender.receive("make")
                contender.open()
                return contender.note

            stretch.admit(name, begin)
        return stretch


@contextmanager
def open_bench(out: Path, scale: float, say: Callable[[str], None] | None = None) -> Iterator[Bench]:
    """A run that writes below `out`. A polite request to end ends its processes and removes its files, too.

    Args:
        out: Where to write.
        scale: The size of the workloads, 1 for the real size.
        say: Called with a line about the progress; by itself prints it, with the time.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begun_at = time.monotonic()

    def print_line(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun_at), 60)
        print(f"{minutes:3}:{seconds:02} {text}", file=sys.stderr, flush=True)

    try:
        with open_scratch(out) as (directory, guard):
            results = Results(machine=describe_machine(directory), scale=scale)
            yield Bench(results, directory, guard, say or print_line)
    finally:
        signal.signal(signal.SIGTERM, before)


MakeOrder = tuple[str, dict[str, Any]]
"""Where the duties of a contender are, as `module:name`, and what they are made with."""


class Stretch:
    """Contenders that run side by side, and take turns.

    Attributes:
        workload: What they are measured with.
        live: Those that take part, by name. Several may share the processes of one job.
    """

    def __init__(self, bench: Bench, workload: str, live: dict[str, Contender]) -> None:
        self._bench, self.workload = bench, workload
        self.live = live

    def rename(self, workload: str) -> Stretch:
        """The same contenders, whose figures are kept as those of another workload."""
        return Stretch(self._bench, workload, self.live)

    def admit(self, name: str, act: Callable[[], str | None]) -> bool:
        """Has a contender begin. One that cannot is left out; true if it can.

        Args:
            name: Its name.
            act: What it does; it may return what the contender makes durable by itself.
        """
        try:
            note = act()
        except ContenderMissingError as error:
            del self.live[name]
            self._bench.results.missing[name] = str(error)
            self._bench.say(f"{self.workload}, {name}: cannot be measured: {error}")
            return False
        except ContenderError as error:
            self._drop(name, str(error))
            return False
        if note:
            self._bench.results.makes_last[name] = note
        return True

    def attempt(self, name: str, number: int, measure: Measure) -> None:
        """Measures one contender; one that fails is left out from then on."""
        try:
            figures = measure(name, number)
        except ContenderError as error:
            self._drop(name, str(error))
        else:
            self._bench.keep(self.workload, name, number, figures)

    def go_rounds(
        self,
        rounds: int,
        measure: Measure,
        *,
        begin: Callable[[], object] = lambda: None,
        patience_seconds: float = math.inf,
        most_seconds: float = math.inf,
    ) -> None:
        """Lets all take turns, in one round that warms up and so many that count.

        Args:
            rounds: How many rounds count.
            measure: Measures one contender.
            begin: Called before each round.
            patience_seconds: One whose round takes longer is not so close to the others that its median would need
                more rounds, and has no more.
            most_seconds: After so long no further round begins, but for the first that counts.
        """
        begun_at = time.monotonic()
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() - begun_at > most_seconds:
                return
            begin()
            for name in in_turn(self.live, number):
                if name in self.live:
                    turned_at = time.monotonic()
                    self.attempt(name, number, measure)
                    if number > 0 and time.monotonic() - turned_at > patience_seconds:
                        self._dismiss(name)

    def _dismiss(self, name: str) -> None:
        """Leaves out one contender, and ends what it alone has opened."""
        contender = self.live.pop(name, None)
        if contender is None:
            return
        self._bench.say(f"{self.workload}, {name}: a round takes it so long that there are no more")
        if contender not in self.live.values():
            contender.close()
            shutil.rmtree(contender.directory, ignore_errors=True)

    def _drop(self, name: str, reason: str) -> None:
        """Ends one contender, and with it those that share its processes."""
        contender = self.live[name]
        contender.kill()
        for other in [one for one, place in self.live.items() if place is contender]:
            del self.live[other]
            why = reason if other == name else f"it shares the job of {name}, which failed"
            self._bench.fail(self.workload, other, why)
        shutil.rmtree(contender.directory, ignore_errors=True)


def in_turn(live: Iterable[str], number: int) -> list[str]:
    """**Pure.** The order of a round: the limits first, then the others, each time another one in front."""
    names = [name for name in live if name != LIMITS]
    first = number % len(names) if names else 0
    return [*([LIMITS] if LIMITS in live else []), *names[first:], *names[:first]]


def make_cold(directory: Path) -> None:
    """Drops files from the page cache.

    Raises:
        ContenderError: If they stay there.
    """
    resident = page_cache.drop(directory)
    if resident > _MAX_RESIDENT:
        raise ContenderError(f"{resident:.0%} of its files cannot be dropped from the page cache")


@contextmanager
def open_values(bench: Bench, workload: Workload) -> Iterator[tuple[Values, int]]:
    """The values of a workload, and the descriptor of the memory that holds them; notes its shape.

    After them there is as much memory again, for bare copies.
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
