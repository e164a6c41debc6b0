"""What was heard by one loop, from all its sources, and has not been dealt with yet."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from holdfast.events import Event, NoticeHeard, Warned
from holdfast.preemption.grace import Heard, combine
from holdfast.preemption.notices import Demand, Notice
from holdfast.preemption.signals import Signals
from holdfast.preemption.termination import TerminationConfig
from holdfast.preemption.wakeup import ANSWERED, Wakeup, answer
from holdfast.preemption.watch import Watch
from holdfast.save.say import say_amid

_MOST_SIGNALS: Final = 2
"""So many are taken: the first asks to leave, the second hurries. Another one has the effect that it always had."""

_SLACK_SECONDS: Final = 1.0
"""How long Python may take to run a signal's handler before the main thread counts as stuck."""

_LOOK_SECONDS: Final = 0.1
"""What a look at it counts for at the most: the whole process may have stood still."""

_LAUNCHED_BY: Final = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Launchers pass Ctrl-C on, so that each process of a job gets it twice: from the terminal, and from them."""


class Hearing:
    """Takes notices from any thread and from signal handlers, and keeps them until they are dealt with.

    Attributes:
        alarmed: Whether there is something to deal with.
        gave_up: Whether a person does not want to wait for a save any more.
        patient: Whether there is a loop that Ctrl-C has to wait for. Without one it has the effect that it always had.
    """

    def __init__(self, config: TerminationConfig, emit: Callable[[Event], object]) -> None:
        """Takes note of the sources; `open` begins.

        Args:
            config: What to listen to.
            emit: Told of events.
        """
        self.alarmed = False
        self.gave_up = False
        self.patient = False
        self._config = config
        self._emit = emit
        sources = self._sources = config.make_sources()
        self._bell = Wakeup()
        self._watch = Watch(sources, self.hear, emit)
        self._interrupts_taken = _MOST_SIGNALS if any(name in os.environ for name in _LAUNCHED_BY) else 1
        # Only grows. What stands before `_settled` has been dealt with, what stands before `_told` is an event.
        self._heard: list[Heard] = []
        self._settled = 0
        self._takes_more = True
        self._told = 0
        # The signals since the main thread last ran a handler, and how long it has not although somebody insists.
        self._unanswered: list[int] = []
        self._stuck_seconds = 0.0

    @property
    def listens(self) -> bool:
        """Whether there is anything to be heard but Ctrl-C."""
        return any(not isinstance(source, Signals) or {*source.numbers} - {signal.SIGINT} for source in self._sources)

    @property
    def pending(self) -> list[Heard]:
        """What has not been dealt with."""
        return self._heard[self._settled :]

    @property
    def count(self) -> int:
        """How many notices were heard, those that have been dealt with included."""
        return len(self._heard)

    def open(self) -> None:
        """Begins to listen; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here.
        """
        if self._config.sources == "auto" and threading.current_thread() is not threading.main_thread():
            self._emit(Warned(text="signals are not heard: Python handles them in the main thread only"))
        self._bell.take_signals()
        self._watch.open()

    def close(self) -> None:
        """**Blocks** for a moment. Ends listening, and puts signal handlers back."""
        self._watch.close()
        self._bell.ring()

    def dispose(self) -> None:
        """Gives the bell back, when nobody listens to it any more."""
        self._bell.close()

    def hear(self, notice: Notice) -> bool:
        """**Thread-safe.** Takes a notice, within signal handlers too; False if it is to have its own effect."""
        if threading.get_ident() == threading.main_thread().ident:
            answer()
        if notice.insists:
            signals = [each.notice for each in self.pending if each.notice.insists]
            interrupts = sum(each.by_hand for each in signals)
            if notice.by_hand and not (self.patient and interrupts < self._interrupts_taken):
                self.gave_up = self.gave_up or interrupts > 0
                return False
            if len(signals) >= _MOST_SIGNALS:
                self.gave_up = True
                return False
        self._heard.append(Heard(notice, time.monotonic()))
        self.alarmed = True
        if notice.by_hand and notice.insists:
            say_amid("\nholdfast: finishing this step, then saving and leaving. Ctrl-C again leaves at once.")
        self._bell.ring()
        return True

    def demand(self) -> tuple[Demand, float | None]:
        """What all notices ask for together, and how many seconds are left; see `combine`."""
        heard = self.pending
        return combine(heard, self._config.grace_period, time.monotonic()) if heard else (Demand.SAVE, None)

    def is_by_hand(self) -> bool:
        """Whether it was a person at a terminal, and nobody else."""
        return all(each.notice.by_hand for each in self.pending)

    def advice(self) -> str:
        """How the job is started again, for people; or an empty string."""
        return next((each.notice.advice for each in self.pending if each.notice.advice), "")

    def forget(self, count: int) -> None:
        """So many notices, counted from the beginning, have been dealt with."""
        # In this order: what is heard meanwhile is found, or rings the alarm again.
        self.alarmed = False
        self._settled = count
        if self.pending:
            self.alarmed = True
            self._bell.ring()

    def take_no_more(self) -> None:
        """The process is on its way out, with an exit code that says what became of the state. No signal changes that.

        Launchers send several, one at the notice and one at the end. But a person who presses Ctrl-C again does not
        want to wait.
        """
        self._takes_more = False
        is_launched = self._interrupts_taken == _MOST_SIGNALS
        for source in self._sources:
            if isinstance(source, Signals):
                source.absorb(() if is_launched else (signal.SIGINT,))

    def note_leaving(self) -> None:
        """**Blocks.** Tells the sources that all is saved and the process leaves."""
        self._watch.note_leaving()

    def ring(self) -> None:
        """**Thread-safe.** Wakes whoever listens."""
        self._bell.ring()

    def listen(self, timeout_seconds: float) -> None:
        """**Blocks** until there is something new, or the time is over. Makes events of notices.

        Ends the process if somebody insists while the main thread is in foreign code, where Python runs no handler.
        """
        self._count_unanswered(timeout_seconds)
        while self._told < len(self._heard):
            notice = self._heard[self._told].notice
            self._told += 1
            demand = notice.demand.name.lower()
            self._emit(
                NoticeHeard(source=notice.source, text=notice.text, demand=demand, left_seconds=notice.left_seconds)
            )
        if self._stuck_seconds >= _SLACK_SECONDS:
            say_amid("holdfast: the main thread is stuck, and a signal insists: ending at once, without a save.")
            os._exit(128 + self._unanswered[-1])

    def _count_unanswered(self, timeout_seconds: float) -> None:
        """**Blocks** until it rings, or the time is over."""
        is_insisted = self._is_insisted()
        looked_at = time.monotonic()
        for number in self._bell.listen(min(timeout_seconds, _LOOK_SECONDS) if is_insisted else timeout_seconds):
            if number == ANSWERED:
                self._unanswered.clear()
            else:
                self._unanswered.append(number)
        # It counts from when a look has found it so.
        if is_insisted and self._is_insisted():
            self._stuck_seconds += min(time.monotonic() - looked_at, _LOOK_SECONDS)
        else:
            self._stuck_seconds = 0.0

    def _is_insisted(self) -> bool:
        """Whether a signal that is one too many, with those that were taken, still waits for its handler."""
        self._unanswered = [number for number in self._unanswered if self._handles(number)]
        taken = sum(each.notice.insists for each in self.pending)
        return self._takes_more and bool(self._unanswered) and taken + len(self._unanswered) > _MOST_SIGNALS

    def _handles(self, number: int) -> bool:
        return any(isinstance(source, Signals) and source.handles(number) for source in self._sources)
