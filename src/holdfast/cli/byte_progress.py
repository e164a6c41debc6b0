"""Shows how many bytes of a long piece of work are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from holdfast.convert.exporter import ProgressWatcher


@contextmanager
def byte_progress(stream: TextIO, label: str) -> Iterator[ProgressWatcher | None]:
    """Shows a bar while the body runs, if the stream is a terminal; gone afterwards."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.theme import Theme

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    quiet = Theme({"progress.download": "none", "progress.data.speed": "none", "progress.remaining": "dim"})
    with Progress(*columns, console=Console(file=stream, theme=quiet), transient=True) as progress:
        yield _Bar(progress, progress.add_task(label, total=None))


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def expect(self, total_bytes: int) -> None:
        # It may be told anew, when what was begun has to begin again with something else.
        self._progress.reset(self._task, total=total_bytes)

    def advance(self, moved_bytes: int) -> None:
        self._progress.advance(self._task, moved_bytes)
