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
from holdfast.preemption.wakeup import Wakeup
from holdfast.preemption.watch import Watch

_MOST_SIGNALS: Final = 2
"""So many are taken: the first asks to leave, the second hurries. Another one has the effect that it always had."""

_SLACK_SECONDS: Final = 1.0
"""How long Python may take to run a signal's handler before the main thread counts as stuck."""

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
        self._numbers = {number for source in sources if isinstance(source, Signals) for number in source.numbers}
        self._bell = Wakeup()
        self._watch = Watch(sources, self.hear, emit)
        self._interrupts_taken = _MOST_SIGNALS if any(name in os.environ for name in _LAUNCHED_BY) else 1
        # Only grows. What stands before `_settled` has been dealt with, what stands before `_told` is an event.
        self._heard: list[Heard] = []
        self._settled = 0
        self._takes_more = True
        self._told = 0
        self._rung: list[int] = []

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
            # One write of constant bytes: nothing that could wait, or that the interrupted code could be amid.
            os.write(2, b"\nholdfast: finishing this step, then saving and leaving. Ctrl-C again leaves at once.\n")
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
        self._rung.clear()
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
        self._rung += [number for number in self._bell.listen(timeout_seconds) if number in self._numbers]
        while self._told < len(self._heard):
            notice = self._heard[self._told].notice
            self._told += 1
            demand = notice.demand.name.lower()
            self._emit(
                NoticeHeard(source=notice.source, text=notice.text, demand=demand, left_seconds=notice.left_seconds)
            )
        if len(self._rung) > _MOST_SIGNALS and self._takes_more:
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        taken = len(self.pending)
        self._bell.listen(_SLACK_SECONDS)
        if taken < _MOST_SIGNALS and taken == len(self.pending):
            number = self._rung[-1]
            os.write(2, b"holdfast: the main thread is stuck, and a signal insists: ending at once, without a save.\n")
            os._exit(128 + number)
        self._rung.clear()
