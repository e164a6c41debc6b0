"""The last save of a job that was asked to stop, and its exit."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from holdfast.deadlines import LEAST_SECONDS
from holdfast.errors import DeadlineError, HoldfastError, PeerError, SaveFailedError
from holdfast.events import Event, Leaving, Warned
from holdfast.format.records import Worker
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.single import SaveOutcome, SingleConsensus
from holdfast.preemption.decide import Verdict
from holdfast.preemption.grace import Outlook, has_time_to_save, is_by_hand
from holdfast.preemption.inbox import NoticeInbox
from holdfast.preemption.progress import ATTEMPTS, LoopProgress, PausedState, end_at_of
from holdfast.process.exit import (
    EXIT_INTERRUPTED,
    EXIT_SAVE_FAILED,
    LeavingExit,
    end_process,
    is_interactive,
    leave_with_thread,
)
from holdfast.process.terminal import keep_exit_code, say
from holdfast.save.handle import SILENT_SECONDS, SaveHandle, describe_limit, find_wait_seconds
from holdfast.save.mark import Mark

if TYPE_CHECKING:
    from holdfast.preemption.consensus.coordinator import StopCoordinator
    from holdfast.save.joint.participant import JointParticipant
    from holdfast.save.lineage import Lineage

_LOOK_SECONDS: Final = 0.25
_UNKNOWN_SECONDS: Final = 10.0
"""So long the last save is copied to farther tiers where the grace period is not known: 30 s are usual."""


class Saves(Protocol):
    """The part of a manager that this package needs."""

    participant: JointParticipant | None

    @property
    def worker(self) -> Worker:
        """This worker's rank among all."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """The deadline of every wait that sets none of its own."""
        ...

    @property
    def url(self) -> str:
        """The URL of the run."""
        ...

    @property
    def emit(self) -> Callable[[Event], object]:
        """Emits an event, from any thread."""
        ...

    @property
    def save_seconds(self) -> float | None:
        """How long the newest committed save took until it was durable."""
        ...

    def describe_cost(self) -> str:
        """Describes what saving has cost; empty if nothing was saved."""
        ...

    def mark(self) -> Mark:
        """Notes the current state, to be saved later."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until no save is in progress, and raises failures that were not raised yet."""
        ...

    def latest_step(self) -> int | None:
        """Returns the newest committed step."""
        ...

    def abandon(self) -> None:
        """Closes without waiting."""
        ...


class SavesRun(Saves, Protocol):
    """The same of a manager of a run, whose job can be asked for something."""

    lineage: Lineage


