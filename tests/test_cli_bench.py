"""`holdfast bench`: its figures, its advice, its errors, and that nothing is left behind and no run disturbed."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

import holdfast as hf
from command_line import (
    NEWEST,
    PROGRAM,
    Shown,
    Terminal,
    call,
    call_json,
    complaint,
    job_that_cannot_be_joined,
    lines_of,
    make_objects,
    run_program,
    show_on_terminal,
)
from holdfast.bench.place import LOCK_NAME, PREFIX
from holdfast.catalog import read_catalog
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.wording import rough_text
from holdfast.policies.saving import DEFAULT_MTBF_SECONDS
from holdfast.save import moves
from holdfast.storage import LocalStorage, digesting
from mounts import mounted

SMALL: Final = ("--size", "3MB", "--rounds", "2")
RATES: Final = ("copy", "copy_fresh", "digest", "write", "rewrite", "read_cold", "read_warm")
COSTS: Final = ("first_stall", "stall", "durable", "durable_new", "restore_cold", "restore_warm")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `--json` says of an empty directory."""
    return call_json("bench", tmp_path_factory.mktemp("disk"), *SMALL, "--mtbf", "24h", "--step-time", "2s")


def kinds(document: dict[str, Any]) -> set[str]:
    return {notice["kind"] for notice in document["notices"]}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Figures and advice.


def test_json_holds_every_figure(document: dict[str, Any]) -> None:
    assert (document["holdfast"], document["version"]) == ("bench", 1)
    assert document["size_bytes"] == document["trial_bytes"] == 3_000_000
    assert (document["size_from"], document["size_of_step"], document["trial_limited_by"]) == ("option", None, None)
    assert (document["threads"], document["rounds"]) == (6, 2)
    assert set(document["bytes_per_second"]) == set(RATES)
    assert set(document["costs_seconds"]) == set(COSTS)
    assert isinstance(document["is_direct"], bool)
    figures = [*document["bytes_per_second"].values(), *document["costs_seconds"].values(), document["publish_seconds"]]
    for figure in figures:
        if figure is not None:
            assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
    assert set(document["file_system"]) == {"kind", "source", "mount_point", "free_bytes", "total_bytes"}
    for notice in document["notices"]:
        assert set(notice) == {"kind", "text"}


def test_json_is_consistent(document: dict[str, Any]) -> None:
    costs, rates = document["costs_seconds"], document["bytes_per_second"]
    # Of each single save; the medians are of different ones.
    assert costs["stall"]["lowest"] < costs["durable"]["highest"]
    assert costs["stall"]["limit"] == pytest.approx(3e6 / rates["copy"]["highest"])
    assert costs["durable_new"]["limit"] == pytest.approx(3e6 / rates["write"]["highest"])
    again = "write" if rates["rewrite"] is None else "rewrite"
    assert costs["durable"]["limit"] == pytest.approx(3e6 / rates[again]["highest"])
    if rates["rewrite"] is None:
        assert costs["durable"] == costs["durable_new"]
    assert (costs["restore_cold"] is None) == (rates["read_cold"] is None) == ("no_cold_read" in kinds(document))
    assert document["is_direct"] == ("not_direct" not in kinds(document))
    assert ("not_compiled" in kinds(document)) == (moves.NATIVE is None or digesting.find_native() is None)


def test_json_advice(document: dict[str, Any]) -> None:
    advice = document["advice"]
    assert (advice["mtbf_seconds"], advice["step_seconds"]) == (86400.0, 2.0)
    assert advice["auto"] == "hf.Auto(mtbf_seconds=86400)"
    steps = re.fullmatch(r"hf\.Steps\((\d+)\)", advice["save_every"])
    assert steps is not None
    assert advice["interval_seconds"] == 2.0 * int(steps[1])
    stall = document["costs_seconds"]["stall"]["median"]
    assert advice["saving_share"] == pytest.approx(stall / (stall + advice["interval_seconds"]))
    assert [other["interval_seconds"] for other in advice["others"]] == [60.0, 600.0, 3600.0]
    for choice in (advice, *advice["others"]):
        assert 0 < choice["saving_share"] < 1
        assert 0 < choice["failures_share"] < 1
        assert choice["per_failure_seconds"] < choice["interval_seconds"] + 60
    # More often than advised, or more seldom, more is lost.
    lost = [choice["saving_share"] + choice["failures_share"] for choice in (advice, *advice["others"])]
    assert min(lost[1:]) >= lost[0] * 0.99


