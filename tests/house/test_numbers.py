"""Numeric arguments: what cannot be meant is an `OutOfRangeError`, what is not a number another `UsageError`."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import OutOfRangeError, UsageError
from holdfast.events import JsonLinesSink
from holdfast.preemption import AWS, GCP, Azure, FileAppears, Kubernetes, Notice, Signals, Slurm, Watcher

NAN, INF = math.nan, math.inf
COUNTS = (-1,)
FROM_ONE = (0, -1)
SECONDS = (0, -1, NAN, INF)
STEPS = (-1, 10**15 + 1)


def manager(place: Path, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(place, hf.Checkpoint(x=1), **options)


def use_manager(place: Path, act: Callable[[hf.CheckpointManager], object]) -> object:
    with manager(place) as opened:
        return act(opened)


def backups(place: Path, **options: Any) -> hf.WorkerTrainingState:
    return hf.WorkerTrainingState(place, hf.Checkpoint(x=1), **options)


def use_backups(place: Path, act: Callable[[hf.WorkerTrainingState], object]) -> object:
    with backups(place) as opened:
        return act(opened)


def close(timeout_seconds: Any, state: hf.WorkerTrainingState) -> None:
    state.back_up(0)
    state.close(timeout_seconds)


def wait(method: str, place: Path, timeout_seconds: Any) -> object:
    return use_manager(place, lambda opened: getattr(opened.save(1), method)(timeout_seconds))


def load_initial(method: str, given: dict[str, Any], name: str, place: Path, value: Any) -> object:
    arguments = {"mode": "train", **given, name: value}
    return use_backups(place, lambda opened: getattr(opened, method)(**arguments))


def keep_nodes(method: str, more: tuple[Any, ...], place: Path, value: Any) -> object:
    return use_jobs(place, lambda keeper, session: getattr(keeper, method)(*more, value))


def make_source(make: Callable[..., object], name: str, place: Path, value: Any) -> object:
    return make(**{name: value})


def use_tiers(place: Path, act: Callable[[hf.SaveHandle], object]) -> object:
    with manager(hf.Tiers(place, f"{place}-far")) as opened:  # type: ignore[arg-type]
        return act(opened.save(1))


def use_run(place: Path, act: Callable[[hf.Run], object]) -> object:
    with hf.resumable(place, x=1) as run:
        return act(run)


def use_handler(place: Path, act: Callable[[hf.PreemptionCheckpointHandler], object]) -> object:
    with manager(place) as opened, hf.PreemptionCheckpointHandler(opened) as handler:
        return act(handler)


def use_jobs(place: Path, act: Callable[[hf.MultiNodeCheckpointManager, hf.LocalSession], object]) -> object:
    keeper = hf.MultiNodeCheckpointManager(place)
    with hf.LocalSession("a") as session:
        keeper.init(session, ["a"])
        try:
            return act(keeper, session)
        finally:
            keeper.close()


def use_runner(place: Path, act: Callable[[hf.JobRunner, hf.LocalSession], object]) -> object:
    job = hf.Job()
    job.epoch_group.add(lambda workspace: None, on="a")
    hf.epoch_limiter(job, 1)
    with hf.LocalSession("a") as session:
        runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(place))
        runner.train(session)
        return act(runner, session)


def sampler(**options: Any) -> hf.ResumableSampler:
    return hf.ResumableSampler(10, **{"batch_size": 2, **options})


def rolled_back(place: Path, **options: Any) -> None:
    with hf.resumable(place, x=1) as run:
        run.rollback(**options)


def loader(**options: Any) -> Any:
    return hf.ResumableDataLoader(list(range(10)), **{"batch_size": 2, **options})


Call = Callable[[Path, Any], object]

TABLE: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "Latest n": (lambda _, v: hf.Latest(v), FROM_ONE),
    "Run.rollback step": (lambda p, v: rolled_back(p, step=v), STEPS),
    "Run.rollback skip_batches": (lambda p, v: rolled_back(p, skip_batches=v), COUNTS),
    "LastGood n": (lambda _, v: hf.LastGood(v), FROM_ONE),
    "EveryN n": (lambda _, v: hf.EveryN(v), FROM_ONE),
    "EveryHours hours": (lambda _, v: hf.EveryHours(v), SECONDS),
    "Best n": (lambda _, v: hf.Best("loss", n=v), FROM_ONE),
    "Newer seconds": (lambda _, v: hf.Newer(v), SECONDS),
    "Epochs n": (lambda _, v: hf.Epochs(v), FROM_ONE),
    "Steps n": (lambda _, v: hf.Steps(v), FROM_ONE),
    "Seconds seconds": (lambda _, v: hf.Seconds(v), SECONDS),
    "Auto overhead": (lambda _, v: hf.Auto(overhead=v), (0, 1, -1, 2, NAN, INF)),
    "Auto mtbf_seconds": (lambda _, v: hf.Auto(mtbf_seconds=v), SECONDS),
    "follow timeout_seconds": (lambda p, v: hf.follow(p, timeout_seconds=v), SECONDS),
    "follow max_behind": (lambda p, v: hf.follow(p, max_behind=v), COUNTS),
    "SaveHandle.wait_committed tier": (
        lambda p, v: use_tiers(p, lambda handle: handle.wait_committed(tier=v)),
        (2, -3),
    ),
    "Tier keep": (lambda p, v: hf.Tier(p, keep=v), FROM_ONE),
    "HostMemory keep_seconds": (lambda p, v: hf.HostMemory(keep_seconds=v), FROM_ONE),
    "Tier every": (lambda p, v: hf.Tier(p, every=v), FROM_ONE),
    "Tier most_bytes_per_second": (lambda p, v: hf.Tier(p, most_bytes_per_second=v), FROM_ONE),
    "ask timeout_seconds": (lambda p, v: hf.ask(p, "status", timeout_seconds=v), (0, -1, NAN)),
    "ask generation": (lambda p, v: hf.ask(p, "status", generation=v), COUNTS),
    "CheckpointManager save_every": (lambda p, v: manager(p, save_every=v), FROM_ONE),
    "CheckpointManager keep": (lambda p, v: manager(p, keep=v), FROM_ONE),
    "CheckpointManager failures_allowed": (lambda p, v: manager(p, failures_allowed=v), COUNTS),
    "CheckpointManager timeout_seconds": (lambda p, v: manager(p, timeout_seconds=v), SECONDS),
    "CheckpointManager threads": (lambda p, v: manager(p, threads=v), FROM_ONE),
    "CheckpointManager reserve_bytes": (lambda p, v: manager(p, reserve_bytes=v), COUNTS),
    "CheckpointManager liveness_seconds": (lambda p, v: manager(p, liveness_seconds=v), (*SECONDS, 0.5)),
    "CheckpointManager.save step": (lambda p, v: use_manager(p, lambda m: m.save(v)), STEPS),
    "CheckpointManager.save_if_due step": (lambda p, v: use_manager(p, lambda m: m.save_if_due(v)), STEPS),
    "CheckpointManager.restore step": (lambda p, v: use_manager(p, lambda m: m.restore(v)), STEPS),
    "CheckpointManager.wait timeout_seconds": (lambda p, v: use_manager(p, lambda m: m.wait(v)), (-1, NAN)),
    "CheckpointManager.close timeout_seconds": (lambda p, v: use_manager(p, lambda m: m.close(v)), (-1, NAN)),
    **{
        f"SaveHandle.wait_{what} timeout_seconds": (
            partial(wait, f"wait_{what}"),
            (-1, NAN),
        )
        for what in ("staged", "committed", "ended")
    },
    "resumable start_from": (lambda p, v: hf.resumable(p, x=1, start_from=v), STEPS),
    "CheckpointManager start_from": (lambda p, v: hf.CheckpointManager(p, hf.Checkpoint(x=1), start_from=v), STEPS),
    "CheckpointManager.add_metrics step": (lambda p, v: use_manager(p, lambda m: m.add_metrics(v, {})), STEPS),
    "resumable save_every": (lambda p, v: hf.resumable(p, x=1, save_every=v), FROM_ONE),
    "resumable keep": (lambda p, v: hf.resumable(p, x=1, keep=v), FROM_ONE),
    "resumable grace": (lambda p, v: hf.resumable(p, x=1, grace=v), (-1, NAN, INF)),
    "resumable failures_allowed": (lambda p, v: hf.resumable(p, x=1, failures_allowed=v), COUNTS),
    "resumable timeout_seconds": (lambda p, v: hf.resumable(p, x=1, timeout_seconds=v), SECONDS),
    "resumable threads": (lambda p, v: hf.resumable(p, x=1, threads=v), FROM_ONE),
    "resumable reserve_bytes": (lambda p, v: hf.resumable(p, x=1, reserve_bytes=v), COUNTS),
    "resumable liveness_seconds": (lambda p, v: hf.resumable(p, x=1, liveness_seconds=v), SECONDS),
    "Run.begin_at step": (lambda p, v: use_run(p, lambda run: run.begin_at(v)), COUNTS),
    "Run.epochs total": (lambda p, v: use_run(p, lambda run: run.epochs(v)), COUNTS),
    "Run.steps total": (lambda p, v: use_run(p, lambda run: run.steps(v)), COUNTS),
    "PreemptionCheckpointHandler.steps total": (lambda p, v: use_handler(p, lambda h: h.steps(v)), COUNTS),
    "TerminationConfig grace_period": (lambda _, v: hf.TerminationConfig(grace_period=v), (-1, NAN, INF)),
    "TerminationConfig exit_code": (lambda _, v: hf.TerminationConfig(exit_code=v), (0, -1, 256)),
    "WorkerTrainingState keep": (lambda p, v: backups(p, keep=v), FROM_ONE),
    "WorkerTrainingState grace": (lambda p, v: backups(p, grace=v), (-1, NAN, INF)),
    "WorkerTrainingState failures_allowed": (lambda p, v: backups(p, failures_allowed=v), COUNTS),
    "WorkerTrainingState timeout_seconds": (lambda p, v: backups(p, timeout_seconds=v), SECONDS),
    "WorkerTrainingState threads": (lambda p, v: backups(p, threads=v), FROM_ONE),
    "WorkerTrainingState liveness_seconds": (lambda p, v: backups(p, liveness_seconds=v), SECONDS),
    "WorkerTrainingState save_freq": (lambda p, v: backups(p, save_freq=v), FROM_ONE),
    "WorkerTrainingState.back_up_if_due epoch": (lambda p, v: use_backups(p, lambda b: b.back_up_if_due(v, 0)), COUNTS),
    "WorkerTrainingState.back_up_if_due batch": (lambda p, v: use_backups(p, lambda b: b.back_up_if_due(0, v)), COUNTS),
    "WorkerTrainingState.back_up epoch": (lambda p, v: use_backups(p, lambda b: b.back_up(v)), COUNTS),
    "WorkerTrainingState.back_up batch": (lambda p, v: use_backups(p, lambda b: b.back_up(0, v)), COUNTS),
    "WorkerTrainingState.close timeout_seconds": (lambda p, v: use_backups(p, partial(close, v)), (-1, NAN)),
    **{
        f"WorkerTrainingState.maybe_load_initial_{what}_from_ckpt {name}": (
            partial(load_initial, f"maybe_load_initial_{what}_from_ckpt", given, name),
            COUNTS,
        )
        for what, given in {
            "epoch": {"initial_epoch": 0},
            "counters": {"initial_epoch": 0, "steps_per_epoch": 1},
        }.items()
        for name in (*given, "epochs")
    },
    "ResumableSampler batch_size": (lambda _, v: sampler(batch_size=v), FROM_ONE),
    "ResumableSampler seed": (lambda _, v: sampler(seed=v), (-1, 1 << 64)),
    "ResumableSampler rank": (lambda _, v: sampler(rank=v), (-1, 1)),
    "ResumableSampler world_size": (lambda _, v: sampler(world_size=v), (*FROM_ONE, 3)),
    "ResumableSampler.set_epoch epoch": (lambda _, v: sampler().set_epoch(v), COUNTS),
    "ResumableSampler.epochs total": (lambda _, v: list(sampler().epochs(v)), COUNTS),
    "ResumableDataLoader batch_size": (lambda _, v: loader(batch_size=v), FROM_ONE),
    "ResumableDataLoader seed": (lambda _, v: loader(seed=v), (-1, 1 << 64)),
    "ResumableDataLoader num_workers": (lambda _, v: loader(num_workers=v), COUNTS),
    "ResumableDataLoader rank": (lambda _, v: loader(rank=v), (-1, 1)),
    "ResumableDataLoader world_size": (lambda _, v: loader(world_size=v), (*FROM_ONE, 3)),
    "ResumableDataLoader.set_epoch epoch": (lambda _, v: loader().set_epoch(v), COUNTS),
    "ResumableDataLoader.epochs total": (lambda _, v: list(loader().epochs(v)), COUNTS),
    "epoch_limiter num_epochs": (lambda _, v: hf.epoch_limiter(hf.Job(), v), FROM_ONE),
    "JobRunner failures_allowed": (lambda _, v: hf.JobRunner(hf.Job(), failures_allowed=v), COUNTS),
    "JobRunner resume_from_epoch": (
        lambda p, v: hf.JobRunner(hf.Job(), hf.MultiNodeCheckpointManager(p), resume_from_epoch=v),
        STEPS,
    ),
    "JobRunner.save_checkpoints epoch": (lambda p, v: use_runner(p, lambda r, s: r.save_checkpoints(v, s)), STEPS),
    "JobRunner.load_blobs_from_checkpoints epoch": (
        lambda p, v: use_runner(p, lambda r, s: r.load_blobs_from_checkpoints("x", v, s)),
        STEPS,
    ),
    "LocalSession grace_seconds": (lambda _, v: hf.LocalSession("a", grace_seconds=v), (-1, NAN, INF)),
    "TorchrunSession grace_seconds": (
        lambda _, v: hf.TorchrunSession(cluster="alone", grace_seconds=v),
        (-1, NAN, INF),
    ),
    "TorchrunSession liveness_seconds": (lambda _, v: hf.TorchrunSession(cluster="alone", liveness_seconds=v), SECONDS),
    "MultiNodeCheckpointManager keep": (lambda p, v: hf.MultiNodeCheckpointManager(p, keep=v), FROM_ONE),
    "MultiNodeCheckpointManager timeout_seconds": (
        lambda p, v: hf.MultiNodeCheckpointManager(p, timeout_seconds=v),
        SECONDS,
    ),
    "MultiNodeCheckpointManager threads": (lambda p, v: hf.MultiNodeCheckpointManager(p, threads=v), FROM_ONE),
    **{
        f"MultiNodeCheckpointManager.{method} {name}": (
            partial(keep_nodes, method, more),
            STEPS,
        )
        for method, name, more in (
            ("begin_save", "epoch", ()),
            ("choose_epoch", "user_epoch", ()),
            ("get_ckpt_db_name", "epoch", ("a",)),
            ("load", "epoch", ()),
        )
    },
    "MultiNodeCheckpointManager.load_blobs epoch": (
        lambda p, v: use_jobs(p, lambda k, s: k.load_blobs(["x"], v)),
        STEPS,
    ),
    "export_checkpoint step": (lambda p, v: hf.export_checkpoint(p, p / "out", to="safetensors", step=v), STEPS),
    "export_checkpoint file_bytes": (
        lambda p, v: hf.export_checkpoint(p, p / "out", to="safetensors", file_bytes=v),
        FROM_ONE,
    ),
    "export_checkpoint threads": (
        lambda p, v: hf.export_checkpoint(p, p / "out", to="safetensors", threads=v),
        FROM_ONE,
    ),
    "import_checkpoint step": (lambda p, v: hf.import_checkpoint(p / "in", p / "run", step=v), STEPS),
    # Of modules of their own:
    "dcp.StorageWriter step": (lambda _, v: hf.dcp.StorageWriter(step=v), STEPS),
    "dcp.StorageWriter keep": (lambda _, v: hf.dcp.StorageWriter(keep=v), FROM_ONE),
    "dcp.StorageReader step": (lambda _, v: hf.dcp.StorageReader(step=v), STEPS),
    "JsonLinesSink limit_bytes": (lambda p, v: JsonLinesSink(p / "log", limit_bytes=v), (0, -1)),
    "Notice left_seconds": (lambda _, v: Notice(source="a", text="b", left_seconds=v), (NAN,)),
    "Signals left_seconds": (lambda _, v: Signals(left_seconds=v), (-1, NAN)),
    "Kubernetes grace_seconds": (lambda _, v: Kubernetes(v), SECONDS),
    "Slurm ahead_seconds": (lambda _, v: Slurm(v), SECONDS),
    "FileAppears interval_seconds": (lambda p, v: FileAppears(p, interval_seconds=v), SECONDS),
    "Watcher interval_seconds": (lambda _, v: Watcher(lambda: None, interval_seconds=v), SECONDS),
    **{
        f"{make.__name__} {name}": (partial(make_source, make, name), SECONDS)
        for make, names in {
            AWS: ("interval_seconds", "timeout_seconds"),
            Azure: ("interval_seconds", "timeout_seconds"),
            GCP: ("timeout_seconds",),
        }.items()
        for name in names
    },
}
if importlib.util.find_spec("torch") is None:  # pragma: no cover
    NEEDS_TORCH = ("DataLoader", "Torchrun", "dcp")
    TABLE = {name: entry for name, entry in TABLE.items() if not any(part in name for part in NEEDS_TORCH)}

NOT_GIVEN_BY_USERS = {
    "SaveHandle.reach",
    # As a storage: called by it.
    *(f"Tiers.{method}" for method in ("avoid", "create", "discard", "find", "hasten", "is_full", "is_up")),
    *(f"Tiers.{method}" for method in ("note_down", "note_up", "read", "rests_until", "takes")),
    *("CheckpointManager.follow_epochs", "CheckpointManager.follow_nonfinite", "ResumableSampler.skip"),
    # Made by holdfast, and handed to the user; or called by it.
    *(
        "Backup",
        "Reply",
        "Followed",
        "Restoration",
        "SaveHandle",
        "UploadTaskGroupBuilder.build",
        "MultiNodeCheckpointManager.finish_save",
    ),
    *(f"{policy}.choose_kept" for policy in ("All", "Best", "EveryHours", "EveryN", "LastGood", "Latest", "Newer")),
    *(f"{session}.{method}" for session in ("LocalSession", "TorchrunSession") for method in ("run", "run_placed")),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_number_that_cannot_be_meant_is_out_of_range(tmp_path: Path, name: str) -> None:
    call, wrong = TABLE[name]
    if name.startswith("dcp."):
        pytest.importorskip("torch", "2.9", reason="holdfast.dcp needs torch 2.9")
    for place, value in enumerate(wrong):
        with pytest.raises(OutOfRangeError) as raised:
            call(tmp_path / str(place), value)
        assert isinstance(raised.value, ValueError)
        assert name.split()[1].removeprefix("user_") in raised.value.message or "step" in raised.value.message


@pytest.mark.parametrize("name", TABLE)
def test_what_is_not_a_number_is_another_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as raised:
        TABLE[name][0](tmp_path, "3")
    assert not isinstance(raised.value, OutOfRangeError)


def list_numeric_arguments() -> Iterator[tuple[str, str]]:
    for owner in hf.__all__:
        if owner == "RaySession":  # It needs Ray.
            continue
        thing = getattr(hf, owner)
        if inspect.isclass(thing):
            methods = [name for name in dir(thing) if not name.startswith("_") and callable(getattr(thing, name))]
            called = {owner: thing, **{f"{owner}.{name}": getattr(thing, name) for name in methods}}
        else:
            called = {owner: thing} if callable(thing) else {}
        for name, function in called.items():
            with_signature = None if inspect.isclass(thing) and issubclass(thing, Exception) else function
            if with_signature is None or name in NOT_GIVEN_BY_USERS:
                continue
            for parameter in inspect.signature(with_signature).parameters.values():
                annotation = str(parameter.annotation)
                if re.search(r"\b(int|float)\b", annotation) and not re.search(
                    r"Mapping|Iterable|Sequence", annotation
                ):
                    yield name, parameter.name


def test_all_numeric_arguments_are_in_the_table() -> None:
    found = {f"{owner} {name}" for owner, name in list_numeric_arguments()}
    found.discard("Run.report metrics")
    assert found - set(TABLE) == set()
    assert len(found) > 60


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    three: Any = np.int64(3)
    assert hf.Latest(three).n == 3
    assert hf.Seconds(np.float64(2.5)).seconds == 2.5
    with manager(tmp_path, threads=np.int64(2), timeout_seconds=np.float64(60)) as opened:
        opened.save(three).wait_committed(np.float64(60))
    assert len(sampler(batch_size=three)) == 4
