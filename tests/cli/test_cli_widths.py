"""The command `holdfast` on terminals of several widths: lines fit, and no word is broken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner
from rich.cells import cell_len

import holdfast
from command_line import Terminal, call, call_json, complaint, lines_of, run_program, show_on_terminal
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import holdfast as command

SHORT: Final = {"run": "gpt", "array": "layers.0.weight", "metric": "val_loss", "note": "after the warmup"}
LONG: Final = {
    "run": "experiments-2031/gpt-medium-lr3e-4-batch256-seed1234-with-warmup",
    "array": "transformer.encoder.layers.0.self_attention.output_projection.weight",
    "metric": "evaluation/validation_perplexity_of_the_held_out_set",
    "note": "the learning rate decays by a cosine from here on, and the warmup of the first 1000 steps is over; " * 3,
}
VERBS: Final = (
    ("list", "{run}"),
    ("list", "--all", "{run}"),
    ("list", "{root}"),
    ("list", "nowhere"),
    ("show", "{run}"),
    ("show", "{run}", "model", "state"),
    ("show", "{run}", "--largest", "2"),
    ("show", "{run}@first"),
    ("diff", "{run}@1", "{run}@4"),
    ("diff", "--quick", "{run}@1", "{run}@4"),
    ("verify", "--all", "{run}"),
    ("prune", "{run}", "--keep", "2", "--dry-run"),
    ("prune", "{run}"),
    ("rollback", "{run}"),
    ("rollback", "{run}@latest"),
    ("export", "{run}", "out", "--to", "torc"),
    ("import", "{run}/none.pt", "{root}/new"),
    ("doctor", "{root}", "--size", "1MB"),
    ("lisst",),
    ("list", "--sort"),
)


@pytest.fixture(scope="module", params=[SHORT, LONG], ids=["short", "long"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names, with a run that has them."""
    given: dict[str, str] = request.param
    root = tmp_path_factory.mktemp("runs")
    state = {"note": given["note"], "betas": (0.9, 0.999)}
    objects: dict[str, Any] = {"model": {given["array"]: np.zeros((30, 20)), "bias": np.zeros(3)}, "state": state}
    for _ in range(2):
        with holdfast.CheckpointManager(root / given["run"], holdfast.Checkpoint(**objects)) as manager:
            manager.restore(2 if manager.steps() else None)
            for step in (1, 2, 3, 4):
                if step not in manager.steps():
                    objects["model"][given["array"]][:] = step
                    state["note"] = f"{given['note']}, {step}"
                    metrics = {given["metric"]: 1 / step, "accuracy": step / 10, "throughput": step * 1e6}
                    manager.save(step, metrics=metrics, metadata={"note": given["note"]})
    return {**given, "root": str(root), "run": str(root / given["run"])}


def show(arguments: tuple[str, ...], words: dict[str, str], columns: int) -> list[str]:
    """The lines on a terminal of that width."""
    environment = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm"}
    given = [text.format(**words) for text in arguments]
    result = CliRunner(env=environment).invoke(command, [*given, "--human"], prog_name="holdfast")
    assert "Traceback" not in result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output).splitlines()


def find_words(lines: list[str]) -> set[str]:
    """The words of all lines; numbers, which may differ, are one."""
    return {re.sub(r"[\d.]+", "0", word) for line in lines for word in line.replace(",", " ").split()}


NOTES: Final = find_words(["not shown: (a wider terminal or --json)"])


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_lines_fit_and_no_word_is_broken(words: dict[str, str], arguments: tuple[str, ...]) -> None:
    wide = find_words(show(arguments, words, 1000))
    for columns in (60, 80, 120):
        lines = show(arguments, words, columns)
        # A path that is longer than a line has one of its own.
        assert [line for line in lines if cell_len(line) > columns and len(line.split()) > 1] == []
        assert find_words(lines) - wide <= NOTES


@pytest.mark.parametrize(
    ("verb", "columns", "gone"),
    [
        ("list {run}", 60, "size, workers"),
        ("list {run}", 40, "size, workers, accuracy, throughput"),
        ("show {run}", 40, "arrays, share, dtype, shape"),
        ("diff {run}@1 {run}@4", 60, "dtype, shape, norm A, norm B"),
    ],
)
@pytest.mark.parametrize("words", [SHORT], indirect=True, ids=["short"])
def test_columns_without_room_are_named_with_the_way_to_see_them(
    words: dict[str, str], verb: str, columns: int, gone: str
) -> None:
    text = " ".join(" ".join(show(tuple(verb.split()), words, columns)).split())
    assert f"not shown: {gone} (a wider terminal, or --json)" in text


def test_human_form_in_a_pipe_is_that_of_a_terminal(run: Path) -> None:
    on_terminal = show_on_terminal("list", run, columns=80)
    piped = Terminal("list", run, "--human", columns=80, pipe_output=True).finish()
    # A second may pass between the two.
    first, second = (re.sub(r"\d+ s ago", "n s ago", text) for text in (piped.output, on_terminal.raw))
    assert first.splitlines()[1:] == second.splitlines()[1:-1]
    plain = run_program("list", run, "--human", env={"NO_COLOR": "1", "COLUMNS": "80"})
    assert "\x1b[3" not in plain.stdout
    assert "just now" in plain.stdout or " ago" in plain.stdout


def test_list_without_a_directory_lists_the_present_one(run: Path) -> None:
    shown = run_program("list", cwd=run)
    assert lines_of(shown.stdout) == lines_of(call("list", run).stdout)
    shown = run_program("list", cwd=run.parent)
    assert [row[0] for row in lines_of(shown.stdout)] == ["RUN", run.name]


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("step", [100, 200, 250, 300]),
        ("-saved", [300, 250, 200, 100]),
        ("val_loss", [300, 250, 200, 100]),
        ("accuracy", [250, 300, 100, 200]),  # The others have none.
        ("-accuracy", [300, 250, 100, 200]),
    ],
)
def test_list_is_sorted_by_a_column(run: Path, order: str, steps: list[int]) -> None:
    assert [int(row[0]) for row in lines_of(call("list", run, "--sort", order).stdout)[1:]] == steps


def test_list_of_runs_is_sorted_by_a_column(run: Path) -> None:
    other = run.parent / "a" / "late"
    with holdfast.CheckpointManager(other, holdfast.Checkpoint(x=1)) as manager:
        manager.save(7)
    for order, names in (("name", ["a/late", "gpt"]), ("-saved", ["a/late", "gpt"]), ("-step", ["gpt", "a/late"])):
        listed = call_json("list", run.parent, "--sort", order)["runs"]
        assert [one["run"].removeprefix(f"{run.parent}/") for one in listed] == names
    code, said = complaint("list", run.parent, "--sort", "colour")
    assert code == ExitCode.USAGE
    assert "there is no column 'colour' to sort by" in said
    assert "The columns are run, step, saved, steps, size, workers, state, val_loss, accuracy." in said
