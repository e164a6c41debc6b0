"""Saves and restores of jobs of several workers: as threads, so that one can fail at the call that is meant."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import flip_bit
from holdfast.catalog import StoredRun
from holdfast.cluster import AloneCluster, Cluster
from holdfast.cluster.store import JoinedCluster
from holdfast.errors import (
    AbsentError,
    FencedError,
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    PeerError,
    SaveFailedError,
    StorageError,
    StorageFullError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.format.names import StepName
from holdfast.policies import SaveDecision, SaveMoment
from holdfast.process.latch import Latch
from holdfast.restore.verify import open_step
from holdfast.storage import LocalStorage
from holdfast.storage.local.streams import LocalWriter
from memory_engine import MemoryEngine, run_threads, run_workers
from whole_runs import check_whole

pytestmark = pytest.mark.usefixtures("numpy_is_known")

PATIENCE_SECONDS = 30.0
LIVENESS_SECONDS = 1.0


class Toy:
    """One worker's state, which follows from the step and, in part, from the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shared = {name: np.zeros(length) for name, length in (("small", 3), ("large", 300_000))}
        self.own = np.zeros(5)
        self.count = {"step": 0}
        self.checkpoint = hf.Checkpoint(shared=self.shared, own=hf.PerWorker({"array": self.own}), count=self.count)

    def train(self, step: int) -> None:
        for array in self.shared.values():
            array[:] = step
        self.own[:] = step * 10 + self.rank
        self.count["step"] = step

    def has(self, step: int) -> bool:
        same = all((array == step).all() for array in self.shared.values())
        return same and bool((self.own == step * 10 + self.rank).all()) and self.count == {"step": step}

    def manager(self, place: Path | LocalStorage, cluster: Cluster, **options: Any) -> hf.CheckpointManager:
        options = {"liveness_seconds": LIVENESS_SECONDS, "timeout_seconds": PATIENCE_SECONDS, "threads": 2} | options
        return hf.CheckpointManager(place, self.checkpoint, cluster=cluster, **options)


class Meeting:
    """Lets the threads of a test wait for each other, outside of what is tested."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def wait(self) -> None:
        self._barrier.wait(PATIENCE_SECONDS)


def cause_of(handle: hf.SaveHandle) -> BaseException | None:
    with pytest.raises(SaveFailedError) as caught:
        handle.wait_committed(PATIENCE_SECONDS)
    return caught.value.__cause__


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for what happens in another thread, which tells nobody of it."""
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end_at
        time.sleep(0.001)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("step-", ".trash")))


# Saves and restores.


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_all_have_saved_comes_back_to_all(tmp_path: Path, world_size: int, incremental: bool) -> None:
    def save(cluster: Cluster) -> list[hf.events.Event]:
        told: list[hf.events.Event] = []
        toy = Toy(cluster.rank)
        manager = toy.manager(tmp_path, cluster, incremental=incremental, keep=hf.Latest(2), sinks=[told.append])
        with manager:
            assert manager.restore() is None
            for step in range(1, 6):
                toy.train(step)
                handle = manager.save(step, metrics={"loss": 1 / step}, metadata={"step": step})
                assert handle.path.endswith(f"step-{step:09d}.g0001")
                toy.train(-1)
                handle.wait_committed()
                assert manager.latest_step() == step
        return told

    told = run_workers(world_size, save)
    assert names_in(tmp_path) == [f"step-{step:09d}.g0001" for step in (4, 5)]
    check_whole(tmp_path)
    storage = LocalStorage(tmp_path)
    manifest = open_step(storage, "step-000000005.g0001", StepName(5, 1)).manifest
    assert manifest.world_size == world_size
    assert manifest.metrics == {"loss": 0.2}
    # The leader alone opens, removes, and keeps the journal.
    for rank, events in enumerate(told):
        kinds = [type(event).__name__ for event in events]
        assert kinds.count("Committed") == 5
        assert kinds.count("GenerationOpened") == (rank == 0)
        assert kinds.count("Retained") == (5 if rank == 0 else 0)
    assert sum("Committed" in repr(event) for event in hf.events.read_events(tmp_path / "events.jsonl")) == 5

    def restore(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster) as manager:
            restored = manager.restore()
            assert restored is not None
            assert restored.step == 5
            assert toy.has(5)
            toy.train(6)
            manager.save(6)
        assert manager.latest_step() == 6

    run_workers(world_size, restore)
    assert StoredRun(storage).look().generation == 2
    check_whole(tmp_path)


