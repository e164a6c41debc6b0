"""The command `holdfast` on a terminal: colours, the bar, questions, and what must not reach a terminal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from command_line import (
    DATA,
    FIRST_300,
    NEWEST,
    Terminal,
    call,
    flip_bit,
    make_objects,
    run_program,
    show_on_terminal,
)
from holdfast.cli.exit_codes import ExitCode


def test_list_on_a_terminal(run: Path) -> None:
    shown = show_on_terminal("list", run, columns=80)
    assert shown.exit_code == ExitCode.OK
    assert "\x1b[" in shown.raw
    lines = shown.text.splitlines()
    titles = next(place for place, line in enumerate(lines) if line.startswith("step"))
    assert " ".join(" ".join(lines[:titles]).split()).startswith(f"{run} opened ")
    assert lines[titles].split() == ["step", "saved", "size", "workers", "val_loss", "accuracy"]
    assert lines[titles + 4].split()[-5:] == ["1.75", "▼", "0.3", "▲", "newest"]
    assert "(--all shows them)" in lines[titles + 5]
    detailed = " ".join(show_on_terminal("list", "--all", run, columns=80).text.split())
    assert f"{run} generation 2, opened " in detailed
    assert "step gen saved size workers" in detailed


def test_a_narrow_terminal_gets_fewer_metrics(run: Path) -> None:
    shown = show_on_terminal("list", run, columns=42)
    assert re.search("^step  saved +val_loss$", shown.text, re.MULTILINE)
    assert "not shown: size, workers, accuracy" in " ".join(shown.text.split())


def test_a_narrow_terminal_breaks_no_path_and_no_label(run: Path) -> None:
    shown = show_on_terminal("show", run, columns=24)
    assert any(str(run) in line for line in shown.text.splitlines())
    assert not any(line.endswith(" ") for line in shown.text.splitlines())


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "TERM"])
def test_text_has_no_style_where_none_is_wanted(run: Path, environment: dict[str, str]) -> None:
    shown = show_on_terminal("list", run, environment=environment)
    assert "newest" in shown.text
    assert "\x1b[" not in shown.raw
    assert "\x1b[32m" in show_on_terminal("list", run).raw


def test_verify_shows_a_bar_on_the_error_stream_only(run: Path) -> None:
    shown = show_on_terminal("verify", run, "--all", pipe_output=True)
    assert shown.exit_code == ExitCode.OK
    assert "step 100 (1 of 5)" in shown.text
    assert "B/s" in shown.text
    narrow = show_on_terminal("verify", run, "--all", pipe_output=True, columns=60).text
    assert re.search(r"step 100 \(1 of 5\) ━+ 112.1/112.1 kB ", narrow)
    assert "\x1b" not in shown.output
    assert shown.output.endswith("5 checkpoints read: 5 whole\n")


LONG_WORK: dict[str, tuple[object, ...]] = {
    "verify": ("verify", "{run}"),
    "copy": ("copy", "{run}@100", "{out}"),
    "export": ("export", "{run}@100", "{out}", "--to", "safetensors"),
    "import": ("import", "{file}", "{out}"),
    "rollback": ("rollback", "{run}@100"),
}


@pytest.mark.parametrize("verb", LONG_WORK)
def test_long_work_has_a_bar_with_rate_and_time_left_and_none_in_a_pipe(run: Path, tmp_path: Path, verb: str) -> None:
    if verb == "import":
        hf.export_checkpoint(f"{run}@100", tmp_path / "weights", to="safetensors")
    places = {"{run}": str(run), "{file}": str(tmp_path / "weights")}

    def fill(out: str) -> list[str]:
        words = [str(word) for word in LONG_WORK[verb]]
        for key, value in {**places, "{out}": str(tmp_path / out)}.items():
            words = [word.replace(key, value) for word in words]
        return words

    shown = show_on_terminal(*fill("shown"), pipe_output=True)
    assert shown.exit_code == ExitCode.OK, shown.text
    # The rate is "?" and the time 0 if all was done at once.
    assert re.search(r"━ [0-9./]+ k?B +(\?|[0-9.]+ .?B/s) +[0-9:-]+", shown.text), shown.text
    piped = run_program(*fill("piped"))
    assert piped.returncode == ExitCode.OK
    assert "━" not in piped.stdout + piped.stderr


def test_show_on_a_terminal(run: Path) -> None:
    shown = show_on_terminal("show", run)
    assert "just now" in shown.text or "ago" in shown.text
    assert "108 kB" in shown.text
    details = show_on_terminal("show", run, "model/embedding").text
    assert f"in {NEWEST}/{DATA}" in details


def test_prune_asks(run: Path) -> None:
    asking = Terminal("prune", run, "--off-line")
    asking.read_until("[y/N] ")
    asking.write("n\n")
    shown = asking.finish()
    assert shown.exit_code == ExitCode.OK
    assert "nothing was removed" in shown.text
    assert (run / FIRST_300).exists()
    asking = Terminal("prune", run, "--off-line")
    asking.read_until("[y/N] ")
    asking.write("y\n")
    assert asking.finish().exit_code == ExitCode.OK
    assert not (run / FIRST_300).exists()


def test_prune_removes_nothing_where_a_job_has_begun_since(run: Path) -> None:
    asking = Terminal("prune", run, "--off-line")
    asking.read_until("[y/N] ")
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(400)
    asking.write("y\n")
    shown = asking.finish()
    assert shown.exit_code == ExitCode.FAILED
    assert "changed while holdfast was looking at it" in " ".join(shown.text.split())
    assert (run / FIRST_300).exists()


def test_ctrl_c(run: Path) -> None:
    asking = Terminal("prune", run, "--off-line")
    asking.read_until("[y/N] ")
    asking.process.send_signal(signal.SIGINT)
    shown = asking.finish()
    assert shown.exit_code == ExitCode.INTERRUPTED
    assert "Traceback" not in shown.text
    assert (run / FIRST_300).exists()


def test_control_characters_in_a_checkpoint_are_escaped_on_terminals(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e[red]\n"
    objects = hf.Checkpoint(state={evil: np.zeros(3), "plain": evil}, name=evil)
    with hf.CheckpointManager(tmp_path / "run", objects) as manager:
        manager.save(1, metrics={evil: 1.0}, metadata={evil: evil})
    for arguments in (["list", "--all"], ["show"], ["show", "--json"], ["verify"]):
        verb, *options = arguments
        for text in (
            call(verb, tmp_path / "run", *options).stdout,
            show_on_terminal(verb, tmp_path / "run", *options).raw,
        ):
            assert "\x1b]" not in text
            assert "\x1b[2J" not in text
            assert "\x07" not in text
            assert "\u202e" not in text
    shown = show_on_terminal("show", tmp_path / "run", "state", "name", columns=200)
    assert "\x1b]" not in shown.raw
    assert "\\x1b]0;owned\\x07\\x1b[2J\\u202e[red]\\n" in shown.text
    flip_bit(next((tmp_path / "run").glob("step-*")) / DATA, 4096)
    shown = show_on_terminal("verify", tmp_path / "run", columns=200)
    assert shown.exit_code == ExitCode.DAMAGED
    assert "\x1b]" not in shown.raw
