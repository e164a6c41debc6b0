"""The kit for a machine with a GPU, as far as it can be gone through without one, so that it cannot rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import process
from benchmarks.gpu.contender import PEERS
from benchmarks.gpu.findings import BARE, Findings, read_lines
from benchmarks.gpu.parts import TOTAL_SECONDS, choose, list_parts
from benchmarks.gpu.site import fits

from places import ROOT

ONE_OF_EACH_KIND = ("device", "tests", "holdfast, 2 GB", "DCP async, thread, 2 GB")
ALL_PARTS = ("device", "tests", ", 2 GB", "holdfast")


def run_kit(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--wheels", str(out / "wheels"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_a_dry_run_goes_through_all_kinds_of_parts(tmp_path: Path) -> None:
    """One way of each kind of program; `make gpu DRY=1` goes through all."""
    chosen = ALL_PARTS if "HOLDFAST_LONG" in os.environ else ONE_OF_EACH_KIND
    parts = choose(list_parts(ROOT, dry=True), chosen)
    ended = run_kit("--dry", *(f"--only={word}" for word in chosen), out=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: end["state"] for name, end in document["parts"].items()}
    assert states == dict.fromkeys(["site", *(part.name for part in parts)], "done")
    figures: dict[tuple[str, float], dict[str, Any]] = {}
    for one in document["findings"]:
        if "peer" in one:
            figures.setdefault((one["peer"], one["size"]), {}).update(one)
    wanted = {"returns_seconds", "free_seconds", "durable_seconds", "restore_seconds", "lost_seconds", "host_bytes"}
    for part in parts:
        peer, _, name = part.name.rpartition(", ")
        if peer in PEERS:
            size = {"2 GB": 0.02, "12 GB": 0.12}[name]
            found = figures[peer, size]
            assert figures[BARE, size]["free_seconds"] > 0
            assert wanted <= found.keys() or found["note"].startswith("not installed"), part.name
    table = (tmp_path / "gpu.md").read_text()
    assert "A dry run" in table
    assert "tests marked cuda" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_kit_says_so_and_writes_nothing(tmp_path: Path) -> None:
    ended = run_kit(out=tmp_path / "out")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "no CUDA device" in ended.stdout
    assert torch.__version__ in ended.stdout
    assert not (tmp_path / "out").exists()


def test_the_make_targets_call_the_kit() -> None:
    for target, words in (("gpu", "python3 -m benchmarks.gpu --out"), ("gpu-wheels", "benchmarks.gpu.wheels .gpu-w")):
        shown = subprocess.run(
            ["make", "-n", target, "PYTHON=python3", "DRY="], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert words in " ".join(shown.stdout.split())


def run_text(text: str, tmp_path: Path, limit_seconds: float) -> process.Ended:
    return process.run([sys.executable, "-c", text], os.environ, ROOT, limit_seconds, tmp_path / "log")


def test_a_part_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    # A shell, which begins at once on a busy machine too.
    command = ["/bin/sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; echo began; wait"]
    ended = process.run(command, os.environ, ROOT, 5, tmp_path / "log")
    assert ended.state == "timed out"
    assert "began" in ended.text
    child = int((tmp_path / "pid").read_text())
    end_at = time.monotonic() + 60
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < end_at:
        # It is no child of this process: the one that adopts it has to collect its exit code.
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
    else:
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("text", "state"),
    [("pass", "done"), ("raise SystemExit('no')", "failed"), ("import os; os.abort()", "crashed")],
)
def test_end_state_of_each_part_is_reported(tmp_path: Path, text: str, state: str) -> None:
    assert run_text(text, tmp_path, 60).state == state


def test_findings_are_kept_when_a_later_part_fails(tmp_path: Path) -> None:
    findings = Findings(tmp_path, {"device": "none"})
    lines = tmp_path / "lines"
    lines.write_text('{"peer": "holdfast", "size": 2.0, "free_seconds": 0.05}\n{"peer": "holdf')
    findings.add("one", {"state": "timed out", "seconds": 9.0, "text": "the last words"}, read_lines(lines))
    findings.add(
        "two", {"state": "done", "seconds": 1.0, "text": ""}, [{"peer": BARE, "size": 2.0, "free_seconds": 0.04}]
    )
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["part"] for one in document["findings"]] == ["one", "two"]
    table = (tmp_path / "gpu.md").read_text()
    assert "the last words" in table
    assert "50 ms (1.25 x bare)" in table
    assert "1.25 x, at most 1.15 x: **missed**" in table


def test_the_parts_that_matter_most_have_time_enough() -> None:
    """At the limit of each: the tests and holdfast's own figures come before all is over."""
    names, seconds = [], 0.0
    for part in list_parts(ROOT, dry=False):
        seconds += part.limit_seconds
        if seconds <= TOTAL_SECONDS:
            names.append(part.name)
    assert TOTAL_SECONDS < 540
    assert {"tests", "holdfast, 2 GB", "holdfast, overlapped, 12 GB", "DCP async, thread, 2 GB"} <= set(names)


def test_wheels_that_fit_are_known_by_their_names() -> None:
    own, other = f"cp3{sys.version_info.minor}", "cp39"
    linux = os.uname().machine
    assert fits("pure-1.0-py3-none-any.whl")
    assert fits(f"made-1.0-{own}-{own}-manylinux_2_17_{linux}.manylinux2014_{linux}.whl")
    assert fits(f"stable-1.0-cp310-abi3-manylinux_2_17_{linux}.whl")
    assert not fits(f"old-1.0-{other}-{other}-manylinux_2_17_{linux}.whl")
    assert not fits(f"elsewhere-1.0-{own}-{own}-manylinux_2_17_sparc.whl")


def test_a_bare_machine_gets_what_came_along(tmp_path: Path) -> None:
    """No compiler, and nothing that Python can import but its own library and what is in the wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "msgspec-9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "where = 'brought'")
    program = """
import sys
from pathlib import Path
from benchmarks.gpu.site import make_site
print(*make_site(*map(Path, sys.argv[1:])), sep="\\n")
"""
    command = [sys.executable, "-S", "-c", program, str(ROOT), str(tmp_path), str(wheels)]
    said = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert said[0] == "brought along: msgspec"
    assert "numpy" in said[1]
    assert [line.partition(": ")[2][:12] for line in said[2:]] == ["NOT COMPILED"] * 2
    assert (tmp_path / "site" / "msgspec" / "__init__.py").exists()
    assert (tmp_path / "site" / "holdfast" / "__init__.py").exists()
