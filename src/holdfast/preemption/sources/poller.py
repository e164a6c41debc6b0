"""Listens to all sources at once, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from holdfast.events import Event, Warned
from holdfast.preemption.sources.protocol import Hear, NoticeSource
from holdfast.process.latch import Latch, start_thread

_LONGEST_PAUSE_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0


class SourcePoller:
    """Opens sources, polls those that need polling, and closes them.

    A source that raises is polled again at growing intervals, with one warning, and does not affect the others. Notices
    are passed on from the thread in which they arrive, which may be inside a signal handler.

    Attributes:
        sources: The sources.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        hear: Hear,
        emit: Callable[[Event], object],
        *,
        pause_seconds: float = 1.0,
    ) -> None:
        self.sources = tuple(sources)
        self._hear = hear
        self._emit = emit
        self._pause_seconds = pause_seconds
        self._opened: list[NoticeSource] = []
        self._ended: list[Latch] = []
        self._closing = Latch()

    def open(self) -> None:
        """Starts listening; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here. Then none listens.
        """
        try:
            for source in self.sources:
                self._opened.append(source)
                source.open(self._hear)
        except BaseException:
            self.close()
            raise
        for source in self.sources:
            if source.interval_seconds is not None:
                name = f"holdfast-notices-{source.name.replace(' ', '-')}"
                self._ended.append(start_thread(partial(self._look_on, source), name))

    def note_leaving(self) -> None:
        """**Blocks.** Notifies the sources that everything is saved and the process exits."""
        for source in self._opened:
            try:
                source.note_leaving()
            except Exception as error:  # noqa: BLE001  A source can be of the user's, and leaving goes on.
                self._emit(Warned(text=f"{source.name} could not be notified that the job is leaving: {_say(error)}"))

    def close(self) -> None:
        """**Blocks** for a moment at most: a poll that does not end is abandoned."""
        self._closing.open()
        opened, self._opened = self._opened, []
        for source in reversed(opened):
            try:
                source.close()
            except Exception as error:  # noqa: BLE001  As above.
                self._emit(Warned(text=f"{source.name} could not be closed: {_say(error)}"))
        ended, self._ended = self._ended, []
        for latch in ended:
            latch.wait(_END_SECONDS)

    def _look_on(self, source: NoticeSource) -> None:
        pause_seconds = self._pause_seconds
        is_warned = False
        while not self._closing.is_open:
            try:
                for notice in source.look():
                    self._hear(notice)
                wait_seconds = source.interval_seconds or 0.0
                if not wait_seconds >= 0:
                    raise ValueError(f"interval_seconds={wait_seconds!r} is not a number of seconds")
                self._closing.wait(wait_seconds)
                pause_seconds = self._pause_seconds
            except BaseException as error:  # noqa: BLE001  A source can be of the user's, and this thread is ours.
                wait_seconds = pause_seconds
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
                # One that is closed meanwhile fails for that reason.
                if not is_warned and not self._closing.is_open:
                    is_warned = True
                    text = f"{source.name} cannot be queried for notices; it will be tried again: {_say(error)}"
                    self._emit(Warned(text=text))
                self._closing.wait(wait_seconds)


def _say(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}" if str(error) else name
    except Exception:  # noqa: BLE001  So can the error.
        return name
