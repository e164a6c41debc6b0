"""What is to be removed after a commit, and the save that comes right behind it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.cluster import Cluster
from holdfast.errors import DeadlineError, SaveFailedError, StorageError, StorageFullError, UsageError
from holdfast.events import Committed, Event, Retained, Skipped
from holdfast.storage import FileWriter, LocalStorage
from holdfast.storage.local.streams import LocalWriter
from memory_engine import run_workers
from mounts import mounted
from patience import PATIENCE_SECONDS
from whole_runs import check_whole

LENGTH = 300_000


class HeldStorage(LocalStorage):
    """A disk on which the files of step 1 are removed only when the test lets them go.

    Attributes:
        error: What their removal fails with then, if it does.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_removing, self.is_full, self.is_broken = threading.Event(), threading.Event(), threading.Event()
        self._let_go = threading.Event()
        self.error: StorageError | None = None

    def let_go(self) -> None:
        self._let_go.set()

    def has_let_go(self) -> bool:
        return self._let_go.is_set()

    def delete(self, paths: Iterable[str]) -> bool:
        every = [*paths]
        if any(path.startswith("step-000000001.") for path in every) and not self._let_go.is_set():
            self.is_removing.set()
            assert self._let_go.wait(PATIENCE_SECONDS)
            if self.error is not None:
                raise self.error
        return super().delete(every)

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        if self.is_broken.is_set():
            raise StorageError("broken")
        try:
            return super().create(path, size_bytes)
        except StorageFullError:
            self.is_full.set()
            raise


class Training:
    """A program that saves, with the removal of its first checkpoint held since the second one was committed."""

    def __init__(self, storage: LocalStorage, **options: Any) -> None:
        self.array: np.ndarray = np.zeros(LENGTH)
        self.events: list[Event] = []
        options = dict[str, Any]({"keep": hf.Latest(1), "sinks": [self.events.append], "cluster": "alone"}) | options
        self.manager = hf.CheckpointManager(storage, hf.Checkpoint(array=self.array, other=np.ones(LENGTH)), **options)

    def save(self, step: int) -> hf.SaveHandle:
        self.array[:] = step
        return self.manager.save(step)

    def save_two(self, storage: HeldStorage) -> hf.SaveHandle:
        self.save(1).wait_ended(PATIENCE_SECONDS)
        second = self.save(2)
        second.wait_committed(PATIENCE_SECONDS)
        assert storage.is_removing.wait(PATIENCE_SECONDS)
        return second

    def steps_of(self, kind: type[Event]) -> list[Any]:
        return [event.step for event in self.events if isinstance(event, kind)]  # type: ignore[attr-defined]


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith(("step-", ".trash")))


def restored_step(run: Path | LocalStorage) -> int:
    array = np.zeros(LENGTH)
    restored = hf.CheckpointManager(run, hf.Checkpoint(array=array), cluster="alone").restore(only="array")
    assert restored is not None
    assert restored.passed_over == ()
    assert (array == restored.step).all()
    return restored.step


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("reuse_space", [True, False])
def test_the_next_save_is_committed_while_the_last_one_is_tidied_up_after(
    tmp_path: Path, reuse_space: bool, when_busy: str
) -> None:
    storage = HeldStorage(tmp_path)
    training = Training(storage, reuse_space=reuse_space, when_busy=when_busy, threads=1)
    second = training.save_two(storage)
    third = training.save(3)
    third.wait_committed(PATIENCE_SECONDS)
    assert restored_step(tmp_path) == 3
    assert not any(handle.ended for handle in (second, third))
    for wait in (training.manager.wait, training.manager.close):
        with pytest.raises(DeadlineError):
            wait(0.01)
    assert names_in(tmp_path) == [f"step-00000000{step}.g0001" for step in (1, 2, 3)]
    storage.let_go()
    training.manager.wait(PATIENCE_SECONDS)
    assert all(handle.ended for handle in (second, third))
    assert names_in(tmp_path) == ["step-000000003.g0001"]
    training.manager.close(PATIENCE_SECONDS)
    check_whole(tmp_path)
    assert training.steps_of(Committed) == [1, 2, 3]
    assert training.steps_of(Skipped) == []
    assert [event.removed for event in training.events if isinstance(event, Retained)] == [(), (1,), (2,)]


