"""One save: the handle that its user sees, and the state that the training thread and the engine's thread share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import DeadlineError, HoldfastError, OutOfMemoryError, UsageError
from holdfast.format.names import StepName
from holdfast.format.records import Worker
from holdfast.options import check_wait
from holdfast.process.latch import Latch
from holdfast.process.terminal import say
from holdfast.save.records import CopyProgress, Origin
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


@dataclass(eq=False)
class SaveProgress:
    """The progress of one save: the engine sets it, and the handle reads it. It holds no array.

    Each field is set once, before its latch is opened; a failure opens all latches but the last two.

    Attributes:
        staged, named, settled: The latches of those who wait for something to be done.
        served: Opens when the next save may begin; what this one has replaced may still be being removed.
        ended: Opens when nothing is left to do.
        is_copied: True once the state has been copied and may be changed again.
        name: The directory of the checkpoint, present or future.
        is_committed: True once the checkpoint exists.
        skipped: Why the save was skipped, or empty.
        error: Why the save failed, or None.
        thread: The thread that performs the save, or cleans up after it, until it has ended.
    """

    staged: Latch = field(default_factory=Latch)
    named: Latch = field(default_factory=Latch)
    settled: Latch = field(default_factory=Latch)
    served: Latch = field(default_factory=Latch)
    ended: Latch = field(default_factory=Latch)
    is_copied: bool = False
    name: StepName | None = None
    is_committed: bool = False
    skipped: str = ""
    error: HoldfastError | None = None
    thread: int | None = None

    def fail(self, error: HoldfastError) -> None:
        """Releases everyone who waits for anything but the end of the save."""
        self.error = error
        for latch in (self.staged, self.named, self.settled):
            latch.open()

    def leave_out(self, step: int, reason: str) -> None:
        """Marks the save as skipped, which a wait for it raises like a failure."""
        self.skipped = reason
        self.fail(UsageError(f"step {step} was not saved: {reason}"))

    def __str__(self) -> str:
        states = (
            (bool(self.skipped), "skipped"),
            (self.error is not None, "failed"),
            (self.is_committed, "committed"),
        )
        return next((state for holds, state in states if holds), "in progress")


class SaveHandle:
    """One save, from the call of `save` until it is committed or has failed.

    Attributes:
        step: The step that is being saved.
        replaces: True if it should replace an existing checkpoint of that step.
    """

    def __init__(
        self,
        step: int,
        url: str,
        progress: SaveProgress,
        wait_seconds: float,
        mark_raised: Callable[[HoldfastError], None],
        *,
        replaces: bool = False,
        barrier: OptimizerStepBarrier | None = None,
        try_cancel: Callable[[HoldfastError], bool] | None = None,
    ) -> None:
        self.step = step
        self.replaces = replaces
        self._process = os.getpid()
        self._url = url
        # How long all waits that ended with the time-out have lasted together.
        self._vain_wait_seconds = 0.0
        self._timeout_seconds = wait_seconds
        self._mark_raised = mark_raised
        self._progress = progress
        self._barrier = barrier
        # A wait for a save holds up no step that the save waits for.
        self._wait: Callable[[Latch, float], bool] = Latch.wait if barrier is None else barrier.wait_for
        self._try_cancel = try_cancel

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step} of {self._url}: {self._progress}>"

    @property
    def path(self) -> str:
        """**Blocks.** The directory of the checkpoint, which exists as a checkpoint once the save is committed.

        At a manager's first save this waits until the generation is opened, which takes milliseconds.

        Raises:
            DeadlineError: If that takes longer than the manager's `timeout_seconds`.
            SaveFailedError: If the save failed before it had a directory.
            UsageError: If the save was skipped (see `skipped`), or as in `wait_committed`.
        """
        self._wait_for(self._progress.named, None, "got no directory")
        if self._progress.name is None:
            self._raise_if_failed()
        assert self._progress.name is not None  # What opens the latch else is a failure.
        return f"{self._url}/{self._progress.name.directory}"

    @property
    def skipped(self) -> bool:
        """True if this save was skipped because the previous one was still in progress."""
        self._note_call()
        return bool(self._progress.skipped)

    @property
    def failed(self) -> bool:
        """True once the save has failed or was skipped."""
        self._note_call()
        return self._progress.error is not None

    @property
    def must_be_replaced(self) -> bool:
        """True if another save of that step must replace a checkpoint: this one, or the one before."""
        return self.replaces or not self.failed

    @property
    def ended(self) -> bool:
        """True once the save has failed, or is committed and the checkpoint that it replaces has been removed."""
        self._note_call()
        return self._progress.ended.is_open

    @property
    def has_place(self) -> bool:
        """True once the directory of the checkpoint is known, in a generation of this job."""
        return self._progress.name is not None

    @property
    def committed(self) -> bool:
        """True once the checkpoint exists."""
        self._note_call()
        return self._progress.is_committed

    @short_traceback
    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until the state has been copied and may be changed again.

        Raises:
            DeadlineError: If it takes longer.
            SaveFailedError: If the save failed before that.
            UsageError: If the save was skipped (see `skipped`), or as in `wait_committed`.
        """
        self._wait_for(self._progress.staged, timeout_seconds, "was not staged")
        if not self._progress.is_copied:
            self._raise_if_failed()

    @short_traceback
    def wait_committed(self, timeout_seconds: float | None = None) -> str:
        """**Blocks.** Waits until the checkpoint is durable and would be found by a restart.

        Args:
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`, and a little more in a job of
                several workers, so that the save can report which worker is missing.

        Returns:
            The directory of the checkpoint.

        Raises:
            DeadlineError: If it takes longer; the save continues.
            SaveFailedError: If the save failed. The manager does not raise the failure again.
            UsageError: If the save was skipped (see `skipped`), or if this is called in a sink or in a forked child.
        """
        self._wait_for(self._progress.settled, timeout_seconds, "was not committed")
        self._raise_if_failed()
        return self.path

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
            self._wait_for(self._progress.ended, timeout_seconds, "did not end")
            return
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        waited_seconds = self._vain_wait_seconds if timeout_seconds is None else 0.0
        left_seconds = max(limit_seconds - waited_seconds, 0.0)
        if left_seconds > SILENT_SECONDS and not self._wait(self._progress.ended, SILENT_SECONDS):
            left_seconds -= SILENT_SECONDS
            say(
                f"holdfast: waiting for the save of step {self.step} into {self._url}, which is being "
                f"written{describe_limit(left_seconds)}; Ctrl-C ends the wait."
            )
        self._wait_for(self._progress.ended, left_seconds, "did not end", limit_seconds)

    def _note_call(self) -> None:
        if self._barrier is not None:
            self._barrier.note_call()

    def _raise_if_failed(self) -> None:
        """Raises the failure if there is one; the manager does not raise it again then."""
        error = self._progress.error
        if error is not None and not self._progress.is_committed:
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
                f"process {self._process} is saving step {self.step} into {self._url}; this is a child process "
                "and would not notice when the save ends",
                hint="Wait in the process that saves.",
            )
        if self._progress.thread == threading.get_ident() and not latch.is_open:
            raise UsageError(
                f"the save of step {self.step} waits for an event sink, which waits for that save",
                hint="In a sink, only record the event; wait in the training thread.",
            )
        if not self._wait(latch, limit_seconds):
            self._vain_wait_seconds += limit_seconds
            shown_seconds = limit_seconds if shown_seconds is None else shown_seconds
            also = ""
            if self._try_cancel is not None:
                also = " here or on another worker, or whether a worker did not begin this save"
            raise DeadlineError(
                f"the save of step {self.step} into {self._url} {miss} within {shown_seconds:g} s",
                hint=f"The save continues. Wait again, or find out why the storage is slow{also}.",
            )


