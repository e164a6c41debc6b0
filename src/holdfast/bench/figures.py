"""What was measured, and what a save of any size costs by that. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Work: TypeAlias = Literal["first_stall", "stall", "durable", "durable_new", "restore_cold", "restore_warm"]
"""What a save and a restore make a job wait for.

`durable` is that of a run with a fixed number of checkpoints, whose saves take the space of removed ones where the file
system allows that; `durable_new` that of one which writes new files.
"""

WORKS: Final[tuple[Work, ...]] = get_args(Work)
"""All of it, in that order."""

NOISY_SPREAD: Final = 2.0


@dataclass(frozen=True, slots=True)
class Series:
    """One thing, measured several times.

    Attributes:
        samples: What was found each time.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.samples)

    @property
    def lowest(self) -> float:
        """The smallest."""
        return min(self.samples)

    @property
    def highest(self) -> float:
        """The largest."""
        return max(self.samples)

    def times(self, factor: float) -> Series:
        """All of them multiplied."""
        return Series(tuple(sample * factor for sample in self.samples))


def make_series(samples: Sequence[float]) -> Series | None:
    """**Pure.** The samples as a series; None if there are none."""
    return Series(tuple(samples)) if samples else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found in all rounds. Rates are in bytes a second.

    Attributes:
        trial_bytes: The size of the state that was saved.
        is_direct: Whether the disk took writes past the page cache.
        copy: Copying into memory that was used before.
        copy_fresh: Copying into memory that was never used.
        digest: Taking the digests.
        write: Writing a new file until it is durable.
        rewrite: The same over the bytes of a file that is there; None where saves do not do that.
        read_cold: Reading a file that the page cache does not hold; None where that cannot be brought about.
        read_warm: Reading a file that it holds.
        publish_seconds: Making a small file appear, for good.
        first_stall_seconds: How long the first save held its caller up.
        stall_seconds: How long every later one did.
        durable_new_seconds: From the call of a save that writes new files until the checkpoint was durable.
        durable_again_seconds: The same where it is written into the space of a removed one; None as `rewrite`.
        restore_cold_seconds: A restore from files that the page cache does not hold; None as `read_cold`.
        restore_warm_seconds: A restore from files that it holds.
    """

    trial_bytes: int
    is_direct: bool
    copy: Series
    copy_fresh: Series
    digest: Series
    write: Series
    rewrite: Series | None
    read_cold: Series | None
    read_warm: Series
    publish_seconds: Series
    first_stall_seconds: Series
    stall_seconds: Series
    durable_new_seconds: Series
    durable_again_seconds: Series | None
    restore_cold_seconds: Series | None
    restore_warm_seconds: Series

    @property
    def is_noisy(self) -> bool:
        """Whether the rounds differ so much that something else must have used the machine."""
        return any(
            series.highest > NOISY_SPREAD * series.lowest
            for series in (
                self.write,
                self.rewrite,
                self.read_cold,
                self.durable_new_seconds,
                self.durable_again_seconds,
                self.restore_cold_seconds,
            )
            if series is not None
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job of some size waits for.

    Attributes:
        seconds: How long.
        limit_seconds: How long the machine takes to move the bytes alone, at the best rate that was seen.
    """

    seconds: Series
    limit_seconds: float

    @property
    def times_limit(self) -> float:
        """How many times as long it takes."""
        return self.seconds.median / self.limit_seconds


def reckon_costs(measured: Measured, size_bytes: int) -> dict[Work, Cost]:
    """**Pure.** What saving and restoring a state of some size costs, in proportion to what was measured.

    There is no cold restore where none could be measured.
    """
    again = (measured.durable_again_seconds, measured.rewrite)
    new = (measured.durable_new_seconds, measured.write)
    pairs: tuple[tuple[Work, Series | None, Series | None], ...] = (
        ("first_stall", measured.first_stall_seconds, measured.copy_fresh),
        ("stall", measured.stall_seconds, measured.copy),
        ("durable", *(again if None not in again else new)),
        ("durable_new", *new),
        ("restore_cold", measured.restore_cold_seconds, measured.read_cold),
        ("restore_warm", measured.restore_warm_seconds, measured.read_warm),
    )
    factor = size_bytes / measured.trial_bytes
    return {
        work: Cost(seconds.times(factor), size_bytes / rate.highest)
        for work, seconds, rate in pairs
        if seconds is not None and rate is not None
    }
