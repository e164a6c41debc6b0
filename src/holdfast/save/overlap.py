"""Copies that continue while training computes: the optimizer's step, which changes what is copied, waits for them."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from holdfast.errors import ChangedError, DeadlineError
from holdfast.process.latch import Latch
from holdfast.state.adapters import Adapter
from holdfast.state.leaves import Transfer

GIVING_UP: Final = (
    "From now on everything is copied before save() returns, as with overlap_copy=False, because the saved state "
    "is changed outside of an optimizer's step."
)


@dataclass(slots=True)
class _Copying:
    """One copy in progress.

    Attributes:
        step, trainer: The step that is being saved, and the thread that requested it.
        check: Raises a `ChangedError` if something has changed since it was captured.
        latch: Opens when only `transfers`, copies that devices are still making, are left.
        is_made: True if the copy has ended.
        is_waited_for: True if the trainer waits for the save, and so changes nothing.
        settled: Opens when it is known whether something had changed.
        error: What had changed, or None.
        has_held: True if a step has waited for it.
        is_over: True if the save has ended.
    """

    step: int
    trainer: int
    check: Callable[[], None]
    latch: Latch = field(default_factory=Latch)
    transfers: list[Transfer] = field(default_factory=list)
    is_made: bool = False
    is_waited_for: bool = False
    settled: Latch = field(default_factory=Latch)
    error: ChangedError | None = None
    has_held: bool = False
    is_over: bool = False
    # Guards that it is settled once; by one thread also twice, where a signal handler comes in between.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def is_of(self, thread: int) -> bool:
        """Returns True if a thread requested the save, or the one that did is gone."""
        return thread == self.trainer or self.trainer not in sys._current_frames()

    def settle(self) -> None:
        with self.lock:
            if not self.settled.is_open:
                try:
                    self.check()
                except ChangedError as error:
                    self.error = error
                self.settled.open()

    def forget(self) -> None:
        self.is_over, self.check = True, lambda: None
        self.transfers, self.error = [], None


class OptimizerStepBarrier:
    """Holds up the steps of optimizers while what they change is being copied, and detects other changes of it.

    A change is counted when the call that makes it ends. One that has begun before the copy ended may count after that,
    so the counts are complete only when the training thread next reaches the hook before a step, a wait for the save,
    or any other call of the manager; or when no operation can have lasted that long.

    The steps themselves and `try_hold` belong to the training thread, all else to any.

    Attributes:
        gives_up: True if something has changed although it was held: from then on nothing is. The detected changes may
            be the smaller part, because not all can be detected.
    """

    def __init__(
        self, timeout_seconds: float, report: Callable[[int, float], None], check_caller: Callable[[], None]
    ) -> None:
        """`report` is called with the step that is being saved, and the seconds for which an optimizer's step was held
        up."""
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._check_caller = check_caller
        self._process = os.getpid()
        self.gives_up = False
        # What the next step waits for, until the next save; and what is being saved.
        self._copying: _Copying | None = None
        self._newest: _Copying | None = None
        # By object: what takes the hook away, or None for one that takes none.
        self._hooks: weakref.WeakKeyDictionary[object, Callable[[], None] | None] = weakref.WeakKeyDictionary()

    def try_hold(self, obj: object, adapter: Adapter) -> bool:
        """Returns True if each step of an object waits for the copies from now on."""
        try:
            hash(weakref.ref(obj))
        except TypeError:  # It cannot be a key here, as NumPy's generators cannot: no step waits for its copy.
            return False
        if obj not in self._hooks:
            # The hook must not keep this alive, nor what hangs on it.
            wait = weakref.WeakMethod(self.wait)
            self._hooks[obj] = adapter.before_step(obj, partial(_call, wait))
        return self._hooks[obj] is not None

    def begin(self, step: int, trainer: int, check: Callable[[], None]) -> None:
        """Lets steps wait from now on, until `release`. `check` raises a `ChangedError` if something has changed by
        then."""
        self._copying = self._newest = _Copying(step, trainer, check)

    def note_call(self) -> None:
        """Called when a program makes a call: then its thread makes no change."""
        copying = self._newest
        if copying is not None and copying.is_made and copying.is_of(threading.get_ident()):
            copying.settle()

    def wait_for(self, latch: Latch, timeout_seconds: float) -> bool:
        """**Blocks.** Like `latch.wait`, by which a program waits for a save: then its thread makes no change."""
        copying = self._newest
        if copying is None or not copying.is_of(threading.get_ident()):
            return latch.wait(timeout_seconds)
        before = copying.is_waited_for
        try:
            # In this order, and the other way round in `copy`: one of the two sees the other.
            copying.is_waited_for = True
            if copying.is_made:
                copying.settle()
            return latch.wait(timeout_seconds)
        finally:
            copying.is_waited_for = before

    def release(self, transfers: list[Transfer]) -> None:
        """Lets steps continue, ordered after the copies that devices are still making; may be repeated."""
        copying = self._copying
        if copying is not None and not copying.latch.is_open:
            copying.transfers = transfers
            copying.latch.open()

    def copy(self, make: Callable[[], None]) -> None:
        """**Blocks.** Makes the copy; raises `ChangedError` if something has visibly changed during it."""
        copying = self._newest
        assert copying is not None
        with self._giving_up():
            make()
            copying.is_made = True
            if copying.is_waited_for:
                copying.settle()

    def wait_settled(self) -> None:
        """**Blocks** until the training thread makes a call, or for the manager's `timeout_seconds`.

        Raises `ChangedError` if something had changed by then. A program may wait in a loop of its own that only looks
        at the handle, which is not a call: by the deadline, an operation that had begun before the copy ended is over.
        """
        copying = self._newest
        assert copying is not None
        with self._giving_up():
            if threading.get_ident() == copying.trainer:
                copying.settle()  # It makes the save itself, where no thread could be had.
            # In short waits, since seconds in which the process is stopped do not count.
            for _ in range(math.ceil(self._timeout_seconds)):
                if copying.settled.wait(1.0):
                    break
            copying.settle()
            if copying.error is not None:
                raise copying.error

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except ChangedError as error:
            self.gives_up = True
            error.hint = GIVING_UP
            raise

    def forget(self) -> None:
        """Drops everything that was captured: the save has ended, so no step waits for it."""
        self.release([])
        copying, self._newest = self._newest, None
        if copying is not None:
            # A step that comes after this may still look at it.
            copying.forget()

    def wait(self, stepping: object = None) -> None:
        """**Blocks.** Called before each step of an object.

        Raises:
            DeadlineError: If the copy does not end in time.
            UsageError: If the step is made inside the `save` that it would wait for.
        """
        copying = None
        while self._copying is not copying and os.getpid() == self._process:
            # Again, if a signal handler has saved meanwhile.
            copying = self._copying
            if copying is not None and not (copying.has_held and copying.is_over):
                self._wait_for(copying, stepping)

    def _wait_for(self, copying: _Copying, stepping: object) -> None:
        begun_at = time.monotonic()
        self._check_caller()
        if not copying.latch.wait(self._timeout_seconds):
            raise DeadlineError(
                f"the copy of step {copying.step} did not end within {self._timeout_seconds:g} s; no step may "
                "begin before it ends",
                hint="Find out what slows the machine down; overlap_copy=False copies before save() returns.",
            )
        # Each thread has streams of its own.
        for transfer in copying.transfers:
            transfer.hold()
        # The step itself is a change, and may be made once this is over.
        # Of another thread only that of an optimizer that is held, as within backward(): no program changes what it
        # steps meanwhile. From one that has no part in this, nothing follows for the call that the trainer is in.
        if copying.is_of(threading.get_ident()) or stepping in self._hooks:
            copying.settle()
        if not copying.has_held:
            copying.has_held = True
            self._report(copying.step, time.monotonic() - begun_at)

    def close(self) -> None:
        """Removes all hooks."""
        for remove in self._hooks.values():
            if remove is not None:
                remove()
        self._hooks.clear()


def _call(method: weakref.WeakMethod[Callable[..., None]], stepping: object) -> None:
    alive = method()
    if alive is not None:
        alive(stepping)
