"""What `save` gives back: one save that goes on in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from holdfast.errors import DeadlineError, HoldfastError, UsageError
from holdfast.format.names import StepName
from holdfast.format.workers import ALONE, Worker
from holdfast.gate import Gate
from holdfast.save.arguments import check_wait
from holdfast.save.progress import Sign
from holdfast.save.say import say
from holdfast.tracebacks import short_traceback

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


class SaveHandle:
    """One save, from the moment of the call until it is committed or has failed.

    Attributes:
        step: The step that is being saved.
        replaces: Whether it was asked to take the place of a checkpoint of that step, if there is one.
        is_handed: Whether the background has been given it, or is to find it at once.
        sign: Given whenever something is asked of this; None if nobody waits for it.
        end_if_left: Ends it if the call that begins it was interrupted; None once that has begun it.
        try_end_jointly: Ends it on all workers, with an error, unless they have agreed to commit it; says if it will
            never be committed. It asks the store of the job. None if there are no other workers.
    """

    def __init__(
        self,
        step: int,
        url: str,
        timeout_seconds: float,
        delivered: Callable[[HoldfastError], None],
        worker: Worker = ALONE,
        *,
        replaces: bool = False,
    ) -> None:
        """Made by the manager.

        Args:
            step: The step.
            url: Where the run lies.
            timeout_seconds: How long a wait may take when it names no time of its own; see `find_limit`.
            delivered: Told of an error when a wait on this handle has raised it.
            worker: Which worker saves.
            replaces: Whether it may take the place of a checkpoint of that step.
        """
        self.step = step
        self.replaces = replaces
        self.is_handed = False
        self.sign: Sign | None = None
        self.end_if_left: Callable[[], None] | None = None
        self.try_end_jointly: Callable[[HoldfastError], bool] | None = None
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._url = url
        self._is_alone = worker.is_alone
        # For how long it was waited for in vain.
        self._waited_seconds = 0.0
        self._timeout_seconds = find_limit(timeout_seconds, worker)
        self._delivered = delivered
        # Guards whether the save goes on or is called off, whichever comes first, and the gate that two threads open.
        self._lock = threading.Lock()
        self._begun = self._taken = False
        self._cancelled = False
        # Each of these is set once, before its gate is opened; a failure opens them all but the last.
        self._skipped = ""
        self._copied = False
        self._name: StepName | None = None
        self._is_committed = False
        self._error: HoldfastError | None = None
        self._staged = Gate()
        self._named = Gate()
        self._settled = Gate()
        self._ended = Gate()

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step} of {self._url}: {name_state(self)}>"

    @property
    def path(self) -> str:
        """**Blocks.** The directory of the checkpoint, which exists as one once the save is committed.

        At a manager's first save this waits for the generation to be opened, which takes milliseconds.

        Raises:
            DeadlineError: If that takes longer than the manager's `timeout_seconds`.
            SaveFailedError: If the save failed before it had a place.
        """
        self._wait_for(self._named, None, "was not given a place")
        if self._name is None:
            self._raise_failure()
        assert self._name is not None  # What opens the gate else is a failure.
        return f"{self._url}/{self._name.directory}"

    @property
    def skipped(self) -> bool:
        """True if this save was left out because the one before was still in flight."""
        self._give_sign()
        return bool(self._skipped)

    @property
    def begun(self) -> bool:
        """True once the background has the save, which ends one way or the other; False again if it was called off."""
        return self.is_handed and (not self._cancelled or (self._taken and not self._ended.is_open))

    @property
    def is_beginning(self) -> bool:
        """True until the call that begins it has done so or ended it, which an interrupt may cut off."""
        return self.end_if_left is not None

    @property
    def called_off(self) -> bool:
        """True if the save will never be, since the call that asked for it was interrupted."""
        return self._cancelled

    @property
    def failed(self) -> bool:
        """True once the save has failed or was left out."""
        self._give_sign()
        return self._error is not None

    @property
    def stands(self) -> bool:
        """True if a save of that step has to replace a checkpoint: this one, or the one that it was to replace."""
        return self.replaces or not self.failed

    @property
    def ended(self) -> bool:
        """True once the save has failed, or is committed and what it replaces has been removed."""
        self._give_sign()
        return self._ended.is_open

    @property
    def placed(self) -> bool:
        """True once it is known where the checkpoint will lie, in a generation of this job."""
        return self._name is not None

    @property
    def committed(self) -> bool:
        """True once the checkpoint exists."""
        self._give_sign()
        return self._is_committed

    @short_traceback
    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until the state has been copied and may be changed again.

        Raises:
            DeadlineError: If it takes longer.
            SaveFailedError: If the save failed before.
        """
        self._wait_for(self._staged, timeout_seconds, "was not staged")
        if not self._copied:
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
        self._wait_for(self._settled, timeout_seconds, "was not committed")
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
            self._wait_for(self._ended, timeout_seconds, "did not end")
            return
        self._give_sign()
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        left_seconds = max(limit_seconds - (self._waited_seconds if timeout_seconds is None else 0.0), 0.0)
        if left_seconds > SILENT_SECONDS and not self._ended.wait(SILENT_SECONDS):
            left_seconds -= SILENT_SECONDS
            say(
                f"holdfast: waiting for the save of step {self.step} into {self._url}, which is being written"
                f"{describe_limit(left_seconds)}; Ctrl-C ends the wait."
            )
        self._wait_for(self._ended, left_seconds, "did not end", limit_seconds)

    def try_begin(self, *, ahead: bool = False) -> bool:
        """Called by the background: True if the save is now its own, False if it was called off.

        Args:
            ahead: Whether only to write what is still being copied, so that it may still be called off.
        """
        with self._lock:
            if self._cancelled:
                return False
            self._taken, self._begun = True, not ahead
            return True

    def try_cancel(self) -> bool:
        """Called by `save` when it is interrupted: True if the save will never begin, False if it goes on."""
        with self._lock:
            self._cancelled = not self._begun
            if self._cancelled and not self._taken:
                self._ended.open()
            return self._cancelled

    def mark_staged(self) -> None:
        """Called by the save when the copy is complete."""
        with self._lock:
            self._copied = True
            self._staged.open()

    def mark_named(self, name: StepName) -> None:
        """Called by the save when its place is known."""
        self._name = name
        self._named.open()

    def mark_committed(self) -> None:
        """Called by the save when the checkpoint exists."""
        self._is_committed = True
        self._settled.open()

    def mark_failed(self, error: HoldfastError) -> None:
        """Called by the save when it has failed."""
        self._error = error
        with self._lock:
            for gate in (self._staged, self._named, self._settled):
                gate.open()

    def mark_ended(self) -> None:
        """Called by the save as its last act."""
        self._ended.open()

    def mark_skipped(self, reason: str) -> None:
        """Called by the manager in place of everything else."""
        self.mark_left_out(reason)
        self._ended.open()

    def mark_left_out(self, reason: str) -> None:
        """Called by the save when all workers leave it out."""
        self._skipped = reason
        self.mark_failed(UsageError(f"step {self.step} was not saved: {reason}"))

    def _give_sign(self) -> None:
        if self.end_if_left is not None and self._thread == threading.get_ident():
            # The thread that began it asks for something else: an interrupt has cut off even what ends it.
            self.end_if_left()
        if self.sign is not None:
            self.sign.give()

    def _raise_failure(self) -> None:
        """Raises the failure if there is one; who sees it here need not be told again."""
        error = self._error
        if error is not None and not self._is_committed:
            self._delivered(error)
            raise error

    def _wait_for(
        self, gate: Gate, timeout_seconds: float | None, miss: str, told_seconds: float | None = None
    ) -> None:
        self._give_sign()
        limit_seconds = self._timeout_seconds
        if timeout_seconds is not None:
            limit_seconds = check_wait(timeout_seconds)
        if os.getpid() != self._process and not gate.is_open:
            raise UsageError(
                f"the save of step {self.step} into {self._url} is made by process {self._process}, and this is a "
                "child of it, which would not hear of its end",
                hint="Wait in the process that saves.",
            )
        if not gate.wait(limit_seconds):
            self._waited_seconds += limit_seconds
            told_seconds = limit_seconds if told_seconds is None else told_seconds
            also = "" if self._is_alone else " here or with another worker, or whether one has not come to this save"
            raise DeadlineError(
                f"the save of step {self.step} into {self._url} {miss} within {told_seconds:g} s",
                hint=f"The save goes on. Wait again, or find out why the storage is slow{also}.",
            )


def name_state(handle: SaveHandle) -> str:
    """What has become of a save, in words. Unlike the properties, this is no sign of the program's."""
    states = (
        (handle._cancelled, "called off"),
        (bool(handle._skipped), "left out"),
        (handle._error is not None, "failed"),
        (handle._is_committed, "committed"),
    )
    return next((state for holds, state in states if holds), "in flight")