def test_another_number_of_workers_goes_on(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster) as manager:
            restored = manager.restore()
            step = restored.step if restored else 0
            assert toy.count == {"step": step}
            assert all((array == step).all() for array in toy.shared.values())
            toy.train(step + 1)
            manager.save(step + 1)

    for world_size in (2, 3, 1, 4):
        run_workers(world_size, work)
    assert StoredRun(LocalStorage(tmp_path)).look().living[-1].step == 4
    check_whole(tmp_path)


def test_older_step_is_restored_by_number_on_all_workers(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster) as manager:
            for step in (1, 2, 3):
                toy.train(step)
                manager.save(step)
            restored = manager.restore(2)
            assert restored is not None
            assert toy.has(2)
            # The line goes on from there, and steps come again.
            toy.train(3)
            manager.save(3)
            manager.save(4).wait_committed()
            assert manager.steps() == (1, 2, 3, 4)

    run_workers(3, work)
    assert [str(name) for name in StoredRun(LocalStorage(tmp_path)).look().living][1:3] == [
        "step 2 (generation 1)",
        "step 3 (generation 2)",
    ]


def test_nothing_stays_in_the_store(tmp_path: Path) -> None:
    engine = MemoryEngine()
    counts: list[int] = []

    def work(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster, keep=hf.Latest(1)) as manager:
            for step in range(1, 21):
                manager.save(step).wait_committed()
                manager.wait()
                if cluster.rank == 0:
                    counts.append(len(engine.keys))
            manager.restore()

    run_workers(3, work, engine)
    # The next save of others may have begun.
    assert max(counts) <= counts[0] + 8
    assert not [key for key in engine.keys if "/save/" in key or "/meeting/" in key]


def test_no_thread_stays(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster) as manager:
            manager.save(1)

    before = threading.active_count()
    run_workers(3, work)
    assert threading.active_count() == before


# One of them fails.


class FullNode(LocalStorage):
    """A node whose disk is full, as long as that is so."""

    is_full = False

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        if self.is_full:
            raise StorageFullError("no space left on this node", path=path, hint="Make room.")
        return super().create(path, size_bytes)


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_a_full_disk_on_one_node_ends_the_save_on_all(tmp_path: Path, guilty: int) -> None:
    meeting = Meeting(3)

    def work(cluster: Cluster) -> None:
        toy, storage = Toy(cluster.rank), FullNode(tmp_path)
        with toy.manager(storage, cluster, failures_allowed=2) as manager:
            manager.save(1).wait_committed()
            manager.wait()
            for _ in range(2):
                storage.is_full = cluster.rank == guilty
                cause = cause_of(manager.save(2))
                if cluster.rank == guilty:
                    assert isinstance(cause, StorageFullError)
                else:
                    assert isinstance(cause, PeerError)
                    assert (cause.rank, cause.kind) == (guilty, "StorageFullError")
                    assert cause.text == "no space left on this node"
                    assert cause.hint == "Make room."
                    assert f"rank {guilty} on node-{guilty}" in str(cause)
                manager.wait()
                meeting.wait()
                # Nothing partial is offered, nor left behind.
                assert names_in(tmp_path) == ["step-000000001.g0001"]
                meeting.wait()
            storage.is_full = False
            toy.train(2)
            # What was removed is not made again: whoever was thought dead may still write there.
            assert manager.save(2).path.endswith("step-000000002.g0001.a3")

    run_workers(3, work)
    check_whole(tmp_path)


