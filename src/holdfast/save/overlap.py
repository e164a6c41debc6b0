"""Copies that go on while training computes: the optimizer's step, which changes what is copied, waits for them."""

from __future__ import annotations

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

from msgspec.structs import replace

from holdfast.errors import ChangedError, DeadlineError, UsageError
from holdfast.gate import Gate
from holdfast.save.progress import CallWatch, Place, Sign, trace_places
from holdfast.state.adapters import Adapter
from holdfast.state.leaves import Captured, Transfer

GIVING_UP: Final = (
    "From now on everything is copied before save() returns, as with overlap_copy=False, since something other than an "
    "optimizer's step changes what is saved."
)

_LOOK_SECONDS: Final = 0.005
_SOON_SECONDS: Final = 0.02
"""Within it, a training thread that does not hang has left the call that it was in."""


@dataclass(slots=True)
class _Copying:
    """One copy under way.

    Attributes:
        step: The step that is being saved.
        check: Raises a `ChangedError` if something has changed since it was captured.
        ask: Asks after the save, which ends it if an interrupt has cut off what should; True while it is being begun.
        places: Where in its program training was then.
        trainer: The thread that had the step saved.
        gate: Opens when `transfers` are all that is left of the copy.
        transfers: What devices are still copying.
        watch: Tells when the trainer has left the call that it was in when the copy had ended; None before that.
        sign: What training gives by itself when it has left that call.
        settled: Opens when it is known whether something had changed.
        error: What had changed, or None.
        has_held: Whether a step has waited for it.
    """

    step: int
    check: Callable[[], None]
    ask: Callable[[], bool]
    places: list[Place]
    trainer: int = field(default_factory=threading.get_ident)
    gate: Gate = field(default_factory=Gate)
    transfers: list[Transfer] = field(default_factory=list)
    watch: CallWatch | None = None
    sign: Sign = field(default_factory=Sign)
    settled: Gate = field(default_factory=Gate)
    error: ChangedError | None = None
    has_held: bool = False
    # Guards that it is settled once; by one thread also twice, where a signal handler comes in between.
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_over(self) -> bool:
        """Whether the save has ended, and a step has been told of."""
        return self.has_held and self.ask is _ask_nothing

    def settle(self) -> None:
        with self.lock:
            if not self.settled.is_open:
                try:
                    self.check()
                except ChangedError as error:
                    self.error = error
                self.settled.open()

    def forget(self) -> None:
        self.check, self.ask = _check_nothing, _ask_nothing
        self.transfers, self.error = [], None


