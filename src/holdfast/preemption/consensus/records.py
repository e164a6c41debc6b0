"""What the workers of a job write down for each other about leaving and failing, in the store of the job.

    STOP/call/ROUND             what all are to do: save, or save and leave
    STOP/pledge/ROUND/RANK      up to where a worker trains while the stop step is not known
    STOP/stop/ROUND             the stop step
    STOP/outcome/ROUND/RANK     the result of the save there
    STOP/verdict/ROUND          the result of it on all workers
    STOP/heard/ROUND            how many have read that
    STOP/done/RANK              where a worker's training has ended for good
    STOP/end                    where the first one's has
    STOP/failure                the first error that has ended a worker's training
    STOP/failure-heard          how many have read that
    STOP/news                   another value whenever there is something new

What was written first under a name stays, but for the news.
"""

from __future__ import annotations

import os
from typing import Final, Generic, TypeVar

import msgspec

from holdfast.cluster.peers import Failure, Peers
from holdfast.preemption.consensus.single import CallRecord, SaveOutcome, StopRecord
from holdfast.preemption.consensus.stop_step import Pledge

_T = TypeVar("_T")


class TrainingEnd(msgspec.Struct, frozen=True):
    """Where a worker's training has ended.

    Attributes:
        rank: Which worker.
        step: How many steps it has completed.
        collectives: How many collectives among all workers it has begun; None if that is not known.
    """

    rank: int
    step: int
    collectives: int | None = None


class RecordKey(msgspec.Struct, Generic[_T], frozen=True):
    """A name in the store, and the type of the record under it; a round and a rank may follow."""

    name: str
    kind: type[_T]


CALL: Final = RecordKey("call", CallRecord)
PLEDGE: Final = RecordKey("pledge", Pledge)
STOP: Final = RecordKey("stop", StopRecord)
OUTCOME: Final = RecordKey("outcome", SaveOutcome)
VERDICT: Final = RecordKey("verdict", SaveOutcome)
DONE: Final = RecordKey("done", TrainingEnd)
END: Final = RecordKey("end", TrainingEnd)
FAILURE: Final = RecordKey("failure", Failure)
HEARD: Final = "heard"
FAILURE_HEARD: Final = "failure-heard"
_NEWS: Final = "news"


class CoordinationStore:
    """Reads and writes these records. Each method raises `ClusterError` if the store does not answer."""

    def __init__(self, peers: Peers) -> None:
        """Each worker makes as many of these, in the same order."""
        self._peers = peers
        self._records = peers.open_namespace("stop")

    def set_once(self, key: RecordKey[_T], record: _T, *place: int) -> _T:
        """Writes a record down unless there is one already, and gives the one that is there then."""
        stored = self._peers.cluster.set_once(self._name(key.name, place), msgspec.json.encode(record))
        return msgspec.json.decode(stored, type=key.kind)

    def read(self, key: RecordKey[_T], *place: int) -> _T | None:
        """The record that is there, if any is."""
        found = self._peers.cluster.try_get(self._name(key.name, place))
        return None if found is None else msgspec.json.decode(found, type=key.kind)

    def count(self, counter: str, *place: int, amount: int = 0) -> int:
        """Adds to a counter, and gives the sum."""
        return self._peers.cluster.add(self._name(counter, place), amount)

    def announce(self) -> None:
        """Lets all know that there is something new: what was written before."""
        self._peers.cluster.set(self._name(_NEWS), os.urandom(8))

    def read_news(self) -> bytes | None:
        """Another value whenever there is something new; None before."""
        return self._peers.cluster.try_get(self._name(_NEWS))

    def delete_round(self, number: int) -> None:
        """Deletes what was written in a round that all have ended."""
        names = [self._name(name, (number,)) for name in (CALL.name, STOP.name, VERDICT.name, HEARD)]
        for rank in range(self._peers.world_size):
            names += [self._name(key.name, (number, rank)) for key in (PLEDGE, OUTCOME)]
        self._peers.delete(names)

    def _name(self, name: str, place: tuple[int, ...] = ()) -> str:
        return self._records.key(name, *place)
