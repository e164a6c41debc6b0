"""Communication of the workers of a job: one way to write a record, to wait for one, and to learn who is gone.

`Peers` is one worker's part in it. It has a `FailureFeed`, which knows who is gone, who has failed and with what error;
a `StoreMailbox`, whose thread writes and polls for threads that must not wait; and `Namespace`s for the records of each
subject. Every wait has a deadline, and if it ends without success, the error names who is missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import format_exception
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.cluster.barrier import LEADER, READ_SECONDS, count_read, gather_decide_broadcast, wait_counted, wait_read
from holdfast.cluster.failure_detector import Heartbeat
from holdfast.cluster.mailbox import StoreMailbox
from holdfast.cluster.polling import IN_MEMORY, SOME_KEYS, heartbeat_seconds, poll
from holdfast.cluster.protocol import Cluster, name_ranks
from holdfast.deadlines import LEAST_SECONDS
from holdfast.errors import AbsentError, ClusterError, HoldfastError, PeerError

_T = TypeVar("_T")

_WARN_SECONDS: Final = 60.0
"""How long a wait lasts before it is reported."""

_TEXT_CHARACTERS: Final = 4000
"""How much of an error is sent: enough for people, and no more than a store can hold."""

_TRACEBACK_CHARACTERS: Final = 16_000

_ABSENT: Final = AbsentError.__name__

_numbers: dict[tuple[str, int, str], int] = {}
"""How many were created for each worker of a cluster in this process, so that no two have the same keys."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's report of its failure, or of another's.

    Attributes:
        kind: The name of the error's type.
        traceback: Its traceback, as Python prints it; empty if that does not matter.
        step: How many steps that worker had completed; None if that is not known.
    """

    rank: int
    kind: str
    text: str
    hint: str = ""
    traceback: str = ""
    step: int | None = None

    @classmethod
    def of(cls, rank: int, kind: str, text: str, hint: str = "") -> Failure:
        """Returns a failure with text that can be sent, and fits into a record."""
        return cls(rank, kind, make_brief(text), make_brief(hint))


def make_sendable(words: str) -> str:
    """**Pure.** Returns text without characters that cannot be encoded, such as part of a file name."""
    return words.encode(errors="replace").decode()


def make_brief(words: str) -> str:
    """**Pure.** Like `make_sendable`, shortened to fit into a record."""
    return make_sendable(words)[:_TEXT_CHARACTERS]


class Namespace:
    """**Thread-safe.** Records under one prefix in the store of the job, each under its own name.

    Each method except `key` and `delete` raises `ClusterError` if the store does not respond.
    """

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self._prefix = prefix

    def key(self, *name: object) -> str:
        """**Pure.** Returns the key of a record, for a wait."""
        return "/".join([self._prefix, *map(str, name)])

    def post(self, record: msgspec.Struct, *name: object) -> None:
        """Writes a record, replacing an existing one."""
        self._cluster.set(self.key(*name), msgspec.json.encode(record))

    def post_once(self, record: _T, *name: object) -> _T:
        """Writes a record unless there is one, and returns the stored one: the same for all workers."""
        standing = self._cluster.set_once(self.key(*name), msgspec.json.encode(record))
        return msgspec.json.decode(standing, type=type(record))

    def read(self, kind: type[_T], *name: object) -> _T | None:
        """Returns the record, or None if there is none."""
        found = self._cluster.try_get(self.key(*name))
        return None if found is None else msgspec.json.decode(found, type=kind)

    def count(self, amount: int, *name: object) -> int:
        """Adds to a counter, and returns the sum."""
        return self._cluster.add(self.key(*name), amount)

    def count_read(self, *name: object) -> None:
        """Counts this worker as one that has read, for `wait_counted`."""
        count_read(self._cluster, self.key(*name))

    def delete(self, *keys: str) -> None:
        """Deletes records or counters by their keys, as far as the store can be reached."""
        with suppress(HoldfastError):
            for key in keys:
                self._cluster.delete(key)


class FailureFeed:
    """**Thread-safe.** The other workers that are gone or have failed, with their errors, as far as known.

    A thread gives signs of life and watches those of the others; results are available here at once, and only
    `find_explanation` and `explain` query the store. A worker that leaves with an error reports it first.

    PREFIX/heartbeat/RANK         signs of life
    PREFIX/left/RANK              why a worker has left
    PREFIX/left/0/read            how many have read why the leader has left, as the store may be gone soon after it

    Attributes:
        leader_failure: Why the leader has left, if it reported that: known here even if the store is gone with it.
    """

    def __init__(self, cluster: Cluster, prefix: str, liveness_seconds: float) -> None:
        self._cluster = cluster
        self._records = Namespace(cluster, prefix)
        self._is_explained = False
        self.leader_failure: Failure | None = None
        self._leader_node = ""
        # Guards that this worker is counted once among those that have read that.
        self._lock = threading.Lock()
        self._is_counted = False
        self._read_key = self._records.key("left", LEADER, "read")
        self._heartbeat = Heartbeat(
            cluster,
            heartbeat_seconds(liveness_seconds, cluster.world_size),
            liveness_seconds,
            name=f"{prefix}/heartbeat",
            hear_of_leader=self._hear_of_leader,
        )

    @property
    def dead(self) -> frozenset[int]:
        """The workers that are lost or have left, as far as is known."""
        return frozenset((*self._heartbeat.lost, *self._heartbeat.gone))

    @property
    def lost(self) -> frozenset[int]:
        """The workers that have died, or were silent for too long."""
        return frozenset(self._heartbeat.lost)

    @property
    def gone(self) -> frozenset[int]:
        """The workers that have signed off, with or without a reason."""
        return frozenset(self._heartbeat.gone)

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Like `Heartbeat.check`."""
        self._heartbeat.check(ranks)

    def check_all(self) -> None:
        """**Blocks** for a moment if a worker is gone. Checks that all are there, as far as is known.

        Raises:
            PeerError: If a worker has died, has left or has failed; with the reason, if it is known.
            ClusterError: If the store does not respond.
        """
        try:
            missed = self.find_missed(range(self._cluster.world_size))
        except ClusterError:
            if not self.dead:
                raise
            # The store has gone with the leader.
            rank = min(self.dead)
            missed = rank, self.leader_failure or self.describe_loss(rank)
        if missed is not None:
            raise self.make_error(missed[1])

    def find_missed(self, ranks: Collection[int]) -> tuple[int, Failure] | None:
        """Returns which of these workers is gone, and why: it may have left because of another worker's failure.

        Raises:
            ClusterError: If the store does not respond.
        """
        for absent, what in self._heartbeat.absences:
            named = sorted(set(absent) & set(ranks))
            for rank in named:
                if (failure := self.find_explanation((rank,))) is not None:
                    return rank, failure
            if named:
                text = f"has {what}" if len(named) == 1 else f"{name_ranks(named)} have {what}"
                return named[0], Failure(named[0], _ABSENT, text, _ABSENT_HINT)
        # No worker is absent: the store is.
        self._heartbeat.check(())
        return None

    def find_explanation(self, ranks: Iterable[int]) -> Failure | None:
        """Returns why one of these workers has left, if it reported that.

        Raises:
            ClusterError: If the store does not respond.
        """
        for rank in ranks:
            if rank == LEADER and self.leader_failure is not None:
                return self.leader_failure
            if (failure := self._records.read(Failure, "left", rank)) is not None:
                return failure
        return None

    def describe_loss(self, rank: int) -> Failure:
        """Describes what is known about a lost worker."""
        known = (what for ranks, what in self._heartbeat.absences if rank in ranks)
        what = next(known, "died or cannot be reached")
        return Failure.of(rank, _ABSENT, f"has {what}", _ABSENT_HINT)

    def describe(self, error: BaseException, *, traced: bool = False) -> Failure:
        """Returns what to tell the others about an error of this worker, or about one that it has learned of."""
        if isinstance(error, PeerError):
            return Failure(error.rank, error.kind, error.text, error.hint, error.traceback)
        text = error.message if isinstance(error, HoldfastError) else _try_text(lambda: str(error))
        hint = error.hint if isinstance(error, HoldfastError) else ""
        trace = _try_text(lambda: "".join(format_exception(error))) if traced else ""
        failure = Failure.of(self._cluster.rank, type(error).__name__, text, hint)
        return replace(failure, traceback=make_sendable(trace)[-_TRACEBACK_CHARACTERS:])

    def make_error(self, failure: Failure) -> PeerError:
        """Returns the error that this worker raises because of another's failure."""
        node = self._leader_node if failure is self.leader_failure else self._cluster.node_of(failure.rank)
        who = f"rank {failure.rank} on {node}" if node else f"rank {failure.rank}"
        is_sentence = failure.kind == _ABSENT and failure.text.startswith("has ")
        return PeerError(
            f"{who} {failure.text}" if is_sentence else f"{who}: {failure.kind}: {failure.text}",
            rank=failure.rank,
            kind=failure.kind,
            text=failure.text,
            traceback=failure.traceback,
            hint=failure.hint,
        )

    def explain(self, error: BaseException) -> None:
        """Records why this worker is about to leave, if the store can be reached, for those that will miss it."""
        self._is_explained = True
        rank = self._cluster.rank
        failure = self.describe(error)
        if isinstance(error, SystemExit) and type(error).__str__ is SystemExit.__str__:  # Its text is the code alone.
            failure = Failure.of(rank, _ABSENT, f"has left the job with exit code {error}", _ABSENT_HINT)
        with suppress(HoldfastError):
            self._records.post(failure, "left", rank)
            if rank != LEADER:
                # Nor does the leader wait for it, if it leaves as well.
                self._count_read()

    def close(self, *, waits: bool = True) -> None:
        """**Blocks** for a moment, if it `waits`. Signs off, and ends the thread; a second call does nothing.

        The leader's process may host the store. So if it reported why it leaves, it waits until the others know.
        """
        if not waits:
            self._heartbeat.leave()
            return
        self._heartbeat.stop()
        if self._cluster.rank == LEADER and self._is_explained:
            self._is_explained = False
            wait_counted(self._cluster, self._read_key, lambda: self.lost, time.monotonic() + READ_SECONDS)

    def _hear_of_leader(self) -> None:
        """Called in the heartbeat's thread when the leader has left."""
        if self.leader_failure is None:
            self._leader_node = self._cluster.node_of(LEADER)
            self.leader_failure = self.find_explanation((LEADER,))
        if self.leader_failure is not None:
            self._count_read()

    def _count_read(self) -> None:
        with self._lock:
            is_counted, self._is_counted = self._is_counted, True
        if not is_counted:
            self._cluster.add(self._read_key, 1)