def test_state_that_one_cannot_store(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        if cluster.rank == 1:
            toy.checkpoint["odd"] = {"what": object()}
        with toy.manager(tmp_path, cluster) as manager:
            if cluster.rank == 1:
                with pytest.raises(UnsupportedValueError):
                    manager.save(1)
                toy.checkpoint["odd"] = {"what": 1}
            else:
                toy.checkpoint["odd"] = {"what": 1}
                cause = cause_of(manager.save(1))
                assert isinstance(cause, PeerError)
                assert (cause.rank, cause.kind) == (1, "UnsupportedValueError")
            # It is in step again with the others.
            manager.save(1).wait_committed()

    run_workers(3, work)


class UnpublishingStorage(LocalStorage):
    """A place that takes no manifest."""

    def publish(self, path: str, data: bytes) -> bool:
        if path.endswith("manifest.json"):
            raise StorageError("the link is down", path=path)
        return super().publish(path, data)


def test_a_leader_that_cannot_publish_says_so(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        storage = UnpublishingStorage(tmp_path) if cluster.rank == 0 else LocalStorage(tmp_path)
        with Toy(cluster.rank).manager(storage, cluster) as manager:
            cause = cause_of(manager.save(1))
            if cluster.rank == 0:
                assert isinstance(cause, StorageError)
            else:
                assert isinstance(cause, PeerError)
                assert (cause.rank, cause.text) == (0, "the link is down")

    run_workers(3, work)
    assert names_in(tmp_path) == []


# One of them dies.


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_worker_ends_the_save_of_the_others(tmp_path: Path, victim: int) -> None:
    meeting = Meeting(3)

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster, failures_allowed=5)
        manager.save(1).wait_committed()
        manager.wait()
        meeting.wait()
        if cluster.rank == victim:
            # As if it had been killed: no sign of life any more, and no goodbye.
            cluster.close()
            meeting.wait()
            return
        for step in (2, 3):
            cause = cause_of(manager.save(step))
            assert isinstance(cause, PeerError)
            assert cause.rank == victim
            assert f"rank {victim} on node-{victim} has not been heard of for 1 s" in str(cause)
        assert manager.latest_step() == 1
        meeting.wait()
        manager.close()

    run_workers(3, work)
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [1]


def test_a_worker_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    left = threading.Event()

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster, liveness_seconds=PATIENCE_SECONDS)
        manager.save(1).wait_committed()
        if cluster.rank == 1:
            manager.close()
            left.set()
            return
        left.wait(PATIENCE_SECONDS)
        begun_at = time.monotonic()
        cause = cause_of(manager.save(2))
        assert isinstance(cause, PeerError)
        assert (cause.rank, cause.text) == (1, "has left the job")
        assert time.monotonic() - begun_at < PATIENCE_SECONDS
        manager.abandon()

    run_workers(2, work)


def test_one_that_has_done_its_part_is_not_missed(tmp_path: Path) -> None:
    """Its bytes are durable: the step is committed without it."""
    part_is_there = threading.Event()
    leaders: list[hf.CheckpointManager] = []

    class SlowStorage(LocalStorage):
        def write(self, path: str, data: bytes) -> None:
            super().write(path, data)
            if "index-00000" in path:
                part_is_there.wait(PATIENCE_SECONDS)
                participant = leaders[0].participant
                assert participant is not None
                wait_until(lambda: 1 in participant.peers.failures.lost)

    engine = MemoryEngine()

    def work(cluster: Cluster) -> None:
        if cluster.rank == 0:
            toy = Toy(0)
            manager = toy.manager(SlowStorage(tmp_path), cluster)
            leaders.append(manager)
            manager.save(1).wait_committed()
            manager.abandon()
            return
        manager = Toy(1).manager(tmp_path, cluster)
        manager.save(1)
        wait_until(lambda: any(key.endswith("/part/1") for key in engine.keys))
        cluster.close()
        part_is_there.set()
        manager.abandon()

    run_workers(2, work, engine)
    assert part_is_there.is_set()
    check_whole(tmp_path)
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [1]


