"""One save, as training and the engine's thread share it; the handle that shows it; and the failures of saves."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from holdfast.catalog.step_copier import StepCopier
from holdfast.errors import (
    ChangedError,
    DeadlineError,
    FencedError,
    HoldfastError,
    OutOfMemoryError,
    PeerError,
    SaveFailedError,
    UsageError,
)
from holdfast.format.names import StepName
from holdfast.format.records import Worker
from holdfast.options import check_wait
from holdfast.process.exit import register_drain, unregister_drain
from holdfast.process.latch import Latch
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import say
from holdfast.save.image import CopyProgress
from holdfast.tracebacks import short_traceback

if TYPE_CHECKING:
    from holdfast.save.image import Staging
    from holdfast.save.joint.protocol import CommitProtocol
    from holdfast.save.overlap import OptimizerStepBarrier


_GRACE_SECONDS: Final = 15.0
_GRACE_SHARE: Final = 0.1
"""Extra time that a waiter gives a save, so that the save can report first which worker is missing."""

SILENT_SECONDS: Final = 2.0
"""Time after which an exiting program says what it waits for."""

_NEAR_SECONDS: Final = 120.0
"""Remaining time of a wait below which it is mentioned to a person."""


def describe_limit(left_seconds: float) -> str:
    """**Pure.** Describes how long a wait lasts at most; empty if that is so long that it would only alarm."""
    return f", for {left_seconds:.0f} s at most" if left_seconds <= _NEAR_SECONDS else ""


def find_wait_seconds(timeout_seconds: float, worker: Worker) -> float:
    """**Pure.** Returns how long to wait for a save; longer with other workers, for whom the save waits."""
    return timeout_seconds if worker.is_alone else timeout_seconds + _GRACE_SECONDS + _GRACE_SHARE * timeout_seconds


class Origin(msgspec.Struct, frozen=True):
    """Where the next generation of a manager begins.

    Attributes:
        base: The checkpoint that it continues from: the restored one, else the newest that the manager saw when it was
            created. None for the beginning.
        seen_generation: The newest generation of the run at that time; 0 if there was none. A job that has opened a
            newer one since continues from steps that this manager does not know.
        sources: Checkpoints to keep while the manager lives: those that were partly restored, and those that were
            restored by their number, which may be requested again.
        start_from: The step that the program last went back to on request, now or earlier in the lineage, or None.
        exempt: The leaves that were not finite in the run's first checkpoint; None if that is not known.
    """

    base: StepName | None = None
    seen_generation: int = 0
    sources: tuple[StepName, ...] = ()
    start_from: int | None = None
    exempt: frozenset[str] | None = None


@dataclass(eq=False)
class SaveRequest:
    """One save: what the training thread requests of the engine's thread, and how far it is.

    The training thread submits it, waits until the state is copied, and confirms. The confirmation is a single store,
    and nothing is committed before it: so one exception at any point of `save` (Ctrl-C, for example) leaves the save
    either confirmed or dropped. The engine then sets each field of the progress once, before it opens its latch.

    Attributes:
        step, metrics, metadata: What is to be saved, and what its manifest says.
        origin: Where a generation would begin if this save opens it.
        replaces: True if it should replace an existing checkpoint of that step.
        reason: Why a policy wanted it; empty if the user asked for it.
        protocol: The conversation between workers about it; None for a single worker.
        asked_at: When the save was requested, by the monotonic clock.
        waited_seconds: How long it waited for the previous save.
        thread: The thread that requests it.
        staging: What is to be copied, or the error if there was no memory for the copy. None before that, and after the
            save.
        copied: The progress of the copy that training waits for.
        is_submitted: True once the engine has it, and so ends it.
        confirmed: Whether it is to be committed; None before that is `decided`.
        is_copied: True once the state has been copied and may be changed again; then `staged` opens.
        name: The directory of the checkpoint, present or future; `named` opens with it.
        is_committed: True once the checkpoint exists; `settled` opens then, or when the save has failed.
        skipped: Why the save was skipped, or empty.
        error: Why the save failed or was skipped, or None; it opens `staged`, `named` and `settled`.
        served: Opens when the next save may begin; what this one has replaced may still be being removed.
        ended: Opens when nothing is left to do.
        server: The thread that performs the save, or cleans up after it, until it has ended.
    """

    step: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    origin: Origin
    asked_at: float
    replaces: bool = False
    reason: str = ""
    protocol: CommitProtocol | None = None
    waited_seconds: float = 0.0
    thread: int = field(default_factory=threading.get_ident)
    staging: Staging | OutOfMemoryError | None = None
    copied: CopyProgress = field(default_factory=CopyProgress)
    is_submitted: bool = False
    confirmed: bool | None = None
    decided: Latch = field(default_factory=Latch)
    is_copied: bool = False
    staged: Latch = field(default_factory=Latch)
    name: StepName | None = None
    named: Latch = field(default_factory=Latch)
    is_committed: bool = False
    settled: Latch = field(default_factory=Latch)
    skipped: str = ""
    error: HoldfastError | None = None
    served: Latch = field(default_factory=Latch)
    ended: Latch = field(default_factory=Latch)
    server: int | None = None

    @property
    def must_end(self) -> bool:
        """True once the save depends on the engine alone, which commits it or reports why not."""
        return self.confirmed is True and self.copied.error is None

    def confirm(self, *, commits: bool = True) -> None:
        """Decides whether the save is to be committed: the first answer counts. The requesting thread calls it."""
        if self.confirmed is None:
            self.confirmed = commits
        self.decided.open()

    def drop(self) -> None:
        """Abandons the save unless it was confirmed before. This may be interrupted and repeated."""
        self.copied.call_off()
        self.confirm(commits=False)
        if not self.is_submitted:
            self.served.open()
            self.ended.open()

    def drop_if_left(self) -> None:
        """Like `drop`, from outside of the call that requested the save: a second exception may have cut that call off.

        Does nothing if the call was not cut off.
        """
        if not self.ended.is_open and (
            self.thread == threading.get_ident() or self.thread not in sys._current_frames()
        ):
            self.drop()

    def fail(self, error: HoldfastError) -> None:
        """Releases everyone who waits for anything but the end of the save."""
        self.error = error
        for latch in (self.staged, self.named, self.settled):
            latch.open()

    def skip(self, reason: str) -> None:
        """Marks the save as skipped, which a wait for it raises like a failure."""
        self.skipped = reason
        self.fail(UsageError(f"step {self.step} was not saved: {reason}"))

    @property
    def state(self) -> str:
        """The progress in words."""
        if self.skipped or self.error is not None:
            return "skipped" if self.skipped else "failed"
        return "committed" if self.is_committed else "in progress"


class LeftOutError(Exception):
    """All workers skip the save, because one of them could not take part; none has failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SaveHandle:
    """One save, from the call of `save` until it is committed or has failed.

    Attributes:
        step: The step that is being saved.
        replaces: True if it should replace an existing checkpoint of that step.
        url: The URL of the run.
        request: The save itself, for holdfast's own parts.
    """

    def __init__(
        self,
        request: SaveRequest,
        url: str,
        timeout_seconds: float,
        mark_raised: Callable[[HoldfastError], None],
        barrier: OptimizerStepBarrier | None = None,
        copier: StepCopier | None = None,
    ) -> None:
        self.request, self._copier = request, copier
        self.step, self.replaces = request.step, request.replaces
        self._process = os.getpid()
        self.url = url
        # How long all waits that ended with the time-out have lasted together.
        self._vain_wait_seconds = 0.0
        self._timeout_seconds = timeout_seconds
        self._mark_raised = mark_raised
        # A wait for a save holds up no step that the save waits for.
        self._wait: Callable[[Latch, float], bool] = Latch.wait if barrier is None else barrier.wait_for

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step} of {self.url}: {self.request.state}>"

    @property
    def path(self) -> str:
        """**Blocks.** The directory of the checkpoint, which exists as a checkpoint once the save is committed.

        At a manager's first save this waits until the generation is opened, which takes milliseconds.

        Raises:
            DeadlineError: If that takes longer than the manager's `timeout_seconds`.
            SaveFailedError: If the save failed before it had a directory.
            UsageError: If the save was skipped (see `skipped`), or as in `wait_committed`.
        """
        self._wait_for(self.request.named, None, "got no directory")
        if self.request.name is None:
            self._raise_if_failed()
        assert self.request.name is not None  # What opens the latch else is a failure.
        return f"{self.url}/{self.request.name.directory}"

    @property
    def skipped(self) -> bool:
        """True if this save was skipped because the previous one was still in progress."""
        return bool(self.request.skipped)

    @property
    def failed(self) -> bool:
        """True once the save has failed or was skipped."""
        return self.request.error is not None

    @property
    def must_be_replaced(self) -> bool:
        """True if another save of that step must replace a checkpoint: this one, or the one before."""
        return self.replaces or not self.failed

    @property
    def ended(self) -> bool:
        """True once the save has failed, or is committed and the checkpoint that it replaces has been removed."""
        return self.request.ended.is_open

    @property
    def has_place(self) -> bool:
        """True once the directory of the checkpoint is known, in a generation of this job."""
        return self.request.name is not None

    @property
    def committed(self) -> bool:
        """True once the checkpoint exists."""
        return self.request.is_committed

    @property
    def is_joint(self) -> bool:
        """True if several workers make this save together."""
        return self.request.protocol is not None

    def try_cancel(self, error: HoldfastError) -> bool:
        """**Blocks.** Ends a joint save on all workers with an error, unless all agreed to commit it.

        Returns:
            True if the save will never be committed.
        """
        return self.request.protocol is not None and self.request.protocol.try_cancel(error)

    @short_traceback
    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until the state has been copied and may be changed again.

        Raises:
            DeadlineError: If it takes longer.
            SaveFailedError: If the save failed before that.
            UsageError: If the save was skipped (see `skipped`), or as in `wait_committed`.
        """
        self._wait_for(self.request.staged, timeout_seconds, "was not staged")
        if not self.request.is_copied:
            self._raise_if_failed()

    @short_traceback
    def wait_committed(self, timeout_seconds: float | None = None, *, tier: int | str | None = None) -> str:
        """**Blocks.** Waits until the checkpoint is durable and would be found by a restart.

        Args:
            tier: Of a run in `Tiers`, the tier in which it is to be: its place as it was written, or its number, -1 for
                the farthest. None for the nearest, in which each checkpoint is committed first.
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`, and a little more in a job of
                several workers, so that the save can report which worker is missing.

        Returns:
            The directory of the checkpoint.

        Raises:
            DeadlineError: If it takes longer; the save continues.
            SaveFailedError: If the save failed. The manager does not raise the failure again.
            StorageError: If it is committed, but will not be copied into that tier.
            UsageError: If the save was skipped (see `skipped`), or if this is called in a sink or in a forked child.
        """
        begun_at = time.monotonic()
        self._wait_for(self.request.settled, timeout_seconds, "was not committed")
        self._raise_if_failed()
        if tier is None or self.request.name is None:
            return self.path
        if self._copier is None:
            raise UsageError(f"the run has no tiers, got tier={tier!r}", hint="Pass Tiers(...) as its directory.")
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._copier.wait(self.request.name, tier, max(limit_seconds - (time.monotonic() - begun_at), 0.0))

    @property
    def copy_seconds(self) -> float | None:
        """How long the newest copy into the farthest tier took; None if there was none."""
        return None if self._copier is None else self._copier.copy_seconds

    def reach(self, timeout_seconds: float) -> str:
        """**Blocks.** Waits until the committed checkpoint is in the farthest tier that it comes to in time.

        Returns how far it has come, in words; empty if the run has no tiers.
        """
        if self._copier is None or self.request.name is None or not self.committed:
            return ""
        return self._copier.reach(self.request.name, timeout_seconds)

    @short_traceback
    def wait_ended(self, timeout_seconds: float | None = None, *, at_exit: bool = False) -> None:
        """**Blocks.** Waits until the save is over, whether it is committed or failed; raises no failure of it.

        Args:
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`.
            at_exit: True for the last wait of a program. After a moment it prints to standard error what it waits for,
                and earlier waits that timed out count: a program with a stuck disk waits once.

        Raises:
            DeadlineError: If it takes longer.
        """
        if not at_exit:
            self._wait_for(self.request.ended, timeout_seconds, "did not end")
            return
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        waited_seconds = self._vain_wait_seconds if timeout_seconds is None else 0.0
        left_seconds = max(limit_seconds - waited_seconds, 0.0)
        if left_seconds > SILENT_SECONDS and not self._wait(self.request.ended, SILENT_SECONDS):
            left_seconds -= SILENT_SECONDS
            say(
                f"holdfast: waiting for the save of step {self.step} into {self.url}, which is being "
                f"written{describe_limit(left_seconds)}; Ctrl-C ends the wait."
            )
        self._wait_for(self.request.ended, left_seconds, "did not end", limit_seconds)

    def wait_served(self) -> None:
        """**Blocks.** Like `wait_ended`, but only until the next save may begin; the clean-up may still go on."""
        self._wait_for(self.request.served, None, "did not end")

    def _raise_if_failed(self) -> None:
        """Raises the failure if there is one; the manager does not raise it again then."""
        error = self.request.error
        if error is not None and not self.request.is_committed:
            self._mark_raised(error)
            raise error

    def _wait_for(
        self, latch: Latch, timeout_seconds: float | None, miss: str, shown_seconds: float | None = None
    ) -> None:
        """**Blocks.** Waits for a latch; an error names `shown_seconds` if they differ from those of this wait."""
        limit_seconds = self._timeout_seconds
        if timeout_seconds is not None:
            limit_seconds = check_wait(timeout_seconds)
        if os.getpid() != self._process and not latch.is_open:
            raise UsageError(
                f"process {self._process} is saving step {self.step} into {self.url}; this is a child process "
                "and would not notice when the save ends",
                hint="Wait in the process that saves.",
            )
        if self.request.server == threading.get_ident() and not latch.is_open:
            raise UsageError(
                f"the save of step {self.step} waits for an event sink, which waits for that save",
                hint="In a sink, only record the event; wait in the training thread.",
            )
        if not self._wait(latch, limit_seconds):
            self._vain_wait_seconds += limit_seconds
            shown_seconds = limit_seconds if shown_seconds is None else shown_seconds
            also = ""
            if self.is_joint:
                also = " here or on another worker, or whether a worker did not begin this save"
            raise DeadlineError(
                f"the save of step {self.step} into {self.url} {miss} within {shown_seconds:g} s",
                hint=f"The save continues. Wait again, or find out why the storage is slow{also}.",
            )


class PendingFailures:
    """**Thread-safe.** The failures of one manager's saves that were not raised yet.

    While a save is in progress, or a failure has not been raised, the exit of the program waits for it. Only this small
    object is kept alive for that, not the manager.
    """

    def __init__(self, failures_allowed: int) -> None:
        """Tolerates up to `failures_allowed` failures in a row.

        A save during which state changed does not count: usually there is one such save, and two at the most.
        """
        self._failures_allowed = failures_allowed
        # Acquired again by a signal handler that waits, say, in the middle of what it guards: these four.
        self._lock = threading.RLock()
        self._unraised: list[HoldfastError] = []
        self._failures_in_a_row = 0
        self._changes_in_a_row = 0
        self._in_flight: SaveHandle | None = None
        # Whether closing has not waited for that until its end, and has said so; or a person has ended that wait.
        self._is_given_up = self._is_interrupted = False

    def note_begun(self, handle: SaveHandle) -> None:
        """Called when a save has begun; from now on the exit of the program waits for it."""
        with self._lock:
            self._in_flight, self._is_given_up, self._is_interrupted = handle, False, False
        if PULSE.board is not None:
            PULSE.board.note_saves(begun=1)
        register_drain(self)

    def forgive(self) -> None:
        """Called when a save was committed: tolerated failures no longer count."""
        with self._lock:
            if self._failures_in_a_row <= self._failures_allowed:
                self._unraised = [error for error in self._unraised if not isinstance(error, SaveFailedError)]
            self._failures_in_a_row = self._changes_in_a_row = 0

    def note_ended(self, handle: SaveHandle) -> None:
        """Called when the save is over, also if the next one has begun."""
        with self._lock:
            if self._in_flight is handle:
                self._in_flight = None
            self._release_if_done()
        if PULSE.board is not None:
            PULSE.board.note_saves(ended=1)
        handle.request.ended.open()

    def add(self, error: HoldfastError) -> bool:
        """Adds a failure that must be raised; returns True if one before it must be, too."""
        with self._lock:
            is_further = self._failures_in_a_row > self._failures_allowed
            self._unraised.append(error)
            if isinstance(error, SaveFailedError):
                cause = error.__cause__
                kind = cause.kind if isinstance(cause, PeerError) else type(cause).__name__
                if kind == ChangedError.__name__:
                    # What has changed is copied at once from now on: no reason to end a job for, but by its last save.
                    self._changes_in_a_row += 1
                else:
                    self._failures_in_a_row += 1
        return is_further

    def take(self, *, last: bool) -> list[HoldfastError]:
        """Returns the failures to raise now, oldest first; they count as raised. The `last` call tolerates none."""
        with self._lock:
            # Of another job, or by a mistake: the next save would fail as well.
            is_lasting = any(isinstance(error.__cause__, FencedError | UsageError) for error in self._unraised)
            counted, any_lost = self._failures_in_a_row, self._failures_in_a_row + self._changes_in_a_row > 0
            tolerated = not last and not is_lasting and any_lost and counted <= self._failures_allowed
            taken = [error for error in self._unraised if not (tolerated and isinstance(error, SaveFailedError))]
            self._unraised = [error for error in self._unraised if error not in taken]
            self._release_if_done()
        return taken

    def put_back(self, errors: list[HoldfastError]) -> None:
        """Undoes `take`, for a caller that could not raise what it took."""
        with self._lock:
            self._unraised = errors + self._unraised
        if errors:
            register_drain(self)

    def mark_raised(self, error: HoldfastError) -> None:
        """Called when a wait on a handle has raised this failure."""
        with self._lock:
            self._unraised = [other for other in self._unraised if other is not error]
            self._release_if_done()

    def close_behind(self, error: BaseException | None, close: Callable[[], None]) -> None:
        """**Blocks.** Calls `close` at the end of a block, which an error may have ended.

        An error that ended the block takes precedence; a failure to close is added to it as a note, or else is raised.
        """
        try:
            close()
        except HoldfastError as failure:
            if error is None:
                raise
            if isinstance(error, SaveFailedError) and isinstance(failure, SaveFailedError):
                error.add_note(f"holdfast: step {failure.step} was not saved either")  # The log says why.
            else:
                error.add_note(f"holdfast: while closing: {type(failure).__name__}: {failure}")
            if isinstance(error, SystemExit):
                # That one is not printed, and its code may be 0: the exit of the program must show the failure.
                self.put_back([failure])

    def wait_closed(self, handle: SaveHandle, timeout_seconds: float | None) -> None:
        """**Blocks.** Waits for a save as its manager is closed. If that fails, the program's end waits no more."""
        try:
            handle.wait_ended(timeout_seconds, at_exit=True)
        except DeadlineError:
            self._is_given_up = True
            raise
        except KeyboardInterrupt:
            self._is_given_up = self._is_interrupted = True
            raise

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends: waits for the save in progress and returns failures not raised yet.

        Raises:
            KeyboardInterrupt: If a person does not want to wait; it tells what is lost.
        """
        with self._lock:
            handle = self._in_flight
        if handle is not None:
            handle.request.drop_if_left()
            try:
                handle.wait_ended(0.0 if self._is_given_up else None, at_exit=True)
            except DeadlineError:
                if self._is_interrupted:
                    raise KeyboardInterrupt(f"step {handle.step} is not saved") from None
                text = f"step {handle.step} is not saved: the program ended before its save did"
                return [*self.take(last=True), DeadlineError(text, hint="Find out why the storage is slow.")]
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"step {handle.step} is not saved") from None
            except SystemExit as leaving:
                # A signal handler of the program's own. An exit that comes out of here would change no exit code.
                text = f"step {handle.step} is not saved: a handler interrupted the wait for it (SystemExit: {leaving})"
                return [*self.take(last=True), DeadlineError(text, hint="Let the handler wait for the save first.")]
        return self.take(last=True)

    def abandon(self) -> None:
        """Stops waiting for the save in progress, and drops all failures."""
        with self._lock:
            self._in_flight = None
            self._unraised = []
            self._release_if_done()

    def _release_if_done(self) -> None:
        if self._in_flight is None and not self._unraised:
            unregister_drain(self)


def raise_newest(failures: list[HoldfastError], next_save: SaveHandle | None = None) -> NoReturn:
    """Raises the newest failure, with the others as notes."""
    newest = failures[-1]
    for failure in failures[:-1]:
        newest.add_note(f"before that: {failure}")
    if isinstance(newest, SaveFailedError):
        newest.next_save = next_save
    raise newest
