"""The state of a loop that is paused, and the save of it by another thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.errors import HoldfastError, SaveFailedError, StepExistsError
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark

ATTEMPTS: Final = 2
"""How often the last save is attempted: a first failure may have been a temporary one of the storage."""


class PausedState(msgspec.Struct):
    """A pause between steps: evaluation, a wait for data, and the time before and after the loop.

    Attributes:
        step: How many steps are complete; None before that is known.
        mark: Their state, to be saved if needed; None if all is saved, or nothing was trained.
        saved: The save of that step, if one is in progress or done.
        changed: Why the state cannot be saved: the objects that have changed.
        is_anew: True if the step is to be saved again: its save may be incomplete.
        has_saved: True if it was saved in this pause.
    """

    step: int | None
    mark: Mark | None = None
    saved: SaveHandle | None = None
    changed: str = ""
    is_anew: bool = False
    has_saved: bool = False

    def renew(self, provisional: int | None) -> None:
        """Marks the state to be saved again if there is a save of that step that does not count."""
        self.is_anew |= self.saved is not None and self.step == provisional

    def save(self) -> str:
        """**Blocks** while the state is copied, unless it is saved already.

        Returns the error; an empty string if there is none.
        """
        if self.mark is None or self.step is None or self._is_safe():
            return ""
        try:
            if changed := self.mark.changed:
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                self.changed = f"{', '.join(changed[:3])}{more} changed since the step ended"
            if self.changed:
                return self.changed
            self.saved = self.mark.save(self.step, replace=self.saved is not None and self.saved.must_be_replaced)
        except StepExistsError:
            return ""  # The user has saved it, and it is committed.
        except SaveFailedError as failure:
            # Of an earlier step; that was an event. This one goes on.
            if failure.next_save is None:
                return failure.message
            self.saved = failure.next_save
        except HoldfastError as failure:
            return failure.message
        self.is_anew, self.has_saved = False, True
        return ""

    def save_surely(self, wait: Callable[[SaveHandle, float | None], None], end_at: float | None) -> str:
        """**Blocks.** Saves, and waits with `wait` until that is committed. Returns the error, as `save` does.

        The process must be gone at `end_at`, by the monotonic clock.
        """
        error = ""
        for _ in range(ATTEMPTS):
            try:
                if self.is_anew and self.saved is not None:
                    with suppress(SaveFailedError):
                        # The next one waits for it, and knows no moment until when.
                        wait(self.saved, end_at)
                error = self.save()
                if not error and self.saved is not None:
                    wait(self.saved, end_at)
            except HoldfastError as failure:
                error = failure.message
            if not error:
                break
        return error

    def _is_safe(self) -> bool:
        return self.saved is not None and not self.saved.failed and not self.is_anew
