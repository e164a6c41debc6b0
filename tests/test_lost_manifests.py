"""Runs whose checkpoints have all lost their manifests, by hand say: they are no runs that have not begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import find_lost, open_generation, read_catalog, record_base
from holdfast.cluster import Cluster
from holdfast.errors import NoWholeCheckpointError, UsageError
from holdfast.events import Event, Warned
from holdfast.format.generation import make_base
from holdfast.storage import LocalStorage
from holdfast.testing.memory_engine import run_workers


def open_manager(place: Path, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(place, hf.Checkpoint(weights=np.zeros(100)), **options)


def save_steps(place: Path, *steps: int, **options: Any) -> None:
    with open_manager(place, **options) as manager:
        if not options:
            manager.restore()
        for step in steps:
            manager.save(step)


def remove_manifests(place: Path) -> None:
    for manifest in place.glob("step-*/manifest.json"):
        manifest.unlink()


def files_in(place: Path) -> list[Path]:
    return sorted(place.glob("step-*/*"))


def test_they_are_not_restored_as_if_there_were_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    remove_manifests(tmp_path)
    with open_manager(tmp_path) as manager:
        with pytest.raises(
            NoWholeCheckpointError, match="steps 1, 2 were committed, and their manifests are gone"
        ) as raised:
            manager.restore()
        assert [damage.path for damage in raised.value.damages] == [
            "step-000000001.g0001/manifest.json",
            "step-000000002.g0001/manifest.json",
        ]
        with pytest.raises(NoWholeCheckpointError), hf.resumable(tmp_path, weights=np.zeros(100)):
            pass


@pytest.mark.parametrize("options", [{"begin_anew": True}, {"incremental": True}])
def test_a_run_that_begins_without_them_says_so_and_leaves_them(tmp_path: Path, options: dict[str, Any]) -> None:
    save_steps(tmp_path, 7)
    remove_manifests(tmp_path)
    before = files_in(tmp_path)
    events: list[Event] = []
    # Nobody asks what there is: with `begin_anew`, or since `restore` is not called.
    save_steps(tmp_path, 1, 2, sinks=[events.append], **options)
    assert set(before) < set(files_in(tmp_path)), "nothing is swept"
    (warned,) = [event.text for event in events if isinstance(event, Warned)]
    assert "step 7 was committed, and its manifest is gone; the data files are still there" in warned
    save_steps(tmp_path, 3)
    assert not set(before) & set(files_in(tmp_path)), "by a later start it is"


def test_a_generation_that_began_from_one_tells_of_it_where_there_is_no_journal(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    save_steps(tmp_path, 2)
    (tmp_path / "events.jsonl").unlink()
    remove_manifests(tmp_path)
    storage = LocalStorage(tmp_path)
    assert [name.step for name in find_lost(storage, read_catalog(storage))] == [1]
    (tmp_path / "events.jsonl").write_bytes(b'not an event\n{"type": "Committed"}\n\xff')
    assert [name.step for name in find_lost(storage, read_catalog(storage))] == [1], "what is damaged tells nothing"


def test_an_unfinished_first_save_is_none_of_them(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    remove_manifests(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    with open_manager(tmp_path) as manager:
        assert manager.restore() is None
        manager.save(1)
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_what_was_removed_on_purpose_is_none_of_them(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    storage = LocalStorage(tmp_path)
    # A program that was killed while it deleted its backup leaves this.
    record_base(storage, make_base(open_generation(storage), None))
    remove_manifests(tmp_path)
    with open_manager(tmp_path) as manager:
        assert manager.restore() is None


def test_a_backup_that_has_lost_its_manifest_is_not_begun_without(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(hf.Checkpoint(weights=np.zeros(3)), tmp_path) as state:
        state.back_up(0)
    remove_manifests(tmp_path)
    with hf.WorkerTrainingState(hf.Checkpoint(weights=np.zeros(3)), tmp_path) as state:
        with pytest.raises(NoWholeCheckpointError, match="step 1 was committed"):
            state.restore()


def test_all_workers_are_told_alike(tmp_path: Path) -> None:
    def begin(cluster: Cluster) -> Exception | None:
        with open_manager(tmp_path, cluster=cluster) as manager:
            try:
                manager.restore()
            except NoWholeCheckpointError as error:
                return error
            manager.save(1)
            return None

    assert run_workers(2, begin) == [None] * 2
    remove_manifests(tmp_path)
    for error in run_workers(2, begin):
        assert isinstance(error, NoWholeCheckpointError)
        assert "step 1 was committed" in error.message


def test_a_backup_that_has_lost_its_manifest_is_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(hf.Checkpoint(w=np.zeros(3)), tmp_path) as state:
        state.back_up(0)
    remove_manifests(tmp_path)
    kept = files_in(tmp_path)
    with hf.WorkerTrainingState(hf.Checkpoint(w=np.zeros(3)), tmp_path) as state:
        with pytest.raises(NoWholeCheckpointError):
            state.restore()
        assert not state.delete_backup()
        with pytest.raises(UsageError, match="not restored"):
            state.back_up(0)
    assert files_in(tmp_path) == kept
