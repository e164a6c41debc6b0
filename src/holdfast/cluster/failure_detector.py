"""Detects workers that died or were silent for too long, by signs of life."""

from __future__ import annotations

import _thread
import os
import queue
import select
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from holdfast.cluster.barrier import LEADER, make_absent_error
from holdfast.cluster.polling import PROCESS_LOOK_SECONDS
from holdfast.cluster.protocol import ANSWER_SECONDS, Cluster
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import ClosedError, ClusterError, HoldfastError, UsageError
from holdfast.process.latch import Latch

INTERVAL_SECONDS: Final = 1.0

_GOODBYE: Final = -(1 << 30)  # A worker adds this to its count when it leaves.
_DIED: Final = -(1 << 29)  # Another worker adds this if the process has ended without a goodbye.
# So of a count, 0 or more are signs of life, from `_DIED` to -1 the process has died, and less is a goodbye.

_STOP_SECONDS: Final = 2.0

_BEGIN_FACTOR: Final = 4
"""How many times longer a worker may be silent before its first sign of life."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_START_FIELD: Final = 19
"""The position of the start time in `/proc/PID/stat`, counted from after the name of the program."""


class _Missed(msgspec.Struct, frozen=True):
    """The missing workers, as the leader reports them; those who died are lost, too."""

    lost: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    died: tuple[int, ...] = ()


class Heartbeat:
    """**Thread-safe.** One thread that gives signs of life, and watches those of the others.

    Each worker increments a counter in the store, which must respond each time. The leader watches all others and
    reports who is lost; they watch the leader, and its reports. So the store is queried per worker, not per pair.

    Workers on one machine also watch each other's processes. If a process has ended without signing off, the first one
    to notice marks the counter of that worker, so that all know it at their next look.
    """

    def __init__(
        self,
        cluster: Cluster,
        interval_seconds: float = INTERVAL_SECONDS,
        timeout_seconds: float = LIVENESS_SECONDS,
        *,
        name: str = "heartbeat",
        hear_of_leader: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts at once; does nothing if there is a single worker.

        Args:
            cluster: The workers.
            interval_seconds: How long to wait between two signs.
            timeout_seconds: How long after its last sign all take a worker for lost, at the latest. Before its first
                sign, a worker has four times as long.
            name: The prefix of its keys; the same on all workers, and used by this heartbeat only.
            hear_of_leader: Called in the thread when the leader has signed off, before this worker knows it; repeated
                on `HoldfastError`.

        Raises:
            UsageError: If the times do not fit each other.
        """
        if not 0 < 4 * interval_seconds <= timeout_seconds:
            raise UsageError(
                f"the timeout must be at least four heartbeat intervals, got {timeout_seconds:g} s for an "
                f"interval of {interval_seconds:g} s",
                hint="Raise the timeout or shorten the interval.",
            )
        self._cluster = cluster
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._name = name
        self._hear_of_leader = hear_of_leader
        # These three are replaced whole by the thread, and read by others.
        self._missed = _Missed()
        self._store_silent_seconds = 0.0
        self._failure: HoldfastError | None = None
        # For each worker that is looked at, its count, and how long that has stayed the same.
        self._heard: dict[int, tuple[int, float]] = {}
        self._looked_at = time.monotonic()
        self._told = _Missed()
        # The neighbors that have ended, and whose count was looked at: whether they had said goodbye.
        self._judged: dict[int, bool] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = Latch()
        if cluster.world_size == 1:
            self._ended.open()
        else:
            # Unlike `Thread.start` this cannot be interrupted half-way.
            _thread.start_new_thread(self._run, ())

    @property
    def lost(self) -> tuple[int, ...]:
        """The workers that died or were silent for too long, by rank."""
        return self._missed.lost

    @property
    def gone(self) -> tuple[int, ...]:
        """The workers that have signed off, by rank."""
        return self._missed.gone

    @property
    def absences(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the missing workers, and the reasons, as the end of a sentence "rank 3 has"."""
        missed = self._missed
        silent = tuple(rank for rank in missed.lost if rank not in missed.died)
        return (
            (missed.died, "died: its process has ended"),
            (silent, f"not been heard of for {self._timeout_seconds:g} s"),
            (missed.gone, "left the job"),
        )

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Returns at once if these workers, or all, are there as far as is known.

        Raises:
            AbsentError: If one is lost, or has left; the error names it.
            ClusterError: If the store no longer responds.
        """
        for absent, what in self.absences:
            if named := tuple(rank for rank in absent if ranks is None or rank in ranks):
                raise make_absent_error(self._cluster, named, f"{'has' if len(named) == 1 else 'have'} {what}")
        failure = self._failure
        if failure is not None and self._store_silent_seconds >= self._find_lost_seconds():
            raise ClusterError(
                f"the job's store has not answered for {self._store_silent_seconds:.0f} s: {failure.message}",
                hint=failure.hint,
            ) from failure

    def leave(self) -> None:
        """Lets the thread sign off and end, without waiting for it."""
        self._wake.put(None)

    def stop(self) -> None:
        """**Blocks** for a moment. Signs off, if the store can be reached, and ends the thread; may be repeated."""
        self.leave()
        self._ended.wait(_STOP_SECONDS)

    def _run(self) -> None:
        neighbours = Neighbours(self._cluster, f"{self._name}/on")
        meet_until = time.monotonic() + _BEGIN_FACTOR * self._timeout_seconds
        # The first signs come sooner, so that those on one machine find each other at once.
        pause_seconds, next_seconds = 0.0, min(PROCESS_LOOK_SECONDS, self._interval_seconds)
        try:
            while not self._is_stopped(neighbours, pause_seconds):
                begun_at = time.monotonic()
                pause_seconds, next_seconds = next_seconds, min(2 * next_seconds, self._interval_seconds)
                try:
                    self._cluster.add(self._key(self._cluster.rank), 1)
                    if begun_at < meet_until:
                        # One that comes later than that counts as lost.
                        neighbours.meet()
                    ended = neighbours.find_ended()
                    self._judge(ended)
                    missed = self._look_at_all() if self._cluster.rank == LEADER else self._look_at_leader()
                    self._missed = self._with_died(missed, ended)
                except ClosedError:
                    return
                except HoldfastError as error:
                    # Without the store no worker learns of a goodbye any more.
                    self._missed = self._with_died(self._missed, neighbours.find_ended())
                    self._failure = error
                    # Not more than a call takes: where this process itself was stopped for a while, the store was not.
                    spent_seconds = min(time.monotonic() - begun_at, ANSWER_SECONDS)
                    self._store_silent_seconds += spent_seconds + self._interval_seconds
                else:
                    self._failure = None
                    self._store_silent_seconds = 0.0
            # Where the store does not answer, the others will miss this worker instead.
            with suppress(HoldfastError):
                self._cluster.add(self._key(self._cluster.rank), _GOODBYE)
        finally:
            neighbours.close()
            self._ended.open()

    def _is_stopped(self, neighbours: Neighbours, pause_seconds: float) -> bool:
        """Waits until it is time for the next sign, or a process has ended."""
        end_at = time.monotonic() + pause_seconds
        while True:
            left_seconds = max(end_at - time.monotonic(), 0.0)
            with suppress(queue.Empty):
                self._wake.get(timeout=min(left_seconds, PROCESS_LOOK_SECONDS))
                return True
            if left_seconds <= PROCESS_LOOK_SECONDS or (
                self._failure is None and neighbours.find_ended() - self._judged.keys()
            ):
                return False

    def _judge(self, ended: Collection[int]) -> None:
        """Checks whether the processes on this machine that have ended signed off, and marks them as dead if not."""
        for rank in sorted(set(ended) - self._judged.keys()):
            count = self._cluster.add(self._key(rank), 0)
            if count >= 0:
                own = str(self._cluster.rank).encode()
                # Several may have found it, and the count is marked once.
                if self._cluster.set_once(f"{self._name}/marked/{rank}", own) == own:
                    self._cluster.add(self._key(rank), _DIED)
            self._judged[rank] = count < _DIED

    def _with_died(self, missed: _Missed, ended: Collection[int]) -> _Missed:
        """Adds those on this machine that are known to have died."""
        died = {rank for rank in ended if not self._judged.get(rank)}.difference(missed.gone)
        return _Missed(tuple(sorted(died.union(missed.lost))), missed.gone, tuple(sorted(died.union(missed.died))))

    def _look_at_all(self) -> _Missed:
        others = range(1, self._cluster.world_size)
        missed = self._look_at(others)
        if missed != self._told:
            self._cluster.set(f"{self._name}/missed", msgspec.json.encode(missed))
            self._told = missed
        return missed

    def _look_at_leader(self) -> _Missed:
        own = self._look_at((LEADER,))
        told = self._cluster.try_get(f"{self._name}/missed")
        if own.gone and LEADER not in self._missed.gone:
            # The last that is asked: the leader may take the store along as soon as it knows that it was heard.
            self._hear_of_leader()
        if told is None:
            return own
        others = msgspec.json.decode(told, type=_Missed)
        return _Missed(own.lost + others.lost, own.gone + others.gone, own.died + others.died)

    def _look_at(self, ranks: Collection[int]) -> _Missed:
        now = time.monotonic()
        # What is much longer than a round was a time in which this process itself stood still, and others maybe too.
        passed_seconds = min(now - self._looked_at, self._timeout_seconds / 3)
        self._looked_at = now
        for rank in ranks:
            count = self._cluster.add(self._key(rank), 0)
            known, silent_seconds = self._heard.get(rank, (0, 0.0))
            self._heard[rank] = (count, silent_seconds + passed_seconds if count == known else 0.0)
        died = tuple(rank for rank, (count, _) in self._heard.items() if _DIED <= count < 0)
        lost_seconds = self._find_lost_seconds()
        return _Missed(
            lost=tuple(
                rank
                for rank, (count, seconds) in self._heard.items()
                if rank in died
                or (count >= 0 and seconds >= (lost_seconds if count else _BEGIN_FACTOR * self._timeout_seconds))
            ),
            gone=tuple(rank for rank, (count, _) in self._heard.items() if count < _DIED),
            died=died,
        )

    def _find_lost_seconds(self) -> float:
        # One interval for the leader to look, and one for the others to hear of it.
        return self._timeout_seconds - 2 * self._interval_seconds

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


class Process(msgspec.Struct, frozen=True):
    """A worker's process, with its start time in clock ticks, which a later one of the same number does not share."""

    rank: int
    number: int
    started: int


class Neighbours:
    """Finds the workers on this machine through the store, and watches their processes. One thread uses it.

    NAME/MACHINE/count        how many workers of that machine have registered
    NAME/MACHINE/NUMBER       the process that registered with that number
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._place = ""
        if (machine := find_machine()) and (started := find_start(os.getpid())) is not None:
            self._place = f"{name}/{machine}"
            self._own = Process(cluster.rank, os.getpid(), started)
        self._is_registered = False
        self._unread: set[int] = set()
        self._count = 0
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._ended: set[int] = set()

    def meet(self) -> None:
        """**Blocks.** Registers this worker, and begins to watch those that have registered since the last call.

        Raises:
            ClusterError: If the store does not respond.
        """
        if not self._place:
            return
        if not self._is_registered:
            number = self._cluster.add(f"{self._place}/count", 1) - 1
            self._is_registered = True
            self._cluster.set(f"{self._place}/{number}", msgspec.json.encode(self._own))
        count = self._cluster.add(f"{self._place}/count", 0)
        self._unread.update(range(self._count, count))
        self._count = count
        for number in sorted(self._unread):
            # It may have taken its number, and be about to write.
            if (record := self._cluster.try_get(f"{self._place}/{number}")) is not None:
                self._unread.discard(number)
                self._watch(msgspec.json.decode(record, type=Process))

    def find_ended(self) -> frozenset[int]:
        """Returns the workers on this machine whose process has ended, as far as they have registered."""
        for descriptor, _ in self._poll.poll(0) if self._watched else ():
            self._poll.unregister(descriptor)
            self._ended.add(self._watched.pop(descriptor))
            os.close(descriptor)
        return frozenset(self._ended)

    def close(self) -> None:
        """Stops watching; a second call does nothing."""
        while self._watched:
            os.close(self._watched.popitem()[0])

    def _watch(self, process: Process) -> None:
        if process.number == os.getpid():
            return
        try:
            descriptor = os.pidfd_open(process.number)
        except ProcessLookupError:
            self._ended.add(process.rank)
            return
        except OSError:
            return  # Too many files are open, say: this one is missed by its heartbeat.
        # Another process cannot take the number while the descriptor is open, but may have done so before.
        if find_start(process.number) == process.started:
            self._watched[descriptor] = process.rank
            self._poll.register(descriptor, select.POLLIN)
        else:
            os.close(descriptor)
            self._ended.add(process.rank)


def find_machine() -> str:
    """Names this boot of the system and its PID namespace, for a key; empty if processes cannot be watched."""
    try:
        # A container may see the `/proc` of another namespace.
        if int(Path("/proc/self").readlink().name) != os.getpid():
            return ""
        os.close(os.pidfd_open(os.getpid()))
        return f"{_BOOT.read_text().strip()}.{_NAMESPACE.stat().st_ino}"
    except (OSError, ValueError):
        return ""


def find_start(number: int) -> int | None:
    """Returns when the process of that number was started, in clock ticks since the boot; None if there is none."""
    try:
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return None
