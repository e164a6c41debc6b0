"""The protocol of one save: what the workers write for each other in the store of the job.

Workers derive a save's id without communication: (restore count, step, attempt).

    save/PLACE/name           the directory, by the leader
    save/PLACE/part/RANK      what a worker has written
    save/PLACE/question       the leader's question to some workers; see `save/joint/replicas.py`
    save/PLACE/verdict        whether to commit it: written once, by the first that knows
    save/PLACE/result         the result of the commit, by the leader
    save/PLACE/left/RANK      that a worker is done with this save
    at/RANK                   the progress of a worker
    plan                      the next save that the leader has planned in advance
    plan-missed/NUMBER        that a worker had passed that step when it learned of the plan
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.cluster.barrier import LEADER
from holdfast.cluster.peers import Failure, Peers
from holdfast.cluster.polling import SAVE_POSITIONS_SECONDS
from holdfast.errors import AbsentError, FencedError, HoldfastError, PeerError, UsageError
from holdfast.format.records import Reference, WorkerRecord
from holdfast.save.handle import LeftOutError
from holdfast.save.joint.coverage import ObjectSetDigest
from holdfast.save.joint.replicas import HeldReplicas, ReplicaDigest, ReplicaQuery
from holdfast.state.data.position import PositionRecord


class SaveId(msgspec.Struct, frozen=True, array_like=True):
    """The id of one save, the same on all workers.

    Attributes:
        epoch: How often the run had been restored.
        step: The step.
        turn: The number of the attempt at it in that epoch, from 1.
    """

    epoch: int
    step: int
    turn: int

    def key(self, name: str) -> str:
        """Returns the key of a record about this save."""
        return f"save/{self.epoch}.{self.step}.{self.turn}/{name}"


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a worker.

    Attributes:
        count: How many saves it has come to.
        place: The last of them.
        has_ended: True if all records of that one have been deleted.
        was_committed: True if it was committed; written with its end.
    """

    count: int
    place: SaveId
    has_ended: bool = False
    was_committed: bool = False

    def is_beyond(self, other: WorkerProgress) -> bool:
        """Returns True if a worker at this position will no longer come to that of another one."""
        return self.place != other.place and self.count >= other.count


class SaveIdAllocator:
    """**Thread-safe.** Gives each save of this worker its id.

    Attributes:
        epoch: How often the run has been restored.
        count: How many saves this worker has come to.
    """

    def __init__(self) -> None:
        # Guards the other three.
        self._lock = threading.Lock()
        self.epoch = 0
        self.count = 0
        self._turns: dict[int, int] = {}

    def begin_epoch(self) -> None:
        """Called when the run has been restored: from now on steps may come again."""
        with self._lock:
            self.epoch += 1
            self._turns = {}

    def pass_by(self) -> None:
        """Counts a save that this worker could not come to: it has passed it."""
        with self._lock:
            self.count += 1

    def take(self, step: int) -> WorkerProgress:
        """Returns the id of the next save of a step."""
        with self._lock:
            self.count += 1
            turn = self._turns[step] = self._turns.get(step, 0) + 1
            return WorkerProgress(self.count, SaveId(self.epoch, step, turn))


class NameRecord(msgspec.Struct, frozen=True):
    """The directory of a save.

    Attributes:
        generation: The generation of the job.
        attempt: The number of the attempt at the step.
        base: The checkpoint from which the generation began, as step, generation and attempt; None for the beginning.
        opening: The digest of the record that opened the generation: it proves to a worker that it sees the same run.
        url: The URL of the run on the leader.
        records: Of a run in tiers, the records of the generation, by path: a worker may have a tier of its own.
    """

    generation: int
    attempt: int
    base: tuple[int, int, int] | None
    opening: str
    url: str
    records: dict[str, str] = {}


class PartRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a step that a worker has made durable.

    Attributes:
        worker: Its record for the manifest.
        references: The earlier steps that it refers to.
        features: The features that a reader must know to read its index.
        groups: Digests of what it holds together with others.
        shards: The digest of the boxes of its loose leaves; see `save/joint/coverage.py`.
        values: The digest of their values.
        check_replicas: At which saves it compares replicated state.
        positions: Its positions in the data.
        object_set: The digest of its objects.
        nonfinite: The first leaves that are not finite here and not exempt.
        nonfinite_count: How many there are.
        exempt: At the run's first checkpoint, those that are to be exempt.
        blocked_seconds, background_seconds: How long it took, as in `PartsWritten`.
    """

    worker: WorkerRecord
    references: tuple[Reference, ...]
    features: tuple[str, ...]
    groups: list[ReplicaDigest]
    shards: str = ""
    values: str = ""
    check_replicas: bool | Literal["first"] = "first"
    positions: list[PositionRecord] = []
    object_set: ObjectSetDigest = ObjectSetDigest()
    nonfinite: tuple[str, ...] = ()
    nonfinite_count: int = 0
    exempt: tuple[str, ...] = ()
    blocked_seconds: float = 0.0
    background_seconds: float = 0.0


class EndRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict or a result; a success unless one of these is set.

    Attributes:
        failure: Whose failure ends the save; None if there is none.
        left_out: Why it is skipped, which is not a failure; empty if it is not.
        manifest: Of a run in tiers, the manifest of the committed step: a worker may have a tier of its own.
    """

    failure: Failure | None = None
    left_out: str = ""
    manifest: str = ""

    @property
    def is_well(self) -> bool:
        """True if the save continues, or has succeeded."""
        return self.failure is None and not self.left_out


WELL: Final = EndRecord()


_T = TypeVar("_T")


_LATE_HINT: Final = "It was taken for dead: was it disconnected from the others, or stopped for a while?"
_WAY_HINT: Final = "All workers must save the same steps, in the same order."


class _CommittedError(Exception):
    """The others have committed the save, and no longer wait for this worker."""


