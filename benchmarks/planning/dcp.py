"""Plans a save of many ranks with the code of torch's DCP, in one process; the network is not counted."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.planning import COLUMNS, ROWS


def measure_dcp(ranks: int, tensors: int, directory: Path) -> dict[str, float]:
    """**Blocks.** The coordinator's part of one save, and what each rank reads at a restore.

    As `save_state_dict` does it: the plans of all ranks come to the coordinator pickled, it makes one of them, sends
    each rank its own, takes in what each has written, and writes the metadata. Without the cache of plans, which does
    not help the first save nor the metadata.

    Args:
        ranks: How many ranks there are.
        tensors: How many tensors each holds a part of.
        directory: Where the metadata goes.
    """
    gathered = [pickle.dumps(_local_plan(rank, ranks, tensors)) for rank in range(ranks)]
    results = [pickle.dumps(_results(rank, tensors)) for rank in range(ranks)]
    writer = FileSystemWriter(directory)
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    begun_at = time.perf_counter()
    arrived = [pickle.loads(data) for data in gathered]  # noqa: S301  Written by this process.
    arrived_at = time.perf_counter()
    plans, metadata = planner.create_global_plan(arrived)
    plan_seconds = time.perf_counter() - arrived_at
    for plan in writer.prepare_global_plan(plans):
        pickle.dumps(plan)
    writer.set_up_storage_writer(True)
    written = [pickle.loads(data) for data in results]  # noqa: S301
    writer.finish(metadata, written)
    leader_seconds = time.perf_counter() - begun_at
    del arrived, metadata, plans, planner
    metadata_bytes = (directory / ".metadata").stat().st_size
    begun_at = time.perf_counter()
    FileSystemReader(directory).read_metadata()
    return {
        "leader_seconds": leader_seconds,
        "plan_seconds": plan_seconds,
        "gathered_bytes": sum(map(len, gathered)) + sum(map(len, results)),
        "metadata_bytes": metadata_bytes,
        "reader_seconds": time.perf_counter() - begun_at,
        "reader_bytes": metadata_bytes,
    }


def _local_plan(rank: int, ranks: int, tensors: int) -> SavePlan:
    """The result of `create_local_plan` for as many tensors that are divided along their first dimension."""
    offsets, sizes = torch.Size((rank * ROWS, 0)), torch.Size((ROWS, COLUMNS))
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    items = [
        WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size((ranks * ROWS, COLUMNS)),
            ),
        )
        for name in names
    ]
    return SavePlan(items, planner_data={name: tuple(name.split(".", 1)) for name in names})


def _results(rank: int, tensors: int) -> list[WriteResult]:
    size_bytes = ROWS * COLUMNS * 4
    return [
        WriteResult(
            index=MetadataIndex(f"model.layers.{number}.weight", torch.Size((rank * ROWS, 0))),
            size_in_bytes=size_bytes,
            storage_data=_StorageInfo(f"__{rank}_0.distcp", number * size_bytes, size_bytes),
        )
        for number in range(tensors)
    ]
