"""Where the time of a run went, over all of its starts, from its journal of events."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from holdfast.events.kinds import Clocked, Committed, Event, PartsWritten
from holdfast.numbers import time_text
from holdfast.policies.saving import daly_interval_seconds, estimate_failure_seconds

TIMED: Final = (Clocked, Committed, PartsWritten)
"""The events that are summed up."""

_MEASURED_SAVES: Final = 20
"""The newest saves, of which the cost of one is the median."""


WORDS: Final = {
    "train": "training", "evaluate": "evaluation", "data": "waiting for data", "save": "stopped by saves",
    "restore": "restores", "setup": "imports and set-up", "leave": "last saves", "lost": "work done twice",
    "away": "between starts",
}  # fmt: skip
"""Each field of `TimeShares`, for people."""


class StartTimes(NamedTuple):
    """The time of one start; all but the first two, the steps and the last in seconds.

    Attributes:
        begun_at_unix_seconds: When its process began.
        ended_at_unix_seconds: When it last recorded its times: at its newest commit, or at its end.
        away: Between the last record of the start before and this start, without `lost`.
        lost: The work that was done twice, as it was not saved: estimated by the steps that this start has repeated.
        repeated_seconds: The part of `lost` that is in the time of this start; the rest is in the gap before it.
        setup: Imports, all else before the restore, and what the first step takes longer than others.
        restore: The restore.
        train: Steps, and the program's own code.
        evaluate: Evaluations.
        data: Waits for data.
        save: The time for which saves stopped training.
        leave: The end, with the last save.
        first_step: How many steps were complete when it began.
        step: How many were complete at its last record.
        repeated_steps: How many of them were done before.
        is_whole: True if it was left without an error; False if it died or failed, or goes on.
        end: How it ended, for people.
    """

    begun_at_unix_seconds: float
    ended_at_unix_seconds: float
    away: float
    lost: float
    repeated_seconds: float
    setup: float
    restore: float
    train: float
    evaluate: float
    data: float
    save: float
    leave: float
    first_step: int
    step: int
    repeated_steps: int
    is_whole: bool
    end: str


class TimeShares(NamedTuple):
    """The time of all starts together, in seconds; the sum is the time from the first start to the last record."""

    train: float
    evaluate: float
    data: float
    save: float
    restore: float
    setup: float
    leave: float
    lost: float
    away: float


class WorkerTimes(NamedTuple):
    """How long one of several workers took for its parts of saves, in the median of those that name it.

    Attributes:
        rank: The worker.
        saves: How many saves name it.
        last: In how many of them its part was durable last.
        blocked_seconds: How long its training was blocked.
        background_seconds: How long the rest took until its part was durable.
        slowest_seconds: The longest of these.
        size_bytes: The size of what it wrote.
    """

    rank: int
    saves: int
    last: int
    blocked_seconds: float
    background_seconds: float
    slowest_seconds: float
    size_bytes: float


class RunTimes(NamedTuple):
    """The times of a run.

    Attributes:
        starts: Its starts, in order, as far back as its journal goes.
        save_seconds: How long a save stops training, in the median of the newest ones; None without one.
        interval_seconds: The time between two commits of one start, in the median; None if there are no two.
        return_seconds: From the last record of a start that died to the next one's training, without the lost work, in
            the median; None if none has died.
        failure_seconds: The time between two failures, as far as it can be estimated.
        workers: Of several workers, the times of each, by rank.
    """

    starts: tuple[StartTimes, ...]
    save_seconds: float | None
    interval_seconds: float | None
    return_seconds: float | None
    failure_seconds: float
    workers: tuple[WorkerTimes, ...] = ()

    @property
    def shares(self) -> TimeShares:
        """The sums over all starts."""
        return TimeShares(*(sum(getattr(one, name) for one in self.starts) for name in TimeShares._fields))

    @property
    def best_interval_seconds(self) -> float | None:
        """The time between saves that costs the least; None if no save was measured."""
        return None if self.save_seconds is None else daly_interval_seconds(self.save_seconds, self.failure_seconds)

    def describe_interval(self) -> str:
        """Returns how often a save costs the least, in a sentence; empty if no save was measured."""
        if self.save_seconds is None or self.best_interval_seconds is None:
            return ""
        now = f"; on average it was every {time_text(self.interval_seconds)}" if self.interval_seconds else ""
        return (
            f"A save stops training for {time_text(self.save_seconds)}, and a failure is expected every "
            f"{time_text(self.failure_seconds)} (6 h is assumed until one is seen): a save every "
            f"{time_text(self.best_interval_seconds)} costs the least{now}."
        )

    def describe_slowest(self) -> str:
        """Returns which of several workers is the slowest, in a sentence; empty of one alone."""
        if len(self.workers) < 2:
            return ""
        slowest = max(self.workers, key=lambda one: one.background_seconds)
        others = median(one.background_seconds for one in self.workers if one is not slowest)
        return (
            f"Rank {slowest.rank} is the slowest: its part of a save is durable after "
            f"{time_text(slowest.background_seconds)}, that of another worker after {time_text(others)}. It was the "
            f"last in {slowest.last} of {slowest.saves} saves."
        )


def sum_up(events: Iterable[Event]) -> RunTimes:
    """**Pure.** Sums up the times of a run.

    Args:
        events: Those of its journal, oldest first; of other kinds than `TIMED` none is needed.
    """
    newest: dict[float, Clocked] = {}
    parts: list[PartsWritten] = []
    saves: list[Committed] = []
    intervals: list[float] = []
    for event in events:
        if isinstance(event, Clocked):
            known = newest.get(event.begun_at_unix_seconds)
            if known is None or event.at_unix_seconds >= known.at_unix_seconds:  # Two threads write them.
                newest[event.begun_at_unix_seconds] = event
        elif isinstance(event, Committed):
            if saves and saves[-1].generation == event.generation:
                intervals.append(event.at_unix_seconds - saves[-1].at_unix_seconds)
            saves.append(event)
        elif isinstance(event, PartsWritten):
            parts.append(event)
    starts: list[StartTimes] = []
    for begun_at, event in sorted(newest.items()):
        starts.append(_describe(event, starts[-1] if starts else None, is_newest=begun_at == max(newest)))
    deaths = [(one, after) for one, after in pairwise(starts) if not one.is_whole]
    returns = [after.away + after.setup + after.restore for _, after in deaths]
    observed = sum(one.ended_at_unix_seconds - one.begun_at_unix_seconds + one.lost for one in starts)
    costs = [one.blocked_seconds for one in saves[-_MEASURED_SAVES:]]
    return RunTimes(
        starts=tuple(starts),
        save_seconds=median(costs) if costs else None,
        interval_seconds=median(intervals) if intervals else None,
        return_seconds=median(returns) if returns else None,
        failure_seconds=estimate_failure_seconds(len(deaths), observed),
        workers=_sum_up_workers(parts),
    )


def _sum_up_workers(saves: Iterable[PartsWritten]) -> tuple[WorkerTimes, ...]:
    """**Pure.** Sums up the times of each worker."""
    found: dict[int, list[tuple[bool, float, float, int]]] = {}
    for save in saves:
        parts = zip(save.blocked_seconds, save.background_seconds, save.size_bytes, strict=False)
        for rank, part in zip(save.ranks, parts, strict=False):  # A journal may be damaged.
            found.setdefault(rank, []).append((rank == save.ranks[0], *part))
    return tuple(
        WorkerTimes(
            rank,
            saves=len(ones),
            last=sum(is_last for is_last, _, _, _ in ones),
            blocked_seconds=median(blocked for _, blocked, _, _ in ones),
            background_seconds=median(seconds for _, _, seconds, _ in ones),
            slowest_seconds=max(seconds for _, _, seconds, _ in ones),
            size_bytes=median(size_bytes for _, _, _, size_bytes in ones),
        )
        for rank, ones in sorted(found.items())
    )


def _describe(event: Clocked, before: StartTimes | None, *, is_newest: bool) -> StartTimes:
    """**Pure.** Describes one start, and the gap before it."""
    away = lost = again = 0.0
    # The first step imports and compiles: what it takes longer than others is a part of the set-up.
    steps, first = event.step - event.first_step, min(max(event.first_step_seconds, 0.0), event.train_seconds)
    trained = event.train_seconds + event.data_seconds - first
    pace = trained / (steps - 1) if first and steps > 1 else (trained + first) / max(steps, 1)
    slow = max(first - pace, 0.0) if steps > 1 else 0.0
    train = event.train_seconds - slow
    if before is not None:
        away = max(event.begun_at_unix_seconds - before.ended_at_unix_seconds, 0.0)
        # What was done before a record is in the time of that start, and what was done after it in the gap.
        unrecorded = min(max(event.first_step + event.repeated_steps - before.step, 0), event.repeated_steps)
        lost = min(unrecorded * pace, away)
        again = min((event.repeated_steps - unrecorded) * pace, train)
    end = "left" if event.is_last else "died, or goes on" if is_newest else "died"
    return StartTimes(
        begun_at_unix_seconds=event.begun_at_unix_seconds,
        ended_at_unix_seconds=event.at_unix_seconds,
        away=away - lost,
        lost=max(lost + again, 0.0),
        repeated_seconds=max(again, 0.0),
        # A journal may be damaged, or not to be trusted.
        setup=max(event.setup_seconds, 0.0) + slow,
        restore=max(event.restore_seconds, 0.0),
        train=max(train - max(again, 0.0), 0.0),
        evaluate=max(event.evaluate_seconds, 0.0),
        data=max(event.data_seconds, 0.0),
        save=max(event.save_seconds, 0.0),
        leave=max(event.leave_seconds, 0.0),
        first_step=event.first_step,
        step=event.step,
        repeated_steps=event.repeated_steps,
        is_whole=event.is_last and not event.error,
        end=f"failed: {event.error}" if event.error else end,
    )
