"""What `python -m benchmarks.frameworks` measures, with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.frameworks import FRAMEWORKS
from benchmarks.frameworks.__main__ import main
from benchmarks.frameworks.comparison import Plan
from benchmarks.frameworks.page import TITLE, keep_section, render_section
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import Results, Round
from benchmarks.peers import find_missing
from click.testing import CliRunner

SCALE = 0.0005
STEPS = 6


CASES = [(name, way, False) for name, entry in FRAMEWORKS.items() for way in entry.ways]
CASES += [("transformers", way, True) for way in FRAMEWORKS["transformers"].ways]


@pytest.mark.parametrize(("framework", "way", "is_stream"), CASES)
def test_a_restart_takes_the_epoch_up(framework: str, way: str, is_stream: bool, tmp_path: Path) -> None:
    if missing := find_missing(FRAMEWORKS[framework].needs):
        pytest.skip(f"not installed: {missing}")
    from benchmarks.frameworks.fit import make_fit

    make_fit(framework, way, tmp_path, SCALE).prepare(STEPS, is_stream=is_stream)
    figures = make_fit(framework, way, tmp_path, SCALE).measure_restart(STEPS, is_stream=is_stream)
    # Keras' own callback begins the epoch again; with the others the first step is a new one.
    assert (figures["first"] == figures["resume"]) == (way != "BackupAndRestore")


@pytest.mark.parametrize(("framework", "way"), [(framework, way) for framework, way, stream in CASES if not stream])
def test_saves_of_a_fit_take_time(framework: str, way: str, tmp_path: Path) -> None:
    if missing := find_missing(FRAMEWORKS[framework].needs):
        pytest.skip(f"not installed: {missing}")
    from benchmarks.frameworks.fit import make_fit

    figures = make_fit(framework, way, tmp_path, SCALE).measure_saves(saves=1, interval_steps=2)
    assert figures.keys() == {"step", "lost", "lost_cpu", "stall", "longest", "first_stall"}
    assert min(figures["longest"], figures["step"]) > 0


def test_a_dry_run_measures_all_ways_of_a_framework(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    outcome = CliRunner().invoke(main, ["--dry", "--only", "keras", "--json", str(figures)])
    assert outcome.exit_code == 0, outcome.output
    rounds = json.loads(figures.read_text())["rounds"]
    found = {(entry["workload"], entry["contender"], entry["number"]) for entry in rounds}
    ways = FRAMEWORKS["keras"].ways
    both = {(part, way, 1) for part in ("keras", "keras restart") for way in ways}
    left = {("keras restart", way, 0) for way in ways}
    assert found == both | left | {("keras", "limits", 1), ("keras restart", "nothing", 1)}
    assert "| Keras, BackupAndRestore |" in outcome.output


@pytest.mark.parametrize(
    ("own", "peer", "shown"),
    [
        ((0.1, 0.3), (1.9, 2.1), "| 0.10 |"),
        ((0.9, 1.1), (1.9, 2.1), "| **0.50** |"),
        ((-0.1, 0.3), (1.9, 2.1), "| within the noise (below 0.15) |"),
        ((0.1, 0.3), (-0.1, 2.1), "| within the noise |"),
    ],
)
def test_what_does_not_differ_from_nothing_is_shown_as_noise(
    own: tuple[float, float], peer: tuple[float, float], shown: str, tmp_path: Path
) -> None:
    rounds = [
        Round(workload="keras", contender=way, number=number, figures={"lost": value})
        for way, values in zip(FRAMEWORKS["keras"].ways, (own, peer), strict=True)
        for number, value in enumerate(values, 1)
    ]
    page = render_section(Results(machine=describe_machine(tmp_path), scale=1, rounds=rounds), Plan(rounds=2))
    assert f"| Keras, BackupAndRestore {shown}" in page


def test_the_page_keeps_the_section_when_the_rest_is_written_again() -> None:
    old = f"# Old\n\nwords\n\n{TITLE}\n\nfigures\n"
    assert keep_section("# New\n\nothers\n", old) == f"# New\n\nothers\n\n{TITLE}\n\nfigures\n"
    assert keep_section("# New\n", "# Old\n") == "# New\n"
    assert keep_section(old, f"\n{TITLE}\n\nmore\n") == f"# Old\n\nwords\n\n{TITLE}\n\nmore\n"
