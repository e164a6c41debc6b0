"""Preemption notices that arrive as signals."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Demand, Hear, Notice

_Function: TypeAlias = Callable[[int, FrameType | None], object]

_WAY_OUT_SECONDS: Final = 60.0
_MOST_CHAINED: Final = 100
_STATUS: Final = Path("/proc/self/status")

DEFAULT_GRACE_SECONDS: Final = 30.0
"""The grace period of a Kubernetes pod that sets no `terminationGracePeriodSeconds`."""

DEFAULT_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Handles signals. Earlier handlers are called as well, and restored at the end.

    A signal that is ignored when the source is opened (`nohup`, a shell's background job) stays ignored. In a forked
    child, such as a loader's worker, `SIGTERM` has the effect that it would have without holdfast, and the other
    signals have none: the child works until this process ends it.

    Attributes:
        foreign: Signals that are left alone, because their handler was not installed from Python.
    """

    name = "signal"
    interval_seconds = None

    def __init__(self, *numbers: int, left_seconds: float | None = None) -> None:
        """Selects the signals.

        Args:
            numbers: The signals; none for SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.
            left_seconds: The time from `SIGTERM` until the process is killed; None if it is not known.

        Raises:
            UsageError: If a number is not a signal, or a signal that cannot be handled.
        """
        try:
            self.numbers = tuple(signal.Signals(number) for number in numbers or DEFAULT_SIGNALS)
        except ValueError as error:
            raise UsageError(f"{numbers!r}: {error}", hint="Pass numbers such as signal.SIGTERM.") from error
        for number in self.numbers:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise UsageError(
                    f"{number.name} cannot be handled", hint="No process can handle this signal; use another one."
                )
        self._left_seconds = None if left_seconds is None else check_seconds("left_seconds", left_seconds, least=0)
        self._hear: Hear | None = None
        self._before: dict[int, Any] = {}
        self._process = 0
        self._absorbed: frozenset[int] = frozenset()
        self._absorbed_until = 0.0
        self.foreign: tuple[signal.Signals, ...] = ()

    def open(self, hear: Hear) -> None:
        """Installs the handlers.

        Raises:
            UsageError: If this is not the main thread, the only one in which Python runs handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can be handled only by an object that was created in the main thread",
                hint="Create it there, or use other sources: TerminationConfig(sources=[...]).",
            )
        self._process = os.getpid()
        self._hear = hear
        self._absorbed = frozenset()
        caught = _find_caught()
        foreign = []
        for number in self.numbers:
            handler = signal.getsignal(number)
            before = self.find_live(handler, number)
            if before == self._handle:
                continue  # It has stayed, since the program has caught the exit and goes on.
            # Python could neither call nor put back a handler that it has not set. But SIGTERM is what machines are
            # taken away with, and frameworks have handlers for it that only take note.
            is_hidden = handler is signal.SIG_DFL and number in caught and number != signal.SIGTERM
            if before is None or is_hidden:
                foreign.append(number)
            elif before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)
        self.foreign = tuple(foreign)

    @property
    def is_open(self) -> bool:
        """True if the source is open in this process."""
        return self._hear is not None and os.getpid() == self._process

    @staticmethod
    def find_live(handler: Any, number: int) -> Any:
        """Returns the handler, or the one before it if its source no longer listens or belongs to another process."""
        for _ in range(_MOST_CHAINED):
            owner = getattr(handler, "__self__", None)
            if not isinstance(owner, Signals):
                break
            if os.getpid() == owner._process and (owner._hear is not None or owner._is_absorbed(number)):
                break
            handler = owner._before.get(number, signal.SIG_DFL)
        return handler

    def expect(self, number: int, hear: Hear) -> Notice | None:
        """**Thread-safe.** Returns the notice that `hear` will get when Python runs the handler of a signal, or None.

        Python's handler is this one, or one of another source that calls it.
        """
        if self._hear != hear or os.getpid() != self._process or self._is_absorbed(number):
            return None
        handler = signal.getsignal(number)
        for _ in range(_MOST_CHAINED):
            if handler == self._handle or not isinstance(owner := getattr(handler, "__self__", None), Signals):
                break
            handler = owner._before.get(number)
        return self._make_notice(number) if handler == self._handle else None

    def look(self) -> Iterable[Notice]:
        """Does nothing: signals report by themselves."""
        return ()

    def note_leaving(self) -> None:
        """Does nothing."""

    def absorb(self, spared: Collection[int] = ()) -> None:
        """Lets signals have no effect until the process has ended, because it is already exiting.

        If the program catches the exit and stays, signals get their earlier effect back after a minute.

        Args:
            spared: Signals that keep their effect.
        """
        if not self._absorbed:
            self._absorbed = frozenset(self._before) - frozenset(spared)
            self._absorbed_until = time.monotonic() + _WAY_OUT_SECONDS
            atexit.register(self._ignore)

    def close(self) -> None:
        """Restores the earlier handlers, unless another handler was installed since."""
        self._hear = None
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return
        for number, before in list(self._before.items()):
            if number not in self._absorbed and signal.getsignal(number) == self._handle:
                signal.signal(number, self.find_live(before, number))
                del self._before[number]

    def _ignore(self) -> None:
        """Ignores signals, because the interpreter removes its handlers before the process has ended."""
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            for number in self._absorbed:
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (before := self._act(number)) is not None:
            before(number, frame)  # Here, so that the traceback of a KeyboardInterrupt is short.

    def _act(self, number: int) -> _Function | None:
        """Takes a signal, and returns the earlier handler if that is to be called."""
        if os.getpid() != self._process:
            return self._find_before(number) if number == signal.SIGTERM else None
        if self._is_absorbed(number):
            return None
        hear = self._hear
        if hear is None or not hear(self._make_notice(number)):
            return self._find_before(number)
        before = self._before.get(number)
        # That of `asyncio.run` cancels its task at the first Ctrl-C, as Python's own handler raises.
        module = getattr(getattr(before, "func", before), "__module__", "")
        is_interrupt = before is signal.default_int_handler or module == "asyncio.runners"
        return before if callable(before) and not is_interrupt else None

    def _is_absorbed(self, number: int) -> bool:
        return number in self._absorbed and time.monotonic() < self._absorbed_until

    def _make_notice(self, number: int) -> Notice:
        return Notice(
            source=self.name,
            text=f"{signal.Signals(number).name} was sent to process {self._process}",
            demand=Demand.LEAVE,
            left_seconds=self._left_seconds if number == signal.SIGTERM else None,
            insists=True,
            by_hand=number == signal.SIGINT,
        )

    def _find_before(self, number: int) -> _Function | None:
        before = self._before.get(number, signal.SIG_DFL)
        return _die if before is signal.SIG_DFL else before if callable(before) else None


def _die(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Kubernetes(Signals):
    """Handles signals like `Signals`, and knows the time between `SIGTERM` and `SIGKILL`.

    A pod cannot read its own grace period, which begins with the hook `preStop` and is reduced by its duration.
    """

    name = "kubernetes"

    def __init__(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> None:
        """Stores the grace period.

        Args:
            grace_seconds: `terminationGracePeriodSeconds` of the pod, less the duration of `preStop`.

        Raises:
            UsageError: If it is not a valid time.
        """
        check_seconds("grace_seconds", grace_seconds)
        super().__init__(left_seconds=grace_seconds)


# What was blocked in the thread that forks.
_forking = threading.local()


def _hold_before_fork() -> None:
    """Holds `SIGTERM` back during a fork: a pool may send it to a child as soon as the child exists.

    Python forgets the signals that a child gets before it runs.
    """
    if callable(signal.getsignal(signal.SIGTERM)):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go_in_child() -> None:
    """Gives `SIGTERM` its earlier effect back in a forked child.

    A pool ends its workers with it. Python runs a handler only when it is back in Python code: if the signal arrives
    just before a worker blocks in a lock, that never happens, and the pool waits for the worker for ever.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        live = Signals.find_live(handler, signal.SIGTERM)
        if live is not handler:
            signal.signal(signal.SIGTERM, live)
    _release_after_fork()


def _release_after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# After the hook of `wakeup`: what rings by then rings in the child alone.
os.register_at_fork(before=_hold_before_fork, after_in_child=_let_go_in_child, after_in_parent=_release_after_fork)


def _find_caught() -> frozenset[int]:
    """Returns the signals for which the process has a handler, also one unknown to Python; none if that is unknown."""
    try:
        (mask,) = [line.split()[1] for line in _STATUS.read_bytes().splitlines() if line.startswith(b"SigCgt:")]
        bits = int(mask, 16)
    except (OSError, ValueError, IndexError):
        return frozenset()
    return frozenset(number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)
