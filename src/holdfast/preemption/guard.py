"""Watches one training loop, and lets it save and exit in time after a notice.

A guard receives notices and saves; its consensus decides when all workers save, and when they exit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ClusterError, DeadlineError, HoldfastError, PeerError, SaveFailedError, UsageError
from holdfast.events import Warned
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.error_cause import describe_early_exit, is_cause, is_of_save, name_dead
from holdfast.preemption.consensus.single import CallRecord, SaveOutcome, SingleConsensus
from holdfast.preemption.consensus.stop_step import Turn, Wanted
from holdfast.preemption.final_save import FinalSave, Saves, end_by
from holdfast.preemption.grace import (
    Action,
    Outlook,
    Verdict,
    allow_for_others,
    decide,
    has_time_to_save,
    is_by_hand,
)
from holdfast.preemption.notice_inbox import NoticeInbox
from holdfast.preemption.ownership import GuardOwnership
from holdfast.preemption.progress import LoopProgress, PausedState, end_at_of
from holdfast.preemption.sources.protocol import Demand
from holdfast.process.latch import Latch, start_thread
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark

if TYPE_CHECKING:
    from holdfast.preemption.consensus.coordinator import StopCoordinator

_CALM_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 0.25
_END_SECONDS: Final = 60.0

_OWN_FAILURE_SECONDS: Final = 2.0
"""How long to wait for this worker's own failure, when another has reported the same failure first."""


def make_guard(manager: Saves, config: TerminationConfig, keep: Callable[[int], SaveHandle | None]) -> Guard:
    """Returns the guard for a loop: one that agrees with those of the other workers, if there are any.

    Raises:
        UsageError: If `manager` or `config` is not valid.
    """
    if isinstance(manager, type) or not (hasattr(manager, "participant") and hasattr(manager, "checkpoint")):
        raise UsageError(
            f"expected a CheckpointManager, got {manager!r}",
            hint="Pass CheckpointManager(directory, Checkpoint(model=model, ...)).",
        )
    if not isinstance(config, TerminationConfig):
        raise UsageError(
            f"termination_config={config!r}",
            hint="Pass a TerminationConfig or None; sources of notices go into its sources=[...].",
        )
    if manager.participant is None:
        return Guard(manager, config, keep, SingleConsensus())
    # Most programs have one worker, and do without what several need.
    from holdfast.preemption.consensus.coordinator import StopCoordinator

    return Guard(manager, config, keep, StopCoordinator(manager.participant.peers, manager.emit, manager.url))


