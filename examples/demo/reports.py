"""What the processes of the demo read and report, as lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from holdfast.events import AnyEvent

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


Evidence: TypeAlias = dict[str, dict[str, str]]
"""What a run ended with: for each item ("weights"), each of its parts by name, exactly or as a SHA-256."""


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="begun"):
    """A process has begun to train.

    Attributes:
        process: Its number.
    """

    process: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step_done"):
    """A step is complete.

    Attributes:
        step: How many steps are complete.
        loss: The loss, exactly, as `float.hex` writes it.
        samples: The numbers of the samples that were taught.
        at_seconds: When, by the monotonic clock.
    """

    step: int
    loss: str
    samples: tuple[int, ...]
    at_seconds: float


Report: TypeAlias = Begun | StepDone | AnyEvent
"""A process, a step, or an event of holdfast's."""

REPORTS: Final[msgspec.json.Decoder[Report]] = msgspec.json.Decoder(Report)
EVIDENCE: Final[msgspec.json.Decoder[Evidence]] = msgspec.json.Decoder(Evidence)


class PairStep(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """A step is complete.

    Attributes:
        rank: On which worker.
        process: Its process.
        step: How many steps are complete.
        loss: The loss there, exactly, as `float.hex` writes it.
    """

    rank: int
    process: int
    step: int
    loss: str


class PairHeard(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="heard"):
    """A worker has heard that it is to leave.

    Attributes:
        rank: Which.
        at_unix_seconds: When, by the wall clock.
    """

    rank: int
    at_unix_seconds: float


class PairLeft(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="left"):
    """A worker that was asked to leave does.

    Attributes:
        rank: Which.
        step: The step that is saved.
        exit_code: What it leaves with.
    """

    rank: int
    step: int | None
    exit_code: int


class PairEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    """A worker has come to the end.

    Attributes:
        rank: Which.
        digests: The SHA-256 of its weights, of its optimizer's state and of its random generator.
    """

    rank: int
    digests: dict[str, str]


PairReport: TypeAlias = PairStep | PairHeard | PairLeft | PairEnded

PAIR_REPORTS: Final[msgspec.json.Decoder[PairReport]] = msgspec.json.Decoder(PairReport)