def test_defaults_are_those_of_a_manager_and_of_auto(tmp_path: Path) -> None:
    document = call_json("bench", tmp_path, "--size", "1MB", "--rounds", "1")
    assert document["threads"] == inspect.signature(hf.CheckpointManager).parameters["threads"].default
    assert document["advice"]["mtbf_seconds"] == DEFAULT_MTBF_SECONDS
    assert document["advice"]["auto"] == "hf.Auto()"
    assert document["advice"]["save_every"].startswith("hf.Seconds(")
    help_text = " ".join(call("bench", "--help").stdout.split())
    assert f"[default: {rough_text(DEFAULT_MTBF_SECONDS).replace(' ', '')}, as for Auto]" in help_text


def test_a_pipe_gets_a_table_that_can_be_taken_apart(tmp_path: Path) -> None:
    result = call("bench", tmp_path, *SMALL)
    assert result.exit_code == 0
    heading, *rows = lines_of(result.stdout)
    assert heading == ["FIGURE", "MEDIAN", "LOWEST", "HIGHEST", "LIMIT", "UNIT"]
    assert {len(row) for row in rows} == {6}
    figures = {row[0]: row for row in rows}
    assert {"copy", "write", "publish", "stall", "durable", "restore_warm", "interval"} <= set(figures)
    assert figures["write"][5] == "bytes/s"
    assert float(figures["stall"][1]) > 0
    assert float(figures["stall"][4]) > 0
    seconds = figures["save_every"][1].removeprefix("hf.Seconds(").removesuffix(")")
    assert float(seconds) == float(figures["interval"][1])
    assert "\x1b" not in result.stdout


def test_the_size_is_that_of_the_newest_checkpoint(run: Path) -> None:
    document = call_json("bench", run, "--rounds", "1")
    newest = call_json("show", run)
    assert (document["size_from"], document["size_of_step"]) == ("checkpoint", 300)
    assert document["size_bytes"] == newest["size_bytes"]
    (run / NEWEST / "manifest.json").write_text("{}")
    assert call_json("bench", run, "--rounds", "1")["size_of_step"] == 250
    assert call_json("bench", run, "--rounds", "1", "--size", "5MB")["size_bytes"] == 5_000_000


def test_a_smaller_trial_is_reckoned_up(tmp_path: Path) -> None:
    document = call_json("bench", tmp_path, "--size", "300MB", "--trial", "3MB", "--rounds", "1")
    assert (document["size_bytes"], document["trial_bytes"]) == (300_000_000, 3_000_000)
    assert "smaller_trial" in kinds(document)
    limit = document["costs_seconds"]["durable_new"]["limit"]
    assert limit == pytest.approx(3e8 / document["bytes_per_second"]["write"]["highest"])


# On a terminal.


def page_of(shown: Shown) -> str:
    """What stays on the terminal: behind the bar, which goes."""
    return shown.raw.rpartition("\x1b[2K")[2]


def test_on_a_terminal(tmp_path: Path) -> None:
    shown = show_on_terminal("bench", tmp_path, *SMALL, columns=100)
    assert shown.exit_code == ExitCode.OK
    for text in (
        str(tmp_path),
        "3.0 MB of state; 6 threads, medians of 2 rounds",
        "what the machine gives",
        "GB/s",
        "what a save of 3.0 MB costs",
        " x  █",
        "how often to save, with a failure every 6 h",
        "save_every=hf.Seconds(",
        "hf.Auto() measures while training and chooses by itself, as hf.resumable does by default.",
        "lost to saves",
    ):
        assert text in shown.text
    assert "\x1b[1;32msave_every" in shown.raw


@pytest.mark.parametrize(("columns", "has_bar", "has_limit"), [(80, True, True), (64, False, True), (42, False, False)])
def test_a_narrow_terminal_gets_less(tmp_path: Path, columns: int, has_bar: bool, has_limit: bool) -> None:
    page = page_of(show_on_terminal("bench", tmp_path, *SMALL, columns=columns, environment={"NO_COLOR": "1"}))
    tables = [line for line in page.splitlines() if line.startswith("  ") and ("/s" in line or "restore, " in line)]
    assert len(tables) >= 6
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line)) <= columns for line in tables)
    assert ("█" in page) == has_bar
    assert ("limit" in page) == has_limit
    assert ("Columns left out; 80 characters fit all." in page) == (not has_bar)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in page.splitlines()]
    # The directory's name alone may be longer.
    assert all(len(line) <= columns for line in lines if str(tmp_path) not in line)
    assert "time lost" in page or columns >= 54


