"""The report of a verb: the same facts as a page, as plain lines and as JSON."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from command_line import PROGRAM
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import COUNT, FIGURE, NAME, SIZE, TIME, Column, Report, make_fields
from holdfast.errors import NoCheckpointError


class Step(NamedTuple):
    step: int
    label: str | None
    size_bytes: int
    committed_at: float
    loss: float


STEPS = [Step(5, "a b", 1500, 0.0, 0.25), Step(10, None, 12, 0.0, 0.125)]
COLUMNS: list[Column[Step]] = [
    Column("step", lambda one: one.step, COUNT, key="step"),
    Column("label", lambda one: one.label, NAME, key="label"),
    Column("size", lambda one: one.size_bytes, SIZE, key="size_bytes"),
    Column("saved", lambda one: one.committed_at, TIME, on_page=False),
    Column("loss", lambda one: one.loss, FIGURE, mark=lambda one: "*" if one.step == 5 else "", may_go=True),
]


class Terminal(io.StringIO):
    """Takes text as a terminal of 80 columns does."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def read_lines(self) -> list[str]:
        """The lines, without what colors them."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()).splitlines()


def write(stream: io.StringIO, fill: Callable[[Report], object], *, as_json: bool = False) -> io.StringIO:
    """What a report writes to the error stream, after the output."""
    notes = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(notes):
        fill(Report("list", as_json=as_json))
    return notes


def show_steps(report: Report) -> None:
    report.fields = {"steps": [make_fields(COLUMNS, one) for one in STEPS]}
    report.table(COLUMNS, STEPS)
    report.line("2 steps, ", report.size(1512))
    report.note(("note: ", "bold"), "seen")
    report.finish()


def test_plain_table_has_one_line_a_row_and_no_spaces_in_cells() -> None:
    output = io.StringIO()
    notes = write(output, show_steps)
    assert output.getvalue().splitlines() == [
        "STEP  LABEL  BYTES  SAVED                      LOSS",
        "   5  a_b     1500  1970-01-01T00:00:00.000Z   0.25",
        "  10  -         12  1970-01-01T00:00:00.000Z  0.125",
        "2 steps, 1512 bytes",
    ]
    assert notes.getvalue() == "note: seen\n"


def test_page_has_sizes_for_people_and_marks_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = Terminal()
    write(output, show_steps)
    assert output.read_lines() == [
        "step  label    size   loss",
        "   5  a b    1.5 kB   0.25 *",
        "  10  -        12 B  0.125",
        "2 steps, 1.5 kB",
    ]


def test_page_names_the_columns_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "25")
    output = Terminal()
    write(output, show_steps)
    assert output.read_lines()[0] == "step  label    size"
    assert " ".join(output.read_lines()[3:-1]) == "not shown: loss (a   wider terminal, or   --json)"


def test_json_has_the_keyed_facts_and_nothing_else() -> None:
    output = io.StringIO()
    notes = write(output, show_steps, as_json=True)
    assert json.loads(output.getvalue()) == {
        "holdfast": "list",
        "version": 1,
        "steps": [
            {"step": 5, "label": "a b", "size_bytes": 1500},
            {"step": 10, "label": None, "size_bytes": 12},
        ],
        "error": None,
    }
    assert notes.getvalue() == ""


def test_error_is_in_the_document_and_raised_after_it() -> None:
    def fail(report: Report) -> None:
        report.error = NoCheckpointError("none", hint="save one")
        report.finish()

    output = io.StringIO()
    with pytest.raises(NoCheckpointError):
        write(output, fail, as_json=True)
    error = {"kind": "NoCheckpointError", "exit_code": 3, "message": "none", "hint": "save one"}
    assert json.loads(output.getvalue())["error"] == error


def test_exit_code_ends_the_verb() -> None:
    def differ(report: Report) -> None:
        report.exit_code = ExitCode.DIFFERENT
        report.finish()

    with pytest.raises(click.exceptions.Exit) as ended:
        write(io.StringIO(), differ)
    assert ended.value.exit_code == ExitCode.DIFFERENT


def test_closed_error_stream_stops_no_verb(made_run: Path) -> None:
    for verb in ("list", "verify"):
        shell = ["sh", "-c", 'exec "$0" "$@" 2>&-', str(PROGRAM), verb, str(made_run)]
        done = subprocess.run(shell, stdout=subprocess.PIPE, timeout=60, check=False, text=True)
        assert done.returncode == ExitCode.OK, done.stdout
