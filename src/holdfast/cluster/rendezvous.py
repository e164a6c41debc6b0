"""Meetings of all workers: each brings a small record, and gets those of all."""

from __future__ import annotations

import time
from typing import Final, NoReturn

import msgspec

from holdfast.cluster.joining import name_ranks
from holdfast.cluster.protocol import ANSWER_SECONDS, MAX_VALUE_BYTES, Cluster
from holdfast.errors import AbsentError, DeadlineError

_LEADER: Final = 0
_NAMED_NODES: Final = 32


class _Outcome(msgspec.Struct, frozen=True):
    """How a meeting ended: for all that learn of it, alike.

    Attributes:
        absent: Who did not come; empty if all did.
        pieces: In how many pieces the records lie in the store.
    """

    absent: tuple[int, ...] = ()
    pieces: int = 0


def gather(cluster: Cluster, name: str, record: bytes, timeout_seconds: float) -> list[bytes]:
    """**Collective.** **Blocks.** The records of all workers.

    Either all workers that get an answer get the same records, or all get the same error: once one of them has run out
    of time, the meeting has failed for those that come later too.

    Args:
        cluster: The workers.
        name: The meeting's; each name is used once in the life of a cluster.
        record: What this worker brings.
        timeout_seconds: How long to wait for the others.

    Returns:
        The records, in order of rank.

    Raises:
        AbsentError: If workers did not come in time; it names them.
        ClusterError: If the store does not answer.
    """
    if cluster.world_size == 1:
        return [record]
    end_at = time.monotonic() + timeout_seconds
    cluster.set(f"{name}/record/{cluster.rank}", record)
    if cluster.rank == _LEADER:
        return _lead(cluster, name, record, timeout_seconds, end_at)
    return _follow(cluster, name, timeout_seconds, end_at)


def rendezvous(cluster: Cluster, name: str, timeout_seconds: float) -> None:
    """**Collective.** **Blocks.** Waits until all workers have come to this meeting; see `gather`.

    Raises:
        AbsentError: If workers did not come in time; it names them.
        ClusterError: If the store does not answer.
    """
    gather(cluster, name, b"", timeout_seconds)


def _lead(cluster: Cluster, name: str, record: bytes, timeout_seconds: float, end_at: float) -> list[bytes]:
    records = [record]
    for rank in range(1, cluster.world_size):
        try:
            records.append(cluster.wait_get(f"{name}/record/{rank}", max(end_at - time.monotonic(), 0.0)))
        except DeadlineError:
            outcome = _decide(cluster, name, _Outcome(absent=_find_missing(cluster, name) or (rank,)))
            _raise_absent(cluster, name, outcome.absent, timeout_seconds)
    joined = msgspec.msgpack.encode(records)
    starts = range(0, len(joined), MAX_VALUE_BYTES)
    for number, start in enumerate(starts):
        cluster.set(f"{name}/records/{number}", joined[start : start + MAX_VALUE_BYTES])
    outcome = _decide(cluster, name, _Outcome(pieces=len(starts)))
    if outcome.absent:
        # Somebody's time had run out before the last one came.
        _raise_absent(cluster, name, outcome.absent, timeout_seconds)
    for rank in range(cluster.world_size):
        cluster.delete(f"{name}/record/{rank}")
    return records


def _follow(cluster: Cluster, name: str, timeout_seconds: float, end_at: float) -> list[bytes]:
    try:
        data = cluster.wait_get(f"{name}/outcome", max(end_at - time.monotonic(), 0.0))
        outcome = msgspec.json.decode(data, type=_Outcome)
    except DeadlineError:
        # When all have come, it is the leader that has not answered.
        outcome = _decide(cluster, name, _Outcome(absent=_find_missing(cluster, name) or (_LEADER,)))
    if outcome.absent:
        _raise_absent(cluster, name, outcome.absent, timeout_seconds)
    # The leader has put these down before the outcome.
    pieces = [cluster.wait_get(f"{name}/records/{number}", ANSWER_SECONDS) for number in range(outcome.pieces)]
    records = msgspec.msgpack.decode(b"".join(pieces), type=list[bytes])
    if cluster.add(f"{name}/read", 1) == cluster.world_size - 1:
        # All have read: the last one leaves nothing behind.
        for key in ("outcome", "read", *(f"records/{number}" for number in range(outcome.pieces))):
            cluster.delete(f"{name}/{key}")
    return records


def _find_missing(cluster: Cluster, name: str) -> tuple[int, ...]:
    return tuple(rank for rank in range(cluster.world_size) if cluster.try_get(f"{name}/record/{rank}") is None)


def _decide(cluster: Cluster, name: str, outcome: _Outcome) -> _Outcome:
    return msgspec.json.decode(cluster.set_once(f"{name}/outcome", msgspec.json.encode(outcome)), type=_Outcome)


def _raise_absent(cluster: Cluster, name: str, absent: tuple[int, ...], timeout_seconds: float) -> NoReturn:
    raise make_absent_error(cluster, absent, f"did not come to {name!r} within {timeout_seconds:g} s")


def make_absent_error(cluster: Cluster, ranks: tuple[int, ...], what: str, *, hint: str = "") -> AbsentError:
    """The error that names workers and where they run.

    Args:
        cluster: The workers.
        ranks: Who is missing.
        what: What they have not done, as the end of a sentence.
        hint: What to do about it; empty for what is to be done as a rule.
    """
    # Of very many it is enough to know where some were.
    nodes = tuple(cluster.node_of(rank) if place < _NAMED_NODES else "" for place, rank in enumerate(ranks))
    places = ", ".join(sorted({node for node in nodes if node}))
    on = f" on {places}" if places else ""
    return AbsentError(
        f"{name_ranks(ranks)} of {cluster.world_size}{on} {what}",
        ranks=ranks,
        nodes=nodes,
        hint=hint or "Look whether these processes still run, and what they have written last.",
    )
