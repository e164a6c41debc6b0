"""Whether what one worker has written is seen by another: network file systems show it late. Asks no store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.cluster.polling import FILES, poll

_T = TypeVar("_T")

VISIBLE_SECONDS: Final = 30.0
"""How long what one node has written may stay unseen on another: network file systems remember for a while."""

ELSEWHERE_SECONDS: Final = 5.0
"""The same where a worker was given another path than the leader. It may be a share that is mounted elsewhere."""

ELSEWHERE_HINT: Final = (
    "Give all workers the same directory. If its name has the time of the start or the rank in it, let one worker "
    "choose it, and tell the others."
)


def find_patience(timeout_seconds: float, *, is_elsewhere: bool = False) -> float:
    """**Pure.** How many seconds to look again for what is not seen.

    Args:
        timeout_seconds: The deadline of all waits. No more than half of it is spent on looking again.
        is_elsewhere: Whether this worker was given another path than the leader.
    """
    return min(timeout_seconds / 2, ELSEWHERE_SECONDS if is_elsewhere else VISIBLE_SECONDS)


def look_again(look: Callable[[], _T], patience_seconds: float) -> _T:
    """**Blocks.** Looks until nothing is wrong, or the time is up.

    Args:
        look: Gives what is wrong, or something that is false.
        patience_seconds: How long to look again.

    Returns:
        What was wrong at the last look.
    """
    wrong: list[_T] = []

    def is_right() -> bool | None:
        wrong[:] = [look()]
        return None if wrong[0] else True

    poll(is_right, FILES, time.monotonic() + patience_seconds)
    return wrong[0]
