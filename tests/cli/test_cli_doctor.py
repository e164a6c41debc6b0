"""`holdfast doctor`: what it finds and advises, its errors, and that it leaves nothing behind and disturbs no run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pytest

import holdfast as hf
from command_line import (
    NEWEST,
    PROGRAM,
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
from holdfast.catalog import StoredRun
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.findings import PREFIX
from holdfast.cli.screen import parse_seconds, parse_size
from holdfast.numbers import span_text
from holdfast.policies import Auto, SaveMoment
from holdfast.policies.saving import DEFAULT_MTBF_SECONDS
from holdfast.save import copy_plan
from holdfast.storage import LocalStorage, digesting
from holdfast.storage.local.mounts import parse_mounts
from mounts import fill, mounted
from tracing import needs_strace

SMALL: Final = ("--size", "3MB")
FIGURES: Final = {
    "publish_seconds",
    "free_bytes",
    "clock_ahead_seconds",
    "trial_bytes",
    "blocked_seconds",
    "durable_seconds",
    "restore_seconds",
    "write_bytes_per_second",
    "read_bytes_per_second",
    "mtbf_seconds",
    "young_seconds",
    "interval_seconds",
    "per_failure_seconds",
    "lost_share",
}
NAMES: Final = [
    *("file system", "create-only", "fsync", "direct I/O", "room", "clock", "compiled code", "reuse of space"),
]
CONTEXT = click.Context(click.Command("doctor"))
OPTION = click.Option(["--some"])


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `--json` says of an empty directory."""
    return call_json("doctor", tmp_path_factory.mktemp("disk"), *SMALL, "--mtbf", "24h")


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {finding["name"]: finding["status"] for finding in document["findings"]}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_without_a_directory_it_checks_the_installation() -> None:
    document = call_json("doctor")
    found = {finding["name"]: finding["text"] for finding in document["findings"]}
    assert document["is_fit"] is True
    assert found["holdfast"].startswith(f"{hf.__version__}, from ")
    assert found["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["platform"].startswith("Linux ")
    assert found["numpy"] == np.__version__
    assert "directory" not in document
    assert ["python", found["python"].split()[0], found["python"].split()[1]] in [
        line.split() for line in call("doctor").stdout.splitlines()
    ]


# What it finds and advises.


def test_json_holds_every_finding_and_figure(document: dict[str, Any]) -> None:
    assert (document["holdfast"], document["version"]) == ("doctor", 1)
    assert document["is_fit"] is True
    assert (document["size_bytes"], document["size_of_step"]) == (3_000_000, None)
    assert [finding["name"] for finding in document["findings"]] == NAMES
    for finding in document["findings"]:
        assert set(finding) == {"name", "status", "text", "hint"}
        assert (finding["status"] == "ok") == (finding["hint"] == "")
    assert set(document["figures"]) == FIGURES
    assert all(figure > 0 for name, figure in document["figures"].items() if name != "clock_ahead_seconds")
    compiled = copy_plan.NATIVE is not None and digesting.find_native() is not None
    assert statuses(document)["compiled code"] == ("ok" if compiled else "note")


def test_the_advice_is_what_auto_chooses(document: dict[str, Any]) -> None:
    figures = document["figures"]
    blocked, durable = figures["blocked_seconds"], figures["durable_seconds"]
    assert document["figures"]["mtbf_seconds"] == 86400.0
    assert blocked < durable
    chosen = Auto(mtbf_seconds=86400.0).chosen(
        SaveMoment(step=1, save_blocked_seconds=blocked, save_durable_seconds=durable)
    )
    assert document["bound"] == (chosen.bound if chosen.seconds >= 60 else "floor")
    assert figures["interval_seconds"] == max(math.ceil(chosen.seconds), 60)
    assert document["save_every"] == f"holdfast.Seconds({max(math.ceil(chosen.seconds), 60)})"
    assert figures["young_seconds"] == pytest.approx(math.sqrt(2 * blocked * 86400.0))
    assert 0 < figures["lost_share"] < 1
    assert figures["per_failure_seconds"] < figures["interval_seconds"] + durable + figures["restore_seconds"]


def test_what_a_large_state_costs_is_scaled_up(tmp_path: Path) -> None:
    document = call_json("doctor", tmp_path, "--size", "300MB")
    figures = document["figures"]
    assert (document["size_bytes"], figures["trial_bytes"]) == (300_000_000, 128_000_000)
    assert figures["durable_seconds"] == pytest.approx(3e8 / figures["write_bytes_per_second"])
    assert document["figures"]["mtbf_seconds"] == DEFAULT_MTBF_SECONDS
    assert f"[default: {span_text(DEFAULT_MTBF_SECONDS).replace(' ', '')}, as for Auto]" in " ".join(
        call("doctor", "--help").stdout.split()
    )


def test_the_size_is_that_of_the_newest_checkpoint(run: Path) -> None:
    document = call_json("doctor", run)
    assert document["size_of_step"] == 300
    assert document["size_bytes"] == call_json("show", run)["size_bytes"]
    (run / NEWEST / "manifest.json").write_text("{}")
    assert call_json("doctor", run)["size_of_step"] == 250
    assert call_json("doctor", run, "--size", "5MB")["size_bytes"] == 5_000_000


def test_pipe_gets_a_table_that_can_be_split(tmp_path: Path) -> None:
    result = call("doctor", tmp_path, *SMALL)
    assert result.exit_code == 0
    heading, *rows = lines_of(result.stdout)
    assert heading == ["NAME", "VALUE"]
    assert {len(row) for row in rows} == {2}
    cells = dict(rows)
    assert cells["directory"] == "fit"
    assert cells["create-only"] == "ok"
    assert {*FIGURES, "save_every"} <= set(cells)
    assert "\x1b" not in result.stdout


def test_on_a_terminal(tmp_path: Path) -> None:
    shown = show_on_terminal("doctor", tmp_path, *SMALL, columns=100)
    assert shown.exit_code == ExitCode.OK
    for text in (
        f"{tmp_path}   fit for checkpoints",
        "ok  create-only",
        "saving, 5 of 5",
        "what a save of 3.0 MB costs, by saves of 3.0 MB",
        "every byte checked",
        "how often to save, with a failure every 6 h",
        "save_every=holdfast.Seconds(",
    ):
        assert text in shown.text
    assert "\x1b[1;32msave_every" in shown.raw


def test_progress_is_on_the_error_stream_only(tmp_path: Path) -> None:
    shown = show_on_terminal("doctor", tmp_path, *SMALL, pipe_output=True)
    assert shown.exit_code == ExitCode.OK
    assert "saving, 5 of 5" in shown.text
    assert shown.output.startswith("NAME")
    assert "\x1b" not in shown.output
    asked = show_on_terminal("doctor", tmp_path, *SMALL, "--json", pipe_output=True)
    assert json.loads(asked.output)["is_fit"] is True


def test_a_name_that_would_steer_the_terminal(tmp_path: Path) -> None:
    evil = tmp_path / "a\x1b[2Jb"
    evil.mkdir()
    shown = show_on_terminal("doctor", evil, *SMALL)
    assert "\\x1b[2J" in shown.text
    assert "\x1b[2J" not in shown.raw


# What it must not disturb, and what it must not leave.


def test_a_run_that_is_being_saved_to_is_not_disturbed(run: Path) -> None:
    before = names(run)
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(400)
        manager.wait()
        generation = StoredRun(LocalStorage(run)).look().generation
        assert call("doctor", run).exit_code == 0
        assert StoredRun(LocalStorage(run)).look().generation == generation
        manager.save(500)
    assert call_json("list", run)["newest_step"] == 500
    assert call("verify", run, "--all").exit_code == ExitCode.OK
    assert set(before) <= set(names(run))
    assert not [name for name in names(run) if name.startswith(".holdfast")]


def test_within_a_job_it_is_alone(tmp_path: Path) -> None:
    with job_that_cannot_be_joined() as environment:
        done = run_program("doctor", tmp_path, "--size", "1MB", env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert "save_every" in done.stdout


def test_files_of_a_killed_doctor_are_not_listed_as_a_run(run: Path) -> None:
    before, listed = names(run), call("list", run, "--all").stdout
    doctor = Terminal("doctor", run, "--size", "100MB")
    doctor.read_until("restoring, 1 of 5")
    doctor.process.kill()
    doctor.finish()
    (left,) = set(names(run)) - set(before)
    assert left.startswith(PREFIX)
    assert sum(path.stat().st_size for path in (run / left).rglob("*")) > 0
    assert call("list", run, "--all").stdout == listed
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(600)
    assert (run / left).exists()


@pytest.mark.parametrize(
    ("number", "code", "label"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED, "saving, 2 of 5"),
        (signal.SIGINT, ExitCode.INTERRUPTED, "restoring, 1 of 5"),
        (signal.SIGTERM, 128 + signal.SIGTERM, "saving, 2 of 5"),
        (signal.SIGHUP, 128 + signal.SIGHUP, "restoring, 1 of 5"),
    ],
)
def test_a_signal_removes_all_files(tmp_path: Path, number: signal.Signals, code: int, label: str) -> None:
    # So much that it is not done before the signal comes, on a busy machine too.
    doctor = Terminal("doctor", tmp_path, "--size", "400MB")
    doctor.read_until(label)
    doctor.process.send_signal(number)
    shown = doctor.finish()
    assert shown.exit_code == code
    assert ("holdfast: interrupted\n" in shown.text) == (number == signal.SIGINT)
    assert "Traceback" not in shown.text
    assert "was not saved" not in shown.text
    assert names(tmp_path) == []


# Places that are unfit, full or of another kind.


def test_memory_that_has_little_room_is_unfit(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=40m", "tmpfs") as root:
        document = call_json("doctor", root, exit_code=ExitCode.UNFIT)
        assert document["is_fit"] is False
        assert (document["size_of_step"], document["size_bytes"]) == (None, 10**9)
        found = statuses(document)
        assert (found["file system"], found["room"]) == ("unfit", "unfit")
        # Nor is space used again there.
        texts = {finding["name"]: finding["text"] for finding in document["findings"]}
        assert texts["reuse of space"] == "each save writes new files"
        assert document["figures"]["trial_bytes"] <= 10 << 20
        assert statuses(call_json("doctor", root, "--size", "25MB", exit_code=ExitCode.UNFIT))["room"] == "note"
        shown = show_on_terminal("doctor", root, columns=120)
        assert shown.exit_code == ExitCode.UNFIT
        assert "not fit for checkpoints" in shown.text
        assert "unfit: room: a checkpoint of 1.0 GB does not fit" in shown.text
        assert names(root) == []


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as root:
        fill(root)
        code, said = complaint("doctor", root, "--size", "100kB")
        assert code == ExitCode.FAILED
        assert "ENOSPC" in said
        assert names(root) == ["filler"]


@pytest.mark.parametrize("limit", [6000, 7813])
def test_a_limit_on_the_size_of_files(tmp_path: Path, limit: int) -> None:
    """In kibibytes, as a quota: the first is too small for the arrays, the other for them and the file's header."""
    limited = f"ulimit -f {limit}; exec {PROGRAM} doctor {tmp_path} --size 8MB"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.FAILED
    assert "ulimit -f" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == []


@needs_strace
def test_a_file_system_that_may_replace_files_is_unfit(tmp_path: Path) -> None:
    refuse = ("-e", "inject=linkat:error=EOPNOTSUPP", "-e", "inject=renameat2:error=EINVAL")
    tracing = ["strace", "-f", "-o", os.devnull, "-e", "trace=linkat,renameat2", *refuse]
    command: list[str | Path] = [*tracing, PROGRAM, "doctor", tmp_path]
    for option in ("--size=1MB", "--json"):
        done = subprocess.run([*command, option], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == ExitCode.UNFIT, done.stderr
        assert "Traceback" not in done.stderr
        assert "neither hard links nor an atomic rename without overwriting" in done.stderr + done.stdout
    assert json.loads(done.stdout)["save_every"] is None
    assert names(tmp_path) == []


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs") as root:
        code, said = complaint("doctor", root)
        assert code == ExitCode.FAILED
        assert "mounted read-only" in said


def test_a_file_system_whose_clock_is_wrong(tmp_path: Path) -> None:
    """Another time of this machine stands for that: what is written there has the real one."""
    program = "import time; now = time.time; time.time = lambda: now() - 300; import holdfast.cli.main as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", str(tmp_path), *SMALL],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.OK, done.stderr
    assert re.search(r"note: clock: the file system's is (299|300|301) s ahead", done.stderr)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    code, said = complaint("doctor", tmp_path / "runs" / "new")
    assert code == ExitCode.NOTHING_THERE
    assert "there is no directory" in said
    assert f"such as {tmp_path}." in said
    (tmp_path / "file").write_text("x")
    code, said = complaint("doctor", tmp_path / "file")
    assert code == ExitCode.NOTHING_THERE
    assert "is not a directory" in said


def test_doctor_refuses_what_is_neither_a_directory_nor_a_bucket(run: Path) -> None:
    for place, text in (
        ("memory://trial", "is neither a directory of this machine nor a bucket"),
        ("hdfs://host/run", "hdfs:// is not supported"),
    ):
        code, said = complaint("doctor", place)
        assert code == ExitCode.USAGE
        assert text in said
        assert "hint: " in said
    assert call("doctor", f"file://{run}").exit_code == 0


def test_doctor_of_a_bucket_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)
    code, said = complaint("doctor", "s3://bucket/run")
    assert (code, "needs obstore" in said, "pip install" in said) == (ExitCode.USAGE, True, True)


MOUNTS = """\
22 28 0:21 / /proc rw,nosuid - proc proc rw
31 28 0:30 / /data/my\\040bucket rw,nosuid,nodev,relatime shared:99 - {kind} {source} rw,user_id=0
32 28 8:1 / / rw - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("kind", "source", "named"),
    [
        ("fuse", "mountpoint-s3", "mounted by mountpoint-s3, without atomic renames and links. Use s3:// instead"),
        ("fuse.s3fs", "s3fs", "mounted by s3fs"),
        ("fuse.gcsfuse", "my-bucket", "Use gs:// instead"),
        ("fuse", "blobfuse2", "Use az:// instead"),
        ("fuse.sshfs", "host:/home", ""),
        ("fuse.mergerfs", "a:b", ""),
        ("fuse.juicefs", "s3fs:x", ""),
        ("ext4", "s3fs", ""),
    ],
)
def test_mounted_buckets_are_named_and_no_other_mounts(kind: str, source: str, named: str) -> None:
    mount = parse_mounts(MOUNTS.format(kind=kind, source=source), os.makedev(0, 30))
    assert mount.kind == kind
    assert named in mount.bucket_hint
    assert bool(named) == bool(mount.bucket_hint)
    assert parse_mounts(MOUNTS, os.makedev(9, 9)).kind == "unknown"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--size", "big"), "'big' is not a size; write 500MB, 1.5GB or 2GiB."),
        (("--size", "0"), "'0' is not between 1 byte"),
        (("--size", "5"), "'5' is 5 B, too little to measure; write 500MB or 5GB."),
        (("--size", "99kB"), "too little to measure"),
        (("--mtbf", "24"), "'24' is not a time; write it with its unit: 350ms, 30s, 90min, 24h or 7d."),
    ],
)
def test_wrong_values(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    code, said = complaint("doctor", tmp_path, *arguments)
    assert code == ExitCode.USAGE
    assert text in said
    assert names(tmp_path) == []


# Words.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("500 mb", 500_000_000),
        ("4096", 4096),
        ("1k", 1000),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(CONTEXT, OPTION, text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.5XB", "-1GB", "1e9", "nan", "0", "0.1", "10000000PB", "1 GB 2", "٣GB"])
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a size|is not between"):
        parse_size(CONTEXT, OPTION, text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24h", 86400.0), ("90min", 5400.0), ("350ms", 0.35), ("7 d", 604800.0), ("1h30m", 5400.0), ("1.5S", 1.5)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(CONTEXT, OPTION, text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "24", "5x", "-1h", "inf", "0s", "99999999d", "1h30", "٣h"])
def test_text_that_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a time|is not between"):
        parse_seconds(CONTEXT, OPTION, text)


def test_options_that_are_left_out() -> None:
    assert parse_size(CONTEXT, OPTION, None) is None
    assert parse_seconds(CONTEXT, OPTION, None) is None
