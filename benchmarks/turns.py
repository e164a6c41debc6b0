"""Starts contenders, and lets them take turns: what drifts on the machine drifts under all of them alike."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.contender import Contender, ContenderError, ContenderMissingError
from benchmarks.guard import Guard
from benchmarks.messages import Start
from benchmarks.peers import PEERS
from benchmarks.results import LIMITS, Results, Round


@dataclass(slots=True)
class Bench:
    """One run.

    Attributes:
        results: What has been measured so far.
        directory: Where to write.
        guard: What cleans up if this process is killed.
        say: Is told of progress.
        slice: Counts the stretches in which contenders ran side by side; ratios are taken within one.
    """

    results: Results
    directory: Path
    guard: Guard
    say: Callable[[str], None]
    slice: int = 0

    def start(self, name: str, workload: str, memory: int = -1, keep: int | None = None) -> Contender:
        """Starts one contender; it is not ready yet."""
        place = self.directory / f"{workload}-{name.replace(' ', '-').replace(',', '')}"
        start = Start(
            contender=name,
            workload=workload,
            scale=self.results.scale,
            directory=str(place),
            memory=memory,
            keep=keep,
        )
        return Contender(start, self.guard)

    def attempt(
        self,
        workload: str,
        live: dict[str, Contender],
        name: str,
        number: int,
        measure: Callable[[Contender, int], dict[str, float]],
    ) -> None:
        """Measures one contender; one that fails is out of this workload."""
        try:
            figures = measure(live[name], number)
        except ContenderError as error:
            contender = live.pop(name)
            contender.kill()
            shutil.rmtree(contender.directory, ignore_errors=True)
            self.results.failures.append((workload, name, str(error)))
            self.say(f"{workload}, {name}: failed: {error}")
            return
        self.results.rounds.append(
            Round(workload=workload, contender=name, number=number, slice=self.slice, figures=figures)
        )
        shown = [f"{key} {value:.3g}" for key, value in figures.items() if not key.endswith("bytes")]
        self.say(f"{workload}, round {number}, {name}: {', '.join(shown)}")

    def dismiss(self, workload: str, live: dict[str, Contender], name: str) -> None:
        """Ends one contender before the others."""
        self.say(f"{workload}, {name}: a round takes it so long that there are no more")
        contender = live.pop(name)
        contender.close()
        shutil.rmtree(contender.directory, ignore_errors=True)

    @contextmanager
    def started(
        self, workload: str, names: Sequence[str], start: Callable[[str], Contender]
    ) -> Iterator[dict[str, Contender]]:
        """Contenders that are ready, side by side; ends them."""
        self.slice += 1
        live: dict[str, Contender] = {}
        try:
            # All at once: most of a start is reading libraries.
            for name in names:
                live[name] = start(name)
            for name in names:
                self._wait_ready(workload, live, name)
            yield live
            for contender in live.values():
                contender.close()
        finally:
            for contender in live.values():
                contender.kill()
                shutil.rmtree(contender.directory, ignore_errors=True)

    def _wait_ready(self, workload: str, live: dict[str, Contender], name: str) -> None:
        try:
            note = live[name].wait_ready()
        except ContenderError as error:
            del live[name]
            if isinstance(error, ContenderMissingError):
                self.results.missing[name] = str(error)
            else:
                self.results.failures.append((workload, name, str(error)))
            self.say(f"{workload}, {name}: cannot be measured: {error}")
        else:
            if note:
                self.results.makes_last[name] = note


def in_groups(names: Sequence[str]) -> list[list[str]]:
    """**Pure.** The contenders that may be live at the same time, together."""
    return [list(group) for _, group in groupby(names, key=lambda name: PEERS[name].group)]


def in_turn(live: Iterable[str], number: int) -> list[str]:
    """The contenders in the order of this round: the limits first, then the others, each time another one in front."""
    names = [name for name in live if name != LIMITS]
    first = number % len(names) if names else 0
    return [*([LIMITS] if LIMITS in live else []), *names[first:], *names[:first]]
