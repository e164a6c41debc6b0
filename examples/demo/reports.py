"""What a training process tells its supervisor, as lines of JSON; and what it leaves as evidence."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from holdfast.events import AnyEvent

Evidence: TypeAlias = dict[str, dict[str, str]]
"""What a run ended with: for each item ("weights"), each of its parts by name, exactly or as a SHA-256."""


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


Report: TypeAlias = StepDone | AnyEvent
"""A step, or an event of holdfast's."""

REPORTS: Final[msgspec.json.Decoder[Report]] = msgspec.json.Decoder(Report)
EVIDENCE: Final[msgspec.json.Decoder[Evidence]] = msgspec.json.Decoder(Evidence)
