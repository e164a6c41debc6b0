"""Where a verb's output goes, and its words: pleasant on a terminal, plain anywhere else, or one JSON document."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

import click

from holdfast.numbers import parse_time, span_text

if TYPE_CHECKING:
    from rich.text import Text

DOCUMENT_VERSION: Final = 1
"""Of all JSON documents. Fields may be added to them without a new version; none changes its meaning or goes."""

_HAS_DOCUMENT: Final = "holdfast.has_document"
_GAP: Final = "  "
"""Between the columns of a table."""
_INDENT: Final = 4
_LEAST_WIDTH: Final = 12
"""A last column of text that wraps needs no more."""

PLAIN: Final = ""
STRONG: Final = "bold"
FAINT: Final = "dim"
GOOD: Final = "green"
BAD: Final = "bold red"
NOTABLE: Final = "yellow"

Words: TypeAlias = str | tuple[str, str]
"""Text, or text with a style, which only a terminal shows. It is made legible here, so nothing that a checkpoint holds
reaches a terminal as it is."""


class Screen:
    """Writes lines and tables to a stream.

    For people they have styles, and wrap between words; for other programs they are plain text that can be parsed, one
    line for a row. Nothing is ever cut. With the environment variable NO_COLOR they have no style, as on a
    terminal that knows none (TERM=dumb): bold and faint text is noise in a log as well.

    Attributes:
        is_terminal: Whether it writes for people: the stream is a terminal, or `is_human`. Only then is rich imported.
        has_symbols: Whether people see more than ASCII.
        width: How many characters fit on a line of the terminal.
    """

    def __init__(self, stream: TextIO, *, is_human: bool = False) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty() or is_human
        self.has_symbols = self.is_terminal and (stream.encoding or "").lower().replace("-", "") == "utf8"
        self.width = 0
        if self.is_terminal:
            from rich.console import Console

            self._console = Console(
                file=stream,
                force_terminal=True,
                color_system=None if os.environ.get("NO_COLOR") else "auto",
                highlight=False,
                markup=False,
                emoji=False,
            )
            self.width = self._console.width

    def say(self, *words: Words) -> None:
        """Writes one line; if it wraps, its other lines begin further to the right."""
        if not self.is_terminal:
            self._stream.write("".join(_text(word) for word in words).rstrip() + "\n")
            return
        text = _assemble(words)
        indent = len(text.plain) - len(text.plain.lstrip(" "))
        self._wrap(text[:indent], text[indent:], indent + 2)

    def _wrap(self, head: Text, text: Text, hang: int) -> None:
        """Writes a line whose `text` wraps between words, at the column `hang`; too long a word has its own."""
        if head.cell_len + text.cell_len > self.width:
            longest = max(map(terminal_width, text.plain.split()), default=0)
            if longest > self.width - hang:
                hang = min(_INDENT, hang)
                if head.plain.strip():
                    self._print(head)
                    head = _assemble([" " * hang])
            for line in _break(text, self.width - hang):
                self._print(head + line)
                head = _assemble([" " * hang])
        else:
            self._print(head + text)

    def _print(self, line: Text) -> None:
        line.rstrip()
        self._console.print(line, soft_wrap=True)

    def table(
        self, titles: Sequence[str], rows: Sequence[Sequence[Words]], *, are_figures: Sequence[bool], indent: int = 0
    ) -> None:
        """Writes a table: a line of titles, unless all are empty, and each row; figures are right-aligned.

        For other programs a row is one line. For people the last cell of a row wraps within its column. If there is no
        room for the widest column, a cell that is too long ends its line, and the rest of its row follows below.
        """
        measure = terminal_width if self.is_terminal else lambda words: len(_text(words))
        lines = [*([[(title, FAINT) for title in titles]] if any(titles) else []), *rows]
        widths = [max((measure(line[place]) for line in lines), default=0) for place in range(len(titles))]
        last = len(titles) - 1
        texts = [place for place in range(last) if not are_figures[place]] if self.is_terminal else []
        widest = max(texts, key=lambda place: widths[place], default=last)
        ending = widths[last] if are_figures[last] else min(widths[last], _LEAST_WIDTH)
        excess = indent + sum(widths[:last]) + ending + last * len(_GAP) - self.width
        if excess > 0 and widest != last:
            fitting = (measure(line[widest]) for line in lines if measure(line[widest]) <= widths[widest] - excess)
            widths[widest] = max(fitting, default=0)
        for line in lines:
            words: list[Words] = [" " * indent]
            for place, (cell, width, is_figure) in enumerate(zip(line, widths, are_figures, strict=True)):
                padding = " " * (width - measure(cell))
                if place == last or measure(cell) > width:
                    self._end_row(words, padding * is_figure, cell)
                    words = [" " * (indent + sum(widths[: place + 1]) + (place + 1) * len(_GAP))]
                else:
                    words += [padding, cell, _GAP] if is_figure else [cell, padding, _GAP]

    def _end_row(self, words: Sequence[Words], padding: str, cell: Words) -> None:
        if not self.is_terminal:
            self.say(*words, padding, cell)
            return
        head = _assemble([*words, padding])
        self._wrap(head, _assemble([cell]), head.cell_len)


def make_notes() -> Screen:
    """Returns the error stream, which no program parses: with FORCE_COLOR it is written for people in any case."""
    assert sys.stderr is not None
    return Screen(sys.stderr, is_human=bool(os.environ.get("FORCE_COLOR")))


def _break(text: Text, room: int) -> Iterator[Text]:
    """**Pure.** Divides text before words that do not fit in the room."""
    breaks, used = [], 0
    for word in re.finditer(r"\S+\s*", text.plain):
        if used and used + terminal_width(word[0].rstrip()) > room:
            breaks.append(word.start())
            used = 0
        used += terminal_width(word[0])
    yield from text.divide(breaks)


def _assemble(words: Sequence[Words]) -> Text:
    from rich.text import Text

    return Text.assemble(*map(_legible, words))


def terminal_width(words: Words) -> int:
    """**Pure.** How many columns of a terminal the words take: some characters take two, some none."""
    from rich.cells import cell_len

    return cell_len(_text(words))


def write_json(stream: TextIO, verb: str | None, fields: dict[str, Any]) -> None:
    """Writes the JSON document of a verb, in ASCII: no terminal obeys anything in it.

    Every document has the field `error`: null unless the verb says what went wrong.
    """
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_HAS_DOCUMENT] = True
    document = {"holdfast": verb, "version": DOCUMENT_VERSION, **fields}
    document.setdefault("error", None)
    # Among the lines of `follow` an error is a line, too.
    json.dump(document, stream, indent=None if verb == "follow" else 2, ensure_ascii=True, allow_nan=False)
    stream.write("\n")


def has_document(context: click.Context) -> bool:
    """True once the JSON document of this command has been written: there is never a second one."""
    return bool(context.meta.get(_HAS_DOCUMENT))


def _text(words: Words) -> str:
    return legible(words if isinstance(words, str) else words[0])


def _legible(words: Words) -> Words:
    return legible(words) if isinstance(words, str) else (legible(words[0]), words[1])


def legible(text: str) -> str:
    """**Pure.** Escapes every character that a terminal might obey rather than show.

    Names and notes in a checkpoint may hold anything: escape sequences that move the cursor, marks
    that turn the direction of writing, ends of line, bytes that are not text.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def unspaced(text: str) -> str:
    """**Pure.** Text without spaces, for a table that other programs split at spaces."""
    return text.replace(" ", "_")


