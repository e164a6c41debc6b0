"""Watches one training loop, and lets it save and exit in time after a notice.

A guard receives notices and saves; its consensus decides when all workers save, and when they exit. `decide.py` has the
table of its states.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from holdfast.errors import ClusterError, DeadlineError, HoldfastError, PeerError, SaveFailedError, UsageError
from holdfast.events import Warned
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.error_cause import describe_early_exit, is_cause, is_of_save, name_dead
from holdfast.preemption.consensus.single import GuardCalls, SingleConsensus
from holdfast.preemption.decide import NEXT, GuardState, Turning, Verdict, make_plan
from holdfast.preemption.final_save import FinalSave, Saves, SavesRun, end_by
from holdfast.preemption.grace import Action, Outlook, Plan, StopOrder, allow_for_others, decide, is_by_hand
from holdfast.preemption.inbox import NoticeInbox
from holdfast.preemption.progress import LoopProgress, PausedState, StandingOrder
from holdfast.preemption.sources.asked import Asked, Condition
from holdfast.preemption.sources.protocol import Demand
from holdfast.process.latch import Latch, start_thread
from holdfast.process.pulse import PULSE
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark

if TYPE_CHECKING:
    from holdfast.preemption.consensus.coordinator import StopCoordinator
    from holdfast.save.lineage import Lineage

_CALM_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 0.25
_END_SECONDS: Final = 60.0

_OWN_FAILURE_SECONDS: Final = 2.0
"""How long to wait for this worker's own failure, when another has reported the same failure first."""


def make_guard(manager: SavesRun, config: TerminationConfig, keep: Callable[[int], SaveHandle | None]) -> Guard:
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
        return Guard(manager, config, keep, SingleConsensus(), manager.lineage)
    # Most programs have one worker, and do without what several need.
    from holdfast.preemption.consensus.coordinator import StopCoordinator

    consensus = StopCoordinator(manager.participant.peers, manager.emit, manager.url)
    return Guard(manager, config, keep, consensus, manager.lineage)


