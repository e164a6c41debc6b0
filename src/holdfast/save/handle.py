"""What `save` gives back: one save that goes on in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.concurrency import Latch
from holdfast.errors import DeadlineError, HoldfastError, UsageError
from holdfast.format.manifest import ALONE, Worker
from holdfast.format.names import StepName
from holdfast.save.arguments import check_wait
from holdfast.save.say import say
from holdfast.tracebacks import short_traceback

if TYPE_CHECKING:
    from holdfast.save.copy.overlap import OptimizerStepBarrier

_GRACE_SECONDS: Final = 15.0
_GRACE_SHARE: Final = 0.1
"""How much longer than the save waits for the other workers one waits for the save: that knows who is missing."""

SILENT_SECONDS: Final = 2.0
"""After how long a program that ends says what it waits for."""

_NEAR_SECONDS: Final = 120.0
"""When the end of a wait is so near that a person should know of it."""


def describe_limit(left_seconds: float) -> str:
    """**Pure.** How long a wait lasts at most, in words; empty if that is far away, and would only frighten."""
    return f", for {left_seconds:.0f} s at most" if left_seconds <= _NEAR_SECONDS else ""


def find_limit(timeout_seconds: float, worker: Worker) -> float:
    """**Pure.** How long to wait for a save; longer with other workers, for whom the save itself waits that long."""
    return timeout_seconds if worker.is_alone else timeout_seconds + _GRACE_SECONDS + _GRACE_SHARE * timeout_seconds


class SaveProgress:
    """What has become of one save: the engine sets this, and the handle reads it.

    Each field is set once, before its latch is opened; a failure opens them all but the last.

    Attributes:
        staged, named, settled, ended: The latches.
        is_copied: Whether the state has been copied.
        name: Where the checkpoint lies, or will.
        is_committed: Whether the checkpoint exists.
        skipped: Why the save was left out, or empty.
        error: Why it has failed, or None.
    """

    def __init__(self) -> None:
        self.staged, self.named, self.settled, self.ended = Latch(), Latch(), Latch(), Latch()
        self.is_copied = False
        self.name: StepName | None = None
        self.is_committed = False
        self.skipped = ""
        self.error: HoldfastError | None = None
        # The thread that makes the save, while it does.
        self.thread: int | None = None

    def mark_staged(self) -> None:
        """The state has been copied, and may be changed again."""
        self.is_copied = True
        self.staged.open()

    def mark_named(self, name: StepName) -> None:
        """Its place is known."""
        self.name = name
        self.named.open()

    def mark_committed(self) -> None:
        """The checkpoint exists."""
        self.is_committed = True
        self.settled.open()

    def mark_failed(self, error: HoldfastError) -> None:
        """It has failed."""
        self.error = error
        for latch in (self.staged, self.named, self.settled):
            latch.open()

    def mark_left_out(self, step: int, reason: str) -> None:
        """It is left out."""
        self.skipped = reason
        self.mark_failed(UsageError(f"step {step} was not saved: {reason}"))

    def mark_ended(self) -> None:
        """Nothing of it goes on any more."""
        self.ended.open()

    def __str__(self) -> str:
        states = (
            (bool(self.skipped), "left out"),
            (self.error is not None, "failed"),
            (self.is_committed, "committed"),
        )
        return next((state for holds, state in states if holds), "in flight")


class SaveHandle:
    """One save, from the moment of the call until it is committed or has failed.

    Attributes:
        step: The step that is being saved.
        replaces: Whether it was asked to take the place of a checkpoint of that step, if there is one.
        try_end_jointly: Ends it on all workers, with an error, unless they have agreed to commit it; says if it will
            never be committed. It asks the store of the job. None if there are no other workers.
    """

    def __init__(
        self,
        step: int,
        url: str,
        progress: SaveProgress,
        timeout_seconds: float,
        delivered: Callable[[HoldfastError], None],
        worker: Worker = ALONE,
        *,
        replaces: bool = False,
        hold: OptimizerStepBarrier | None = None,
    ) -> None:
        """Made by the manager.

        Args:
            step: The step.
            url: Where the run lies.
            progress: What becomes of it.
            timeout_seconds: How long a wait may take when it names no time of its own; see `find_limit`.
            delivered: Told of an error when a wait on this handle has raised it.
            worker: Which worker saves.
            replaces: Whether it may take the place of a checkpoint of that step.
            hold: Notes each call, and each wait, since training changes nothing meanwhile; None if nothing is held.
        """
        self.step = step
        self.replaces = replaces
        self.try_end_jointly: Callable[[HoldfastError], bool] | None = None
        self._process = os.getpid()
        self._url = url
        self._is_alone = worker.is_alone
        # For how long it was waited for in vain.
        self._waited_seconds = 0.0
        self._timeout_seconds = find_limit(timeout_seconds, worker)
        self._delivered = delivered
        self._progress = progress
        self._hold = hold

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step} of {self._url}: {self._progress}>"

    @property
    def path(self) -> str:
        """**Blocks.** The directory of the checkpoint, which exists as one once the save is committed.

        At a manager's first save this waits for the generation to be opened, which takes milliseconds.

        Raises:
            DeadlineError: If that takes longer than the manager's `timeout_seconds`.
            SaveFailedError: If the save failed before it had a place.
        """
        self._wait_for(self._progress.named, None, "was not given a place")
        if self._progress.name is None:
            self._raise_failure()
        assert self._progress.name is not None  # What opens the latch else is a failure.
        return f"{self._url}/{self._progress.name.directory}"

    @property
    def skipped(self) -> bool:
        """True if this save was left out because the one before was still in flight."""
        self._note_call()
        return bool(self._progress.skipped)

    @property
    def failed(self) -> bool:
        """True once the save has failed or was left out."""
        self._note_call()
        return self._progress.error is not None

    @property
    def stands(self) -> bool:
        """True if a save of that step has to replace a checkpoint: this one, or the one that it was to replace."""
        return self.replaces or not self.failed

    @property
    def ended(self) -> bool:
        """True once the save has failed, or is committed and what it replaces has been removed."""
        self._note_call()
        return self._progress.ended.is_open

    @property
    def placed(self) -> bool:
        """True once it is known where the checkpoint will lie, in a generation of this job."""
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
            SaveFailedError: If the save failed before.
        """
        self._wait_for(self._progress.staged, timeout_seconds, "was not staged")
        if not self._progress.is_copied:
            self._raise_failure()

    @short_traceback
    def wait_committed(self, timeout_seconds: float | None = None) -> str:
        """**Blocks.** Waits until the checkpoint is durable and would be found by a restart.

        Args:
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`, and a little more in a job of
                several workers, so that the save can tell who is missing.

        Returns:
            The directory of the checkpoint.

        Raises:
            DeadlineError: If it takes longer; the save goes on.
            SaveFailedError: If the save failed. The manager does not raise it again.
        """
        self._wait_for(self._progress.settled, timeout_seconds, "was not committed")
        self._raise_failure()
        return self.path

    @short_traceback
    def wait_ended(self, timeout_seconds: float | None = None, *, at_exit: bool = False) -> None:
        """**Blocks.** Waits until nothing of the save goes on any more, whatever came of it; raises no failure.

        Args:
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`.
            at_exit: True for the last wait of a program. After a moment it says on standard error what it waits for,
                and earlier waits that were in vain count: a program on a stuck disk waits once.

        Raises:
            DeadlineError: If it takes longer.
        """
        if not at_exit:
            self._wait_for(self._progress.ended, timeout_seconds, "did not end")
            return
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        left_seconds = max(limit_seconds - (self._waited_seconds if timeout_seconds is None else 0.0), 0.0)
        if left_seconds > SILENT_SECONDS and not self._wait(self._progress.ended, SILENT_SECONDS):
            left_seconds -= SILENT_SECONDS
            say(
                f"holdfast: waiting for the save of step {self.step} into {self._url}, which is being written"
                f"{describe_limit(left_seconds)}; Ctrl-C ends the wait."
            )
        self._wait_for(self._progress.ended, left_seconds, "did not end", limit_seconds)

    def _note_call(self) -> None:
        if self._hold is not None:
            self._hold.note_call()

    def _raise_failure(self) -> None:
        """Raises the failure if there is one; who sees it here need not be told again."""
        error = self._progress.error
        if error is not None and not self._progress.is_committed:
            self._delivered(error)
            raise error

    def _wait_for(
        self, latch: Latch, timeout_seconds: float | None, miss: str, told_seconds: float | None = None
    ) -> None:
        limit_seconds = self._timeout_seconds
        if timeout_seconds is not None:
            limit_seconds = check_wait(timeout_seconds)
        if os.getpid() != self._process and not latch.is_open:
            raise UsageError(
                f"the save of step {self.step} into {self._url} is made by process {self._process}, and this is a "
                "child of it, which would not hear of its end",
                hint="Wait in the process that saves.",
            )
        if self._progress.thread == threading.get_ident() and not latch.is_open:
            raise UsageError(
                f"the save of step {self.step} waits for a sink, which waits for that save",
                hint="In a sink only note the event, and wait in the thread that trains.",
            )
        if not self._wait(latch, limit_seconds):
            self._waited_seconds += limit_seconds
            told_seconds = limit_seconds if told_seconds is None else told_seconds
            also = "" if self._is_alone else " here or with another worker, or whether one has not come to this save"
            raise DeadlineError(
                f"the save of step {self.step} into {self._url} {miss} within {told_seconds:g} s",
                hint=f"The save goes on. Wait again, or find out why the storage is slow{also}.",
            )

    def _wait(self, latch: Latch, timeout_seconds: float) -> bool:
        if self._hold is None:
            return latch.wait(timeout_seconds)
        return self._hold.wait_for(latch, timeout_seconds)


def name_state(handle: SaveHandle) -> str:
    """What has become of a save, in words. Unlike the properties, this is no call of the program's."""
    return str(handle._progress)
