"""What a run says of its cost, of what a kill has lost, of room on the disk and of a mistyped directory."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from command_line import call_json
from holdfast.process.progress import LongRead
from holdfast.training.announcements import is_slip
from mounts import mounted
from patience import PATIENCE_SECONDS

COST = r"training stopped for [\d.]+ m?s of [\d.]+ m?s \([\d.]+ %\)"

PROGRAM = """
import os, signal, sys, time
import numpy as np, holdfast

directory, end, reports = sys.argv[1:]
policy = holdfast.Steps(10**9) if end else holdfast.Steps(10)
with holdfast.resumable(directory, w=np.zeros(3), save_every=policy) as run:
    for step in run.steps(10**9 if end else run.step + 10):
        if reports:
            run.report(loss=float(step))
        if end and step == 10:
            run.save().wait_ended()
        # Without a loss or a loader, a sign of life is left once a second.
        if step == 17:
            at_17 = time.monotonic()
        if end and step >= 17 and (reports or time.monotonic() > at_17 + 1.2):
            os.kill(os.getpid(), getattr(signal, end))
            end = ""
"""


def train(directory: Path, end: str = "", reports: str = "reports") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(directory), end, reports]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


@pytest.mark.parametrize("reports", ["reports", ""])
def test_a_start_after_a_kill_says_how_many_steps_are_repeated(tmp_path: Path, reports: str) -> None:
    run = tmp_path / "run"
    assert train(run, "SIGKILL", reports).returncode == -signal.SIGKILL
    resumed = train(run, "", reports).stderr
    (lost,) = re.findall(r"at step 11 \(saved .*; (.+) steps done after that are repeated\)", resumed)
    assert lost == "6" if reports else int(lost.removeprefix("at least ")) > 6
    # That one has ended well: nothing is lost.
    assert re.search(r"at step 21 \(saved [^;]*\), saves every 10 steps$", train(run).stderr, re.MULTILINE)


def test_leaving_and_the_end_say_what_saving_has_cost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    left = train(run, "SIGTERM")
    assert left.returncode == 42
    *_, cost, last = left.stderr.splitlines()
    assert re.fullmatch(rf"holdfast: 2 saves; {COST}; 2 checkpoints, [\d.]+ kB", cost)
    assert last == "holdfast: step 18 is saved; leaving with exit code 42."
    assert re.search(rf"saved\nholdfast: 2 saves; {COST}; 3 checkpoints, [\d.]+ kB\n$", train(run).stderr)


def test_every_word_about_the_size_of_a_checkpoint_names_one_number(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hf.resumable(run, w=np.zeros(3), save_every=2, preemption="off") as entered:
        for _ in entered.steps(9):
            entered.report(loss=1.0)
    totals = entered.manager.totals
    sizes = {step["size_bytes"] for step in call_json("list", run)["steps"]}
    assert {call_json("show", run)["size_bytes"], call_json("verify", run)["steps"][0]["read_bytes"]} == sizes
    (runs,) = call_json("list", tmp_path)["runs"]
    assert (runs["size_bytes"], [totals.kept_bytes / totals.steps_kept]) == (totals.kept_bytes, [*sizes])


def test_a_quiet_run_and_one_without_a_save_name_no_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "holdfast"):
        for quiet, steps in ((True, 3), (False, 3)):
            with hf.resumable(tmp_path / "run", w=np.zeros(3), quiet=quiet, preemption="off") as run:
                list(run.steps(steps))
    assert "already at step 3" in caplog.text
    assert "training stopped" not in caplog.text


@pytest.mark.parametrize(("size_bytes", "room"), [(11 << 20, "3 of 4"), (14 << 20, "")])
def test_the_first_save_says_if_the_disk_has_no_room_for_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size_bytes: int, room: str
) -> None:
    options = {"keep": hf.Latest(3), "save_every": hf.Steps(1), "preemption": "off"}
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size_bytes}", "none") as disk:
        with hf.resumable(disk / "run", w=np.ones(3 << 17), **options) as run:  # type: ignore[arg-type]
            list(run.steps(1))
        said = [text for text in caplog.messages if "room for" in text]
        assert [text.partition(":")[0] for text in said] == [
            f"the disk has room for {found} checkpoints of 3.2 MB" for found in [room] if found
        ]
        assert not said or "keep=Latest(3)" in said[0]


def test_room_is_looked_at_when_an_incremental_save_shows_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6M", "none") as disk:
        frozen, trained = np.ones(3 << 17), np.zeros(3)
        with hf.resumable(
            disk / "run", frozen=frozen, w=trained, save_every=hf.Steps(1), incremental=True, preemption="off"
        ) as run:
            for _ in run.steps(6):
                trained += 1
    assert "room for" not in caplog.text


SLIPS = [("bsae", "base"), ("bas", "base"), ("baase", "base"), ("bade", "base"), ("gpt2-smal", "gpt2-small")]
SIBLINGS = [
    *(
        ("exp1", "exp2"),
        ("exp1", "exp12"),
        ("seed-3", "seed-4"),
        ("a", "b"),
        ("model-s", "model-m"),
        ("run_a", "run_b"),
    ),
    *(("base", "base"), ("base", "best-of"), ("base", "esab"), ("lr-1e-3", "lr-1e-4"), ("exp", "exp-1"), ("12", "21")),
]


@pytest.mark.parametrize(("one", "other"), SLIPS + SIBLINGS)
def test_a_slip_is_a_letter_of_a_word_and_no_number(one: str, other: str) -> None:
    assert is_slip(one, other) == is_slip(other, one) == ((one, other) in SLIPS)


def test_a_new_run_beside_one_of_nearly_its_name_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "basf").mkdir(parents=True)  # It holds no steps.
    for name, steps in (("base", 4), ("bsae", 1), ("bsae", 2)):
        with hf.resumable(f"runs/{name}", w=np.zeros(3), quiet=True, preemption="off") as run:
            list(run.steps(steps))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    text = "runs/base has 4 steps: if you meant that one, stop this job and correct the name runs/bsae"
    assert warned == [text]


def test_a_long_read_is_a_line_in_the_log_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    end_at, moved = time.monotonic() + PATIENCE_SECONDS, 0
    with caplog.at_level("INFO", "holdfast"), LongRead("restoring step 3", lambda: 10**15) as shown:
        while not caplog.messages and time.monotonic() < end_at:
            shown.advance(1000)
            moved += 1
    (line,) = caplog.messages
    assert re.fullmatch(r"restoring step 3: [\d.]+ [kMGT]?B of 1.0 PB read", line)
    assert moved > 1


FILLING = """
import sys, numpy as np, holdfast

