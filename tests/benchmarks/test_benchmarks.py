"""The benchmarks run, at a tiny size, and their ratios come from what they measured."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.__main__ import RESULTS_NAME, main
from benchmarks.harness import page_cache
from benchmarks.harness.guard import open_scratch
from benchmarks.harness.machine import Machine, describe_machine
from benchmarks.harness.picture import draw_seconds
from benchmarks.harness.results import (
    Results,
    Round,
    Shape,
    UnreadableResultsError,
    find_misfit,
    merge,
    read_results,
    write_results,
)
from benchmarks.harness.summary import limits_of, ratio_to, summaries
from benchmarks.harness.turns import Bench
from benchmarks.one_process.page import render_report
from benchmarks.one_process.parts import compare_many_saves, growth_of
from benchmarks.one_process.pictures import SHOWN, TITLES, render_picture
from benchmarks.one_process.small import start_seconds, step_seconds
from benchmarks.one_process.targets import find_targets
from benchmarks.peers import PEERS, find_missing
from benchmarks.states.model import Model
from benchmarks.states.values import Values
from benchmarks.states.workloads import (
    GPT2_SMALL,
    TRAINED,
    ModelSize,
    make_workload,
    model_shapes,
    place_tensors,
    state_bytes,
    state_shapes,
    trained_names,
)
from click.testing import CliRunner
from msgspec.structs import replace

from patience import PATIENCE_SECONDS, killed_after
from places import ROOT

MACHINE = Machine(
    processor="a processor",
    cores=2,
    memory_bytes=1 << 34,
    file_system="ext4",
    system="Linux 6",
    versions={"torch": "2"},
)


TINY = ["--scale", "0.0005", "--rounds", "1"]
IS_LONG = "HOLDFAST_LONG" in os.environ
GIVING_BACK = [name for name in PEERS if name == "holdfast" or IS_LONG]
PARTS = ["model", "training", "mostly-frozen"] if IS_LONG else ["small-tensors"]
SOME = ["--peer", "holdfast", "--peer", "safetensors"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """What a tiny run of two peers leaves; where it may take long, of all of them, and of two in the other parts.

    Processes of pytest that share the tests share them: they take long.
    """
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    out, whole = place / "bench", place / "bench-is-whole"
    with (place / "bench-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            runs = [[*(word for part in PARTS for word in ("--only", part)), *SOME]]
            if IS_LONG:
                runs.append(["--only", "small-tensors", *(word for name in GIVING_BACK for word in ("--peer", name))])
            for options in runs:
                outcome = CliRunner().invoke(main, [*TINY, "--out", str(out), *options])
                assert outcome.exit_code == 0, outcome.output
            whole.touch()
    return read_results(out / RESULTS_NAME), out


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVING_BACK)
def test_every_peer_returns_its_input_or_is_reported_missing(results: tuple[Results, Path], name: str) -> None:
    found, out = results
    rounds = [entry for entry in found.rounds if (entry.workload, entry.contender) == ("small-tensors", name)]
    if name in found.missing:
        assert not rounds
        reason = found.missing[name]
        assert reason == f"not installed: {', '.join(find_missing(PEERS[name].needs))}"
        assert f"- {name}: {reason}" in (out / "benchmarks.md").read_text()
    else:
        # A run compares what was restored with what was saved, and what differs is a failure.
        assert not [failure for failure in found.failures if failure[1] == name]
        assert [entry.number for entry in rounds] == [0, 1]
        restored = set() if PEERS[name].reads_as else {"restore_cold", "restore_warm"}
        assert {"stall", "held", "durable", *restored} <= rounds[1].figures.keys()
        assert "restore_cold" not in rounds[0].figures
        assert found.makes_last[name] in (out / "benchmarks.md").read_text()


def test_a_run_measures_every_contender_in_every_round(results: tuple[Results, Path]) -> None:
    found, _ = results
    assert found.failures == []
    assert set(found.shapes) == {"small-tensors", *PARTS}
    seen = [(entry.workload, entry.contender, entry.number) for entry in found.rounds]
    for name in ("holdfast", "safetensors"):
        for workload in PARTS:
            numbers = [number for part, one, number in seen if (part, one) == (workload, name)]
            assert numbers == [*range(10 if workload == "mostly-frozen" else 2)]
    for entry in found.rounds:
        assert all(
            value > 0 for key, value in entry.figures.items() if key not in ("lost", "wait", "save_extra_bytes")
        ), entry


@pytest.mark.long
def test_those_of_one_slice_have_limits_of_their_own(results: tuple[Results, Path]) -> None:
    found, _ = results
    measured = {(entry.slice, entry.number) for entry in found.rounds if entry.contender == "limits"}
    assert {(entry.slice, entry.number) for entry in found.rounds if entry.workload == "model"} <= measured
    slices = {entry.slice for entry in found.rounds}
    assert len(slices) == len({(entry.workload, entry.slice) for entry in found.rounds}) > 2


def test_a_run_saves_all_bytes_and_removes_them(results: tuple[Results, Path]) -> None:
    found, out = results
    for entry in found.rounds:
        # What is compressed, and what fits into the directory's own block, may take less.
        if "disk_bytes" in entry.figures and "Orbax" not in entry.contender:
            assert entry.figures["disk_bytes"] >= found.shapes[entry.workload].size_bytes
    assert sorted(path.name for path in out.iterdir()) == ["benchmarks.md", "benchmarks.svg", RESULTS_NAME, "speed.svg"]


@pytest.mark.long
def test_ten_saves_without_deduplication_take_ten_full_states(results: tuple[Results, Path]) -> None:
    found, _ = results
    growth = growth_of(found, "safetensors")
    assert growth is not None
    assert found.changing is not None
    full_bytes, changed_bytes = found.shapes["mostly-frozen"].size_bytes, found.changing.changed_bytes
    assert growth.bytes_ratio >= 10 * full_bytes / (full_bytes + 9 * changed_bytes)
    assert growth_of(found, "torch.save") is None


def test_a_run_renders_a_page_and_a_picture_that_name_no_place(results: tuple[Results, Path]) -> None:
    found, out = results
    page, picture = (out / "benchmarks.md").read_text(), (out / "benchmarks.svg").read_text()
    assert "quick look" in page
    assert str(out) not in page + picture + json.dumps(found.machine.versions)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    speed = ElementTree.fromstring((out / "speed.svg").read_text())
    measured = {SHOWN[one.contender] for one in summaries(found, "model") if one.contender in SHOWN and one.figures}
    assert {*TITLES.values(), *measured} <= {text.text for text in speed.iter() if text.text}
    again = CliRunner().invoke(main, ["--render", "--out", str(out)])
    assert again.exit_code == 0
    assert (out / "benchmarks.md").read_text() == page


def test_the_picture_of_speed_has_a_bar_as_long_as_each_value_says() -> None:
    picture = ElementTree.fromstring(draw_seconds({"a stall": {"holdfast": 0.5, "torch.save": 2.0}}, "seconds"))
    widths = [float(bar.attrib["width"]) for bar in picture.iter() if bar.attrib.get("class") in ("own", "peer")]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    assert "0.500 s" in {text.text for text in picture.iter()}


def test_there_is_nothing_to_render_before_a_run(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, ["--render", "--out", str(tmp_path)])
    assert outcome.exit_code == 2
    assert "nothing has been measured" in outcome.output


def test_what_was_measured_at_another_size_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / RESULTS_NAME
    write_results(replace(_made_up(), machine=describe_machine(tmp_path)), path)
    written = path.read_bytes()
    # Were it not refused, this would take the place of all that is there.
    quick = [*TINY, "--only", "model", "--peer", "safetensors", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(main, quick)
    assert outcome.exit_code == 2
    assert "holds figures that would be lost: they are of workloads at 1" in outcome.output
    assert "--anew" in outcome.output
    assert path.read_bytes() == written
    assert [entry.name for entry in tmp_path.iterdir()] == [RESULTS_NAME]


@pytest.mark.parametrize("held", [b"", b"{}", b'{"a": 1}', b'{"machine": "mine"', b"\xff\xfe", b'{"scale": "\xff"}'])
def test_a_file_that_holds_no_results_is_an_error_and_stays(tmp_path: Path, held: bytes) -> None:
    path = tmp_path / RESULTS_NAME
    path.write_bytes(held)
    for options in (["--render"], [*TINY, "--only", "model"]):
        outcome = CliRunner().invoke(main, [*options, "--out", str(tmp_path)])
        assert outcome.exit_code == 2
        assert "does not hold results of the benchmarks" in outcome.output
    assert path.read_bytes() == held
    with pytest.raises(UnreadableResultsError):
        read_results(tmp_path)


def test_unwritable_output_is_refused_before_any_measurement(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for option, place, text in (
        ("--out", file, "is a file, not a directory"),
        ("--out", file / "below", "cannot be made: Not a directory"),
        ("--docs", file, "is a file, not a directory"),
    ):
        outcome = CliRunner().invoke(main, [*TINY, "--out", str(tmp_path), option, str(place)])
        assert outcome.exit_code == 2
        assert f"{place} {text}" in outcome.output
    assert file.read_text() == "mine"


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / RESULTS_NAME
    write_results(_made_up(), path)
    with path.open("rb") as reader:
        write_results(Results(machine=MACHINE, scale=0.5), path)
        # Who has the old file open reads all of it: it was not written over.
        assert len(json.loads(reader.read())["rounds"]) == len(_made_up().rounds)
    assert read_results(path).scale == 0.5
    assert [entry.name for entry in tmp_path.iterdir()] == [RESULTS_NAME]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_knows_two_sets_of_peers() -> None:
    # Whoever runs the tests may be a make of its own.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "PEERS"}

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "-n", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=own, timeout=60, check=False)

    assert "\n.venv/bin/python -m benchmarks" in f"\n{make('bench', 'PEERS=light').stdout}"
    assert ".venv-bench/bin/python -m benchmarks" in make("bench").stdout
    for wrong in ("lite", "", "light all"):
        assert f'PEERS is "all" or "light", not "{wrong}"' in make("bench", f"PEERS={wrong}").stderr
    assert make("test", "PEERS=mine").returncode == 0


@pytest.mark.long
def test_what_is_held_is_counted_after_some_saves(tmp_path: Path) -> None:
    with open_scratch(tmp_path) as (directory, guard):
        bench = Bench(Results(machine=MACHINE, scale=0.01), directory, guard, lambda text: None)
        compare_many_saves(bench, ["holdfast"], counted=(2, 5))
        kept = {entry.number: entry.figures for entry in bench.results.rounds}
        assert bench.results.failures == []
    assert list(kept) == [2, 5]
    assert all(figures["descriptors"] > 3 and figures["threads"] > 1 for figures in kept.values())


def test_small_figures_are_measured(tmp_path: Path) -> None:
    assert all(seconds > 0 for seconds in step_seconds(tmp_path).values())
    assert list(tmp_path.iterdir()) == []
    assert start_seconds().keys() == {"start", "start_holdfast", "start_numpy"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.0005", "--only", "model", "--out", str(tmp_path)]
    command += ["--peer", "DCP sync", "--peer", "DCP async, process", "--rounds", "100000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert run.stdout is not None
    # By then the contenders have begun, and one of them has a process of its own.
    with killed_after(PATIENCE_SECONDS, run):
        begun = next(line for line in run.stdout if "round 1, DCP async, process" in line or "failed" in line)
    assert "failed" not in begun
    below = [os.pidfd_open(pid) for pid in descendants(run.pid)]
    assert len(below) >= 5
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == (130 if number == signal.SIGINT else -number)
    # Such a descriptor can be read once its process has ended.
    assert [process for process in below if not select.select([process], [], [], 60)[0]] == []
    for process in below:
        os.close(process)
    assert list(tmp_path.iterdir()) == []


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def test_files_of_a_killed_run_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    stale, used = tmp_path / "work-stale", tmp_path / "work-used"
    for place in (stale, used):
        place.mkdir()
        (place / "file").touch()
    descriptor = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open_scratch(tmp_path) as (directory, _):
            assert set(tmp_path.iterdir()) == {directory, used}
    finally:
        os.close(descriptor)
    assert list(tmp_path.iterdir()) == [used]


def test_packages_that_are_not_there_are_named() -> None:
    assert find_missing(("numpy", "there-is-no-such-package")) == ["there-is-no-such-package"]


def test_values_differ_between_tensors_and_between_rounds() -> None:
    places, size_bytes = place_tensors([("a", (1000,)), ("b", (1000,)), ("c", (1000,))])
    with mmap.mmap(-1, size_bytes) as memory:
        values = Values(memory, places)
        values.change()
        first = [memory[place.begin : place.end] for place in places]
        assert len(set(first)) == 3
        assert values.are_back()
        values.change(places[1:2])
        second = [memory[place.begin : place.end] for place in places]
        assert (first[0], first[2]) == (second[0], second[2])
        assert first[1] != second[1]
        values.wipe()
        assert not values.are_back()
        values.release()


def _made_up() -> Results:
    results = Results(machine=MACHINE, scale=1.0, makes_last={"holdfast": "files"})
    results.shapes = {
        "model": Shape(title="a model", size_bytes=100, tensors=4),
        "training": Shape(title="a loop", size_bytes=100, tensors=0),
    }
    # The machine gets slower from round to round, and holdfast with it; round 0 does not count.
    for number, drift in enumerate((50.0, 1.0, 2.0, 4.0)):
        limits = dict.fromkeys(("copy", "write", "read_cold", "read_warm"), drift) | {"rewrite": drift / 2}
        own = {"stall": 2 * drift, "durable": 3 * drift, "restore_cold": 4 * drift, "restore_warm": 5 * drift}
        results.rounds += [
            Round(workload="model", contender="limits", number=number, figures=limits),
            Round(workload="model", contender="holdfast", number=number, figures=own | {"save_extra_bytes": 105.0}),
            Round(
                workload="model",
                contender="safetensors",
                number=number,
                figures={"stall": 10 * drift, "restore_warm": 4 * drift, "restore_cold": 2 * drift},
            ),
            Round(
                workload="training",
                contender="holdfast",
                number=number,
                figures={"lost": drift, "step": 1.0, "stall": 0.5},
            ),
            Round(
                workload="training",
                contender="safetensors",
                number=number,
                figures={"lost": 2 * drift, "step": 1.0, "stall": 0.5},
            ),
        ]
    return results


def test_ratios_are_taken_within_a_round() -> None:
    results = _made_up()
    assert limits_of(results, "model")["copy"].median == 2.0
    own, peer = summaries(results, "model")
    stall = own.figures["stall"]
    assert (stall.value.low, stall.value.median, stall.value.high) == (2.0, 4.0, 8.0)
    assert stall.ratio is not None
    assert (stall.ratio.low, stall.ratio.median, stall.ratio.high, stall.ratio.count) == (2.0, 2.0, 2.0, 3)
    assert own.first["stall"].value.median == 100.0
    assert own.save_extra_bytes == 105.0
    assert peer.save_extra_bytes is None
    against = ratio_to(results, "model", "holdfast", "restore_warm", "safetensors", "restore_warm")
    assert against is not None
    assert against.median == 1.25
    assert ratio_to(results, "model", "holdfast", "stall", "nobody", "stall") is None


def test_what_was_measured_before_stays_if_it_belongs_together() -> None:
    before, now = _made_up(), Results(machine=MACHINE, scale=1.0)
    before.failures = [("model", "DCP sync", "no room"), ("training", "holdfast", "no time")]
    before.missing = {"Orbax async": "not installed: jax", "TensorFlow async": "not installed: tensorflow-cpu"}
    now.shapes = {"training": Shape(title="a loop", size_bytes=7, tensors=0)}
    now.rounds = [
        Round(workload="training", contender="holdfast", number=1, slice=1, figures={"lost": 9.0}),
        Round(workload="training", contender="Orbax async", number=1, slice=1, figures={"lost": 8.0}),
    ]
    both = merge(before, now)
    training = [e for e in both.rounds if e.workload == "training" and e.contender != "safetensors"]
    assert [entry.figures for entry in training] == [{"lost": 9.0}, {"lost": 8.0}]
    assert [e for e in both.rounds if e.contender == "safetensors"] == [
        e for e in before.rounds if e.contender == "safetensors"
    ]
    assert [entry for entry in both.rounds if entry.workload == "model"] == [
        entry for entry in before.rounds if entry.workload == "model"
    ]
    assert {entry.slice for entry in training}.isdisjoint(entry.slice for entry in before.rounds)
    assert both.failures == [("model", "DCP sync", "no room")]
    assert both.missing == {"TensorFlow async": "not installed: tensorflow-cpu"}
    assert list(both.shapes) == ["model", "training"]
    assert both.shapes["training"].size_bytes == 7


def test_contender_measured_again_replaces_only_its_own_figures() -> None:
    before = _made_up()
    now = Results(machine=MACHINE, scale=1.0, shapes={"model": before.shapes["model"]})
    for number in range(2):
        limits = dict.fromkeys(("copy", "write", "read_cold", "read_warm"), 10.0)
        now.rounds.append(Round(workload="model", contender="limits", number=number, slice=1, figures=limits))
        figures = {"stall": 30.0}
        now.rounds.append(Round(workload="model", contender="safetensors", number=number, slice=1, figures=figures))
    own, peer = summaries(merge(before, now), "model")
    assert own.figures["stall"] == summaries(before, "model")[0].figures["stall"]
    assert peer.figures["stall"].ratio is not None
    assert peer.figures["stall"].ratio.median == 3.0
    assert ratio_to(merge(before, now), "model", "holdfast", "stall", "safetensors", "stall") is None
    # The limits go with the last contender that was measured beside them.
    again = merge(merge(before, now), now)
    assert len([entry for entry in again.rounds if entry.contender == "limits"]) == 6


def test_figures_of_another_version_or_size_do_not_go_together() -> None:
    before, other = _made_up(), replace(MACHINE, cores=4, versions={"torch": "3", "jax": "1"})
    assert find_misfit(before, MACHINE, 1.0) == ""
    assert "cores 2, here 4, torch 2, here 3" in find_misfit(before, other, 1.0)
    assert "at 1 of their size, and these are to be at 0.05" in find_misfit(before, MACHINE, 0.05)
    more = Results(machine=replace(MACHINE, versions={"torch": "2", "jax": "1"}), scale=1.0)
    assert merge(before, more).machine.versions == {"torch": "2", "jax": "1"}
    assert merge(more, before).machine.versions == {"torch": "2", "jax": "1"}


def test_targets_are_held_against_the_medians() -> None:
    targets = {target.figure: target for target in find_targets(_made_up())}
    stall = targets["Stall of a save, from the second on"]
    assert (stall.reached, stall.holds) == ("2.00 (2.00 to 2.00) x; 4.00 (2.00 to 8.00) s", False)
    assert targets["Overlapped copy: until the call returns"].reached == "not measured"
    assert targets["Extra memory while a save runs"].holds is True
    lost = targets["Training time lost for each save"]
    assert lost.holds is False
    assert lost.reached.startswith("0.50 of it")
    assert "not measured" in {target.reached for target in find_targets(Results(machine=MACHINE, scale=1.0))}


def test_single_peer_is_not_called_the_best_of_several() -> None:
    results = _made_up()

    def lose(contender: str, seconds: float) -> None:
        figures = {"lost": seconds, "step": 1.0, "stall": 0.1}
        results.rounds += [
            Round(workload="training", contender=contender, number=number, slice=9, figures=figures)
            for number in range(1, 10)
        ]

    lose("holdfast", 0.1)
    (alone,) = [target for target in find_targets(results) if target.figure == "Training time lost for each save"]
    assert alone.holds is None
    assert alone.reached.endswith("; no verdict, as no other peer was measured")
    lose("torch.save", 3.0)
    (lost,) = [target for target in find_targets(results) if target.figure == "Training time lost for each save"]
    assert lost.holds is True
    assert "no verdict" not in lost.reached
    lose("holdfast, overlapped", -0.2)
    (lapped,) = [target for target in find_targets(results) if target.figure == "The same, overlapped copy"]
    assert lapped.holds is True
    assert lapped.reached.startswith("too small to distinguish from noise: -0.200")


def test_the_page_says_why_a_peer_is_not_there() -> None:
    page = render_report(_made_up(), "picture.svg")
    # A round of this one is not left out for its time: nobody asked for it.
    assert "Not measured so far, as no run was asked to: holdfast, overlapped; " in page
    assert "would tell nothing new" not in page
    small = _made_up()
    small.shapes["small-tensors"] = small.shapes["model"]
    small.rounds += [replace(entry, workload="small-tensors") for entry in small.rounds if entry.workload == "model"]
    page = render_report(small, "picture.svg").partition("## Many small tensors")[2]
    assert "would tell nothing new: holdfast, overlapped; holdfast, reserved; DCP sync; " in page
    assert "as no run was asked to: torch.save; DCP async, thread, cached; torch_checkpointing.\n" in page


def test_where_nothing_was_measured_the_page_says_so() -> None:
    results = Results(machine=MACHINE, scale=1.0, missing={"Orbax async": "not installed: jax"})
    page = render_report(results, "picture.svg")
    assert "Nothing was measured." in page
    assert "median" not in page
    assert "picture.svg" not in page
    assert "- Orbax async: not installed: jax" in page
    assert "Nothing that bars could show was measured." in render_picture(results)
    figures = {"lost": 1.0, "step": 1.0, "stall": 0.5}
    results.rounds.append(Round(workload="training", contender="safetensors", number=1, figures=figures))
    assert "the median of 1 round," in render_report(
        replace(results, shapes={"training": Shape(title="a loop", size_bytes=1, tensors=0)}), "picture.svg"
    ).replace("\n", " ")


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    results = _made_up()
    results.failures.append(("model", "DCP sync", "no room"))
    results.missing["Orbax async"] = "not installed: jax"
    write_results(results, tmp_path / "results.json")
    page = render_report(read_results(tmp_path / "results.json"), "picture.svg")
    assert "| **holdfast** | 4.00 | 2.00 |" in page
    assert "| 3.00 | files |" in page
    assert "| 1.05 |  |" in page
    durable = "at most 1.15 x the quicker of the two bare direct writes | 6.00 (6.00 to 6.00) x; 6.00 (3.00 to 12.0) s"
    assert f"| Until durable | {durable} | **no** |" in page
    assert "- Orbax async: not installed: jax" in page
    # Between its rounds the machine's limits differ by four.
    assert "The machine was not steady" in page
    assert "direct read 4.00" in page
    assert "A warm restore takes holdfast 1.25 (1.25 to 1.25) times as long" in page
    assert "model, DCP sync: no room" in page
    assert "quick look" not in page
    assert "holdfast" in render_picture(results)


def test_the_model_has_the_parameters_that_its_workload_lists() -> None:
    size = ModelSize(vocabulary=32, context=8, width=16, layers=2)
    own = [(name, tuple(parameter.shape)) for name, parameter in Model(size).named_parameters()]
    assert sorted(own) == sorted(model_shapes(size))


def test_the_workloads_have_the_sizes_that_they_are_known_by() -> None:
    model = state_shapes(make_workload("model", 1.0))
    small = state_shapes(make_workload("small-tensors", 1.0))
    assert round(state_bytes(place_tensors(model)[0]) / 1e9, 2) == 1.49
    assert (len(small), round(state_bytes(place_tensors(small)[0]) / 1e9, 2)) == (20_000, 0.44)
    frozen = make_workload("mostly-frozen", 1.0)
    trained = [place for place in place_tensors(state_shapes(frozen))[0] if place.name in trained_names(frozen)]
    assert round(state_bytes(trained) / 3e6) == 21
    assert round((state_bytes(place_tensors(state_shapes(frozen))[0]) - state_bytes(trained)) / 1e9, 2) == 1.22
    assert len(model_shapes(GPT2_SMALL)) == 148
    assert len(model_shapes(TRAINED)) == 100


def test_places_do_not_overlap() -> None:
    places, size_bytes = place_tensors([("a", (3,)), ("b", ()), ("c", (1 << 16,)), ("d", (0,)), ("e", (5, 5))])
    assert all(before.end <= after.begin for before, after in pairwise(places))
    assert places[-1].end <= size_bytes
    assert places[2].begin % 4096 == 64


def test_a_dropped_file_is_out_of_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "empty").touch()
    assert page_cache.drop(tmp_path) in (0.0, pytest.approx(1.0))  # A file system in memory cannot drop it.
    page_cache.fill(tmp_path)
