"""What the workers of a job write down for each other about leaving and failing, in the store of the job.

    ACCORD/call/ROUND             what all are to do: save, or save and leave
    ACCORD/pledge/ROUND/RANK      up to where a worker trains while the stop step is not known
    ACCORD/stop/ROUND             the stop step
    ACCORD/outcome/ROUND/RANK     what has come of the save there
    ACCORD/verdict/ROUND          what has come of it altogether
    ACCORD/heard/ROUND            how many have read that
    ACCORD/done/RANK              where a worker's training has ended for good
    ACCORD/end                    where the first one's has
    ACCORD/failure                the first error that has ended a worker's training
    ACCORD/failure-heard          how many have read that
    ACCORD/news                   another value whenever there is something new

What was written first under a name stays, but for the news.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from holdfast.cluster.peers import Peers

_T = TypeVar("_T")


class CallRecord(msgspec.Struct, frozen=True):
    """What all workers are to do, and why.

    Attributes:
        rank: Who has called.
        wanted: `Wanted`, as a number.
        demand: The demand of what was heard, as a number.
        text: What was heard.
        reason: Why now.
        left_seconds: The time that was left then; None if that is not known.
        by_hand: Whether it was a person at a terminal.
        saves: Whether there is time to save, if a save was made since the notice.
    """

    rank: int
    wanted: int
    demand: int
    text: str
    reason: str
    left_seconds: float | None
    by_hand: bool
    saves: bool = True


class StopRecord(msgspec.Struct, frozen=True):
    """The stop step of a round.

    Attributes:
        step: The step.
        absent: Who did not pledge, being dead.
        done: Whose training had ended before.
    """

    step: int
    absent: tuple[int, ...] = ()
    done: tuple[int, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """What has come of the last save: on one worker, or altogether.

    Attributes:
        error: What went wrong; empty if nothing did.
        by_hand: Whether it was a person at a terminal that asked to leave, and nobody else.
        is_proof: Whether a checkpoint of all workers is known to be committed, or there was nothing to be saved.
        is_cause: Whether what went wrong began on that worker, and is no consequence of what others have met with.
    """

    error: str
    by_hand: bool
    is_proof: bool
    is_cause: bool = False


class EndRecord(msgspec.Struct, frozen=True):
    """Where a worker's training has ended.

    Attributes:
        rank: Which worker.
        step: How many steps it has completed.
        collectives: How many collectives among all workers it has begun; None if that is not known.
    """

    rank: int
    step: int
    collectives: int | None = None


class Board:
    """Reads and writes the records of one accord. Each method raises `ClusterError` if the store does not answer."""

    def __init__(self, peers: Peers) -> None:
        """Each worker makes as many of these, in the same order."""
        self._peers = peers
        self._records = peers.open_namespace("accord")

    def settle(self, record: _T, *name: object) -> _T:
        """Writes a record down unless one stands there, and gives what stands there then."""
        standing = self._peers.cluster.set_once(self._key(*name), msgspec.json.encode(record))
        return msgspec.json.decode(standing, type=type(record))

    def read(self, kind: type[_T], *name: object) -> _T | None:
        """What stands there, if anything does."""
        found = self._peers.cluster.try_get(self._key(*name))
        return None if found is None else msgspec.json.decode(found, type=kind)

    def count(self, name: str, amount: int = 0) -> int:
        """Adds to a counter, and gives the sum."""
        return self._peers.cluster.add(self._key(name), amount)

    def rouse(self) -> None:
        """Lets all know that there is something new: what was written before."""
        self._peers.cluster.set(self._key("news"), os.urandom(8))

    def news(self) -> bytes | None:
        """Another value whenever there is something new; None before."""
        return self._peers.cluster.try_get(self._key("news"))

    def forget(self, round_number: int) -> None:
        """Deletes what was written in a round that all have ended."""
        names = [f"{name}/{round_number}" for name in ("call", "stop", "verdict", "heard")]
        ranks = range(self._peers.world_size)
        names += [f"{name}/{round_number}/{rank}" for name in ("pledge", "outcome") for rank in ranks]
        self._peers.delete(map(self._key, names))

    def _key(self, *name: object) -> str:
        return self._records.key(*name)
