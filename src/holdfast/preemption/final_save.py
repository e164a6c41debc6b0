"""The last save of a job that was asked to stop, and its exit."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from holdfast.deadlines import LEAST_SECONDS
from holdfast.errors import DeadlineError, HoldfastError, PeerError, SaveFailedError
from holdfast.events import Event, Leaving, Warned
from holdfast.format.records import Worker
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.grace import is_by_hand
from holdfast.preemption.notice_inbox import NoticeInbox
from holdfast.preemption.progress import ATTEMPTS
from holdfast.process.exit import (
    EXIT_INTERRUPTED,
    EXIT_SAVE_FAILED,
    LeavingExit,
    end_process,
    is_interactive,
    leave_with_thread,
)
from holdfast.process.terminal import keep_exit_code, say
from holdfast.save.handle import SILENT_SECONDS, SaveHandle, describe_limit, find_canceller, find_wait_seconds
from holdfast.save.mark import Mark

if TYPE_CHECKING:
    from holdfast.save.joint.participant import JointParticipant

_LOOK_SECONDS: Final = 0.25


class Saves(Protocol):
    """The part of a manager that this package needs."""

    worker: Worker
    participant: JointParticipant | None
    timeout_seconds: float

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


class FinalSave:
    """Saves and exits. It belongs to the thread that does so, one at a time.

    Attributes:
        mistake: The error of the user's own code in the last attempt of the last save; empty if there was none.
        missing: Who has died, so that nothing can be saved any more; empty if that is not the reason.
        arguments: Positional arguments of `save_fn`.
        options: Keyword arguments of `save_fn`.
        tried: All attempts of the last save.
        has_left: True if it has raised the exception that ends the program, or the person's cell.
        name: The name of a step for people.
        nothing: The message if nothing is saved and there was no error.
    """

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        inbox: NoticeInbox,
    ) -> None:
        self.mistake = self.missing = ""
        self.has_left = False
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.tried: list[SaveHandle] = []
        self.name: Callable[[int], str] = "step {}".format
        self.nothing = "no progress is lost: nothing was completed"
        self._manager = manager
        self._config = config
        self._keep = keep
        self._inbox = inbox
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
                participant.tell(participant.begin(step), error)
            return None
        return saved if isinstance(saved, SaveHandle) else None

    def find_number(self, step: int | None) -> int | None:
        """Returns the number under which the last save saved a step: a program may use larger numbers of its own."""
        return self.tried[-1].step if self.tried and step is not None else step

    def save_last(self, step: int, end_at: float | None) -> str:
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
                self.wait_committed(saved, end_at)
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

    def wait_committed(self, saved: object, end_at: float | None) -> None:
        """**Blocks.** Waits for a save, if it can be waited for.

        Raises:
            SaveFailedError: If it failed.
            DeadlineError: If it is not committed in time.
        """
        wait = getattr(saved, "wait_committed", None)
        if callable(wait):
            wait(_until(end_at))

    def try_wait(self, saved: SaveHandle | None, end_at: float | None) -> str:
        """**Blocks.** Like `wait_committed`; returns the error, or an empty string."""
        try:
            self.wait_committed(saved, end_at)
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

    def wait_decided(
        self,
        step: int | None,
        error: str,
        saves: Iterable[SaveHandle],
        limit_seconds: float,
        try_end: Callable[[Callable[[HoldfastError], bool], HoldfastError], bool],
    ) -> str:
        """**Blocks.** Returns what remains of an error in saving a step once it is certain whether that is committed.

        A late save of several workers is ended on all of them. If they have agreed to commit it, that is waited for: a
        worker that exited earlier would report the step as lost, and another one as saved. A save of one process
        continues; the end of the program waits for it in any case.

        Args:
            step: The step; None if there is none.
            error: Why it seems not to be saved, for example because it was late; empty if it is.
            saves: Those that may be of that step.
            limit_seconds: How long to wait.
            try_end: Ends a save on all workers, unless they have agreed to commit it.
        """
        saves = tuple(saves)
        end_at = time.monotonic() + limit_seconds
        late = (
            [saved for saved in saves if saved.step == step and not (saved.ended or saved.committed)] if error else []
        )
        for saved in late:
            end = find_canceller(saved)
            if end is not None:
                if try_end(end, DeadlineError(f"the job's remaining time was over: {error}")):
                    continue
            elif limit_seconds <= 0:
                continue
            say(f"holdfast: {self.name(step or 0)} is not saved yet: {error}. Its save continues; waiting for it.")
            while time.monotonic() < end_at and self.check_landed(step, error, saves):
                try:
                    saved.wait_committed(_LOOK_SECONDS)
                except DeadlineError:
                    continue
                except HoldfastError as failure:
                    error = failure.message
                    break
        return self.check_landed(step, error, saves)

    def check_landed(self, step: int | None, error: str, saves: Iterable[SaveHandle]) -> str:
        """**Blocks** for a moment. Returns what is still to be reported about an error in saving a step.

        That is nothing if the step is committed after all, for all workers. The arguments are those of `wait_decided`.
        """
        of_step = [saved for saved in saves if saved.step == step]
        # What was to be replaced is there in any case.
        of_step = [saved for saved in of_step if saved.replaces] or of_step
        if not error or any(saved.committed for saved in of_step):
            return ""
        # Without a place, a step of that number may be one that was there before this job went back.
        is_placed = any(saved.has_place and not saved.replaces for saved in of_step)
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
            SystemExit: With the code that tells whether the state is saved.
            KeyboardInterrupt: Instead, in a notebook's cell or at a prompt: the process continues.
            SaveFailedError: Instead, in that case, if the state is not saved.
        """
        by_hand = is_by_hand(self._inbox.pending) if by_hand is None else by_hand
        left_seconds = self._inbox.demand().left_seconds
        gone_at = None if left_seconds is None else time.monotonic() + left_seconds
        code = EXIT_INTERRUPTED if by_hand else self._config.exit_code
        if error:
            code = EXIT_SAVE_FAILED
        exit_fn = None if error else self._config.exit_fn
        # In another thread an interrupt would not be caught.
        interrupts = by_hand and is_interactive() and threading.current_thread() is threading.main_thread()
        self.has_left = interrupts
        if not interrupts and exit_fn is None:
            self._inbox.take_no_more()
        end = None if exit_fn else (step, code, error)
        # A program that catches the exit within the block comes here again at its end.
        if end is None or end != self._end:
            self._end = end
            self._inbox.tell()
            self._tell(step, code, reason, error, blocked_seconds, interrupts=interrupts)
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
            self.has_left = True
            raise

    def _exit(self, code: int, gone_at: float | None) -> NoReturn:
        """Ends the program, with a deadline of `gone_at` for the interpreter's shutdown.

        Process groups, for example, may wait there for a dead worker.
        """
        keep_exit_code()
        leaving = LeavingExit(code, gone_at)
        leave_with_thread(leaving)
        raise leaving

    def _tell(
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
        return f"{self.name(step)} is saved" if step else self.nothing

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
