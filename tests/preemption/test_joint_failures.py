"""Which of several errors is the cause, when workers of a job fail one because of another: as threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.cluster import Cluster
from holdfast.errors import (
    ClusterError,
    FencedError,
    HoldfastError,
    PeerError,
    SaveFailedError,
    StorageError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.events import Event, NoticeHeard
from holdfast.preemption import FileAppears
from holdfast.preemption.consensus.error_cause import find_missing, is_of_collective, may_follow
from holdfast.storage import LocalStorage
from holdfast.storage.protocol import Entry
from memory_engine import run_workers

PATIENCE_SECONDS = 60.0
BROKEN = "[/src/gloo/transport/tcp/pair.cc:553] Connection reset by peer [127.0.0.1]:18128"


def errors_of(
    directory: Path, world_size: int, fail: Callable[[Cluster], None], *, liveness_seconds: float = 15.0
) -> list[BaseException]:
    """What comes out of the training loop of each worker, if all are in the same step when they begin to fail."""
    meeting = threading.Barrier(world_size)

    def work(cluster: Cluster) -> BaseException:
        state = hf.PerWorker({"array": np.zeros(3)})
        deaf = hf.TerminationConfig(sources=[])
        try:
            with hf.resumable(
                directory, state=state, cluster=cluster, liveness_seconds=liveness_seconds, preemption=deaf
            ) as run:
                for step in run.steps(5):
                    if step == 2:
                        meeting.wait(PATIENCE_SECONDS)
                        fail(cluster)
        except BaseException as error:
            return error
        raise AssertionError("it has come to its end")

    return run_workers(world_size, work)


def test_survivors_whose_collective_breaks_name_the_dead_worker(tmp_path: Path) -> None:
    gone = threading.Event()

    def fail(cluster: Cluster) -> None:
        if cluster.rank == 0:
            # As if it had been killed: no sign of life any more, and no goodbye.
            cluster.close()
            gone.set()
        assert gone.wait(PATIENCE_SECONDS)
        raise RuntimeError(BROKEN)

    errors = errors_of(tmp_path, 3, fail, liveness_seconds=2.0)
    for error in errors[1:]:
        assert isinstance(error, PeerError)
        assert (error.rank, error.kind) == (0, "AbsentError")
        assert "rank 0 on node-0 has not been heard of for 2 s" in str(error)
        assert str(error.__cause__) == BROKEN


@pytest.mark.parametrize("blind", [0, 1])
@pytest.mark.parametrize("starts_over", [False, True])
def test_all_hear_of_a_worker_that_cannot_look_at_the_directory(tmp_path: Path, blind: int, starts_over: bool) -> None:
    (tmp_path / "file").touch()

    def work(cluster: Cluster) -> BaseException:
        directory = tmp_path / ("file" if cluster.rank == blind else "run")
        try:
            with hf.resumable(
                directory, state={"a": 1}, cluster=cluster, begin_anew=starts_over, save_every=hf.Steps(1)
            ) as run:
                for _ in run.steps(100_000):
                    pass
        except BaseException as error:
            return error
        raise AssertionError("it has come to its end")

    errors = run_workers(3, work)
    assert isinstance(errors[blind], UsageError)
    for rank in {0, 1, 2} - {blind}:
        error = errors[rank]
        assert isinstance(error, PeerError | SaveFailedError)
        text = rf"rank {blind} on node-{blind}: UsageError: .*/file exists but is not a directory"
        assert re.search(text, str(error)), error


@pytest.mark.parametrize("starts_over", [False, True])
def test_unsavable_state_on_one_worker_is_heard_before_first_step(tmp_path: Path, starts_over: bool) -> None:
    def work(cluster: Cluster) -> list[BaseException]:
        errors: list[BaseException] = []
        options: Any = {"cluster": cluster, "begin_anew": starts_over}
        checkpoint = hf.Checkpoint(rule=(lambda: 1) if cluster.rank == 1 else 1)
        try:
            with hf.resumable(tmp_path / "run", **checkpoint.objects, **options):
                pytest.fail("it has begun")
        except HoldfastError as error:
            errors.append(error)
        try:
            with hf.CheckpointManager(tmp_path / "run", checkpoint, **options) as manager:
                hf.PreemptionCheckpointHandler(manager)
        except HoldfastError as error:
            errors.append(error)
        try:
            with hf.WorkerTrainingState(tmp_path / "epochs", checkpoint, **options) as state:
                state.restore()
                state.maybe_load_initial_epoch_from_ckpt(0, "train")
        except HoldfastError as error:
            errors.append(error)
        return errors

    for rank, errors in enumerate(run_workers(3, work)):
        assert [type(error) for error in errors] == 3 * [UnsupportedValueError if rank == 1 else PeerError]
        assert all("rule: a function cannot be stored" in str(error) for error in errors)
        assert all(getattr(error, "rank", 1) == 1 for error in errors)


def test_survivors_whose_collective_breaks_name_the_worker_that_has_failed(tmp_path: Path) -> None:
    def fail(cluster: Cluster) -> None:
        if cluster.rank == 1:
            raise ValueError("the loss is no number")
        raise RuntimeError(BROKEN)

    errors = errors_of(tmp_path, 3, fail)
    assert isinstance(errors[1], ValueError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError)
        assert (error.rank, error.kind, error.text) == (1, "ValueError", "the loss is no number")


@pytest.mark.parametrize(("liveness_seconds", "grace_period"), [(2.0, None), (600.0, 3.0)])
def test_survivors_that_are_to_leave_do_so_with_nothing_saved(
    tmp_path: Path, liveness_seconds: float, grace_period: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the dead worker is found first, or the time that is left is over first."""
    notice = tmp_path / "notice"
    heard, gone = threading.Barrier(3), threading.Event()

    def work(cluster: Cluster) -> object:
        told = threading.Event()

        def listen(event: Event) -> None:
            if isinstance(event, NoticeHeard):
                told.set()

        source = FileAppears(notice, interval_seconds=0.01)
        try:
            with hf.resumable(
                tmp_path / "run",
                state=hf.PerWorker({"array": np.zeros(3)}),
                cluster=cluster,
                liveness_seconds=liveness_seconds,
                preemption=hf.TerminationConfig(sources=[source], grace_period=grace_period),
                sinks=[listen],
            ) as run:
                for step in run.steps(5):
                    if step == 2:
                        heard.wait(PATIENCE_SECONDS)
                        notice.touch()
                        assert told.wait(PATIENCE_SECONDS)
                        heard.wait(PATIENCE_SECONDS)
                        if cluster.rank == 0:
                            cluster.close()
                            gone.set()
                        assert gone.wait(PATIENCE_SECONDS)
                        raise RuntimeError(BROKEN)
        except SystemExit as ending:
            return ending.code
        except BaseException as error:
            return error
        raise AssertionError("it has come to its end")

    assert run_workers(3, work)[1:] == [74, 74]
    said = capfd.readouterr().err
    what = "step 2 could NOT be saved: .*Connection reset by peer.*there is no checkpoint"
    if grace_period is None:
        what = (
            r"rank 0 on node-0 has not been heard of for 2 s\. .* "
            "A restart starts from the beginning: there is no checkpoint"
        )
    for rank in (1, 2):
        assert re.search(f"rank {rank}: {what}; leaving with exit code 74", said)


