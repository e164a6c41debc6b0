"""How much is written in a trial. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.errors import StorageFullError, UsageError

Limit: TypeAlias = Literal["time", "memory", "room"]

DEFAULT_SIZE_BYTES: Final = 10**9
SMALLEST_TRIAL_BYTES: Final = 1 << 20
"""A smaller file is written in another way, which says nothing about a large one."""

_WRITE_SECONDS: Final = 0.5
"""A round writes and reads a trial about nine times; three rounds of this take some twenty seconds."""

_LEAST_TIMED_BYTES: Final = 32 << 20
_LARGEST_BYTES: Final = 4 << 30
_NEARLY: Final = 0.7
"""What is nearly all of a state is all of it: then nothing has to be reckoned."""

_MEMORY_TIMES: Final = 4
"""The state and its copy, and twice as much for everybody else."""

_ROOM_TIMES: Final = 4
"""A checkpoint and the one that follows it, and as much for everybody else."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How much is saved in a trial.

    Attributes:
        size_bytes: How much.
        limited_by: Why it is less than the state; None if it is not.
    """

    size_bytes: int
    limited_by: Limit | None = None


def plan_trial(size_bytes: int, *, rate: float, available_bytes: int | None, free_bytes: int | None) -> TrialPlan:
    """**Pure.** As much of a state as can be saved again and again in a short time, without taking it from others.

    Args:
        size_bytes: The state's size.
        rate: How fast the disk takes bytes, in bytes a second.
        available_bytes: How much memory may still be taken; None if that is not known.
        free_bytes: How much room the disk has; None if that is not known.
    """
    timed_bytes = min(max(int(rate * _WRITE_SECONDS), _LEAST_TIMED_BYTES), _LARGEST_BYTES)
    if timed_bytes >= _NEARLY * size_bytes:
        timed_bytes = size_bytes
    limits: list[tuple[int, Limit]] = [(timed_bytes, "time")]
    if available_bytes is not None:
        limits.append((available_bytes // _MEMORY_TIMES, "memory"))
    if free_bytes is not None:
        limits.append((free_bytes // _ROOM_TIMES, "room"))
    least_bytes, limit = min(limits)
    trial_bytes = min(max(least_bytes, SMALLEST_TRIAL_BYTES), size_bytes)
    return TrialPlan(trial_bytes, limit if trial_bytes < size_bytes else None)


def check_trial(trial_bytes: int, *, available_bytes: int | None, free_bytes: int | None) -> None:
    """**Pure.** Makes sure that a trial of a size that was asked for is possible.

    Raises:
        UsageError: If there is not enough memory for it.
        StorageFullError: If there is not enough room for it.
    """
    if available_bytes is not None and 2 * trial_bytes > available_bytes:
        raise UsageError(
            f"a trial of {trial_bytes} bytes takes twice as much memory, and {available_bytes} bytes are available",
            hint="Measure with less (--trial); what a save of the whole size costs is reckoned from that.",
        )
    if free_bytes is not None and 2 * trial_bytes > free_bytes:
        raise StorageFullError(
            f"a trial of {trial_bytes} bytes takes twice as much room, and {free_bytes} bytes are free",
            hint="Make room, or measure with less (--trial).",
        )
