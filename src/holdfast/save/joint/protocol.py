"""What the workers tell each other about one save, through the store of the job.

Workers do not communicate before a save begins, so each derives the same name for it: how often the run was
restored, the step, and the number of the attempt at that step.

    save/PLACE/name           the directory, by the leader
    save/PLACE/part/RANK      what a worker has written
    save/PLACE/question       what the leader asks some workers; see `save/joint/replicas.py`
    save/PLACE/verdict        whether it is to be committed: written once, by the first that knows
    save/PLACE/result         how the commit went, by the leader
    save/PLACE/left/RANK      that a worker has done with this save
    at/RANK                   where a worker is
    plan                      the next save that the leader has planned ahead
    plan-missed/NUMBER        that a worker had passed that step when it heard of the plan
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
from holdfast.format.names import StepName
from holdfast.format.records import Reference, WorkerRecord
from holdfast.save.joint.coverage import ObjectSetDigest
from holdfast.save.joint.replicas import HeldReplicas, ReplicaDigest, ReplicaQuery
from holdfast.save.records import LeftOutError
from holdfast.state.data.position import PositionRecord


class SaveId(msgspec.Struct, frozen=True, array_like=True):
    """One save, as all workers know it.

    Attributes:
        epoch: How often the run had been restored.
        step: The step.
        turn: The how manieth try at it in that epoch, from 1.
    """

    epoch: int
    step: int
    turn: int

    def key(self, name: str) -> str:
        """The key of something about this save."""
        return f"save/{self.epoch}.{self.step}.{self.turn}/{name}"


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker is.

    Attributes:
        count: How many saves it has come to.
        place: The last of them.
        has_ended: Whether all that was said about that one has been deleted.
        was_committed: Whether it ended well; said with its end.
    """

    count: int
    place: SaveId
    has_ended: bool = False
    was_committed: bool = False

    def is_beyond(self, other: WorkerProgress) -> bool:
        """Whether a worker at this position will not come to that of another one any more."""
        return self.place != other.place and self.count >= other.count


