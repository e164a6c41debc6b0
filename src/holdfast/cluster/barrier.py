"""Meetings of all workers: each brings a small record, and gets those of all, or the leader's answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final, NoReturn, TypeAlias

import msgspec

from holdfast.cluster.polling import COUNTERS, ONE_KEY, poll
from holdfast.cluster.protocol import ANSWER_SECONDS, MAX_VALUE_BYTES, Cluster, name_ranks
from holdfast.errors import AbsentError, DeadlineError, HoldfastError

LEADER: Final = 0

Check: TypeAlias = Callable[[Collection[int]], None]
"""Raises `AbsentError` if one of these workers is known to be missing, like `Heartbeat.check`."""

_NAMED_NODES: Final = 32
READ_SECONDS: Final = 3.0
"""How long the leader waits until the others have read its last records: its process may host the store."""

_led: dict[str, tuple[str, float]] = {}
"""The newest meeting that was led in this process, for each cluster's incarnation, and when it was decided by the
monotonic clock; until its end was waited for.
"""


class _Outcome(msgspec.Struct, frozen=True):
    """The result of a meeting, the same for all that learn of it.

    Attributes:
        absent: The workers that did not come.
        pieces: The number of pieces of the answer in the store.
        are_dead: True if the absent workers are known to be dead, or to have left.
    """

    absent: tuple[int, ...] = ()
    pieces: int = 0
    are_dead: bool = False


def gather_decide_broadcast(
    cluster: Cluster,
    name: str,
    record: bytes,
    decide: Callable[[list[bytes]], bytes],
    timeout_seconds: float,
    *,
    check: Check | None = None,
    purpose: str = "",
) -> bytes:
    """**Collective.** **Blocks.** Returns the leader's answer to the records of all workers.

    All workers that get an answer get the same: the decision, or that workers are absent. Once one of them has run out
    of time, the meeting has failed for those that come later too.

    Args:
        cluster: The workers.
        name: The name of the meeting; each name is used once in the life of a cluster.
        record: This worker's record.
        decide: Makes the answer from the records, in order of rank; called by the leader, and must not raise.
        timeout_seconds: How long to wait for the others.
        check: Called now and then to check that the awaited workers are still there.
        purpose: The purpose of the meeting, for the error; empty for its name.

    Raises:
        AbsentError: If workers did not come in time, or are lost; the error names them.
        ClusterError: If the store does not respond.
    """
    if cluster.world_size == 1:
        return decide([record])
    meeting = _Meeting(cluster, name, timeout_seconds, check, purpose or repr(name))
    cluster.set(f"{name}/record/{cluster.rank}", record)
    return meeting.lead(record, decide) if cluster.rank == LEADER else meeting.follow()


def wait_read(cluster: Cluster, lost: Callable[[], Collection[int]]) -> None:
    """**Blocks** for a moment on the leader, until the others have read the result of the newest meeting.

    The leader's process may host the store. If it ended at once, the others could not learn the result any more. After
    some seconds, all have had the time to read it. `lost` returns the workers that will not read it.
    """
    if cluster.rank != LEADER:
        return
    name, decided_at = _led.pop(cluster.incarnation, ("", 0.0))
    if not name:
        return
    is_cleared = wait_counted(
        cluster,
        f"{name}/read",
        lost,
        decided_at + READ_SECONDS,
        lambda: cluster.try_get(f"{name}/outcome") is None,
    )
    if is_cleared:
        with suppress(HoldfastError):
            # The last reader has already deleted the answers; now the question is deleted too.
            cluster.delete(f"{name}/read")


def count_read(cluster: Cluster, key: str) -> None:
    """Counts this worker as one that has read, with its signature: when the leader counts, this worker may be gone."""
    cluster.set(f"{key}/{cluster.rank}", b"")
    cluster.add(key, 1)


def wait_counted(
    cluster: Cluster,
    key: str,
    lost: Callable[[], Collection[int]],
    end_at: float,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """**Blocks** for a moment. On the leader, waits until each of the others has counted itself as one that has read.

    Args:
        cluster: The workers.
        key: Their counter.
        lost: Returns the workers that are gone. Those that have signed, see `count_read`, are among the counted.
        end_at: When to stop waiting, by the monotonic clock. The wait also ends if the store does not respond.
        is_over: Returns True to end the wait in any case.

    Returns:
        True if `is_over` ended the wait before all had counted.
    """

    unread: dict[int, bool] = {}

    def look() -> bool | None:
        for rank in set(lost()) - {LEADER} - unread.keys():
            unread[rank] = cluster.try_get(f"{key}/{rank}") is None
        if cluster.add(key, 0) >= cluster.world_size - 1 - sum(unread.values()):
            return False
        return True if is_over() else None

    with suppress(HoldfastError):
        return time.monotonic() < end_at and bool(poll(look, COUNTERS, end_at))
    return False


class _Meeting:
    """One worker's part in a meeting.

    NAME/record/RANK          the record of each worker
    NAME/answer/NUMBER        the leader's answer, in pieces
    NAME/outcome              the result: written once, by the leader or by the first that gives up
    NAME/read                 how many have read the result
    """

    def __init__(self, cluster: Cluster, name: str, timeout_seconds: float, check: Check | None, purpose: str) -> None:
        self._cluster = cluster
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._end_at = time.monotonic() + timeout_seconds
        self._check = check
        self._purpose = purpose

    def lead(self, record: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        cluster = self._cluster
        records = [record]
        for rank in range(1, cluster.world_size):
            try:
                records.append(self._wait(f"record/{rank}", range(rank, cluster.world_size)))
            except DeadlineError as error:
                self._raise_absent(self._decide(self._give_up(error, rank)))
        answer = decide(records)
        starts = range(0, len(answer), MAX_VALUE_BYTES)
        for number, start in enumerate(starts):
            cluster.set(self._key(f"answer/{number}"), answer[start : start + MAX_VALUE_BYTES])
        outcome = self._decide(_Outcome(pieces=len(starts)))
        if outcome.absent:
            # A worker's time had run out before the last one came.
            self._raise_absent(outcome)
        with suppress(HoldfastError):
            # It has been decided: later values do not count.
            for rank in range(cluster.world_size):
                cluster.delete(self._key(f"record/{rank}"))
        return answer

    def follow(self) -> bytes:
        cluster = self._cluster
        try:
            outcome = msgspec.json.decode(self._wait("outcome", (LEADER,)), type=_Outcome)
        except DeadlineError as error:
            # When all have come, it is the leader that has not answered.
            outcome = self._decide(self._give_up(error, LEADER))
        # The leader has put these down before the outcome.
        pieces = [cluster.wait_get(self._key(f"answer/{number}"), ANSWER_SECONDS) for number in range(outcome.pieces)]
        with suppress(HoldfastError):
            # The leader may be gone by now, and the store with it; it is known how the meeting has ended all the same.
            if cluster.add(self._key("read"), 1) == cluster.world_size - 1 and not outcome.absent:
                # All have read: the last one deletes everything.
                for key in ("outcome", "read", *(f"answer/{number}" for number in range(outcome.pieces))):
                    cluster.delete(self._key(key))
        if outcome.absent:
            self._raise_absent(outcome)
        return b"".join(pieces)

    def _wait(self, key: str, ranks: Collection[int]) -> bytes:
        """Returns the value of a key; checks meanwhile that these workers are there.

        Raises:
            AbsentError: If one of them is lost, and has not brought its record before.
            DeadlineError: If the time is up.
        """
        full = self._key(key)

        def look() -> bytes | None:
            value = self._cluster.try_get(full)
            if value is not None or self._check is None:
                return value
            try:
                self._check(ranks)
            except AbsentError as error:
                # One that brought its record, and then went, is not missed here. The leader's is kept until it has
                # answered, and is not used without the answer.
                missing = {LEADER, *self._find_missing(error.ranks)}
                lost = tuple(rank for rank in error.ranks if rank in missing)
                value = self._cluster.try_get(full)
                if lost and value is None:
                    raise make_absent_error(self._cluster, lost, "lost") from error
            return value

        value = poll(look, ONE_KEY.spread(self._cluster.world_size), self._end_at)
        if value is None:
            raise DeadlineError(f"{full} was not set within {self._timeout_seconds:g} s")
        return value

    def _give_up(self, error: DeadlineError, rank: int) -> _Outcome:
        """Returns the outcome to write when the wait for a worker has ended like this."""
        if isinstance(error, AbsentError):
            return _Outcome(error.ranks, are_dead=True)
        return _Outcome(self._find_missing(range(self._cluster.world_size)) or (rank,))

    def _find_missing(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if self._cluster.try_get(self._key(f"record/{rank}")) is None)

    def _decide(self, outcome: _Outcome) -> _Outcome:
        standing = self._cluster.set_once(self._key("outcome"), msgspec.json.encode(outcome))
        if self._cluster.rank == LEADER:
            _led[self._cluster.incarnation] = self._name, time.monotonic()
        return msgspec.json.decode(standing, type=_Outcome)

    def _raise_absent(self, outcome: _Outcome) -> NoReturn:
        wait_read(self._cluster, lambda: outcome.absent)
        what = f"did not join {self._purpose} within {self._timeout_seconds:g} s"
        if outcome.are_dead:
            what = f"died or left the job before {self._purpose} ended"
        raise make_absent_error(self._cluster, outcome.absent, what)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"


def make_absent_error(cluster: Cluster, ranks: tuple[int, ...], what: str) -> AbsentError:
    """Returns the error that names workers, their nodes, and, as the end of a sentence, `what` they failed to do."""
    # Of very many it is enough to know where some were.
    nodes = tuple(cluster.node_of(rank) if place < _NAMED_NODES else "" for place, rank in enumerate(ranks))
    places = ", ".join(sorted({node for node in nodes if node}))
    on = f" on {places}" if places else ""
    return AbsentError(
        f"{name_ranks(ranks)} of {cluster.world_size}{on} {what}",
        ranks=ranks,
        nodes=nodes,
        hint="Check whether these processes are still running, and the last lines of their logs.",
    )