class Guard:
    """Handles notices for one loop.

    Between two steps, the training thread calls `pass_boundary`, and saves and exits there. While it is paused
    (`pause`), in evaluation or after the loop, the guard's own thread does so instead.

    Attributes:
        inbox: The notices.
        config: The user's configuration.
        state: What the training thread does.
        is_tentative: True if the loop is the user's own: between two steps it is not known whether another one comes.
        provisional: The step that was saved in a pause, if that save may be incomplete; else None.
        orders: What all workers are to do at the next stop step.
        yields: True if notices are left to the guard of another manager in the same thread, if there is one.
    """

    yields: ClassVar[bool] = False

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        consensus: SingleConsensus | StopCoordinator,
        lineage: Lineage | None = None,
    ) -> None:
        """Stores its arguments; `open` starts it.

        Args:
            manager: The manager that saves.
            config: The user's configuration.
            keep: Begins the save of a step, unless it is saved or in progress, and returns it; or None.
            consensus: Decides when to save and when to exit.
            lineage: The run, if its job can be asked for something.
        """
        # The leader hears what is asked of the run, for all workers.
        is_asked = lineage is not None and lineage.storage.traits.is_shared and manager.worker.is_leader
        asked = [Asked(lineage, manager.worker, self._find_condition)] if lineage is not None and is_asked else []
        self.inbox = NoticeInbox(config, manager.emit, asked)
        self.config = config
        self.state = GuardState.TRAINING
        self.is_tentative = False
        self.provisional: int | None = None
        self._manager = manager
        self._consensus = consensus
        self._progress = LoopProgress()
        self._final_save = FinalSave(manager, config, keep, self.inbox, consensus, self._progress, self._look)
        self.orders = StandingOrder()
        self._pause: PausedState | None = None
        # Guards `_pause`. This guard's thread holds it while it saves in a pause, so that training does not go on then.
        self._lock = threading.Lock()
        self._is_over = False
        self._closed = False
        self._ended: Latch | None = None

    def open(self) -> None:
        """Starts listening; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here, or the loop of another manager is guarded in this thread, or
                another loop of this one.
        """
        try:
            self._check_alone()
            _open[self] = _find_place()
            self._ended = start_thread(self._serve, "holdfast-guard")
            self.inbox.open()
        except BaseException:
            self.close()
            raise
        left = lambda: None if self._closed else self.inbox.demand().left_seconds  # noqa: E731
        self._consensus.open(GuardCalls(self.inbox.receive, self.inbox.ring, left))

    def close(self) -> None:
        """**Blocks** for a moment. Stops listening, and restores signal handlers; a second call does nothing."""
        if self._is_forked():
            return
        if not self._closed:
            with self._lock:
                self._closed = True
            _open.pop(self, None)
            # When the interpreter ends, its other threads never do.
            is_over = lambda: self._ended is None or sys.is_finalizing() or self._ended.wait(_END_SECONDS)  # noqa: E731
            self.inbox.close(is_over)
        self._consensus.close()

    @property
    def is_open(self) -> bool:
        """True if it listens."""
        return self._ended is not None and not self._closed

    @property
    def leaving(self) -> bool:
        """True if the exit has begun."""
        return self.state is GuardState.LEAVING

    @property
    def has_left(self) -> bool:
        """True if it ends the program, or a person has ended it by a second Ctrl-C."""
        return self.leaving or self.inbox.gave_up

    def order(self, order: StopOrder) -> None:
        """**Thread-safe.** Lets all workers do something at the next step at which all can; the first order counts."""
        self.orders.pending = self.orders.pending or order
        self.inbox.ring()

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
        pause, may_resume = self._pause, False
        if pause is None:
            return None
        while not may_resume:
            changed = self._consensus.changed
            with self._lock:
                may_resume = bool(pause.changed) or self._consensus.try_resume(max(pause.begun, pause.step or 0))
                if may_resume:
                    self._pause = None
                self._turn(Turning.RESUME if may_resume else Turning.AWAIT)
            if not may_resume:
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
            self._progress.safe_step = step or 0
        begun, is_anew = self._consensus.pause(step or 0), saved is not None and step == self.provisional
        with self._lock:
            begun = begun if self._pause is None else self._pause.begun
            self._pause = PausedState(step, begun, mark, saved, is_anew=is_anew)
            self._turn(Turning.PAUSE)
        if self._is_alert():
            self.inbox.ring()

    def pass_boundary(self, step: int, *arguments: Any, **options: Any) -> None:
        """Called between two steps: saves and exits if it is time to. `save_fn` gets the arguments.

        Raises:
            SystemExit: When it exits.
            PeerError: If another worker has failed.
            ClusterError: If the others cannot be reached, and the workers must agree on a step to save at.
        """
        self._progress.measure(step)
        is_asked = self.orders.pending is not None or (self.inbox.alarmed and not self._is_outranked())
        if not self._consensus.begin_step(step, is_asked=is_asked, is_tentative=self.is_tentative):
            self._final_save.arguments, self._final_save.options = arguments, options
            self._settle(step)

    def pass_last(self, step: int, *, is_over: bool = False) -> None:
        """Called when the training thread takes no further step for now, or never if `is_over`; like `pass_boundary`.

        Raises:
            PeerError: If another worker's training has ended at another step; the others as in `pass_boundary`.
        """
        self._progress.measure(step)
        self._is_over = is_over
        # Asked or not: the others learn that no step is begun here.
        self._consensus.begin_step(step, is_asked=True, is_tentative=True)
        self._final_save.arguments, self._final_save.options = (), {}
        self._settle(step, ends=True)
        if is_over:
            self._consensus.failures.finish(step)

    def wait_saved(self) -> None:
        """**Blocks** until no save is in progress, or there is something to act on.

        Raises:
            SaveFailedError, DeadlineError: As in `FinalSave.wait_idle`.
            PeerError: If training has failed on a worker, including this one if it left its loop before the others.
        """
        self._final_save.wait_idle(self._is_alert)
        if error := self._consensus.failures.take_error():
            self._manager.abandon()  # The others come to that save no more.
            raise error

    def is_asked_to_leave(self) -> bool:
        """Returns True if this worker, whose training is over, or another one was asked to stop."""
        plans = self._make_plan(), self._consensus.call
        return any(plan is not None and plan.action is Action.LEAVE for plan in plans)

    def pass_end(self, step: int, saved: SaveHandle | None) -> None:
        """**Blocks** for a moment. Called when the last step is committed, and the loop is about to be left for good.

        `saved` is the save of that step; None if it was restored.

        Raises:
            SystemExit: If this worker, or another one, was asked to stop before it had come this far.
        """
        plan = self._consensus.find_last_call(self._make_plan())
        if plan is not None and plan.action is Action.LEAVE:
            self._final_save.tried = [] if saved is None else [saved]
            self._leave(step, plan.reason, "", 0.0, problem="", by_hand=plan.by_hand)

    def fail(self, error: BaseException) -> HoldfastError | None:
        """**Blocks** for a moment. Called when an error ends training; exits if asked to with nothing to save.

        Returns:
            An error to raise instead: that of another worker from which this one results.
        """
        if self.leaving or self._is_forked():
            return None
        report = self._consensus.failures.report(error)
        if report is None:
            return None
        if text := describe_early_exit(report.blamed):
            self._final_save.nothing = f"{text}; no progress is lost: nothing was trained"
            self._leave(None, text, "", 0.0, problem=text, by_hand=False)
        elif report.loss and self._is_to_leave():
            self._leave_alone(self._progress.step, report.loss, report.blamed)
        return None if report.blamed is error else report.cause

    def should_stop(self) -> bool:
        """Returns True if the loop would exit if a step ended now."""
        return self._consensus.should_stop(self._is_to_leave)

    def _turn(self, turning: Turning) -> None:
        self.state = NEXT.get((self.state, turning), self.state)

    def _settle(self, step: int, *, ends: bool = False) -> None:
        """Does what is to be done, together with the others."""
        while True:
            self._turn(Turning.SETTLE)
            changed = self._consensus.changed
            self._raise_peer_failure(step)
            verdict = self._consensus.settle(
                step, self._make_plan(), is_tentative=self.is_tentative, ends=ends, is_over=self._is_over
            )
            if verdict.action is Action.TRAIN:
                # The time of a save does not count for any step.
                self._progress.passed_at = time.monotonic()
                return self._turn(Turning.GO)
            if verdict.action is Action.SAVE:
                self._save_early(step)
                self.provisional = self._consensus.end_round(self.provisional)
            elif verdict.action is Action.LEAVE:
                self._leave_at_stop(step, verdict)
                self.provisional = self._consensus.end_round(self.provisional)
            elif verdict.action is Action.OBEY and verdict.plan is not None and verdict.plan.order is not None:
                ended = verdict.stop.done if verdict.stop is not None else ()
                if (ended or self._is_over) and not verdict.plan.order.raises:
                    self.orders.pending = None
                    who = f"rank {ended[0]}" if ended else "this worker"
                    raise UsageError(
                        f"{verdict.plan.order.cause}, and training cannot go back: {who} has ended it already",
                        hint="Go back by `holdfast rollback`, or in the last step, call run.rollback on all workers.",
                    )
                step = self.orders.obey(verdict.plan.order, step)
                self.orders.pending = self.provisional = None
                self._progress.rewind(step)
                self._consensus.rewind(step)
                self._consensus.end_round(None)
            elif verdict.objection:
                if not self._is_to_leave():
                    hint = "Start the job again: it resumes from the newest checkpoint."
                    raise ClusterError(verdict.objection, hint=hint)
                return self._leave_alone(step, verdict.objection)
            else:
                changed.wait(_LOOK_SECONDS)

    def _raise_peer_failure(self, step: int) -> None:
        error = self._consensus.failures.take_error()
        if error is None:
            return
        if self._is_to_leave() and not is_cause(error):
            self._leave_alone(step, error.message, error)
        if is_of_save(error):
            # It has failed here too, and comes by itself.
            with suppress(DeadlineError):
                self._manager.wait(_OWN_FAILURE_SECONDS)
        raise error

    def _make_plan(self, *, is_paused: bool = False) -> Plan | None:
        """Returns what the notices of this worker, or an order, ask for; None for nothing. An exit comes first."""
        plan, order = None, self.orders.pending
        if self.inbox.alarmed and not self._is_outranked():
            pending, is_left_out = self.inbox.pending, self._progress.is_left_out and not is_paused
            look = self._look(is_paused=is_paused)
            plan = make_plan(look, pending, is_over=self._is_over, is_left_out=is_left_out)
        is_first = order is not None and not self._is_over and (plan is None or plan.action is not Action.LEAVE)
        return Plan(Action.OBEY, order.cause, order=order) if is_first and order is not None else plan

    def _find_condition(self) -> Condition:
        progress, pending = self._progress, [each.notice for each in self.inbox.pending]
        step_seconds = progress.make_outlook(Demand.SAVE, None, None, is_paused=False).step_seconds
        return Condition(progress.step, progress.passed_at, step_seconds, self.state.value, pending)

    def _look(self, *, is_paused: bool = False) -> Outlook:
        demand, left_seconds = self.inbox.demand()
        outlook = self._progress.make_outlook(demand, left_seconds, self._manager.save_seconds, is_paused=is_paused)
        return allow_for_others(outlook) if self._consensus.has_peers and not is_paused else outlook

    def _is_to_leave(self) -> bool:
        """Returns True if it is known that this worker should exit."""
        call = self._consensus.call
        if call is not None and call.action is Action.LEAVE:
            return True
        return self.inbox.alarmed and decide(self._look()).action is Action.LEAVE

    def _save_early(self, step: int) -> None:
        """Saves after a notice, to train on."""
        count, demand = self.inbox.count, self.inbox.demand().demand
        saved = self._final_save.save_early(step)
        # One that was left out, since another is in flight, is tried again after the next step.
        self._progress.is_left_out = saved is not None and saved.skipped
        if not self._progress.is_left_out:
            self._note_early(step, demand, saved, count)

    def _note_early(self, step: int | None, demand: Demand, saved: SaveHandle | None, count: int) -> None:
        if demand is Demand.SAVE:
            # What was received meanwhile may ask for more.
            self._forget(count)
        else:
            self._progress.note_early(step, demand, saved)

    def _leave_at_stop(self, step: int | None, verdict: Verdict) -> None:
        """Saves, shares the outcome, and exits; returns if `exit_fn` does."""
        begun_at = time.monotonic()
        assert verdict.plan is not None, "no worker leaves without a plan"
        try:
            step, problem, outcome = self._final_save.save_together(step, verdict, self._pause)
        except BaseException:
            # The error of another worker ends this one, as it would in a step, and its own one the others.
            self._turn(Turning.FAIL if self._consensus.has_peers else Turning.LEAVE)
            if self._consensus.has_peers:
                self._manager.abandon()
            raise
        participant = self._manager.participant
        if outcome is None and participant is not None:
            known = participant.peers.failures
            losses = [known.make_error(known.describe_loss(rank)) for rank in verdict.absent]
            return self._leave_alone(step, "; ".join(loss.message for loss in losses), losses[0])
        assert outcome is not None, "only one of several workers may be absent"
        by_hand = outcome.by_hand if self._consensus.has_peers else None
        held_seconds = time.monotonic() - begun_at
        self._leave(step, verdict.plan.reason, outcome.error, held_seconds, problem, by_hand)

    def _leave_alone(self, step: int | None, error: str, blamed: ClusterError | None = None) -> None:
        """Exits without a save, because the others cannot take part in one; `blamed` may name the one that is dead."""
        self._turn(Turning.LEAVE)
        self._final_save.missing = name_dead(blamed)
        self._leave(step, "", self._final_save.check_landed(step, error, self._pause), 0.0, problem=error)

    def _leave(
        self, step: int | None, reason: str, error: str, held_seconds: float, problem: str, by_hand: bool | None = None
    ) -> None:
        """Exits as `FinalSave.leave` does; `problem` is the error here, even if the step is saved."""
        self._turn(Turning.LEAVE)
        consensus, has_exit_fn = self._consensus, self.config.exit_fn is not None
        if consensus.has_peers and (error or (problem and not has_exit_fn)):
            # The others are not waited for any more.
            self._manager.abandon()
        left_seconds, count = self.inbox.demand().left_seconds, self.inbox.count
        try:
            self._final_save.leave(step, reason, error, held_seconds, by_hand=by_hand)
        except BaseException as leaving:
            is_outcome_shared = consensus.is_outcome_known and not consensus.is_cut_short
            if error and not is_outcome_shared and consensus.failures.error is None:
                # One that does not come to the end of its step would never learn of it.
                consensus.failures.report(SaveFailedError(error, step=step or 0), left_seconds, is_exit=True)
            elif not error and has_exit_fn:
                # On the others `exit_fn` may return, and they train on.
                consensus.failures.report(leaving, is_exit=True)
            raise
        self._final_save.tried = []
        self._forget(count)
        self._turn(Turning.RETURN)
        if self._pause is not None:
            self._turn(Turning.PAUSE)

    def _forget(self, count: int) -> None:
        self._progress.forget_early()
        self.inbox.forget(count)

    # Other guards.

    def _check_alone(self) -> None:
        """Raises `UsageError` if another guard would do what this one does."""
        here = _find_place()
        for other, place in list(_open.items()):
            # Those of a process from which this one was forked are its own.
            if place[0] != here[0]:
                continue
            if other._manager is self._manager:
                raise UsageError(
                    "another run or handler of this CheckpointManager is open: both would count and save its steps",
                    hint="Use that one, or close it first: leave its block, or call handler.close().",
                )
            if place == here and self._claims and other._claims:
                raise UsageError(
                    "another run or handler already handles notices in this thread: the first one to exit would "
                    "end the process, and the other one's state would not be saved",
                    hint="Put everything into one Checkpoint, or close the other one first (leave its block, or call "
                    'handler.close()), or turn off notices for one of them: preemption="off", or '
                    "TerminationConfig(sources=[]).",
                )

    @property
    def _claims(self) -> bool:
        """True if no other guard may handle notices in the same thread."""
        return self.inbox.listens and not self.yields

    def _is_outranked(self) -> bool:
        """Returns True if another guard handles the notices: then they are dropped here."""
        if not self.yields or not any(other._claims and _open.get(other) == _open.get(self) for other in list(_open)):
            return False
        self._forget(self.inbox.count)
        return True

    def _is_forked(self) -> bool:
        """Returns True in a forked child: this guard is its parent's."""
        return _open.get(self, _find_place())[0] != os.getpid()

    # The guard's own thread.

    def _serve(self) -> None:
        """The main function of the guard's own thread."""
        PULSE.dump_thread = threading.get_native_id()
        while not self._closed:
            self.inbox.listen(_LOOK_SECONDS if self._is_alert() else _CALM_SECONDS)
            if self._is_alert():
                self._attend()

    def _is_alert(self) -> bool:
        is_asked = self.inbox.alarmed or self.orders.pending is not None
        return is_asked or self._consensus.is_alarmed or self._consensus.failures.error is not None

    def _attend(self) -> None:
        """Does what is to be done while the training thread does not ask."""
        pause = self._pause
        if self.leaving:
            return
        if self._consensus.failures.error is not None:
            if not self._consensus.is_outcome_known:
                self._consensus.failures.escalate()
        elif pause is not None and not pause.changed:
            self._act_in_pause()
        elif self.state is not GuardState.SETTLING:
            if self._consensus.has_peers:
                self._consensus.ask(self._make_plan(is_paused=pause is not None))
            self._warn_if_late()

    def _act_in_pause(self) -> None:
        """Saves and exits instead of the training thread, if that is paused; it may not continue meanwhile."""
        with self._lock:
            pause = self._pause
            if pause is None or self._closed:
                return
            verdict = self._consensus.settle(pause.step or 0, self._make_plan(is_paused=True), is_paused=True)
            # A person who has pressed Ctrl-C waits for the loop, or presses it again.
            is_awaited = self.state is GuardState.SETTLING
            waits_for_loop = self._is_to_leave() and is_by_hand(self.inbox.pending) and not is_awaited
            if verdict.action is not Action.TRAIN and waits_for_loop:
                return
            if verdict.action in (Action.SAVE, Action.LEAVE):
                self._stop_in_pause(pause, verdict)
            elif (objection := verdict.objection) and self._is_to_leave():
                self._end_in_pause(lambda: self._leave_alone(pause.step, objection))

    def _stop_in_pause(self, pause: PausedState, verdict: Verdict) -> None:
        pause.renew(self.provisional)
        is_leaving = verdict.action is Action.LEAVE
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
            self._turn(Turning.LEAVE)
            self._end_in_pause(lambda: self._leave_at_stop(pause.step, verdict))
        self.provisional = self._consensus.end_round(self.provisional)

    def _end_in_pause(self, leave: Callable[[], None]) -> None:
        try:
            leave()
        except PeerError:
            self._consensus.failures.postpone()
        except BaseException as error:  # noqa: BLE001  The program ends by it, in whichever thread it was raised.
            end_by(error)

    def _warn_if_late(self) -> None:
        """Warns once that a step does not end: an incomplete step cannot be saved."""
        if text := self._progress.find_lateness(self.inbox.pending, self.inbox.demand().left_seconds):
            self._manager.emit(Warned(text=text, step=self._progress.step))


# The open guards of this process, and of those that it was forked from: the process and the thread of each.
_open: dict[Guard, tuple[int, int]] = {}


def _find_place() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()
