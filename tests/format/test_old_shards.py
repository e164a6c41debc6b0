"""A step of two workers, as the first holdfast wrote it that could: it is restored, for ever.

`tests/data/v1-shards` was made by `make_run`, and is never made again; see `test_old_formats.py`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.format.names import StepName
from holdfast.format.records import Worker
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage
from places import DATA
from plain_reader import digests, open_record
from simulated_job import commit_parts, restore_part, save_part

RUN = DATA / "v1-shards"

WHOLES: dict[str, Any] = {
    "rows": np.arange(12, dtype=np.float32).reshape(6, 2),
    "strided": np.arange(8, dtype=np.int16),
    "same": np.array([0.5, -1.0]),
    # Just so large that two workers share the writing.
    "large": (np.arange(140_000) // 1000).astype(np.float32),
}


def make_objects(rank: int, *, zero: bool = False) -> dict[str, Any]:
    """What each of two workers has: uneven rows, replicas small and large, and its own."""
    wholes = {name: whole * 0 if zero else whole.copy() for name, whole in WHOLES.items()}
    begin, end = (0, 4) if rank == 0 else (4, 6)
    return {
        "rows": hf.Shard(wholes["rows"][begin:end], (6, 2), (begin, 0)),
        "same": wholes["same"],
        "large": wholes["large"],
        "own": hf.PerWorker({"rank": -1 if zero else rank, "x": np.full(2, -1 if zero else rank)}),
    }


def make_run(directory: Path) -> None:
    """Beside those, each worker has two boxes of one leaf, as FSDP2 over tensor parallelism leaves them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    storage = LocalStorage(directory)
    name = StepName(7, StoredRun(storage).open_generation())
    receipts = []
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        local = torch.from_numpy(WHOLES["strided"]).reshape(2, 2, 2)[:, rank].reshape(4)
        mesh, placement = DeviceMesh("cpu", [0, 1]), _StridedShard(0, split_factor=2)
        strided = DTensor.from_local(local, mesh, [placement], run_check=False)
        objects = {**make_objects(rank), "strided": strided}
        receipts.append(save_part(storage, objects, name, Worker(rank, 2)))
        dist.destroy_process_group()
    commit_parts(storage, receipts, name)


@pytest.fixture
def run(tmp_path: Path) -> LocalStorage:
    return LocalStorage(shutil.copytree(RUN, tmp_path / "run"))


def test_it_is_whole(run: LocalStorage) -> None:
    opened = open_step(run, "step-000000007.g0001", StepName(7, 1))
    assert verify_data(run, opened) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_each_worker_has_its_part_back(run: LocalStorage, rank: int) -> None:
    objects, expected = make_objects(rank, zero=True), make_objects(rank)
    restore_part(run, {**objects, "strided": np.zeros(8, np.int16)}, Worker(rank, 2))
    assert np.array_equal(objects["rows"].tensor, expected["rows"].tensor)
    assert np.array_equal(objects["same"], expected["same"])
    assert np.array_equal(objects["large"], expected["large"])
    assert objects["own"].value["rank"] == rank
    assert objects["own"].value["x"].tolist() == [rank, rank]


@pytest.mark.parametrize("workers", [1, 3])
def test_others_have_it_back_too(run: LocalStorage, workers: int) -> None:
    for rank in range(workers):
        objects: dict[str, Any] = {name: np.zeros_like(whole) for name, whole in WHOLES.items()}
        objects["own"] = hf.PerWorker({"rank": -1, "x": np.full(2, -1)})
        restore_part(run, objects, Worker(rank, workers))
        for name, whole in WHOLES.items():
            assert np.array_equal(objects[name], whole), name
        assert objects["own"].value["rank"] == -1


def test_the_law_of_the_format_is_enough_to_read_it() -> None:
    """A reader that is made from `docs/reference/format.md` alone, and shares no code with holdfast."""
    directory = RUN / "step-000000007.g0001"
    manifest = open_record(directory / "manifest.json", "manifest")
    assert manifest["features"] == ["shards"]
    assert len(manifest["workers"]) == 2
    leaves: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    indexes = [open_record(directory / f"index-{rank:05d}-of-00002.json", "index") for rank in range(2)]
    types = {"F64": "<f8", "F32": "<f4", "I16": "<i2", "I64": "<i8"}
    for rank, index in enumerate(indexes):
        assert (index["rank"], index["world_size"]) == (rank, 2)
        data = (directory / f"data-{rank:05d}-of-00002.safetensors").read_bytes()
        boxes = {name: (leaf or name, shape, offsets) for name, leaf, shape, offsets in index["boxes"]}
        for name, dtype, shape, begin, end, spans in index["leaves"]:
            assert spans == digests(data[begin:end], index["span_bytes"])
            leaf, global_shape, offsets = boxes.get(name, (name, shape, [0] * len(shape)))
            array: Any = leaves.setdefault(leaf, np.zeros(global_shape, types[dtype]))
            assert (list(array.shape), array.dtype) == (global_shape, np.dtype(types[dtype]))
            place = tuple(slice(offset, offset + length) for offset, length in zip(offsets, shape, strict=True))
            array[place] = np.frombuffer(data[begin:end], types[dtype]).reshape(shape)
            counts.setdefault(leaf, np.zeros(global_shape, int))[place] += 1
    assert all((count == 1).all() for count in counts.values())
    for name, whole in WHOLES.items():
        assert np.array_equal(leaves[name], whole)
    for rank, index in enumerate(indexes):
        for name, dtype, shape, ranks in index["elsewhere"]:
            assert (list(leaves[name].shape), leaves[name].dtype) == (shape, np.dtype(types[dtype]))
            assert ranks == [1 - rank]
        node = index["objects"]["own"]
        assert (node["$"], node["k"], node["v"]["rank"]) == ("object", "per_worker", rank)
        assert leaves[node["v"]["x"]["v"]].tolist() == [rank, rank]


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
