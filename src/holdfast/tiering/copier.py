"""The farther tiers of a run, as its manager knows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.catalog import Catalog, StoredRun
from holdfast.errors import DeadlineError, HoldfastError, StorageError, UsageError
from holdfast.events import Failed, Sink, Warned
from holdfast.format.names import StepName
from holdfast.format.records import Manifest, decode_manifest
from holdfast.options import SaveOptions
from holdfast.policies import KeptCandidate, RetentionPolicy
from holdfast.process.terminal import say
from holdfast.save.handle import SILENT_SECONDS
from holdfast.save.host_memory import HostBuffer
from holdfast.storage.kept_images import ImageRecord
from holdfast.storage.tiers import Tiers
from holdfast.tiering.hop import Hop
from holdfast.tiering.kept_buffer import KeptBuffer
from holdfast.tiering.workers import Nearby, complete_newest, find_nearby

if TYPE_CHECKING:
    from holdfast.save.joint.participant import JointParticipant

_LOOK_SECONDS: Final = 0.25
"""How often to look whether the job is to leave, and not to wait any more."""


def begin_tiers(
    storage: Any, catalog: Catalog, options: SaveOptions, participant: JointParticipant | None, emit: Sink
) -> tuple[Catalog, TierCopier]:
    """**Collective.** **Blocks.** See `open_tiers`; the storage has tiers."""
    tiers: Tiers = storage
    if tiers.memory is not None and options.incremental:
        raise UsageError(
            "incremental saves cannot be kept in memory", hint="Leave out incremental=True or HostMemory()."
        )
    tiers.say = lambda text: emit(Warned(text=text, by_each=True))
    nearby, peers = Nearby(), None if participant is None else participant.peers
    if participant is not None and len(tiers.tiers) > 1:
        nearby = find_nearby(tiers, participant.peers)
    if tiers.memory is not None:
        from holdfast.tiering.unwritten import open_memory

        if open_memory(tiers, tiers.memory, peers, nearby, tiers.say):
            catalog = StoredRun(storage).look()
    if participant is not None and not nearby.is_common:
        complete_newest(tiers, participant.peers, nearby)
        tiers.first_offering = len(tiers.tiers) - 1
        catalog = StoredRun(storage).look()
    return catalog, TierCopier(tiers, options.keep, nearby, emit)


class TierCopier:
    """**Thread-safe.** Copies each committed step into all farther tiers, in the background.

    It begins when this job has begun to save: a program that only reads copies nothing. See `StepCopier` for the rest.

    Attributes:
        keep: What is kept in the nearest tier.
        keeps_images: True if the image of each save is to be kept in memory that outlives this process.
    """

    def __init__(self, tiers: Tiers, keep: RetentionPolicy, nearby: Nearby, emit: Sink) -> None:
        """Starts nothing yet. `keep` is for tiers that have no policy of their own."""
        self._nearby = nearby
        # True once the job has waited for the copies as long as it could, before it leaves.
        self._is_left = False
        # True once nothing more is to be copied; and if the newest image in memory is in the nearest tier, too.
        self._is_abandoned = self._is_written = False
        self._memory = tiers.memory
        self.keeps_images = tiers.memory is not None
        self._tiers, self._emit, self.keep = tiers, emit, tiers.tiers[0].policy or keep
        self._hops = [Hop(tiers, number, keep, nearby, emit) for number in range(1, len(tiers.tiers))]

    @property
    def copy_seconds(self) -> float | None:
        """See `StepCopier`."""
        return self._hops[-1].seconds

    def align(self) -> None:
        """**Blocks.** Makes all tiers know the same generations; see `Tiers.align`."""
        self._tiers.align()

    def find_least(self) -> int:
        """**Blocks.** See `Tiers.find_least`."""
        return self._tiers.find_least()

    def check(self) -> None:
        """Raises `FencedError` if another job was found to have gone on in a farther tier."""
        for hop in self._hops:
            if hop.fenced is not None:
                raise hop.fenced

    def note_generation(self, generation: int, token: str) -> None:
        """See `StepCopier`."""
        for hop in self._hops:
            hop.owner = generation, token
            hop.cleaner.generation = generation

    def note_committed(self, name: StepName) -> None:
        """Called when a step is committed in the nearest tier."""
        self._is_left, self._is_written = False, True
        if self._memory is not None:
            self._memory.images.note_written(name)
        for hop in self._hops:
            hop.wake()

    def keep_image(self, record: ImageRecord) -> None:
        """See `StepCopier`."""
        self._is_written = False
        if self._memory is not None and self._memory.is_open:
            self._memory.keep(record)

    def forget_image(self, name: StepName) -> None:
        """See `StepCopier`."""
        if self._memory is not None:
            self._memory.forget(name)

    def make_buffer(self) -> HostBuffer:
        """Returns the memory for the images of saves."""
        if self._memory is None:
            return HostBuffer()
        return KeptBuffer(self._memory, lambda text: self._emit(Warned(text=text, by_each=True)))

    def note_metrics(self, name: StepName) -> None:
        """Called when a step has got more metrics."""
        for hop in self._hops:
            hop.progress.again.add(name)
            hop.wake()

    def find_needed(self, candidates: Sequence[KeptCandidate[StepName]]) -> Mapping[StepName, str]:
        """Returns the steps that may not be removed from the nearest tier yet, each with the reason."""
        needed: dict[StepName, str] = {}
        for hop in self._hops:
            needed |= hop.find_needed(candidates)
        return needed

    def keep_manifest(self, name: StepName, text: str) -> Manifest | None:
        """**Blocks.** See `StepCopier`. If it cannot be kept, the step is not copied, and a later one is."""
        if not self._nearby.is_apart:
            return None
        try:
            self._tiers.nearest.publish(name.manifest_path, text.encode())
            self._tiers.nearest.sync_directory(name.directory)
        except HoldfastError as error:
            problem = f"its manifest cannot be kept in {self._tiers.url}: {error.message}"
            self._emit(Failed(stage="copy", error=problem, step=name.step, generation=name.generation))
            return None
        is_first = self._nearby.group[0] == self._nearby.rank
        return decode_manifest(text.encode(), path=name.manifest_path, expected=name) if is_first else None

    def give_up(self, name: StepName) -> None:
        """Called when the nearest tier has no room for a step that was not copied yet."""
        for hop in self._hops:
            hop.progress.note(name, problem=f"{self._tiers.url} had no room for it")
        text = f"{self._tiers.url} is full: step {name.step} was removed there before it was copied"
        self._emit(Warned(step=name.step, text=text))

    def wait(self, name: StepName, tier: int | str, timeout_seconds: float) -> str:
        """**Blocks.** Waits until a committed step is in a tier as well; returns its place. See `Hop.wait`."""
        number = self._tiers.find(tier)
        if number:
            self._hops[number - 1].wait(name, timeout_seconds)
        return f"{self._tiers.tiers[number].url}/{name.directory}"

    def reach(self, name: StepName, timeout_seconds: float) -> str:
        """**Blocks.** See `StepCopier`."""
        end_at, reached = time.monotonic() + timeout_seconds, [self._tiers.url]
        for hop in self._hops:
            # Looked at even when the time is over: it may be there.
            with suppress(DeadlineError, StorageError):
                hop.wait(name, max(end_at - time.monotonic(), 0.0))
                reached.append(hop.url)
        self._is_left = True
        missing = [hop.url for hop in self._hops if hop.url not in reached]
        return f"in {' and '.join(reached)}" + (f", not in {' and '.join(missing)} yet" if missing else "")

    def wait_copied(self, timeout_seconds: float, is_asked: Callable[[], bool]) -> bool:
        """**Blocks.** See `StepCopier`. It begins with what an earlier job has left, if this one has saved nothing."""
        for hop in self._hops:
            hop.begin()
        begun_at, is_reported = time.monotonic(), False
        while not self._wait_idle(min(timeout_seconds, _LOOK_SECONDS)):
            if is_asked():
                return False
            waited_seconds = time.monotonic() - begun_at
            if waited_seconds > timeout_seconds:
                break
            if waited_seconds > SILENT_SECONDS and not is_reported and self._nearby.rank == 0:
                is_reported = True
                places = " and ".join(hop.url for hop in self._hops if hop.progress.is_behind)
                say(
                    f"holdfast: training is done, and its checkpoints are being copied to {places}. Ctrl-C leaves: "
                    "the next start copies the rest."
                )
        self._is_left = True
        self._say_left()
        return True

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits until all is copied, and ends the threads; says what is left if that takes longer."""
        is_abandoned = self._is_abandoned and not self._is_left
        end_at = time.monotonic() + timeout_seconds * (not self._is_left)
        if not self._is_left:
            self._wait_idle(timeout_seconds)
            self._say_left()
        self.abandon()
        for hop in self._hops:
            hop.join(max(end_at - time.monotonic(), 1.0))
        if self._memory is not None:
            self._memory.close(is_done=self._is_written and not is_abandoned)

    def _wait_idle(self, timeout_seconds: float) -> bool:
        end_at = time.monotonic() + timeout_seconds
        return all(hop.wait_idle(max(end_at - time.monotonic(), 0.0)) for hop in self._hops)

    def _say_left(self) -> None:
        for hop in self._hops:
            if hop.progress.is_behind:
                text = (
                    f"the newest steps are not in {hop.url} yet; they are in {self._tiers.url}, and the next start of "
                    "the job copies them"
                )
                self._emit(Warned(text=text))

    def abandon(self) -> None:
        """Ends the threads, and waits for nothing."""
        self._is_abandoned = True
        for hop in self._hops:
            hop.stop()
