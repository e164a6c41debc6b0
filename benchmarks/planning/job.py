"""Plans a save of many workers with holdfast's own code, in one process; the network is not counted."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

import holdfast as hf
from benchmarks.planning import COLUMNS, ROWS
from holdfast.catalog import StoredRun
from holdfast.catalog.publish import Receipts
from holdfast.format.digests import digest, seal
from holdfast.format.names import MANIFEST_NAME, StepName, data_name, index_name
from holdfast.format.records import SHARDS, Worker, WorkerRecord
from holdfast.policies import All
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.verify import open_step
from holdfast.save.handle import Origin
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.joint.participant import JointParticipant
from holdfast.save.joint.protocol import CommitProtocol, PartRecord, SaveId, WorkerProgress
from holdfast.save.joint.run_writer import JointRunWriter
from holdfast.save.run_writer import RunWriter
from holdfast.save.writer import make_index, take_digests
from holdfast.state import CaptureCache, capture_objects
from holdfast.storage import LocalStorage

_PART: Final = {"references": (), "features": (SHARDS,), "groups": []}
"""The message, without its own record, of a worker that refers to nothing and holds nothing that others hold."""


class _OneStore:
    """A job's cluster whose store is a dict of this process; it counts the requests for values."""

    def __init__(self, world_size: int) -> None:
        self.rank = 0
        self.world_size = world_size
        self.node = "here"
        self.incarnation = f"planning-{world_size}"
        self.calls = 0
        self.values: dict[str, bytes] = {}
        self._counters: Counter[str] = Counter()

    def node_of(self, rank: int) -> str:
        return f"node-{rank}"

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        self.values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        self.calls += 1
        return self.values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        self.calls += 1
        return self.values.get(key)

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        self.calls += 1
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._counters[key] += amount
        return self._counters[key]

    def delete(self, key: str) -> None:
        self.calls += 1
        self.values.pop(key, None)

    def close(self) -> None:
        return


def make_state(rank: int, workers: int, tensors: int, *, sharded: bool) -> dict[str, Any]:
    """The state of one worker: as many tensors, each its rows of a larger one, or whole and the same with all."""
    values = {}
    for number in range(tensors):
        part = np.full((ROWS, COLUMNS), rank, np.float32)
        values[f"layers.{number}.weight"] = (
            hf.Shard(part, (workers * ROWS, COLUMNS), (rank * ROWS, 0))
            if sharded
            else np.zeros((1, 2048), np.float32)  # 8 KiB: large enough to be spread over the workers.
        )
    return {"model": values}


