"""Which of several errors is the cause, when workers of a job fail one because of another: as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster import Cluster
from holdfast.errors import ClusterError, PeerError, SaveFailedError
from holdfast.preemption.consequences import find_missing, is_of_collective, may_follow
from holdfast.testing.memory_engine import run_workers

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
        assert "rank 0 on node-0: AbsentError: has not been heard of for 2 s" in str(error)
        assert str(error.__cause__) == BROKEN


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


def test_a_save_that_failed_for_a_missing_worker_tells_of_that_one() -> None:
    missing = PeerError("rank 2: gone", rank=2, kind="AbsentError", text="gone")
    full = PeerError("rank 2: full", rank=2, kind="StorageFullError", text="full")
    assert find_missing(wrapped(SaveFailedError("not saved", step=4), missing)) is missing
    assert find_missing(wrapped(SaveFailedError("not saved", step=4), full)) is None
