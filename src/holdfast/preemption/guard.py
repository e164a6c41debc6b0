"""Stands beside one training loop, and lets it save and leave in time when a notice has come."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import DeadlineError, HoldfastError
from holdfast.events import Warned
from holdfast.gate import Gate
from holdfast.preemption.background import start_thread
from holdfast.preemption.final_save import Departure, Saves, end_by
from holdfast.preemption.grace import MARGIN_SECONDS, Action, Outlook, Verdict, decide, find_lateness, has_time_to_save
from holdfast.preemption.notice_inbox import Hearing
from holdfast.preemption.ownership import Post, take_post
from holdfast.preemption.pause import Rest
from holdfast.preemption.sources.protocol import Demand
from holdfast.preemption.termination import TerminationConfig
from holdfast.save.exit import is_interactive
from holdfast.save.handle import SILENT_SECONDS, SaveHandle, describe_limit, find_limit
from holdfast.save.mark import Mark
from holdfast.save.say import say

_RECENT_STEPS: Final = 16
_CALM_SECONDS: Final = 3600.0
_ALERT_SECONDS: Final = 0.25
_END_SECONDS: Final = 60.0


class Guard:
    """Hears notices for one loop.

    The training thread says between two steps how far it is (`pass_boundary`), and saves and leaves there. While it
    rests (`rest`), in evaluation or after the loop, the guard's own thread does so in its stead.

    Attributes:
        hearing: What was heard.
        leaving: Whether the exit has begun.
        is_tentative: Whether nobody can know between two steps that another one comes: the loop is the user's own.
        provisional: The step of which a save was made in a pause, and may not hold all of it; None if there is none.
        in_block: Whether the training thread is in a block of `checkpointable`.
        is_beside_training: Whether it was opened while another guard's loop took steps with the same manager.
        yields: Whether it leaves what is heard to the guard of another manager in the same thread, if there is one.
    """

    yields = False

    def __init__(self, manager: Saves, config: TerminationConfig, keep: Callable[[int], SaveHandle | None]) -> None:
        """Takes note of what to guard; `open` begins.

        Args:
            manager: The manager that saves.
            config: What the user wants.
            keep: Begins the save of a step, unless that is saved already or under way, and gives it; None if there
                is nothing that could be lost.
        """
        self.hearing = Hearing(config, manager.emit)
        self.leaving = self.is_tentative = False
        self.provisional: int | None = None
        self._manager = manager
        self._save_fn = config.save_fn
        self._has_exit_fn = config.exit_fn is not None
        self._keep = keep
        self._departure = Departure(manager, config, keep, self.hearing.tell, self.hearing.note_leaving)
        self._process = os.getpid()
        # The save that was begun after a notice, in the grace period.
        self._early: SaveHandle | None = None
        self._early_demand: Demand | None = None
        self._early_step: int | None = None
        self._early_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._passed_at: float | None = None
        self._passed_step = 0
        self._is_late_told = False
        self._ends = False
        # Guards what the training thread rests in, so that it does not go on while that is being saved.
        self._lock = threading.Lock()
        self._rest: Rest | None = None
        self._closed = False
        self._ended: Gate | None = None
        self._post: Post | None = None
        self.is_beside_training = self.in_block = False

    def open(self) -> None:
        """Begins to listen; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here, or the loop of another manager is guarded in this thread.
        """
        try:
            self._post = take_post(
                self._manager,
                listens=self.hearing.listens and not self.yields,
                rests=lambda: self._rest is not None,
                relieve=self._relieve,
                forget=lambda: self._forget(self.hearing.count),
            )
            self._lock = self._post.duty.lock
            with self._lock:
                self.is_beside_training = self._post.is_beside_training
                if self._rest is not None:
                    self._post.go_on_duty()
            self._ended = start_thread(self._serve, "holdfast-guard")
            self.hearing.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """**Blocks** for a moment. Ends listening, and puts signal handlers back; harmless twice."""
        if os.getpid() != self._process or self._closed:
            return
        with self._lock:
            self._closed = True
        if self._post is not None:
            self._post.leave()
        self.hearing.close()
        if self._ended is None or self._ended.wait(_END_SECONDS):
            self.hearing.dispose()

    @property
    def is_resting(self) -> bool:
        """Whether the training thread rests, and its state may be saved behind its back."""
        return self._rest is not None and self._rest.mark is not None

    def begin_steps(self) -> SaveHandle | None:
        """The training thread goes on to take steps.

        Returns:
            The save that was made while it rested; None if none was.
        """
        self.hearing.patient = True
        if self._rest is None:
            return None
        with self._lock:
            rest, self._rest = self._rest, None
        if rest.has_saved:
            self.provisional = rest.step
        return rest.saved

    def rest(self, step: int | None, *, mark: Mark | None = None, saved: SaveHandle | None = None) -> None:
        """The training thread takes no steps for a while, and leaves alone what it keeps.

        Args:
            step: How many steps are complete; None before that is known.
            mark: Their state; None if it is saved, or nothing was trained.
            saved: The save of that step, if one is under way or done.
        """
        with self._lock:
            self._rest = Rest(step, mark, saved, is_anew=saved is not None and step == self.provisional)
            if self._post is not None:
                self._post.go_on_duty()
        if self.hearing.alarmed:
            self.hearing.ring()

    def pass_boundary(self, step: int, *arguments: Any, **options: Any) -> None:
        """The training thread is between two steps: saves and leaves if it is time to.

        Args:
            step: How many steps are complete.
            arguments: For `save_fn`.
            options: For `save_fn`.

        Raises:
            SystemExit: When it leaves.
        """
        self._measure(step)
        if self.hearing.alarmed and not self._is_outranked():
            self._settle(step, arguments, options)
            # What saving took is no step's.
            self._passed_at = time.monotonic()

    def pass_last(self, step: int, *, is_over: bool = False) -> None:
        """The training thread takes no further step for now: as `pass_boundary`.

        Args:
            step: How many steps are complete.
            is_over: Whether it never will.

        Raises:
            SystemExit: When it leaves.
        """
        self._ends = is_over
        self.pass_boundary(step)

    def wait_saved(self) -> None:
        """**Blocks** until no save is in flight, or there is something to act on.

        Raises:
            SaveFailedError: If a save has failed, and nobody has been told yet.
            DeadlineError: If it does not end in time.
        """
        limit_seconds = find_limit(self._manager.timeout_seconds, self._manager.worker)
        begun_at = time.monotonic()
        end_at, is_told = begun_at + limit_seconds, False
        while not self._is_alert():
            if not is_told and time.monotonic() >= begun_at + SILENT_SECONDS:
                is_told = True
                limit = describe_limit(end_at - time.monotonic())
                say(f"holdfast: training is done, and the last save is being written{limit}; Ctrl-C twice ends it.")
            if time.monotonic() >= end_at:
                hint = "It goes on. Look whether the storage still answers."
                raise DeadlineError(f"the save in flight did not end within {limit_seconds:g} s", hint=hint)
            with suppress(DeadlineError):
                return self._manager.wait(_ALERT_SECONDS)

    def pass_end(self, step: int) -> None:
        """The last step is committed, and the loop is about to be left for good.

        Args:
            step: How many steps are complete.

        Raises:
            SystemExit: If this worker, or another one, was asked to leave before it had come so far.
        """
        if self.hearing.alarmed:
            self._settle(step, (), {})

    def fail(self, error: BaseException) -> HoldfastError | None:
        """Training is ended by an error.

        Returns:
            An error to be raised in its stead: that of another worker of which this one comes.
        """
        return None

    def should_stop(self) -> bool:
        """Whether the loop would leave if a step ended now."""
        return self.hearing.alarmed and decide(self._outlook()).action is Action.LEAVE

    def _is_outranked(self) -> bool:
        """Whether another guard deals with what was heard: then it is forgotten here."""
        if not self.yields or self._post is None or not self._post.is_outranked:
            return False
        self._forget(self.hearing.count)
        return True

    def _relieve(self) -> None:
        self._rest = None

    def _measure(self, step: int) -> None:
        if self._post is not None and not self._post.is_on_duty:
            with self._lock:
                self._post.go_on_duty()
        now = time.monotonic()
        if self._passed_at is not None and step > self._passed_step:
            self._step_seconds.append((now - self._passed_at) / (step - self._passed_step))
        self._passed_at, self._passed_step = now, step

    def _settle(self, step: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        count = self.hearing.count
        outlook = self._outlook()
        verdict = self._decide(outlook)
        if verdict.action is Action.SAVE:
            self._save_and_go_on(step, outlook.demand, count, arguments, options)
        elif verdict.action is Action.LEAVE:
            begun_at = time.monotonic()
            self.leaving = True
            if outlook.saving_seconds is not None and outlook.left_seconds is not None and self._early is not None:
                # How long that one takes says whether there is time for another.
                self._wait_for(self._early, outlook)
                outlook = self._outlook()
            if has_time_to_save(outlook) or self._early is None:
                error = self._departure.save_last(step, end_at_of(outlook), arguments, options)
            else:
                error = self._wait_for(self._early, outlook)
                step = self._early_step if self._early_step is not None else step
            self._leave(step, verdict.reason, error, time.monotonic() - begun_at)

    def _decide(self, outlook: Outlook) -> Verdict:
        verdict = decide(outlook)
        if self._ends and outlook.demand is not Demand.SAVE and verdict.action is not Action.LEAVE:
            # Whoever trains on in the time that is left has to hear of it again, and nobody would tell.
            return Verdict(Action.LEAVE, "no step is left")
        return verdict

    def _save_and_go_on(
        self, step: int, demand: Demand, count: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        saved = self._departure.save_early(step, arguments, options)
        # One that was left out, since another is in flight, is tried again after the next step.
        if saved is None or not saved.skipped:
            self._note_early(step, demand, saved, count)

    def _note_early(self, step: int | None, demand: Demand, saved: SaveHandle | None, count: int) -> None:
        if demand is Demand.SAVE:
            # What was heard meanwhile may ask for more.
            self._forget(count)
            return
        self._early_step, self._early_demand, self._early = step, demand, saved
        self._early_at = time.monotonic()

    def _leave(
        self, step: int | None, reason: str, error: str, blocked_seconds: float, *, by_hand: bool | None = None
    ) -> None:
        """Leaves; if the user's `exit_fn` returns, training goes on, and a later notice works again."""
        limit_seconds = self._manager.timeout_seconds - blocked_seconds
        error = self._departure.wait_landed(step, error, self._find_saves(), limit_seconds)
        self._depart(step, reason, error, blocked_seconds, by_hand=by_hand)

    def _find_saves(self) -> list[SaveHandle]:
        """Those that may be of the last step."""
        saves = (*self._departure.tried, self._early, None if self._rest is None else self._rest.saved)
        return [saved for saved in saves if saved is not None]

    def _depart(
        self, step: int | None, reason: str, error: str, blocked_seconds: float, *, by_hand: bool | None = None
    ) -> None:
        by_hand = self.hearing.is_by_hand() if by_hand is None else by_hand
        advice, count = self.hearing.advice, self.hearing.count
        left_seconds = self.hearing.demand()[1]
        # The cell or the prompt gets an interrupt, and the process goes on. In another thread no code would catch that.
        interrupts = by_hand and is_interactive() and threading.current_thread() is threading.main_thread()
        if not interrupts and (error or not self._has_exit_fn):
            self.hearing.take_no_more()
        try:
            self._departure.leave(
                step,
                reason,
                error,
                by_hand=by_hand,
                blocked_seconds=blocked_seconds,
                advice=advice,
                gone_at=None if left_seconds is None else time.monotonic() + left_seconds,
                interrupts=interrupts,
            )
        except BaseException as leaving:
            if isinstance(leaving, SystemExit):
                self.hearing.take_no_more()
            if self._post is not None and (interrupts or isinstance(leaving, SystemExit)):
                self._post.duty.has_left = True
            raise
        self.leaving = False
        self._forget(count)
        if self._post is not None:
            self._post.settle_all()

    def _forget(self, count: int) -> None:
        self._early = self._early_demand = None
        self._is_late_told = False
        self.hearing.forget(count)

    def _outlook(self, *, is_resting: bool = False) -> Outlook:
        demand, left_seconds = self.hearing.demand()
        early = self._early
        is_under_way = early is not None and not early.ended
        return Outlook(
            demand=demand,
            left_seconds=left_seconds,
            step_seconds=0.0 if is_resting else max(self._step_seconds, default=None),
            save_seconds=self._manager.save_seconds,
            saving_seconds=time.monotonic() - self._early_at if is_under_way else None,
            is_saved=self._early_demand is not None and self._early_demand >= demand,
            has_failed=early is not None and early.failed,
        )

    def _wait_for(self, saved: SaveHandle, outlook: Outlook) -> str:
        try:
            self._departure.wait_committed(saved, end_at_of(outlook))
        except HoldfastError as failure:
            return failure.message
        return ""

    def _serve(self) -> None:
        """What the guard's own thread does."""
        while not self._is_closed():
            self.hearing.listen(_ALERT_SECONDS if self._is_alert() else _CALM_SECONDS)
            self._attend()

    def _is_alert(self) -> bool:
        return self.hearing.alarmed

    def _attend(self) -> None:
        """Does what is to be done beside the training thread."""
        if self.hearing.alarmed and not self.leaving:
            self._act_behind()
            self._tell_if_late()

    def _is_closed(self) -> bool:
        return self._closed

    def _act_behind(self) -> None:
        """Saves and leaves in the training thread's stead, if that rests; it may not go on meanwhile."""
        with self._lock:
            rest = self._rest
            if rest is None or rest.is_refused or self._closed or self._is_outranked():
                return
            count = self.hearing.count
            outlook = self._outlook(is_resting=True)
            verdict = decide(outlook)
            # A person who has pressed Ctrl-C waits for the loop, or presses it again.
            if verdict.action is Action.TRAIN or (verdict.action is Action.LEAVE and self.hearing.is_by_hand()):
                return
            begun_at = time.monotonic()
            error = rest.save()
            if rest.changed:
                self._tell_changed(rest)
            elif verdict.action is Action.SAVE:
                # What comes after a rest in which there was nothing to be saved is saved when it is there.
                if rest.mark is not None or outlook.demand is Demand.SAVE:
                    self._note_early(rest.step, outlook.demand, rest.saved, count)
            else:
                self.leaving = True
                if not error and rest.saved is not None:
                    error = self._wait_for(rest.saved, outlook)
                try:
                    self._leave(rest.step, verdict.reason, error, time.monotonic() - begun_at)
                except BaseException as error:  # noqa: BLE001  The program ends by it, in which thread soever.
                    end_by(error)

    def _tell_changed(self, rest: Rest) -> None:
        text = f"the state cannot be saved while the loop rests, and it is waited for: {rest.changed}"
        self._manager.emit(Warned(text=text, step=rest.step))

    def _tell_if_late(self) -> None:
        """Says once that a step does not end: what it is doing cannot be saved."""
        is_at_rest = self._rest is not None and not self._rest.is_refused
        if self._is_late_told or is_at_rest or self._post is None or not self._post.is_on_duty:
            return
        left_seconds = self.hearing.demand()[1]
        if text := find_lateness(self.hearing.pending, left_seconds, self._passed_at or 0.0, time.monotonic()):
            self._is_late_told = True
            self._manager.emit(Warned(text=text, step=self._passed_step))


def end_at_of(outlook: Outlook) -> float | None:
    """When the last save has to be done, by the monotonic clock."""
    left = outlook.left_seconds
    return None if left is None else time.monotonic() + left - MARGIN_SECONDS / 2
