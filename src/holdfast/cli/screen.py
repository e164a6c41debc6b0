"""Where a verb's output goes: pleasant on a terminal, plain anywhere else, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO, TypeAlias

from holdfast.cli.wording import legible

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
        folds: Whether long text goes on in a further line of the same cell, on a terminal that is too narrow.
    """

    title: str
    is_figure: bool = False
    folds: bool = False


class Screen:
    """Writes lines and tables to a stream.

    On a terminal they have styles and fit its width; elsewhere they are plain text that is never cut, so that other
    programs can rely on it. The environment variable NO_COLOR takes the colours away.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self.has_symbols = self.is_terminal and (stream.encoding or "").lower().replace("-", "") == "utf8"
        self.width = 0
        if self.is_terminal:
            from rich.console import Console

            # What Python's own streams cannot encode they replace; a console would raise.
            self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
            self.width = self._console.width

    def say(self, *words: Words) -> None:
        """Writes one line."""
        if not self.is_terminal:
            self._write("".join(_text(word) for word in words))
            return
        from rich.text import Text

        line = Text()
        for word in words:
            line.append(_text(word), _style(word) or None)
        self._console.print(line, soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]], *, indent: int = 0) -> None:
        """Writes a table with a line for each row and, unless all titles are empty, a line of titles."""
        if self.is_terminal:
            self._styled_table(columns, rows, indent)
        else:
            self._plain_table(columns, rows, indent)

    def _styled_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]], indent: int) -> None:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style=FAINT,
            show_header=any(column.title for column in columns),
        )
        for column in columns:
            table.add_column(
                Text(_text(column.title)),
                justify="right" if column.is_figure else "left",
                no_wrap=not column.folds,
                overflow="fold" if column.folds else "ellipsis",
            )
        for row in rows:
            table.add_row(*(Text(_text(cell), _style(cell)) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, indent), expand=False))

    def _plain_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]], indent: int) -> None:
        lines = [[_text(cell) for cell in row] for row in rows]
        if any(column.title for column in columns):
            lines.insert(0, [_text(column.title) for column in columns])
        widths = [max((len(line[place]) for line in lines), default=0) for place in range(len(columns))]
        for line in lines:
            cells = [
                cell.rjust(width) if column.is_figure else cell.ljust(width)
                for cell, width, column in zip(line, widths, columns, strict=True)
            ]
            self._write((" " * indent + "  ".join(cells)).rstrip())

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")


def write_json(stream: TextIO, document: dict[str, Any]) -> None:
    """Writes one JSON document, in ASCII: no terminal obeys anything in it."""
    json.dump(document, stream, indent=2, ensure_ascii=True, allow_nan=False)
    stream.write("\n")


def _text(words: Words) -> str:
    return legible(words.text if isinstance(words, Styled) else words)


def _style(words: Words) -> str:
    return words.style if isinstance(words, Styled) else PLAIN
