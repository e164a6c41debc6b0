"""Stands beside the training loop of one of several workers: all stop at one step, and fail together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from holdfast.cluster.peers import Failure, make_brief
from holdfast.errors import AbsentError, ClusterError, DeadlineError, HoldfastError, PeerError, SaveFailedError
from holdfast.events import Failed
from holdfast.preemption.consensus.abort import Rescue
from holdfast.preemption.consensus.coordinator import Accord, Turn, make_call
from holdfast.preemption.consensus.patience import Patience
from holdfast.preemption.consensus.peer_failures import describe, find_loss, is_cause, is_of_save
from holdfast.preemption.consensus.records import Outcome
from holdfast.preemption.consensus.stop_step import Wanted
from holdfast.preemption.final_save import ATTEMPTS, Saves, end_by
from holdfast.preemption.grace import Action, Outlook, allow_for_others, decide, to_spare
from holdfast.preemption.guard import Guard, end_at_of
from holdfast.preemption.pause import Rest
from holdfast.preemption.termination import TerminationConfig
from holdfast.save.company import Company
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark
from holdfast.save.say import say

_LOOK_SECONDS: Final = 0.25

_ANSWER_SECONDS: Final = 3.0
"""How long to wait for the store of the job to say whether a save can still be ended."""

_OWN_FAILURE_SECONDS: Final = 2.0
"""How long to wait for this worker's own failure, when another has heard of the same one first."""


