"""Trees of leaves and figures as the command `holdfast` writes them, and checkpoints that only a program could make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import call, call_json
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.screen import age_text, iso_text, legible
from holdfast.cli.verbs.show import grow_tree, list_tree
from holdfast.format.digests import digest, seal
from holdfast.format.index import Index, LeafRecord, plan_layout
from holdfast.format.names import data_name, index_name
from holdfast.format.records import Manifest, WorkerRecord
from holdfast.numbers import size_text
from places import DATA


def test_a_tree_of_leaves() -> None:
    names = ["m/b.10.w", "m/b.2.w", "m/b.2.w.x", "m/e.weight", "m"]
    lines = [
        (line.depth, line.label, line.branch.leaves)
        for line in list_tree(grow_tree("m", [(name, 8) for name in names]), 9)
    ]
    assert lines == [
        (0, "m", 5),
        (1, "b", 3),
        (2, "2.w", 2),
        (3, "x", 1),
        (2, "10.w", 1),
        (1, "e.weight", 1),
    ]


def test_a_tree_with_many_branches_is_summed_up() -> None:
    tree = grow_tree("m", [(f"m/{place}", 10) for place in range(100)])
    *_, last = list_tree(tree, 1)
    assert (last.label, last.branch.leaves, last.branch.size_bytes) == ("(85 more)", 85, 850)


@given(st.lists(st.tuples(st.text(), st.integers(0, 100)), max_size=20), st.integers(0, 5))
def test_no_name_of_a_leaf_breaks_the_tree(leaves: list[tuple[str, int]], depth: int) -> None:
    root, *_ = list_tree(grow_tree("m", leaves), depth)
    assert (root.branch.leaves, root.branch.size_bytes) == (len(leaves), sum(size_bytes for _, size_bytes in leaves))


@given(st.text())
def test_legible_text_can_always_be_printed(text: str) -> None:
    assert legible(text).isprintable()
    assert not text.isprintable() or legible(text) == text


def test_figures() -> None:
    assert [size_text(size) for size in (0, 999, 999.6, 1500, 123_456_789, 2.5e12)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 kB", "123 MB", "2.5 TB")
    ]
    assert [age_text(age) for age in (-3600, 0, 59, 180, 9000, 1e6)] == [
        *("in the future", "just now", "59 s ago", "3 min ago", "2 h ago", "12 days ago")
    ]
    assert iso_text(0) == "1970-01-01T00:00:00.000Z"
    assert iso_text(1e300) is None


def write_step(directory: Path, world_size: int) -> None:
    """A checkpoint as so many workers would write it, committed at a time that no calendar has."""
    directory.mkdir(parents=True)
    workers = []
    for rank in range(world_size):
        layout = plan_layout([("model/w", "U8", (100,))], {})
        (place,) = layout.places
        values = bytes([rank]) * 100
        (directory / data_name(rank, world_size)).write_bytes(layout.header + values)
        leaf = LeafRecord(place.name, place.dtype, place.shape, place.begin, place.end, digest(values))
        index = seal(
            Index(
                step=7,
                generation=1,
                attempt=1,
                rank=rank,
                world_size=world_size,
                data_bytes=layout.size_bytes,
                header_bytes=len(layout.header),
                header_digest=digest(layout.header),
                span_bytes=1 << 20,
                leaves=(leaf,),
                objects={"model": {"w": {"$": "array", "k": "numpy", "v": "model/w"}}},
            )
        )
        (directory / index_name(rank, world_size)).write_bytes(index)
        workers.append(WorkerRecord(len(index), digest(index), layout.size_bytes))
    manifest = Manifest(
        step=7,
        generation=1,
        attempt=1,
        token="t",
        committed_at_unix_seconds=1e300,
        workers=tuple(workers),
        metrics={},
        metadata={},
        versions={},
    )
    (directory / "manifest.json").write_bytes(seal(manifest))


def test_a_time_that_no_calendar_has(tmp_path: Path) -> None:
    write_step(tmp_path / "run" / "step-000000007.g0001", 1)
    row = call("list", tmp_path / "run").stdout.splitlines()[1].split()
    assert (row[0], row[3], row[5]) == ("7", "-", "1")
    document = call_json("show", tmp_path / "run")
    assert (document["committed_at"], document["committed_at_unix_seconds"]) == (None, 1e300)
    assert "saved       ?" in call("show", tmp_path / "run").stdout
    assert call("verify", tmp_path / "run").exit_code == ExitCode.OK


def test_a_checkpoint_of_workers_that_do_not_say_how_theirs_is_one(tmp_path: Path) -> None:
    write_step(tmp_path / "run" / "step-000000007.g0001", 2)
    row = call("list", tmp_path / "run").stdout.splitlines()[1].split()
    assert (row[0], row[7]) == ("7", "newest,damaged")
    shown = call("show", tmp_path / "run")
    assert "the state of 2 workers can be read as one only with the feature 'shards'" in shown.stderr
    assert call("verify", tmp_path / "run").exit_code == ExitCode.DAMAGED


@pytest.mark.parametrize("depth", [300, 600, 900, 5000])
def test_notes_that_are_nested_deeply(tmp_path: Path, depth: int) -> None:
    write_step(tmp_path / "step", 1)
    path = tmp_path / "step" / "manifest.json"
    deep = "[" * depth + "]" * depth
    body = path.read_text().partition('"body":')[2][:-1].replace('"metadata":{}', f'"metadata":{{"deep":{deep}}}')
    assert deep in body
    envelope = f'{{"holdfast":"manifest","version":1,"digest":"{digest(body.encode())}","body":{body}}}'
    path.write_text(envelope)
    for options in ([], ["--json"]):
        result = call("show", tmp_path / "step", *options)
        assert result.exit_code in (ExitCode.OK, ExitCode.DAMAGED), result.output


def test_show_of_leaves_held_by_several_workers() -> None:
    run = DATA / "v1-shards"
    shown = call("show", run).stdout
    assert "workers     2" in shown
    assert re.search(r"large +1 +560000 +\d+% +F32 +\[140000\]", shown)
    details = call("show", run, "rows", "strided").stdout
    assert re.search(r"rows +F32 +\[4,2\] of \[6,2\] at \[0,0\] +32 .* data-00000-of-00002", details)
    assert len(re.findall(r"strided +I16 +\[2\] of \[8\] at \[[0246]\]", details)) == 4
    document = call_json("show", run, "rows")
    boxes = [(leaf["shape"], leaf["global_shape"], leaf["offsets"], leaf["rank"]) for leaf in document["leaves"]]
    assert boxes == [([4, 2], [6, 2], [0, 0], 0), ([2, 2], [6, 2], [4, 0], 1)]
    sizes = {one["name"]: (one["leaves"], one["size_bytes"]) for one in document["objects"]}
    assert sizes == {"rows": (1, 48), "same": (1, 16), "large": (1, 560000), "own": (2, 32), "strided": (1, 16)}
    assert "1 checkpoint read: 1 whole" in call("verify", run).stdout
