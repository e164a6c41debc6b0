"""The other workers on this machine: the system says at once that a process has ended, long before it is missed."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Final

import msgspec

from holdfast.cluster.protocol import Cluster

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_START_FIELD: Final = 19
"""Where the start time stands in `/proc/PID/stat`, counted from after the name of the program."""


class Process(msgspec.Struct, frozen=True):
    """A worker's process, told from a later one of the same number.

    Attributes:
        rank: The worker.
        number: The number of the process, in its PID namespace.
        started: When it was started, in clock ticks since the system was.
    """

    rank: int
    number: int
    started: int


class Neighbours:
    """Finds the workers on this machine through the store, and watches their processes. One thread uses it.

    NAME/MACHINE/count        how many workers of that machine have registered
    NAME/MACHINE/NUMBER       the process that registered as the one of that number
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Asks nothing yet.

        Args:
            cluster: The workers.
            name: What the keys begin with; the same on all workers.
        """
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
            ClusterError: If the store does not answer.
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
        """The workers on this machine whose process has ended, as far as they have registered."""
        for descriptor, _ in self._poll.poll(0) if self._watched else ():
            self._poll.unregister(descriptor)
            self._ended.add(self._watched.pop(descriptor))
            os.close(descriptor)
        return frozenset(self._ended)

    def close(self) -> None:
        """Watches no more; harmless twice."""
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
    """Names this start of the system and its PID namespace, within which a number is that of one process.

    Returns:
        Words that may be part of a key; empty if that cannot be found out, or processes cannot be watched.
    """
    try:
        # A container may see the `/proc` of another namespace.
        if int(Path("/proc/self").readlink().name) != os.getpid():
            return ""
        os.close(os.pidfd_open(os.getpid()))
        return f"{_BOOT.read_text().strip()}.{_NAMESPACE.stat().st_ino}"
    except (OSError, ValueError):
        return ""


def find_start(number: int) -> int | None:
    """When the process of that number was started, in clock ticks since the system was; None if there is none."""
    try:
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return None