def age_text(age_seconds: float) -> str:
    """**Pure.** How long ago something was, such as `3 min ago`."""
    if age_seconds < -60:
        return "in the future"
    return f"{span_text(age_seconds)} ago" if age_seconds >= 2 else "just now"


_LONG_AGO_SECONDS: Final = 2 * 86400


def when_text(unix_seconds: float) -> str:
    """How long ago it was if that is less than two days, else the day and the minute."""
    age_seconds = time.time() - unix_seconds
    if -60 <= age_seconds < _LONG_AGO_SECONDS:
        return age_text(age_seconds)
    return local_time_text(unix_seconds)[:16]


def local_time_text(unix_seconds: float) -> str:
    """A time on this machine's calendar, such as `2031-04-05 06:07:08`; `?` if no calendar has it."""
    moment = _moment(unix_seconds)
    return "?" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso_text(unix_seconds: float) -> str | None:
    """**Pure.** A time in ISO 8601, UTC, to the millisecond; None if no calendar has it."""
    moment = _moment(unix_seconds)
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(unix_seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(unix_seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def figure_text(figure: float) -> str:
    """**Pure.** A metric, to six digits."""
    return f"{figure:.6g}"


def shape_text(numbers: Sequence[int]) -> str:
    """**Pure.** A shape or offsets, such as `[3,4]`."""
    return "[" + ",".join(map(str, numbers)) + "]"


def share_text(part: int | None, whole: int) -> str:
    """**Pure.** A part of a whole in percent; `-` if there is none."""
    percent = 100 * part / whole if part and whole else 0.0
    return "-" if percent == 0 else f"{percent:.0f}%" if percent >= 1 else "<1%"


def counted(count: int, singular: str, plural: str = "") -> str:
    """**Pure.** A count with its noun, such as `1 step` or `3 steps`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


_NUMBER: Final = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE = re.compile(_NUMBER + r"\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_MAX_BYTES: Final = 10**18
_MIN_SECONDS: Final = 1e-6
_MAX_SECONDS: Final = 1e10


def parse_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """**Pure.** Parses a size such as `1.5GB`, `2GiB` or `4096` to bytes; None if the option is left out."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 500MB, 1.5GB or 2GiB.", ctx, param)
    power = 1024.0 if match[3] else 1000.0
    size_bytes = float(match[1]) * power ** _POWERS[match[2].lower()]
    if not 1 <= size_bytes <= _MAX_BYTES:
        raise click.BadParameter(f"{text!r} is not between 1 byte and {_MAX_BYTES} bytes.", ctx, param)
    return round(size_bytes)


def parse_seconds(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """**Pure.** Parses a time such as `350ms` or `24h` to seconds; None if the option is left out."""
    if text is None:
        return None
    seconds = parse_time(text)
    if seconds is None:
        raise click.BadParameter(
            f"{text!r} is not a time; write it with its unit: 350ms, 30s, 90min, 24h or 7d.", ctx, param
        )
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise click.BadParameter(f"{text!r} is not between a microsecond and 300 years.", ctx, param)
    return seconds
