"""Epoch jobs and backups on a disk that is really full, for one epoch and for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from epoch_jobs import make_job, totals_of
from holdfast.catalog import StoredRun
from holdfast.errors import SaveFailedError, StorageFullError
from holdfast.events import Event, Failed
from holdfast.jobs import Workspace
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage
from mounts import fill, mounted

NODES = ["trainer_0", "trainer_1"]
ROOM = ("-t", "tmpfs", "-o", "size=4m", "tmpfs")


def check_whole(place: Path) -> list[int]:
    """Makes sure that all checkpoints are whole, and nothing else lies there; gives their steps."""
    catalog = StoredRun(LocalStorage(place)).look()
    for name in catalog.committed:
        assert verify_data(LocalStorage(place), open_step(LocalStorage(place), name.directory, name)) == []
    assert {path.name for path in place.glob("step-*")} == {name.directory for name in catalog.committed}
    return [name.step for name in catalog.living]


def train(disk: Path, full_in: set[int], **options: Any) -> tuple[hf.JobRunner, list[float]]:
    """Runs the canonical job, on a disk that is full while these epochs are saved."""

    def make_room(workspace: Workspace) -> None:
        if workspace.node == NODES[0]:
            (disk / "filler").unlink(missing_ok=True)
            if workspace.epoch in full_in:
                fill(disk)

    job = make_job(NODES, before_epoch=make_room)
    job.init_group.add(lambda workspace: workspace.update(large=np.ones(60_000)), on=NODES, name="large")
    job.exit_group.add(lambda workspace: (disk / "filler").unlink(missing_ok=True), on=NODES[0], name="tidy up")
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(disk / "run", keep=hf.Latest(2)), **options)
    with hf.LocalSession(NODES) as session:
        runner.train(session)
        return runner, totals_of(session)


def test_job_continues_after_a_full_disk_in_one_epoch(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", *ROOM) as disk:
        runner, totals = train(disk, {2})
        assert totals == [145.0] * 2
        assert (runner.result.failed_epochs, runner.result.last_saved_epoch) == ((2,), 4)
        assert check_whole(disk / "run") == [3, 4]


def test_a_job_whose_disk_stays_full_ends_with_the_epoch_before(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", *ROOM) as disk:
        with pytest.raises(SaveFailedError) as raised:
            train(disk, {2, 3, 4}, failures_allowed=1)
        assert isinstance(raised.value.__cause__, StorageFullError)
        assert "2 saves in a row have failed; 1 are allowed" in raised.value.__notes__[0]
        (disk / "filler").unlink()
        runner, totals = train(disk, set())
        assert totals == [145.0] * 2
        assert runner.result.resumed_from == 1
        assert check_whole(disk / "run") == [3, 4]


def test_backups_go_on_when_there_is_room_again(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", *ROOM) as disk:
        weights = np.zeros(100_000)
        events: list[Event] = []
        state = hf.WorkerTrainingState(disk / "backup", hf.Checkpoint(weights=weights), sinks=[events.append])
        saved = []
        for epoch in range(6):
            weights += 1
            (disk / "filler").unlink(missing_ok=True)
            if epoch in (2, 3):
                fill(disk)
            state.back_up(epoch).wait_ended()
            assert state.saved is not None
            saved.append(state.saved.epoch)
        assert saved == [0, 1, 1, 1, 4, 5], "the older backup stays"
        assert sum(isinstance(event, Failed) and event.save_lost for event in events) == 2
        state.close()
        assert len(check_whole(disk / "backup")) == 2
        restored = np.zeros(100_000)
        with hf.WorkerTrainingState(disk / "backup", hf.Checkpoint(weights=restored)) as state:
            backup = state.restore()
            assert backup is not None
            assert backup.epoch == 5
            assert (restored == 6).all()
            assert state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=6) == 6
            fill(disk)
            with pytest.raises(StorageFullError):
                state.delete_backup()
            assert len(check_whole(disk / "backup")) == 2, "without room for the record of it nothing is removed"
            (disk / "filler").unlink()
            assert state.delete_backup()
        assert sorted(path.name for path in (disk / "backup").iterdir()) == ["events.jsonl", "generations"]
