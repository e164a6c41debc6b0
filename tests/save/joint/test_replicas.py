"""What workers hold alike, looked at behind training: other leaves fail the save, and other values are told of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.cluster.protocol import Cluster
from holdfast.errors import PeerError, SaveFailedError, UsageError
from holdfast.events import Diverged
from holdfast.format.records import Worker
from holdfast.restore.verify import open_step, verify_data
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.joint.coverage import ObjectSetDigest, digest_objects, find_holders, find_unlike
from holdfast.save.joint.replicas import (
    Detail,
    Disagreement,
    Divergence,
    ReplicaDigest,
    find_disagreements,
    name_difference,
    name_divergences,
)
from holdfast.state import capture_objects
from holdfast.storage import LocalStorage
from holdfast.testing.cluster_scenarios import rendezvous
from holdfast.testing.processes import Workers, python
from memory_engine import MemoryEngine, run_workers
from places import PROGRAMS

PATIENCE_SECONDS = 60.0


def make_job(rank: int) -> dict[str, Any]:
    pair = rank // 2
    return {
        "small": np.arange(4.0),
        "large": np.arange(300_000, dtype=np.float32),
        "own": hf.PerWorker(np.array([rank])),
        "shard": hf.Shard(np.full(2, rank), (8,), (2 * rank,)),
        "pairs": hf.Shard(np.full(3, pair), (6,), (3 * pair,), holders=(pair * 2, pair * 2 + 1)),
    }


def make_manager(place: Path, job: dict[str, Any], cluster: Cluster, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(
        place, hf.Checkpoint(**job), cluster=cluster, threads=2, timeout_seconds=PATIENCE_SECONDS, **options
    )


# Values.


def compare(
    place: Path, jobs: list[dict[str, Any]], drift: Callable[[], object] = lambda: None, **options: Any
) -> list[list[Diverged]]:
    """Saves three times, with a drift behind the first; what each worker is told."""
    engine = MemoryEngine()

    def work(cluster: Cluster) -> list[Diverged]:
        told: list[hf.events.Event] = []
        with make_manager(place, jobs[cluster.rank], cluster, sinks=[told.append], **options) as manager:
            manager.save(1).wait_committed()
            rendezvous(cluster, "saved", PATIENCE_SECONDS)
            if cluster.rank == 0:
                drift()
            rendezvous(cluster, "drifted", PATIENCE_SECONDS)
            for step in (2, 3):
                manager.save(step).wait_committed()
        return [event for event in told if isinstance(event, Diverged)]

    found = run_workers(len(jobs), work, engine)
    assert not [key for key in engine.keys if "/save/" in key]
    return found


def test_equal_replicas_cause_no_warning(tmp_path: Path) -> None:
    assert compare(tmp_path, [make_job(rank) for rank in range(4)], check_replicas=True) == [[]] * 4


@pytest.mark.parametrize(
    ("leaf", "rank", "place", "ranks"),
    [
        ("small", 0, 0, ((1, 2, 3), (0,))),
        ("small", 2, 3, ((0, 1, 3), (2,))),
        ("large", 1, 0, ((0, 2, 3), (1,))),
        ("large", 3, 299_999, ((0, 1, 2), (3,))),
        # Of which the leader holds nothing.
        ("pairs", 3, 1, ((2,), (3,))),
    ],
)
@pytest.mark.parametrize("incremental", [False, True])
def test_what_differs_is_named(tmp_path: Path, leaf: str, rank: int, place: int, ranks: Any, incremental: bool) -> None:
    jobs = [make_job(rank) for rank in range(4)]
    array = jobs[rank][leaf]
    drifting = array if isinstance(array, np.ndarray) else array.tensor

    def drift() -> None:
        drifting[place] += 1

    told = compare(tmp_path, jobs, drift, check_replicas=True, incremental=incremental)
    assert [[(event.step, event.tensor, event.ranks) for event in one] for one in told] == [
        [(2, leaf, ranks), (3, leaf, ranks)], [], [], []
    ]  # fmt: skip
    assert told[0][0].generation == 1


def test_several_differences_are_named_once_each(tmp_path: Path) -> None:
    jobs = [make_job(rank) for rank in range(3)]
    for job in jobs:
        del job["pairs"], job["shard"]

    def drift() -> None:
        jobs[0]["small"][0], jobs[1]["small"][0], jobs[2]["large"][[0, -1]] = 5, 6, 9

    told = compare(tmp_path, jobs, drift, check_replicas=True)[0]
    found = {event.tensor: event.ranks for event in told}
    assert found == {"small": ((0,), (1,), (2,)), "large": ((0, 1), (2,))}
    assert len(told) == 4


def test_later_saves_compare_only_if_asked(tmp_path: Path) -> None:
    jobs = [make_job(rank) for rank in range(4)]

    def drift() -> None:
        jobs[1]["large"][7] = 0

    assert compare(tmp_path / "first", jobs, drift) == [[]] * 4
    # These differ from the beginning.
    assert compare(tmp_path / "never", jobs, check_replicas=False) == [[]] * 4
    assert not capture_objects(make_job(1), worker=Worker(1, 4)).compared
    assert not capture_objects({"x": np.zeros(3)}, check_replicas=True).compared
    with hf.CheckpointManager(tmp_path / "alone", hf.Checkpoint(x=np.zeros(3)), check_replicas=True) as manager:
        manager.save(1)


@pytest.mark.parametrize("check_replicas", ["first", True])
@pytest.mark.parametrize(
    ("leaf", "rank", "guilty", "text"),
    [
        ("small", 2, 2, "the values of small are not the same on all workers: rank 2 differs from ranks 0, 1 and 3"),
        ("large", 0, 0, "the values of large are not the same on all workers: rank 0 differs from ranks 1, 2 and 3"),
        # Of which the leader holds nothing.
        ("pairs", 3, 3, "the values of pairs are not the same on all workers: rank 3 differs from rank 2"),
    ],
)
def test_values_that_differ_from_the_beginning_fail_the_save_on_all(
    tmp_path: Path, check_replicas: Any, leaf: str, rank: int, guilty: int, text: str
) -> None:
    engine = MemoryEngine()

    def fail(manager: hf.CheckpointManager, step: int) -> None:
        with pytest.raises(SaveFailedError) as caught:
            manager.save(step).wait_committed(PATIENCE_SECONDS)
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert (cause.rank, cause.kind, cause.text) == (guilty, "UsageError", text)
        assert "its own name" in cause.hint
        assert "holdfast.PerWorker" in cause.hint
        manager.wait()

    def work(cluster: Cluster) -> None:
        job = make_job(cluster.rank)
        array = job[leaf] if isinstance(job[leaf], np.ndarray) else job[leaf].tensor

        def differ(by: int) -> None:
            array[-1] += by * (cluster.rank == rank)

        differ(1)
        with make_manager(tmp_path, job, cluster, check_replicas=check_replicas) as manager:
            fail(manager, 1)
            fail(manager, 2)
            differ(-1)
            manager.save(3).wait_committed(PATIENCE_SECONDS)
            # Of what a job has become since, only `check_replicas=True` tells.
            differ(1)
            manager.save(4).wait_committed(PATIENCE_SECONDS)
            manager.restore(3)
            differ(1)
            fail(manager, 5)

    run_workers(4, work, engine)
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [3, 4]
    assert not [key for key in engine.keys if "/save/" in key]


def test_batch_norm_statistics_may_differ_and_rank_0_saves_its_own(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    # The second one has too many channels for what the first worker writes of the rest.
    def build(rank: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(5000))
        for layer in model:
            layer.running_mean.fill_(rank)
        return model

    built = [build(rank) for rank in range(3)]
    # DDP renews the statistics of batch norm; of other buffers, and of copies in a dict, a warning says what becomes.
    counts = [torch.nn.Module() for _ in range(3)]
    for rank, module in enumerate(counts):
        module.register_buffer("seen", torch.tensor([rank]))
        module.register_parameter("weight", torch.nn.Parameter(torch.zeros(3)))
    best = [{"weight": torch.ones(9), "running_mean": torch.full((8,), float(rank)), "loss": 0.5} for rank in range(3)]

    def work(cluster: Cluster) -> list[str]:
        told: list[hf.events.Event] = []
        objects = {"model": built[cluster.rank], "counts": counts[cluster.rank], "best": best[cluster.rank]}
        with make_manager(tmp_path, objects, cluster, sinks=[told.append]) as manager:
            for step in (1, 2):
                manager.save(step).wait_committed(PATIENCE_SECONDS)
            manager.restore()
        return [str(event) for event in told if isinstance(event, hf.events.Warned)]

    leader, *others = run_workers(3, work)
    assert others == [[], []]
    (text,) = leader
    assert "step 1: best/running_mean and 1 more differ between workers" in text
    assert [layer.running_mean.unique().tolist() for model in built for layer in model] == [[0.0]] * 6


def test_values_are_those_of_the_moment_of_the_save(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> list[hf.events.Event]:
        told: list[hf.events.Event] = []
        job = {"w": np.zeros(300_000)}
        with make_manager(tmp_path, job, cluster, check_replicas=True, sinks=[told.append]) as manager:
            for step in range(1, 6):
                job["w"][:] = step
                handle = manager.save(step)
                job["w"][:] = cluster.rank
                handle.wait_committed()
        return [event for event in told if isinstance(event, Diverged)]

    assert run_workers(3, work) == [[], [], []]


@pytest.mark.parametrize("flipped", [False, True])
def test_what_is_copied_while_training_goes_on(tmp_path: Path, flipped: bool) -> None:
    torch = pytest.importorskip("torch")

    class Replica:
        def __init__(self) -> None:
            # All of the small one is written by rank 0, and of the large one parts by each.
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Linear(600, 600))
            for number, parameter in enumerate(self.model.parameters()):
                torch.nn.init.constant_(parameter, 0.001 * number)
            self.optimizer = torch.optim.AdamW(self.model.parameters())

    jobs = [Replica() for _ in range(3)]
    # The first object of a library has its integration imported, and the first overlapped save sets torch's hook, which
    # is no matter for threads.
    first = hf.Checkpoint(model=jobs[0].model, optimizer=jobs[0].optimizer)
    with hf.CheckpointManager(tmp_path / "first", first, overlap_copy=True) as manager:
        manager.save(1)

    def work(cluster: Cluster) -> list[tuple[str, Any]]:
        told: list[hf.events.Event] = []
        job = jobs[cluster.rank]
        objects = {"model": job.model, "optimizer": job.optimizer}
        with make_manager(
            tmp_path, objects, cluster, overlap_copy=True, check_replicas=True, sinks=[told.append]
        ) as manager:
            for step in range(1, 5):
                job.optimizer.zero_grad()
                for parameter in job.model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.1 * step)
                job.optimizer.step()
                if flipped and cluster.rank == 1 and step == 2:
                    with torch.no_grad():
                        job.model[1].weight[599, 599] += 1
                manager.save(step)
        assert not [event for event in told if isinstance(event, hf.events.Failed)]
        return [(event.tensor, event.ranks) for event in told if isinstance(event, Diverged)]

    assert run_workers(3, work) == [[("model/1.weight", ((0, 2), (1,)))] * 3 if flipped else [], [], []]


def test_check_replicas_that_is_not_a_switch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check_replicas must be True, False or"):
        hf.CheckpointManager(tmp_path, hf.Checkpoint(x=1), check_replicas=1)  # type: ignore[arg-type]


def test_the_event_is_legible() -> None:
    event = Diverged(step=5, generation=1, tensor="model/w", ranks=(tuple(range(1, 12)), (0,)))
    assert str(event) == (
        "step 5: model/w should be equal on all workers, but differs: "
        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more from rank 0"
    )


def test_one_bit_that_flips_in_a_process_of_its_own(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        for rank in range(3):
            command = python(PROGRAMS / "joint_worker.py", tmp_path / "run", tmp_path / "store", "flip")
            workers.start(command, {"RANK": str(rank), "WORLD_SIZE": "3"})
        assert workers.wait(PATIENCE_SECONDS) == [0, 0, 0], "\n".join(map(workers.report, range(3)))
        told = [[record for record in workers.records(rank) if "diverged" in record] for rank in range(3)]
    assert told == [[{"diverged": 3, "tensor": "shared", "ranks": [[0, 1], [2]]}], [], []]
    # The run's own journal has it too.
    journal = hf.events.read_events(tmp_path / "run" / "events.jsonl")
    assert [event.step for event in journal if isinstance(event, Diverged)] == [3]


# Leaves.


def add(**leaves: Any) -> Callable[[dict[str, Any]], object]:
    return lambda job: job.update(leaves)


def tie(job: dict[str, Any]) -> None:
    job["extra"] = job["small"]


UNLIKE: list[tuple[int, Callable[[dict[str, Any]], object], int, str]] = [
    # Small ones are written by rank 0, which has none.
    (2, add(extra=np.zeros(3)), 2, "it holds extra (F64 [3]), which ranks 0, 1 and 3 lack"),
    # Of a large one, some parts are written.
    (1, add(extra=np.zeros(400_000)), 1, "it holds extra (F64 [400000]), which ranks 0, 2 and 3 lack"),
    (0, add(extra=np.zeros(3)), 0, "it holds extra (F64 [3]), which ranks 1, 2 and 3 lack"),
    (3, lambda job: job.pop("large"), 3, "it lacks large (F32 [300000]), which ranks 0, 1 and 2 hold"),
    (0, lambda job: job.pop("small"), 0, "it lacks small (F64 [4]), which ranks 1, 2 and 3 hold"),
    (1, add(small=np.zeros(5)), 1, "its small is F64 [5], but on ranks 0, 2 and 3 it is F64 [4]"),
    (2, add(small=np.zeros(4, np.float32)), 2, "its small is F32 [4], but on ranks 0, 1 and 3 it is F64 [4]"),
    (3, lambda job: job.pop("pairs"), 3, "it lacks pairs ([3:6] of I64 [6]), which rank 2 holds"),
    # Another name of an array that all have.
    (1, tie, 1, "it holds extra (the same array as small), which ranks 0, 2 and 3 lack"),
    (0, tie, 0, "it holds extra (the same array as small), which ranks 1, 2 and 3 lack"),
    (
        3,
        lambda job: job.update(large=job["small"]),
        3,
        "its large is the same array as small, but on ranks 0, 1 and 2 it is F32 [300000]",
    ),
]


@pytest.mark.parametrize(("rank", "change", "guilty", "text"), UNLIKE)
def test_leaves_that_differ_fail_the_save_on_all(
    tmp_path: Path, rank: int, change: Callable[[dict[str, Any]], object], guilty: int, text: str
) -> None:
    engine = MemoryEngine()

    def work(cluster: Cluster) -> None:
        job = make_job(cluster.rank)
        if cluster.rank == rank:
            change(job)
        manager = make_manager(tmp_path, job, cluster)
        with pytest.raises(SaveFailedError) as caught:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert (cause.rank, cause.kind) == (guilty, "UsageError")
        assert cause.text == text
        assert "holdfast.PerWorker" in cause.hint
        # Mended, it goes on.
        manager.wait()
        checkpoint = manager.checkpoint
        for name, value in make_job(cluster.rank).items():
            checkpoint[name] = value
        if "extra" in job:
            del checkpoint["extra"]
        manager.save(2).wait_committed(PATIENCE_SECONDS)
        manager.close()

    run_workers(4, work, engine)
    catalog = StoredRun(LocalStorage(tmp_path)).look()
    assert [name.step for name in catalog.committed] == [2]
    assert not catalog.unfinished
    assert not [key for key in engine.keys if "/save/" in key]


def test_value_under_two_names_on_all_workers_is_equal(tmp_path: Path) -> None:
    jobs = [make_job(rank) for rank in range(4)]
    for job in jobs:
        tie(job)
        job["again"] = job["shard"], job["pairs"]
    assert compare(tmp_path, jobs, check_replicas=True) == [[]] * 4

    def drift() -> None:
        jobs[3]["small"][0] += 1

    told = compare(tmp_path / "differ", jobs, drift, check_replicas=True)[0]
    assert [(event.tensor, event.ranks) for event in told] == [("small", ((0, 1, 2), (3,)))] * 2


def test_very_many_leaves_differ(tmp_path: Path) -> None:
    """More than fit into one value of the store; three are named."""

    def work(cluster: Cluster) -> None:
        count = 30_000 if cluster.rank else 1
        job = {"tree": {f"a leaf whose name is by no means short {n:08d}": np.zeros(1) for n in range(count)}}
        manager = make_manager(tmp_path, job, cluster)
        with pytest.raises(SaveFailedError) as caught:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert cause.rank == 1
        assert cause.text.startswith("it holds tree/a leaf whose name is by no means short 00000001 (F64 [1]), which")
        assert cause.text.endswith("; and 29996 more leaves")
        manager.abandon()

    run_workers(2, work)


def group(values: str = "", *, size: int = 3, names: str = "n") -> ReplicaDigest:
    return ReplicaDigest("h", size, 2, names, values)


def test_who_is_suspected() -> None:
    assert find_disagreements([[group("v")], [group("v")], [group("v")]]) == []
    # One that does not compare.
    assert find_disagreements([[group("v")], [group("v")], [group()]]) == []
    assert find_disagreements([[group("v")], [group("w")], [group("v")]]) == [Disagreement("h", ((0, 2), (1,)), True)]
    assert find_disagreements([[group()], [group(names="m")], [group()]]) == [Disagreement("h", ((0, 2), (1,)), False)]
    assert find_disagreements([[group()], [], [group()]]) == [Disagreement("h", ((0, 2),), False)]


def test_what_is_not_known_is_not_named() -> None:
    disagreement = Disagreement("h", ((0, 2), (1,)), False)
    held = Detail((0, 1, 2), {"x": [("F32 [3]", "a")]})
    assert name_difference(disagreement, {}) == (1, "its leaves differ from those of the others")
    assert name_difference(disagreement, {0: held}) == (1, "its leaves differ from those of ranks 0 and 2")
    assert name_divergences(disagreement, {0: held}) == []
    other = Detail((0, 1, 2), {"x": [("F32 [3]", "b")]})
    assert name_divergences(disagreement, {0: held, 1: other}) == [Divergence("x", ((0, 2), (1,)))]


def test_other_workers_with_the_same_difference_are_named_too() -> None:
    held, none = Detail(tuple(range(5)), {"x": [("F32 [3]", "")]}), Detail(tuple(range(5)), {})
    disagreement = Disagreement("h", ((0, 1, 2), (3, 4)), False)
    assert name_difference(disagreement, {0: held, 3: none}) == (
        3,
        "it lacks x (F32 [3]), which ranks 0, 1 and 2 hold; the same goes for rank 4",
    )


# Objects without arrays.


STRAYS: list[tuple[int, dict[str, Any], int, str]] = [
    (1, {"progress": 1}, 1, "it saves progress, which ranks 0, 2 and 3 lack"),
    (0, {"progress": {"epoch": 1}}, 0, "it saves progress, which ranks 1, 2 and 3 lack"),
    # All of the others have it.
    (-3, {"progress": {}}, 3, "it lacks progress, which ranks 0, 1 and 2 save"),
]


@pytest.mark.parametrize(("rank", "stray", "guilty", "text"), STRAYS)
def test_an_object_that_only_some_have_fails_the_save_on_all(
    tmp_path: Path, rank: int, stray: dict[str, Any], guilty: int, text: str
) -> None:
    engine = MemoryEngine()

    def work(cluster: Cluster) -> None:
        job = make_job(cluster.rank)
        has_stray = cluster.rank == rank if rank >= 0 else cluster.rank != -rank
        manager = make_manager(tmp_path, job | (stray if has_stray else {}), cluster)
        with pytest.raises(SaveFailedError) as caught:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert (cause.rank, cause.kind, cause.text) == (guilty, "UsageError", text)
        assert "holdfast.PerWorker" in cause.hint
        # Mended, it goes on.
        manager.wait()
        if has_stray:
            manager.checkpoint["progress"] = hf.PerWorker(stray["progress"])
        manager.save(2).wait_committed(PATIENCE_SECONDS)
        manager.close()

    run_workers(4, work, engine)
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [2]
    assert not [key for key in engine.keys if "/save/" in key]


def test_the_stages_of_a_pipeline_have_objects_of_their_own(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        stage = cluster.rank // 2
        weights = hf.Shard(np.full(3, stage), (3,), (0,), holders=(2 * stage, 2 * stage + 1))
        job = {f"stage{stage}": weights, f"schedule{stage}": {"rate": 0.1}, "step": 7, "rng": hf.RNG()}
        with make_manager(tmp_path, job, cluster) as manager:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
            if cluster.rank == 3:
                del manager.checkpoint["schedule1"]
            with pytest.raises(SaveFailedError) as caught:
                manager.save(2).wait_committed(PATIENCE_SECONDS)
            assert "rank 3" in str(caught.value.__cause__)
            assert "it lacks schedule1, which rank 2 saves" in str(caught.value.__cause__)
            manager.abandon()

    run_workers(4, work)


def make_stage(stage: int, seed: int) -> dict[str, Any]:
    """A stage of a pipeline in plain arrays, each under names that no other stage has."""
    generator = np.random.default_rng([seed, stage])
    return {
        f"stage{stage}": {"small": generator.normal(size=4), "large": generator.normal(size=90_000)},
        f"optimizer{stage}": [generator.normal(size=90_000), 0.1 + stage + seed],
        f"schedule{stage}": {"rate": stage + seed},
        "step": seed,
        "rng": hf.RNG(),
    }


def read_stage(job: dict[str, Any]) -> list[Any]:
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for name, one in sorted(job.items())
        if name != "rng"
        for value in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else [one])
    ]


# Who has which stages at the restore: two stages were saved by two workers each, in order.
@pytest.mark.parametrize(
    "stages",
    [
        ((0,), (0,), (1,), (1,)),
        ((1,), (0,), (1,), (0,)),
        ((0,), (1,)),
        ((1,), (0,)),
        ((0, 1),),
        ((0, 1), (0, 1), (0, 1)),
    ],
)
def test_stages_of_a_pipeline_are_plain_arrays_with_own_names(tmp_path: Path, stages: Any) -> None:
    def save(cluster: Cluster) -> None:
        job = make_stage(cluster.rank // 2, 7)
        with make_manager(tmp_path, job, cluster) as manager:
            for step in (1, 2):
                manager.save(step).wait_committed(PATIENCE_SECONDS)

    def restore(cluster: Cluster) -> None:
        job: dict[str, Any] = {}
        for stage in stages[cluster.rank]:
            job |= make_stage(stage, 8)
        with make_manager(tmp_path, job, cluster) as manager:
            assert manager.restore() is not None
            restored = {name: manager.checkpoint[name] for name in job}
            expected: dict[str, Any] = {}
            for stage in stages[cluster.rank]:
                expected |= make_stage(stage, 7)
            assert read_stage(restored) == read_stage(expected)
            manager.save(3).wait_committed(PATIENCE_SECONDS)

    run_workers(4, save)
    storage = LocalStorage(tmp_path)
    name = StoredRun(storage).look().committed[-1]
    opened = open_step(storage, name.directory, name)
    assert not verify_data(storage, opened)
    run_workers(len(stages), restore)


def test_a_worker_that_lacks_what_others_of_its_stage_name_is_named(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        job = make_stage(cluster.rank // 2, 7)
        if cluster.rank == 3:
            del job["optimizer1"]
        manager = make_manager(tmp_path, job, cluster)
        with pytest.raises(SaveFailedError) as caught:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert (cause.rank, cause.text) == (3, "it lacks optimizer1/0 (F64 [90000]), which rank 2 holds")
        manager.abandon()

    run_workers(4, work)


def test_who_holds_what() -> None:
    assert find_holders([{"model", "step"}] * 4) == {}
    stages = [{"stage0", "step"}, {"stage0", "step"}, {"stage1", "step"}]
    assert find_holders(stages) == {"stage0": (0, 1), "stage1": (2,)}
    # Who names less than another lacks something.
    assert find_holders([{"model", "ema"}, {"model"}]) == {}
    assert find_holders([{"stage0"}, {"stage1", "optimizer1"}, {"stage1"}]) == {
        "stage0": (0,), "stage1": (1, 2), "optimizer1": (1, 2)
    }  # fmt: skip
    assert find_holders([{"a"}, {"b"}, set()]) == {"a": (0, 2), "b": (1, 2)}


def test_per_worker_values_of_one_worker_allow_other_numbers_of_workers(tmp_path: Path) -> None:
    def save(cluster: Cluster) -> None:
        own: dict[str, Any] = {"log": hf.PerWorker(["begun"])} if cluster.rank == 0 else {}
        with make_manager(tmp_path, {"x": np.ones(3)} | own, cluster) as manager:
            manager.save(1)

    def restore(cluster: Cluster) -> tuple[Any, list[tuple[str, ...]]]:
        told: list[hf.events.Event] = []
        log: list[str] = []
        own: dict[str, Any] = {"log": hf.PerWorker(log)} if cluster.rank == 0 else {"new": hf.PerWorker(log)}
        job = {"x": np.zeros(3)} | own
        with make_manager(tmp_path, job, cluster, sinks=[told.append]) as manager:
            manager.restore()
        assert job["x"].tolist() == [1, 1, 1]
        return log, [event.left for event in told if isinstance(event, hf.events.Resized)]

    run_workers(2, save)
    assert run_workers(3, restore) == [([], [("log",)]), ([], [("new",)]), ([], [("new",)])]


def test_difference_of_very_many_objects_is_reported_briefly() -> None:
    def snap(count: int, *others: str) -> ObjectSetDigest:
        names = [f"{'n' * 300}{number:05d}" for number in range(count)]
        captured = capture_objects(dict.fromkeys([*names, *others], 0), worker=Worker(0, 2))
        return digest_objects(Stager(HostBuffer()).stage(captured, 1).snapshot)

    many = snap(5000)
    assert len(msgspec.json.encode(many)) < 20_000
    assert find_unlike([many, snap(5000)]) is None
    rank, text = find_unlike([many, snap(5000), snap(4999, "o")]) or (-1, "")
    assert rank == 2
    assert "it lacks 4900 more objects (" in text


# The place in the data.


@pytest.mark.parametrize(
    ("ahead", "wrap", "path"),
    [
        (1, lambda sampler: sampler, "reader"),
        (1, lambda sampler: {"train": (0, {3: sampler}), "test": [1]}, "reader/train/1/0/1"),
        (1, hf.PerWorker, ""),
        (1, lambda sampler: [hf.PerWorker(sampler)], ""),
        (0, lambda sampler: sampler, ""),
    ],
)
def test_workers_at_different_data_positions_are_reported_once(
    tmp_path: Path, ahead: int, wrap: Callable[[hf.ResumableSampler], Any], path: str
) -> None:
    def work(cluster: Cluster) -> list[str]:
        told: list[hf.events.Event] = []
        sampler = hf.ResumableSampler(20, batch_size=6, rank=cluster.rank, world_size=3)
        batches = sampler.stream(sampler)
        for _ in range(2 + ahead * (cluster.rank == 1)):
            next(batches)
        job = {"reader": wrap(sampler)}
        with make_manager(tmp_path, job, cluster, sinks=[told.append]) as manager:
            for step in (1, 2):
                manager.save(step).wait_committed()
        return [str(event) for event in told if isinstance(event, hf.events.Warned)]

    leader, *others = run_workers(3, work)
    assert others == [[], []]
    if not path:
        assert leader == []
    else:
        (text,) = leader
        assert f"of {path}: ranks 0 and 2 at 12 samples of epoch 0; rank 1 at 20 samples of epoch 0" in text


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_other_number_of_workers_is_warned_of_unequal_data_positions(tmp_path: Path, world_size: int) -> None:
    def reader(cluster: Cluster) -> hf.ResumableSampler:
        return hf.ResumableSampler(20, batch_size=6, rank=cluster.rank, world_size=cluster.world_size)

    def save(cluster: Cluster) -> None:
        sampler = reader(cluster)
        batches = sampler.stream(sampler)
        for _ in range(1 + cluster.rank // 2):
            next(batches)
        with make_manager(tmp_path, {"reader": sampler}, cluster) as manager:
            manager.save(1).wait_committed()

    def restore(cluster: Cluster) -> list[str]:
        told: list[hf.events.Event] = []
        with make_manager(tmp_path, {"reader": reader(cluster)}, cluster, sinks=[told.append]) as manager:
            manager.restore()
        return [event.text for event in told if isinstance(event, hf.events.Warned)]

    run_workers(3, save)
    found = [text for texts in run_workers(world_size, restore) for text in texts]
    assert any("different positions in the same data of reader" in text and "rank 2 at 12" in text for text in found)


class Gathered:
    """Can only be read and loaded by both workers at once, as state that is gathered by a collective."""

    def __init__(self, name: str, meeting: threading.Barrier, **more: Any) -> None:
        self.name, self.meeting, self.more = name, meeting, more
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        self.meeting.wait(PATIENCE_SECONDS / 4)
        return {"name": self.name, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meeting.wait(PATIENCE_SECONDS / 4)
        self.loaded = state["name"]


def test_workers_with_objects_in_other_orders_read_and_load_them_together(tmp_path: Path) -> None:
    names = ["ema", "critic", "model"]
    meetings = {name: threading.Barrier(2) for name in names}

    more = {name: threading.Barrier(2) for name in names}

    def make(cluster: Cluster) -> dict[str, Any]:
        ordered = names if cluster.rank else names[::-1]
        found: dict[str, Any] = {name: Gathered(name, meetings[name], values=np.arange(3.0)) for name in ordered}
        return found | {"tree": {name: Gathered(name, more[name]) for name in ordered}}

    def save_and_restore(cluster: Cluster) -> list[Any]:
        with make_manager(tmp_path, make(cluster), cluster) as manager:
            manager.save(1).wait_committed()
        objects = make(cluster)
        with make_manager(tmp_path, objects, cluster) as manager:
            manager.restore()
            assert list(manager.checkpoint.objects) == list(objects)
        return [one.loaded for one in (*(objects[name] for name in names), *map(objects["tree"].get, names))]

    assert run_workers(2, save_and_restore) == [names * 2, names * 2]