class StepHold:
    """Holds up the steps of optimizers while what they change is being copied, and finds what else has changed it.

    A change is counted when the call that makes it ends. One that has begun before the copy ended may count after that,
    so the counts say enough only when the training thread is known to be outside of the call that it was in by then: in
    the hook before the next step, in a wait for the save or a question about it, or elsewhere in the function that
    asked for the save.

    `try_hold`, `begin` and the steps themselves belong to the training thread, all else to the thread that copies.

    Attributes:
        gives_up: Whether something has changed although it was held: from then on nothing is. What was seen to change
            may be the smaller part, since not all changes can be seen.
    """

    def __init__(self, timeout_seconds: float, report: Callable[[int, float], None]) -> None:
        """Holds nothing yet.

        Args:
            timeout_seconds: How long a step may be held up.
            report: Told of the step that is being saved, and of the seconds for which the optimizer's step was held up.
        """
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._process = os.getpid()
        self.gives_up = False
        # What the next step waits for, and what the thread that copies is about.
        self._copying: _Copying | None = None
        self._newest: _Copying | None = None
        # By object: what takes the hook away, or None for one that takes none.
        self._hooks: weakref.WeakKeyDictionary[object, Callable[[], None] | None] = weakref.WeakKeyDictionary()

    def try_hold(self, obj: object, adapter: Adapter) -> bool:
        """Whether each step of an object waits for the copies from now on."""
        try:
            hash(weakref.ref(obj))
        except TypeError:  # It cannot be a key here, as NumPy's generators cannot: no step waits for its copy.
            return False
        if obj not in self._hooks:
            # The hook must not keep this alive, nor what hangs on it.
            wait = weakref.WeakMethod(self.wait)
            self._hooks[obj] = adapter.before_step(obj, partial(_call, wait))
        return self._hooks[obj] is not None

    def begin(self, step: int, check: Callable[[], None], ask: Callable[[], bool]) -> Sign:
        """From now on steps wait, until `release`.

        Args:
            step: The step that is being saved.
            check: Raises a `ChangedError` if something has changed since it was captured.
            ask: Asks after the save, and ends it if an interrupt has cut off what should; True while it is being begun.

        Returns:
            What is to be given whenever the training thread asks something of holdfast.
        """
        copying = self._copying = self._newest = _Copying(step, check, ask, trace_places(sys._getframe()))
        return copying.sign

    def give_sign(self) -> None:
        """Called when a program asks something."""
        if self._newest is not None:
            self._newest.sign.give()

    def release(self, transfers: list[Transfer]) -> None:
        """Lets steps go on, behind what devices are still copying; harmless twice."""
        copying = self._copying
        if copying is not None and not copying.gate.is_open:
            copying.transfers = transfers
            copying.gate.open()

    def copy(self, make: Callable[[], None]) -> None:
        """**Blocks.** Makes the copy.

        Raises:
            ChangedError: If something is seen to have changed under it.
        """
        copying = self._newest
        assert copying is not None
        with self._giving_up():
            make()
            copying.watch = CallWatch(copying.trainer, copying.places)
            copying.sign.expect()
            # As a rule it is certain at once, and not asked again: changes that come later are no harm.
            self._try_settle(copying, _SOON_SECONDS)

    def make_sure(self) -> None:
        """**Blocks** until it is certain that nothing had changed before the copy ended.

        Raises:
            ChangedError: If something had.
            DeadlineError: If it stays uncertain, as in a call that does not end.
        """
        copying = self._newest
        assert copying is not None
        with self._giving_up():
            if not self._try_settle(copying, self._timeout_seconds):
                raise DeadlineError(
                    f"for {self._timeout_seconds:g} s after the copy of step {copying.step}, training was in one call",
                    hint="It may be changing what was copied. A loop that sleeps in one line looks the same: wait for "
                    "the save there (wait_committed), or ask its handle. Else find out where training hangs, or use "
                    "overlap_copy=False.",
                )

    def _try_settle(self, copying: _Copying, timeout_seconds: float) -> bool:
        end_at = time.monotonic() + timeout_seconds
        while not copying.settled.is_open:
            if copying.sign.given or (copying.watch is not None and copying.watch.look()):
                copying.settle()
            elif time.monotonic() >= end_at:
                return False
            else:
                copying.settled.wait(_LOOK_SECONDS)
        if copying.error is not None:
            raise copying.error
        return True

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except ChangedError as error:
            self.gives_up = True
            error.hint = GIVING_UP
            raise

    def forget(self) -> None:
        """Lets go of all that was captured: the save has ended, so that no step waits for it, and nobody asks."""
        self.release([])
        copying, self._newest = self._newest, None
        if copying is not None:
            # A step that comes after this may still look at it.
            copying.forget()

    def wait(self, stepping: object = None) -> None:
        """**Blocks.** Called before each step.

        Args:
            stepping: Whose step it is.

        Raises:
            DeadlineError: If the copy does not end in time.
            UsageError: If the step is made from within the `save` that waits to begin the copy.
        """
        copying = None
        while self._copying is not copying and os.getpid() == self._process:
            # Again, if a signal handler has saved meanwhile.
            copying = self._copying
            if copying is not None and not copying.is_over:
                self._wait_for(copying, stepping)

    def _wait_for(self, copying: _Copying, stepping: object) -> None:
        begun_at = time.monotonic()
        is_trainer = threading.get_ident() == copying.trainer
        if copying.ask() and is_trainer:
            raise UsageError(
                f"the save of step {copying.step} has just begun, and the optimizer's step was called from within it",
                hint="In a signal handler only set a flag, and do the rest when the step has ended.",
            )
        if not copying.gate.wait(self._timeout_seconds):
            raise DeadlineError(
                f"the copy of step {copying.step} did not end in {self._timeout_seconds:g} s; no step may begin before",
                hint="Find out what holds the machine up; overlap_copy=False copies before save() returns.",
            )
        # Each thread has streams of its own.
        for transfer in copying.transfers:
            transfer.hold()
        # The step itself is a change, and may be made once this is over.
        # Of another thread only that of an optimizer that is held, as within backward(): no program changes what it
        # steps meanwhile. From one that has no part in this, nothing follows for the call that the trainer is in.
        if is_trainer or stepping in self._hooks:
            copying.settle()
        if not copying.has_held:
            copying.has_held = True
            self._report(copying.step, time.monotonic() - begun_at)

    def end(self) -> None:
        """Takes all hooks away."""
        for remove in self._hooks.values():
            if remove is not None:
                remove()
        self._hooks.clear()


def keep_steady(captured: Captured, hold: StepHold) -> Captured:
    """Holds no more than what would be seen to change otherwise than by a step.

    Args:
        captured: What was captured.
        hold: Knows whether something has.
    """
    steady = (
        place
        for place in captured.held
        if not hold.gives_up and captured.backends[place].version(captured.arrays[place]) is not None
    )
    return replace(captured, held=frozenset(steady))


def _check_nothing() -> None:
    pass


def _ask_nothing() -> bool:
    return False


def _call(method: weakref.WeakMethod[Callable[..., None]], stepping: object) -> None:
    alive = method()
    if alive is not None:
        alive(stepping)
