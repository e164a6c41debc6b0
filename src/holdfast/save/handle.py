"""What `save` gives back: one save that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import DeadlineError, HoldfastError, UsageError
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName


class SaveHandle:
    """One save, from the moment of the call until it is committed or has failed.

    Attributes:
        step: The step that is being saved.
    """

    def __init__(self, step: int, url: str, timeout_seconds: float, delivered: Callable[[HoldfastError], None]) -> None:
        """Made by the manager.

        Args:
            step: The step.
            url: Where the run lies.
            timeout_seconds: How long a wait may take when it names no time of its own.
            delivered: Told of an error when a wait on this handle has raised it.
        """
        self.step = step
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._delivered = delivered
        self._condition = threading.Condition()
        # The condition guards these; each is set once.
        self._skipped = ""
        self._begun = False
        self._cancelled = False
        self._staged = False
        self._ended = False
        self._name: StepName | None = None
        self._manifest: Manifest | None = None
        self._error: HoldfastError | None = None

    def __repr__(self) -> str:
        with self._condition:
            states = (
                (bool(self._skipped), "left out"),
                (self._error is not None, "failed"),
                (self._manifest is not None, "committed"),
            )
            state = next((state for holds, state in states if holds), "in flight")
        return f"<save of step {self.step}: {state}>"

    @property
    def path(self) -> str:
        """**Blocks.** The directory of the checkpoint, which exists as one once the save is committed.

        At a manager's first save this waits for the generation to be opened, which takes milliseconds.

        Raises:
            DeadlineError: If that takes longer than the manager's `timeout_seconds`.
            SaveFailedError: If the save failed before it had a place.
        """
        self._wait(lambda: self._name is not None, None, "be given a place")
        assert self._name is not None
        return f"{self._url}/{self._name.directory}"

    @property
    def skipped(self) -> bool:
        """True if this save was left out because the one before was still in flight."""
        with self._condition:
            return bool(self._skipped)

    @property
    def begun(self) -> bool:
        """True once the background has the save; from then on it ends one way or the other."""
        with self._condition:
            return self._begun

    @property
    def failed(self) -> bool:
        """True once the save has failed or was left out."""
        with self._condition:
            return self._error is not None

    @property
    def ended(self) -> bool:
        """True once the save has failed, or is committed and what it replaces has been removed."""
        with self._condition:
            return self._ended

    @property
    def committed(self) -> bool:
        """True once the checkpoint exists."""
        with self._condition:
            return self._manifest is not None

    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until the state has been copied and may be changed again.

        Raises:
            DeadlineError: If it takes longer.
            SaveFailedError: If the save failed before.
        """
        self._wait(lambda: self._staged, timeout_seconds, "be staged")

    def wait_committed(self, timeout_seconds: float | None = None) -> str:
        """**Blocks.** Waits until the checkpoint is durable and would be found by a restart.

        Args:
            timeout_seconds: How long to wait; None for the manager's `timeout_seconds`.

        Returns:
            The directory of the checkpoint.

        Raises:
            DeadlineError: If it takes longer; the save goes on.
            SaveFailedError: If the save failed. The manager does not raise it again.
        """
        self._wait(lambda: self._manifest is not None, timeout_seconds, "be committed")
        return self.path

    def wait_ended(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until nothing of the save goes on any more, whatever came of it; raises no failure.

        Raises:
            DeadlineError: If it takes longer.
        """
        with self._condition:
            self._wait_for(lambda: self._ended, timeout_seconds, "end")

    def try_begin(self) -> bool:
        """Called by the background: True if the save is now its own, False if it was called off."""
        with self._condition:
            self._begun = not self._cancelled
            return self._begun

    def try_cancel(self) -> bool:
        """Called by `save` when it is interrupted: True if the save will never begin, False if it goes on."""
        with self._condition:
            self._cancelled = not self._begun
            return self._cancelled

    def mark_staged(self) -> None:
        """Called by the save when the copy is complete."""
        with self._condition:
            self._staged = True
            self._condition.notify_all()

    def mark_named(self, name: StepName) -> None:
        """Called by the save when its place is known."""
        with self._condition:
            self._name = name
            self._condition.notify_all()

    def mark_committed(self, manifest: Manifest) -> None:
        """Called by the save when the checkpoint exists."""
        with self._condition:
            self._manifest = manifest
            self._condition.notify_all()

    def mark_failed(self, error: HoldfastError) -> None:
        """Called by the save when it has failed."""
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def mark_ended(self) -> None:
        """Called by the save as its last act."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def mark_skipped(self, reason: str) -> None:
        """Called by the manager in place of everything else."""
        with self._condition:
            self._skipped = reason
            self._error = UsageError(f"step {self.step} was not saved: {reason}")
            self._ended = True

    def _wait(self, reached: Callable[[], bool], timeout_seconds: float | None, goal: str) -> None:
        with self._condition:
            self._wait_for(lambda: reached() or self._error is not None, timeout_seconds, goal)
            error = None if reached() else self._error
        if error is not None:
            self._delivered(error)
            raise error

    def _wait_for(self, reached: Callable[[], bool], timeout_seconds: float | None, goal: str) -> None:
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if not self._condition.wait_for(reached, limit_seconds):
            raise DeadlineError(
                f"the save of step {self.step} into {self._url} did not {goal} within {limit_seconds:g} s",
                hint="The save goes on. Wait again, or find out why the storage is slow.",
            )