class Peers:
    """**Thread-safe.** This worker and the others. Each creates as many of these with one name, in the same order.

    Attributes:
        cluster: The workers.
        rank: The rank of this worker.
        world_size: The number of workers.
        failures: The workers that are gone or have failed, with their errors.
        mailbox: The thread that writes and polls for threads that must not wait.
        liveness_seconds: How long a worker may be silent before it is taken for dead.
        timeout_seconds: The deadline of each wait for live workers.
        is_leader: True for the worker that decides.
        find_left_seconds: Returns how much longer any wait may last, regardless of its deadline; None if not known.
    """

    def __init__(
        self, cluster: Cluster, *, liveness_seconds: float, timeout_seconds: float, name: str = "peers"
    ) -> None:
        """Begins to give signs of life. `name` is the prefix of all keys."""
        self.cluster = cluster
        self.rank = cluster.rank
        self.world_size = cluster.world_size
        self.is_leader = cluster.rank == LEADER
        self.timeout_seconds = timeout_seconds
        self._warn: Callable[[str], object] = lambda text: None
        self.find_left_seconds: Callable[[], float | None] = lambda: None
        self.liveness_seconds = liveness_seconds
        key = (cluster.incarnation, cluster.rank, name)
        number = _numbers[key] = _numbers.get(key, 0) + 1
        self._scope = f"{name}-{number}"
        self._meetings = 0
        self._namespaces: dict[str, int] = {}
        self.failures = FailureFeed(cluster, self._scope, liveness_seconds)
        self.mailbox = StoreMailbox(cluster.world_size)

    def key(self, *parts: object) -> str:
        """Returns a key of these workers."""
        return "/".join([self._scope, *map(str, parts)])

    def open_namespace(self, name: str) -> Namespace:
        """Returns a new namespace for records of one kind. Each worker makes as many calls, in the same order."""
        number = self._namespaces[name] = self._namespaces.get(name, 0) + 1
        return Namespace(self.cluster, self.key(f"{name}-{number}"))

    def set_warner(self, warn: Callable[[str], object]) -> None:
        """Sets the function that is called with a sentence about each wait that takes long."""
        self._warn = warn

    def set_end_of_job(self, find_left: Callable[[], float | None]) -> None:
        """Limits all waits to the remaining time of the job: `find_left` returns the remaining seconds, or None."""
        self.find_left_seconds = find_left

    def gather_decide_broadcast(
        self,
        record: bytes,
        decide: Callable[[list[bytes]], bytes],
        purpose: str,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """**Collective.** **Blocks.** Returns the leader's answer to the records of all; see `cluster.barrier`.

        `purpose` names the meeting in errors, for example `the restore`.

        Raises:
            AbsentError: If a worker does not come in time, or dies.
            PeerError: If one has left and reported the reason.
            ClusterError: If the store does not respond.
        """
        # A worker that missed a meeting comes to it late, hears so, and then is in step again.
        self._meetings += 1
        name = self.key("meeting", self._meetings)
        check = self.failures.check
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            with self._naming_the_leader():
                return gather_decide_broadcast(
                    self.cluster, name, record, decide, timeout_seconds, check=check, purpose=purpose
                )
        except AbsentError as error:
            if (failure := self.failures.find_explanation(error.ranks)) is not None:
                raise self.failures.make_error(failure) from error
            raise

    def wait_any(
        self,
        keys: Sequence[str],
        ranks: Callable[[], Collection[int]],
        what: str,
        begun_at: float | None = None,
        *,
        outlasts_job: bool = False,
    ) -> tuple[str, bytes]:
        """**Blocks.** Waits until one of several keys has a value.

        Args:
            keys: The keys; the first ones take precedence.
            ranks: Returns the workers from which a value is still to come. It is called after each look, and may raise.
            what: What these workers should do, for the error: `write its part`, for example.
            begun_at: When the wait began, by the monotonic clock, if it is part of a longer one; None for now.
            outlasts_job: True to wait longer than the job's remaining time.

        Returns:
            The first key that has a value, and the value.

        Raises:
            PeerError: If one of the workers dies, has left the job, or is late (for the deadline of this wait or that
                of the job); the error names the worker.
            ClusterError: If the store does not respond.
        """
        looked_at = time.monotonic()
        end_at = (looked_at if begun_at is None else begun_at) + self.timeout_seconds
        backoff = SOME_KEYS.spread(self.world_size, len(keys))
        missed: tuple[int, Failure] | None = None
        warn_seconds = _WARN_SECONDS
        while True:
            for key in keys:
                with self._naming_the_leader():
                    value = self.cluster.try_get(key)
                if value is not None:
                    return key, value
            waited = ranks()
            if missed is not None and (missed[0] in waited or not waited):
                raise self.failures.make_error(missed[1])
            # If one is missed, there is one more look: it may have done what it was to do, and then gone.
            missed = self.failures.find_missed(waited)
            waited_seconds = time.monotonic() - looked_at
            if missed is None:
                text = self._find_delay(what, end_at, waited_seconds, outlasts_job=outlasts_job)
                rank = min(waited, default=LEADER)
                missed = (rank, Failure(rank, _ABSENT, text, _LATE_HINT)) if text else None
            if waited and waited_seconds >= warn_seconds:
                warn_seconds = self.timeout_seconds
                self._warn(
                    f"waiting for {waited_seconds:.0f} s: {name_ranks(sorted(waited))} did not {what}; every "
                    "worker must"
                )
            if missed is None:
                # There are several keys, a worker may die instead of writing one, and no store waits for any of these.
                time.sleep(backoff.pause_seconds(waited_seconds))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys that are no longer needed, if the store can be reached."""
        with suppress(HoldfastError):
            for key in keys:
                self.cluster.delete(key)

    def wait_heard(self) -> None:
        """**Blocks** for a moment on the leader, until the others have read its last message.

        Its process may host the store. If it ended at once, they could not read the message any more.
        """
        wait_read(self.cluster, lambda: self.failures.lost)

    def leave(self) -> None:
        """Signs off without waiting: the others wait for this worker no longer."""
        self.failures.close(waits=False)

    def close(self, *, after_others_seconds: float = 0.0) -> None:
        """**Blocks** for a moment. Writes what was posted, signs off, and ends the threads; a second call does nothing.

        The leader waits until all others have left, because it may host the store.
        """
        self.mailbox.close()
        if self.is_leader:
            others = frozenset(range(self.world_size)) - {LEADER}
            # The heartbeat's thread finds out who has left.
            poll(lambda: others <= self.failures.dead or None, IN_MEMORY, time.monotonic() + after_others_seconds)
        self.failures.close()

    def _find_delay(self, what: str, end_at: float, waited_seconds: float, *, outlasts_job: bool) -> str:
        """Returns why the time for waiting is over; an empty string if it is not."""
        if time.monotonic() >= end_at:
            return f"did not {what} within {self.timeout_seconds:g} s"
        is_asked = waited_seconds >= LEAST_SECONDS and not outlasts_job
        left_seconds = self.find_left_seconds() if is_asked else None
        if left_seconds is not None and left_seconds <= 0:
            return f"did not {what} in the job's remaining time"
        return ""

    @contextmanager
    def _naming_the_leader(self) -> Iterator[None]:
        """Raises the leader's own error, if the store does not respond because the leader has left with that error."""
        try:
            yield
        except ClusterError as error:
            if self.failures.leader_failure is None:
                raise
            raise self.failures.make_error(self.failures.leader_failure) from error


def _try_text(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception:  # noqa: BLE001  An error of the user's may be of a kind that cannot even say what it is.
        return ""


_LATE_HINT: Final = (
    "The worker is alive. Check what holds it up, and whether all workers save and restore the same steps."
)
_ABSENT_HINT: Final = "Check whether that process is still running, and the last lines of its log."
