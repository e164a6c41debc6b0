"""The benchmarks run, at a tiny size, and their ratios come from what they measured."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import page_cache
from benchmarks.__main__ import RESULTS_NAME, main
from benchmarks.machine import Machine
from benchmarks.model import Model
from benchmarks.peers import PEERS, make_peer
from benchmarks.picture import render_picture
from benchmarks.report import render_report
from benchmarks.results import Results, Round, Shape, merge, read_results, write_results
from benchmarks.summary import limits_of, ratio_to, standings
from benchmarks.workloads import (
    GPT2_SMALL,
    TRAINED,
    ModelSize,
    make_workload,
    model_shapes,
    place_tensors,
    state_bytes,
    state_shapes,
)
from click.testing import CliRunner

MACHINE = Machine(
    processor="a processor",
    cores=2,
    memory_bytes=1 << 34,
    file_system="ext4",
    system="Linux 6",
    versions={"torch": "2"},
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """What a tiny run of two peers leaves."""
    out = tmp_path_factory.mktemp("bench")
    options = ["--scale", "0.0005", "--rounds", "1", "--peer", "holdfast", "--peer", "safetensors", "--out", str(out)]
    options += ["--only", "model", "--only", "training"]
    outcome = CliRunner().invoke(main, options)
    assert outcome.exit_code == 0, outcome.output
    return read_results(out / RESULTS_NAME), out


def test_a_run_measures_every_contender_in_every_round(results: tuple[Results, Path]) -> None:
    found, _ = results
    assert found.failures == []
    assert set(found.shapes) == {"model", "training"}
    seen = {(entry.workload, entry.contender, entry.number) for entry in found.rounds}
    assert {("model", name, n) for name in ("limits", "holdfast", "safetensors") for n in (0, 1)} <= seen
    assert {("training", name, n) for name in ("holdfast", "safetensors") for n in (0, 1)} <= seen
    for entry in found.rounds:
        assert all(value > 0 for key, value in entry.figures.items() if key not in ("lost", "save_extra_bytes")), entry


def test_a_run_saves_all_bytes_and_removes_them(results: tuple[Results, Path]) -> None:
    found, out = results
    for entry in found.rounds:
        if "disk_bytes" in entry.figures:
            assert entry.figures["disk_bytes"] >= found.shapes[entry.workload].size_bytes
    assert sorted(path.name for path in out.iterdir()) == ["benchmarks.md", "benchmarks.svg", RESULTS_NAME]


def test_a_run_renders_a_page_and_a_picture_that_name_no_place(results: tuple[Results, Path]) -> None:
    found, out = results
    page, picture = (out / "benchmarks.md").read_text(), (out / "benchmarks.svg").read_text()
    assert "quick look" in page
    assert str(out) not in page + picture + json.dumps(found.machine.versions)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    again = CliRunner().invoke(main, ["--render", "--out", str(out)])
    assert again.exit_code == 0
    assert (out / "benchmarks.md").read_text() == page


def _made_up() -> Results:
    results = Results(machine=MACHINE, scale=1.0, makes_last={"holdfast": "files"})
    results.shapes = {
        "model": Shape(title="a model", size_bytes=100, tensors=4),
        "training": Shape(title="a loop", size_bytes=100, tensors=0),
    }
    # The machine gets slower from round to round, and holdfast with it; round 0 does not count.
    for number, drift in enumerate((50.0, 1.0, 2.0, 4.0)):
        limits = dict.fromkeys(("copy", "write", "read_cold", "read_warm"), drift)
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
        ]
    return results


def test_ratios_are_taken_within_a_round() -> None:
    results = _made_up()
    assert limits_of(results, "model")["copy"].median == 2.0
    own, peer = standings(results, "model")
    stall = own.figures["stall"]
    assert (stall.value.low, stall.value.median, stall.value.high) == (2.0, 4.0, 8.0)
    assert stall.ratio is not None
    assert (stall.ratio.low, stall.ratio.median, stall.ratio.high, stall.ratio.count) == (2.0, 2.0, 2.0, 3)
    assert own.first_stall_seconds == 100.0
    assert own.save_extra_bytes == 105.0
    assert peer.save_extra_bytes is None
    against = ratio_to(results, "model", "holdfast", "restore_warm", "safetensors", "restore_warm")
    assert against is not None
    assert against.median == 1.25
    assert ratio_to(results, "model", "holdfast", "stall", "nobody", "stall") is None


def test_parts_that_were_measured_before_stay_if_they_belong_together() -> None:
    before, now = _made_up(), Results(machine=MACHINE, scale=1.0)
    before.failures = [("model", "DCP sync", "no room"), ("training", "DCP sync", "no time")]
    now.shapes = {"training": Shape(title="a loop", size_bytes=7, tensors=0)}
    now.rounds = [Round(workload="training", contender="holdfast", number=1, figures={"lost": 9.0})]
    both = merge(before, now)
    assert [entry.figures for entry in both.rounds if entry.workload == "training"] == [{"lost": 9.0}]
    assert [entry for entry in both.rounds if entry.workload == "model"] == [
        entry for entry in before.rounds if entry.workload == "model"
    ]
    assert both.failures == [("model", "DCP sync", "no room")]
    assert list(both.shapes) == ["model", "training"]
    assert both.shapes["training"].size_bytes == 7
    now.scale = 0.5
    assert merge(before, now) is now


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    results = _made_up()
    results.failures.append(("model", "DCP sync", "no room"))
    write_results(results, tmp_path / "results.json")
    page = render_report(read_results(tmp_path / "results.json"), "picture.svg")
    assert "| **holdfast** | 4.00 (2.00 to 8.00) | 2.00 (2.00 to 2.00) |" in page
    assert "| 1.05 |  | files |" in page
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


def test_every_peer_can_be_made() -> None:
    for name in PEERS:
        assert make_peer(name).makes_last
