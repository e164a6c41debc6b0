"""What is heard while a run is made, before there is anybody who could act on it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from holdfast.preemption.grace import Heard
from holdfast.preemption.notices import Hear, Notice
from holdfast.preemption.signals import Signals
from holdfast.preemption.termination import TerminationConfig
from holdfast.save.say import say

_MOST_SIGNALS: Final = 2
"""As many as are taken later; another one has the effect that it always had."""


class EarlyNotices:
    """For `with`: keeps signals that would kill the process while others wait for it, and hands them over.

    Ctrl-C has the effect that it always had. Other sources are still asked later, and say it then.
    """

    def __init__(self, config: TerminationConfig) -> None:
        """Takes note of what to listen to.

        Args:
            config: What the user wants.
        """
        self._config = config
        self._sources: list[Signals] = []
        self._heard: list[Heard] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for source in self._config.make_sources():
                # One that is open is another run's, which acts on what it hears.
                if isinstance(source, Signals) and not source.is_open:
                    self._sources.append(source)
                    source.open(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._heard and isinstance(error, Exception):
            # As when all workers are taken away at once, and each finds the others gone. An error that lasts comes
            # again at the next start.
            self._leave(error)

    def hand_over(self, hear: Hear) -> None:
        """Listens no more, and tells what it has heard.

        Args:
            hear: Whoever acts on it.
        """
        self._close()
        heard, self._heard = self._heard, []
        for each in heard:
            left_seconds = each.notice.left_seconds
            if left_seconds is not None:
                left_seconds -= time.monotonic() - each.at
            hear(replace(each.notice, left_seconds=left_seconds))

    def _hear(self, notice: Notice) -> bool:
        if notice.by_hand or len(self._heard) >= _MOST_SIGNALS:
            return False
        self._heard.append(Heard(notice, time.monotonic()))
        return True

    def _leave(self, error: Exception) -> None:
        exit_fn, code = self._config.exit_fn, self._config.exit_code
        then = "calling exit_fn" if exit_fn else f"leaving with exit code {code}"
        say(
            f"holdfast: {self._heard[0].notice.text} while the run was made, and that has failed: "
            f"{type(error).__name__}: {error}; nothing was trained that could be lost; {then}."
        )
        if exit_fn is None:
            raise SystemExit(code) from error
        exit_fn()

    def _close(self) -> None:
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()