def test_what_a_job_that_loses_most_of_its_time_is_told(tmp_path: Path) -> None:
    hopeless = ("--mtbf", "1h", "--step-time", "2h")
    said = " ".join(show_on_terminal("bench", tmp_path, *SMALL, *hopeless).text.split())
    assert "save_every=hf.Steps(1) every 2 h" in said
    assert "but a step takes longer, and none is saved before its end." in said
    assert "cost least together" not in said
    assert "Most of the time is lost, whatever the interval. Shorter steps or rarer failures would help:" in said


def test_no_color_is_honoured(tmp_path: Path) -> None:
    assert "\x1b[32m" not in page_of(show_on_terminal("bench", tmp_path, *SMALL, environment={"NO_COLOR": "1"}))


def test_the_bar_is_on_the_error_stream_only(tmp_path: Path) -> None:
    shown = show_on_terminal("bench", tmp_path, *SMALL, pipe_output=True)
    assert shown.exit_code == ExitCode.OK
    assert "round 2 of 2: " in shown.text
    assert shown.output.startswith("FIGURE")
    assert "\x1b" not in shown.output
    asked = show_on_terminal("bench", tmp_path, *SMALL, "--json", pipe_output=True)
    assert json.loads(asked.output)["rounds"] == 2


# What it must not disturb, and what it must not leave.


def test_a_run_that_is_being_saved_to_is_not_disturbed(run: Path) -> None:
    before = names(run)
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(400)
        manager.wait()
        generation = read_catalog(LocalStorage(run)).generation
        assert call("bench", run, "--rounds", "1").exit_code == 0
        assert read_catalog(LocalStorage(run)).generation == generation
        manager.save(500)
    assert call_json("list", run)["newest_step"] == 500
    assert call("verify", run, "--all").exit_code == ExitCode.OK
    assert set(before) <= set(names(run))
    assert not [name for name in names(run) if name.startswith(".holdfast")]