class Guard:
    """Handles notices for one loop.

    Between two steps, the training thread calls `pass_boundary`, and saves and exits there. While it is paused
    (`pause`), in evaluation or after the loop, the guard's own thread does so instead.

    Attributes:
        inbox: The notices.
        exit_code: The exit code of a job that is to be started again.
        leaving: True if the exit has begun.
        is_tentative: True if the loop is the user's own: between two steps it is not known whether another one comes.
        provisional: The step that was saved in a pause, if that save may be incomplete; else None.
        in_block: True if the training thread is in a block of `checkpointable`.
        is_beside_training: True if it was opened while another guard's loop took steps with the same manager.
    """

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        consensus: SingleConsensus | StopCoordinator,
        *,
        yields: bool = False,
    ) -> None:
        """Stores its arguments; `open` starts it.

        Args:
            manager: The manager that saves.
            config: The user's configuration.
            keep: Begins the save of a step, unless it is saved or in progress, and returns it; or None.
            consensus: Decides when to save and when to exit.
            yields: True to leave notices to the guard of another manager in the same thread, if there is one.
        """
        self.inbox = NoticeInbox(config, manager.emit)
        self.leaving = self.is_tentative = self.is_beside_training = self.in_block = False
        self.provisional: int | None = None
        self._manager = manager
        self._consensus = consensus
        self._failures = consensus.failures
        self._save_fn = config.save_fn
        self._has_exit_fn, self.exit_code = config.exit_fn is not None, config.exit_code
        self._final_save = FinalSave(manager, config, keep, self.inbox)
        self._progress = LoopProgress()
        self._process = os.getpid()
        self._yields = yields
        self._ends = False
        self._is_sharing_outcome = False  # Whether all are about to leave together, and the result is not known yet.
        self._safe_step = 0  # At which step nothing could be lost.
        self._pause: PausedState | None = None
        # Whether the training thread waits in `begin_steps` for what this guard's thread does in its stead.
        self._is_awaited = False
        self._closed = False
        self._ended: Latch | None = None
        self._ownership = GuardOwnership(
            manager,
            listens=self.inbox.listens and not yields,
            is_paused=lambda: self._pause is not None,
            give_up_pause=self._give_up_pause,
            forget=lambda: self._forget(self.inbox.count),
        )
        # Guards `_pause`. This guard's thread holds it while it saves in a pause, so that training does not go on then.
        self._lock = self._ownership.shared.lock

    def open(self) -> None:
        """Starts listening; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here, or the loop of another manager is guarded in this thread.
        """
        try:
            self._ownership.enter()
            self._lock = self._ownership.shared.lock
            with self._lock:
                self.is_beside_training = self._ownership.is_beside_training
                if self._pause is not None:
                    self._ownership.take()
            self._ended = start_thread(self._serve, "holdfast-guard")
            self.inbox.open()
        except BaseException:
            self.close()
            raise
        left = lambda: None if self._closed else self.inbox.demand().left_seconds  # noqa: E731
        self._consensus.open(self.inbox.hear, self.inbox.ring, left)

    def close(self) -> None:
        """**Blocks** for a moment. Stops listening, and restores signal handlers; a second call does nothing."""
        if os.getpid() != self._process:
            return
        if not self._closed:
            with self._lock:
                self._closed = True
            self._ownership.leave()
            # When the interpreter ends, its other threads never do.
            is_over = lambda: self._ended is None or sys.is_finalizing() or self._ended.wait(_END_SECONDS)  # noqa: E731
            self.inbox.close(is_over)
        self._consensus.close()

    @property
    def has_left(self) -> bool:
        """True if this guard, or another one of the manager, ends the program."""
        return self.leaving or self.inbox.gave_up or self._ownership.shared.has_left

    @property
    def is_paused(self) -> bool:
        """True if the training thread is paused, and another one may save its state."""
        return self._pause is not None and self._pause.mark is not None

    def begin_steps(self) -> SaveHandle | None:
        """Called when the training thread continues; waits if all may stop at an earlier step.

        Returns:
            The save that was made while it was paused; None if none was.
        """
        self.inbox.patient = True
        if self._pause is None:
            return None
        while True:
            changed = self._consensus.changed
            with self._lock:
                pause = self._pause
                assert pause is not None, "this thread alone ends it"
                if pause.changed or self._consensus.try_resume(pause.step or 0):
                    self._pause, self._is_awaited = None, False
                    break
                self._is_awaited = True
            changed.wait(_LOOK_SECONDS)
        if pause.has_saved and not self._consensus.has_peers:
            self.provisional = pause.step
        return pause.saved

    def pause(self, step: int | None, *, mark: Mark | None = None, saved: SaveHandle | None = None) -> None:
        """Called when the training thread pauses: it takes no steps, and does not change the saved objects.

        That many steps are complete, if that is known. `mark` is their state, unless it is saved or nothing was
        trained; `saved` is the save of that step, if one is in progress or done.
        """
        if mark is None and saved is None:
            self._safe_step = step or 0
        self._consensus.pause(step or 0, begins=self._pause is None)
        with self._lock:
            self._pause = PausedState(step, mark, saved, is_anew=saved is not None and step == self.provisional)
            self._ownership.take()
        if self._is_alert():
            self.inbox.ring()

    def pass_boundary(self, step: int, *arguments: Any, **options: Any) -> None:
        """Called between two steps: saves and exits if it is time to. `save_fn` gets the arguments.

        Raises:
            SystemExit: When it exits.
            PeerError: If another worker has failed.
            ClusterError: If the others cannot be reached, and the workers must agree on a step to save at.
        """
        self._measure(step)
        is_asked = self.inbox.alarmed and not self._is_outranked()
        if not self._consensus.begin_step(step, is_asked=is_asked, is_tentative=self.is_tentative):
            self._final_save.arguments, self._final_save.options = arguments, options
            self._settle(step)

    def pass_last(self, step: int, *, is_over: bool = False) -> None:
        """Called when the training thread takes no further step for now, or never if `is_over`; like `pass_boundary`.

        Raises:
            PeerError: If another worker's training has ended at another step; the others as in `pass_boundary`.
        """
        self._measure(step)
        self._ends = is_over
        # Asked or not: the others learn that no step is begun here.
        self._consensus.begin_step(step, is_asked=True, is_tentative=True)
        self._final_save.arguments, self._final_save.options = (), {}
        self._settle(step, ends=True, is_over=is_over)
        if is_over:
            self._failures.finish(step)

    def wait_saved(self) -> None:
        """**Blocks** until no save is in progress, or there is something to act on.

        Raises:
            SaveFailedError, DeadlineError: As in `FinalSave.wait_idle`.
            PeerError: If training has failed on a worker, including this one if it left its loop before the others.
        """
        self._final_save.wait_idle(self._is_alert)
        if error := self._failures.take_error():
            self._manager.abandon()  # The others come to that save no more.
            raise error

    def pass_end(self, step: int) -> None:
        """**Blocks** for a moment. Called when the last step is committed, and the loop is about to be left for good.

        Raises:
            SystemExit: If this worker, or another one, was asked to stop before it had come this far.
        """
        self._propose()
        call = self._consensus.find_last_call()
        if call is not None and call.wanted == Wanted.LEAVE:
            self.leaving = True
            self._leave(step, call.reason, "", 0.0, problem="", by_hand=call.by_hand)

    def fail(self, error: BaseException) -> HoldfastError | None:
        """**Blocks** for a moment. Called when an error ends training; exits if asked to with nothing to save.

        Returns:
            An error to raise instead: that of another worker from which this one results.
        """
        if self.leaving or self._ownership.shared.has_left or os.getpid() != self._process:
            return None
        report = self._failures.report(error)
        if report is None:
            return None
        if text := describe_early_exit(report.blamed):
            self.leaving = True
            self._final_save.nothing = f"{text}; no progress is lost: nothing was trained"
            self._leave(None, text, "", 0.0, problem=text, by_hand=False)
        elif report.loss and self._is_to_leave():
            self._leave_alone(self._progress.step, report.loss, report.blamed)
        return None if report.blamed is error else report.cause

    def should_stop(self) -> bool:
        """Returns True if the loop would exit if a step ended now."""
        return self._consensus.should_stop(self._is_to_leave)

    def _settle(self, step: int, *, ends: bool = False, is_over: bool = False) -> None:
        """Does what is to be done, together with the others."""
        while True:
            changed = self._consensus.changed
            self._raise_peer_failure(step)
            holds = self._propose()
            left_seconds = self.inbox.demand().left_seconds
            turn = self._consensus.arrive(step, holds=holds, left_seconds=left_seconds, ends=ends, is_over=is_over)
            if turn is Turn.GO:
                # The time of a save does not count for any step.
                self._progress.passed_at = time.monotonic()
                return
            if turn is Turn.STOP:
                self._stop(step)
            elif objection := self._consensus.objection:
                if not self._is_to_leave():
                    raise ClusterError(objection, hint="Start the job again: it resumes from the newest checkpoint.")
                self._leave_alone(step, objection)
                return
            else:
                changed.wait(_LOOK_SECONDS)

    def _raise_peer_failure(self, step: int) -> None:
        error = self._failures.take_error()
        if error is None:
            return
        if self._is_to_leave() and not is_cause(error):
            self._leave_alone(step, error.message, error)
        if is_of_save(error):
            # It has failed here too, and comes by itself.
            with suppress(DeadlineError):
                self._manager.wait(_OWN_FAILURE_SECONDS)
        raise error

    def _propose(self, *, is_paused: bool = False) -> bool:
        """Calls for what the notices of this worker ask for; returns True if the loop waits for that."""
        if not self.inbox.alarmed or self._is_outranked():
            return False
        pending = self.inbox.pending
        outlook = self._outlook(is_paused=is_paused)
        verdict = decide(outlook)
        if self._ends and outlook.demand is not Demand.SAVE:
            # A loop that continues in the remaining time must be notified again, and nothing else would do it.
            verdict = verdict if verdict.action is Action.LEAVE else Verdict(Action.LEAVE, "no step remains")
        if not pending or verdict.action is Action.TRAIN:
            return False
        if verdict.action is Action.SAVE and not is_paused and self._progress.is_left_out:
            return False
        return self._consensus.propose(outlook, verdict, pending[0].notice.text, by_hand=is_by_hand(pending))

    def _outlook(self, *, is_paused: bool = False) -> Outlook:
        demand, left_seconds = self.inbox.demand()
        outlook = self._progress.make_outlook(demand, left_seconds, self._manager.save_seconds, is_paused=is_paused)
        return allow_for_others(outlook) if self._consensus.has_peers and not is_paused else outlook

    def _is_to_leave(self) -> bool:
        """Returns True if it is known that this worker should exit."""
        call = self._consensus.call
        if call is not None and call.wanted == Wanted.LEAVE:
            return True
        return self.inbox.alarmed and decide(self._outlook()).action is Action.LEAVE

    def _stop(self, step: int) -> None:
        """Called at the stop step."""
        call = self._consensus.call
        if call is None or call.wanted == Wanted.LEAVE:
            self._leave_at_stop(step, partial(self._final_save.save_last, step))
        else:
            count = self.inbox.count
            demand = self.inbox.demand().demand
            saved = self._final_save.save_early(step)
            # One that was left out, since another is in flight, is tried again after the next step.
            self._progress.is_left_out = saved is not None and saved.skipped
            if not self._progress.is_left_out:
                self._note_early(step, demand, saved, count)
        self.provisional = self._consensus.end_round(self.provisional)

    def _note_early(self, step: int | None, demand: Demand, saved: SaveHandle | None, count: int) -> None:
        if demand is Demand.SAVE:
            # What was heard meanwhile may ask for more.
            self._forget(count)
        else:
            self._progress.note_early(step, demand, saved)

    def _leave_at_stop(self, step: int | None, save: Callable[[float | None], str]) -> None:
        """Saves, shares the outcome, and exits; returns if `exit_fn` does. `save` returns the error."""
        begun_at = time.monotonic()
        call, stop = self._consensus.call, self._consensus.stop
        assert call is not None, "no worker leaves without a call"
        end_at = end_at_of(self._outlook())
        self.leaving = self._is_sharing_outcome = True
        try:
            if stop is not None and stop.absent:
                self._raise_cause()
                losses = self._failures.describe_losses(stop.absent)
                return self._leave_alone(step, "; ".join(loss.message for loss in losses), losses[0])
            step, problem = self._save_at_stop(step, call, save, end_at)
            limit_seconds = self._manager.timeout_seconds
            if not self._consensus.has_peers:
                limit_seconds -= time.monotonic() - begun_at
            saves, try_end = self._find_saves(), self._consensus.try_end
            own_loss = self._final_save.wait_decided(step, problem, saves, limit_seconds, try_end)
            if own_loss:
                self._raise_cause()
            outcome = self._share_outcome(own_loss, end_at)
        except BaseException:
            # The error of another worker ends this one, as it would in a step, and its own one the others.
            if self._consensus.has_peers:
                self.leaving = False
                self._manager.abandon()
            raise
        finally:
            self._is_sharing_outcome = False
        by_hand, held_seconds = outcome.by_hand if self._consensus.has_peers else None, time.monotonic() - begun_at
        self._leave(step, call.reason, outcome.error, held_seconds, problem, by_hand)

    def _save_at_stop(
        self, step: int | None, call: CallRecord, save: Callable[[float | None], str], end_at: float | None
    ) -> tuple[int | None, str]:
        """**Blocks.** Saves, or waits for an earlier save; returns the saved step, and the error."""
        stop = self._consensus.stop
        if stop is not None and step is not None and step > stop.step:
            # If nothing could be lost, it is a first step whose begin was not known.
            is_first = step == self._safe_step + 1 == stop.step + 1
            return stop.step, "" if is_first else f"the loop had passed step {stop.step} when it should have been saved"
        if self._progress.early is None or self._may_save_again(call):
            problem = save(end_at)
            return self._final_save.find_number(step), problem
        early_step = self._progress.early_step
        return step if early_step is None else early_step, self._final_save.try_wait(self._progress.early, end_at)

    def _share_outcome(self, error: str, end_at: float | None) -> SaveOutcome:
        """Shares the result of the last save with all workers, in this worker's words if it failed here."""
        changed = "" if self._pause is None else self._pause.changed
        mistake = self._final_save.mistake or (changed and f"ChangedError: {changed}")
        is_proof = not error and self._save_fn is None
        own = SaveOutcome(mistake or error, is_by_hand(self.inbox.pending), is_proof, is_cause=bool(mistake))
        # The others may be in a save of theirs that this worker takes no part in.
        told = self._manager.abandon if error and (changed or self._save_fn) else None
        together = self._consensus.share_outcome(own, end_at, told)
        # What failed here says more than what the others have seen of it, unless it results from what failed there.
        is_theirs = not error or (together.is_cause and not mistake)
        shown = together.error and (together.error if is_theirs else error)
        return SaveOutcome(shown, together.by_hand, together.is_proof)

    def _may_save_again(self, call: CallRecord) -> bool:
        """Returns True if there is time for another save than the one after the notice; the same on all."""
        if self._consensus.has_peers:
            return call.saves
        outlook = self._outlook()
        if outlook.saving_seconds is not None and outlook.left_seconds is not None:
            # How long that one takes says whether there is time for another.
            self._final_save.try_wait(self._progress.early, end_at_of(outlook))
            outlook = self._outlook()
        return has_time_to_save(outlook)

    def _find_saves(self) -> list[SaveHandle]:
        """Returns the saves that may be of the last step."""
        saves = (*self._final_save.tried, self._progress.early, None if self._pause is None else self._pause.saved)
        return [saved for saved in saves if saved is not None]

    def _raise_cause(self) -> None:
        """Raises the error of the worker because of which nothing can be saved together any more, if any."""
        cause = self._failures.find_cause()
        if cause is not None:
            raise cause

    def _leave_alone(self, step: int | None, error: str, blamed: ClusterError | None = None) -> None:
        """Exits without a save, because the others cannot take part in one; `blamed` may tell which one is dead."""
        self.leaving = True
        self._final_save.missing = name_dead(blamed)
        self._leave(step, "", self._final_save.check_landed(step, error, self._find_saves()), 0.0, problem=error)

    def _leave(
        self, step: int | None, reason: str, error: str, held_seconds: float, problem: str, by_hand: bool | None = None
    ) -> None:
        """Exits as `FinalSave.leave` does; `problem` is the error here, even if the step is saved."""
        if self._consensus.has_peers and (error or (problem and not self._has_exit_fn)):
            # The others are not waited for any more.
            self._manager.abandon()
        left_seconds, count = self.inbox.demand().left_seconds, self.inbox.count
        try:
            self._final_save.leave(step, reason, error, held_seconds, by_hand=by_hand)
        except BaseException as leaving:
            if self._final_save.has_left:
                self._ownership.shared.has_left = True
            is_outcome_shared = self._consensus.is_outcome_known and not self._consensus.is_cut_short
            if error and not is_outcome_shared and self._failures.error is None:
                # One that does not come to the end of its step would never hear of it.
                self._failures.report(SaveFailedError(error, step=step or 0), left_seconds, is_exit=True)
            elif not error and self._has_exit_fn:
                # On the others `exit_fn` may return, and they train on.
                self._failures.report(leaving, is_exit=True)
            raise
        self.leaving = False
        self._final_save.tried = []
        self._forget(count)
        self._ownership.settle_all()

    def _forget(self, count: int) -> None:
        self._progress.forget_early()
        self.inbox.forget(count)

    def _measure(self, step: int) -> None:
        if not self._ownership.is_owner:
            with self._lock:
                self._ownership.take()
        self._progress.measure(step)

    def _is_outranked(self) -> bool:
        """Returns True if another guard handles the notices: then they are dropped here."""
        if not self._yields or not self._ownership.is_outranked:
            return False
        self._forget(self.inbox.count)
        return True

    def _give_up_pause(self) -> None:
        self._pause = None

    # Beside the training thread.

    def _serve(self) -> None:
        """The main function of the guard's own thread."""
        while not self._closed:
            self.inbox.listen(_LOOK_SECONDS if self._is_alert() else _CALM_SECONDS)
            self._attend()

    def _is_alert(self) -> bool:
        return self.inbox.alarmed or self._consensus.is_alarmed or self._failures.error is not None

    def _attend(self) -> None:
        """Does what is to be done beside the training thread."""
        is_sharing = self._is_sharing_outcome and not self._consensus.is_outcome_known
        if not self._is_alert() or (self.leaving and not is_sharing):
            return
        if self._failures.error is not None:
            self._failures.escalate()
        elif not self.leaving:
            if self._consensus.has_peers and self._ownership.is_owner:
                self._propose(is_paused=self._pause is not None)
            self._act_in_pause()
            self._tell_if_late()

    def _act_in_pause(self) -> None:
        """Saves and exits instead of the training thread, if that is paused; it may not continue meanwhile."""
        with self._lock:
            pause = self._pause
            if pause is None or pause.changed or self._closed:
                return
            holds = self._propose(is_paused=True)
            left_seconds = self.inbox.demand().left_seconds
            turn = self._consensus.arrive(pause.step or 0, holds=holds, left_seconds=left_seconds, is_paused=True)
            # A person who has pressed Ctrl-C waits for the loop, or presses it again.
            waits_for_loop = self._is_to_leave() and is_by_hand(self.inbox.pending) and not self._is_awaited
            if turn is not Turn.GO and waits_for_loop:
                return
            if turn is Turn.STOP:
                self._stop_in_pause(pause)
            elif (objection := self._consensus.objection) and self._is_to_leave():
                self._end_in_pause(lambda: self._leave_alone(pause.step, objection))

    def _stop_in_pause(self, pause: PausedState) -> None:
        call = self._consensus.call
        if call is None:
            return
        pause.renew(self.provisional)
        is_leaving = call.wanted == Wanted.LEAVE
        if not (is_leaving and self._consensus.has_peers):
            count, demand = self.inbox.count, self.inbox.demand().demand
            pause.save()
            if pause.changed:
                text = (
                    f"the state cannot be saved while the loop is paused, so this waits for the loop: {pause.changed}"
                )
                self._manager.emit(Warned(text=text, step=pause.step))
                return
            # What comes after a pause in which there was nothing to be saved is saved when it is there.
            if not is_leaving and (self._consensus.has_peers or pause.mark is not None or demand is Demand.SAVE):
                self._note_early(pause.step, demand, pause.saved, count)
        if is_leaving:
            if not self._consensus.has_peers:
                self._progress.early = None  # That of the pause is newer.
            save = partial(pause.save_surely, self._final_save.wait_committed)
            self._end_in_pause(lambda: self._leave_at_stop(pause.step, save))
        self.provisional = self._consensus.end_round(self.provisional)

    def _end_in_pause(self, leave: Callable[[], None]) -> None:
        try:
            leave()
        except PeerError:
            self._failures.postpone()
        except BaseException as error:  # noqa: BLE001  The program ends by it, in whichever thread it was raised.
            end_by(error)

    def _tell_if_late(self) -> None:
        """Warns once that a step does not end: an incomplete step cannot be saved."""
        is_paused = self._pause is not None and not self._pause.changed
        if is_paused or not self._ownership.is_owner:
            return
        if text := self._progress.find_lateness(self.inbox.pending, self.inbox.demand().left_seconds):
            self._manager.emit(Warned(text=text, step=self._progress.step))
