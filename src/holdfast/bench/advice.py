"""How often to save, by what a save costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from holdfast.policies import Auto, SaveMoment, Seconds, Steps
from holdfast.policies.expectation import ExpectedLosses, expect_losses
from holdfast.policies.saving import Bound, daly_interval_seconds

_USUAL_SECONDS: Final = (60.0, 600.0, 3600.0)
"""Intervals that people choose, to compare with."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval, and what is lost with it.

    Attributes:
        interval_seconds: How long training goes on between two saves.
        losses: What is lost on average.
    """

    interval_seconds: float
    losses: ExpectedLosses


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to save.

    Attributes:
        policy: What to save by.
        auto: The policy that finds the interval by itself.
        choice: The interval that `policy` comes to.
        bound: What sets it, as for `Auto`.
        optimum_seconds: The interval of Young and Daly, whatever `bound` is.
        others: Usual intervals, and that one where it was passed over for the overhead, to compare with; those that are
            too short for a save to become durable are left out.
    """

    policy: Seconds | Steps
    auto: Auto
    choice: Choice
    bound: Bound
    optimum_seconds: float
    others: tuple[Choice, ...]


def advise(
    *,
    stall_seconds: float,
    durable_seconds: float,
    restore_seconds: float,
    mtbf_seconds: float,
    step_seconds: float | None = None,
) -> Advice:
    """**Pure.** The interval that `Auto` would choose for these costs, rounded up to a plain number.

    Args:
        stall_seconds: How long a save holds training up.
        durable_seconds: From its call until it is durable.
        restore_seconds: How long a restore takes.
        mtbf_seconds: The mean time between failures.
        step_seconds: How long a step of training takes; None if that is not known.
    """
    auto = Auto(mtbf_seconds=mtbf_seconds)
    chosen = auto.chosen(
        SaveMoment(
            step=0,
            step_seconds=step_seconds,
            save_blocked_seconds=stall_seconds,
            save_durable_seconds=durable_seconds,
        )
    )

    def choose(interval_seconds: float) -> Choice:
        losses = expect_losses(
            interval_seconds,
            stall_seconds=stall_seconds,
            durable_seconds=durable_seconds,
            restore_seconds=restore_seconds,
            mtbf_seconds=mtbf_seconds,
        )
        return Choice(interval_seconds, losses)

    policy: Seconds | Steps
    if step_seconds is None or chosen.steps is None:
        interval_seconds = plain_figure(chosen.seconds)
        policy = Seconds(interval_seconds)
    else:
        policy = Steps(int(plain_figure(chosen.steps)))
        interval_seconds = policy.n * step_seconds
    optimum_seconds = daly_interval_seconds(stall_seconds, mtbf_seconds)
    compared = {*_USUAL_SECONDS, optimum_seconds} if chosen.bound == "overhead" else {*_USUAL_SECONDS}
    others = tuple(choose(usual) for usual in sorted(compared) if usual >= durable_seconds)
    return Advice(policy, auto, choose(interval_seconds), chosen.bound, optimum_seconds, others)


def plain_figure(figure: float) -> float:
    """**Pure.** A figure above 0, rounded up to two digits; a whole number where those reach so far."""
    unit = 10.0 ** (math.floor(math.log10(figure)) - 1)
    # What is a plain figure already must not go up by a whole unit for a bit at the end.
    units = math.ceil(figure / unit - 1e-9)
    return units * round(unit) if unit >= 1 else float(f"{units * unit:.12g}")
