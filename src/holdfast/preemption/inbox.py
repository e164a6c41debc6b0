"""The notices for one loop, from all its sources, until they are handled; and those that arrive before it."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from holdfast.events import Event, NoticeHeard, Warned
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.error_cause import EarlyExit, describe_early_exit
from holdfast.preemption.grace import CombinedDemand, ReceivedNotice, combine
from holdfast.preemption.sources.asked import Asked
from holdfast.preemption.sources.protocol import Hear, Notice, NoticeSource, SourcePoller
from holdfast.preemption.sources.signals import Signals
from holdfast.process.exit import end_process, is_interactive
from holdfast.process.interrupt import Interrupter
from holdfast.process.latch import Latch
from holdfast.process.terminal import say, say_from_signal_handler
from holdfast.process.wakeup import ANSWERED, Wakeup

_MOST_SIGNALS: Final = 2
"""How many signals count: the first asks to stop, the second hurries. Another one has no effect, since schedulers and
launchers repeat their signals; only another Ctrl-C has its usual effect."""

_STAND_IN_SECONDS: Final = 0.3
"""How long Python may take to run a signal's handler before the signal is handled without it."""

_LOOK_SECONDS: Final = 0.1
"""How often to check that."""

_REPORTING_SECONDS: Final = 2.0
"""How long to wait for another thread that makes events of them."""

_WAIT_SECONDS: Final = 2.0
"""How long creating a run may take after a signal, including other workers. Then the job exits without it."""