def test_survivors_whose_store_does_not_answer_say_so(tmp_path: Path) -> None:
    """As when the process that hosts it is stopped, and they are amid a collective that waits for it."""
    meeting = threading.Barrier(2)

    def work(cluster: Cluster) -> BaseException:
        silent = SilentCluster(cluster)
        try:
            with hf.resumable(
                tmp_path,
                state=hf.PerWorker({"array": np.zeros(3)}),
                cluster=silent,
                liveness_seconds=6.0,
                preemption=hf.TerminationConfig(sources=[]),
            ) as run:
                for step in run.steps(5):
                    if step == 2:
                        meeting.wait(PATIENCE_SECONDS)
                        silent.is_silent = True
                        raise RuntimeError(BROKEN)
        except BaseException as error:
            return error
        raise AssertionError("it has come to its end")

    for error in run_workers(2, work):
        assert type(error) is ClusterError
        assert re.search(r"no other worker could be reached for \d+ s: nobody answers", str(error))
        assert str(error.__cause__) == BROKEN


def forwarded(name: str) -> Any:
    return property(lambda silent: silent.find(name))


class SilentCluster:
    """A cluster whose store ceases to answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.is_silent = False
        self._cluster = cluster

    def find(self, name: str) -> Any:
        found = getattr(self._cluster, name)
        if not callable(found) or name in ("close", "node_of"):
            return found

        def ask(*arguments: Any) -> Any:
            if self.is_silent:
                raise ClusterError("nobody answers")
            return found(*arguments)

        return ask

    # From Python 3.12 on a protocol is looked for in the class, and no `__getattr__` is asked.
    rank, world_size, node, incarnation = map(forwarded, ("rank", "world_size", "node", "incarnation"))
    node_of, add, delete, close = map(forwarded, ("node_of", "add", "delete", "close"))
    set, set_once, try_get, wait_get = map(forwarded, ("set", "set_once", "try_get", "wait_get"))


def test_a_collective_that_breaks_while_all_live_is_the_cause_itself(tmp_path: Path) -> None:
    def fail(cluster: Cluster) -> None:
        raise RuntimeError(BROKEN)

    errors = errors_of(tmp_path, 2, fail, liveness_seconds=2.0)
    first = next(rank for rank, error in enumerate(errors) if type(error) is RuntimeError)
    assert str(errors[first]) == BROKEN
    other = errors[1 - first]
    assert str(other) == BROKEN or (isinstance(other, PeerError) and other.rank == first)


def test_one_bug_on_all_workers_is_the_same_error_on_all(tmp_path: Path) -> None:
    def fail(cluster: Cluster) -> None:
        raise RuntimeError(f"of worker {cluster.rank}")

    errors = errors_of(tmp_path, 2, fail)
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
    assert [str(error) for error in errors] == ["of worker 0", "of worker 1"]
    # The second to fail says of the first one.
    notes = [note for error in errors for note in getattr(error, "__notes__", [])]
    assert len(notes) == 1
    assert "RuntimeError: of worker" in notes[0]


class DistError(RuntimeError):
    """As torch has it."""

    __module__ = "torch.distributed"


class DistBackendError(DistError):
    """As torch has it."""


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (RuntimeError(BROKEN), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (DistBackendError("something"), True),
        (wrapped(KeyError("of the user's"), RuntimeError(BROKEN)), True),
        (RuntimeError("the loss is no number"), False),
        (ValueError(BROKEN), False),
        (ClusterError(BROKEN), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_collectives_raise(error: BaseException, is_so: bool) -> None:
    assert is_of_collective(error) is is_so
    assert may_follow(error, "ValueError") is (is_so or isinstance(error, ClusterError))


def test_save_that_failed_for_a_missing_worker_names_it() -> None:
    missing = PeerError("rank 2: gone", rank=2, kind="AbsentError", text="gone")
    full = PeerError("rank 2: full", rank=2, kind="StorageFullError", text="full")
    assert find_missing(wrapped(SaveFailedError("not saved", step=4), missing)) is missing
    assert find_missing(wrapped(SaveFailedError("not saved", step=4), full)) is None


class BlindStorage(LocalStorage):
    """A directory that one worker can look at only so many times."""

    def __init__(self, path: Path, looks: int) -> None:
        super().__init__(path)
        self.looks = looks

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        if path == "":
            self.looks -= 1
            if self.looks < 0:
                raise StorageError("stale file handle", path=path)
        return super().list(path, deep=deep)


def check_told(errors: list[BaseException], blind: int, kind: type[Exception], text: str) -> list[PeerError]:
    """The worker that cannot look raises its own error, and all others that one; gives theirs."""
    assert isinstance(errors[blind], kind)
    told = [error for rank, error in enumerate(errors) if rank != blind and isinstance(error, PeerError)]
    assert len(told) == len(errors) - 1, errors
    assert {(error.rank, error.kind) for error in told} == {(blind, kind.__name__)}
    assert all(text in error.text for error in told)
    return told


@pytest.mark.parametrize("keeps_epochs", [False, True])
@pytest.mark.parametrize("blind", [0, 1])
def test_all_hear_at_once_of_a_worker_that_cannot_look_when_it_restores(
    tmp_path: Path, blind: int, keeps_epochs: bool
) -> None:
    ended = threading.Barrier(3)

    def work(cluster: Cluster) -> BaseException:
        storage = BlindStorage(tmp_path, 10**6)
        objects = hf.Checkpoint(array=hf.PerWorker(np.zeros(3)))
        keeper: hf.CheckpointManager | hf.WorkerTrainingState
        if keeps_epochs:
            keeper = hf.WorkerTrainingState(storage, objects, cluster=cluster)
        else:
            keeper = hf.CheckpointManager(storage, objects, cluster=cluster)
        with keeper:
            if cluster.rank == blind:
                storage.looks = 0
            try:
                keeper.restore()
            except HoldfastError as error:
                # Nobody leaves before: it is not of that that the others hear.
                ended.wait(PATIENCE_SECONDS)
                return error
        raise AssertionError("it has restored")

    errors = run_workers(3, work)
    check_told(errors, blind, StorageError, "stale file handle")


@pytest.mark.parametrize("blind", [0, 1])
def test_all_hear_of_a_worker_that_can_look_once_and_not_again(tmp_path: Path, blind: int) -> None:
    def work(cluster: Cluster) -> BaseException:
        storage = BlindStorage(tmp_path, 1 if cluster.rank == blind else 10**6)
        objects = hf.Checkpoint(array=hf.PerWorker(np.zeros(3)))
        try:
            with hf.WorkerTrainingState(storage, objects, cluster=cluster) as state:
                state.restore()
        except BaseException as error:
            return error
        raise AssertionError("it has restored")

    errors = run_workers(3, work)
    check_told(errors, blind, StorageError, "")


def test_save_takes_for_seen_what_was_there_before_restore_chose(tmp_path: Path) -> None:
    """A job that takes the run over while this one restores is seen by its next save, which fails."""
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(array=np.zeros(3)), cluster="alone") as before:
        before.save(1).wait_committed()

    class Overtaken(LocalStorage):
        is_armed = False

        def read(self, path: str, limit_bytes: int) -> bytes:
            if path.startswith("step-") and self.is_armed:
                self.is_armed = False
                StoredRun(LocalStorage(tmp_path)).open_generation()
            return super().read(path, limit_bytes)

    storage = Overtaken(tmp_path)
    with hf.CheckpointManager(storage, hf.Checkpoint(array=np.zeros(3)), cluster="alone") as manager:
        storage.is_armed = True
        restored = manager.restore()
        assert restored is not None
        assert not storage.is_armed
        assert restored.seen_generation == 1
        with pytest.raises(SaveFailedError) as caught:
            manager.save(2).wait_committed()
        assert isinstance(caught.value.__cause__, FencedError)


@pytest.mark.parametrize("blind", [0, 1])
def test_survivors_hear_of_a_blind_worker_at_the_start(tmp_path: Path, blind: int) -> None:
    (tmp_path / "file").touch()

    def work(cluster: Cluster) -> BaseException:
        directory = tmp_path / ("file" if cluster.rank == blind else "run")
        with pytest.raises(HoldfastError) as caught:
            hf.resumable(directory, state={"a": 1}, cluster=cluster, begin_anew=True, liveness_seconds=3.0)
        return caught.value

    check_told(run_workers(3, work), blind, UsageError, "/file exists but is not a directory")


def test_a_blind_leader_takes_its_store_along_when_all_know_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = threading.Barrier(3)
    clusters: list[SilentCluster] = []

    def work(cluster: Cluster) -> BaseException:
        silent = SilentCluster(cluster)
        clusters.append(silent)
        made.wait(PATIENCE_SECONDS)
        directory = tmp_path / ("run" if cluster.rank else "file")
        with pytest.raises(HoldfastError) as caught:
            hf.CheckpointManager(
                directory,
                hf.Checkpoint(rng=hf.RNG()),
                cluster=silent if cluster.rank else cluster,
                liveness_seconds=3.0,
            )
        if cluster.rank == 0:
            # As if the process had ended, which hosts the store.
            for each in clusters:
                each.is_silent = True
        return caught.value

    errors = run_workers(3, work)
    assert isinstance(errors[0], UsageError)
    for error in errors[1:]:
        assert isinstance(error, PeerError)
        assert (error.rank, error.kind) == (0, "UsageError")
        assert "rank 0 on node-0: UsageError" in str(error)
