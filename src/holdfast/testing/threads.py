"""Threads that play the processes of a job: none of them is waited for without an end."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

_T = TypeVar("_T")

_PATIENCE_SECONDS: Final = 120.0


def run_threads(jobs: Sequence[Callable[[], _T]], timeout_seconds: float = _PATIENCE_SECONDS) -> list[_T]:
    """**Blocks.** Does each job in a thread of its own.

    Returns:
        What each has returned.

    Raises:
        BaseException: The first error of any of them, once all have ended or the time is up.
        AssertionError: If some have not ended in time; it says where they are. They are left behind.
    """
    returned: dict[int, _T] = {}
    errors: list[BaseException] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work(number: int) -> None:
        try:
            returned[number] = jobs[number]()
        except BaseException as error:  # noqa: BLE001  It is raised below, in the thread that asked.
            errors.append(error)
        finally:
            ended.put(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    end_at = time.monotonic() + timeout_seconds
    at_work = set(range(len(jobs)))
    while at_work:
        try:
            at_work.discard(ended.get(timeout=max(end_at - time.monotonic(), 0.0)))
        except queue.Empty:
            break
    stuck = "".join(f"\n\nthread {number} is at\n{_where(threads[number])}" for number in sorted(at_work))
    if errors:
        if stuck:
            errors[0].add_note(f"when the time was up:{stuck}")
        raise errors[0]
    if stuck:
        raise AssertionError(f"not all have ended within {timeout_seconds:g} s:{stuck}")
    return [returned[number] for number in range(len(jobs))]


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "its end"