_LAUNCHED_BY: Final = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Launchers pass Ctrl-C on, so each process of a job gets it twice: from the terminal, and from them."""


class NoticeInbox:
    """Receives notices from any thread and from signal handlers, and keeps them until they are handled.

    Attributes:
        alarmed: True if there is something to handle.
        gave_up: True if a person no longer wants to wait for a save.
        patient: True if there is a loop that Ctrl-C must wait for. Without one it has its usual effect.
    """

    def __init__(
        self, config: TerminationConfig, emit: Callable[[Event], object], others: Iterable[NoticeSource] = ()
    ) -> None:
        """`others` are sources besides those of the configuration."""
        self.alarmed = self.gave_up = self.patient = False
        self._config = config
        self._emit = emit
        self._bell = Wakeup()
        self._poller = SourcePoller([*config.make_sources(), *others], self.receive, emit)
        # Only grows. Notices before `_settled` are handled; those before `_reported` have an event.
        self._received: list[ReceivedNotice] = []
        self._settled = 0
        self._takes_more = True
        self._reported = 0
        self._reporting = threading.Lock()
        # The notices of signals for which Python has run no handler yet, and since when.
        self._unhandled: list[ReceivedNotice] = []
        # Notices that were received here, ahead of handlers that are still to run. It is replaced whole.
        self._received_early: list[Notice] = []

    @property
    def listens(self) -> bool:
        """True if anything but Ctrl-C, and what is asked of this run alone, can arrive."""
        sources = [each for each in self._poller.sources if not isinstance(each, Asked)]
        return any(not isinstance(each, Signals) or {*each.numbers} - {signal.SIGINT} for each in sources)

    @property
    def pending(self) -> list[ReceivedNotice]:
        """The notices that have not been handled."""
        return self._received[self._settled :]

    @property
    def count(self) -> int:
        """How many notices have arrived, including handled ones."""
        return len(self._received)

    def open(self) -> None:
        """Starts listening; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here.
        """
        if self._config.sources == "auto" and threading.current_thread() is not threading.main_thread():
            text = (
                "signals are not handled: Python can handle them in the main thread only. To stop this thread, let "
                "that set a threading.Event, and pass TerminationConfig(termination_watcher_fn=stop.is_set) here"
            )
            self._emit(Warned(text=text))
        self._bell.take_signals()
        self._poller.open()
        for source in self._signals:
            for number in source.foreign:
                text = f"{number.name} is ignored: its handler was not installed from Python, and stays in place"
                self._emit(Warned(text=text))

    def close(self, wait_listener: Callable[[], bool]) -> None:
        """**Blocks** for a moment. Stops listening, and restores signal handlers.

        Args:
            wait_listener: Waits until the thread that calls `listen` no longer does; returns False if it still might.
        """
        self._poller.close()
        self._bell.ring()
        if wait_listener():
            self._bell.close()

    def receive(self, notice: Notice) -> bool:
        """**Thread-safe.** Receives a notice, also in signal handlers; False if it should have its own effect."""
        if threading.get_ident() == threading.main_thread().ident:
            Wakeup.answer()
            if notice in self._received_early:
                self._received_early = [each for each in self._received_early if each != notice]
                return True
        if not self._takes(notice):
            if not notice.by_hand:
                return True
            is_repeated = any(each.notice.by_hand and each.notice.insists for each in self.pending)
            # The first Ctrl-C where no loop has to be waited for gives nothing up.
            self.gave_up = self.gave_up or is_repeated or self.patient
            return False
        self._received.append(ReceivedNotice(notice, time.monotonic()))
        self.alarmed = True
        if notice.by_hand and notice.insists:
            if is_interactive():
                then = "finishing this step, then saving and stopping. A second interrupt stops at once"
            else:
                then = "finishing this step, then saving and exiting. Press Ctrl-C again to exit at once"
            say_from_signal_handler(f"\nholdfast: {then}, without that save.")
        self._bell.ring()
        return True

    def demand(self) -> CombinedDemand:
        """Returns the combined demand of all notices."""
        return combine(self.pending, self._config.grace_seconds, time.monotonic())

    def forget(self, count: int) -> None:
        """Marks that many notices, counted from the beginning, as handled."""
        # In this order: what is received meanwhile is found, or rings the alarm again.
        self.alarmed = False
        self._settled = count
        if self.pending:
            self.alarmed = True
            self._bell.ring()

    def take_no_more(self) -> None:
        """Stops receiving: the process is exiting, with a code that says if the state is saved. No signal changes
        that.

        Launchers send several signals, one at the notice and one at the end. But a person who repeats Ctrl-C won't
        wait.
        """
        self._takes_more = False
        for source in self._signals:
            source.absorb(() if _is_launched() else (signal.SIGINT,))

    def note_leaving(self) -> None:
        """**Blocks.** Notifies the sources that everything is saved and the process exits."""
        self._poller.note_leaving()

    def ring(self) -> None:
        """**Thread-safe.** Wakes the thread that listens."""
        self._bell.ring()

    def listen(self, timeout_seconds: float) -> None:
        """**Blocks** until there is something new, or the time is over. Makes events of notices.

        It also notices signals while the main thread is in foreign code, where Python runs no handler.
        """
        for number in self._bell.listen(min(timeout_seconds, _LOOK_SECONDS) if self._unhandled else timeout_seconds):
            if number == ANSWERED:
                self._unhandled.clear()
            else:
                notices = [source.expect(number, self.receive) for source in self._signals]
                self._unhandled += [ReceivedNotice(each, time.monotonic()) for each in notices if each is not None]
        if self._unhandled and time.monotonic() - self._unhandled[0].at >= _STAND_IN_SECONDS:
            self._stand_in()
        self.report()

    def report(self) -> None:
        """**Thread-safe.** **Blocks.** Emits the events of notices that have none yet, such as before the exit."""
        if not self._reporting.acquire(timeout=_REPORTING_SECONDS):
            return  # A sink hangs: that must not prevent the exit.
        try:
            while self._reported < len(self._received):
                notice = self._received[self._reported].notice
                self._reported += 1
                self._emit(
                    NoticeHeard(
                        source=notice.source,
                        text=notice.text,
                        demand=notice.demand.name.lower(),
                        left_seconds=notice.left_seconds,
                        by_hand=notice.by_hand,
                    )
                )
        finally:
            self._reporting.release()

    @property
    def _signals(self) -> list[Signals]:
        return [source for source in self._poller.sources if isinstance(source, Signals)]

    def _takes(self, notice: Notice) -> bool:
        if not notice.insists:
            return True
        signals = [each.notice for each in self.pending if each.notice.insists]
        interrupts = _MOST_SIGNALS if _is_launched() else 1
        if notice.by_hand and not (self.patient and sum(each.by_hand for each in signals) < interrupts):
            return False
        return len(signals) < _MOST_SIGNALS

    def _stand_in(self) -> None:
        """Handles signals whose handlers Python does not get to run, except those that have an effect of their own."""
        unhandled, self._unhandled = self._unhandled, []
        for each in unhandled:
            if self._takes_more and self._takes(each.notice):
                self._received_early = [*self._received_early, each.notice]
                self.receive(each.notice)


def _is_launched() -> bool:
    return any(name in os.environ for name in _LAUNCHED_BY) and not is_interactive()


class EarlyNotices:
    """Use it with `with`: holds signals that would kill the process while others wait for it, and hands them over.

    If the run is not created soon after a signal, the process exits: another worker may have failed before it came, and
    a launcher waits for this one. Workers that wait for this one learn why it exits, and exit as well. Ctrl-C has its
    usual effect. Other sources are queried later.
    """

    def __init__(self, config: TerminationConfig) -> None:
        self._config = config
        self._sources: list[Signals] = []
        self._received: list[ReceivedNotice] = []
        self._interrupter = Interrupter(self._leave_late)
        self._closed = Latch()
        self._is_late = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for source in self._config.make_sources():
                # One that is open is another run's, which acts on what it receives.
                if isinstance(source, Signals) and not source.is_open:
                    self._sources.append(source)
                    source.open(self._receive)
            self._interrupter.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._received and isinstance(error, Exception):
            # As when all workers are taken away at once, and each finds the others gone. An error that lasts comes
            # again at the next start.
            found = f"{type(error).__name__}: {error}"
            self._end(
                f"{self._received[0].notice.text} while the run was being created, which then failed: {found}", error
            )
        elif text := describe_early_exit(error):
            self._end(text, error)

    def hand_over(self, receive: Hear) -> None:
        """Stops listening, and returns the notices."""
        self._close()
        received, self._received = self._received, []
        for each in received:
            left_seconds = each.notice.left_seconds
            if left_seconds is not None:
                left_seconds -= time.monotonic() - each.at
            receive(replace(each.notice, left_seconds=left_seconds))

    def _receive(self, notice: Notice) -> bool:
        if notice.by_hand:
            return False
        if len(self._received) < _MOST_SIGNALS:
            self._received.append(ReceivedNotice(notice, time.monotonic()))
        if len(self._received) == 1:
            # Not a `Thread`: this is a signal handler, which may have come while one starts.
            with suppress(RuntimeError):
                _thread.start_new_thread(self._hurry, ())
        return True

    def _hurry(self) -> None:
        """Interrupts the wait of the main thread if the run is late; or ends the process, if that is in foreign code.

        The exit is raised where the main thread waits, so that the others learn of it.
        """
        if self._closed.wait(_WAIT_SECONDS):
            return
        self._is_late = True
        self._interrupter.interrupt()
        if not self._closed.wait(_WAIT_SECONDS):
            try:
                self._leave_late()
            except SystemExit as leaving:
                end_process(leaving.code if isinstance(leaving.code, int) else 1)

    def _leave_late(self) -> None:
        """Exits, once, because the run was not created in time."""
        if self._is_late:
            self._is_late = False
            self._end(
                f"{self._received[0].notice.text} while the run was being created, which did not end within "
                f"{_WAIT_SECONDS:g} s"
            )

    def _end(self, text: str, error: BaseException | None = None) -> None:
        exit_fn, code = self._config.exit_fn, self._config.exit_code
        then = "calling exit_fn" if exit_fn else f"leaving with exit code {code}"
        say(f"holdfast: {text}; no progress is lost: nothing was trained; {then}.")
        if exit_fn is None:
            raise EarlyExit(code, text) from error
        try:
            exit_fn()
        except SystemExit as leaving:
            raise EarlyExit(leaving.code, text) from leaving

    def _close(self) -> None:
        self._closed.open()
        self._interrupter.close()
        for source in self._sources:
            source.close()
