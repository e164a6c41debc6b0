"""One of two processes of JAX that save and restore arrays which are divided over both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.format.manifest import WorkerRecord
from holdfast.format.names import StepName
from holdfast.format.workers import Worker
from holdfast.save.handoffs import Receipts
from holdfast.storage import LocalStorage
from simulated_job import commit_parts, restore_part, save_part


def divide(values: Any, *axes: str | None) -> Any:
    placing = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, placing, lambda index: values[index])


def main(address: str, rank: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    worker = Worker(jax.process_index(), jax.process_count())
    assert worker == Worker(int(rank), 2)
    storage = LocalStorage(directory)
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    objects = {"rows": divide(values, "a"), "columns": divide(values, None, "a"), "both": divide(values)}
    name = StepName(1, 1)
    receipts = save_part(storage, objects, name, worker)
    # What the leader has to know of the others comes by way of the shared directory.
    (record,) = receipts.workers
    note = Path(directory) / f"receipt-{rank}"
    note.write_text(f"{record.index_bytes} {record.index_digest} {record.data_bytes}")
    multihost_utils.sync_global_devices("written")
    if worker.rank == 0:
        records = []
        for number in range(2):
            index_bytes, digest, data_bytes = (Path(directory) / f"receipt-{number}").read_text().split()
            records.append(Receipts((WorkerRecord(int(index_bytes), digest, int(data_bytes)),)))
        commit_parts(storage, records, name)
    multihost_utils.sync_global_devices("committed")
    # Back with the axes exchanged.
    zeros = np.zeros_like(values)
    back: dict[str, Any] = {"rows": divide(zeros, None, "a"), "columns": divide(zeros), "both": divide(zeros, "a")}
    restore_part(storage, back, worker)
    for array in back.values():
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), values[shard.index])
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
