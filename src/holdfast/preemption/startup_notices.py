"""What is heard while a run is made, before there is anybody who could act on it."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from holdfast.concurrency import Latch
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.grace import Heard
from holdfast.preemption.sources.protocol import Hear, Notice
from holdfast.preemption.sources.signals import Signals
from holdfast.save.say import say

_MOST_SIGNALS: Final = 2
"""As many as are taken later; another one has the effect that it always had."""

_WAIT_SECONDS: Final = 2.0
"""How long a run may take to be made after a signal, other workers included. Then the job leaves without it."""


class EarlyNotices:
    """For `with`: keeps signals that would kill the process while others wait for it, and hands them over.

    If the run is not made soon after a signal, the process leaves: another worker may have failed before it came, and a
    launcher waits for this one. Ctrl-C has the effect that it always had. Other sources are still asked later.
    """

    def __init__(self, config: TerminationConfig) -> None:
        """Takes note of what to listen to.

        Args:
            config: What the user wants.
        """
        self._config = config
        self._sources: list[Signals] = []
        self._heard: list[Heard] = []
        # Guards that the signal is sent once more only while this listens.
        self._lock = threading.Lock()
        self._closed = Latch()
        self._is_late = False

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
        if self._is_late and self._heard:
            self._is_late = False
            self._end(
                f"{self._heard[0].notice.text} while the run was made, and it is not made after {_WAIT_SECONDS:g} s"
            )
            return True
        if notice.by_hand or len(self._heard) >= _MOST_SIGNALS:
            return False
        self._heard.append(Heard(notice, time.monotonic()))
        if len(self._heard) == 1:
            # Not a `Thread`: this is a signal handler, which may have come while one starts.
            with suppress(RuntimeError):
                _thread.start_new_thread(self._hurry, ())
        return True

    def _hurry(self) -> None:
        """Sends a signal once more if the run is late, which ends what the main thread waits for."""
        self._closed.wait(_WAIT_SECONDS)
        with self._lock:
            handled = [number for source in self._sources for number in source.numbers if source.handles(number)]
            if handled:
                self._is_late = True
                signal.pthread_kill(threading.main_thread().ident or 0, handled[0])

    def _leave(self, error: Exception) -> None:
        found = f"{type(error).__name__}: {error}"
        self._end(f"{self._heard[0].notice.text} while the run was made, and that has failed: {found}", error)

    def _end(self, text: str, error: Exception | None = None) -> None:
        exit_fn, code = self._config.exit_fn, self._config.exit_code
        then = "calling exit_fn" if exit_fn else f"leaving with exit code {code}"
        say(f"holdfast: {text}; nothing was trained that could be lost; {then}.")
        if exit_fn is None:
            raise SystemExit(code) from error
        exit_fn()

    def _close(self) -> None:
        self._closed.open()
        with self._lock:
            sources, self._sources = self._sources, []
        for source in sources:
            source.close()
