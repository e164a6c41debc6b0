"""The benchmark of planning at scale runs, and what it counts grows as it should; how long it takes is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from benchmarks.planning.__main__ import main
from benchmarks.planning.job import measure_worker


def test_it_measures_both_and_draws(tmp_path: Path) -> None:
    counts = (4, 64, 256)
    arguments = [part for count in counts for part in ("--workers", str(count))]
    arguments += ["--dcp-ranks", "2", "--dcp-ranks", "4", "--tensors", "6", "--rounds", "1", "--docs", str(tmp_path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "scale.json").read_text())
    few, _, many = figures["holdfast"]
    # What a worker says of itself does not grow with the others, but for the digits of numbers.
    assert many["sharded_index_bytes"] < 1.1 * few["sharded_index_bytes"]
    assert many["gathered_bytes"] / 255 < 1.1 * few["gathered_bytes"] / 3
    assert many["requests"] <= 6 * 256 + 20
    assert many["metadata_bytes"] < 130 * 256 + 1000
    # The metadata of DCP has an entry for each tensor of each rank.
    assert figures["dcp"][1]["metadata_bytes"] > 1.3 * figures["dcp"][0]["metadata_bytes"]
    picture = (tmp_path / "scale.svg").read_text()
    assert picture.startswith("<svg")
    assert "nan" not in picture
    again = CliRunner().invoke(main, ["--render", "--docs", str(tmp_path)], catch_exceptions=False)
    assert again.output.splitlines()[-3:] == result.output.splitlines()[-3:]
    assert {one.name for one in tmp_path.iterdir()} == {"scale.json", "scale.svg"}


def test_replicas_are_shared_out_over_all_workers() -> None:
    assert measure_worker(4, 64, 1, sharded=False)["written"] < 40
    assert measure_worker(4, 64, 1, sharded=True)["written"] == 64