class Link(MemoryEngine):
    """One worker's way to a store, which can be cut without that of the others."""

    def __init__(self, store: MemoryEngine) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._pass()
        self._store.set(key, value)

    def set_once(self, key: str, value: bytes) -> bytes:
        self._pass()
        return self._store.set_once(key, value)

    def try_get(self, key: str) -> bytes | None:
        self._pass()
        return self._store.try_get(key)

    def add(self, key: str, amount: int) -> int:
        self._pass()
        return self._store.add(key, amount)

    def delete(self, key: str) -> None:
        self._pass()
        self._store.delete(key)


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (0, "has not been heard of for 1 s, so the other workers abandoned the save of step 2"),
        (1, "reached the save of step 2 after the others had abandoned it"),
    ],
)
def test_a_worker_that_was_thought_dead_comes_too_late(tmp_path: Path, late: int, told: str) -> None:
    """It does not wait for what the others have ended and forgotten; and then all are together again."""
    store = MemoryEngine()
    links = [Link(store), Link(store)]
    cut, given_up, told_late, together = Meeting(2), Meeting(2), Meeting(2), Meeting(2)
    failed = [True, True]

    def work(rank: int) -> None:
        cluster = JoinedCluster(
            links[rank].connect, rank, 2, host="this process", prefix=str(tmp_path), node=f"node-{rank}"
        )
        manager = Toy(rank).manager(tmp_path, cluster, failures_allowed=999, timeout_seconds=3600.0)
        manager.save(1).wait_committed(PATIENCE_SECONDS)
        manager.wait()
        if rank == late:
            links[late].cut()
            cut.wait()
            given_up.wait()
            links[late].mend()
            cause = cause_of(manager.save(2))
            assert isinstance(cause, PeerError)
            assert (cause.rank, cause.kind, cause.text) == (late, "AbsentError", told)
            assert "taken for dead" in cause.hint
        else:
            cut.wait()
            cause = cause_of(manager.save(2))
            assert isinstance(cause, PeerError)
            assert (cause.rank, cause.text) == (late, "has not been heard of for 1 s")
            manager.wait()
            given_up.wait()
        told_late.wait()
        # Until it has been heard of again, saves may fail; and who still misses the leader may not hear of a commit.
        step, are_together = 2, False
        while not are_together:
            step += 1
            handle = manager.save(step)
            handle.wait_ended(PATIENCE_SECONDS)
            failed[rank] = handle.failed
            together.wait()
            are_together = not any(failed)
            together.wait()
        assert manager.latest_step() == step
        manager.close()
        cluster.close()

    run_threads([partial(work, rank) for rank in range(2)])
    assert not [key for key in store.keys if "/save/" in key]


def test_a_worker_that_does_not_restore_is_named(tmp_path: Path) -> None:
    meeting = Meeting(2)

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster)
        meeting.wait()
        if cluster.rank == 1:
            manager.close()
        else:
            with pytest.raises(AbsentError, match="rank 1 of 2 on node-1"):
                manager.restore()
            manager.abandon()

    run_workers(2, work)


# They do not do the same.


def test_a_worker_that_does_not_save_in_time_is_named_to_who_waits(tmp_path: Path) -> None:
    is_reported = threading.Event()

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster, timeout_seconds=0.5, failures_allowed=1)
        if cluster.rank == 0:
            with pytest.raises(SaveFailedError, match="rank 1 on node-1: AbsentError: did not ") as caught:
                manager.save(1).wait_committed()
            assert "what holds it up" in caught.value.hint
            is_reported.set()
        else:
            is_reported.wait(PATIENCE_SECONDS)
            with pytest.raises(SaveFailedError):
                manager.save(1).wait_committed()
        manager.abandon()

    run_workers(2, work)


