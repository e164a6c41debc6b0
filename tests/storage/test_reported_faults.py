"""What users of other libraries report of checkpoints in buckets: each must not happen here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.catalog import StoredRun
from holdfast.errors import NoWholeCheckpointError, SaveFailedError, StorageError
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME
from object_storage import ObjectStorage


class RecordingStorage(ObjectStorage):
    """Records what is written, in order; the publication of a path that ends with `failing` fails."""

    def __init__(self) -> None:
        super().__init__("reported")
        self.written: list[str] = []
        self.failing = "\0"

    def publish(self, path: str, data: bytes) -> bool:
        if path.endswith(self.failing):
            raise StorageError(f"cannot publish {path}: the service is gone", path=path)
        self.written.append(path)
        return super().publish(path, data)

    def put(self, path: str, content: bytearray) -> None:
        self.written.append(path)
        super().put(path, content)


def manager_of(storage: ObjectStorage, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        storage, holdfast.Checkpoint(values=np.zeros(100)), cluster="alone", **{"keep": holdfast.All(), **options}
    )


@pytest.fixture
def storage() -> RecordingStorage:
    """A run with the steps 1 and 2."""
    storage = RecordingStorage()
    with manager_of(storage) as manager:
        manager.save(1).wait_committed(60)
        manager.save(2).wait_committed(60)
    return storage


def steps_of(storage: ObjectStorage) -> list[int]:
    return [name.step for name in StoredRun(storage).look().living]


def test_what_makes_a_step_count_is_written_last(storage: RecordingStorage) -> None:
    step = [path for path in storage.written if path.startswith("step-000000002")]
    names = [path.rpartition("/")[2] for path in step]
    assert names[-2:] == [MANIFEST_NAME, COMMITTED_NAME]
    assert len(names) == 4, "data and index, and nothing after the copy of the manifest"


def test_copied_steps_without_the_copy_of_the_manifest_stay(storage: RecordingStorage) -> None:
    for directory in [one.name for one in storage.list("") if one.name.startswith("step-")]:
        storage.delete([f"{directory}/{COMMITTED_NAME}"])
    with manager_of(storage) as manager:
        assert manager.restore() is not None
        manager.save(3).wait_committed(60)
    assert steps_of(storage) == [1, 2, 3]


def test_save_that_fails_leaves_no_step_and_the_next_is_made(storage: RecordingStorage) -> None:
    with manager_of(storage) as manager:
        manager.restore()
        storage.failing = MANIFEST_NAME
        with pytest.raises(SaveFailedError):
            manager.save(3).wait_committed(60)
        storage.failing = "\0"
        assert steps_of(storage) == [1, 2]
        manager.save(4).wait_committed(60)
    assert steps_of(storage) == [1, 2, 4]


def test_unreadable_steps_raise_and_begin_no_new_run(storage: RecordingStorage) -> None:
    for one in storage.list("", deep=True):
        if one.name.endswith((".safetensors", COMMITTED_NAME)):
            storage.delete([one.name])
            storage.write(one.name, b"rotten")
    with manager_of(storage) as manager, pytest.raises(NoWholeCheckpointError):
        manager.restore()
    assert steps_of(storage) == [1, 2]


def test_step_that_the_job_resumed_from_stays_while_it_runs(storage: RecordingStorage) -> None:
    with manager_of(storage, keep=holdfast.Latest(1)) as manager:
        restored = manager.restore()
        assert restored is not None
        for step in (3, 4, 5):
            manager.save(step)
            manager.wait(60)
        assert steps_of(storage) == [restored.step, 5]