class CommitProtocol:
    """One save as this worker communicates about it with the others. Not thread-safe.

    The first worker that knows how a save ends writes it, create-only: the *verdict*. A failure on any worker is one.
    The leader's verdict, to commit the save, comes when it has the parts of all; after that only the leader itself can
    fail, which is the *result*.

    Each method raises `ClusterError` if the store does not respond. A method that waits or agrees raises `PeerError` if
    another worker has failed, is gone, or is late, and `LeftOutError` if one cannot take part.

    Attributes:
        place: The id of the save.
        count: The number of this worker's save.
        was_missed: True once the leader has found that another worker learned of it too late.
        query: The leader's question if workers hold different leaves.
    """

    def __init__(self, peers: Peers, position: WorkerProgress, watched: str = "") -> None:
        """`watched` is a key that gets a value, a reason, if another worker cannot take part; or nothing."""
        self._peers = peers
        self._position = position
        self._watched = watched
        self.place = position.place
        self.count = position.count
        self.was_missed = False
        self.query = ReplicaQuery(peers, self._key)
        # True if the others have ended it without this worker: then its messages would not be read, or deleted.
        self._is_over = False
        self._has_handed_in = False
        self._has_failed = False
        self._is_committed = False

    def announce(self, **changes: bool) -> None:
        """Reports that this worker is at this save, or how that has ended."""
        data = msgspec.json.encode(replace(self._position, **changes))
        self._peers.cluster.set(self._peers.key("at", self._peers.rank), data)

    def put_name(self, record: NameRecord) -> None:
        """On the leader, reports where to write."""
        self._put("name", record)

    def wait_name(self) -> NameRecord:
        """**Blocks.** Returns where to write, as the leader reports it."""
        return self._wait("name", NameRecord, (LEADER,), f"begin to save step {self.place.step}")

    def hand_in(self, record: PartRecord, holding: HeldReplicas) -> str:
        """**Blocks.** Reports what this worker has made durable, and waits until the step is committed.

        Returns the manifest, if the leader has sent it; empty if not, or if it did not wait for this worker.

        Meanwhile it answers the leader's question about what it holds together with others. Raises `FencedError` if
        another job has taken over.
        """
        part = f"part/{self._peers.rank}"
        self._has_handed_in = True
        self._put(part, record)
        what = f"commit step {self.place.step}"
        end = WELL
        try:
            self._raise_unless_well(end := self._wait("result", EndRecord, (LEADER,), what, holding=holding))
        except _CommittedError:
            # The leader had this part, and did not wait until this worker had heard of the commit.
            pass
        finally:
            if self._is_over:
                # It may have come after the leader had deleted all messages.
                self._peers.delete([self._key(part)])
        return end.manifest

    def collect_parts(self) -> list[PartRecord]:
        """**Blocks.** Returns what all workers except the leader have made durable, in order of rank."""
        parts: dict[int, PartRecord] = {}
        others = range(1, self._peers.world_size)
        begun_at = time.monotonic()

        def missing() -> Collection[int]:
            # One that has done its part, and is gone then, is not missed.
            for rank in self._peers.failures.dead & set(others) - parts.keys():
                data = self._peers.cluster.try_get(self._key(f"part/{rank}"))
                if data is not None:
                    parts[rank] = msgspec.json.decode(data, type=PartRecord)
            return [rank for rank in others if rank not in parts]

        what = f"write its part of step {self.place.step}"
        for rank in others:
            if rank not in parts:
                parts[rank] = self._wait(f"part/{rank}", PartRecord, (rank,), what, missing, begun_at)
        return [parts[rank] for rank in others]

    def agree(self) -> None:
        """On the leader, writes that the step is to be committed: from here on no other worker can end the save."""
        self._raise_unless_well(self._decide(WELL))

    def report_committed(self, manifest: str = "") -> None:
        """On the leader, writes that the step is committed; it is, even if the others do not learn of it."""
        self._is_committed = True
        with suppress(HoldfastError):
            self._put("result", EndRecord(manifest=manifest))

    def report_left_out(self, reason: str) -> None:
        """Reports that this worker cannot take part."""
        self._decide(EndRecord(left_out=f"rank {self._peers.rank} cannot take part: {reason}"))

    def try_cancel(self, error: BaseException) -> bool:
        """**Thread-safe.** **Blocks.** Ends the save with an error, unless all agreed to commit it; True if it has
        ended."""
        return not self._decide(EndRecord(failure=self._peers.failures.describe(error))).is_well

    def check_verdict(self) -> None:
        """**Blocks.** Raises the verdict of the others about the save, if it has ended for them; see `hand_in`."""
        verdict = self._peers.cluster.try_get(self._key("verdict"))
        if verdict is not None:
            self._raise_unless_well(msgspec.json.decode(verdict, type=EndRecord))
        self._check_way(LEADER)

    def report_failure(self, error: BaseException) -> None:
        """Reports to the others that the save has failed here, unless they know how it ends, as far as possible."""
        self._has_failed = True
        if self._is_over:
            return
        end = EndRecord(failure=self._peers.failures.describe(error))
        with suppress(HoldfastError):
            if self._decide(end).is_well and self._peers.is_leader:
                # It was to be committed, and that is what has failed.
                self._put("result", end)
            self._take_back(self._key("verdict"))

    def leave(self) -> None:
        """Reports that this worker is done with the save, as far as possible."""
        if self._is_over:
            return
        left = self._key(f"left/{self._peers.rank}")
        with suppress(HoldfastError):
            self._peers.cluster.set(left, b"")
            if self._has_failed:
                self._take_back(left)

    def has_left(self, rank: int) -> bool:
        """Returns True if another worker is done with the save, or has passed it and will never come."""
        if self._peers.cluster.try_get(self._key(f"left/{rank}")) is not None:
            return True
        # In a save that is committed all have taken part, and each will say so.
        position = None if self._is_committed else self._find_position(rank)
        return position is not None and position.is_beyond(self._position)

    def forget(self, *, is_newest: bool) -> None:
        """On the leader, deletes all records: no live worker reads them any more.

        If the leader has come to no other save since, a worker taken for dead that comes to this one after all learns
        that it is too late, and how it ended.
        """
        if is_newest:
            # Before the keys go: who says something later takes it back.
            with suppress(HoldfastError):
                self.announce(has_ended=True, was_committed=self._is_committed)
        with suppress(HoldfastError):
            self.query.forget()
        keys = [*map(self._key, ("name", "verdict", "result"))]
        keys += [self._key(f"{name}/{rank}") for name in ("part", "left") for rank in range(self._peers.world_size)]
        self._peers.delete([*keys, *([self._watched] if self._watched else [])])

    def _decide(self, end: EndRecord) -> EndRecord:
        """Writes how the save ends, unless that is known; returns the stored verdict."""
        verdict = self._peers.cluster.set_once(self._key("verdict"), msgspec.json.encode(end))
        return msgspec.json.decode(verdict, type=EndRecord)

    def _raise_unless_well(self, end: EndRecord) -> None:
        if end.left_out:
            raise LeftOutError(end.left_out)
        if end.failure is None:
            return
        failure = end.failure
        if failure.rank == self._peers.rank and failure.kind == AbsentError.__name__:
            # It knows that it lives, and not that it was silent.
            text = f"{failure.text}, so the other workers abandoned the save of step {self.place.step}"
            failure = replace(failure, text=text, hint=_LATE_HINT)
        error = self._peers.failures.make_error(failure)
        if end.failure.kind == FencedError.__name__:
            # That concerns the whole job, no matter which worker has found it.
            raise FencedError(end.failure.text, hint=end.failure.hint) from error
        raise error

    def _wait(
        self,
        name: str,
        kind: type[_T],
        doers: Collection[int],
        what: str,
        ranks: Callable[[], Collection[int]] | None = None,
        begun_at: float | None = None,
        holding: HeldReplicas | None = None,
    ) -> _T:
        """Returns the record of a name, unless the save ends before.

        `doers` write it. `ranks` returns all that must do it, if that is more; they must be alive as well. A question
        of the leader is answered with what this worker is `holding`; None if none can come yet.
        """
        look_at = time.monotonic()
        awaited: list[str] = []

        def watch() -> Collection[int]:
            nonlocal look_at
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + SAVE_POSITIONS_SECONDS
                for rank in doers:
                    self._check_way(rank, awaited)
            return ranks() if ranks is not None else doers

        own, verdict, question = self._key(name), self._key("verdict"), self.query.question
        # Once there is a verdict, nothing else matters. The result comes after it.
        awaited = [verdict, own if holding is None else question, *([self._watched] if self._watched else [])]
        try:
            key, value = self._peers.wait_any(awaited, watch, what, begun_at)
            if key == question and holding is not None:
                self.query.answer(value, holding)
                awaited = [verdict]
                key, value = self._peers.wait_any([verdict], watch, what, begun_at)
        except PeerError as error:
            if not self._has_handed_in or self._is_over or self.try_cancel(error):
                raise
            # All agreed to commit at this very moment.
            key, value = verdict, msgspec.json.encode(WELL)
        if key == self._watched:
            self.was_missed = True
            self._raise_unless_well(self._decide(EndRecord(left_out=value.decode())))
        if key == verdict:
            self._raise_unless_well(msgspec.json.decode(value, type=EndRecord))
            # It is to be committed: now only the leader can say how that went. If the job's time is over, a worker that
            # gave up here would say that nothing is saved, and the others that it is.
            awaited = [own]
            _, value = self._peers.wait_any([own], watch, what, begun_at, outlasts_job=self._has_handed_in)
        return msgspec.json.decode(value, type=kind)

    def _check_way(self, rank: int, awaited: Collection[str] = ()) -> None:
        """Checks that a worker has not continued with another save without this one.

        A worker that has written what is awaited, under one of those keys, may continue.
        """
        position = self._find_position(rank)
        if position is None:
            return
        is_beyond = position.is_beyond(self._position)
        if is_beyond or position.has_ended:
            for key in awaited:
                if self._peers.cluster.try_get(key) is not None:
                    return
        if is_beyond:
            # The leader does not come here again to read or to delete messages.
            self._is_over = self._is_over or rank == LEADER
            text = f"it saves step {position.place.step}, but rank {self._peers.rank} saves step {self.place.step}"
            raise self._peers.failures.make_error(Failure.of(rank, UsageError.__name__, text, _WAY_HINT))
        if position.has_ended and position.place == self.place and rank == LEADER:
            self._is_over = True
            if position.was_committed and self._has_handed_in:
                raise _CommittedError
            text = f"reached the save of step {self.place.step} after the others had abandoned it"
            raise self._peers.failures.make_error(Failure.of(self._peers.rank, AbsentError.__name__, text, _LATE_HINT))

    def _find_position(self, rank: int) -> WorkerProgress | None:
        data = self._peers.cluster.try_get(self._peers.key("at", rank))
        return None if data is None else msgspec.json.decode(data, type=WorkerProgress)

    def _take_back(self, key: str) -> None:
        """Deletes this worker's records if the leader has deleted all: a worker taken for dead may write too late."""
        position = self._find_position(LEADER)
        if position is not None and position.has_ended and position.place == self.place:
            self._peers.delete([key])

    def _put(self, name: str, record: msgspec.Struct) -> None:
        self._peers.cluster.set(self._key(name), msgspec.json.encode(record))

    def _key(self, name: str) -> str:
        return self._peers.key(self.place.key(name))