with holdfast.resumable(sys.argv[1], w=np.ones(1 << 18), save_every=holdfast.Steps(1), keep=holdfast.All()) as run:
    for step in run.steps(1000):
        run.manager.lineage.in_flight and run.manager.lineage.in_flight.wait_ended()
"""


def test_a_disk_that_fills_is_one_line_and_one_error_without_its_cause(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6M", "none") as disk:
        command = [sys.executable, "-c", FILLING, str(disk / "run")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "holdfast: " in line and "room for" not in line]
    new, failed, further = lines
    assert new.endswith("is new; saves every step")
    step = int(re.findall(r"save of step (\d+) failed: .*\(ENOSPC\)$", failed)[0])
    assert further == f"holdfast: step {step + 1} was not saved either"
    _, error = done.stderr.split("Traceback (most recent call last):\n")  # There is one.
    assert "direct cause" not in done.stderr
    assert re.findall(r'File "(.*?)"', error) == ["<string>"]
    assert f"SaveFailedError: step {step} was not saved" in error
    assert "bytes are needed and" in error


@pytest.mark.parametrize(("save_every", "is_warned"), [(7, True), (10, False)])
def test_best_with_metrics_of_steps_that_are_not_saved_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_every: int, is_warned: bool
) -> None:
    with hf.resumable(
        tmp_path / "run", w=np.zeros(3), save_every=save_every, keep=hf.Latest(1) | hf.Best("val_loss")
    ) as run:
        for step in run.steps(40):
            run.report(loss=1.0)
            if step % 10 == 9:
                run.report(val_loss=1 / (step + 1))
    said = [record.message for record in caplog.records if "Save where you validate" in record.message]
    assert len(said) == is_warned
    assert all("val_loss was reported at step 9 and is stored with step 14" in text for text in said)
