"""Boxes are untrusted input as all records are: whatever they say, the right state comes back or a clean error."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import DamageError, FormatError, HoldfastError, NoWholeCheckpointError
from holdfast.format.digests import digest, seal
from holdfast.format.index import BoxRecord, ElsewhereRecord, Index
from holdfast.format.index_checks import decode_index, find_cover_problem
from holdfast.format.records import ALONE, SHARDS, Manifest, Worker, WorkerRecord, decode_manifest
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage
from simulated_job import restore_part, save_job

STEP = "step-000000001.g0001"
MEMORY_LIMIT_BYTES = 64 << 20


def objects_of(rank: int, values: float | None = None) -> dict[str, Any]:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)[2 * rank : 2 * rank + 2] if values is None else values
    return {
        "rows": hf.Shard(np.zeros((2, 2), np.float32) + rows, (4, 2), (2 * rank, 0)),
        "same": np.arange(3, dtype=np.int32) if values is None else np.zeros(3, np.int32),
    }


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "run"
    save_job(LocalStorage(directory), [objects_of(0), objects_of(1)])
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def index_path(run: Path, rank: int) -> Path:
    return run / STEP / f"index-{rank:05d}-of-00002.json"


def read_index(run: Path, rank: int) -> Index:
    return decode_index(index_path(run, rank).read_bytes(), path="")


def read_manifest(run: Path) -> Manifest:
    return decode_manifest((run / STEP / "manifest.json").read_bytes(), path="", expected=None)


def rewrite(run: Path, indexes: dict[int, Index], **changes: Any) -> None:
    """Forges indexes, and a manifest that vouches for them."""
    manifest = msgspec.structs.replace(read_manifest(run), **changes)
    workers = list(manifest.workers)
    for rank, index in indexes.items():
        data = seal(index)
        index_path(run, rank).write_bytes(data)
        workers[rank] = WorkerRecord(len(data), digest(data), workers[rank].data_bytes)
    manifest = msgspec.structs.replace(manifest, workers=tuple(workers))
    (run / STEP / "manifest.json").write_bytes(seal(manifest))


def forge(run: Path, rank: int, **changes: Any) -> None:
    rewrite(run, {rank: msgspec.structs.replace(read_index(run, rank), **changes)})


ROWS = BoxRecord("rows", "", (4, 2), (0, 0))
SAME = ElsewhereRecord("same", "I32", (3,), (0,))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"boxes": (BoxRecord("rows", "", (4, 2), (3, 0)),)}, "is outside of"),
        ({"boxes": (BoxRecord("rows", "", (4, 2), (-1, 0)),)}, "is outside of"),
        ({"boxes": (BoxRecord("rows", "", (4, 2), (0,)),)}, "dimensions"),
        ({"boxes": (BoxRecord("rows", "", (4, 2, 1), (0, 0)),)}, "dimensions"),
        ({"boxes": (BoxRecord("rows", "", (1 << 60, 2), (0, 0)),)}, "larger than"),
        ({"boxes": (BoxRecord("rows", "", (-4, 2), (0, 0)),)}, "negative"),
        ({"boxes": (BoxRecord("rows", "", (4, 2) * 40, (0, 0) * 40),)}, "dimensions"),
        ({"boxes": (BoxRecord("other", "", (4, 2), (0, 0)),)}, "belongs to no array"),
        ({"boxes": (ROWS, ROWS)}, "appears twice"),
        ({"boxes": (BoxRecord("rows", "same", (4, 2), (0, 0)),)}, "is both a whole leaf and a box of one"),
        ({"elsewhere": (SAME,)}, "cannot be stored by another worker"),
        ({"elsewhere": (ElsewhereRecord("x", "I32", (3,), (0,)),)}, "cannot be stored by the ranks"),
        ({"elsewhere": (ElsewhereRecord("x", "I32", (3,), (2,)),)}, "cannot be stored by the ranks"),
        ({"elsewhere": (ElsewhereRecord("x", "I33", (3,), (1,)),)}, "unknown element type"),
        ({"elsewhere": (ElsewhereRecord("x", "I32", (1,) * 65, (1,)),)}, "dimensions"),
        (
            {"elsewhere": (ElsewhereRecord("rows", "F32", (5, 2), (1,)),)},
            "has another dtype or shape on another worker",
        ),
        ({"elsewhere": (ElsewhereRecord("x", "I32", (), ()), ElsewhereRecord("x", "I32", (), ()))}, "appears twice"),
    ],
)
def test_an_index_that_cannot_be_is_refused(run: Path, changes: dict[str, Any], problem: str) -> None:
    forged = seal(msgspec.structs.replace(read_index(run, 0), **changes))
    with pytest.raises(FormatError, match=problem):
        decode_index(forged, path="index.json")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"boxes": (ROWS,)}, "overlaps|different values"),
        ({"boxes": (BoxRecord("rows", "", (4, 2), (1, 0)),)}, "overlaps"),
        ({"boxes": (BoxRecord("rows", "", (5, 2), (3, 0)),)}, r"\[4, 2\] on rank 0, but F32 \[5, 2\] on rank 1"),
        (
            {"boxes": (BoxRecord("rows", "else", (4, 2), (2, 0)),)},
            "'rows'.* is incomplete: the workers have 4 of its 8 elements",
        ),
        ({"boxes": ()}, r"\[4, 2\] on rank 0, but F32 \[2, 2\] on rank 1"),
        (
            {"elsewhere": (ElsewhereRecord("none", "I32", (3,), ()),)},
            "'none'.* is incomplete: the workers have 0 of its 3 elements",
        ),
    ],
)
def test_workers_whose_boxes_do_not_make_up_the_leaves_are_found(
    run: Path, changes: dict[str, Any], problem: str
) -> None:
    forge(run, 1, **changes)
    with pytest.raises(FormatError, match=problem):
        open_step(LocalStorage(run), STEP, None)
    # Whoever restores finds it, or does not need it; wrong values never come of it.
    for worker in (ALONE, Worker(0, 2), Worker(1, 2)):
        rank = worker.rank
        objects: dict[str, Any] = objects_of(rank, 0)
        if worker.is_alone:
            objects["rows"] = np.zeros((4, 2), np.float32)
        try:
            restore_part(LocalStorage(run), objects, worker, strict=False)
        except HoldfastError:
            continue
        found = objects["rows"] if worker.is_alone else objects["rows"].tensor
        expected = np.arange(8, dtype=np.float32).reshape(4, 2)
        assert not found.any() or np.array_equal(found, expected if worker.is_alone else expected[2 * rank :][:2])


@pytest.mark.parametrize(
    "changes",
    [
        {"elsewhere": ()},
        {"objects": {"same": {"$": "array", "v": "nothing", "k": "numpy"}}},
        {"objects": {"same": [1, {"$": "dict", "v": [["x", {"$": "array", "v": ["same"], "k": "numpy"}]]}]}},
    ],
)
def test_a_leaf_that_is_named_and_not_there_is_found(run: Path, changes: dict[str, Any]) -> None:
    ranks = [rank for rank in range(2) if read_index(run, rank).elsewhere]
    forge(run, ranks[0], **changes)
    with pytest.raises(FormatError, match=f"index-{ranks[0]:05d}.*its objects refer to the leaf"):
        open_step(LocalStorage(run), STEP, None)
    with pytest.raises(HoldfastError):
        restore_part(LocalStorage(run), objects_of(ranks[0], 0), Worker(ranks[0], 2))


def test_same_box_may_be_stored_twice_with_equal_values(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    # Neither knows of the other.
    jobs: list[dict[str, Any]] = [{"x": hf.Shard(np.ones(3), (3,), (0,))} for _ in range(2)]
    manifest = save_job(storage, jobs)
    opened = open_step(storage, manifest.name.directory, manifest.name)
    assert verify_data(storage, opened) == []
    plain = {"x": np.zeros(3)}
    restore_part(storage, plain, ALONE)
    assert plain["x"].tolist() == [1, 1, 1]
    jobs[1]["x"].tensor[1] = 2
    manifest = save_job(storage, jobs, step=2)
    with pytest.raises(FormatError, match="ranks 0 and 1 have different values for"):
        open_step(storage, manifest.name.directory, manifest.name)


def test_box_stored_twice_with_other_values_leads_to_the_older_step(tmp_path: Path) -> None:
    def job(value: float, others: float) -> list[dict[str, Any]]:
        rows = [(0, value), (0, others), (2, value)]
        return [{"rows": hf.Shard(np.full((2, 2), each), (4, 2), (begin, 0))} for begin, each in rows]

    storage = LocalStorage(tmp_path / "run")
    save_job(storage, job(1.0, 1.0))
    save_job(storage, job(2.0, 3.0), step=2)
    for worker in (ALONE, Worker(1, 2)):
        # It reads the indexes of all, since what is missing lies with the last.
        objects: dict[str, Any] = {"rows": np.zeros((4, 2))}
        restoration = restore_part(storage, objects, worker)
        assert restoration.step == 1
        assert "different values for [0:2, 0:2]" in restoration.passed_over[0].message
        assert np.all(objects["rows"] == 1.0)


def test_boxes_need_the_feature(run: Path) -> None:
    manifest = read_manifest(run)
    assert manifest.features == (SHARDS,)
    forged = seal(msgspec.structs.replace(manifest, features=()))
    with pytest.raises(FormatError, match="feature 'shards'"):
        decode_manifest(forged, path="manifest.json", expected=None)


def test_no_memory_is_taken_for_leaves_that_are_not_there(run: Path) -> None:
    huge = (1 << 50,)
    forge(
        run,
        0,
        elsewhere=(ElsewhereRecord("huge", "U8", huge, (1,)),),
        objects={"huge": {"$": "array", "k": "numpy", "v": "huge"}},
    )
    tracemalloc.start()
    try:
        with pytest.raises(NoWholeCheckpointError, match="larger than all files of the step"):
            restore_part(LocalStorage(run), {"huge": None}, Worker(0, 2))
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT_BYTES
    finally:
        tracemalloc.stop()


def test_damaged_shard_is_reported_by_the_workers_that_need_it(run: Path) -> None:
    data = run / STEP / "data-00001-of-00002.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    storage = LocalStorage(run)
    restore_part(storage, objects_of(0, 0), Worker(0, 2))
    for worker, objects in ((Worker(1, 2), objects_of(1, 0)), (ALONE, {"rows": np.zeros((4, 2), np.float32)})):
        with pytest.raises(NoWholeCheckpointError) as caught:
            restore_part(storage, objects, worker, strict=False)
        (damage,) = caught.value.damages
        assert damage.path.endswith("data-00001-of-00002.safetensors")
        assert damage.tensor == "rows"
    (found,) = verify_data(storage, open_step(storage, STEP, None))
    assert found.path.endswith("data-00001-of-00002.safetensors")


def test_with_the_same_workers_each_reads_its_own_files_only(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    jobs = [{"rows": objects_of(rank)["rows"], "own": hf.PerWorker({"n": np.array([rank])})} for rank in range(2)]
    save_job(storage, jobs)
    for rank in range(2):
        for path in (tmp_path / "run" / STEP).glob(f"*-{1 - rank:05d}-of-*"):
            path.rename(path.with_suffix(".away"))
        objects = {"rows": objects_of(rank, 0)["rows"], "own": hf.PerWorker({"n": np.array([9])})}
        restore_part(storage, objects, Worker(rank, 2))
        rows: Any = objects["rows"]
        own: Any = objects["own"]
        assert np.array_equal(rows.tensor, jobs[rank]["rows"].tensor)
        assert own.value["n"].tolist() == [rank]
        for path in (tmp_path / "run" / STEP).glob("*.away"):
            path.rename(path.with_suffix(".json" if path.name.startswith("index") else ".safetensors"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_boxes_at_random_are_refused_or_cover(saved: Path, data: st.DataObject) -> None:
    numbers = st.integers(-1, 5)
    boxes = st.lists(
        st.builds(
            BoxRecord,
            st.sampled_from(["rows", "same", "no"]),
            st.sampled_from(["", "rows", "other"]),
            st.lists(numbers, max_size=3).map(tuple),
            st.lists(numbers, max_size=3).map(tuple),
        ),
        max_size=3,
    )
    indexes = []
    for rank in range(2):
        index = msgspec.structs.replace(read_index(saved, rank), boxes=tuple(data.draw(boxes)))
        try:
            indexes.append(decode_index(seal(index), path="index.json"))
        except FormatError:
            return
    if not find_cover_problem(indexes):
        counts: dict[str, int] = {}
        for stored in {(one.leaf, one.box): one for index in indexes for one in index.stored_boxes()}.values():
            counts[stored.leaf] = counts.get(stored.leaf, 0) + stored.box.elements
        shapes = {one.leaf: one.global_shape for index in indexes for one in index.stored_boxes()}
        assert counts == {leaf: int(np.prod(shape)) for leaf, shape in shapes.items()}


def test_damage_errors_are_damage(run: Path) -> None:
    index_path(run, 1).unlink()
    with pytest.raises(DamageError, match=r"index-00001-of-00002\.json is missing"):
        open_step(LocalStorage(run), STEP, None)


@pytest.mark.parametrize(
    "node", [{"$": "array", "k": "numpy", "v": "nowhere"}, {"$": "object", "k": 7, "v": 1}, {"$": 3, "v": 1}, {"$x": 1}]
)
def test_objects_that_cannot_be_are_not_exported(run: Path, tmp_path: Path, node: Any) -> None:
    forge(run, 0, objects={"rows": node})
    for to in ("safetensors", "torch", "dcp"):
        with pytest.raises(FormatError):
            hf.export_checkpoint(run, tmp_path / "out", to=to)
        assert not (tmp_path / "out").exists()
