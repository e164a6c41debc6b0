"""The workers of a job, one after the other in one process: each writes its own files, and the first one commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.catalog import StoredRun
from holdfast.catalog.publish import Receipts, commit, make_manifest
from holdfast.events import Event
from holdfast.format.names import StepName
from holdfast.format.records import Manifest, Worker
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.engine import restore_objects
from holdfast.restore.records import Restoration
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.writer import StepFiles
from holdfast.state import capture_objects
from holdfast.storage.protocol import Storage


def save_part(storage: Storage, objects: Mapping[str, object], name: StepName, worker: Worker) -> Receipts:
    """What one worker does."""
    pool = WorkerPool(1, "save")
    staging = Stager(HostBuffer()).stage(capture_objects(objects, worker=worker), name.step)
    pool.run(staging.copies_now())
    return StepFiles(staging.snapshot, storage, name).finish(pool)


def commit_parts(storage: Storage, receipts: Sequence[Receipts], name: StepName) -> Manifest:
    """What the leader does."""
    workers = tuple(record for one in receipts for record in one.workers)
    together = Receipts(workers, features=tuple({name for one in receipts for name in one.features}))
    token = StoredRun(storage).opening(name.generation).token
    manifest = make_manifest(together, name, metrics={}, metadata={})
    commit(StoredRun(storage), manifest, token=token)
    return manifest


def save_job(storage: Storage, jobs: Sequence[Mapping[str, object]], step: int = 1) -> Manifest:
    """Saves the objects of all workers."""
    name = StepName(step, StoredRun(storage).open_generation())
    receipts = [save_part(storage, objects, name, Worker(rank, len(jobs))) for rank, objects in enumerate(jobs)]
    return commit_parts(storage, receipts, name)


def restore_part(
    storage: Storage,
    objects: dict[str, Any],
    worker: Worker,
    emit: Callable[[Event], None] = lambda event: None,
    *,
    strict: bool = True,
) -> Restoration:
    """Restores the objects of one worker; those that cannot be changed are replaced in the dict."""
    restoration = restore_objects(
        storage, objects, step=None, select=None, strict=strict, threads=1, emit=emit, worker=worker
    )
    assert restoration is not None
    objects.update(restoration.replaced)
    return restoration