class FinalSave:
    """Saves and exits. It belongs to the thread that does so, one at a time.

    Attributes:
        mistake: The error of the user's own code in the last attempt of the last save; empty if there was none.
        missing: Who has died, so that nothing can be saved any more; empty if that is not the reason.
        arguments: Positional arguments of `save_fn`.
        options: Keyword arguments of `save_fn`.
        tried: All attempts of the last save.
        name: The name of a step for people.
        nothing: The message if nothing is saved and there was no error.
    """

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        inbox: NoticeInbox,
        consensus: SingleConsensus | StopCoordinator,
        progress: LoopProgress,
        look: Callable[[], Outlook],
    ) -> None:
        """Stores its arguments: those of the guard, and what that knows; `look` returns the outlook now."""
        self.mistake = self.missing = ""
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.tried: list[SaveHandle] = []
        self.name: Callable[[int], str] = "step {}".format
        self.nothing = "no progress is lost: nothing was completed"
        self._manager = manager
        self._config = config
        self._keep = keep
        self._inbox = inbox
        self._consensus = consensus
        self._progress = progress
        self._look = look
        # The last announcement: the step that is saved, the exit code, and the problem, if any.
        self._end: tuple[int | None, int, str] | None = None

    def save_early(self, step: int) -> SaveHandle | None:
        """Saves that many complete steps, to train on. A failure is reported, and does not end training.

        Returns the save, if it has not failed and can be waited for.
        """
        participant, save_fn = self._manager.participant, self._config.save_fn
        come_to = 0 if participant is None else participant.saves
        try:
            saved = self._keep(step) if save_fn is None else save_fn(*self.arguments, **self.options)
        except PeerError:
            raise  # As below.
        except (Exception, SystemExit) as error:  # noqa: BLE001  It may be the user's function that raises.
            text = f"the save after a notice failed: {type(error).__name__}: {error}"
            self._manager.emit(Warned(text=text, step=step))
            if participant is not None and participant.saves == come_to:
                # What the others save waits for a part of this worker, and has to end before their next one.
                participant.report_failure(participant.begin(step), error)
            return None
        return saved if isinstance(saved, SaveHandle) else None

    def save_together(
        self, step: int | None, verdict: Verdict, pause: PausedState | None
    ) -> tuple[int | None, str, SaveOutcome | None]:
        """**Blocks.** Saves the step at which all stop, and shares the result with all workers.

        Args:
            step: How many steps are complete here; None if that is not known.
            verdict: What all do.
            pause: The state of the training thread, if that is paused.

        Returns:
            The step that is saved, or should have been; the error here; and the result on all workers, or None if a
            worker is dead, so that nothing can be saved together.

        Raises:
            PeerError: If another worker has failed.
        """
        begun_at, end_at = time.monotonic(), end_at_of(self._look())
        if verdict.absent:
            self._raise_cause()
            return step, "", None
        step, problem = self._save_at_stop(step, verdict, pause, end_at)
        limit_seconds = self._manager.timeout_seconds
        if not self._consensus.has_peers:
            limit_seconds -= time.monotonic() - begun_at
        loss = self._wait_decided(step, problem, self._find_saves(step, pause), limit_seconds)
        if loss:
            self._raise_cause()
        return step, problem, self._share_outcome(loss, "" if pause is None else pause.changed, end_at)

    def _save_at_stop(
        self, step: int | None, verdict: Verdict, pause: PausedState | None, end_at: float | None
    ) -> tuple[int | None, str]:
        """**Blocks.** Saves, or waits for an earlier save; returns the saved step, and the error."""
        stop = verdict.stop
        if stop is not None and step is not None and step > stop.step:
            # If nothing could be lost, it is a first step whose begin was not known.
            is_first = step == self._progress.safe_step + 1 == stop.step + 1
            return stop.step, "" if is_first else f"the loop had passed step {stop.step} when it should have been saved"
        early, early_step = self._progress.early, self._progress.early_step
        if early is not None and not self._may_save_again(verdict):
            return step if early_step is None else early_step, self._try_wait(early, end_at)
        if pause is not None:
            return step, pause.save_surely(self._wait_committed, end_at)
        problem = self._save_last(step or 0, end_at)
        # A program may use larger numbers of its own.
        return self.tried[-1].step if self.tried else step, problem

    def _may_save_again(self, verdict: Verdict) -> bool:
        """Returns True if there is time for another save than the one after the notice; the same on all."""
        if self._consensus.has_peers:
            return verdict.plan is None or verdict.plan.saves
        outlook = self._look()
        if outlook.saving_seconds is not None and outlook.left_seconds is not None:
            # How long that one takes says whether there is time for another.
            self._try_wait(self._progress.early, end_at_of(outlook))
            outlook = self._look()
        return has_time_to_save(outlook)

    def _raise_cause(self) -> None:
        """Raises the error of the worker because of which nothing can be saved together any more, if any."""
        cause = self._consensus.failures.find_cause()
        if cause is not None:
            raise cause

    def _find_saves(self, step: int | None, pause: PausedState | None) -> list[SaveHandle]:
        """Returns the saves that may be of the step."""
        saves = (*self.tried, self._progress.early, None if pause is None else pause.saved)
        return [saved for saved in saves if saved is not None and saved.step == step]

    def _share_outcome(self, error: str, changed: str, end_at: float | None) -> SaveOutcome:
        """Shares the result of the last save with all workers, in this worker's words if it failed here.

        `changed` names the objects that have changed in a pause, so that they could not be saved.
        """
        mistake = self.mistake or (changed and f"ChangedError: {changed}")
        save_fn = self._config.save_fn
        is_proof = not error and save_fn is None
        own = SaveOutcome(mistake or error, is_by_hand(self._inbox.pending), is_proof, is_cause=bool(mistake))
        # The others may be in a save of theirs that this worker takes no part in.
        abandon = self._manager.abandon if error and (changed or save_fn) else None
        together = self._consensus.share_outcome(own, end_at, abandon)
        # What failed here says more than what the others have seen of it, unless it results from what failed there.
        is_theirs = not error or (together.is_cause and not mistake)
        shown = together.error and (together.error if is_theirs else error)
        return SaveOutcome(shown, together.by_hand, together.is_proof)

    def _save_last(self, step: int, end_at: float | None) -> str:
        """**Blocks.** Saves the step and waits until it is committed; retries if that fails and time remains.

        The process must be gone at `end_at`, by the monotonic clock. Returns the error; empty if there is none.
        """
        error = ""
        self.tried = []
        for attempt in range(ATTEMPTS):
            if attempt > 0 and end_at is not None and time.monotonic() >= end_at - LEAST_SECONDS:
                break
            self.mistake = ""
            try:
                self._settle(end_at)
                save_fn = self._config.save_fn
                saved = self._keep(step) if save_fn is None else save_fn(*self.arguments, **self.options)
                if isinstance(saved, SaveHandle):
                    self.tried.append(saved)
                self._wait_committed(saved, end_at)
            except PeerError:
                raise  # The training thread was interrupted: no worker can save any more.
            except DeadlineError as late:
                return late.message
            except HoldfastError as failure:
                error = failure.message
            except SystemExit as ending:
                self.mistake = f"SystemExit: {ending}: save_fn must save; exit_fn is for ending the program"
                return self.mistake
            except Exception as failure:  # noqa: BLE001  It may be the user's code, and the exit has to say so.
                error = self.mistake = f"{type(failure).__name__}: {failure}"
            else:
                return ""
        return error

    def _wait_committed(self, saved: object, end_at: float | None) -> None:
        """**Blocks.** Waits for a save, if it can be waited for.

        Raises:
            SaveFailedError: If it failed.
            DeadlineError: If it is not committed in time.
        """
        wait = getattr(saved, "wait_committed", None)
        if callable(wait):
            wait(_until(end_at))

    def _try_wait(self, saved: SaveHandle | None, end_at: float | None) -> str:
        """**Blocks.** Like `wait_committed`; returns the error, or an empty string."""
        try:
            self._wait_committed(saved, end_at)
        except HoldfastError as failure:
            return failure.message
        return ""

    def wait_idle(self, is_alert: Callable[[], bool]) -> None:
        """**Blocks** until no save is in progress, or there is something to act on.

        Raises:
            SaveFailedError: If a save has failed and the failure was not raised yet.
            DeadlineError: If it does not end in time.
        """
        limit_seconds = find_wait_seconds(self._manager.timeout_seconds, self._manager.worker)
        begun_at = time.monotonic()
        end_at, is_reported = begun_at + limit_seconds, False
        while not is_alert():
            if not is_reported and time.monotonic() >= begun_at + SILENT_SECONDS:
                is_reported = True
                limit = describe_limit(end_at - time.monotonic())
                say(
                    f"holdfast: training is done, and the last save is being written{limit}; Ctrl-C twice stops "
                    "waiting."
                )
            if time.monotonic() >= end_at:
                hint = "The save continues. Check whether the storage still responds."
                raise DeadlineError(f"the save in progress did not end within {limit_seconds:g} s", hint=hint)
            with suppress(DeadlineError):
                return self._manager.wait(_LOOK_SECONDS)

    def _wait_decided(self, step: int | None, error: str, saves: Sequence[SaveHandle], limit_seconds: float) -> str:
        """**Blocks.** Returns what remains of an error in saving a step once it is certain whether that is committed.

        A late save of several workers is ended on all of them. If they have agreed to commit it, that is waited for: a
        worker that exited earlier would report the step as lost, and another one as saved. A save of one process
        continues; the end of the program waits for it in any case.

        Args:
            step: The step; None if there is none.
            error: Why it seems not to be saved, for example because it was late; empty if it is.
            saves: Those that may be of that step.
            limit_seconds: How long to wait.
        """
        end_at = time.monotonic() + limit_seconds
        for saved in [saved for saved in saves if error and not (saved.ended or saved.committed)]:
            participant = self._manager.participant
            if saved.is_joint and participant is not None:
                late = DeadlineError(f"the job's remaining time was over: {error}")
                if participant.peers.mailbox.ask(partial(saved.try_cancel, late)) is not False:
                    continue
            elif limit_seconds <= 0:
                continue
            say(f"holdfast: {self.name(step or 0)} is not saved yet: {error}. Its save continues; waiting for it.")
            while time.monotonic() < end_at and self._find_loss(step, error, saves):
                try:
                    saved.wait_committed(_LOOK_SECONDS)
                except DeadlineError:
                    continue
                except HoldfastError as failure:
                    error = failure.message
                    break
        return self._find_loss(step, error, saves)

    def check_landed(self, step: int | None, error: str, pause: PausedState | None) -> str:
        """**Blocks** for a moment. Returns what is still to be reported about an error in saving a step.

        That is nothing if the step is committed after all, for all workers.
        """
        return self._find_loss(step, error, self._find_saves(step, pause))

    def _find_loss(self, step: int | None, error: str, saves: Sequence[SaveHandle]) -> str:
        """Does the work of `check_landed`; `saves` are those that may be of the step."""
        # What was to be replaced is there in any case.
        saves = [saved for saved in saves if saved.replaces] or saves
        if not error or any(saved.committed for saved in saves):
            return ""
        # Without a place, a step of that number may be one that was there before this job went back.
        is_placed = any(saved.has_place and not saved.replaces for saved in saves)
        return "" if is_placed and self._newest() == step else error

    def leave(
        self, step: int | None, reason: str, error: str, blocked_seconds: float, *, by_hand: bool | None = None
    ) -> None:
        """Reports the result of the save, and exits. Returns only if the user's `exit_fn` does.

        Args:
            step: The step that is saved, or should have been.
            reason: Why the job exits now.
            error: Why the step is not saved; empty if it is.
            blocked_seconds: How long the last save blocked training.
            by_hand: True if a person at a terminal asked for it; None to take that from the notices.

        Raises:
            SystemExit: With the code that says whether the state is saved.
            KeyboardInterrupt: Instead, in a notebook's cell or at a prompt: the process continues.
            SaveFailedError: Instead, in that case, if the state is not saved.
        """
        by_hand = is_by_hand(self._inbox.pending) if by_hand is None else by_hand
        left_seconds = self._inbox.demand().left_seconds
        gone_at = None if left_seconds is None else time.monotonic() + left_seconds
        code = EXIT_INTERRUPTED if by_hand else self._config.exit_code
        if not error:
            limit_seconds = _UNKNOWN_SECONDS if left_seconds is None else left_seconds - LEAST_SECONDS
            # A person at a terminal does not wait: the next start copies it.
            self._reach(step, 0.0 if by_hand else max(limit_seconds, 0.0))
        if error:
            code = EXIT_SAVE_FAILED
        exit_fn = None if error else self._config.exit_fn
        # In another thread an interrupt would not be caught.
        interrupts = by_hand and is_interactive() and threading.current_thread() is threading.main_thread()
        if not interrupts and exit_fn is None:
            self._inbox.take_no_more()
        end = None if exit_fn else (step, code, error)
        # A program that catches the exit within the block comes here again at its end.
        if end is None or end != self._end:
            self._end = end
            self._inbox.report()
            self._announce(step, code, reason, error, blocked_seconds, interrupts=interrupts)
        if interrupts and error:
            raise SaveFailedError(self._say_lost(step, error), step=step or 0)
        if interrupts and exit_fn is None:
            raise KeyboardInterrupt(self._describe_saved(step))
        if not error:
            self._inbox.note_leaving()
        try:
            if exit_fn is None:
                self._exit(code, time.monotonic() if error and self.missing else gone_at)
            exit_fn()
        except SystemExit:
            self._inbox.take_no_more()
            raise

    def _reach(self, step: int | None, limit_seconds: float) -> str:
        """**Blocks.** Waits until the saved step is in the farthest tier that it comes to in time; see `SaveHandle`."""
        return "".join(saved.reach(limit_seconds) for saved in self._find_saves(step, None)[-1:])

    def _exit(self, code: int, gone_at: float | None) -> NoReturn:
        """Ends the program, with a deadline of `gone_at` for the interpreter's shutdown.

        Process groups, for example, may wait there for a dead worker.
        """
        keep_exit_code()
        leaving = LeavingExit(code, gone_at)
        leave_with_thread(leaving)
        raise leaving

    def _announce(
        self,
        step: int | None,
        code: int,
        reason: str,
        error: str,
        blocked_seconds: float,
        *,
        interrupts: bool,
    ) -> None:
        self._manager.emit(
            Leaving(
                step=self._newest() if error else step,
                exit_code=code,
                reason=reason,
                error=error,
                blocked_seconds=blocked_seconds,
                saved="" if error else self._describe_saved(step),
            )
        )
        worker = self._manager.worker
        who = "" if worker.is_alone else f"rank {worker.rank}: "
        if not error and self._config.exit_fn:
            then = "calling exit_fn"
        elif interrupts:
            then = "raising SaveFailedError" if error else "raising KeyboardInterrupt"
        else:
            then = f"leaving with exit code {code}"
        line = self._say_lost(step, error) if error else self._describe_saved(step)
        advice = next((each.notice.advice for each in self._inbox.pending if each.notice.advice), "")
        if cost := self._manager.describe_cost():
            say(f"holdfast: {cost}")
        say(f"holdfast: {who}{line}; {then}." + (f" {advice}." if advice and not error else ""))

    def _settle(self, end_at: float | None) -> None:
        """Waits for a save in progress. Its failure was an event, and must not prevent the last save."""
        try:
            self._manager.wait(_until(end_at))
        except SaveFailedError:
            return

    def _say_lost(self, step: int | None, error: str) -> str:
        newest = self._newest()
        if self.missing:
            restart = "starts from the beginning: there is no checkpoint"
            if newest is not None:
                restart = f"resumes from {self.name(newest)}, the newest checkpoint"
            return f"{self.missing}. Nothing can be saved without it. A restart {restart}"
        found = "there is no checkpoint" if newest is None else f"the newest checkpoint is {self.name(newest)}"
        return f"{self.name(step or 0)} could NOT be saved: {error}; {found}"

    def _describe_saved(self, step: int | None) -> str:
        where = f" ({reached})" if (reached := self._reach(step, 0.0)) else ""
        return f"{self.name(step)} is saved{where}" if step else self.nothing

    def _newest(self) -> int | None:
        try:
            return self._manager.latest_step()
        except HoldfastError:
            return None  # The place is gone: that is what the error says already.


def end_by(error: BaseException) -> NoReturn:
    """**Blocks.** Ends the process from any thread, as an uncaught error does; nothing is unwound."""
    if not isinstance(error, SystemExit):
        say("".join(traceback.format_exception(error)).rstrip())
        end_process(1)
    if error.code is not None and not isinstance(error.code, int):
        say(str(error.code))
        end_process(1)
    end_process(error.code or 0)


def _until(end_at: float | None) -> float | None:
    return None if end_at is None else max(end_at - time.monotonic(), LEAST_SECONDS)
