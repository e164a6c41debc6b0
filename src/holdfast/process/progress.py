"""Shows how far long work is: on a terminal as a bar, elsewhere as a line from time to time."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self

from holdfast.numbers import size_text
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import inform

if TYPE_CHECKING:
    from rich.progress import Progress

_SILENT_SECONDS: Final = 2.0
_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 10.0
"""After what time the first of it is shown, and then how often."""


_BAR_CHARACTERS: Final = 40
_FIGURES_CHARACTERS: Final = 54
"""The largest width of the bar, and that of the text beside it."""


class Bar:
    """**Thread-safe.** Shows how far something is; a `ProgressWatcher`. Without a terminal it does nothing."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def label(self, text: str) -> None:
        """Says what is being done."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text, refresh=True)

    def expect(self, total_bytes: int) -> None:
        """Starts, or restarts, the bar with this many bytes to do."""
        if self._progress is not None:
            self._progress.reset(self._progress.task_ids[0], total=total_bytes)

    def advance(self, moved_bytes: int) -> None:
        """Adds bytes that are done."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0], moved_bytes)


@contextmanager
def show_progress(label: str, *, counts_bytes: bool = True, unit: str = "") -> Iterator[Bar]:
    """Shows a bar, of bytes or of another unit, or a spinner, while the body runs, if the error stream is a terminal;
    gone afterwards.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.theme import Theme

    # The bar alone becomes shorter on a narrow terminal.
    whole = Column(no_wrap=True)
    text = TextColumn("{task.description}", markup=False, table_column=whole)
    quiet = Theme({"progress.download": "none", "progress.data.speed": "none", "progress.remaining": "dim"})
    console = Console(file=sys.stderr, theme=quiet, color_system=None if os.environ.get("NO_COLOR") else "auto")
    width = max(min(_BAR_CHARACTERS, console.width - _FIGURES_CHARACTERS), 1)
    bar = BarColumn(width, complete_style="cyan", finished_style="cyan", pulse_style="cyan")
    figures: tuple[ProgressColumn, ...] = (DownloadColumn(table_column=whole), TransferSpeedColumn(table_column=whole))
    if unit:
        figures = (MofNCompleteColumn(table_column=whole), TextColumn(unit, table_column=whole))
    columns = (text, bar, *figures, TimeRemainingColumn())
    shown = columns if counts_bytes else (SpinnerColumn(style="cyan"), text)
    with Progress(*shown, console=console, transient=True) as progress:
        progress.add_task(label, total=None)
        yield Bar(progress)


class LongRead:
    """**Thread-safe.** Shows how far a read is that takes longer than a moment. Use it with `with`."""

    def __init__(self, label: str, measure: Callable[[], int], unit: str = "") -> None:
        """Shows nothing yet; `measure` returns the bytes to read, or what `unit` says, once that takes long."""
        self._label, self._measure, self._unit = label, measure, unit
        # Guards these two; and, held by one thread at most, what is shown: the others read on meanwhile.
        self._lock, self._showing = threading.Lock(), threading.Lock()
        self._done_bytes = self._shown_bytes = 0
        self._total_bytes = 0
        self._next_at = time.monotonic() + _SILENT_SECONDS
        self._bar: Bar | None = None
        self._open = ExitStack()

    def advance(self, moved_bytes: int) -> None:
        """Adds bytes that were read."""
        with self._lock:
            self._done_bytes += moved_bytes
        if PULSE.board is not None:
            PULSE.board.note_beat()
        if time.monotonic() >= self._next_at and self._showing.acquire(blocking=False):
            try:
                with suppress(Exception):  # A terminal, or the log, may be gone.
                    self._show()
            finally:
                self._showing.release()

    def _show(self) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._next_at = math.inf  # If this fails, it is not tried again.
        if self._bar is None:
            self._total_bytes = self._measure()
            self._bar = self._open.enter_context(show_progress(self._label, unit=self._unit))
            self._bar.expect(self._total_bytes)
        self._bar.advance(self._done_bytes - self._shown_bytes)
        self._shown_bytes = self._done_bytes
        if not is_terminal:
            done, total = self._done_bytes, self._total_bytes
            of_total = f"{done} of {total} {self._unit}" if self._unit else f"{size_text(done)} of {size_text(total)}"
            inform(f"{self._label}: {of_total} read")
        self._next_at = time.monotonic() + (_BAR_SECONDS if is_terminal else _LINE_SECONDS)

    def expect(self, total_bytes: int) -> None:
        """Sets the bytes to do, for work that knows them only when it has begun."""
        self._measure = lambda: total_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._next_at = math.inf
        with suppress(Exception):
            self._open.close()
