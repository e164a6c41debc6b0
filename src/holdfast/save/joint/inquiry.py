"""Where workers do not hold what they should hold alike: the leader asks some of them what they hold, and compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.cluster.peers import Failure, Peers
from holdfast.cluster.protocol import ANSWER_SECONDS, MAX_VALUE_BYTES
from holdfast.errors import DeadlineError, UsageError
from holdfast.save.joint.replicas import (
    LEAVES_HINT,
    MOST_CAMPS,
    Detail,
    Divergence,
    Group,
    Holding,
    find_suspects,
    name_difference,
    name_divergences,
)

_MOST_PIECES: Final = 64
"""So many values of the store may take what one worker has to say. Who would need more says nothing."""


class _ReplicaQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Who is to say what is held, by which groups of workers."""

    ranks: tuple[int, ...]
    groups: tuple[str, ...]


class Inquiry:
    """What is asked and answered in one save. Not thread-safe.

    question                  the leader's: whom it asks about what
    detail/RANK/NUMBER        what one of these holds, in pieces
    detail/RANK               in how many

    Methods raise `ClusterError` if the store does not answer.
    """

    def __init__(self, peers: Peers, key: Callable[[str], str]) -> None:
        """Asks nothing yet.

        Args:
            peers: The workers.
            key: Gives a key of this save.
        """
        self._peers = peers
        self._key = key
        self._asked: tuple[int, ...] = ()
        self.question = key("question")

    def compare(self, groups: Sequence[Sequence[Group]], own: Holding) -> list[Divergence]:
        """**Blocks** where something differs. The leader makes sure that workers hold what they should hold alike.

        Args:
            groups: What each worker has said of it, in order of rank.
            own: What the leader holds.

        Returns:
            The leaves whose values differ.

        Raises:
            PeerError: If workers do not hold the same leaves; it names one of them.
        """
        suspects = find_suspects(groups)
        if not suspects:
            return []
        named = tuple(suspect.holders for suspect in suspects)
        # Those that agree would say the same.
        asked = sorted({camp[0] for suspect in suspects for camp in suspect.camps[:MOST_CAMPS]} - {self._peers.rank})
        self._asked = tuple(asked)
        self._peers.cluster.set(self.question, msgspec.msgpack.encode(_ReplicaQuestion(self._asked, named)))
        end_at = time.monotonic() + ANSWER_SECONDS
        details = {self._peers.rank: own.details(named)}
        for rank in asked:
            # Its bytes are durable: if it is gone, what it holds just is not known.
            with suppress(DeadlineError):
                details[rank] = self._wait_details(rank, end_at)
        found: list[Divergence] = []
        for suspect in suspects:
            held = {rank: detail[suspect.holders] for rank, detail in details.items() if suspect.holders in detail}
            if not suspect.are_named_alike:
                rank, text = name_difference(suspect, held)
                raise self._peers.failures.make_error(Failure.of(rank, UsageError.__name__, text, LEAVES_HINT))
            found += name_divergences(suspect, held)
        return found

    def answer(self, question: bytes, own: Holding) -> None:
        """Says what this worker holds, if it is asked."""
        asked = msgspec.msgpack.decode(question, type=_ReplicaQuestion)
        if self._peers.rank not in asked.ranks:
            return
        data = msgspec.msgpack.encode(own.details(asked.groups))
        pieces = [data[begin : begin + MAX_VALUE_BYTES] for begin in range(0, len(data), MAX_VALUE_BYTES)]
        if len(pieces) > _MOST_PIECES:
            pieces = [msgspec.msgpack.encode({})]
        for number, piece in enumerate(pieces):
            self._peers.cluster.set(self._key(f"detail/{self._peers.rank}/{number}"), piece)
        self._peers.cluster.set(self._key(f"detail/{self._peers.rank}"), b"%d" % len(pieces))

    def forget(self) -> None:
        """The leader deletes all that was said."""
        for rank in self._asked:
            pieces = int(self._peers.cluster.try_get(self._key(f"detail/{rank}")) or 0)
            self._peers.delete(self._key(f"detail/{rank}/{number}") for number in range(pieces))
            self._peers.delete([self._key(f"detail/{rank}")])
        if self._asked:
            self._peers.delete([self.question])
            self._asked = ()

    def _wait_details(self, rank: int, end_at: float) -> dict[str, Detail]:
        cluster = self._peers.cluster
        pieces = int(cluster.wait_get(self._key(f"detail/{rank}"), max(end_at - time.monotonic(), 0.0)))
        data = b"".join(cluster.wait_get(self._key(f"detail/{rank}/{number}"), 0.0) for number in range(pieces))
        return msgspec.msgpack.decode(data, type=dict[str, Detail])