class JointGuard(Guard):
    """A guard that does nothing by itself, but together with those of all other workers."""

    def __init__(
        self,
        manager: Saves,
        company: Company,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
    ) -> None:
        """Takes note of what to guard; `open` begins.

        Args:
            manager: As for `Guard`, as are the others.
            company: The other workers.
            config: As there.
            keep: As there.
        """
        super().__init__(manager, config, keep)
        self._peers = company.peers
        self._accord = Accord(company.peers, self.hearing.hear, self.hearing.ring)
        self._mishaps = self._accord.mishaps
        self._herald = self._accord.herald
        self._rescue = Rescue(self._mishaps)
        self._is_told = self._is_over = False
        # Whether an error of a worker is in the log. Guarded by nothing: at worst it is there twice.
        self._is_logged = False
        self._patience = Patience(company.peers, self._herald, manager.emit)
        # Whether all are about to leave together, and it is not known yet what comes of it.
        self._is_leaving_together = False
        # What the training thread had begun before it rested, and at which step nothing could be lost.
        self._begun_before = self._safe_step = 0
        # Whether the training thread cannot go on before something is done in its stead.
        self._is_awaited = False

    def open(self) -> None:
        """See `Guard`."""
        self._is_told = True  # Until the herald speaks, none of the others can be told of an error.
        super().open()
        self._is_told = False
        self._peers.may_wait_seconds = lambda: None if self._closed else to_spare(self.hearing.demand()[1])
        self._rescue.open()
        self._herald.open()

    def close(self) -> None:
        """See `Guard`."""
        if os.getpid() != self._process:
            return
        super().close()
        self._rescue.close()
        self._herald.close()

    def begin_steps(self) -> SaveHandle | None:
        """See `Guard`; waits if all may be about to stop at a step that lies before the one that goes on here."""
        self.hearing.patient = True
        if self._rest is None:
            return None
        while True:
            changed = self._herald.changed
            with self._lock:
                rest = self._rest
                assert rest is not None, "this thread alone ends it"
                step = max(self._begun_before, rest.step or 0)
                if self._mishaps.error is not None or rest.is_refused or self._accord.try_begin(step):
                    self._rest, self._is_awaited = None, False
                    return rest.saved
                self._is_awaited = True
            changed.wait(_LOOK_SECONDS)

    def rest(self, step: int | None, *, mark: Mark | None = None, saved: SaveHandle | None = None) -> None:
        """See `Guard`."""
        if self._rest is None:
            self._begun_before = self._accord.begun
        if mark is None and saved is None:
            self._safe_step = step or 0
        self._accord.begun = step or 0
        self._mishaps.certain = max(self._mishaps.certain, step or 0)
        self._mishaps.step = step or 0
        super().rest(step, mark=mark, saved=saved)
        if self._accord.is_alarmed:
            self.hearing.ring()

    def pass_boundary(self, step: int, *arguments: Any, **options: Any) -> None:
        """See `Guard`.

        Raises:
            SystemExit: When it leaves.
            PeerError: If another worker has failed.
            ClusterError: If the others cannot be reached, and it has to be agreed on a step to save at.
        """
        self._measure(step)
        accord, mishaps = self._accord, self._mishaps
        mishaps.step = step
        is_asked = self.hearing.alarmed
        if not is_asked:
            # In this order: what is pledged for this worker is never less than what it has begun.
            accord.begun = step + 1
        mishaps.certain = step if self.is_tentative else step + 1
        if is_asked or accord.is_alarmed or mishaps.error is not None:
            mishaps.certain = step
            self._meet(step, arguments, options)
            mishaps.certain = step if self.is_tentative else step + 1
            self._passed_at = time.monotonic()

    def pass_last(self, step: int, *, is_over: bool = False) -> None:
        """See `Guard`.

        Raises:
            SystemExit: When it leaves.
            PeerError: If another worker has failed, or its training has ended at another step.
            ClusterError: As `pass_boundary`.
        """
        self._measure(step)
        self._ends, self._accord.begun, self._mishaps.certain = is_over, step, step
        self._mishaps.step = step
        self._meet(step, (), {}, ends=True, is_over=is_over)
        if is_over:
            self._is_over = True
            error = self._mishaps.finish(step, self._herald)
            if error is not None:
                raise error

    def pass_end(self, step: int) -> None:
        """See `Guard`. **Blocks** for a moment."""
        call = self._accord.find_call()
        if call is not None and call.wanted == Wanted.LEAVE:
            self.leaving = True
            self._leave(step, call.reason, "", 0.0, by_hand=call.by_hand)

    def fail(self, error: BaseException) -> HoldfastError | None:
        """See `Guard`. **Blocks** for a moment: others are told, or have told. Leaves if one did with nothing saved."""
        has_left = self.leaving or (self._post is not None and self._post.duty.has_left)
        if self._is_told or has_left or os.getpid() != self._process:
            return None
        self._is_told = True
        cause = self._mishaps.tell(error, self._herald)
        self._log_failure(self._mishaps.failure, cause or error)
        blamed = error if isinstance(error, ClusterError) else cause
        loss = find_loss(blamed or error)
        if loss and self._is_to_leave():
            self._note_missing(blamed)
            self._leave_alone(self._passed_step, loss)
        return None if blamed is error else cause

    def should_stop(self) -> bool:
        """See `Guard`."""
        call, stop = self._accord.call, self._accord.stop
        if call is None or stop is None or call.wanted != Wanted.LEAVE:
            return self._mishaps.error is not None
        return self._accord.begun >= stop.step

    def _meet(
        self,
        step: int,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        *,
        ends: bool = False,
        is_over: bool = False,
    ) -> None:
        """Between two steps: does together with the others what is to be done."""
        while True:
            changed = self._herald.changed
            self._raise_error(step)
            holds = self._wish()
            turn = self._accord.arrive(step, holds=holds, ends=ends, is_over=is_over)
            objection = self._patience.find_objection(turn, self.hearing.demand()[1])
            if turn is Turn.GO:
                return
            if turn is Turn.STOP:
                self._stop(step, arguments, options)
                continue
            if objection:
                if not self._is_to_leave():
                    raise ClusterError(objection, hint="Start the job again: it goes on from the newest checkpoint.")
                self._leave_alone(step, objection)
                return
            changed.wait(_LOOK_SECONDS)

    def _raise_error(self, step: int) -> None:
        error = self._mishaps.error
        if error is None:
            return
        self._mishaps.is_raised = True
        self._log_failure(self._mishaps.failure, error)
        self._rescue.count_raise()
        if self._is_to_leave() and not is_cause(error):
            self._note_missing(error)
            self._leave_alone(step, error.message)
        if is_of_save(error):
            # It has failed here too, and comes by itself.
            with suppress(DeadlineError):
                self._manager.wait(_OWN_FAILURE_SECONDS)
        raise error

    def _log_failure(self, failure: Failure | None, error: BaseException) -> None:
        """Logs once, in one line, what has ended training on which worker.

        Args:
            failure: That of another worker, if one has told of it.
            error: What has ended training here.
        """
        if self._is_logged:
            return
        self._is_logged = True
        if failure is None:
            failure = describe(error, self._peers)
        text = " ".join(self._peers.make_error(failure).message.split())
        step = self._mishaps.step if failure.step is None else failure.step
        self._manager.emit(Failed(stage="training", error=text, step=step, rank=failure.rank, path=self._manager.url))

    def _wish(self, *, is_resting: bool = False) -> bool:
        """Calls for what the notices of this worker ask for; whether they ask for anything now."""
        if not self.hearing.alarmed:
            return False
        pending = self.hearing.pending
        outlook = self._outlook(is_resting=is_resting)
        verdict = self._decide(outlook)
        if not pending or verdict.action is Action.TRAIN or (verdict.action is Action.SAVE and self._herald.trouble):
            return False
        by_hand = self.hearing.is_by_hand()
        self._accord.wish(make_call(self._peers.rank, outlook, verdict, pending[0].notice.text, by_hand=by_hand))
        return True

    def _outlook(self, *, is_resting: bool = False) -> Outlook:
        outlook = super()._outlook(is_resting=is_resting)
        return outlook if is_resting else allow_for_others(outlook)

    def _is_to_leave(self) -> bool:
        """Whether it is known that this worker is to leave."""
        call = self._accord.call
        if call is not None and call.wanted == Wanted.LEAVE:
            return True
        return self.hearing.alarmed and decide(self._outlook()).action is Action.LEAVE

    def _stop(self, step: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """At the stop step."""
        call = self._accord.call
        if call is not None and call.wanted == Wanted.SAVE:
            count = self.hearing.count
            self._save_and_go_on(step, self._outlook().demand, count, arguments, options)
        else:
            self._leave_together(step, lambda end_at: self._departure.save_last(step, end_at, arguments, options))
        self.provisional = self._accord.end_round()

    def _leave_together(self, step: int | None, save: Callable[[float | None], str]) -> None:
        """Saves, and leaves when all have; returns if `exit_fn` does.

        Args:
            step: How many steps are complete.
            save: Saves them, and says what went wrong.
        """
        begun_at = time.monotonic()
        call, stop = self._accord.call, self._accord.stop
        assert call is not None and stop is not None, "all leave at a stop step"  # noqa: PT018
        outlook = self._outlook()
        end_at = end_at_of(outlook)
        self.leaving = self._is_leaving_together = True
        try:
            if stop.absent:
                self._raise_cause()
                losses = [self._peers.make_error(self._peers.describe_loss(rank)) for rank in stop.absent]
                self._note_missing(losses[0])
                return self._leave_alone(step, "; ".join(loss.message for loss in losses))
            error = ""
            if step is not None and step > stop.step:
                # If nothing could be lost, it is a first step of which nobody knew that it had begun.
                is_first, step = step == self._safe_step + 1 == stop.step + 1, stop.step
                error = "" if is_first else f"the loop had gone on when step {step} was to be saved"
            elif call.saves or self._early is None:
                error = save(end_at)
            else:
                error = self._wait_for(self._early, outlook)
                step = self._early_step if self._early_step is not None else step
            met, error = error, self._wait_decided(step, error)
            if error:
                self._raise_cause()
            changed = "" if self._rest is None else self._rest.changed
            cause = self._departure.mistake or (changed and f"ChangedError: {changed}")
            outcome = Outcome(
                make_brief(self._mishaps.name(cause) or error),
                self.hearing.is_by_hand(),
                is_proof=not error and self._save_fn is None,
                is_cause=bool(cause),
            )
            # The others may be in a save of theirs that this worker takes no part in.
            told = self._manager.abandon if error and (changed or self._save_fn) else None
            together = self._accord.conclude(outcome, end_at, told)
        except BaseException:
            # The error of another worker ends this one, as it would in a step, and its own one the others.
            self.leaving = False
            self._manager.abandon()
            raise
        finally:
            self._is_leaving_together = False
        # What failed here says more than what the others have seen of it, unless it comes of what has failed there.
        is_theirs = not error or (together.is_cause and not outcome.is_cause)
        shown = together.error and (together.error if is_theirs else error)
        self._leave(step, call.reason, shown, time.monotonic() - begun_at, by_hand=together.by_hand, met=met)

    def _wait_decided(self, step: int | None, error: str) -> str:
        """**Blocks.** What is left of an error in saving a step once it is certain whether that is committed.

        A save that is late is ended on all workers. If they have agreed to commit it, that is waited for: one that
        left before would say that the step is lost, and another one that it is saved.

        Args:
            step: The step; None if there is none.
            error: What went wrong; empty if nothing did.
        """
        saves = self._find_saves()
        for saved in saves if error else ():
            end = saved.try_end_jointly
            if saved.step != step or saved.failed or saved.committed or end is None:
                continue
            if self._try_end(end, DeadlineError(f"the time that was left to the job was over: {error}")):
                continue
            give_up_at = time.monotonic() + self._manager.timeout_seconds
            say(f"holdfast: step {step} is not saved yet: {error}. Its save goes on, and is waited for.")
            while time.monotonic() < give_up_at and self._departure.check_landed(step, error, saves):
                try:
                    saved.wait_committed(_LOOK_SECONDS)
                except DeadlineError:
                    continue
                except HoldfastError as failure:
                    error = failure.message
                    break
        return self._departure.check_landed(step, error, saves)

    def _try_end(self, end: Callable[[HoldfastError], bool], late: HoldfastError) -> bool:
        """**Blocks** for a moment. Ends a save on all workers, unless they have agreed to commit it."""
        ended: list[bool] = []
        self._herald.send(lambda: ended.append(end(late)))
        self._herald.wait(lambda: bool(ended), time.monotonic() + _ANSWER_SECONDS)
        return not ended or ended[0]

    def _note_missing(self, error: ClusterError | None) -> None:
        """Has the exit say which worker is dead, if it is that, rather than that a step could not be saved."""
        # Another worker may have told of it before this one could see it.
        is_lost = isinstance(error, PeerError) and error.kind == AbsentError.__name__ and error.text.startswith("has ")
        self._departure.missing = error.message if is_lost and error is not None else ""

    def _raise_cause(self) -> None:
        """Nothing can be saved together any more: raises the error of another worker from which that comes, if any."""
        cause = self._mishaps.find_cause(self._herald)
        if cause is not None:
            self._mishaps.is_raised = True
            raise cause

    def _leave_alone(self, step: int | None, error: str) -> None:
        """Leaves without a save, since the others cannot take part in one."""
        self.leaving = True
        self._leave(step, "", self._departure.check_landed(step, error, self._find_saves()), 0.0, met=error)

    def _leave(
        self,
        step: int | None,
        reason: str,
        error: str,
        blocked_seconds: float,
        *,
        by_hand: bool | None = None,
        met: str = "",
    ) -> None:
        """See `Guard`.

        Args:
            step: As there, as are those that follow.
            reason: As there.
            error: As there.
            blocked_seconds: As there.
            by_hand: As there.
            met: What went wrong here, even if the step is saved: then nobody waits for the others any more.
        """
        if error or (met and not self._has_exit_fn):
            # It is told, and nobody waits for the others any more.
            self._manager.abandon()
        left_seconds = self.hearing.demand()[1]
        try:
            self._depart(step, reason, error, blocked_seconds, by_hand=by_hand)
        except BaseException as failure:
            is_unheard = self._accord.verdict is None or self._accord.is_cut_short
            if error and is_unheard and self._mishaps.error is None:
                # One that does not come to the end of its step would never hear of it.
                self._mishaps.tell(SaveFailedError(error, step=step or 0), self._herald, left_seconds)
            elif not error and self._has_exit_fn:
                # On the others `exit_fn` may return, and they train on.
                self._mishaps.tell(failure, self._herald)
            raise

    # Beside the training thread.

    def wait_saved(self) -> None:
        """See `Guard`.

        Raises:
            PeerError: If training has failed on a worker, also if that is this one, which left its loop before others.
        """
        super().wait_saved()
        if self._mishaps.error is not None:
            self._mishaps.is_raised = True
            self._manager.abandon()  # The others come to that save no more.
            raise self._mishaps.error

    def _is_alert(self) -> bool:
        return self.hearing.alarmed or self._accord.is_alarmed or self._mishaps.error is not None

    def _attend(self) -> None:
        if not self._is_alert() or (self.leaving and not (self._is_leaving_together and self._accord.verdict is None)):
            return
        if self._mishaps.error is not None:
            self._log_failure(self._mishaps.failure, self._mishaps.error)
            if not self._mishaps.is_raised:
                self._rescue.press()
            return
        if not self.leaving:
            if self._post is not None and self._post.is_on_duty:
                self._wish(is_resting=self._rest is not None)
            self._act_behind()
            self._tell_if_late()

    def _act_behind(self) -> None:
        with self._lock:
            rest = self._rest
            if rest is None or rest.is_refused or self._closed:
                return
            holds = self._wish(is_resting=True)
            if self._is_over:
                # The others hear of it, and this worker leaves with them when all is saved.
                turn = Turn.WAIT if holds else Turn.GO
            else:
                turn = self._accord.arrive(rest.step or 0, holds=holds, ends=True)
            # A person who has pressed Ctrl-C waits for the loop, or presses it again.
            if turn is not Turn.GO and self._is_to_leave() and self.hearing.is_by_hand() and not self._is_awaited:
                return
            is_behind = not self._is_over and self._accord.is_ahead(rest.step or 0)
            objection = self._patience.find_objection(turn, self.hearing.demand()[1], is_behind=is_behind)
            if turn is Turn.STOP:
                self._stop_behind(rest)
            elif objection and self._is_to_leave():
                self._end_behind(lambda: self._leave_alone(rest.step, objection))

    def _stop_behind(self, rest: Rest) -> None:
        call, stop = self._accord.call, self._accord.stop
        if call is None or stop is None:
            return
        rest.renew(self.provisional)
        if call.wanted == Wanted.SAVE:
            if rest.find_change():
                self._tell_changed(rest)
                return
            count = self.hearing.count
            rest.save()
            self._note_early(rest.step, self._outlook(is_resting=True).demand, rest.saved, count)
        else:
            save = partial(rest.save_surely, ATTEMPTS, self._departure.wait_committed)
            self._end_behind(lambda: self._leave_together(rest.step, save))
        self.provisional = self._accord.end_round()

    def _end_behind(self, leave: Callable[[], None]) -> None:
        try:
            leave()
        except PeerError:
            self._mishaps.is_raised = False  # It is still to be raised in the training thread.
        except BaseException as error:  # noqa: BLE001  The program ends by it, in which thread soever it was raised.
            end_by(error)
