"""The report of a verb: a page on a terminal, plain lines in a pipe, or one JSON document, from the same facts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

import click
from msgspec import structs

from holdfast.catalog.survey import Found, State
from holdfast.cli.exit_codes import ExitCode, holdfast_error_fields
from holdfast.cli.screen import (
    FAINT,
    PLAIN,
    Screen,
    Words,
    figure_text,
    iso_text,
    make_notes,
    terminal_width,
    unspaced,
    when_text,
    write_json,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.format.names import StepName
from holdfast.format.records import Manifest
from holdfast.numbers import size_text

Row = TypeVar("Row")

_GAP: Final = 2
_HUMAN_HELP: Final = "Write for people, also into a pipe, as in `holdfast list --human | less -R`."


class Kind(NamedTuple):
    """The way in which facts of one kind are written, on a page and in a pipe."""

    on_page: Callable[[Any], str]
    in_pipe: Callable[[Any], str]
    is_figure: bool = False


TEXT: Final = Kind(str, str)
NAME: Final = Kind(str, unspaced)
"""Text that may hold spaces: other programs split the lines of a table at spaces."""
COUNT: Final = Kind(str, str, True)
SHARE: Final = Kind(str, str, True)
SIZE: Final = Kind(size_text, str, True)
TIME: Final = Kind(when_text, lambda unix_seconds: iso_text(unix_seconds) or "-")
FIGURE: Final = Kind(figure_text, figure_text, True)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One fact about each row of a table, in all forms of the report.

    Attributes:
        title: Its title on a page.
        value: Finds the fact in a row, alone or with a style in a tuple. None is written as `-`.
        kind: The way in which it is written.
        plain: Its title in a pipe; by default the one on a page in capitals, or `BYTES` for a size.
        key: Its field in the JSON object of a row; empty if it has none, or the object has it already.
        style: Its style on a page, where `value` gives none.
        mark: Finds the sign to the right of a figure on a page.
        on_page: Whether pages have it.
        in_pipe: Whether the lines for other programs have it.
        may_go: How soon a page leaves it out if it has too little room: that of the greatest number first; 0 for never.
    """

    title: str
    value: Callable[[Row], Any]
    kind: Kind = TEXT
    plain: str | None = None
    key: str = ""
    style: str = PLAIN
    mark: Callable[[Row], str] | None = None
    on_page: bool = True
    in_pipe: bool = True
    may_go: int = 0

    def find_title(self, on_page: bool) -> str:
        """**Pure.** The title in this form of the report."""
        if on_page:
            return self.title + ("  " if self.mark else "")
        if self.plain is not None:
            return self.plain
        return "BYTES" if self.title == "size" else unspaced(self.title.upper())

    def find_cell(self, row: Row, on_page: bool) -> tuple[str, str]:
        """**Pure.** The text of a row's fact in this form of the report, and its style."""
        fact, style = split_style(self.value(row), self.style)
        write = self.kind.on_page if on_page else self.kind.in_pipe
        text = "-" if fact is None else write(fact)
        if self.mark and on_page:
            text = f"{text} {self.mark(row) or ' '}"
        return text, style


def text_columns(*titles: str) -> list[Column[Sequence[Words]]]:
    """**Pure.** The columns of rows that are texts already."""
    return [Column(title, itemgetter(place)) for place, title in enumerate(titles)]


def split_style(fact: Any, style: str = PLAIN) -> tuple[Any, str]:
    """**Pure.** A fact and its style."""
    return fact if isinstance(fact, tuple) else (fact, style)


def make_fields(columns: Sequence[Column[Row]], row: Row) -> dict[str, Any]:
    """**Pure.** The facts about a row that have a field of their own in JSON."""
    return {column.key: split_style(column.value(row))[0] for column in columns if column.key}


