"""Writes checkpoints of several workers: each its own files, the leader the manifest.

The leader opens the generation, names the attempt, waits until each worker's files are durable, and publishes. The
others learn from it where to write, and the result. All of this happens in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import msgspec

from holdfast.catalog import StoredRun
from holdfast.catalog.publish import Receipts
from holdfast.catalog.step_copier import StepCopier
from holdfast.cluster.peers import Failure, make_sendable
from holdfast.cluster.polling import SOME_KEYS, poll
from holdfast.cluster.protocol import ANSWER_SECONDS
from holdfast.errors import ClusterError, HoldfastError, NotFoundError, PeerError, UsageError
from holdfast.events import Diverged, PartsWritten, Sink, Warned
from holdfast.format.digests import seal
from holdfast.format.names import StepName
from holdfast.format.records import MAX_EXEMPT, Base, Manifest, Reference, choose_exempt
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.handle import LeftOutError, Origin, SaveRequest
from holdfast.save.image import Snapshot, Staging
from holdfast.save.joint.coverage import (
    OBJECTS_HINT,
    Coverage,
    digest_objects,
    digest_shards,
    find_unlike,
)
from holdfast.save.joint.participant import JointParticipant
from holdfast.save.joint.protocol import CommitProtocol, NameRecord, PartRecord
from holdfast.save.joint.replicas import (
    VALUES_HINT,
    Divergence,
    HeldReplicas,
    describe_apart,
    digest_values,
    find_refused,
    sum_up_replicas,
)
from holdfast.save.joint.shared_storage_check import check_opening, find_unseen, read_opening_digest
from holdfast.save.retention import Cleaning
from holdfast.save.run_writer import CheckpointWriter, RunWriter, make_debris_warning
from holdfast.save.writer import StepFiles
from holdfast.state.data.position import find_apart, list_positions
from holdfast.storage.protocol import Storage

_COURTESY_SECONDS: Final = 1.0
"""How long to wait for the others if one will not come, or training is blocked at its next save by that."""

_MOST_NAMED: Final = 100
_MOST_NONFINITE: Final = 100
"""How many differing tensors are named in one save. Once replicas have diverged, everything differs."""

_MOST_TIMED: Final = 32
"""Of how many workers the journal says how long they took, in one save."""


@dataclass(eq=False)
class _JointSave:
    """A save that not all workers are done with.

    Attributes:
        protocol: Its records.
        ranks: On the leader, the workers that may still be at it.
        debris: The directory to remove after them, or None.
        make_part: Makes this worker's report of what it has written.
        compares: True if replicated values are compared.
        is_cut_off: True if the store did not answer: then no worker waits for it again.
    """

    protocol: CommitProtocol
    ranks: set[int]
    debris: StepName | None = None
    make_part: Callable[..., PartRecord] = field(default_factory=lambda: partial(PartRecord, groups=[]))
    compares: bool = False
    is_cut_off: bool = False


class JointRunWriter(CheckpointWriter):
    """One worker's part in the checkpoints of all: a `CheckpointWriter` for several. Not thread-safe.

    Methods raise `PeerError` if another worker has failed or is gone, and `ClusterError` if the job's store does not
    respond, in addition to the errors of `RunWriter`.
    """

    # The others know nothing of the clean-up: if one finds no room on a shared disk, it does not know what to wait for.
    writes_early = False

    def __init__(
        self,
        own: RunWriter,
        storage: Storage,
        participant: JointParticipant,
        emit: Sink,
        *,
        check_replicas: bool | Literal["first"] = "first",
    ) -> None:
        self._own, self._storage, self._participant = own, storage, participant
        self._peers, self._emit = participant.peers, emit
        self._check_replicas = check_replicas
        # True if replicated values were compared in a save that was committed since the run was entered or restored.
        self._has_compared = False
        self.compares = bool(check_replicas)
        self._save: _JointSave | None = None
        # Saves before it, on the leader.
        self._endings: list[_JointSave] = []
        self._holding = HeldReplicas((), ())
        self._are_apart = False
        self._coverage = Coverage()

    @property
    def generation(self) -> int | None:  # type: ignore[override]
        """See `CheckpointWriter`."""
        return self._own.generation

    @property
    def copier(self) -> StepCopier | None:  # type: ignore[override]
        """See `CheckpointWriter`."""
        return self._own.copier

    def leave_generation(self) -> None:
        """See `CheckpointWriter`."""
        self._own.leave_generation()
        self._participant.begin_epoch()
        self._has_compared, self.compares = False, bool(self._check_replicas)

    def begin(self, protocol: CommitProtocol | None) -> None:
        """Begins a save, without communication; `finish` ends it in any case."""
        others = set(range(1, self._peers.world_size))
        self._save = None if protocol is None else _JointSave(protocol, others)

    def digest(self, staging: Staging, pool: WorkerPool) -> tuple[str, ...]:
        """See `CheckpointWriter`."""
        return digest_values(staging.captured, staging.moments, pool)

    def open(self, origin: Origin, step: int) -> tuple[StepName, Base | None]:
        """**Blocks.** The leader opens a generation if there is none, chooses the directory, and reports it."""
        protocol = self._current().protocol
        protocol.announce()
        if not self._peers.is_leader:
            place = protocol.wait_name()
            if place.generation != self._own.generation:
                self._own.take_records(place.records)
                who = f"rank {self._peers.rank} on {self._peers.cluster.node}"
                check_opening(self._storage, place, who, self._peers.timeout_seconds)
                base_name = None if place.base is None else StepName(*place.base)
                self._own.follow(place.generation, base_name, origin.exempt)
            else:
                self._own.check_valid()
            return StepName(step, place.generation, place.attempt), None
        name, base = self._own.open(origin, step, self._list_busy())
        opening = read_opening_digest(self._storage, name.generation)
        origin_name = None if self._own.base is None else self._own.base.name
        sent_base = None if origin_name is None else (origin_name.step, origin_name.generation, origin_name.attempt)
        url = make_sendable(self._storage.url)
        records = {} if self.copier is None else self._own.read_records(name.generation)
        protocol.put_name(NameRecord(name.generation, name.attempt, sent_base, opening, url, records))
        return name, base

    def open_files(self, snapshot: Snapshot, name: StepName, request: SaveRequest, pool: WorkerPool) -> StepFiles:
        """**Blocks.** Creates the files that this worker writes, and prepares its report to the others."""
        save, self._holding = self._current(), sum_up_replicas(snapshot, self._holding)
        save.compares = bool(snapshot.state.digests)
        save.make_part = partial(
            PartRecord,
            groups=self._holding.groups,
            shards=digest_shards(snapshot),
            check_replicas=self._check_replicas,
            positions=list_positions(snapshot.state.objects),
            object_set=digest_objects(snapshot),
        )
        return self._own.open_files(
            snapshot, name, request, pool, lambda receipts: msgspec.json.encode(self._make_part(save, receipts, name))
        )

    def _make_part(self, save: _JointSave, receipts: Receipts, name: StepName) -> PartRecord:
        found, exempt = receipts.nonfinite or {}, self._exempt_of(receipts, name)
        bad = [leaf for leaf in found if leaf not in exempt]
        return save.make_part(
            receipts.workers[0],
            receipts.references,
            receipts.features,
            values=receipts.values,
            nonfinite=tuple(bad[:_MOST_NONFINITE]),
            nonfinite_count=len(bad),
            exempt=tuple(sorted(exempt)[:MAX_EXEMPT]) if self._own.exempt is None else (),
            blocked_seconds=receipts.blocked_seconds,
            background_seconds=receipts.background_seconds,
        )

    def _exempt_of(self, receipts: Receipts, name: StepName) -> frozenset[str]:
        exempt = self._own.exempt
        return choose_exempt(receipts.nonfinite or {}, name.step) if exempt is None else exempt

    def commit(
        self, receipts: Receipts, name: StepName, metrics: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> Manifest | None:
        """**Blocks.** Commits what all have written: the leader publishes, the others wait until it has.

        A crash of the leader after the publication leaves a whole checkpoint that no other worker knows of.
        """
        save, holding = self._current(), self._holding
        protocol, manifest, own = save.protocol, None, self._make_part(save, receipts, name)
        if self._peers.is_leader:
            manifest = self._commit_all([own, *protocol.collect_parts()], name, metrics, metadata)
        else:
            text = protocol.hand_in(own, holding)
            self._own.note_committed(self._exempt_of(receipts, name))
            if text and self.copier is not None:
                manifest = self.copier.keep_manifest(name, text)
        self._has_compared = self._has_compared or save.compares
        self.compares = not self._has_compared if self._check_replicas == "first" else self._check_replicas
        return manifest

    def _commit_all(
        self, parts: Sequence[PartRecord], name: StepName, metrics: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> Manifest:
        """Checks on the leader that the parts of all make up a checkpoint, and publishes it."""
        protocol = self._current().protocol
        for rank, part in enumerate(parts):
            if part.check_replicas != self._check_replicas:
                own, theirs = self._check_replicas, part.check_replicas
                text = f"it has check_replicas={theirs!r}, but rank 0 has check_replicas={own!r}"
                raise self._make_error(rank, text, "Create the managers of all workers with the same arguments.")
        if (unlike := find_unlike([part.object_set for part in parts])) is not None:
            raise self._make_error(*unlike, OBJECTS_HINT)
        divergences = protocol.query.compare([part.groups for part in parts], self._holding)
        if not self._has_compared and (refused := find_refused(divergences, self._holding.replicas)) is not None:
            raise self._make_error(*refused, VALUES_HINT)
        together = put_together(parts)
        unseen = None
        # No other worker sees into a tier of one's own. Its copy into the next one is checked.
        if self.copier is None and not self._storage.traits.names_are_consistent:
            unseen = find_unseen(self._storage, name, together, self._peers.timeout_seconds)
        if unseen is not None:
            # Another job that has begun to save meanwhile has removed it, for what a dead one had left.
            StoredRun(self._storage).check_fence(name.generation)
            raise self._peers.failures.make_error(unseen)
        with suppress(*([NotFoundError] if self.copier is not None else [])):
            self._coverage.check(self._storage, name, [part.shards for part in parts], [part.values for part in parts])
        # Workers that gave up have written a verdict by now; the others wait for the result.
        protocol.agree()
        manifest = self._own.commit(together, name, metrics, metadata)
        protocol.report_committed("" if self.copier is None else seal(manifest).decode())
        self._emit(describe_parts(name, parts))
        self._warn(name, find_apart([part.positions for part in parts]), divergences)
        return manifest

    def check_valid(self) -> None:
        """**Blocks.** Called if the directory is gone: others may have taken this worker for dead, and removed it."""
        self._own.check_valid()
        self._current().protocol.check_verdict()

    def give_up(self, name: StepName) -> None:
        """Called when the attempt has failed; the others may still be writing there, so it is removed later."""
        if self._save is not None:
            self._save.debris = name

    def fail(self, error: BaseException) -> None:
        """**Blocks.** Reports a failure here to the others, unless they know how the save ends.

        It does not block if the store has failed: then they learn of it when it responds again, if it does.
        """
        self._own.fail(error)
        save = self._save
        if save is None:
            return
        if isinstance(error, LeftOutError):
            self._participant.note_left_out(save.protocol)
            return
        save.is_cut_off = isinstance(error, ClusterError) and not isinstance(error, PeerError)
        if save.is_cut_off:
            self._peers.mailbox.post(partial(save.protocol.report_failure, error))
        else:
            save.protocol.report_failure(error)

    def make_room(self, warn: Callable[[str], object]) -> bool:
        """See `CheckpointWriter`. The leader does it, when its own files have no room."""
        return self._peers.is_leader and self._own.make_room(warn)

    def clean(
        self, newest: StepName, protected: Mapping[StepName, str], manifest: Manifest | None = None
    ) -> Cleaning | None:
        """**Blocks.** Like `RunWriter.clean`, except for directories that others may write to. The leader does it, and
        who was given the manifest for a tier of its own."""
        if not self._peers.is_leader and manifest is None:
            return None
        return self._own.clean(newest, protected, manifest, self._list_busy())

    def add_metrics(self, name: StepName, metrics: Mapping[str, float], seen_generation: int) -> None:
        """See `CheckpointWriter`; the leader does it."""
        if self._peers.is_leader:
            self._own.add_metrics(name, metrics, seen_generation)

    def _list_busy(self) -> list[StepName]:
        """Returns the directories of failed attempts that other workers may still be writing to."""
        return [ending.debris for ending in self._endings if ending.debris is not None]

    def finish(self) -> None:
        """**Blocks.** Ends a save; the leader waits a little until all others are done with it.

        Then it removes the remains of failed attempts that no worker writes to any more; the rest after later saves.
        """
        newest, self._save = self._save, None
        if newest is None:
            return
        protocol = newest.protocol
        if not self._peers.is_leader:
            if newest.is_cut_off:
                self._peers.mailbox.post(protocol.leave)
            else:
                protocol.leave()
            return
        while not self._participant.left_behind.empty():
            self._endings.append(_JointSave(self._participant.left_behind.get(), set(newest.ranks)))
        self._endings.append(newest)
        begun_at = time.monotonic()

        def look() -> bool | None:
            # Each worker has a key of its own, and one may die instead of writing it.
            # Who has missed the plan for a save will not come to it.
            # Training that has come to another save since may wait for the end of this one.
            is_brief = protocol.was_missed or self._participant.saves > protocol.count
            is_late = is_brief and time.monotonic() >= begun_at + _COURTESY_SECONDS
            return True if is_late or not self._look_at(newest) else None

        with suppress(HoldfastError):
            poll(look, SOME_KEYS, begun_at + ANSWER_SECONDS)
            for earlier in self._endings[:-1]:
                self._look_at(earlier)
        ended = [ending for ending in self._endings if not ending.ranks]
        self._endings = [ending for ending in self._endings if ending.ranks]
        for ending in ended:
            ending.protocol.forget(is_newest=ending is newest)
        for ending in ended:
            if ending.debris is not None:
                try:
                    self._own.give_up(ending.debris)
                except HoldfastError as error:
                    self._emit(make_debris_warning(ending.debris, error))

    def _current(self) -> _JointSave:
        assert self._save is not None, "begin() comes first"
        return self._save

    def _make_error(self, rank: int, text: str, hint: str) -> PeerError:
        self._own.forget_image()
        return self._peers.failures.make_error(Failure.of(rank, UsageError.__name__, text, hint))

    def _warn(self, name: StepName, apart: str, divergences: Sequence[Divergence]) -> None:
        """Warns of workers at different positions in shared data, once, and of differing values."""
        # The same number of workers can still go on from it.
        warnings = [apart] if apart and not self._are_apart else []
        self._are_apart = bool(apart)
        if self._check_replicas == "first":
            warnings.append(describe_apart(divergences, self._holding.replicas))
        else:
            for leaf, ranks, _ in divergences[:_MOST_NAMED]:
                self._emit(Diverged(step=name.step, generation=name.generation, tensor=leaf, ranks=ranks))
            if (more := len(divergences) - _MOST_NAMED) > 0:
                text = f"step {name.step}: {more} more replicated tensors differ between workers"
                self._emit(Warned(text=text))
        for text in filter(None, warnings):
            self._emit(Warned(step=name.step, text=text))

    def _look_at(self, ending: _JointSave) -> bool:
        """Checks whether workers may still be at a save."""
        dead = self._peers.failures.dead
        ending.ranks = {rank for rank in ending.ranks if rank not in dead and not ending.protocol.has_left(rank)}
        return bool(ending.ranks)


def describe_parts(name: StepName, parts: Sequence[PartRecord]) -> PartsWritten:
    """**Pure.** Returns how long the workers took, those that took longest first."""
    ranks = sorted(range(len(parts)), key=lambda rank: -parts[rank].background_seconds)[:_MOST_TIMED]
    slowest = [parts[rank] for rank in ranks]
    return PartsWritten(
        step=name.step,
        generation=name.generation,
        ranks=tuple(ranks),
        blocked_seconds=tuple(part.blocked_seconds for part in slowest),
        background_seconds=tuple(part.background_seconds for part in slowest),
        size_bytes=tuple(part.worker.data_bytes + part.worker.index_bytes for part in slowest),
    )


def put_together(parts: Sequence[PartRecord]) -> Receipts:
    """Returns what all workers have written, in order of rank, as the receipts of one step."""
    sums: dict[StepName, tuple[int, int]] = {}
    for part in parts:
        for reference in part.references:
            leaves, size_bytes = sums.get(reference.name, (0, 0))
            sums[reference.name] = (leaves + reference.leaves, size_bytes + reference.size_bytes)
    references = tuple(
        Reference(name.step, name.generation, name.attempt, leaves, size_bytes)
        for name, (leaves, size_bytes) in sorted(sums.items())
    )
    features = {feature for part in parts for feature in part.features}
    nonfinite = {leaf: False for part in parts for leaf in part.exempt}
    nonfinite |= {leaf: True for part in parts for leaf in part.nonfinite}
    count = max(part.nonfinite_count for part in parts)
    return Receipts(tuple(part.worker for part in parts), references, tuple(features), "", nonfinite, count)
