"""Whose loop is guarded in a thread: that of one manager, for the first guard that leaves ends the process for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from holdfast.errors import UsageError


class Duty:
    """What the guards of one manager share: one of them at a time acts behind the training thread's back.

    Attributes:
        post: Whose guard does.
        has_left: Whether one of them ends the program: what comes out of the block of another one is its exit.
    """

    def __init__(self) -> None:
        # Guards what the training thread rests in, for all of them.
        self.lock = threading.Lock()
        self.post: Post | None = None
        self.has_left = False


class Post:
    """Where a guard stands. Of several on one manager that one is on duty whose loop has moved last."""

    def __init__(
        self,
        taken: list[Post],
        manager: object,
        duty: Duty,
        *,
        listens: bool,
        rests: Callable[[], bool],
        relieve: Callable[[], object],
        forget: Callable[[], object],
    ) -> None:
        """Made by `take_post`."""
        self.manager = manager
        self.duty = duty
        self.listens = listens
        self.process = os.getpid()
        self._rests = rests
        self._relieve = relieve
        self._forget = forget
        self._taken = taken
        taken.append(self)

    @property
    def is_on_duty(self) -> bool:
        """Whether this guard acts, and no other one of the same manager."""
        return self.duty.post is self

    @property
    def is_beside_training(self) -> bool:
        """Whether another guard is on duty, and its loop takes steps."""
        other = self.duty.post
        return other is not None and other is not self and other in self._taken and not other._rests()

    @property
    def is_outranked(self) -> bool:
        """Whether another manager's guard listens in the same thread."""
        return any(post.listens and post.manager is not self.manager for post in tuple(self._taken))

    def go_on_duty(self) -> None:
        """The others act no more: what they rest in is not the state any more. Called with the duty's lock held."""
        self.duty.post = self
        for post in self._find_others():
            post._relieve()

    def settle_all(self) -> None:
        """What the others have heard by now has been dealt with here, and training goes on."""
        for post in self._find_others():
            post._forget()

    def leave(self) -> None:
        """Nobody stands there any more; harmless twice, and in any thread."""
        if self in self._taken:
            self._taken.remove(self)

    def _find_others(self) -> list[Post]:
        return [post for post in tuple(self._taken) if post is not self and post.duty is self.duty]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.taken: list[Post] = []


_thread = _Thread()


def take_post(
    manager: object,
    *,
    listens: bool,
    rests: Callable[[], bool],
    relieve: Callable[[], object],
    forget: Callable[[], object],
) -> Post:
    """One more guard begins its work in this thread.

    Args:
        manager: Whose loop it guards.
        listens: Whether it can hear anything but Ctrl-C.
        rests: Whether its loop takes no steps.
        relieve: Called with the duty's lock held when another guard of that manager goes on duty.
        forget: Called when another one has dealt with what was heard.

    Raises:
        UsageError: If it listens, and so does one for another manager.
    """
    duty = Duty()
    for post in _thread.taken:
        # Those of a process from which this one was forked are its own.
        if post.process != os.getpid():
            continue
        if post.manager is manager:
            duty = post.duty
        elif listens and post.listens:
            raise UsageError(
                "another run or handler listens for notices in this thread already: the first of both to leave would "
                "end the process, and what the other one keeps would not be saved",
                hint="Keep all that belongs together in one Checkpoint; or close the other one first (leave its "
                "block, or call handler.close()); or let one of "
                'them hear nothing: preemption="off", or TerminationConfig(sources=[]).',
            )
    return Post(_thread.taken, manager, duty, listens=listens, rests=rests, relieve=relieve, forget=forget)
