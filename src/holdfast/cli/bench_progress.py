"""Shows how far a bench has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from holdfast.bench.measure import Watcher


@contextmanager
def bench_progress(stream: TextIO) -> Iterator[Watcher]:
    """Shows a bar while the body runs, if the stream is a terminal; gone afterwards."""
    if not stream.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.theme import Theme

    columns = (
        SpinnerColumn(style="cyan"),
        BarColumn(bar_width=24, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    quiet = Theme({"progress.elapsed": "dim"})
    with Progress(*columns, console=Console(file=stream, theme=quiet), transient=True) as progress:
        yield _Bar(progress, progress.add_task("", total=None))


class _Silent:
    def expect(self, total_bytes: int) -> None:
        pass

    def tell(self, label: str) -> None:
        pass

    def advance(self, moved_bytes: int) -> None:
        pass


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._is_expected = False

    def expect(self, total_bytes: int) -> None:
        self._progress.update(self._task, total=total_bytes)
        self._is_expected = True

    def tell(self, label: str) -> None:
        self._progress.update(self._task, description=label)

    def advance(self, moved_bytes: int) -> None:
        if self._is_expected:
            self._progress.advance(self._task, moved_bytes)
