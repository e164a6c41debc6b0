"""What a job that saves at an interval is expected to lose: to its saves, and to failures. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_SMALL: Final = 1e-4
_LARGE: Final = 50.0


@dataclass(frozen=True, slots=True)
class ExpectedLosses:
    """What a job loses, on average.

    Attributes:
        saving_share: The share of time for which saves hold training up.
        failures_share: The share of time that failures undo, and that restores take.
        per_failure_seconds: What one failure costs: the training since the last durable save, and the restore.
    """

    saving_share: float
    failures_share: float
    per_failure_seconds: float

    @property
    def lost_share(self) -> float:
        """The share of time that does not advance training."""
        return self.saving_share + self.failures_share


def expect_losses(
    interval_seconds: float,
    *,
    stall_seconds: float,
    durable_seconds: float,
    restore_seconds: float,
    mtbf_seconds: float,
) -> ExpectedLosses:
    """**Pure.** What a job loses that saves at an interval, by Daly's complete model of failures that come at random.

    His saves are durable when training goes on. Here a save may become durable later, and a failure before that falls
    back to the save before; on average that costs as much time more for each failure, whatever the interval, just as a
    longer restore would.

    Args:
        interval_seconds: How long training goes on between two saves; above 0.
        stall_seconds: How long a save holds it up.
        durable_seconds: From the call of a save until it is durable, at least the stall.
        restore_seconds: How long a restore takes, and whatever else a restart needs.
        mtbf_seconds: The mean time between failures; above 0.
    """
    period = interval_seconds + stall_seconds
    delay = max(durable_seconds - stall_seconds, 0.0) + restore_seconds
    ratio = period / mtbf_seconds
    # The useful share is interval / (mtbf * exp(delay / mtbf) * (exp(ratio) - 1)), which would overflow.
    growth = ratio if ratio > _LARGE else math.log(math.expm1(ratio))
    useful = math.exp(math.log(interval_seconds / mtbf_seconds) - delay / mtbf_seconds - growth)
    saving = stall_seconds / period
    return ExpectedLosses(
        saving_share=saving,
        failures_share=max(1 - saving - useful, 0.0),
        per_failure_seconds=_undone_seconds(period, mtbf_seconds) + delay,
    )


def _undone_seconds(period: float, mtbf_seconds: float) -> float:
    """The mean age of a period in which a failure falls: half of it, or less where failures are frequent."""
    ratio = period / mtbf_seconds
    if ratio < _SMALL:
        return period / 2 * (1 - ratio / 6)
    return mtbf_seconds - (period / math.expm1(ratio) if ratio < _LARGE else 0.0)
