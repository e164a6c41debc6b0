"""Checkpoints that have lost their manifests, by hand say: they are named, and their data is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import call, call_json, complaint
from holdfast.catalog import StoredRun
from holdfast.cli.exit_codes import ExitCode
from holdfast.cluster import Cluster
from holdfast.errors import NoWholeCheckpointError, StorageFullError, UsageError
from holdfast.events import Event, Failed, PassedOver, Retained, Warned
from holdfast.events.sinks import encode_event
from holdfast.format.records import make_base
from holdfast.storage import LocalStorage
from memory_engine import run_workers

THREE = "step-000000003.g0001"


def open_manager(place: Path, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(place, hf.Checkpoint(weights=np.zeros(100)), **options)


def save_steps(place: Path, *steps: int, **options: Any) -> None:
    with open_manager(place, **options) as manager:
        if not options:
            manager.restore()
        for step in steps:
            manager.save(step)


def remove_manifests(place: Path, steps: str = "*") -> None:
    for manifest in place.glob(f"step-{steps}/manifest.json"):
        manifest.unlink()


def make_old(place: Path) -> None:
    """Makes a run one of before the file `committed` was written."""
    for copy in place.glob("step-*/committed"):
        copy.unlink()


def warnings_of(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Warned))


def files_in(place: Path) -> list[Path]:
    return sorted(path for path in place.glob("step-*/*") if path.name != "committed")


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


@pytest.mark.parametrize("kept_by", ["the copy of the manifest", "the journal"])
def test_the_newest_one_is_passed_over_by_name_and_its_data_stays(tmp_path: Path, kept_by: str) -> None:
    save_steps(tmp_path, 1, 2, 3)
    if kept_by == "the journal":
        make_old(tmp_path)
    else:
        (tmp_path / "events.jsonl").unlink()
    remove_manifests(tmp_path, "*3.g0001")
    kept = list((tmp_path / THREE).iterdir())
    events: list[Event] = []
    with open_manager(tmp_path, sinks=[events.append]) as manager:
        with pytest.raises(NoWholeCheckpointError, match="step 3 was committed, and its manifest is gone"):
            manager.restore(3)
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 2
        (passed,) = (event for event in events if isinstance(event, PassedOver))
        assert (passed.step, passed.file) == (3, f"{THREE}/manifest.json")
        assert [damage.path for damage in restored.passed_over] == [passed.file]
        for step in (3, 4, 5):
            manager.save(step)
    assert "step 3 was committed, and its manifest is gone" in warnings_of(events)
    # Other jobs leave it alone too.
    save_steps(tmp_path, 6, keep=hf.Latest(1))
    save_steps(tmp_path, 7, begin_anew=True)
    assert set(kept) <= set((tmp_path / THREE).iterdir())


def test_one_in_the_middle_is_kept_and_retention_goes_on(tmp_path: Path) -> None:
    events: list[Event] = []
    with open_manager(tmp_path, keep=hf.Latest(2), sinks=[events.append]) as manager:
        manager.save(1)
        manager.save(2).wait_ended(60)
        remove_manifests(tmp_path, "*2.g0001")
        for step in (3, 4, 5):
            manager.save(step)
    assert "step 2 was committed" in warnings_of(events)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-00000000{step}.g0001" for step in (2, 4, 5)]
    with open_manager(tmp_path) as manager:
        restored = manager.restore()
        assert restored is not None
        assert (restored.step, restored.passed_over) == (5, ())


def test_steps_that_a_lost_step_refers_to_are_kept_and_restored(tmp_path: Path) -> None:
    arrays = {"frozen": np.full(50_000, 7.0), "trained": np.zeros(10)}

    def go_on(*steps: int, **options: Any) -> None:
        checkpoint = hf.Checkpoint(arrays=arrays)
        with hf.CheckpointManager(tmp_path, checkpoint, keep=hf.Latest(1), incremental=True, **options) as manager:
            manager.restore()
            for step in steps:
                arrays["trained"][:] = step
                arrays["frozen"][:] = 7 if step < 4 else 8
                manager.save(step)

    go_on(1, 2, 3)
    manifest = tmp_path / THREE / "manifest.json"
    written = manifest.read_bytes()
    manifest.unlink()
    go_on(4, begin_anew=True)
    go_on(5)
    assert (tmp_path / THREE / "committed").read_bytes() == written
    manifest.write_bytes(written)
    restored = hf.CheckpointManager(tmp_path, hf.Checkpoint(arrays=arrays)).restore(3)
    assert restored is not None
    assert (arrays["frozen"] == 7).all()
    assert (arrays["trained"] == 3).all()


def test_the_command_line_says_what_a_restore_says(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    remove_manifests(tmp_path, "*3.g0001")
    (tmp_path / "events.jsonl").unlink()
    listed = call("list", tmp_path)
    assert "1 step without a manifest (--all shows them)" in listed.stderr
    assert f"{THREE}/manifest.json is missing, but the step was committed" in listed.stderr
    states = {row.split()[6]: row.split()[2] for row in call("list", tmp_path, "--all").stdout.splitlines()}
    assert states[THREE] == "lost"
    assert [one["step"] for one in call_json("list", tmp_path)["lost"]] == [3]
    for verb in ("show", "verify"):
        code, said = complaint(verb, f"{tmp_path}@3")
        assert code == ExitCode.DAMAGED
        assert "step 3 was committed, and its manifest is gone" in said
    verified = call("verify", tmp_path)
    assert verified.exit_code == ExitCode.DAMAGED
    assert "is missing, but the step was committed" in verified.stdout
    pruned = call("prune", tmp_path, "--unfinished", "--job-is-dead", "--yes").stdout
    assert "there is nothing to remove" in pruned
    assert f"skipped: {THREE} was committed and lost its manifest" in pruned
    assert "`committed` in the step's directory is a copy of `manifest.json`" in pruned
    for named in ("3", THREE):
        code, said = complaint("prune", tmp_path, "--steps", named, "--yes")
        assert code == ExitCode.USAGE
        assert "step 3 was committed, and its manifest is gone; --steps does not remove such a step" in said
    assert "--unfinished or --lost" in complaint("prune", tmp_path)[1]
    code, said = complaint("show", tmp_path / THREE)
    assert code == ExitCode.DAMAGED
    assert "was committed, and its manifest is gone" in said
    assert (tmp_path / THREE / "committed").exists()
    assert call("prune", tmp_path, "--lost", "--yes").exit_code == ExitCode.OK
    assert not (tmp_path / THREE).exists()
    assert call("verify", tmp_path).exit_code == ExitCode.OK


def test_prune_asks_twice_before_it_removes_a_step_in_the_journal(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    middle = tmp_path / "step-000000002.g0001"
    for name in ("manifest.json", "committed"):
        (middle / name).unlink()
    pruned = call("prune", tmp_path, "--unfinished", "--job-is-dead", "--yes").stdout
    assert f"skipped: {middle.name} was committed and lost its manifest" in pruned
    assert any(middle.iterdir())
    assert [one["step"] for one in call_json("list", tmp_path)["lost"]] == [2]
    # A removal of holdfast's that was cut off has left it, if the journal names it as removed.
    journal = tmp_path / "events.jsonl"
    lines = journal.read_bytes()
    journal.write_bytes(lines + encode_event(Retained({}, (2,))) + b"\n")
    assert [one["step"] for one in call_json("list", tmp_path, "--all")["unfinished"]] == [2]
    journal.write_bytes(lines)
    assert call("prune", tmp_path, "--lost", "--yes").exit_code == ExitCode.OK
    assert not middle.exists()


def test_cli_names_lost_steps_beside_those_of_an_earlier_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1)
    save_steps(run, 5, begin_anew=True)
    remove_manifests(run, "*5.g0002")
    with open_manager(run) as manager, pytest.raises(NoWholeCheckpointError, match="step 5 was committed"):
        manager.restore()
    for verb in ("list", "show", "verify"):
        code, said = complaint(verb, run)
        assert code == ExitCode.DAMAGED
        assert "step 5 was committed, and its manifest is gone" in said
    assert complaint("export", run, tmp_path / "out", "--to", "torch")[0] == ExitCode.DAMAGED


@pytest.mark.parametrize("options", [{"begin_anew": True}, {"incremental": True}])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_run_that_begins_without_them_says_so_and_leaves_them(
    tmp_path: Path, options: dict[str, Any], is_old: bool
) -> None:
    save_steps(tmp_path, 7)
    remove_manifests(tmp_path)
    if is_old:
        make_old(tmp_path)
    before = files_in(tmp_path)
    events: list[Event] = []
    # Nobody asks what there is: with `begin_anew`, or since `restore` is not called.
    save_steps(tmp_path, 1, 2, sinks=[events.append], **options)
    assert set(before) < set(files_in(tmp_path)), "nothing is swept"
    assert "step 7 was committed, and its manifest is gone; the data files are still there" in warnings_of(events)
    save_steps(tmp_path, 3)
    assert set(before) < set(files_in(tmp_path)), "by a later start neither"


def test_generation_that_began_from_a_lost_step_says_so_without_a_journal(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    save_steps(tmp_path, 2)
    make_old(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    remove_manifests(tmp_path)
    storage = LocalStorage(tmp_path)
    assert [name.step for name in StoredRun(storage).find_lost(StoredRun(storage).look())] == [1]
    (tmp_path / "events.jsonl").write_bytes(b'not an event\n{"type": "Committed"}\n{"kind":"committed"\n\xff')
    assert [name.step for name in StoredRun(storage).find_lost(StoredRun(storage).look())] == [1], (
        "what is damaged tells nothing"
    )


def test_an_unfinished_save_is_none_of_them(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    # A save that was killed before its commit.
    make_old(tmp_path)
    remove_manifests(tmp_path, "*2.g0001")
    (tmp_path / "events.jsonl").unlink()
    with open_manager(tmp_path) as manager:
        restored = manager.restore()
        assert restored is not None
        assert (restored.step, restored.passed_over) == (1, ())
        manager.save(3)
    assert [int(path.name[5:14]) for path in sorted(tmp_path.glob("step-*"))] == [1, 3]


def test_what_was_removed_on_purpose_is_none_of_them(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    storage = LocalStorage(tmp_path)
    # A program that was killed while it deleted its backup leaves this.
    StoredRun(storage).record_base(make_base(StoredRun(storage).open_generation(), None))
    remove_manifests(tmp_path)
    with open_manager(tmp_path) as manager:
        assert manager.restore() is None


def test_a_backup_that_has_lost_its_manifest_is_not_begun_without(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(weights=np.zeros(3))) as state:
        state.back_up(0)
    remove_manifests(tmp_path)
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(weights=np.zeros(3))) as state:
        with pytest.raises(NoWholeCheckpointError, match="step 1 was committed"):
            state.restore()


def test_all_workers_raise_the_same_error(tmp_path: Path) -> None:
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


def test_backup_without_a_manifest_is_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        state.back_up(0)
    remove_manifests(tmp_path)
    kept = files_in(tmp_path)
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        with pytest.raises(NoWholeCheckpointError):
            state.restore()
        assert not state.delete_backup()
        with pytest.raises(UsageError, match="not restored"):
            state.back_up(0)
    assert files_in(tmp_path) == kept


def test_older_backup_is_restored_if_the_newer_lost_its_manifest(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        state.back_up(0)
        state.back_up(1)
    remove_manifests(tmp_path, "*2.g0001")
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        backup = state.restore()
        assert backup is not None
        assert backup.epoch == 0
        state.back_up(1)
        assert state.delete_backup()
    assert files_in(tmp_path) == []
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        assert state.restore() is None


def test_all_workers_pass_over_the_same_one_and_it_stays(tmp_path: Path) -> None:
    def go_on(cluster: Cluster) -> tuple[int, ...]:
        with open_manager(tmp_path, cluster=cluster, keep=hf.Latest(2)) as manager:
            restored = manager.restore()
            begun = 0 if restored is None else restored.step
            for step in range(begun + 1, 4):
                manager.save(step)
            return begun, *([] if restored is None else [len(restored.passed_over)])

    assert run_workers(2, go_on) == [(0,)] * 2
    remove_manifests(tmp_path, "*3.g0001")
    kept = sorted((tmp_path / THREE).iterdir())
    assert run_workers(2, go_on) == [(2, 1)] * 2
    assert sorted((tmp_path / THREE).iterdir()) == kept
    assert (tmp_path / "step-000000003.g0002" / "manifest.json").exists()


def test_copies_that_are_gone_or_damaged_are_named_and_written_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 2, 3)
    copies = sorted(run.glob("step-*/committed"))
    whole = [copy.read_bytes() for copy in copies]
    copies[0].unlink()
    copies[1].write_bytes(whole[1][:-7])
    document = call_json("verify", run, "--all")
    assert document["is_whole"]
    assert [step["has_copy"] for step in document["steps"]] == [False, False, True]
    assert call("verify", run, "--all").stdout.count("committed, the copy of its manifest, is missing or damaged") == 2
    save_steps(run, 4)
    assert [copy.read_bytes() for copy in copies] == whole
    assert all(step["has_copy"] for step in call_json("verify", run, "--all")["steps"])


def test_a_copy_that_found_no_room_ends_no_training_and_is_tried_again(tmp_path: Path) -> None:
    class Tight(LocalStorage):
        full = True

        def write(self, path: str, data: bytes) -> None:
            if self.full and path == "step-000000002.g0001/committed":
                raise StorageFullError("no room", path=path)
            super().write(path, data)

    storage, events = Tight(tmp_path), list[Event]()
    with hf.CheckpointManager(storage, hf.Checkpoint(weights=np.zeros(100)), sinks=[events.append]) as manager:
        for step in (1, 2, 3):
            manager.save(step)
        manager.wait()
        assert not (tmp_path / "step-000000002.g0001" / "committed").exists()
        storage.full = False
        manager.save(4)
    assert len(list(tmp_path.glob("step-*/committed"))) == 4
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.stage, failed.step, failed.save_lost) == ("retain", 2, False)
