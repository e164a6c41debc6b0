"""`WorkerTrainingState`: epoch and state are one, nothing is lost, and nothing of a user's is removed."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from command_line import run_file
from faulty import FullStorage
from holdfast.catalog import StoredRun
from holdfast.errors import (
    FencedError,
    MismatchError,
    NoWholeCheckpointError,
    SaveFailedError,
    UsageError,
)
from holdfast.events import Event, Failed, Warned
from holdfast.storage import LocalStorage
from patience import read_line
from places import PROGRAMS
from whole_runs import steps_of


def state_in(place: Any, weights: np.ndarray[Any, Any] | None = None, **options: Any) -> hf.WorkerTrainingState:
    weights = np.zeros(10) if weights is None else weights
    return hf.WorkerTrainingState(place, hf.Checkpoint(weights=weights), **options)


def train(place: Any, epochs: int, *, fail_in: int | None = None, **options: Any) -> tuple[list[int], list[float]]:
    """Trains weights that count the epochs; gives the epochs that were trained, and the weights."""
    weights = np.zeros(10)
    trained = []
    with state_in(place, weights, **options) as state:
        state.restore()
        for epoch in range(state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=epochs), epochs):
            assert weights.tolist() == [epoch] * 10
            weights += 1
            if epoch == fail_in:
                raise ZeroDivisionError
            trained.append(epoch)
            state.back_up(epoch)
        state.delete_backup()
    return trained, weights.tolist()


def test_a_training_that_failed_goes_on_with_the_epoch_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 6, fail_in=3)
    assert train(tmp_path, 6) == ([3, 4, 5], [6.0] * 10)
    assert train(tmp_path, 2) == ([0, 1], [2.0] * 10), "a training that ended is not gone on with"


def test_two_backups_are_kept_and_none_at_the_end(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        assert list(tmp_path.iterdir()) == [], "nothing is made before the first backup"
        for epoch in range(5):
            state.back_up(epoch).wait_ended()
        assert steps_of(tmp_path) == [4, 5]
        assert state.delete_backup()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "generations"]
        assert len(list((tmp_path / "generations").iterdir())) == 2
        assert state.delete_backup(), "harmless twice"
        assert state.saved is None
    assert state_in(tmp_path).restore() is None


def test_nothing_of_a_users_own_is_removed(tmp_path: Path) -> None:
    theirs = [tmp_path / "notes.txt", tmp_path / "workertemp_1" / "deep" / "file", tmp_path / "generations" / "mine"]
    with state_in(tmp_path) as state:
        for epoch in range(2):
            state.back_up(epoch).wait_committed()
        theirs.append(next(tmp_path.glob("step-*")) / "thesis.tex")
        for path in theirs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("years of work")
        state.delete_backup()
        assert state_in(tmp_path).restore() is None
        state.delete_backup()
    assert [path.read_text() for path in theirs] == ["years of work"] * 4


def test_restore_distinguishes_no_backup_from_a_damaged_one(tmp_path: Path) -> None:
    weights = np.zeros(10)
    assert state_in(tmp_path, weights).restore() is None
    with state_in(tmp_path, np.full(10, 7.0)) as state:
        state.back_up(4).wait_committed()
        state.back_up(5).wait_committed()
    backup = state_in(tmp_path, weights).restore()
    assert backup is not None
    assert (backup.epoch, backup.batch, backup.next_epoch) == (5, None, 6)
    assert weights.tolist() == [7.0] * 10
    for number, data in enumerate(sorted(tmp_path.glob("step-*/data-*"), reverse=True)):
        data.write_bytes(data.read_bytes()[:-8] + b"\xff" * 8)
        if number == 0:
            older = state_in(tmp_path).restore()
            assert older is not None
            assert older.restoration is not None
            assert (older.epoch, len(older.restoration.passed_over)) == (4, 1)
    state = state_in(tmp_path)
    with pytest.raises(NoWholeCheckpointError):
        state.restore()
    with pytest.raises(UsageError, match="not restored"):
        state.back_up(0)
    assert state_in(tmp_path, begin_anew=True).restore() is None
    with pytest.raises(MismatchError):
        hf.WorkerTrainingState(tmp_path, hf.Checkpoint(other=np.zeros(10))).restore()


def test_the_initial_epoch_is_a_plain_number(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        assert state.maybe_load_initial_epoch_from_ckpt(2, "train") == 2
        state.back_up(np.int64(7))  # type: ignore[arg-type]
        first = state.maybe_load_initial_epoch_from_ckpt(2, "train")
        assert (first, type(first)) == (8, int)
        assert state.maybe_load_initial_epoch_from_ckpt(2, "test") == 2
        assert state.maybe_load_initial_epoch_from_ckpt(2, "predict") == 2
    with state_in(tmp_path) as again:
        assert again.maybe_load_initial_epoch_from_ckpt(0, "test") == 0
        with pytest.raises(UsageError, match="restore"):
            again.maybe_load_initial_epoch_from_ckpt(0, "train")
        again.restore()
        assert again.maybe_load_initial_epoch_from_ckpt(0, "train") == 8


def test_a_backup_that_beats_the_initial_epoch_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    with state_in(tmp_path, sinks=[events.append]) as state:
        state.back_up(2)
        assert state.maybe_load_initial_epoch_from_ckpt(1, "train") == 3
    assert any("instead of 1" in event.text for event in events if isinstance(event, Warned))


def test_backup_of_a_later_epoch_is_warned_of_and_kept(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        state.back_up(7)
    events: list[Event] = []
    trained, _ = train(tmp_path, 4, sinks=[events.append])
    assert trained == []
    texts = [event.text for event in events if isinstance(event, Warned)]
    assert any("epoch 7" in text and "4 epochs" in text for text in texts)
    assert steps_of(tmp_path) == [1]
    assert train(tmp_path, 8)[0] == [], "the last epoch is complete: nothing is trained, and the backup goes"
    assert steps_of(tmp_path) == []


def fit(place: Path, epochs: int, *ending: str) -> tuple[str, str]:
    """A fit in the form in which Keras writes it, in a process of its own; what it prints, and what is in the log."""
    ran = run_file("backups", "fit", place, str(epochs), *ending)
    assert ran.returncode == (9 if "dies" in ending else 0), ran.stderr
    return ran.stdout.strip(), ran.stderr


def test_a_death_after_the_last_backup_leaves_one_fit_that_trains_nothing(tmp_path: Path) -> None:
    assert fit(tmp_path, 3, "dies") == ("", "")
    # It says so where it does not delete the backup either.
    printed, log = fit(tmp_path, 3)
    assert printed == "[] 3"
    assert "no backup was made after that of epoch 2" in log
    printed, log = fit(tmp_path, 3, "deletes")
    assert printed == "True [] 3"
    assert "no epoch was trained: the backup of epoch 2 was the last one of an earlier run" in log
    # Not even then is anything lost, since that run might have had more epochs: the files stay until the next end.
    assert len(StoredRun(LocalStorage(tmp_path)).look().committed) == 2
    assert fit(tmp_path, 3, "deletes")[0] == "True [0, 1, 2] 3"
    assert StoredRun(LocalStorage(tmp_path)).look().committed == ()
    assert fit(tmp_path, 3, "deletes") == ("True [0, 1, 2] 3", "")


def test_training_state_may_start_over_after_deleting_its_backup(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        state.back_up(7)
    with state_in(tmp_path) as state:
        state.restore()
        assert state.delete_backup()
        assert steps_of(tmp_path) == []
        # The same object may begin anew.
        assert state.maybe_load_initial_epoch_from_ckpt(0, "train") == 0
        state.back_up(0)
        assert state.delete_backup()
    assert list(tmp_path.glob("step-*")) == []


def test_a_full_disk_ends_no_training_and_the_older_backup_stays() -> None:
    storage = FullStorage()
    storage.is_full = False
    events: list[Event] = []
    weights = np.zeros(10)
    state = state_in(storage, weights, sinks=[events.append])
    state.back_up(0).wait_committed()
    storage.is_full = True
    for epoch in range(1, 5):
        weights += 1
        state.back_up(epoch).wait_ended()
    assert sum(isinstance(event, Failed) for event in events) == 4
    assert state.saved is not None
    assert state.saved.epoch == 0, "an epoch counts as saved when it is"
    with pytest.raises(SaveFailedError):
        state.close()
    restored = np.ones(10)
    backup = state_in(storage, restored).restore()
    assert backup is not None
    assert (backup.epoch, restored.tolist()) == (0, [0.0] * 10)


def test_failures_are_counted_if_that_is_asked_for() -> None:
    storage = FullStorage()
    state = state_in(storage, failures_allowed=1)
    state.back_up(0).wait_ended()
    state.back_up(1).wait_ended()
    storage.is_full = False
    with pytest.raises(SaveFailedError) as raised:
        state.back_up(2)
    raised.value.next_save.wait_committed()
    assert state.saved is not None
    assert state.saved.epoch == 2
    state.delete_backup()


def test_backups_that_all_failed_can_be_deleted() -> None:
    state = state_in(FullStorage())
    state.back_up(0).wait_ended()
    assert state.delete_backup()
    state.close()


def train_batches(place: Path, stop_at: int | None = None) -> list[tuple[int, int, list[int]]]:
    """Trains epochs of four batches, with a backup after each batch; gives what it saw."""
    sampler = hf.ResumableSampler(10, batch_size=3, seed=5)
    seen: list[tuple[int, int, list[int]]] = []
    with hf.WorkerTrainingState(place, hf.Checkpoint(sampler=sampler, rng=hf.RNG())) as state:
        state.restore()
        first, done = state.maybe_load_initial_counters_from_ckpt(len(sampler), 0, "train")
        for epoch in range(first, 3):
            sampler.set_epoch(epoch)
            for batch, indices in enumerate(sampler.batches(sampler), done):
                seen.append((epoch, batch, [*indices, random.randrange(1000)]))
                state.back_up(epoch, batch).wait_committed()
                if len(seen) == stop_at:
                    return seen
            done = 0
            state.back_up(epoch)
    return seen


def test_a_backup_within_an_epoch_is_exact_with_the_data(tmp_path: Path) -> None:
    random.seed(1)
    untouched = train_batches(tmp_path / "untouched")
    assert len(untouched) == 12
    for stop_at in range(1, 12):
        random.seed(1)
        place = tmp_path / str(stop_at)
        before = train_batches(place, stop_at)
        random.seed(99)
        assert before + train_batches(place) == untouched


def test_a_backup_within_an_epoch_is_exact_with_a_loader_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def train(place: Path, stop_at: int | None = None) -> list[list[int]]:
        loader = hf.ResumableDataLoader(list(range(10)), batch_size=3, seed=5)
        seen: list[list[int]] = []
        with hf.WorkerTrainingState(place, hf.Checkpoint(loader=loader)) as state:
            state.restore()
            first, done = state.maybe_load_initial_counters_from_ckpt(4, 0, "train", epochs=2)
            for epoch in range(first, 2):
                loader.set_epoch(epoch)
                for batch, rows in enumerate(loader, done):
                    seen.append(rows.tolist())
                    state.back_up(epoch, batch).wait_committed()
                    if len(seen) == stop_at:
                        return seen
                done = 0
        return seen

    untouched = train(tmp_path / "untouched")
    assert sorted(chain(*untouched[:4])) == sorted(chain(*untouched[4:])) == list(range(10))
    for stop_at in (1, 3, 4, 6):
        assert train(tmp_path / str(stop_at), stop_at) + train(tmp_path / str(stop_at)) == untouched


def test_a_backup_at_the_last_batch_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        state.back_up(2, batch=3)
        assert state.maybe_load_initial_counters_from_ckpt(4, 0, "train") == (3, 0)
        assert state.maybe_load_initial_counters_from_ckpt(5, 0, "train") == (2, 4)
        assert state.maybe_load_initial_counters_from_ckpt(5, 1, "test") == (1, 0)
        assert state.maybe_load_initial_epoch_from_ckpt(0, "train") == 2


def test_another_job_that_backs_up_there_keeps_its_backup(tmp_path: Path) -> None:
    with state_in(tmp_path) as state:
        state.back_up(0).wait_committed()
        assert run_file("backups", "back up epoch 9", tmp_path).returncode == 0
        with pytest.raises(FencedError, match="Another job"):
            state.delete_backup()
    backup = state_in(tmp_path).restore()
    assert backup is not None
    assert backup.epoch == 9


def test_a_writer_that_is_late_brings_no_backup_back(tmp_path: Path) -> None:
    late = state_in(tmp_path)
    late.back_up(0).wait_committed()
    with state_in(tmp_path) as state:
        state.restore()
        state.back_up(1)
        state.delete_backup()
    with pytest.raises(SaveFailedError) as raised:
        late.back_up(2).wait_committed()
    assert isinstance(raised.value.__cause__, FencedError)
    late.close()
    assert state_in(tmp_path).restore() is None


def test_wrong_calls_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    for epoch, batch in ((-1, None), (True, None), ("1", None), (1, -1), (1.0, None)):
        with pytest.raises(UsageError):
            state.back_up(epoch, batch)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="mode"):
        state.maybe_load_initial_epoch_from_ckpt(0, "fit")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="initial_epoch"):
        state.maybe_load_initial_epoch_from_ckpt(-1, "train")
    for directory in ("", None):
        with pytest.raises(UsageError):
            hf.WorkerTrainingState(directory, hf.Checkpoint())  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        hf.WorkerTrainingState(tmp_path, {"model": 1})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(weights=np.ones(10))) as manager:
        manager.save(1)
    weights = np.zeros(10)
    with pytest.raises(UsageError, match="not a backup"):
        state_in(tmp_path, weights).restore()
    assert weights.tolist() == [0.0] * 10


def test_kills_at_any_moment_part_no_epoch_from_its_state(tmp_path: Path) -> None:
    moments = random.Random(3)
    starts = []
    for kill in [*range(10), None]:
        command: list[str | Path] = [sys.executable, PROGRAMS / "backups.py", "count epochs", tmp_path]
        program = preloaded.Popen(command, stdout=subprocess.PIPE, text=True)
        first = read_line(program)
        assert first, "the state did not fit the epoch"
        starts.append(int(first))
        if kill is not None:
            for _ in range(moments.randrange(1, 7)):
                read_line(program)
            with suppress(subprocess.TimeoutExpired):
                program.wait(moments.uniform(0.0, 0.01))
            program.kill()
        rest, _ = program.communicate(timeout=120)
    assert rest.splitlines()[-1] == "done True"
    assert starts == sorted(starts)
    assert len(set(starts)) > 2
    assert steps_of(tmp_path) == []


def test_a_backup_that_was_not_restored_is_not_deleted(tmp_path: Path) -> None:
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        state.back_up(0)
    with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(w=np.zeros(3))) as state:
        assert not state.delete_backup()
        assert state.restore()
        state.back_up(1)
        assert state.delete_backup()


def ask_to_leave(place: Path, way: str) -> tuple[int, str, str]:
    ran = run_file("backups", "leave when asked", place, way)
    return ran.returncode, ran.stdout.strip(), ran.stderr


def test_a_job_that_is_asked_to_leave_ends_the_backup_in_flight(tmp_path: Path) -> None:
    code, printed, log = ask_to_leave(tmp_path, "first")
    assert (code, printed) == (42, "0 0 0"), log
    assert "no epoch is saved yet, and the one in progress will be trained again; leaving" in log
    code, printed, log = ask_to_leave(tmp_path, "epochs")
    assert (code, printed) == (42, "0 0 0"), log
    assert "the backup of epoch 1 is saved; leaving with exit code 42" in log
    code, printed, log = ask_to_leave(tmp_path, "epochs")
    assert (code, printed) == (0, "2 0 20"), log


def test_a_job_that_is_asked_to_leave_within_an_epoch_keeps_the_batch(tmp_path: Path) -> None:
    code, printed, log = ask_to_leave(tmp_path, "batches")
    assert (code, printed) == (42, "0 0 0"), log
    assert "the backup of epoch 1, batch 4 is saved; leaving" in log
    # Of each epoch the 3rd, 6th and 9th batch, all of it, and the one at which the job was asked; two are kept.
    assert steps_of(tmp_path / "backup") == [14, 16]
    code, printed, log = ask_to_leave(tmp_path, "batches")
    assert (code, printed) == (42, "1 5 15"), log
    assert "the backup of epoch 1, batch 8 is saved; leaving" in log
    assert ask_to_leave(tmp_path, "epochs")[1] == "1 9 19"


def test_a_handler_beside_it_leaves_and_other_signals_are_as_ever(tmp_path: Path) -> None:
    # A handler of steps saves and leaves, at the end of its step.
    code, _, log = ask_to_leave(tmp_path / "1", "beside")
    assert code == 42, log
    assert "step 1 is saved; leaving" in log
    assert "the backup of" not in log
    # Ctrl-C is what it always was.
    code, _, log = ask_to_leave(tmp_path / "2", "ctrl-c")
    assert "KeyboardInterrupt" in log
    assert code == -signal.SIGINT, log
    # With the end of the training, a signal has the effect that it always had.
    assert ask_to_leave(tmp_path / "3", "over")[0] == -signal.SIGTERM


def test_swapped_arguments_are_refused_with_the_right_order(tmp_path: Path) -> None:
    makers: list[Any] = [hf.WorkerTrainingState, hf.CheckpointManager]
    for make in makers:
        with pytest.raises(UsageError, match="takes the directory first") as caught:
            make(hf.Checkpoint(x=1), tmp_path)
        assert f"Write {make.__name__}(directory, checkpoint)" in caught.value.hint
    for frequency in (0, -1, 1.5, True, "batch"):
        with pytest.raises(UsageError, match="save_freq"):
            state_in(tmp_path, save_freq=frequency)


def test_an_epoch_before_the_restored_one_is_refused(tmp_path: Path) -> None:
    for life in range(2):
        with hf.WorkerTrainingState(tmp_path / "backup", hf.Checkpoint(values=np.zeros(3))) as state:
            state.restore()
            if life == 1:
                with pytest.raises(UsageError, match="epoch 1 was restored, and epoch 0 is not after it"):
                    state.back_up(0)
            first = state.maybe_load_initial_epoch_from_ckpt(0, "train")
            for epoch in range(first, first + 2):
                state.back_up(epoch)
    assert first == 2


def test_training_that_backs_nothing_up_is_warned_of_meanwhile_and_at_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")

    def fit(*, backs_up: bool = False, deletes: bool = False, error: type[BaseException] | None = None) -> Any:
        sampler = hf.ResumableSampler(8, batch_size=4)
        caplog.clear()
        kept = hf.Checkpoint(sampler=sampler)
        with suppress(KeyboardInterrupt, ZeroDivisionError), hf.WorkerTrainingState(tmp_path, kept) as state:
            state.restore()
            for epoch in range(state.maybe_load_initial_epoch_from_ckpt(0, "train"), 4):
                list(sampler.batches(sampler))
                if backs_up:
                    state.back_up(epoch)
            if error is not None:
                raise error
            if deletes:
                state.delete_backup()
        return [
            (record.levelname, record.getMessage().partition(": ")[2])
            for record in caplog.records
            if record.name == "holdfast" and (record.levelno > logging.INFO or " is complete" in record.getMessage())
        ]

    early = "5 batches were taken from sampler, but no epoch was backed up, so nothing was saved yet"
    whole = "8 batches were taken from sampler, but no epoch was backed up, so "
    advice = ": call back_up(epoch) after each epoch"
    while_it_runs = ("WARNING", f"{early}{advice}. If your next backup is yet to come, ignore this")
    at_its_end = ("ERROR", f"{whole}nothing was saved{advice}")
    assert fit() == [while_it_runs, at_its_end]
    assert fit(error=KeyboardInterrupt) == [while_it_runs, at_its_end]
    assert fit(error=ZeroDivisionError) == [while_it_runs]
    assert fit(deletes=True) == [
        while_it_runs,
        ("WARNING", f"{whole}a restart would have started from the beginning{advice}"),
        ("INFO", "training is complete, and no backup of it was made"),
    ]
    assert fit(backs_up=True, deletes=True) == [("INFO", "training is complete, and its backup is deleted")]


@pytest.mark.parametrize("is_trained", [False, True])
def test_training_that_only_restores_is_warned_of_at_its_end(tmp_path: Path, is_trained: bool) -> None:
    torch = pytest.importorskip("torch")
    model, sampler = torch.nn.Linear(2, 1), hf.ResumableSampler(40, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    events: list[Event] = []
    kept = hf.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    with hf.WorkerTrainingState(tmp_path, kept, sinks=[events.append]) as state:
        state.restore()
        for _ in sampler.batches(sampler):
            loss = model(torch.ones(1, 2)).sum()
            if is_trained:
                loss.backward()
                optimizer.step()
    told = [(event.text, event.is_error) for event in events if isinstance(event, Warned)]
    assert len(told) == is_trained, told
    if is_trained:
        assert "but no epoch was backed up, so nothing was saved: call back_up(epoch)" in told[0][0]
        assert told[0][1]
