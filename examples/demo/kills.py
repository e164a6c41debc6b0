"""When to kill: chosen by a seed, before anything runs. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KillPlan:
    """One kill that is to be made.

    Attributes:
        step: Not before so many steps are complete.
        in_write: True to wait until a checkpoint is being written.
        share: How much of a step, or of a write, is allowed to pass first, from 0 to 1.
    """

    step: int
    in_write: bool
    share: float


def plan_kills(seed: int, kills: int, steps: int) -> list[KillPlan]:
    """**Pure.** One kill at a random place in each of as many equal parts of the run; half of them in a write.

    Args:
        seed: Another seed, other moments.
        kills: How many.
        steps: How many steps the run has; at least twice as many.
    """
    chance = random.Random(seed)
    in_write = set(chance.sample(range(kills), (kills + 1) // 2))
    bounds = [1 + part * (steps - 1) // kills for part in range(kills + 1)]
    return [
        KillPlan(chance.randrange(bounds[part], bounds[part + 1]), part in in_write, chance.random())
        for part in range(kills)
    ]
