"""One manager per thread may handle preemption: the first handler to exit ends the process for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import UsageError


@dataclass(eq=False)
class SharedOwnership:
    """The state that the guards of one manager share.

    Attributes:
        lock: Guards the pauses of the training thread, for all of them.
        owner: The guard that acts beside the training thread.
        has_left: True if one of them ends the program: an exception from the block of another one is its exit.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: GuardOwnership | None = None
    has_left: bool = False


class GuardOwnership:
    """Chooses, of several guards of one manager, the one whose loop has moved last as the owner of the thread.

    Attributes:
        shared: The state that they share.
    """

    def __init__(
        self,
        manager: object,
        *,
        listens: bool,
        is_paused: Callable[[], bool],
        give_up_pause: Callable[[], object],
        forget: Callable[[], object],
    ) -> None:
        """Affects no other guard before `enter`.

        Args:
            manager: The manager whose loop is guarded.
            listens: True if anything but Ctrl-C can arrive.
            is_paused: Returns True if the loop is paused.
            give_up_pause: Called with the lock held when another guard of that manager takes over.
            forget: Called when another one has handled the notices.
        """
        self.shared = SharedOwnership()
        self._guards: list[GuardOwnership] = []
        self._manager = manager
        self._listens = listens
        self._is_paused = is_paused
        self._give_up_pause = give_up_pause
        self._forget = forget

    def enter(self) -> None:
        """Called when the guard begins its work in this thread.

        Raises:
            UsageError: If it listens, and so does one for another manager.
        """
        self._guards, self._process = _thread.guards, os.getpid()
        for other in self._guards:
            # Those of a process from which this one was forked are its own.
            if other._process != os.getpid():
                continue
            if other._manager is self._manager:
                self.shared = other.shared
            elif self._listens and other._listens:
                raise UsageError(
                    "another run or handler already handles notices in this thread: the first one to exit would "
                    "end the process, and the other one's state would not be saved",
                    hint="Put everything into one Checkpoint, or close the other one first (leave its block, or call "
                    'handler.close()), or turn off notices for one of them: preemption="off", or '
                    "TerminationConfig(sources=[]).",
                )
        self._guards.append(self)

    @property
    def is_owner(self) -> bool:
        """True if this guard acts, and no other one of the same manager."""
        return self.shared.owner is self

    @property
    def is_beside_training(self) -> bool:
        """True if another guard is the owner, and its loop takes steps."""
        other = self.shared.owner
        return other is not None and other is not self and other in self._guards and not other._is_paused()

    @property
    def is_outranked(self) -> bool:
        """True if another manager's guard listens in the same thread."""
        return any(other._listens and other._manager is not self._manager for other in tuple(self._guards))

    def take(self) -> None:
        """Takes over: the pauses of the others are no longer the current state. Called with the lock held."""
        self.shared.owner = self
        for other in self._find_others():
            other._give_up_pause()

    def settle_all(self) -> None:
        """Marks the notices of the others as handled: training continues."""
        for other in self._find_others():
            other._forget()

    def leave(self) -> None:
        """Called when the guard has ended; may be repeated, and called in any thread."""
        if self in self._guards:
            self._guards.remove(self)

    def _find_others(self) -> list[GuardOwnership]:
        return [other for other in tuple(self._guards) if other is not self and other.shared is self.shared]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.guards: list[GuardOwnership] = []


_thread = _Thread()
