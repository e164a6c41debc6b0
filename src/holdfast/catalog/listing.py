"""Lists the steps under a run's root: which are committed, and which belong to the current lineage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from holdfast.errors import (
    DamageError,
    NoCheckpointError,
    NoWholeCheckpointError,
)
from holdfast.format.names import (
    StepName,
)
from holdfast.format.records import (
    Base,
)

_MOST_LOOKS: Final = 30
_NAMED_STEPS: Final = 5


class Catalog(msgspec.Struct, frozen=True):
    """The contents of a run's root at one moment.

    Attributes:
        committed: All steps with a manifest, in the current lineage or not, in order of step.
        living: Those in the current lineage, in order of step.
        unfinished: Directories of steps that were never committed: being written, or abandoned.
        lost: Steps that were committed and whose manifest is gone, in the current lineage or not, in order of step.
            Their data is kept.
        trash: Names in the root that were set aside to be removed.
        generation: The newest generation that was opened, or 0.
        faults: Records of generations that could not be read.
        spare_bytes: The size of the spare file that a job reuses for its next save; None if there is none.
        bases: The bases of the generations that recorded one.
    """

    committed: tuple[StepName, ...]
    living: tuple[StepName, ...]
    unfinished: tuple[StepName, ...]
    lost: tuple[StepName, ...]
    trash: tuple[str, ...]
    generation: int
    faults: tuple[DamageError, ...]
    spare_bytes: int | None
    bases: Mapping[int, Base] = msgspec.field(default_factory=dict)

    @property
    def newest(self) -> StepName | None:
        """The newest step of the current lineage, or None."""
        return self.living[-1] if self.living else None

    @property
    def start_from(self) -> int | None:
        """The step that the program last went back to on request, in the current lineage; None if it never did."""
        return self.bases[max(self.bases)].start_from if self.bases else None

    def find(self, step: int) -> StepName:
        """Returns the checkpoint of a step: that of the current lineage, else the newest other one.

        Raises:
            NoCheckpointError: If there is none; the error names those that exist.
            NoWholeCheckpointError: If it was committed, but has lost its manifest.
        """
        for name in self.living:
            if name.step == step:
                return name
        off_line = [name for name in self.committed if name.step == step]
        if off_line:
            return max(off_line)
        if lost := [name for name in self.lost if name.step == step]:
            raise make_lost_error(lost)
        known = ", ".join(str(existing) for existing in sorted({name.step for name in self.committed}))
        raise NoCheckpointError(f"there is no checkpoint of step {step}", hint=f"Steps that exist: {known or 'none'}.")


def make_lost_error(lost: Sequence[StepName], url: str = "") -> NoWholeCheckpointError:
    """**Pure.** Returns the error for committed steps that have lost their manifests."""
    missing = [DamageError("the manifest is gone", step=name.step, path=name.manifest_path) for name in lost]
    return NoWholeCheckpointError(
        f"{url}: {describe_lost(lost)}" if url else describe_lost(lost),
        damages=tuple(missing),
        hint=f"Restore the manifests: `{lost[-1].committed_path}` is a copy of `{lost[-1].manifest_path}`, unless it "
        "is empty or missing. Or start from the beginning on purpose: begin_anew=True, or another directory.",
    )


def describe_lost(lost: Sequence[StepName]) -> str:
    """**Pure.** Describes them in words."""
    many, few = len(lost) > 1, lost[-_NAMED_STEPS:]
    steps = ", ".join(str(name.step) for name in few)
    before = f"{len(lost)} steps, the last of them " if len(lost) > len(few) else "steps " if many else "step "
    what = "their manifests are" if many else "its manifest is"
    return f"{before}{steps} {'were' if many else 'was'} committed, and {what} gone; the data files are still there"


def describe_steps(steps: Sequence[int]) -> str:
    """**Pure.** Names steps, at least one, in words: of many, how many there are, the first and the last."""
    if len(steps) > _NAMED_STEPS:
        return f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
