"""Where a verb's output goes: pleasant on a terminal, plain anywhere else, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from holdfast.cli.wording import legible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from holdfast.convert.exporter import ProgressWatcher

DOCUMENT_VERSION: Final = 1
"""Of all JSON documents. Fields may be added to them without a new version; none changes its meaning or goes."""

_LEAST_WIDTH: Final = 20

PLAIN: Final = ""
STRONG: Final = "bold"
FAINT: Final = "dim"
GOOD: Final = "green"
BAD: Final = "bold red"
NOTABLE: Final = "yellow"


@dataclass(frozen=True, slots=True)
class Styled:
    """Text with a style, which only a terminal shows."""

    text: str
    style: str = PLAIN


Words: TypeAlias = str | Styled
"""What may be said. It is made legible here, so nothing that stands in a checkpoint reaches a terminal as it is."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: What stands above it.
        is_figure: Whether it is aligned to the right.
    """

    title: str
    is_figure: bool = False


class Screen:
    """Writes lines and tables to a stream.

    On a terminal they have styles; elsewhere they are plain text, so that other programs can rely on it. Nothing is
    ever cut: a terminal that is too narrow goes on in the next line. The environment variable NO_COLOR takes the
    colours away.

    Attributes:
        is_terminal: Whether the stream is a terminal.
        has_symbols: Whether it is one that shows more than ASCII.
        width: How many characters fit on a line of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self.has_symbols = self.is_terminal and (stream.encoding or "").lower().replace("-", "") == "utf8"
        self.width = 0
        if self.is_terminal:
            from rich.console import Console

            self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
            self.width = self._console.width

    def say(self, *words: Words) -> None:
        """Writes one line."""
        if not self.is_terminal:
            self._stream.write("".join(_text(word) for word in words).rstrip() + "\n")
            return
        from rich.text import Text

        line = Text()
        for word in words:
            line.append(_text(word), _style(word) or None)
        line.rstrip()
        self._console.print(line, soft_wrap=True)

    def prose(self, *words: Words, indent: int = 0) -> None:
        """Writes a sentence; a terminal that is too narrow for it goes on in the next line with the next word."""
        if not self.is_terminal:
            self.say(" " * indent, *words)
            return
        from rich.text import Text

        line = Text.assemble(*((_text(word), _style(word)) for word in words))
        for part in line.wrap(self._console, max(self.width - indent, _LEAST_WIDTH)):
            part.rstrip()
            self._console.print(Text(" " * indent) + part, soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]], *, indent: int = 0) -> None:
        """Writes a table: a line of titles, unless all are empty, and a line for each row."""
        lines: list[Sequence[Words]] = list(rows)
        if any(column.title for column in columns):
            lines.insert(0, [Styled(column.title, FAINT) for column in columns])
        widths = [max((self._width(line[place]) for line in lines), default=0) for place in range(len(columns))]
        for line in lines:
            words: list[Words] = [" " * indent]
            for cell, width, column in zip(line, widths, columns, strict=True):
                padding = " " * (width - self._width(cell))
                words += [padding, cell, "  "] if column.is_figure else [cell, padding, "  "]
            self.say(*words)

    def _width(self, words: Words) -> int:
        if not self.is_terminal:
            return len(_text(words))
        return terminal_width(words)


def terminal_width(words: Words) -> int:
    """**Pure.** How many columns of a terminal the words take: some characters take two, some none."""
    from rich.cells import cell_len

    return cell_len(_text(words))


def write_json(stream: TextIO, verb: str, fields: dict[str, Any]) -> None:
    """Writes the JSON document of a verb, in ASCII: no terminal obeys anything in it."""
    document = {"holdfast": verb, "version": DOCUMENT_VERSION, **fields}
    json.dump(document, stream, indent=2, ensure_ascii=True, allow_nan=False)
    stream.write("\n")


def _text(words: Words) -> str:
    return legible(words.text if isinstance(words, Styled) else words)


def _style(words: Words) -> str:
    return words.style if isinstance(words, Styled) else PLAIN


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