def test_workers_of_which_only_some_compare_replicas(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster, check_replicas=cluster.rank == 0)
        cause = cause_of(manager.save(1))
        assert isinstance(cause, PeerError)
        assert cause.text == "it has check_replicas=False, but rank 0 has check_replicas=True"
        manager.abandon()

    run_workers(2, work)


def test_workers_at_different_steps(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path, cluster, failures_allowed=9) as manager:
            cause = cause_of(manager.save(1 if cluster.rank else 5))
            assert isinstance(cause, PeerError)
            assert cause.kind == "UsageError"
            assert "it saves step" in cause.text
            # Then they are together again.
            manager.save(7).wait_committed()

    engine = MemoryEngine()
    run_workers(2, work, engine)
    assert names_in(tmp_path) == ["step-000000007.g0001"]
    # The leader has done with the step to which the other one never came, too.
    assert not [key for key in engine.keys if "/save/" in key]


def test_workers_that_restore_different_steps(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path, cluster) as manager:
            for step in (1, 2):
                manager.save(step)
            with pytest.raises(
                PeerError, match="rank 1 on node-1: UsageError: it restores step 2, but rank 0 restores step 1"
            ):
                manager.restore(1 + cluster.rank)
            assert manager.restore(2) is not None
            with pytest.raises(NoCheckpointError, match="no checkpoint of step 9"):
                manager.restore(9)

    run_workers(2, work)


def test_workers_with_different_directories(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        place, rank = tmp_path / f"node-{cluster.rank}", cluster.rank or 1
        with pytest.raises(StorageError if cluster.rank else PeerError) as caught:
            Toy(cluster.rank).manager(place, cluster, timeout_seconds=1.0)
        text = (
            f"the directory of rank {rank} on node-{rank} is {place.with_name(f'node-{rank}')}, but that of rank 0 is "
        )
        assert f"{text}{tmp_path}/node-0: what rank 0 writes does not appear there" in str(caught.value)
        assert "the same directory" in caught.value.hint

    engine = MemoryEngine()
    run_workers(3, work, engine)
    assert [path.name for path in tmp_path.rglob("*")] == ["node-0"]


def test_workers_with_copies_of_one_directory(tmp_path: Path) -> None:
    with Toy(0).manager(tmp_path / "node-0", AloneCluster()) as alone:
        alone.save(1)
    shutil.copytree(tmp_path / "node-0", tmp_path / "node-1")

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path / f"node-{cluster.rank}", cluster, timeout_seconds=1.0)
        cause = cause_of(manager.save(2))
        assert isinstance(cause, StorageError if cluster.rank else PeerError)
        assert f"rank 1 on node-1 saves into {tmp_path}/node-1, but rank 0 into {tmp_path}/node-0" in str(cause)
        assert "does not see generation 2, which rank 0 has opened" in str(cause)
        assert "the same directory" in cause.hint
        manager.abandon()

    run_workers(2, work)


def test_a_start_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    # One that was killed as it began has left this.
    (tmp_path / ".holdfast-start").write_text("another")

    def start(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path, cluster) as manager:
            assert manager.restore() is None
        with Toy(cluster.rank).manager(tmp_path, cluster, begin_anew=True):
            pass

    run_workers(3, start)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no place where nobody may write")
