"""What the two workers of the demo's second part tell, as lines of JSON."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec


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