def sort_rows(columns: Sequence[Column[Row]], rows: Sequence[Row], order: str) -> list[Row]:
    """**Pure.** The rows in the order of a column, `-` before its title for the reverse; without a title as they are.

    Rows without the fact are last. `UsageError` names the columns if there is none of that title.
    """
    if not order:
        return list(rows)
    titles = {alias: column for column in columns for alias in (column.find_title(False).lower(), column.title)}
    column = {"name": columns[0], **titles}.get(order.removeprefix("-"))
    if column is None or not column.title:
        names = ", ".join(dict.fromkeys(column.title for column in columns if column.title))
        raise UsageError(f"there is no column {order.removeprefix('-')!r} to sort by", hint=f"The columns are {names}.")
    facts = [(split_style(column.value(row))[0], row) for row in rows]
    known = sorted((entry for entry in facts if entry[0] is not None), key=itemgetter(0), reverse=order[0] == "-")
    return [row for _, row in (*known, *(entry for entry in facts if entry[0] is None))]


class Report:
    """Writes what a verb has found, as it is found: on a terminal as a page, elsewhere as lines for other programs.

    If JSON is asked for, lines, tables and notes are left out, and `finish` writes `fields` as one document.

    Attributes:
        is_json: Whether JSON is asked for.
        is_page: Whether it is written to a terminal.
        has_symbols: Whether that shows more than ASCII.
        fields: The JSON document.
        error: The error that the verb ends with, after everything else is written; it is in the document too.
        exit_code: The exit code without an error.
    """

    def __init__(self, verb: str, *, as_json: bool = False, is_human: bool = False) -> None:
        self._verb = verb
        self.is_json = as_json
        self._screen = Screen(sys.stdout, is_human=is_human)
        self._notes = make_notes() if sys.stderr is not None else None
        self.is_page = self._screen.is_terminal and not as_json
        self.has_symbols = self._screen.has_symbols
        self.fields: dict[str, Any] = {}
        self.error: HoldfastError | None = None
        self.exit_code = ExitCode.OK
        self._is_finished = False

    def size(self, size_bytes: int, unit: str = " bytes") -> str:
        """A size as people read it on a page; elsewhere all of its digits, and the unit."""
        return size_text(size_bytes) if self.is_page else f"{size_bytes}{unit}"

    def line(self, *words: Words) -> None:
        """Writes a line."""
        if not self.is_json:
            self._screen.say(*words)

    def note(self, *words: Words) -> None:
        """Writes a line to the error stream, so that a pipe gets the facts alone."""
        sys.stdout.flush()
        if self._notes is not None and not self.is_json:
            self._notes.say(*words)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Writes each text after its label, without those that are empty."""
        rows: list[list[Words]] = [[(label, FAINT), text] for label, text in facts.items() if text]
        self.table(text_columns("", ""), rows, indent=2)

    def table(self, columns: Sequence[Column[Row]], rows: Sequence[Row], *, indent: int = 0) -> None:
        """Writes a table. A page names the columns that it has no room for below it."""
        if self.is_json:
            return
        shown = [column for column in columns if (column.on_page if self.is_page else column.in_pipe)]
        left_out = self._find_wide(shown, rows) if self.is_page else []
        shown = [column for column in shown if column.title not in left_out]
        self._screen.table(
            [column.find_title(self.is_page) for column in shown],
            [[column.find_cell(row, self.is_page) for column in shown] for row in rows],
            are_figures=[column.kind.is_figure for column in shown],
            indent=indent,
        )
        if left_out:
            self.line((f"not shown: {', '.join(left_out)} (a wider terminal, or --json)", FAINT))

    def _find_wide(self, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
        """Returns the titles of the columns that are to be left out."""

        def width(column: Column[Row]) -> int:
            cells: list[Words] = [column.find_title(True), *(column.find_cell(row, True) for row in rows)]
            return max(map(terminal_width, cells)) + _GAP

        widths = {column.title: width(column) for column in columns}
        left_out: list[str] = []
        # The last of those that go equally soon goes first.
        for _, column in sorted(enumerate(columns), key=lambda entry: (entry[1].may_go, entry[0]), reverse=True):
            if column.may_go and sum(widths.values()) - _GAP > self._screen.width:
                left_out.append(column.title)
                del widths[column.title]
        return [column.title for column in columns if column.title in left_out]

    def finish(self) -> None:
        """Writes the JSON document, if it is asked for; then raises the error, or ends with the exit code.

        It is called when the verb has returned, unless the verb has called it itself.

        Raises:
            HoldfastError: The error that the verb has ended with.
        """
        if self.is_json and not self._is_finished:
            error = holdfast_error_fields(self.error) if self.error else None
            write_json(sys.stdout, self._verb, {**self.fields, "error": error})
        self._is_finished = True
        if self.error is not None:
            raise self.error
        if self.exit_code is not ExitCode.OK:
            raise click.exceptions.Exit(self.exit_code)


def verb(name: str, *, json_help: str = "Write one JSON document.") -> Callable[[Callable[..., None]], click.Command]:
    """Makes a verb of a function that fills a report, which is its first argument; adds --human and --json."""

    def make(fill: Callable[..., None]) -> click.Command:
        @functools.wraps(fill)
        def run(as_json: bool, is_human: bool, **options: Any) -> None:
            report = Report(name, as_json=as_json, is_human=is_human)
            fill(report, **options)
            report.finish()

        command = click.command(name)(run)
        command.params.append(click.Option(["--human", "is_human"], is_flag=True, help=_HUMAN_HELP))
        command.params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        return command

    return make


def time_fields(key: str, unix_seconds: float) -> dict[str, Any]:
    """**Pure.** A time in a JSON document: as a number, and in ISO 8601 for people."""
    return {f"{key}_unix_seconds": unix_seconds, key: iso_text(unix_seconds)}


def problem_fields(problem: HoldfastError) -> dict[str, Any]:
    """**Pure.** Damage, or an I/O error, in a JSON document."""
    return {
        "file": getattr(problem, "path", "") or None,
        "offset_bytes": getattr(problem, "offset_bytes", None),
        "tensor": getattr(problem, "tensor", "") or None,
        "message": problem.message,
    }


def name_fields(name: StepName | None) -> dict[str, Any]:
    """**Pure.** The name of a checkpoint, in a JSON document."""
    return {
        "step": name.step if name else None,
        "generation": name.generation if name else None,
        "attempt": name.attempt if name else None,
    }


def found_fields(found: Found) -> dict[str, Any]:
    """**Pure.** A directory of a run in a JSON document; committed steps have more fields than the others."""
    fields: dict[str, Any] = {
        **name_fields(found.name),
        "directory": found.directory,
        "state": found.state.value,
        "size_bytes": found.size_bytes,
        "referred_by": list(found.referred_by),
    }
    if found.state in (State.UNFINISHED, State.SPARE):
        fields["may_be_in_progress"] = found.may_be_in_progress
    if found.state in (State.LIVING, State.OFF_LINE):
        fields |= manifest_fields(found.manifest)
    if found.state in (State.LIVING, State.OFF_LINE, State.LOST):
        fields["damages"] = [problem_fields(damage) for damage in found.damages]
    return fields


def manifest_fields(manifest: Manifest | None) -> dict[str, Any]:
    """**Pure.** The fields of a manifest, in a JSON document; all null if it is damaged."""
    if manifest is None:
        absent = ("committed_at_unix_seconds", "committed_at", "workers", "metrics", "metadata", "versions")
        return dict.fromkeys((*absent, "is_finite", "nonfinite", "referred_bytes", "references"))
    return {
        **time_fields("committed_at", manifest.committed_at_unix_seconds),
        "workers": manifest.world_size,
        "metrics": manifest.metrics,
        "metadata": manifest.metadata,
        "versions": manifest.versions,
        "is_finite": None if manifest.nonfinite is None else manifest.facts.is_finite,
        "nonfinite": None if manifest.nonfinite is None else structs.asdict(manifest.nonfinite),
        "referred_bytes": manifest.referred_bytes,
        "references": [
            {
                **name_fields(reference.name),
                "directory": reference.name.directory,
                "leaves": reference.leaves,
                "size_bytes": reference.size_bytes,
            }
            for reference in manifest.references
        ],
    }