def test_workers_that_only_restore_need_not_write() -> None:
    def start(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(Path("/proc/nowhere"), cluster) as manager:
            assert manager.restore() is None

    run_workers(2, start)


def test_one_directory_may_have_several_paths(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-1").symlink_to("node-0")

    def work(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path / f"node-{cluster.rank}", cluster) as manager:
            manager.save(1).wait_committed()
            assert manager.restore() is not None

    run_workers(2, work)


def test_workers_that_restore_from_different_runs(tmp_path: Path) -> None:
    for rank in range(2):
        with Toy(rank).manager(tmp_path / f"node-{rank}", AloneCluster()) as alone:
            alone.save(1)

    def work(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path / f"node-{cluster.rank}", cluster)
        with pytest.raises(PeerError) as caught:
            manager.restore()
        assert f"it restores from {tmp_path}/node-1, but rank 0 from {tmp_path}/node-0: " in str(caught.value)
        assert "manifest.json differs from what rank 0 sees" in str(caught.value)
        manager.abandon()

    run_workers(2, work)


@pytest.mark.parametrize("blind", [0, 2])
def test_a_node_that_does_not_see_the_run(tmp_path: Path, blind: int) -> None:
    def save(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path / "run", cluster) as manager:
            manager.save(1)

    def restore(cluster: Cluster) -> None:
        place = tmp_path / ("run" if cluster.rank != blind else "elsewhere")
        toy = Toy(cluster.rank)
        if blind == 0:
            # Of what lies there the leader sees nothing, so this is found at the start.
            with pytest.raises(StorageError if cluster.rank else PeerError, match="that of rank 0 is"):
                toy.manager(place, cluster, timeout_seconds=2.0)
            return
        manager = toy.manager(place, cluster, timeout_seconds=2.0)
        with pytest.raises(PeerError) as caught:
            manager.restore()
        assert caught.value.rank == blind
        assert f"rank 0 from {tmp_path}/run: step-000000001.g0001" in str(caught.value)
        assert toy.count == {"step": 0}
        manager.abandon()

    run_workers(3, save)
    run_workers(3, restore)


class Hosted(MemoryEngine):
    """A store in the leader's process that ends with it, and whose answers about the restore come late: no follower has
    one before the leader asks whether they do, or is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = Latch()
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        self._asked.open()

    def try_get(self, key: str) -> bytes | None:
        # The two before are about the start.
        if key.endswith("/meeting/3/outcome"):
            self._asked.wait(PATIENCE_SECONDS)
        return super().try_get(key)

    def add(self, key: str, amount: int) -> int:
        if key.endswith("/meeting/3/read"):
            if amount:
                # The leader is told of the last one that has read it, which is told nothing any more.
                super().add(key, amount)
                self._is_over = True
            self._asked.open()
        return super().add(key, amount)

    def _pass(self) -> None:
        if self._is_over:
            raise ConnectionResetError("the process of rank 0 is gone")
        super()._pass()


@pytest.mark.parametrize("fails", [False, True])
def test_leader_that_hosts_the_store_leaves_when_all_know_the_result(tmp_path: Path, fails: bool) -> None:
    engine = Hosted()

    def restore(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster)
        try:
            if fails:
                with pytest.raises(PeerError if cluster.rank else NoCheckpointError, match="step 1"):
                    manager.restore(None if cluster.rank else 1)
            else:
                assert manager.restore() is None
                manager.close()
        finally:
            if cluster.rank == 0:
                engine.end()
            manager.abandon()

    run_workers(2, restore, engine)


# Restores that all make alike.


@pytest.mark.parametrize("what", ["data", "index", "manifest"])
def test_damage_that_one_finds_takes_all_to_the_older_step(tmp_path: Path, what: str) -> None:
    def save(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        with toy.manager(tmp_path, cluster) as manager:
            for step in (1, 2):
                toy.train(step)
                manager.save(step)

    def restore(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        told: list[hf.events.Event] = []
        with toy.manager(tmp_path, cluster, sinks=[told.append]) as manager:
            restored = manager.restore()
            assert restored is not None
            assert restored.step == 1
            assert len(restored.passed_over) == 1
            # Also who has not found it tells where it is.
            (passed,) = (str(event) for event in told if isinstance(event, hf.events.PassedOver))
            assert passed.startswith(f"step 2 skipped because it is damaged: step-000000002.g0001/{what}")
            assert toy.has(1)
            toy.train(2)
            manager.save(2, replace=True)

    run_workers(3, save)
    step = tmp_path / "step-000000002.g0001"
    paths = {
        # The worker's own array lies in its file alone.
        "data": next(step.glob("data-00002-*")),
        "index": next(step.glob("index-00002-*")),
        "manifest": step / "manifest.json",
    }
    flip_bit(paths[what], -1 if what == "data" else 40)
    run_workers(3, restore)


def test_objects_that_do_not_fit_on_one_worker_change_nothing_anywhere(tmp_path: Path) -> None:
    def save(cluster: Cluster) -> None:
        with Toy(cluster.rank).manager(tmp_path, cluster) as manager:
            manager.save(1)

    def restore(cluster: Cluster) -> None:
        toy = Toy(cluster.rank)
        toy.train(7)
        if cluster.rank == 1:
            toy.checkpoint["count"] = np.zeros(1)
        with toy.manager(tmp_path, cluster) as manager:
            with pytest.raises(MismatchError if cluster.rank == 1 else PeerError) as caught:
                manager.restore()
            if isinstance(caught.value, PeerError):
                assert (caught.value.rank, caught.value.kind) == (1, "MismatchError")
            assert all((array == 7).all() for array in toy.shared.values())
            assert toy.count == {"step": 7}

    run_workers(3, save)
    run_workers(3, restore)


def test_an_object_that_refuses_its_state_on_one_worker(tmp_path: Path) -> None:
    class Stubborn:
        def __init__(self, refuses: bool) -> None:
            self.refuses = refuses

        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.refuses:
                raise RuntimeError("no")

    def work(cluster: Cluster) -> None:
        checkpoint = hf.Checkpoint(stubborn=Stubborn(cluster.rank == 1))
        with hf.CheckpointManager(tmp_path, checkpoint, cluster=cluster) as manager:
            manager.save(1).wait_committed()
            with pytest.raises(HoldfastError) as caught:
                manager.restore()
            if cluster.rank != 1:
                assert isinstance(caught.value, PeerError)
                assert (caught.value.rank, caught.value.kind) == (1, "ApplyError")
            assert "restore again" in "".join(caught.value.__notes__)

    run_workers(2, work)


# Two jobs in one directory.


def test_an_older_job_can_commit_no_more(tmp_path: Path) -> None:
    taken_over, seen = threading.Event(), Meeting(2)

    def older(cluster: Cluster) -> None:
        manager = Toy(cluster.rank).manager(tmp_path, cluster, failures_allowed=9)
        manager.save(1).wait_committed()
        manager.wait()
        seen.wait()
        if cluster.rank == 0:
            with Toy(0).manager(tmp_path, AloneCluster()) as newer:
                newer.restore()
                newer.save(2)
            taken_over.set()
        taken_over.wait(PATIENCE_SECONDS)
        cause = cause_of(manager.save(3))
        assert isinstance(cause, FencedError)
        manager.abandon()

    run_workers(2, older)
    assert StoredRun(LocalStorage(tmp_path)).look().living[-1].step == 2


# When to save.


class Now:
    """A policy that looks at something else than steps: one worker alone is told when to save."""

    def __init__(self) -> None:
        self.is_due = False

    def decide_save(self, moment: SaveMoment) -> SaveDecision:
        return SaveDecision(self.is_due and moment.saved_from_step != moment.step, "it is time")


def test_all_save_when_the_clock_of_the_leader_says_so(tmp_path: Path) -> None:
    steps = Meeting(3)

    def work(cluster: Cluster) -> list[int]:
        toy, policy = Toy(cluster.rank), Now()
        saved = []
        with toy.manager(tmp_path, cluster, save_every=policy) as manager:
            for step in range(1, 200):
                steps.wait()
                # The others would say so all the time, and are not asked.
                policy.is_due = cluster.rank != 0 or step in (10, 100)
                toy.train(step)
                time.sleep(0.02)  # A step takes a while: by that the leader reckons how far ahead to plan.
                handle = manager.save_if_due(step)
                if handle is not None:
                    saved.append(step)
            manager.wait()
            assert all(step in manager.steps() for step in saved)
        return saved

    saved = run_workers(3, work)
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) == 2
    assert saved[0][0] > 10
    assert saved[0][1] > 100


def test_a_worker_that_is_ahead_of_the_plan_leaves_it_out_for_all(tmp_path: Path) -> None:
    ahead, left_out = threading.Event(), Meeting(2)

    def work(cluster: Cluster) -> list[str]:
        policy = Now()
        told: list[hf.events.Event] = []
        with Toy(cluster.rank).manager(tmp_path, cluster, save_every=policy, sinks=[told.append]) as manager:
            if cluster.rank == 1:
                # Nothing makes this one wait for the leader.
                for step in range(1, 2000):
                    assert manager.save_if_due(step) is None
                ahead.set()
            else:
                ahead.wait(PATIENCE_SECONDS)
                step, handle = 0, None
                policy.is_due = True
                while handle is None:
                    step += 1
                    handle = manager.save_if_due(step)
                handle.wait_ended()
                assert handle.skipped
                assert handle.failed
            left_out.wait()
            manager.wait()
            assert manager.steps() == ()
            # By steps they are together.
            manager.save(5000).wait_committed()
        return [event.reason for event in told if isinstance(event, hf.events.Skipped)]

    reasons = run_workers(2, work)
    assert reasons == [
        [f"rank 1 was already at step 1999 when it learned of a save at step {step}"] for step in (2,)
    ] + [[]]


def test_a_busy_worker_leaves_the_save_out_for_all(tmp_path: Path) -> None:
    release, asked = threading.Event(), Meeting(2)
    engine = MemoryEngine()

    class SlowStorage(LocalStorage):
        def write(self, path: str, data: bytes) -> None:
            release.wait(PATIENCE_SECONDS)
            super().write(path, data)

    def work(cluster: Cluster) -> None:
        place = SlowStorage(tmp_path) if cluster.rank == 1 else LocalStorage(tmp_path)
        manager = Toy(cluster.rank).manager(place, cluster, when_busy="skip", save_every=hf.Steps(1))
        with manager:
            first = manager.save_if_due(1)
            assert first is not None
            second = manager.save_if_due(2)
            assert second is not None
            assert second.skipped
            asked.wait()
            release.set()
            first.wait_ended()
            third = manager.save_if_due(3)
            assert third is not None
            third.wait_committed()
            assert manager.steps() == (1, 3)

    run_workers(2, work, engine)
    assert not [key for key in engine.keys if "/save/" in key]


# Arguments.


def test_what_is_not_an_argument(tmp_path: Path) -> None:
    checkpoint = hf.Checkpoint(a=1)
    with pytest.raises(UsageError, match="got 'torch'"):
        hf.CheckpointManager(tmp_path, checkpoint, cluster="torch")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="liveness_seconds"):
        hf.CheckpointManager(tmp_path, checkpoint, liveness_seconds=0)
    with hf.CheckpointManager(tmp_path, checkpoint, cluster="alone") as manager:
        manager.save(1)


def test_resumable_on_several_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")

    def work(cluster: Cluster) -> int:
        toy = Toy(cluster.rank)
        run = hf.resumable(
            tmp_path, save_every=hf.Steps(4), cluster=cluster, shared=toy.shared, own=hf.PerWorker(toy.own), n=toy.count
        )
        with run:
            for step in run.steps(10):
                toy.train(step + 1)
        return run.restored.step if run.restored else 0

    assert run_workers(2, work) == [0, 0]
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().living] == [4, 8, 10]
    caplog.clear()
    assert run_workers(2, work) == [10, 10]
    check_whole(tmp_path)
    # One of them says so.
    said = [text for text in caplog.messages if "resumed" in text or "already" in text]
    assert len(said) == 2
    assert re.search(r"resumed \S+ at step 10 \(saved .+ by 2 workers\), saves every 4 steps$", said[0])