def test_what_a_save_in_progress_writes_is_not_swept(tmp_path: Path) -> None:
    """The second save's clean-up lists the run while the third one has a directory without a manifest."""

    class Storage(LocalStorage):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.has_opened, self.has_looked = threading.Event(), threading.Event()

        def list(self, path: str, *, deep: bool = False) -> Any:
            if path == "" and threading.current_thread().name.startswith("holdfast-tidier") and self.is_second():
                assert self.has_opened.wait(PATIENCE_SECONDS)
            return super().list(path, deep=deep)

        def is_second(self) -> bool:
            return (tmp_path / "step-000000002.g0001" / "manifest.json").exists() and not self.has_looked.is_set()

        def create(self, path: str, size_bytes: int) -> LocalWriter:
            writer = super().create(path, size_bytes)
            if path.startswith("step-000000003."):
                self.has_opened.set()
                assert self.has_looked.wait(PATIENCE_SECONDS)
            return writer

    storage = Storage(tmp_path)

    def look(event: Event) -> None:
        if isinstance(event, Retained) and 2 in event.kept:
            storage.has_looked.set()

    training = Training(storage, sinks=[look])
    training.save(1).wait_ended(PATIENCE_SECONDS)
    training.save(2).wait_committed(PATIENCE_SECONDS)
    training.save(3).wait_committed(PATIENCE_SECONDS)
    assert storage.has_looked.is_set()
    training.manager.close(PATIENCE_SECONDS)
    assert restored_step(tmp_path) == 3
    check_whole(tmp_path)


