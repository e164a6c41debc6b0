"""`WorkerTrainingState` in a job of several workers: one backup, written by all, deleted by the leader for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from epoch_jobs import FullForSteps, count_threads, wait_for_threads
from holdfast.catalog import StoredRun
from holdfast.cluster import Cluster
from holdfast.errors import AbsentError, ClosedError, FencedError, HoldfastError, PeerError, UsageError
from holdfast.events import Event, Warned
from holdfast.storage import LocalStorage
from holdfast.testing.processes import Workers, python
from memory_engine import run_workers
from places import PROGRAMS

pytestmark = pytest.mark.usefixtures("numpy_is_known")

PROGRAM = PROGRAMS / "backup_worker.py"
PATIENCE_SECONDS = 60.0
LIVENESS_SECONDS = 2.0


class Training:
    """One worker's part of a training: an array that all have alike, and one that is its own."""

    def __init__(self, place: Any, cluster: Cluster, **options: Any) -> None:
        self.rank = cluster.rank
        self.shared, self.own = np.zeros(1000), np.zeros(10)
        options = {"liveness_seconds": LIVENESS_SECONDS, "timeout_seconds": PATIENCE_SECONDS} | options
        checkpoint = hf.Checkpoint(shared=self.shared, own=hf.PerWorker(self.own))
        self.state = hf.WorkerTrainingState(place, checkpoint, cluster=cluster, **options)

    def train(self, epoch: int, batch: int | None = None) -> hf.SaveHandle:
        self.shared += 1
        self.own += self.rank + 1
        return self.state.back_up(epoch, batch)

    def has(self, epochs: int) -> bool:
        return bool((self.shared == epochs).all() and (self.own == epochs * (self.rank + 1)).all())


def run_three(work: Callable[[Training], Any], place: Any, **options: Any) -> list[Any]:
    """Does the same as each of three workers; gives what each has returned, or the error that it raised."""

    def begin(cluster: Cluster) -> Any:
        training = Training(place, cluster, **options)
        try:
            with training.state:
                return work(training)
        except HoldfastError as error:
            return error

    return run_workers(3, begin)


def epochs_of(place: Path) -> list[int]:
    return [name.step for name in StoredRun(LocalStorage(place)).look().living]


def back_up_four(training: Training) -> None:
    assert training.state.restore() is None
    for epoch in range(4):
        training.train(epoch).wait_committed()


def test_all_write_one_backup_and_each_gets_its_own_back(tmp_path: Path) -> None:
    assert run_three(back_up_four, tmp_path) == [None] * 3
    assert epochs_of(tmp_path) == [3, 4], "two backups are kept, by all together"
    for step in tmp_path.glob("step-*"):
        assert len(list(step.glob("data-*"))) == 3
        assert len(list(step.glob("manifest.json"))) == 1

    def go_on(training: Training) -> tuple[int, bool]:
        backup = training.state.restore()
        assert backup is not None
        assert backup.epoch == 3
        assert training.has(4)
        first = training.state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=6)
        for epoch in range(first, 6):
            training.train(epoch)
        return first, training.state.delete_backup()

    assert run_three(go_on, tmp_path) == [(4, True)] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "generations"]
    assert len(list((tmp_path / "generations").iterdir())) == 2


def test_a_training_that_ended_can_be_followed_by_another(tmp_path: Path) -> None:
    def twice(training: Training) -> list[bool]:
        deleted = []
        for _ in range(2):
            training.state.back_up(0)
            deleted += [training.state.delete_backup(), training.state.delete_backup()]
        training.state.back_up(5).wait_committed()
        return deleted

    assert run_three(twice, tmp_path) == [[True] * 4] * 3
    assert epochs_of(tmp_path) == [1]


def test_backups_stay_until_all_have_come_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    def end(training: Training) -> bool:
        back_up_four(training)
        if training.rank == 2:
            raise UsageError("this worker has more to do, and fails at it")
        return training.state.delete_backup()

    first, second, _ = run_three(end, tmp_path)
    for error in (first, second):
        assert isinstance(error, AbsentError)
        assert error.ranks == (2,)
    assert epochs_of(tmp_path) == [3, 4]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_backup_that_is_kept_is_kept_by_all(tmp_path: Path) -> None:
    run_three(back_up_four, tmp_path)
    events: list[Event] = []

    def ask_for_less(training: Training) -> tuple[int, bool]:
        training.state.restore()
        first = training.state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=2 if training.rank == 1 else 4)
        return first, training.state.delete_backup()

    assert run_three(ask_for_less, tmp_path, sinks=[events.append]) == [(4, False)] * 3
    assert epochs_of(tmp_path) == [3, 4]
    assert sum("asks for only 2 epochs" in event.text for event in events if isinstance(event, Warned)) == 4


ANOTHER_JOB = """
import sys
from holdfast.catalog import StoredRun
from holdfast.storage import LocalStorage
StoredRun(LocalStorage(sys.argv[1])).open_generation()
"""


def test_error_of_the_leader_is_raised_on_the_others(tmp_path: Path) -> None:
    late = threading.Barrier(3)

    def end(training: Training) -> bool:
        back_up_four(training)
        if training.rank == 0:
            command = [sys.executable, "-c", ANOTHER_JOB, str(tmp_path)]
            preloaded.run(command, check=True, timeout=PATIENCE_SECONDS)
        late.wait(PATIENCE_SECONDS)
        return training.state.delete_backup()

    first, *others = run_three(end, tmp_path)
    assert isinstance(first, FencedError)
    for error in others:
        assert isinstance(error, PeerError)
        assert (error.rank, error.kind) == (0, "FencedError")
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 2