def test_a_bench_within_a_job_is_alone(tmp_path: Path) -> None:
    with job_that_cannot_be_joined() as environment:
        done = run_program("bench", tmp_path, "--size", "1MB", "--rounds", "1", env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert "save_every" in done.stdout


def test_a_killed_bench_leaves_what_nobody_takes_for_a_run_and_the_next_one_removes(run: Path) -> None:
    before, listed = names(run), call("list", run, "--all").stdout
    bench = Terminal("bench", run, "--size", "8MB", "--rounds", "1000")
    bench.read_until("of 1000: ")
    bench.process.kill()
    bench.finish()
    (left,) = set(names(run)) - set(before)
    assert left.startswith(PREFIX)
    assert sum(path.stat().st_size for path in (run / left).rglob("*")) > 0
    assert call("list", run, "--all").stdout == listed
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(600)
    assert (run / left).exists()
    document = call_json("bench", run, "--rounds", "1")
    assert "swept" in kinds(document)
    assert not [name for name in names(run) if name.startswith(PREFIX)]


@pytest.mark.parametrize("label", [": writing", ": saving", ": restoring warm"])
def test_ctrl_c_removes_all_files(tmp_path: Path, label: str) -> None:
    bench = Terminal("bench", tmp_path, "--size", "64MB", "--rounds", "1000")
    bench.read_until(label)
    bench.process.send_signal(signal.SIGINT)
    shown = bench.finish()
    assert shown.exit_code == ExitCode.INTERRUPTED
    assert shown.text.endswith("holdfast: interrupted\n")
    assert "Traceback" not in shown.text
    assert "was not saved" not in shown.text
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_removes_all_files(tmp_path: Path, number: signal.Signals) -> None:
    bench = Terminal("bench", tmp_path, "--size", "8MB", "--rounds", "1000")
    bench.read_until("of 1000: ")
    bench.process.send_signal(number)
    assert bench.finish().exit_code == 128 + number
    assert names(tmp_path) == []


def test_a_bench_beside_another_one(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}0123456789abcdef"
    other.mkdir()
    with (other / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        document = call_json("bench", tmp_path, *SMALL)
    assert "other_bench" in kinds(document)
    assert names(tmp_path) == [other.name]


def test_a_save_that_may_be_going_on_is_told(run: Path) -> None:
    assert "save_in_progress" not in kinds(call_json("bench", run, "--rounds", "1"))
    (run / "step-000000900.g0002").mkdir()
    assert "save_in_progress" in kinds(call_json("bench", run, "--rounds", "1"))


# Disks that are full, gone or of another kind.


def test_a_disk_in_memory_that_has_little_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=40m", "tmpfs") as root:
        document = call_json("bench", root, "--rounds", "1")
        assert document["file_system"]["kind"] == "tmpfs"
        assert (document["size_from"], document["size_bytes"]) == ("default", 10**9)
        assert document["trial_limited_by"] == "room"
        assert document["trial_bytes"] <= 10 << 20
        assert {"in_memory", "no_room", "no_cold_read", "smaller_trial"} <= kinds(document)
        assert document["costs_seconds"]["restore_cold"] is None
        # Nor is space used again there: a save of any kind writes new files.
        assert document["bytes_per_second"]["rewrite"] is None
        assert document["costs_seconds"]["durable"] == document["costs_seconds"]["durable_new"]
        assert "little_room" in kinds(call_json("bench", root, "--size", "25MB", "--rounds", "1"))
        shown = show_on_terminal("bench", root, "--rounds", "1", columns=120)
        assert "note: a save of 1.0 GB does not fit" in shown.text
        assert "restore, cold" not in shown.text
        assert names(root) == []


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as root:
        code, said = complaint("bench", root)
        assert code == ExitCode.FAILED
        assert "takes twice as much room" in said
        code, said = complaint("bench", root, "--size", "900kB", "--trial", "900kB")
        assert code == ExitCode.FAILED
        assert "hint: Make room" in said
        (root / "filler").write_bytes(bytes(1 << 20))
        code, said = complaint("bench", root, "--size", "100kB")
        assert code == ExitCode.FAILED
        assert names(root) == ["filler"]


@pytest.mark.parametrize("limit", [6000, 7813])
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands for it, in kibibytes: a data file is larger by its header than its arrays."""
    limited = f"ulimit -f {limit}; exec {PROGRAM} bench {tmp_path} --size 8MB --rounds 1"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.FAILED
    assert "ulimit -f" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == []


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs") as root:
        code, said = complaint("bench", root)
        assert code == ExitCode.FAILED
        assert "mounted read-only" in said


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    code, said = complaint("bench", tmp_path / "runs" / "new")
    assert code == ExitCode.NOTHING_THERE
    assert "there is no directory" in said
    assert f"such as {tmp_path}." in said
    (tmp_path / "file").write_text("x")
    code, said = complaint("bench", tmp_path / "file")
    assert code == ExitCode.NOTHING_THERE
    assert "is not a directory" in said


def test_what_is_no_place_to_measure(run: Path) -> None:
    for place, text in (
        ("memory://trial", "is no directory of this machine"),
        ("s3://bucket/run", "s3:// is not supported"),
        (str(run / NEWEST), "is the directory of a single step"),
    ):
        code, said = complaint("bench", place)
        assert code == ExitCode.USAGE
        assert text in said
        assert "hint: " in said
    assert call("bench", f"file://{run}", "--rounds", "1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--size", "big"), "'big' is no size; write one as 500MB, 1.5GB or 2GiB."),
        (("--size", "0"), "'0' is not between 1 byte"),
        (("--size", "5"), "'5' is 5 B, too little to measure; write 500MB or 5GB."),
        (("--trial", "99kB"), "too little to measure"),
        (("--mtbf", "24"), "'24' is no time; write its unit: 350ms, 30s, 90min, 24h or 7d."),
        (("--step-time", "0s"), "'0s' is not between"),
        (("--threads", "0"), "--threads"),
        (("--rounds", "none"), "--rounds"),
        (("--size", "1MB", "--trial", "2MB"), "larger than the state"),
        (("--size", "100PB", "--trial", "100PB"), "takes twice as much memory"),
    ],
)
def test_wrong_values(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    code, said = complaint("bench", tmp_path, *arguments)
    assert code == ExitCode.USAGE
    assert text in said
    assert names(tmp_path) == []


def test_a_name_that_would_steer_the_terminal(tmp_path: Path) -> None:
    evil = tmp_path / "a\x1b[2Jb"
    evil.mkdir()
    shown = show_on_terminal("bench", evil, *SMALL)
    assert "\\x1b[2J" in shown.text
    assert "\x1b[2J" not in shown.raw
