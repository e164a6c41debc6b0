"""The interface of the part that copies the steps of a run in tiers, as the stages of a save call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.format.names import StepName
from holdfast.format.records import Manifest
from holdfast.policies import KeptCandidate, RetentionPolicy
from holdfast.storage.kept_images import ImageRecord


class StepCopier(Protocol):
    """Brings each committed step to the farther tiers of a run.

    Attributes:
        keep: What is kept in the nearest tier.
        keeps_images: True if the image of each save is to be kept in memory that outlives this process.
    """

    keep: RetentionPolicy
    keeps_images: bool

    @property
    def copy_seconds(self) -> float | None:
        """How long the newest copy into the farthest tier took; None if there was none."""

    def align(self) -> None:
        """**Blocks.** Makes all tiers know the same generations; see `Tiers.align`."""

    def find_least(self) -> int:
        """**Blocks.** Returns the least number of the next generation; see `Tiers.find_least`."""

    def check(self) -> None:
        """Raises `FencedError` if another job was found to have gone on in a farther tier."""

    def note_generation(self, generation: int, token: str) -> None:
        """Called when this job has opened a generation, with its token."""

    def keep_image(self, record: ImageRecord) -> None:
        """Called when the image of a save is whole in memory, with what the next start needs of it."""

    def forget_image(self, name: StepName) -> None:
        """Called when the image of a save, if it was kept, is not to be restored."""

    def note_committed(self, name: StepName) -> None:
        """Called when a step is committed in the nearest tier."""

    def note_metrics(self, name: StepName) -> None:
        """Called when a step in the nearest tier has got more metrics."""

    def find_needed(self, candidates: Sequence[KeptCandidate[StepName]]) -> Mapping[StepName, str]:
        """Returns the steps that may not be removed from the nearest tier yet, each with the reason."""

    def keep_manifest(self, name: StepName, text: str) -> Manifest | None:
        """**Blocks.** Puts the manifest of a committed step into a tier of this worker's own, and returns it there if
        this worker cleans up there; None if not, or if it shares the leader's."""

    def give_up(self, name: StepName) -> None:
        """Called when the nearest tier had no room for a step that was not copied yet."""

    def wait(self, name: StepName, tier: int | str, timeout_seconds: float) -> str:
        """**Blocks.** Waits until a committed step is in a tier as well; returns its directory there."""

    def reach(self, name: StepName, timeout_seconds: float) -> str:
        """**Blocks.** Waits until a committed step is in the farthest tier that it comes to in time, and describes how
        far it has come, in words."""

    def wait_copied(self, timeout_seconds: float, is_asked: Callable[[], bool]) -> bool:
        """**Blocks.** Called when training is over: waits until the newest step is in all tiers, or did not come there
        in one more try. False as soon as the job `is_asked` to leave."""

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits until all is copied, and ends the threads."""

    def abandon(self) -> None:
        """Ends the threads, and waits for nothing."""