def test_full_disk_of_one_worker_loses_that_backup_for_all() -> None:
    storage = FullForSteps("full for one worker")
    storage.full, storage.file = frozenset({3, 4}), "data-00002"

    def work(training: Training) -> int | None:
        for epoch in range(4):
            training.train(epoch).wait_ended()
        return training.state.saved.epoch if training.state.saved else None

    for error in run_three(work, storage):
        assert "no room" in str(error), "the end of training is not kept, and closing says so"

    def go_on(training: Training) -> tuple[int, bool]:
        backup = training.state.restore()
        assert backup is not None
        return backup.epoch, training.has(2)

    storage.full = frozenset()
    assert run_three(go_on, storage) == [(1, True)] * 3


def test_a_backup_within_an_epoch_is_exact_for_each_worker(tmp_path: Path) -> None:
    def see(cluster: Cluster, stop_after: int | None, place: Path) -> list[list[int]]:
        sampler = hf.ResumableSampler(20, batch_size=2, seed=5, rank=cluster.rank, world_size=cluster.world_size)
        seen: list[list[int]] = []
        checkpoint = hf.Checkpoint(sampler=sampler)
        with hf.WorkerTrainingState(place, checkpoint, cluster=cluster, liveness_seconds=LIVENESS_SECONDS) as state:
            state.restore()
            first, done = state.maybe_load_initial_counters_from_ckpt(len(sampler), 0, "train", epochs=2)
            for epoch in range(first, 2):
                sampler.set_epoch(epoch)
                for batch, indices in enumerate(sampler.batches(sampler), done):
                    seen.append(list(indices))
                    state.back_up(epoch, batch).wait_committed()
                    if len(seen) == stop_after:
                        return seen
                done = 0
                state.back_up(epoch)
        return seen

    untouched = run_workers(2, lambda cluster: see(cluster, None, tmp_path / "untouched"))
    first_epoch = [index for seen in untouched for batch in seen[: len(seen) // 2] for index in batch]
    assert sorted(first_epoch) == list(range(20))
    for stop_after in (1, 3, len(untouched[0]) // 2, len(untouched[0]) - 1):
        place = tmp_path / str(stop_after)
        before = run_workers(2, lambda cluster, after=stop_after, place=place: see(cluster, after, place))  # type: ignore[misc]
        after = run_workers(2, lambda cluster, place=place: see(cluster, None, place))  # type: ignore[misc]
        assert [one + other for one, other in zip(before, after, strict=True)] == untouched


def test_closed_state_refuses_every_call(tmp_path: Path) -> None:
    def work(training: Training) -> None:
        training.state.back_up(0)
        training.state.close()
        training.state.close()
        for call in (training.state.delete_backup, training.state.restore, lambda: training.state.back_up(1)):
            with pytest.raises(ClosedError):
                call()

    assert run_three(work, tmp_path) == [None] * 3
    assert epochs_of(tmp_path) == [1]
    before = count_threads()
    run_three(back_up_four, tmp_path / "other")
    wait_for_threads(before)


def test_worker_killed_during_an_epoch_resumes(tmp_path: Path) -> None:
    def start(workers: Workers, name: str, dies_in: int) -> None:
        for rank in range(3):
            command = python(PROGRAM, tmp_path / "run", tmp_path / name, str(dies_in))
            workers.start(command, {"RANK": str(rank), "WORLD_SIZE": "3"}, preloaded.Popen)

    with Workers(tmp_path) as workers:
        start(workers, "store-1", 3)
        assert workers.wait(PATIENCE_SECONDS) == [1, -9, 1], [workers.report(rank) for rank in range(3)]
        for rank in (0, 2):
            assert "rank 1" in workers.errors(rank)
    with Workers(tmp_path) as workers:
        start(workers, "store-2", -1)
        assert workers.wait(PATIENCE_SECONDS) == [0, 0, 0], [workers.report(rank) for rank in range(3)]
        for rank in range(3):
            assert workers.wait_said(rank, "first", 1) == 3
            assert workers.wait_said(rank, "own", 1) == [6.0 * (rank + 1)] * 10
            assert workers.wait_said(rank, "kept", 1) is False
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["events.jsonl", "generations"]


@pytest.mark.parametrize(
    ("how", "code", "kind", "text"),
    [
        ("dies", -9, "AbsentError", "has died: its process has ended"),
        ("fails", 1, "ValueError", "ValueError: the loss is no number"),
        ("is asked to leave", 42, "AbsentError", "has left the job with exit code 42"),
        ("exits", 3, "AbsentError", "has left the job with exit code 3"),
        ("returns", 0, "AbsentError", "has left the job"),
    ],
)
def test_a_worker_that_ends_is_named_by_the_next_backup(
    tmp_path: Path, how: str, code: int, kind: str, text: str
) -> None:
    with Workers(tmp_path) as workers:
        for rank in range(3):
            command = python(PROGRAM, tmp_path / "run", tmp_path / "store", how)
            workers.start(command, {"RANK": str(rank), "WORLD_SIZE": "3"}, preloaded.Popen)
        assert workers.wait(PATIENCE_SECONDS) == [1, code, 1], [workers.report(rank) for rank in range(3)]
        for rank in (0, 2):
            assert workers.wait_said(rank, "rank", 1) == 1
            assert workers.wait_said(rank, "kind", 1) == kind
            message = workers.wait_said(rank, "message", 1)
            assert message.startswith("rank 1 on ")
            assert message.endswith(text)
