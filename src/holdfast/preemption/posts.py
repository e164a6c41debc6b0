"""Whose loop is guarded in a thread: that of one manager, for the first guard that leaves ends the process for all."""

from __future__ import annotations

import os
import threading

from holdfast.errors import UsageError


class Post:
    """Where a guard stands that listens for notices."""

    def __init__(self, taken: list[Post], manager: object) -> None:
        """Made by `take_post`."""
        self.manager = manager
        self.process = os.getpid()
        self._taken = taken
        taken.append(self)

    def leave(self) -> None:
        """Nobody listens there any more; harmless twice, and in any thread."""
        if self in self._taken:
            self._taken.remove(self)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.taken: list[Post] = []


_thread = _Thread()


def take_post(manager: object) -> Post:
    """One more guard begins to listen in this thread.

    Raises:
        UsageError: If there is one for another manager.
    """
    for post in _thread.taken:
        # Those of a process from which this one was forked are its own.
        if post.manager is not manager and post.process == os.getpid():
            raise UsageError(
                "another run or handler listens for notices in this thread already: the first of both to leave would "
                "end the process, and what the other one keeps would not be saved",
                hint="Keep all that belongs together in one Checkpoint; or close the other one first; or let one of "
                'them hear nothing: preemption="off", or TerminationConfig(sources=[]).',
            )
    return Post(_thread.taken, manager)
