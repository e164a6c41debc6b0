"""Metrics that are reported after a step was saved belong to that step, on any number of workers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import call_json, flip_bit
from holdfast.catalog import StoredRun
from holdfast.errors import UsageError
from holdfast.events import Event, Failed
from holdfast.storage import LocalStorage
from memory_engine import run_workers

BATCHES = 4
LOSSES = (0.5, 0.2, 0.4, 0.3, 0.6)


def train(
    run: Path, epochs: int, *, workers: int = 2, saves: bool = True, die_in: int | None = None, **options: Any
) -> None:
    """The guide's loop over epochs: the state counts its updates, and the loss of an epoch is told by them."""

    def work(cluster: Any) -> None:
        rank = 0 if isinstance(cluster, str) else cluster.rank
        state = {"updates": np.zeros(1)}
        loader = hf.ResumableDataLoader(range(BATCHES * 2), batch_size=2, seed=1)
        with hf.resumable(
            run, state=state, loader=loader, cluster=cluster, preemption="off", quiet=True,
            **{"save_every": hf.Steps(BATCHES), "keep": hf.All(), **options},
        ) as job:  # fmt: skip
            for epoch in loader.epochs(epochs):
                for _ in loader:
                    state["updates"] += 1
                    job.finish_step()
                if die_in == epoch:
                    raise ZeroDivisionError
                if rank == 0:
                    job.report(val_loss=LOSSES[int(state["updates"][0]) // BATCHES - 1])
                if saves:
                    job.save()

    if workers == 1:
        work("alone")
    else:
        run_workers(workers, work)


def stored(run: Path) -> dict[int, dict[str, float]]:
    storage = LocalStorage(run)
    return {name.step: StoredRun(storage).step(name).manifest().metrics for name in StoredRun(storage).look().living}


def expected(epochs: Sequence[int]) -> dict[int, dict[str, float]]:
    return {(epoch + 1) * BATCHES: {"val_loss": LOSSES[epoch]} for epoch in epochs}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("saves", [True, False])
def test_a_metric_belongs_to_the_step_that_it_was_measured_on(tmp_path: Path, workers: int, saves: bool) -> None:
    train(tmp_path, 5, workers=workers, saves=saves)
    assert stored(tmp_path) == expected(range(5))
    # So the best step is the one with the best weights, for retention as well.
    shutil.rmtree(tmp_path)
    train(tmp_path, 5, workers=workers, saves=saves, keep=hf.Best("val_loss") | hf.Latest(1))
    assert stored(tmp_path) == expected([1, 4])
    document = call_json("list", tmp_path)
    assert {step["step"]: step["metrics"] for step in document["steps"]} == expected([1, 4])
    assert call_json("show", f"{tmp_path}@8")["metrics"] == {"val_loss": 0.2}
    assert call_json("verify", tmp_path)["is_whole"] is True
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("step-")]) == 2


def test_a_metric_whose_validation_was_cut_off_comes_after_the_restart(tmp_path: Path) -> None:
    for epoch in (1, 4):
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, 5, die_in=epoch)
    assert stored(tmp_path) == {**expected(range(4)), 20: {}}
    # All steps are done: only the validation of the last epoch is repeated.
    for _ in range(2):
        train(tmp_path, 5)
        assert stored(tmp_path) == expected(range(5))
    assert len(list(tmp_path.glob("step-*20.*/metrics-*"))) == 1, "what is stored is not stored again"


def test_records_that_are_damaged_or_of_another_step_are_ignored(tmp_path: Path) -> None:
    train(tmp_path, 2)
    first, second = sorted(tmp_path.glob("step-*/metrics-0000.json"))
    shutil.copy(first, second)
    assert stored(tmp_path)[8] == {}
    flip_bit(first, first.stat().st_size // 2)
    assert stored(tmp_path)[4] == {}
    assert call_json("show", f"{tmp_path}@4")["metrics"] == {}
    # The reader of a step needs none of them.
    first.unlink()
    train(tmp_path, 3)
    assert stored(tmp_path) == {4: {}, 8: {"val_loss": 0.2}, 12: {"val_loss": 0.4}}


def test_a_manager_adds_metrics_to_what_it_saved_or_restored_last(tmp_path: Path) -> None:
    checkpoint = hf.Checkpoint(state={"updates": np.zeros(1)})
    events: list[Event] = []
    with hf.CheckpointManager(tmp_path, checkpoint, sinks=[events.append], keep=hf.Latest(1)) as manager:
        with pytest.raises(UsageError, match="step 1 is not the one"):
            manager.add_metrics(1, {"loss": 1.0})
        manager.save(1, metrics={"loss": 1.0, "rate": 0.1})
        manager.add_metrics(1, {"loss": 0.5})
        manager.add_metrics(1, {"score": 3, "nothing": float("nan")})
        with pytest.raises(UsageError, match="must be a number"):
            manager.add_metrics(1, {"loss": "low"})  # type: ignore[dict-item]
        manager.save(2)
    assert stored(tmp_path) == {2: {}}
    assert list(tmp_path.glob("step-*1.*")) == [], "nothing of it is left behind"
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        restored = manager.restore()
        assert restored is not None
        manager.add_metrics(2, {"loss": 0.5})
        manager.save(3).wait_committed()
        with pytest.raises(UsageError):
            manager.add_metrics(2, {"loss": 0.5})
    assert stored(tmp_path) == {2: {"loss": 0.5}, 3: {}}
    assert not any(isinstance(event, Failed) for event in events)
