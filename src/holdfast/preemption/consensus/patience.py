"""How long one worker waits for the others to say at which step all can stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.cluster.peers import Peers
from holdfast.deadlines import LEAST_SECONDS
from holdfast.events import Event, Warned
from holdfast.preemption.consensus.coordinator import Turn
from holdfast.preemption.consensus.herald import Herald
from holdfast.preemption.grace import MARGIN_SECONDS

_WARN_SECONDS: Final = 10.0


class Patience:
    """Belongs to whichever thread waits, one at a time."""

    def __init__(self, peers: Peers, herald: Herald, emit: Callable[[Event], object]) -> None:
        """Begins with nobody waited for.

        Args:
            peers: The workers.
            herald: Who speaks with them.
            emit: Told of a wait that takes long.
        """
        self._peers = peers
        self._herald = herald
        self._emit = emit
        self._waiting_since: float | None = None
        self._is_told = False

    def find_objection(self, turn: Turn, left_seconds: float | None, *, is_behind: bool = False) -> str:
        """Why the others are not waited for any longer; an empty string if they are, or need not be: that ends a wait.

        Args:
            turn: What this worker is to do.
            left_seconds: The time that is left; None if that is not known.
            is_behind: Whether all stop at a step that this worker has not begun, and does not begin as it rests.
        """
        if turn is Turn.STOP or (turn is Turn.GO and not is_behind):
            self._waiting_since, self._is_told = None, False
            return ""
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited_seconds = now - self._waiting_since
        if turn is Turn.OUT:
            return "the other workers have taken this one for dead, and go on without it"
        if self._herald.trouble:
            return self._herald.trouble
        is_late = left_seconds is not None and left_seconds <= MARGIN_SECONDS / 2
        what = "not all workers have said {} {:.0f} s at which step they can stop"
        if is_behind:
            what = "the loop has not gone on {} {:.0f} s to the step at which all stop, which others have begun"
        if (is_late and waited_seconds >= LEAST_SECONDS) or waited_seconds > self._peers.timeout_seconds:
            return what.format("within", waited_seconds)
        if waited_seconds > _WARN_SECONDS and not self._is_told:
            self._is_told = True
            self._emit(Warned(text=what.format("for", waited_seconds)))
        return ""
