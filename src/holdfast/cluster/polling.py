"""How often the store of a job is polled: every pause between two looks, with its cost.

No engine's store notifies a worker that a key was written, so each worker looks again after a pause. torch's TCPStore
answers 20,000 reads a second of one worker and 44,000 of four (measured on two cores). All workers together should
cause at most a quarter of that, `CALLS_PER_SECOND`. So pauses grow with the number of workers:

| What is awaited | Calls a look | Pauses | Late by, 10,000 workers | Calls a second, 10,000 workers |
|---|---|---|---|---|
| one key (`ONE_KEY`): gathering, and `Cluster.wait_get` | 1 | 0.001 to 1 s | 1 s | 10,000 |
| one key while the job begins (`JOINING`) | 1, and 2 each 2 s | 0.001 to 0.2 s | 1 s | 20,000 |
| one of several keys (`SOME_KEYS`): a save's records | 2 or 3 | 0.002 to 0.5 s | 3 s | 10,000 |
| news of a notice or a failure (`NEWS`) | 1 | 0.25 s | 1 s | 10,000 |
| news while a stop step is agreed on (`URGENT_NEWS`) | 2 | 0.002 to 0.05 s | 2 s | 10,000 |
| a planned save (`PLANS`), a failed task (`TASKS`) | 1 | 0.5 s | 1 s | 10,000 |
| signs of life (`heartbeat_seconds`), 15 s of liveness | 4, the leader 10,000 | 1 s; 3 s for many | 3 s | 17,000 |

A wait begins with short pauses, so that early answers are seen early. Short pauses are harmless with many workers: an
overloaded store responds later, and each worker has one call in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

_T = TypeVar("_T")

CALLS_PER_SECOND: Final = 10_000
"""How many calls all workers together may make while they wait for one thing."""

_SHARE: Final = 0.1


class Backoff(NamedTuple):
    """The pauses of one kind of wait.

    Each is a share of the time that the wait has lasted, so that it is late by about that share at most.

    Attributes:
        shortest_seconds: The first pause.
        longest_seconds: The last pause.
    """

    shortest_seconds: float
    longest_seconds: float

    def pause_seconds(self, waited_seconds: float) -> float:
        """Returns the next pause of a wait that has lasted that long."""
        return min(max(waited_seconds * _SHARE, self.shortest_seconds), self.longest_seconds)

    def spread(self, world_size: int, calls: int = 1) -> Backoff:
        """Returns the same for many workers that may all wait at once, each of which makes that many calls a look."""
        return Backoff(self.shortest_seconds, max(self.longest_seconds, calls * world_size / CALLS_PER_SECOND))


ONE_KEY: Final = Backoff(0.001, 1.0)
SOME_KEYS: Final = Backoff(0.002, 0.5)
NEWS: Final = Backoff(0.25, 0.25)
URGENT_NEWS: Final = Backoff(0.002, 0.05)
PLANS: Final = Backoff(0.5, 0.5)
TASKS: Final = Backoff(0.5, 0.5)

SAVE_POSITIONS_SECONDS: Final = 0.5
"""How often a worker that waits for a save's records checks whether others have continued; at most with each look."""

IN_MEMORY: Final = Backoff(0.001, 0.05)
"""A worker without others: its store is in its own memory."""

COUNTERS: Final = Backoff(0.02, 0.02)
"""The leader, waiting for a counter: no other worker polls then. It lasts some seconds at most."""

JOINING: Final = Backoff(0.001, 0.2)

JOINING_TURNS: Final = Backoff(0.25, 2.0)
"""How long a joining worker waits for one key before it checks whether another has changed."""

STALE_JOIN_SECONDS: Final = 0.05
"""The leader, which has found the records of an earlier start: no other worker polls then."""

FILES: Final = Backoff(0.01, 0.5)
"""Waits for files of another node: no file system notifies. This polls the storage, not the store."""

PROCESS_LOOK_SECONDS: Final = 0.25
"""How often to check whether a process on this machine has ended. This polls the system, not the store."""

_BEATS: Final = 15
_FEW_BEATS: Final = 5
_MANY: Final = 512
"""How many signs of life a worker gives within the liveness time; fewer if more workers than this share a store."""


def heartbeat_seconds(liveness_seconds: float, world_size: int) -> float:
    """**Pure.** Returns the time between two signs of life of a worker."""
    return liveness_seconds / (_BEATS if world_size <= _MANY else _FEW_BEATS)


def poll(look: Callable[[], _T | None], backoff: Backoff, end_at: float, begun_at: float | None = None) -> _T | None:
    """**Blocks.** Polls until there is a result.

    Args:
        look: Returns a result, or None; it may raise.
        backoff: The pauses between.
        end_at: The deadline, by the monotonic clock; one look comes after it.
        begun_at: When the wait began, if this is a part of a longer one; None for now.

    Returns:
        The result, or None at the deadline.
    """
    begun_at = time.monotonic() if begun_at is None else begun_at
    while (found := look()) is None:
        now = time.monotonic()
        if now >= end_at:
            return None
        # No store tells what was written to it.
        time.sleep(min(backoff.pause_seconds(now - begun_at), end_at - now))
    return found


# Whether what one worker has written is seen by another: network file systems show it late. Asks no store.

VISIBLE_SECONDS: Final = 30.0
"""How long a file of one node may be invisible on another: network file systems cache."""

ELSEWHERE_SECONDS: Final = 5.0
"""The same if a worker was given another path than the leader. It may be a share that is mounted elsewhere."""

ELSEWHERE_HINT: Final = (
    "Give all workers the same directory. If its name contains a start time or a rank, let one worker choose the "
    "name and send it to the others."
)


def find_patience(timeout_seconds: float, *, is_elsewhere: bool = False) -> float:
    """**Pure.** Returns for how many seconds to look again for a file that is not visible.

    Args:
        timeout_seconds: The deadline of all waits. At most half of it is spent on looking again.
        is_elsewhere: True if this worker was given another path than the leader.
    """
    return min(timeout_seconds / 2, ELSEWHERE_SECONDS if is_elsewhere else VISIBLE_SECONDS)


def look_again(look: Callable[[], _T], patience_seconds: float) -> _T:
    """**Blocks.** Looks until nothing is wrong, or the time is up.

    Args:
        look: Returns the problem, or something false.
        patience_seconds: How long to look again.

    Returns:
        The problem at the last look.
    """
    wrong: list[_T] = []

    def is_right() -> bool | None:
        wrong[:] = [look()]
        return None if wrong[0] else True

    poll(is_right, FILES, time.monotonic() + patience_seconds)
    return wrong[0]