class SaveIdAllocator:
    """**Thread-safe.** Gives each save of this worker its place.

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
        """The run has been restored: from now on steps may come again."""
        with self._lock:
            self.epoch += 1
            self._turns = {}

    def pass_by(self) -> None:
        """A save was asked for that this worker could not come to: it is past it all the same."""
        with self._lock:
            self.count += 1

    def take(self, step: int) -> WorkerProgress:
        """Where the next save of a step has its place."""
        with self._lock:
            self.count += 1
            turn = self._turns[step] = self._turns.get(step, 0) + 1
            return WorkerProgress(self.count, SaveId(self.epoch, step, turn))


class NameRecord(msgspec.Struct, frozen=True):
    """Where a save lies.

    Attributes:
        generation: The generation of the job.
        attempt: Which attempt at the step.
        base: The checkpoint from which the generation began, as step, generation and attempt; None if anew.
        opening: The digest of the record that opened the generation: by it a worker knows that it sees the same run.
        url: Where the run lies for the leader.
    """

    generation: int
    attempt: int
    base: tuple[int, int, int] | None
    opening: str
    url: str

    @property
    def base_name(self) -> StepName | None:
        """The checkpoint from which the generation began, or None."""
        return None if self.base is None else StepName(*self.base)


class PartRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker has made to last.

    Attributes:
        worker: Its record for the manifest.
        references: The earlier steps that it refers to.
        features: What a reader has to understand to read its index.
        groups: What it says of what it holds together with others.
        shards: What it says of the boxes of its loose leaves; see `save/joint/coverage.py`.
        values: What it says of their values.
        check_replicas: At which saves it is to compare what workers hold alike.
        positions: How far it has got in its data.
        object_set: Which objects it has.
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


class EndRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict or a result; well unless one of these says otherwise.

    Attributes:
        failure: Whose failure ends the save; None if there is none.
        left_out: Why it is left out, which is no failure; empty if it is not.
    """

    failure: Failure | None = None
    left_out: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the save goes on, or has gone well."""
        return self.failure is None and not self.left_out


WELL: Final = EndRecord()


_T = TypeVar("_T")


class _CommittedError(Exception):
    """The others have committed the save, and wait for this worker no more."""


class CommitProtocol:
    """One save as this worker speaks of it with the others. Not thread-safe.

    Whoever knows first how a save ends writes it down, create-only: the *verdict*. A failure on any worker is one. The
    leader's, that the save is to be committed, comes when it has the parts of all; then no failure can come any more
    but the leader's own, which is the *result*.

    Each method raises `ClusterError` if the store does not answer. One that waits or agrees raises `PeerError` if
    another worker has failed, is gone, or is late, and `LeftOutError` if one cannot take part.

    Attributes:
        place: Which save it is.
        count: The how manieth of this worker's saves.
        was_missed: True once the leader has found that another worker had heard of it too late.
        query: What the leader asks where workers do not hold the same.
    """

    def __init__(self, peers: Peers, position: WorkerProgress, watched: str = "") -> None:
        """`watched` is a key that comes to hold a reason if another worker cannot take part; or nothing."""
        self._peers = peers
        self._position = position
        self._watched = watched
        self.place = position.place
        self.count = position.count
        self.was_missed = False
        self.query = ReplicaQuery(peers, self._key)
        # Whether the others have ended it without this worker: then nobody would read, or delete, what it says.
        self._is_over = False
        self._has_handed_in = False
        self._has_failed = False
        self._is_committed = False

    def announce(self) -> None:
        """Says that this worker is at this save."""
        self._announce(self._position)

    def put_name(self, record: NameRecord) -> None:
        """The leader says where to write."""
        self._put("name", record)

    def wait_name(self) -> NameRecord:
        """**Blocks.** Where to write, as the leader says."""
        return self._wait("name", NameRecord, (LEADER,), f"begin to save step {self.place.step}")

    def hand_in(self, record: PartRecord, holding: HeldReplicas) -> None:
        """**Blocks.** Says what this worker has made to last, and waits until the step is committed.

        Meanwhile it answers the leader's question what it holds together with others. Raises `FencedError` if another
        job has taken over.
        """
        part = f"part/{self._peers.rank}"
        self._has_handed_in = True
        self._put(part, record)
        what = f"commit step {self.place.step}"
        try:
            self._raise_unless_well(self._wait("result", EndRecord, (LEADER,), what, holding=holding))
        except _CommittedError:
            # The leader had this part, and did not wait until this worker had heard of the commit.
            pass
        finally:
            if self._is_over:
                # It may have come after the leader had deleted all that was said.
                self._peers.delete([self._key(part)])

    def collect_parts(self) -> list[PartRecord]:
        """**Blocks.** What all workers but the leader have made to last, in order of rank."""
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
        """The leader says that the step is to be committed: from here on no other worker can end the save."""
        self._raise_unless_well(self._decide(WELL))

    def tell_committed(self) -> None:
        """The leader says that the step is committed; it is, whether the others hear of it or not."""
        self._is_committed = True
        with suppress(HoldfastError):
            self._put("result", WELL)

    def leave_out(self, reason: str) -> None:
        """Says that this worker cannot take part."""
        self._decide(EndRecord(left_out=f"rank {self._peers.rank} cannot take part: {reason}"))

    def tell(self, error: BaseException) -> None:
        """Tells the others that the save has failed here, unless they know how it ends. Does what can be done."""
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
        """Says that this worker has done with the save, whatever came of it. Does what can be done."""
        if self._is_over:
            return
        left = self._key(f"left/{self._peers.rank}")
        with suppress(HoldfastError):
            self._peers.cluster.set(left, b"")
            if self._has_failed:
                self._take_back(left)

    def has_left(self, rank: int) -> bool:
        """Whether another worker has done with the save, or has gone past it and will never come."""
        if self._peers.cluster.try_get(self._key(f"left/{rank}")) is not None:
            return True
        # In a save that is committed all have taken part, and each will say so.
        position = None if self._is_committed else self._find_position(rank)
        return position is not None and position.is_beyond(self._position)

    def forget(self, *, is_newest: bool) -> None:
        """The leader deletes all that was said: whoever lives reads it no more.

        If it has come to no other save since, a worker taken for dead that comes to this one after all learns that
        it is too late, and how it ended.
        """
        if is_newest:
            # Before the keys go: who says something later takes it back.
            with suppress(HoldfastError):
                self._announce(replace(self._position, has_ended=True, was_committed=self._is_committed))
        with suppress(HoldfastError):
            self.query.forget()
        keys = [*map(self._key, ("name", "verdict", "result"))]
        keys += [self._key(f"{name}/{rank}") for name in ("part", "left") for rank in range(self._peers.world_size)]
        self._peers.delete([*keys, *([self._watched] if self._watched else [])])

    def _decide(self, end: EndRecord) -> EndRecord:
        """Writes down how the save ends, unless that is known; gives what is written there."""
        standing = self._peers.cluster.set_once(self._key("verdict"), msgspec.json.encode(end))
        return msgspec.json.decode(standing, type=EndRecord)

    def _raise_unless_well(self, end: EndRecord) -> None:
        if end.left_out:
            raise LeftOutError(end.left_out)
        if end.failure is None:
            return
        failure = end.failure
        if failure.rank == self._peers.rank and failure.kind == AbsentError.__name__:
            # It knows that it lives, and not that it was silent.
            told = f"{failure.text}, so the other workers abandoned the save of step {self.place.step}"
            failure = replace(failure, text=told, hint=_LATE_HINT)
        error = self._peers.failures.make_error(failure)
        if end.failure.kind == FencedError.__name__:
            # That concerns the whole job, whoever has found it out.
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
        """What is said under a name, unless the save ends otherwise before.

        `doers` say it. `ranks` gives all that are to do it, if that is more; they must live as well. A question of the
        leader is answered with what this worker is `holding`; None if none can come yet.
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
        # When there is a verdict, all else does not matter any more. The result comes behind it.
        awaited = [verdict, own if holding is None else question, *([self._watched] if self._watched else [])]
        try:
            key, value = self._peers.wait_any(awaited, watch, what, begun_at)
            if key == question and holding is not None:
                self.query.answer(value, holding)
                awaited = [verdict]
                key, value = self._peers.wait_any([verdict], watch, what, begun_at)
        except PeerError as error:
            if not self._has_handed_in or self._is_over or try_cancel(self, error):
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
        """Makes sure that a worker has not gone on to another save without this one.

        One that has said what was awaited of it, by one of those keys, may go on: it need not wait until it is heard.
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
            # The leader comes here no more, to read or to delete what is said.
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

    def _announce(self, position: WorkerProgress) -> None:
        self._peers.cluster.set(self._peers.key("at", self._peers.rank), msgspec.json.encode(position))

    def _take_back(self, key: str) -> None:
        """Deletes what was said if the leader has deleted all: one that was taken for dead may speak too late."""
        position = self._find_position(LEADER)
        if position is not None and position.has_ended and position.place == self.place:
            self._peers.delete([key])

    def _put(self, name: str, record: msgspec.Struct) -> None:
        self._peers.cluster.set(self._key(name), msgspec.json.encode(record))

    def _key(self, name: str) -> str:
        return self._peers.key(self.place.key(name))


def try_cancel(protocol: CommitProtocol, error: BaseException) -> bool:
    """**Thread-safe.** **Blocks.** Ends a save with an error, unless all agreed to commit it; whether it has ended."""
    return not protocol._decide(EndRecord(failure=protocol._peers.failures.describe(error))).is_well


def check_verdict(protocol: CommitProtocol) -> None:
    """**Blocks.** Raises what the others have said of a save, if it has ended for them; see `hand_in`."""
    verdict = protocol._peers.cluster.try_get(protocol._key("verdict"))
    if verdict is not None:
        protocol._raise_unless_well(msgspec.json.decode(verdict, type=EndRecord))
    protocol._check_way(LEADER)


_LATE_HINT: Final = "It was taken for dead: was it disconnected from the others, or stopped for a while?"
_WAY_HINT: Final = "All workers must save the same steps, in the same order."