def measure_worker(workers: int, tensors: int, rounds: int, *, sharded: bool) -> dict[str, float]:
    """**Blocks.** Measures the decisions of one worker, and the size of its own records.

    `training_seconds` is the training thread's part, but for the copies: which arrays are this worker's, and where each
    goes. That is what it takes again at each save, and not the first time.
    """
    worker = Worker(workers // 2, workers)
    objects = make_state(worker.rank, workers, tensors, sharded=sharded)
    captures, stager, pool = CaptureCache(), Stager(HostBuffer()), WorkerPool(1, "planning")
    times = []
    for step in range(1, rounds + 2):
        begun_at = time.perf_counter()
        captured = capture_objects(objects, captures, worker=worker)
        staging = stager.stage(captured, step)
        times.append(time.perf_counter() - begun_at)
    pool.run(staging.copies_now())
    spans = take_digests(staging.snapshot, pool)[0]
    index = seal(make_index(staging.snapshot, staging.snapshot.layout, StepName(1, 1), spans))
    return {
        "training_seconds": median(times[1:]),
        "index_bytes": len(index),
        "written": len(staging.snapshot.layout.places),
    }


def measure_leader(workers: int, tensors: int, rounds: int, directory: Path) -> dict[str, float]:
    """**Blocks.** The leader's part of a save, and what a worker reads at a restore with as many workers.

    The files of the others are made before, of the sizes that they have, and so are the records that they hand in.
    Then the leader's own code runs from the opening of the save to its end: it takes the records, looks whether it sees
    all files, writes the manifest, syncs it, looks whether it is fenced, and what retention gives up (nothing here),
    sees that all have left, and cleans up.
    """
    storage = LocalStorage(directory)
    store = _OneStore(workers)
    participant = JointParticipant(store, closes=False, liveness_seconds=3600.0, timeout_seconds=600.0)
    peers = participant.peers
    joint = JointRunWriter(RunWriter(storage, All(), reuse_space=False), storage, participant, lambda event: None)
    pool = WorkerPool(1, "planning")
    reading = workers // 2
    found: dict[str, list[float]] = {}
    for step in range(1, rounds + 1):
        place = SaveId(0, step, 1)
        store.calls = 0
        begun_at = time.perf_counter()
        protocol = CommitProtocol(peers, WorkerProgress(step, place))
        joint.begin(protocol)
        name, _ = joint.open(Origin(), step)
        seconds = time.perf_counter() - begun_at
        storage.make_directory(name.directory)
        gathered_bytes, own = 0, None
        for rank in range(workers):
            record = _make_files(storage, directory, name, Worker(rank, workers), tensors, is_real=rank == reading)
            own = own or record
            if rank:
                part = msgspec.json.encode(msgspec.convert({**_PART, "worker": record}, PartRecord))
                gathered_bytes += len(part)
                store.values[peers.key(place.key(f"part/{rank}"))] = part
                store.values[peers.key(place.key(f"left/{rank}"))] = b""
        assert own is not None
        begun_at = time.perf_counter()
        joint.commit(Receipts((own,), (), (SHARDS,)), name, {}, {})
        joint.clean(name, {})
        joint.finish()
        seconds += time.perf_counter() - begun_at
        begun_at = time.perf_counter()
        assert StoredRun(storage).look().newest == name
        opened = open_step(storage, name.directory, name, Worker(reading, workers))
        reader_seconds = time.perf_counter() - begun_at
        manifest_bytes = (directory / name.directory / MANIFEST_NAME).stat().st_size
        for key, value in {
            "leader_seconds": seconds,
            "gathered_bytes": gathered_bytes,
            "requests": store.calls,
            "metadata_bytes": manifest_bytes,
            "reader_seconds": reader_seconds,
            "reader_bytes": manifest_bytes + opened.manifest.workers[reading].index_bytes,
        }.items():
            found.setdefault(key, []).append(value)
    pool.close()
    participant.close()
    return {key: median(values) for key, values in found.items()}


def _make_files(
    storage: LocalStorage, directory: Path, name: StepName, worker: Worker, tensors: int, *, is_real: bool
) -> WorkerRecord:
    """The files of one worker; only one that is to be read has an index, the others have its size."""
    data_bytes, index_bytes = tensors * ROWS * COLUMNS * 4, 100 * tensors
    index_digest = digest(str(worker.rank).encode())
    if is_real:
        objects = make_state(worker.rank, worker.world_size, tensors, sharded=True)
        staging = Stager(HostBuffer()).stage(capture_objects(objects, worker=worker), name.step)
        pool = WorkerPool(1, "planning")
        pool.run(staging.copies_now())
        spans = take_digests(staging.snapshot, pool)[0]
        index = seal(make_index(staging.snapshot, staging.snapshot.layout, name, spans))
        data_bytes, index_bytes, index_digest = staging.snapshot.layout.size_bytes, len(index), digest(index)
        (directory / name.directory / index_name(worker.rank, worker.world_size)).write_bytes(index)
    else:
        with (directory / name.directory / index_name(worker.rank, worker.world_size)).open("wb") as file:
            file.truncate(index_bytes)
    with (directory / name.directory / data_name(worker.rank, worker.world_size)).open("wb") as file:
        file.truncate(data_bytes)
    return WorkerRecord(index_bytes, index_digest, data_bytes)
