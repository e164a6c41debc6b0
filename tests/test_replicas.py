"""What workers hold alike is compared behind training, and what differs is named, with the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster.protocol import Cluster
from holdfast.events import Diverged
from holdfast.format.workers import Worker
from holdfast.save.buffer import HostBuffer
from holdfast.save.handoffs import Snapshot
from holdfast.save.replicas import Divergence, compare_replicas, digest_replicas
from holdfast.save.stage import Stager
from holdfast.state import capture_objects
from holdfast.state.leaves import Captured
from holdfast.storage.crew import Crew
from holdfast.testing.memory_engine import run_workers

SECONDS = 30.0


def stage(captured: Captured, crew: Crew) -> Snapshot:
    staging = Stager(HostBuffer()).stage(captured, 1)
    staging.copy_now(crew)
    return staging.snapshot


def compare(jobs: list[dict[str, Any]]) -> list[Divergence]:
    """What all workers together have to tell."""

    def work(cluster: Cluster) -> list[Divergence]:
        crew = Crew(1, "save")
        worker = Worker(cluster.rank, cluster.world_size)
        captured = capture_objects(jobs[cluster.rank], worker=worker, check_replicas=True)
        witnesses = stage(captured.witnesses, crew) if captured.witnesses is not None else None
        digests = digest_replicas(captured.replicas, stage(captured, crew), witnesses, crew)
        return compare_replicas(cluster, "replicas/1", digests, SECONDS)

    return [found for own in run_workers(len(jobs), work) for found in own]


def make_job(rank: int) -> dict[str, Any]:
    return {
        "small": np.arange(4.0),
        "large": np.arange(300_000, dtype=np.float32),
        "own": hf.PerWorker(np.array([rank])),
        "shard": hf.Shard(np.full(2, rank), (8,), (2 * rank,)),
        "pairs": hf.Shard(np.full(3, rank // 2), (6,), (3 * (rank // 2),), holders=(rank // 2 * 2, rank // 2 * 2 + 1)),
    }


def test_what_is_alike_says_nothing() -> None:
    assert compare([make_job(rank) for rank in range(4)]) == []


@pytest.mark.parametrize(
    ("leaf", "rank", "place", "ranks"),
    [
        ("small", 0, 0, ((1, 2, 3), (0,))),
        ("small", 2, 3, ((0, 1, 3), (2,))),
        ("large", 1, 0, ((0, 2, 3), (1,))),
        ("large", 3, 299_999, ((0, 1, 2), (3,))),
        ("pairs", 3, 1, ((2,), (3,))),
    ],
)
def test_what_differs_is_named(leaf: str, rank: int, place: int, ranks: Any) -> None:
    jobs = [make_job(rank) for rank in range(4)]
    array = jobs[rank][leaf]
    (array if isinstance(array, np.ndarray) else array.tensor)[place] += 1
    assert compare(jobs) == [Divergence(leaf, ranks)]


def test_several_differences_are_named_once_each() -> None:
    jobs = [make_job(rank) for rank in range(3)]
    for job in jobs:
        del job["pairs"]
    jobs[0]["small"][0], jobs[1]["small"][0], jobs[2]["large"][[0, -1]] = 5, 6, 9
    found = {one.leaf: one.ranks for one in compare(jobs)}
    assert found == {"small": ((0,), (1,), (2,)), "large": ((0, 1), (2,))}


def test_nothing_more_is_copied_where_it_is_not_asked_for() -> None:
    captured = capture_objects(make_job(1), worker=Worker(1, 4))
    assert captured.witnesses is None
    assert captured.replicas == ()
    alone = capture_objects({"x": np.zeros(3)}, check_replicas=True)
    assert alone.witnesses is None


def test_the_event_is_legible() -> None:
    event = Diverged(step=5, generation=1, tensor="model/w", ranks=(tuple(range(1, 12)), (0,)))
    assert str(event) == (
        "step 5: model/w should be the same with all workers, and differs: "
        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more from rank 0"
    )