@dataclass(eq=False)
class SaveRequest:
    """A save as the training thread requests it from the engine's thread, and the state that both share.

    The training thread submits it, waits until the state is copied, and confirms. The confirmation is a single store,
    and nothing is committed before it: so one exception at any point of `save` (Ctrl-C, for example) leaves the save
    either confirmed or dropped.

    Attributes:
        step: The step.
        metrics: Metrics for the manifest.
        metadata: Other content of the manifest.
        origin: Where a generation would begin if this save opens it.
        asked_at: When the save was requested, by the monotonic clock.
        handle: What the user sees of it.
        progress: Its progress.
        reason: Why a policy wanted it; empty if the user asked for it.
        protocol: The conversation between workers about it; None for a single worker.
        waited_seconds: How long it waited for the previous save.
        thread: The thread that requests it.
        staging: What is to be copied, or the error if there was no memory for the copy. None before that, and after the
            save.
        copied: The progress of the copy that training waits for.
        is_submitted: True once the engine has it, and so ends it.
        confirmed: Whether it is to be committed; None before that is decided.
        decided: Opens when that is decided.
    """

    step: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    origin: Origin
    asked_at: float
    handle: SaveHandle
    progress: SaveProgress
    reason: str = ""
    protocol: CommitProtocol | None = None
    waited_seconds: float = 0.0
    thread: int = field(default_factory=threading.get_ident)
    staging: Staging | OutOfMemoryError | None = None
    copied: CopyProgress = field(default_factory=CopyProgress)
    is_submitted: bool = False
    confirmed: bool | None = None
    decided: Latch = field(default_factory=Latch)

    @property
    def goes_on(self) -> bool:
        """True once the save depends on the engine alone, which commits it or reports why not."""
        return self.confirmed is True and self.copied.error is None

    def wait_name(self) -> StepName | None:
        """**Blocks** until the save is committed or has failed; returns the checkpoint, or None."""
        self.progress.settled.wait(threading.TIMEOUT_MAX)
        return self.progress.name if self.progress.is_committed else None

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
            self.progress.served.open()
            self.progress.ended.open()

    def drop_if_left(self) -> None:
        """Like `drop`, from outside of the call that requested the save: a second exception may have cut that call off.

        Does nothing if the call was not cut off.
        """
        if not self.progress.ended.is_open and (
            self.thread == threading.get_ident() or self.thread not in sys._current_frames()
        ):
            self.drop()


def name_state(handle: SaveHandle) -> str:
    """Describes the state of a save in words. Unlike the properties, this does not count as a call by the program."""
    return str(handle._progress)


def wait_served(handle: SaveHandle, timeout_seconds: float | None) -> None:
    """**Blocks.** Like `wait_ended`, but only until the next save may begin: the clean-up may go on beside it."""
    handle._wait_for(handle._progress.served, timeout_seconds, "did not end")


def find_canceller(handle: SaveHandle) -> Callable[[HoldfastError], bool] | None:
    """Returns a function that ends a save on all workers with an error, unless all agreed to commit it; None if alone.

    The function **blocks** while it queries the store of the job, and returns whether the save will never be committed.
    """
    return handle._try_cancel
