"""Whole runs on an object store: without directories, and with parts of a least size and a largest number."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import call, call_json
from holdfast.catalog import StoredRun
from holdfast.errors import FencedError, SaveFailedError
from holdfast.format.names import StepName
from holdfast.format.records import ALONE
from holdfast.policies import RetentionPolicy
from holdfast.storage import Entry, open_storage, register_scheme
from holdfast.storage.memory import MemoryReader
from object_storage import ObjectStorage
from simulated_job import restore_part, save_job
from whole_runs import check_whole

LENGTH = 300_000
STORES: dict[str, ObjectStorage] = {}
LIMITS = {
    "plain": {},
    "few parts": {"best_piece_bytes": 64 << 10, "least_piece_bytes": 64 << 10, "most_pieces": 9},
    "large parts": {"best_piece_bytes": 64 << 10, "least_piece_bytes": 2 << 20},
}


@pytest.fixture(params=LIMITS)
def storage(request: pytest.FixtureRequest) -> ObjectStorage:
    """A new store. Some take at most nine parts of a file, or none of less than 2 MiB but the last."""
    storage = ObjectStorage("run", **LIMITS[request.param])
    STORES[storage.url] = storage
    register_scheme("objects", "objects://name", STORES.__getitem__)
    return storage


def manager_of(storage: ObjectStorage, array: np.ndarray, **options: object) -> hf.CheckpointManager:
    checkpoint = hf.Checkpoint(array=array, frozen=np.full(LENGTH, 7.0), small=[1, "two"])
    return hf.CheckpointManager(storage, checkpoint, cluster="alone", **options)  # type: ignore[arg-type]


def save_steps(manager: hf.CheckpointManager, array: np.ndarray, steps: range) -> None:
    for step in steps:
        array[:] = step
        manager.save(step, metrics={"loss": 1 / step})
        manager.wait(60)


def restored_value(storage: ObjectStorage) -> tuple[int, float]:
    array = np.zeros(LENGTH)
    with manager_of(storage, array) as manager:
        restored = manager.restore()
    assert restored is not None
    assert (array == array[0]).all()
    return restored.step, float(array[0])


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_run_is_saved_retained_and_restored(storage: ObjectStorage, incremental: bool) -> None:
    array = np.zeros(LENGTH)
    with manager_of(storage, array, keep=hf.Latest(2), incremental=incremental) as manager:
        save_steps(manager, array, range(1, 7))
    expected = [1, 5, 6] if incremental else [5, 6]
    assert check_whole(storage) == expected, "step 1 has the array that never changes"
    catalog = StoredRun(storage).look()
    assert (catalog.unfinished, catalog.trash, catalog.lost, catalog.spare_bytes) == ((), (), (), None)
    assert restored_value(storage) == (6, 6.0)
    with manager_of(storage, array, keep=hf.Latest(2), incremental=incremental) as manager:
        manager.restore()
        save_steps(manager, array, range(7, 9))
    assert restored_value(storage) == (8, 8.0)
    with manager_of(storage, array, keep=hf.All(), begin_anew=True) as manager:
        save_steps(manager, array, range(1, 3))
    assert restored_value(storage) == (2, 2.0)


def test_job_is_fenced_by_a_second_one(storage: ObjectStorage) -> None:
    array, other = np.zeros(LENGTH), np.zeros(LENGTH)
    zombie = manager_of(storage, array, keep=hf.All())
    save_steps(zombie, array, range(1, 4))
    with manager_of(storage, other, keep=hf.All()) as living:
        living.restore()
        save_steps(living, other, range(4, 6))
        with pytest.raises(SaveFailedError) as failed:
            zombie.save(9).wait_committed(60)
        assert isinstance(failed.value.__cause__, FencedError)
        zombie.close()
        save_steps(living, other, range(6, 7))
    assert check_whole(storage) == [1, 2, 3, 4, 5, 6]
    assert restored_value(storage) == (6, 6.0)


def test_late_manifest_of_a_fenced_job_is_not_the_newest(storage: ObjectStorage) -> None:
    """Nothing takes the way from a late writer here: its step is swept, and then gets a manifest all the same."""
    array = np.zeros(LENGTH)
    with manager_of(storage, array, keep=hf.All()) as manager:
        save_steps(manager, array, range(1, 3))
    manifest = storage.read(StepName(2, 1).manifest_path, 1 << 20)
    with manager_of(storage, array, keep=hf.All()) as manager:
        manager.restore()
        save_steps(manager, array, range(3, 4))
    assert storage.publish(StepName(9, 1).manifest_path, manifest)
    assert StoredRun(storage).look().newest == StepName(3, 2)
    assert restored_value(storage) == (3, 3.0)


def test_unfinished_save_is_swept(storage: ObjectStorage) -> None:
    array = np.zeros(LENGTH)
    with manager_of(storage, array, keep=hf.All()) as manager:
        save_steps(manager, array, range(1, 2))
    storage.write(f"{StepName(2, 1).directory}/data-00000-of-00001.safetensors", b"half")
    assert StoredRun(storage).look().unfinished == (StepName(2, 1),)
    with manager_of(storage, array, keep=hf.All()) as manager:
        manager.restore()
        save_steps(manager, array, range(2, 3))
    assert storage.list(StepName(2, 1).directory) == []
    assert check_whole(storage) == [1, 2]


def test_look_lists_the_steps_once(storage: ObjectStorage) -> None:
    array = np.zeros(LENGTH)
    with manager_of(storage, array, keep=hf.All()) as manager:
        save_steps(manager, array, range(1, 6))
    run = StoredRun(storage)
    run.look()
    storage.requests.clear()
    assert [name.step for name in run.look().committed] == [1, 2, 3, 4, 5]
    assert storage.requests == ["list"], "the steps, and the generations"
    storage.delete([StepName(5, 1).manifest_path])
    catalog = run.look()
    assert [name.step for name in catalog.committed] == [1, 2, 3, 4]
    assert [name.step for name in catalog.lost] == [5]


def test_generation_that_a_listing_came_too_early_for_is_seen() -> None:
    """A deep listing of many objects takes a while, and lists the generations before the steps."""

    class Early(ObjectStorage):
        def list(self, path: str, *, deep: bool = False) -> list[Entry]:
            entries = super().list(path, deep=deep)
            return [one for one in entries if not (deep and one.name.startswith("generations/0002"))]

    storage, array = ObjectStorage("run"), np.zeros(LENGTH)
    for steps in (range(1, 3), range(2, 4)):
        with manager_of(storage, array, keep=hf.All()) as manager:
            manager.restore(step=1) if steps.start > 1 else None
            save_steps(manager, array, steps)
    early = Early("run")
    early.__dict__.update(storage.__dict__)
    assert StoredRun(early).look().living == StoredRun(storage).look().living


def test_requests_of_a_save_do_not_grow_with_the_history(storage: ObjectStorage) -> None:
    array = np.zeros(LENGTH)
    begin = ["list", "create", "write", "publish", "list"]
    # The copy of the manifest goes first, then a look for readers says whether the rest may.
    removal = ["delete", "list", "delete", "delete", "list", "list", "delete"]
    with manager_of(storage, array, keep=hf.All()) as manager:
        save_steps(manager, array, range(1, 3))
        storage.requests.clear()
        save_steps(manager, array, range(3, 15))
        assert storage.requests == [*begin, "list", "write"] * 12
        # What a later job needs of many steps is in one object, written once for some saves.
        save_steps(manager, array, range(15, 25))
        assert storage.requests.count("publish") == 22 + 1
    with manager_of(storage, array, keep=hf.Latest(2)) as manager:
        manager.restore()
        save_steps(manager, array, range(25, 27))
        storage.requests.clear()
        save_steps(manager, array, range(27, 29))
        assert storage.requests == [*begin, "list", "write", *removal] * 2


@pytest.mark.parametrize("keep", [hf.All(), hf.Latest(3) | hf.EveryN(1)], ids=repr)
def test_requests_of_a_new_job_do_not_grow_with_the_history(keep: RetentionPolicy) -> None:
    def count(kept: int, jobs: int) -> list[int]:
        storage, array = ObjectStorage("run"), np.zeros(LENGTH)
        for number in range(jobs):
            with manager_of(storage, array, keep=hf.All()) as manager:
                save_steps(manager, array, range(number * kept // jobs + 1, (number + 1) * kept // jobs + 1))
        storage.requests.clear()
        with manager_of(storage, array, keep=keep) as manager:
            manager.restore()
            opened = len(storage.requests)
            save_steps(manager, array, range(kept + 1, kept + 2))
        counts = [opened, len(storage.requests) - opened]
        assert check_whole(storage)[-1] == kept + 1
        return counts

    # The newest steps and jobs, which are not summed up yet, are some more or fewer.
    for opened, saved in (count(30, 2), count(90, 2), count(60, 30)):
        assert opened < 30
        assert saved < 80


def test_prune_and_verify_open_it_by_its_url(storage: ObjectStorage) -> None:
    array = np.zeros(LENGTH)
    with manager_of(storage, array, keep=hf.All()) as manager:
        save_steps(manager, array, range(1, 6))
    assert open_storage(storage.url) is storage
    assert call("prune", storage.url, "--keep", "2", "--yes").exit_code == 0
    assert call_json("verify", storage.url, "--all")["is_whole"]
    assert [step["step"] for step in call_json("list", storage.url)["steps"]] == [4, 5]
    assert check_whole(storage) == [4, 5]
    assert restored_value(storage) == (5, 5.0)


class MeetingReader:
    """Returns from a read once as many others are in one as the barrier counts."""

    def __init__(self, reader: MemoryReader, meeting: threading.Barrier) -> None:
        self.size_bytes, self.read_into, self.close = reader.size_bytes, reader.read_into, reader.close
        self._reader, self._meeting = reader, meeting

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        self._meeting.wait(60)
        return self._reader.read_digested(offset_bytes, parts)


def test_small_files_of_many_workers_are_read_at_once() -> None:
    meeting = threading.Barrier(3)

    class MeetingStorage(ObjectStorage):
        def open_reader(self, path: str) -> Any:
            reader = super().open_reader(path)
            return MeetingReader(reader, meeting) if path.endswith(".safetensors") else reader

    storage = MeetingStorage(read_parallel=3)
    parts = [hf.Shard(np.full(4, float(rank)), offsets=(4 * rank,), global_shape=(12,)) for rank in range(3)]
    save_job(storage, [{"all": {"array": part}} for part in parts])
    array = np.zeros(12)
    restore_part(storage, {"all": {"array": array}}, ALONE)
    assert array.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
