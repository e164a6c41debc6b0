"""The kit for a machine with a GPU, as far as it can be gone through without one, so that it cannot rot."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks.gpu.__main__ import TOTAL_SECONDS
from benchmarks.gpu.duties import PEERS
from benchmarks.gpu.kit import choose, list_parts
from benchmarks.gpu.page import BARE, Outcome, Run, figures_by_size, make_table
from benchmarks.gpu.site import fits
from benchmarks.harness.contender import Contender, ContenderError
from benchmarks.harness.guard import open_scratch
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import Results, Round

from places import ROOT

ONE_OF_EACH_KIND = ("device", "tests", "holdfast, 2 GB", "DCP async, thread, 2 GB")
ALL_PARTS = ("device", "tests", ", 2 GB", "holdfast")


def run_kit(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--wheels", str(out / "wheels"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
def test_a_dry_run_goes_through_all_kinds_of_parts(tmp_path: Path) -> None:
    """One way of each kind of program; `make gpu DRY=1` goes through all."""
    chosen = ALL_PARTS if "HOLDFAST_LONG" in os.environ else ONE_OF_EACH_KIND
    parts = choose(list_parts(dry=True), chosen)
    ended = run_kit("--dry", *(f"--only={word}" for word in chosen), out=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=Run)
    assert {name: outcome.state for name, outcome in run.parts.items()} == dict.fromkeys(
        [part.name for part in parts], "done"
    )
    figures = figures_by_size(run.results)
    missing = {(size, name) for size, name, reason in run.results.failures if reason.startswith("not installed")}
    wanted = {"returns_seconds", "free_seconds", "durable_seconds", "restore_seconds", "host_bytes"}
    for part in parts:
        if part.contender in PEERS:
            needed = wanted if "JAX" in part.contender else {*wanted, "lost_seconds"}
            assert figures[part.size][BARE]["free_seconds"] > 0
            found = figures[part.size][part.contender].keys()
            assert needed <= found or (part.size, part.contender) in missing, part.name
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


@pytest.mark.parametrize(
    ("place", "arguments", "reason"),
    [
        # A program of its own, which begins at once on a busy machine too.
        ("subprocess:run", {"args": ["sleep", "600"]}, "did not make within 3 s"),
        ("builtins:int", {"none": 1}, "TypeError"),
        ("os:abort", {}, "has ended"),
    ],
)
def test_part_that_fails_is_ended_with_its_processes(
    tmp_path: Path, place: str, arguments: dict[str, object], reason: str
) -> None:
    with open_scratch(tmp_path) as (directory, guard):
        contender = Contender("one", directory / "one", guard)
        contender.wait_started()
        process = os.pidfd_open(contender.pid)
        with pytest.raises(ContenderError, match=reason):
            contender.order("make", seconds=3 if place == "subprocess:run" else 60, place=place, **arguments)
        assert contender.has_ended
        # Such a descriptor can be read once its process has ended.
        assert select.select([process], [], [], 60)[0]
        os.close(process)


def test_table_of_an_unfinished_run_has_all_figures(tmp_path: Path) -> None:
    results = Results(machine=describe_machine(tmp_path), scale=1.0, failures=[("2 GB", "torch.save", "no disk")])
    run = Run(about={"device": "none"}, results=results)
    run.parts["one"] = Outcome("failed", 9.0, "the last words")
    for name, seconds in (("holdfast", 0.05), (BARE, 0.04)):
        results.rounds.append(Round(workload="2 GB", contender=name, number=1, figures={"free_seconds": seconds}))
    table = make_table(run)
    assert "the last words" in table
    assert "50 ms (1.25 x bare)" in table
    assert "1.25 x, at most 1.15 x: **missed**" in table
    assert "| no disk |" in table


def test_the_parts_that_matter_most_have_time_enough() -> None:
    """At the limit of each: the tests and holdfast's own figures come before all is over."""
    names, seconds = [], 0.0
    for part in list_parts(dry=False):
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
