"""One save on its way from the training thread, which asks for it, to the engine's thread, which makes it."""

from __future__ import annotations

import sys
import threading

from holdfast.concurrency import Latch
from holdfast.errors import OutOfMemoryError
from holdfast.save.copy.image import Staging
from holdfast.save.handle import SaveHandle, SaveProgress
from holdfast.save.records import CopyProgress, SaveOrder


class SaveRequest:
    """What the two threads have between them. All else of a save belongs to one of them.

    The training thread submits it, waits until the state is copied, and confirms. That confirmation is one store, and
    nothing is committed before it: so one exception at any point of `save` (Ctrl-C, say) leaves the save confirmed, or
    dropped, and never half of both.

    Attributes:
        order: What is asked for.
        progress: What has become of it.
        handle: How its user sees that.
        thread: The thread that asks.
        staging: What is to be copied; or the error, where there was no memory to copy it into. None before that is
            known, and when the save has ended.
        copied: How far the copy is that training waits for.
        is_submitted: Whether the engine has it, and so ends it.
        confirmed: Whether it is to be committed; None before that is decided.
    """

    def __init__(self, order: SaveOrder, progress: SaveProgress, handle: SaveHandle) -> None:
        self.order = order
        self.progress = progress
        self.handle = handle
        self.thread = threading.get_ident()
        self.staging: Staging | OutOfMemoryError | None = None
        self.copied = CopyProgress()
        self.is_submitted = False
        self.confirmed: bool | None = None
        self._decided = Latch()

    def take(self, staging: Staging | OutOfMemoryError) -> None:
        """Notes what is to be copied."""
        if isinstance(staging, Staging):
            self.copied = staging.snapshot.copied
        self.staging = staging

    @property
    def goes_on(self) -> bool:
        """Whether the save is the engine's alone by now, which commits it or says why not."""
        return self.confirmed is True and self.copied.error is None

    def wait_copied(self) -> None:
        """**Blocks** until training may go on.

        Raises:
            BaseException: What the copy has failed with.
        """
        self.copied.ended.wait(threading.TIMEOUT_MAX)
        if self.copied.error is not None:
            raise self.copied.error

    def decide(self, *, confirmed: bool) -> None:
        """Says whether the save is to be committed: the first answer counts. The thread that asks for it does this."""
        if self.confirmed is None:
            self.confirmed = confirmed
        self._decided.open()

    def wait_decided(self) -> bool:
        """**Blocks** until that is said, and gives what was said."""
        self._decided.wait(threading.TIMEOUT_MAX)
        return self.confirmed is True

    def drop(self) -> None:
        """The save will never be, unless it was confirmed before. This may be interrupted, and done again."""
        self.copied.call_off()
        self.decide(confirmed=False)
        if not self.is_submitted:
            self.progress.mark_ended()

    def drop_if_left(self) -> None:
        """As `drop`, from outside the call that asks for the save: a second exception may have cut that off.

        Harmless where it has not.
        """
        if not self.progress.ended.is_open and (
            self.thread == threading.get_ident() or self.thread not in sys._current_frames()
        ):
            self.drop()

    def forget(self) -> None:
        """Lets go of the arrays: the save has ended."""
        staging, self.staging = self.staging, None
        if isinstance(staging, Staging):
            staging.forget()
