"""The time that a start of a run spends, by phases: recorded with each committed save, and at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from holdfast.cluster.failure_detector import find_start
from holdfast.events.kinds import Clocked, Committed, Event, Leaving
from holdfast.process.pulse import PULSE
from holdfast.supervise.board import BETWEEN, COMMIT, COPY, DATA, EVALUATE, LEAVING, PHASES, RESTORE, STEP

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager

_MOST_LETTERS: Final = 200


class Ledger:
    """A sink that sums up the phases of this start, as the leader's training thread goes through them.

    Without the page of phases, which notebooks and runs without a watchdog lack, all time after the restore counts as
    training.
    """

    _counted_until: ClassVar[float] = 0.0
    """Until when an earlier run of this process has counted, in seconds since 1970."""

    def __init__(self) -> None:
        self._before = self._read_phases()
        self._emit: Callable[[Event], None] | None = None
        self._find_steps: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._begun_at = self._setup = 0.0
        self._reached = 0
        self._has_saved = False

    def begin(self, manager: CheckpointManager) -> None:
        """Called when everything is restored, and the steps are counted."""
        if not manager.worker.is_leader or manager.lineage.find_steps is None:
            return
        self._begun_at = max(Ledger._counted_until, find_process_start())
        self._setup = max(time.time() - self._begun_at - sum(self._read_spent()), 0.0)
        self._find_steps, self._reached = manager.lineage.find_steps, manager.witness.reached
        self._emit = manager.emit

    def __call__(self, event: Event) -> None:
        """Records the sums after a commit, and before the process leaves."""
        if isinstance(event, Committed | Leaving):
            self.record(is_last=isinstance(event, Leaving))

    def end(self, error: BaseException | None = None) -> None:
        """Records the sums for the last time, and the error by which training ended."""
        text = ""
        if isinstance(error, Exception):  # An interrupt, or an exit, is none.
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_LETTERS]
        self.record(is_last=True, error=text)
        self._emit = None

    def record(self, *, is_last: bool = False, error: str = "") -> None:
        """Emits the sums so far."""
        self._has_saved = self._has_saved or not is_last
        if self._emit is None or not (self._has_saved or error):
            return  # It has only looked at the run.
        now, spent = time.time(), self._read_spent()
        restore, data, saves, leaving = spent[RESTORE], spent[DATA], spent[COPY] + spent[COMMIT], spent[LEAVING]
        evaluations = spent[EVALUATE]
        known = self._setup + restore + data + saves + leaving + evaluations
        first, done = self._find_steps()
        Ledger._counted_until = now
        self._emit(
            Clocked(
                at_unix_seconds=now,
                begun_at_unix_seconds=self._begun_at,
                setup_seconds=self._setup,
                restore_seconds=restore,
                train_seconds=max(now - self._begun_at - known, 0.0),
                evaluate_seconds=evaluations,
                data_seconds=data,
                save_seconds=saves,
                leave_seconds=leaving,
                first_step=first,
                step=done,
                repeated_steps=max(min(self._reached, done) - first, 0),
                is_last=is_last,
                error=error,
                first_step_seconds=self._read_first(),
            )
        )

    def _read_first(self) -> float:
        """Returns the training time until the first step was complete; 0 if that was in an earlier run."""
        first = PULSE.board.first_spent if PULSE.board is not None else []
        return max(sum(first[phase] - self._before[phase] for phase in (STEP, BETWEEN)), 0.0) if first else 0.0

    def _read_spent(self) -> list[float]:
        """Returns the seconds of each phase since this run was made; steps and the program's own code are in it."""
        phases = [now - before for now, before in zip(self._read_phases(), self._before, strict=True)]
        return [seconds if phase not in (STEP, BETWEEN) else 0.0 for phase, seconds in enumerate(phases)]

    @staticmethod
    def _read_phases() -> list[float]:
        return PULSE.board.spent() if PULSE.board is not None else [0.0] * len(PHASES)


def find_process_start() -> float:
    """Returns when this process began, in seconds since 1970; where the system does not say it, the present."""
    ticks, now = find_start(os.getpid()), time.time()
    if ticks is None:
        return now
    return now - max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
