"""How often to save, by what a save costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.policies import Auto, SaveMoment, Seconds, Steps
from holdfast.policies.expectation import ExpectedLosses, expect_losses
from holdfast.policies.saving import Bound, daly_interval_seconds

AdviceBound: TypeAlias = Bound | Literal["step"]

MOST_SHARE: Final = 0.5
"""With more than this of the time lost, a job is hardly worth its machine."""

_MOST_OVERHEAD: Final = 0.99

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
        auto: The policy that finds the interval by itself; it allows saves more than usual where most of the time would
            be lost otherwise.
        choice: The interval that `policy` comes to.
        bound: What sets it, as for `Auto`; or `step`, where a single step takes longer than that.
        optimum_seconds: The interval of Young and Daly, whatever `bound` is.
        others: Usual intervals, and that one where it was passed over for the overhead, to compare with; those that
            cannot be are left out: shorter than a step, or too short for a save to become durable. All are whole steps.
    """

    policy: Seconds | Steps
    auto: Auto
    choice: Choice
    bound: AdviceBound
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

    Where most of the time would be lost with it because `Auto` keeps saves to a small share of the time, it is allowed
    as much as the best interval takes.

    Args:
        stall_seconds: How long a save holds training up.
        durable_seconds: From its call until it is durable.
        restore_seconds: How long a restore takes.
        mtbf_seconds: The mean time between failures.
        step_seconds: How long a step of training takes; None if that is not known.
    """
    moment = SaveMoment(
        step=0, step_seconds=step_seconds, save_blocked_seconds=stall_seconds, save_durable_seconds=durable_seconds
    )
    optimum_seconds = daly_interval_seconds(stall_seconds, mtbf_seconds)
    shortest_seconds = max(durable_seconds, step_seconds or 0.0)

    def choose(interval_seconds: float) -> Choice:
        losses = expect_losses(
            interval_seconds,
            stall_seconds=stall_seconds,
            durable_seconds=durable_seconds,
            restore_seconds=restore_seconds,
            mtbf_seconds=mtbf_seconds,
        )
        return Choice(interval_seconds, losses)

    def follow(auto: Auto) -> Advice:
        chosen = auto.chosen(moment)
        bound: AdviceBound = chosen.bound
        policy: Seconds | Steps
        if step_seconds is None or chosen.steps is None:
            interval_seconds = plain_figure(chosen.seconds)
            policy = Seconds(interval_seconds)
        else:
            steps = int(plain_figure(chosen.steps))
            fewer_seconds = (steps - 1) * step_seconds
            affordable_seconds = stall_seconds * (1 / auto.overhead - 1)
            # Where an interval has few steps, so that nothing was rounded yet, one less may come nearer to the optimum.
            if (
                bound == "optimum"
                and steps == chosen.steps
                and fewer_seconds >= max(shortest_seconds, affordable_seconds)
            ):
                counts = (steps, steps - 1)
                steps = min(counts, key=lambda count: choose(count * step_seconds).losses.lost_share)
            policy = Steps(steps)
            interval_seconds = steps * step_seconds
            bound = "step" if step_seconds > plain_figure(chosen.seconds) else bound
        wished = (*_USUAL_SECONDS, optimum_seconds) if bound == "overhead" else _USUAL_SECONDS
        compared = {_whole_steps_seconds(seconds, step_seconds) for seconds in wished} - {interval_seconds}
        others = tuple(choose(other) for other in sorted(compared) if other >= shortest_seconds)
        return Advice(policy, auto, choose(interval_seconds), bound, optimum_seconds, others)

    advice = follow(Auto(mtbf_seconds=mtbf_seconds))
    if advice.bound != "overhead" or advice.choice.losses.lost_share <= MOST_SHARE:
        return advice
    best_seconds = max(optimum_seconds, shortest_seconds)
    overhead = plain_figure(stall_seconds / (best_seconds + stall_seconds))
    lifted = follow(Auto(overhead=min(overhead, _MOST_OVERHEAD), mtbf_seconds=mtbf_seconds))
    return min(advice, lifted, key=lambda each: each.choice.losses.lost_share)


def _whole_steps_seconds(seconds: float, step_seconds: float | None) -> float:
    """What an interval comes to, since saves come between steps."""
    if step_seconds is None:
        return seconds
    return max(math.ceil(seconds / step_seconds - 1e-9), 1) * step_seconds


def plain_figure(figure: float) -> float:
    """**Pure.** A figure above 0, rounded up to two digits; a whole number where those reach so far."""
    unit = 10.0 ** (math.floor(math.log10(figure)) - 1)
    # What is a plain figure already must not go up by a whole unit for a bit at the end.
    units = math.ceil(figure / unit - 1e-9)
    return units * round(unit) if unit >= 1 else float(f"{units * unit:.12g}")