def test_a_save_that_refers_to_others_is_copied_before_the_clean_up_ends(tmp_path: Path) -> None:
    storage = HeldStorage(tmp_path)
    # Step 1 stays as long as something refers to it.
    training = Training(storage, incremental=True, keep=hf.Latest(1))
    training.save(1).wait_ended(PATIENCE_SECONDS)
    objects = training.manager.checkpoint
    objects["other"] = np.zeros(LENGTH)
    second = training.save(2)
    second.wait_committed(PATIENCE_SECONDS)
    assert storage.is_removing.wait(PATIENCE_SECONDS)
    third = training.save(3)
    third.wait_staged(PATIENCE_SECONDS)
    assert not third.committed
    assert not third.has_place
    storage.let_go()
    third.wait_committed(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    committed = [event for event in training.events if isinstance(event, Committed)]
    assert [event.referred_bytes for event in committed] == [0, 0, LENGTH * 8]
    assert names_in(tmp_path) == [f"step-00000000{step}.g0001" for step in (2, 3)]
    check_whole(tmp_path)


def test_a_save_for_which_there_is_no_room_waits_for_it(tmp_path: Path) -> None:
    size_bytes = 2 * LENGTH * 8
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size_bytes * 5 // 2}", "tmpfs") as root:
        storage = HeldStorage(root)
        training = Training(storage)
        training.save_two(storage)
        third = training.save(3)
        third.wait_staged(PATIENCE_SECONDS)
        assert storage.is_full.wait(PATIENCE_SECONDS)
        path = third.path
        assert not third.committed
        storage.let_go()
        assert third.wait_committed(PATIENCE_SECONDS) == path
        for step in range(4, 12):
            handle = training.save(step)
        handle.wait_committed(PATIENCE_SECONDS)
        training.manager.close(PATIENCE_SECONDS)
        assert names_in(root) == ["step-000000011.g0001"]
        assert restored_step(root) == 11
        check_whole(root)


def test_a_save_that_finds_out_late_that_there_is_no_room_waits_for_it(tmp_path: Path) -> None:
    """Not every file system can say at once that there is none."""

    class Writer:
        def __init__(self, inner: FileWriter) -> None:
            self.finish, self.abandon, self._write_at = inner.finish, inner.abandon, inner.write_at

        def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
            if not storage.has_let_go():
                storage.is_full.set()
                raise StorageFullError("no room")
            return self._write_at(offset_bytes, data, parts)

    class Storage(HeldStorage):
        def create(self, path: str, size_bytes: int) -> Any:
            writer = super().create(path, size_bytes)
            return Writer(writer) if path.startswith("step-000000003.") else writer

    storage = Storage(tmp_path)
    training = Training(storage)
    training.save_two(storage)
    third = training.save(3)
    third.wait_staged(PATIENCE_SECONDS)
    assert storage.is_full.wait(PATIENCE_SECONDS)
    assert not third.committed
    storage.let_go()
    third.wait_committed(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    assert names_in(tmp_path) == ["step-000000003.g0001"]
    assert restored_step(tmp_path) == 3
    check_whole(tmp_path)


def test_a_save_for_which_there_will_be_no_room_fails(tmp_path: Path) -> None:
    size_bytes = 2 * LENGTH * 8
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size_bytes * 5 // 2}", "tmpfs") as root:
        storage = HeldStorage(root)
        training = Training(storage)
        training.save_two(storage)
        (root / "another program's").write_bytes(bytes(size_bytes // 2 - 100_000))
        training.manager.checkpoint["more"] = np.ones(LENGTH * 2)
        third = training.save(3)
        assert storage.is_full.wait(PATIENCE_SECONDS)
        storage.let_go()
        with pytest.raises(SaveFailedError, match="step 3"):
            third.wait_committed(PATIENCE_SECONDS)
        training.manager.close(PATIENCE_SECONDS)
        assert names_in(root) == ["step-000000002.g0001"]
        assert restored_step(root) == 2


def test_a_step_replaces_another_only_once_it_has_been_published(tmp_path: Path) -> None:
    """The second save's clean-up sees the manifest of the third one, which may be gone after a power cut."""

    class Storage(LocalStorage):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.is_seen, self.has_looked = threading.Event(), threading.Event()

        def list(self, path: str, *, deep: bool = False) -> Any:
            is_tidier = threading.current_thread().name.startswith("holdfast-tidier")
            if is_tidier and (tmp_path / "step-000000002.g0001" / "manifest.json").exists():
                assert self.is_seen.wait(PATIENCE_SECONDS)
            return super().list(path, deep=deep)

        def publish(self, path: str, data: bytes) -> bool:
            is_new = super().publish(path, data)
            if path == "step-000000003.g0001/manifest.json":
                self.is_seen.set()
                assert self.has_looked.wait(PATIENCE_SECONDS)
            return is_new

    storage = Storage(tmp_path)

    def look(event: Event) -> None:
        if isinstance(event, Retained) and 2 in event.kept:
            storage.has_looked.set()

    events: list[Event] = []
    training = Training(storage, keep=hf.Latest(2), sinks=[events.append, look])
    for step in (1, 2, 3):
        training.save(step).wait_committed(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    assert [event.removed for event in events if isinstance(event, Retained)] == [(), (), (1,)]
    assert names_in(tmp_path) == [f"step-00000000{step}.g0001" for step in (2, 3)]
    check_whole(tmp_path)


def test_a_manifest_for_which_there_is_no_room_waits_for_it(tmp_path: Path) -> None:
    """All other files of the step are there: another program has taken the rest meanwhile."""

    class Storage(HeldStorage):
        def publish(self, path: str, data: bytes) -> bool:
            if path.startswith("step-000000003.") and not self.is_full.is_set():
                with (root / "another program's").open("wb", buffering=0) as file, suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
                try:
                    return super().publish(path, data)
                except StorageFullError:
                    self.is_full.set()
                    raise
            return super().publish(path, data)

    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={2 * LENGTH * 8 * 4}", "tmpfs") as root:
        storage = Storage(root)
        training = Training(storage)
        training.save_two(storage)
        third = training.save(3)
        assert storage.is_full.wait(PATIENCE_SECONDS)
        assert not third.committed
        storage.let_go()
        third.wait_committed(PATIENCE_SECONDS)
        training.manager.close(PATIENCE_SECONDS)
        assert names_in(root) == ["step-000000003.g0001"]
        check_whole(root)


def test_the_clean_up_makes_room_for_its_own_copy_of_the_manifest(tmp_path: Path) -> None:
    class Storage(LocalStorage):
        def write(self, path: str, data: bytes) -> None:
            if path == "step-000000002.g0001/committed" and (root / "step-000000001.g0001").exists():
                with (root / "another program's").open("wb", buffering=0) as file, suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
            super().write(path, data)

    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={2 * LENGTH * 8 * 4}", "tmpfs") as root:
        training = Training(Storage(root), reuse_space=False)
        for step in (1, 2):
            training.save(step).wait_ended(PATIENCE_SECONDS)
        training.manager.close(PATIENCE_SECONDS)
        assert (root / "another program's").exists()
        assert names_in(root) == ["step-000000002.g0001"]
        assert (root / "step-000000002.g0001" / "committed").stat().st_size
        check_whole(root)


def test_a_save_after_a_failed_one_keeps_its_deadline(tmp_path: Path) -> None:
    storage = HeldStorage(tmp_path)
    training = Training(storage, timeout_seconds=1.0)
    training.save_two(storage)
    storage.is_broken.set()
    with pytest.raises(SaveFailedError, match="broken"):
        training.save(3).wait_committed(PATIENCE_SECONDS)
    storage.is_broken.clear()
    with pytest.raises(DeadlineError):
        training.save(4)
    storage.let_go()
    training.manager.wait(PATIENCE_SECONDS)
    training.save(5).wait_committed(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    assert restored_step(tmp_path) == 5


def test_a_program_that_ends_without_closing_leaves_no_spare(tmp_path: Path) -> None:
    """The first file that could be kept for the next save is removed when the program waits for its last one."""
    program = """
import sys
from collections.abc import Iterable, Sequence
import numpy as np
import holdfast as hf

array = np.zeros(1_000_000)
manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(array=array), keep=hf.Latest(1), cluster="alone")
for step in (1, 2):
    array[:] = step
    manager.save(step)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=PATIENCE_SECONDS)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert names_in(tmp_path) == ["step-000000002.g0001"]


def test_a_save_that_fails_ends_when_the_last_one_is_tidied_up_after(tmp_path: Path) -> None:
    storage = HeldStorage(tmp_path)
    storage.error = StorageError("they cannot be removed")
    training = Training(storage)
    training.save_two(storage)
    storage.is_broken.set()
    third = training.save(3)
    with pytest.raises(SaveFailedError, match="broken"):
        third.wait_committed(PATIENCE_SECONDS)
    with pytest.raises(DeadlineError):
        training.manager.wait(0.01)
    assert not third.ended
    storage.let_go()
    training.manager.wait(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    assert names_in(tmp_path) == [f"step-00000000{step}.g0001" for step in (1, 2)]
    assert restored_step(tmp_path) == 2


def test_a_save_that_cannot_begin_leaves_the_clean_up_to_be_waited_for(tmp_path: Path) -> None:
    storage = HeldStorage(tmp_path)
    training = Training(storage)
    second = training.save_two(storage)
    with pytest.raises(UsageError):
        training.save(1)
    with pytest.raises(DeadlineError):
        training.manager.wait(0.01)
    storage.let_go()
    training.manager.wait(PATIENCE_SECONDS)
    assert second.ended
    training.manager.close(PATIENCE_SECONDS)


def test_sink_that_waits_for_the_clean_up_it_reports_is_refused(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def wait(event: Event) -> None:
        if isinstance(event, Retained):
            for call in (training.manager.wait, handle.wait_ended):
                with pytest.raises(UsageError) as caught:
                    call()
                errors.append(caught.value)

    training = Training(LocalStorage(tmp_path), sinks=[wait])
    handle = training.save(1)
    training.manager.wait(PATIENCE_SECONDS)
    training.manager.close(PATIENCE_SECONDS)
    assert len(errors) == 2


def test_all_workers_copy_the_next_state_while_the_leader_tidies_up(tmp_path: Path) -> None:
    storages = [HeldStorage(tmp_path), HeldStorage(tmp_path)]
    meeting = threading.Barrier(2)

    def work(cluster: Cluster) -> list[Event]:
        leader = storages[0]
        training = Training(storages[cluster.rank], cluster=cluster)
        training.save(1).wait_ended(PATIENCE_SECONDS)
        training.save(2).wait_committed(PATIENCE_SECONDS)
        assert leader.is_removing.wait(PATIENCE_SECONDS)
        third = training.save(3)
        third.wait_staged(PATIENCE_SECONDS)
        assert not third.committed
        meeting.wait(PATIENCE_SECONDS)
        leader.let_go()
        third.wait_committed(PATIENCE_SECONDS)
        training.manager.close(PATIENCE_SECONDS)
        return training.events

    events = run_workers(2, work)
    assert [[event.removed for event in each if isinstance(event, Retained)] for each in events] == [
        [(), (1,), (2,)],
        [],
    ]
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [3]
    check_whole(tmp_path)
