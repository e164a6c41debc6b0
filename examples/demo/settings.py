"""What the two runs of the demo have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FORGETTABLE: Final = ("model", "optimizer", "scheduler", "loader", "rng")
"""What can be left out of the checkpoints, to see what that does; the history, which shows it, is always kept."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, and for how long.

    Attributes:
        seed: Of everything that is random.
        steps: How many steps a run has.
        save_every_steps: How many steps lie between two saves.
        batch: The excerpts of one step.
        tokens: The tokens that are predicted in one excerpt.
        forget: Names of `FORGETTABLE` that are left out of the checkpoints.
    """

    seed: int = 0
    steps: int = 160
    save_every_steps: int = 10
    batch: int = 8
    tokens: int = 64
    forget: tuple[str, ...] = ()
