"""Decides whether a trainer hangs, from its board and the time alone. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.supervise.board import (
    BETWEEN,
    DATA,
    ENDED,
    EVALUATE,
    LEAVING,
    NONE,
    PHASES,
    STARTING,
    STEP,
    Reading,
)

OFF, REPORT, RESTART = range(3)

_AGAIN: Final = 2.0
"""A phase may take that many times as long as it ever did in this process."""

_UNMARKED: Final = (STARTING, BETWEEN, EVALUATE, LEAVING)
"""Phases in which the program does what is not known, or what may take another time each time."""

_OWN_CODE: Final = (STEP, BETWEEN, EVALUATE)
"""Phases in which the program runs its own code, which may evaluate within a step, too."""


class Limits(NamedTuple):
    """When a trainer hangs, and what follows; the page has them in this order.

    Attributes:
        action: OFF, REPORT or RESTART.
        least_seconds: The least limit of a phase whose duration is known.
        factor: That times the slowest of the newest durations of the phase is a limit, too.
        unmarked_seconds: The least limit of a phase whose duration is not known, and of time between two steps.
        first_step_seconds: The least limit of each part of the first step, which may compile.
    """

    action: float = REPORT
    least_seconds: float = 30.0
    factor: float = 6.0
    unmarked_seconds: float = 600.0
    first_step_seconds: float = 1800.0


class HangVerdict(NamedTuple):
    """The answer to the question if a trainer hangs.

    Attributes:
        hangs: True if it does.
        restarts: True if it is to be started again.
        seconds: How long it has made no progress.
        limit_seconds: How long it may make none in this phase.
        reason: The phase, both times and where the limit is from, in words.
    """

    hangs: bool
    restarts: bool
    seconds: float
    limit_seconds: float
    reason: str


def decide(reading: Reading, now: float, forgiven_seconds: float = 0.0) -> HangVerdict:
    """**Pure.** Returns whether a trainer hangs.

    Args:
        reading: Its board.
        now: The time, by `time.monotonic`.
        forgiven_seconds: How much of the phase's time does not count, since all processes were stopped.
    """
    limits = Limits(*reading.limits[: len(Limits._fields)])
    phase, seconds = reading.phase, max(now - max(reading.since, reading.beat) - forgiven_seconds, 0.0)
    if limits.action == OFF or phase in (NONE, ENDED):
        return HangVerdict(False, False, seconds, float("inf"), "it is not watched now")
    limit, why = find_limit(reading, limits)
    reason = f"{PHASES[phase]} for {seconds:.0f} s (limit {limit:.0f} s: {why})"
    patience = max(limit, limits.unmarked_seconds) if phase in _OWN_CODE else limit
    restarts = limits.action == RESTART and seconds > patience
    return HangVerdict(seconds > limit, restarts, seconds, limit, reason)


def find_limit(reading: Reading, limits: Limits) -> tuple[float, str]:
    """**Pure.** Returns how long the phase may take, and why."""
    phase, slowest = reading.phase, max(reading.last, default=0.0)
    if not reading.first_step_at and phase in (STEP, DATA, BETWEEN, EVALUATE):
        least, why = limits.first_step_seconds, "the first step"
    elif phase in _UNMARKED or not reading.last:
        least, why = limits.unmarked_seconds, "its usual duration is not known"
    else:
        least, why = limits.least_seconds, "the least limit"
    known = ((limits.factor * slowest, "recent ones"), (_AGAIN * reading.slowest, "its longest one"))
    for seconds, of in known:
        if seconds > least:
            least, why = seconds, f"a multiple of {of}"
    return least, why
