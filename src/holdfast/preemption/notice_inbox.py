"""What was heard by one loop, from all its sources, and has not been dealt with yet."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from holdfast.events import Event, NoticeHeard, Warned
from holdfast.preemption.grace import Heard, combine
from holdfast.preemption.sources.poller import Watch
from holdfast.preemption.sources.protocol import Demand, Notice
from holdfast.preemption.sources.signals import Signals
from holdfast.preemption.sources.wakeup import ANSWERED, Wakeup, answer
from holdfast.preemption.termination import TerminationConfig
from holdfast.save.exit import is_interactive
from holdfast.save.say import say_amid

_MOST_SIGNALS: Final = 2
"""So many are taken: the first asks to leave, the second hurries. Another one has the effect that it always had."""

_SLACK_SECONDS: Final = 1.0
"""How long Python may take to run a signal's handler before the main thread counts as stuck."""

_LOOK_SECONDS: Final = 0.1
"""What a look at it counts for at the most: the whole process may have stood still."""

_STAND_IN_SECONDS: Final = 0.3
"""How long Python may take before a signal is heard without its handler."""

_TELLING_SECONDS: Final = 2.0
"""How long to wait for whoever tells of notices already."""

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
        is_launched = any(name in os.environ for name in _LAUNCHED_BY) and not is_interactive()
        self._interrupts_taken = _MOST_SIGNALS if is_launched else 1
        # Only grows. What stands before `_settled` has been dealt with, what stands before `_told` is an event.
        self._heard: list[Heard] = []
        self._settled = 0
        self._takes_more = True
        self._told = 0
        self._telling = threading.Lock()
        # The signals since the main thread last ran a handler that nobody has heard, and how long it has not although
        # somebody insists. Whoever takes one out of the list, in one go, is who hears it.
        self._unanswered: list[_Rung] = []
        self._stuck_seconds = 0.0
        # What was heard in the stead of handlers that are still to run.
        self._foreheard: list[Notice] = []

    @property
    def listens(self) -> bool:
        """Whether there is anything to be heard but Ctrl-C."""
        return any(not isinstance(source, Signals) or {*source.numbers} - {signal.SIGINT} for source in self._sources)

    @property
    def pending(self) -> list[Heard]:
        """What has not been dealt with."""
        return self._heard[self._settled :]

    @property
    def is_to_leave(self) -> bool:
        """Whether a notice asks to leave, now or by a known time: there is a last save to come then."""
        return self.alarmed and any(each.notice.demand is not Demand.SAVE for each in self.pending)

    @property
    def count(self) -> int:
        """How many notices were heard, those that have been dealt with included."""
        return len(self._heard)

    @property
    def advice(self) -> str:
        """How the job is started again, for people; or an empty string."""
        return next((each.notice.advice for each in self.pending if each.notice.advice), "")

    def open(self) -> None:
        """Begins to listen; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here.
        """
        if self._config.sources == "auto" and threading.current_thread() is not threading.main_thread():
            self._emit(Warned(text="signals are not heard: Python handles them in the main thread only"))
        self._bell.take_signals()
        self._watch.open()
        for source in self._sources:
            for number in source.foreign if isinstance(source, Signals) else ():
                text = f"{number.name} is not listened to: it has a handler that was not set by Python, and that stays"
                self._emit(Warned(text=text))

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
            if notice.insists and self._is_foreheard(notice):
                return True
        if not self._takes(notice):
            is_repeated = any(each.notice.by_hand and each.notice.insists for each in self.pending)
            # The first Ctrl-C where no loop has to be waited for gives nothing up.
            self.gave_up = self.gave_up or is_repeated or self.patient or not notice.by_hand
            return False
        self._heard.append(Heard(notice, time.monotonic()))
        self.alarmed = True
        if notice.by_hand and notice.insists:
            if is_interactive():
                then = "then saving it. A second interrupt stops at once, without that save."
            else:
                then = "then saving and leaving. Ctrl-C again leaves at once."
            say_amid(f"\nholdfast: finishing this step, {then}")
        self._bell.ring()
        return True

    def demand(self) -> tuple[Demand, float | None]:
        """What all notices ask for together, and how many seconds are left; see `combine`."""
        heard = self.pending
        return combine(heard, self._config.grace_period, time.monotonic()) if heard else (Demand.SAVE, None)

    def is_by_hand(self) -> bool:
        """Whether it was a person at a terminal, and nobody else."""
        return all(each.notice.by_hand for each in self.pending)

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

        Hears signals while the main thread is in foreign code, where Python runs no handler, and ends the process there
        if somebody insists.
        """
        self._count_unanswered(timeout_seconds)
        self.tell()
        # None is left if their handlers run this very moment.
        for rung in self._unanswered[-1:] if self._stuck_seconds >= _SLACK_SECONDS else ():
            say_amid("holdfast: the main thread is stuck, and a signal insists: ending at once, without a save.")
            os._exit(128 + rung.number)

    def tell(self) -> None:
        """**Thread-safe.** **Blocks.** Makes events of the notices that are none yet, as before the process leaves."""
        if not self._telling.acquire(timeout=_TELLING_SECONDS):
            return  # A sink hangs: that must not keep anybody from leaving.
        try:
            while self._told < len(self._heard):
                notice = self._heard[self._told].notice
                self._told += 1
                demand = notice.demand.name.lower()
                self._emit(
                    NoticeHeard(source=notice.source, text=notice.text, demand=demand, left_seconds=notice.left_seconds)
                )
        finally:
            self._telling.release()

    def _takes(self, notice: Notice) -> bool:
        if not notice.insists:
            return True
        signals = [each.notice for each in self.pending if each.notice.insists]
        if notice.by_hand and not (self.patient and sum(each.by_hand for each in signals) < self._interrupts_taken):
            return False
        return len(signals) < _MOST_SIGNALS

    def _is_foreheard(self, notice: Notice) -> bool:
        """Whether all signals for which Python runs this handler, once, have been heard without it."""
        is_new = False
        for rung in [*self._unanswered]:
            if notice in rung.notices:
                is_new = self._claim(rung) or is_new
        is_foreheard = notice in self._foreheard
        while notice in self._foreheard:
            self._unlearn(notice)
        return is_foreheard and not is_new

    def _count_unanswered(self, timeout_seconds: float) -> None:
        """**Blocks** until it rings, or the time is over."""
        is_insisted = self._is_insisted()
        waiting = [*self._unanswered]
        looked_at = time.monotonic()
        for number in self._bell.listen(min(timeout_seconds, _LOOK_SECONDS) if waiting else timeout_seconds):
            if number == ANSWERED:
                self._unanswered.clear()
            elif notices := self._foretell(number):
                self._unanswered.append(_Rung(number, notices))
        # It counts from when a look has found it so.
        looked_seconds = min(time.monotonic() - looked_at, _LOOK_SECONDS)
        for rung in waiting:
            rung.waited_seconds += looked_seconds
            if rung.waited_seconds >= _STAND_IN_SECONDS and rung in self._unanswered:
                self._stand_in(rung)
        if is_insisted and self._is_insisted():
            self._stuck_seconds += looked_seconds
        else:
            self._stuck_seconds = 0.0

    def _stand_in(self, rung: _Rung) -> None:
        """Hears a signal whose handler Python does not come to run, unless it is to have an effect of its own."""
        if not self._takes_more or not self._handles(rung.number) or not all(map(self._takes, rung.notices)):
            return
        # In this order: a handler that runs this very moment either takes the signal out first, or finds it heard.
        self._foreheard.extend(rung.notices)
        is_ours = self._claim(rung)
        for notice in rung.notices:
            if not (is_ours and self.hear(notice)):
                self._unlearn(notice)

    def _claim(self, rung: _Rung) -> bool:
        try:
            self._unanswered.remove(rung)
        except ValueError:
            return False
        return True

    def _unlearn(self, notice: Notice) -> None:
        with suppress(ValueError):
            self._foreheard.remove(notice)

    def _is_insisted(self) -> bool:
        """Whether a signal that is one too many, with those that were taken, still waits for its handler."""
        for rung in [*self._unanswered]:
            if not self._handles(rung.number):
                self._claim(rung)
        taken = sum(each.notice.insists for each in self.pending)
        return self._takes_more and bool(self._unanswered) and taken + len(self._unanswered) > _MOST_SIGNALS

    def _foretell(self, number: int) -> list[Notice]:
        """What the handlers of that signal are going to say."""
        told = [source.foretell(number, self.hear) for source in self._sources if isinstance(source, Signals)]
        return [notice for notice in told if notice is not None]

    def _handles(self, number: int) -> bool:
        return any(isinstance(source, Signals) and source.handles(number) for source in self._sources)


class _Rung:
    """A signal that has come, and for which Python has run no handler yet."""

    def __init__(self, number: int, notices: Sequence[Notice]) -> None:
        self.number = number
        self.notices = notices
        self.waited_seconds = 0.0
