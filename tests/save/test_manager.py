"""The manager: what `save`, `restore`, `wait` and `close` promise, on a real disk and with NumPy state."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast as hf
from command_line import flip_bit
from faulty import FullStorage
from holdfast.catalog import StoredRun
from holdfast.errors import (
    ClosedError,
    DamageError,
    DeadlineError,
    FencedError,
    MismatchError,
    NoCheckpointError,
    NoWholeCheckpointError,
    SaveFailedError,
    StepExistsError,
    StorageError,
    StorageFullError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.events import Committed, Event, Failed, GenerationOpened, PassedOver, Retained, Skipped
from holdfast.format.names import StepName
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage.memory import MemoryWriter
from patience import PATIENCE_SECONDS


def make_objects(value: float = 0.0) -> dict[str, Any]:
    return {
        "weights": {"a": np.full((300, 100), float(value)), "b": np.full(7, value, np.float32)},
        "counter": {"seen": int(value), "names": ["x", ("y", None)]},
    }


def manager_of(place: Any, objects: dict[str, Any] | None = None, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(place, hf.Checkpoint(**(objects or make_objects())), **options)


def save_steps(place: Any, *steps: int, **options: Any) -> None:
    objects = make_objects()
    with manager_of(place, objects, **options) as manager:
        manager.restore()
        for step in steps:
            set_value(objects, step)
            manager.save(step)


def set_value(objects: dict[str, Any], value: float) -> None:
    for array in objects["weights"].values():
        array[...] = value
    objects["counter"]["seen"] = int(value)


def data_file(run: Path, step: int, generation: int = 1) -> Path:
    return run / StepName(step, generation).directory / "data-00000-of-00001.safetensors"


class HeldStorage(MemoryStorage):
    """A storage whose files are not finished before the test says so."""

    def __init__(self) -> None:
        super().__init__("held")
        self.go_on = threading.Event()

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        assert self.go_on.wait(60)
        return super().create(path, size_bytes)


def test_state_comes_back_in_place(tmp_path: Path) -> None:
    objects = make_objects(3)
    array = objects["weights"]["a"]
    with manager_of(tmp_path / "run", objects) as manager:
        handle = manager.save(5, metrics={"loss": 0.5, "bad": float("nan")}, metadata={"note": "x"})
        handle.wait_staged(60)
        set_value(objects, 99)
        assert Path(handle.wait_committed(60)) == tmp_path / "run" / "step-000000005.g0001"
        assert handle.committed
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 5
    assert restored.manifest.metrics == {"loss": 0.5}
    assert restored.manifest.metadata == {"note": "x"}
    assert objects["weights"]["a"] is array
    np.testing.assert_array_equal(array, np.full((300, 100), 3.0))
    assert objects["counter"] == {"seen": 3, "names": ["x", ("y", None)]}


def test_saved_values_are_those_of_the_call_despite_later_changes(tmp_path: Path) -> None:
    objects = make_objects(1)
    storage = HeldStorage()
    with manager_of(storage, objects) as manager:
        manager.save(1)
        set_value(objects, 2)
        objects["counter"]["names"].append("late")
        storage.go_on.set()
        manager.wait(60)
        manager.restore()
    assert objects["weights"]["b"].tolist() == [1.0] * 7
    assert objects["counter"] == {"seen": 1, "names": ["x", ("y", None)]}


def test_objects_added_later_are_in_the_next_save(tmp_path: Path) -> None:
    checkpoint = hf.Checkpoint(a=np.ones(3))
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        manager.save(1)
        checkpoint["late"] = np.arange(4)
        manager.save(2)
        checkpoint["late"][:] = 0
        manager.restore()
    assert checkpoint["late"].tolist() == [0, 1, 2, 3]


def test_any_safetensors_reader_opens_the_data(tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    arrays = load_file(data_file(tmp_path, 4))
    assert {name: array.shape for name, array in arrays.items()} == {"weights/a": (300, 100), "weights/b": (7,)}
    assert (arrays["weights/a"] == 4).all()


def test_a_number_is_given_back_through_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = hf.Checkpoint(epoch=3)
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        manager.save(1)
        checkpoint["epoch"] = 9
        manager.restore()
    assert checkpoint["epoch"] == 3


def test_reading_leaves_no_trace_and_opens_no_generation(tmp_path: Path) -> None:
    assert manager_of(tmp_path / "none").restore() is None
    assert not (tmp_path / "none").exists()
    save_steps(tmp_path / "run", 1)
    before = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    with manager_of(tmp_path / "run") as manager:
        assert manager.restore() is not None
        assert manager.steps() == (1,)
        assert manager.latest_step() == 1
    assert sorted(str(path) for path in (tmp_path / "run").rglob("*")) == before


def test_each_manager_that_saves_opens_a_generation_with_its_base(tmp_path: Path) -> None:
    events: list[Event] = []
    save_steps(tmp_path, 1, 2)
    save_steps(tmp_path, 3, sinks=[events.append])
    assert [name.directory for name in StoredRun(LocalStorage(tmp_path)).look().living] == [
        "step-000000001.g0001",
        "step-000000002.g0001",
        "step-000000003.g0002",
    ]
    opened = [event for event in events if isinstance(event, GenerationOpened)]
    assert [(event.generation, event.base_step) for event in opened] == [(2, 2)]


def test_a_manager_that_never_restored_goes_on_from_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    events: list[Event] = []
    with manager_of(tmp_path, sinks=[events.append]) as manager:
        manager.save(3)
        manager.wait(60)
        assert manager.steps() == (1, 2, 3)
    assert [event.base_step for event in events if isinstance(event, GenerationOpened)] == [2]


def test_going_back_makes_the_older_line_the_living_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300)
    objects = make_objects()
    with manager_of(tmp_path, objects, keep=hf.Latest(1)) as manager:
        manager.restore(100)
        manager.save(150)
        manager.wait(60)
        assert manager.steps() == (100, 150), "the step restored from stays"
        manager.restore(100)
        manager.save(120)
        manager.wait(60)
        assert manager.steps() == (100, 120), "going back within a process counts as well"
    off_line = {name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed}
    assert off_line == {100, 120, 150, 200, 300}, "what lies off the line stays until a person prunes it"


def test_starting_over_leaves_the_old_lineage_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 100)
    with manager_of(tmp_path, begin_anew=True, keep=hf.Latest(1)) as manager:
        manager.save(1)
        manager.save(100)
        manager.wait(60)
        assert manager.steps() == (100,)
    assert len(StoredRun(LocalStorage(tmp_path)).look().committed) == 2


def test_manager_that_starts_over_restores_its_own_saves(tmp_path: Path) -> None:
    save_steps(tmp_path, 100)
    (tmp_path / "step-000000100.g0001" / "manifest.json").write_bytes(b"damaged")
    events: list[hf.events.Event] = []
    with manager_of(tmp_path, begin_anew=True, sinks=[events.append]) as manager:
        assert manager.restore() is None
        (warned,) = events
        assert "steps 100 belong to an earlier line" in str(warned)
        with pytest.raises(NoWholeCheckpointError):
            manager.restore(100)
        manager.save(1)
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 1


def test_a_committed_step_is_refused_or_replaced(tmp_path: Path) -> None:
    objects = make_objects(1)
    with manager_of(tmp_path, objects) as manager:
        manager.save(5)
        with pytest.raises(StepExistsError, match="step 5"):
            manager.save(5)
        with pytest.raises(UsageError, match="older than step 5"):
            manager.save(4)
        set_value(objects, 2)
        manager.save(5, replace=True)
        manager.wait(60)
        assert manager.steps() == (5,)
        set_value(objects, 3)
        manager.restore()
        assert objects["counter"]["seen"] == 2
    assert [name.attempt for name in StoredRun(LocalStorage(tmp_path)).look().committed] == [2]
    with manager_of(tmp_path, objects) as manager, pytest.raises(StepExistsError):
        manager.save(5)


@pytest.mark.parametrize("step", [-1, 10**16, 1.5, "3", None, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with manager_of(tmp_path) as manager, pytest.raises(UsageError):
        manager.save(step)


def test_what_cannot_be_stored_is_refused_at_the_call(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(thing={"deep": [object()]})) as manager:
        with pytest.raises(UnsupportedValueError, match="thing/deep/0"):
            manager.save(1)
        manager.checkpoint["thing"] = 1
        manager.save(1).wait_committed(60)
        with pytest.raises(UsageError, match="metadata"):
            manager.save(2, metadata={"x": object()})


def test_a_busy_save_is_waited_for_or_left_out() -> None:
    events: list[Event] = []
    storage = HeldStorage()
    manager = manager_of(storage, when_busy="skip", sinks=[events.append])
    first = manager.save(1)
    second = manager.save(2)
    assert second.skipped
    assert not first.ended
    with pytest.raises(UsageError, match="step 2 was not saved"):
        second.wait_committed(60)
    storage.go_on.set()
    manager.close(60)
    assert [event.step for event in events if isinstance(event, Skipped)] == [2]

    storage = HeldStorage()
    with manager_of(storage) as manager:
        manager.save(1)
        threading.Thread(target=storage.go_on.set).start()
        manager.save(2)
        manager.wait(60)
        assert manager.steps() == (1, 2)


def test_a_wait_in_another_thread_does_not_hide_the_next_save() -> None:
    """The thread that waits is stopped just when its wait is over, until the next save is in flight."""
    storage = HeldStorage()
    manager = manager_of(storage, when_busy="skip")
    has_waited, go_on = threading.Event(), threading.Event()

    def stop(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is hf.SaveHandle.wait_ended.__code__ and event == "return":
            has_waited.set()
            assert go_on.wait(60)
        return stop

    def wait() -> None:
        sys.settrace(stop)
        manager.wait(60)

    manager.save(1)
    waiting = threading.Thread(target=wait)
    waiting.start()
    storage.go_on.set()
    assert has_waited.wait(60)
    storage.go_on.clear()
    second = manager.save(2)
    go_on.set()
    waiting.join(60)
    third = manager.save(3)
    storage.go_on.set()
    assert third.skipped
    assert not second.skipped
    manager.close(60)
    assert manager.steps() == (1, 2)


def test_waits_have_deadlines() -> None:
    storage = HeldStorage()
    manager = manager_of(storage, timeout_seconds=0.05)
    handle = manager.save(1)
    for wait in (handle.wait_committed, manager.wait, lambda: manager.save(2), manager.close):
        with pytest.raises(DeadlineError, match="step 1"):
            wait()
    storage.go_on.set()
    manager.close(60)
    manager.close(60)
    assert handle.committed
    with pytest.raises(ClosedError):
        manager.save(3)


def test_failure_is_an_event_at_once_and_raised_once_by_the_next_save() -> None:
    events: list[Event] = []
    storage = FullStorage()
    manager = manager_of(storage, sinks=[events.append])
    first = manager.save(1)
    first.wait_ended(60)
    assert [event.step for event in events if isinstance(event, Failed)] == [1]
    assert StoredRun(storage).look().unfinished == (), "a failed save leaves no debris"
    storage.is_full = False
    with pytest.raises(SaveFailedError, match="step 1 was not saved: no room") as caught:
        manager.save(2)
    assert isinstance(caught.value.__cause__, StorageFullError)
    assert "make room" in str(caught.value)
    caught.value.next_save.wait_committed(60)
    manager.save(3)
    manager.close(60)
    assert [name.step for name in StoredRun(storage).look().living] == [2, 3]


@pytest.mark.parametrize("way", ["wait", "close", "handle", "with"])
def test_failure_is_raised_by_the_next_call(way: str) -> None:
    manager = manager_of(FullStorage())
    handle = manager.save(1)
    ways: dict[str, Callable[[], object]] = {
        "wait": manager.wait,
        "close": manager.close,
        "handle": handle.wait_committed,
        "with": lambda: manager.__exit__(None, None, None),
    }
    with pytest.raises(SaveFailedError):
        ways[way]()
    manager.close(60)


def test_failures_may_be_tolerated_but_never_the_last() -> None:
    storage = FullStorage()
    manager = manager_of(storage, failures_allowed=2)
    manager.save(1)
    manager.save(2)
    manager.wait(60)
    storage.is_full = False
    manager.save(3)
    manager.wait(60)
    storage.is_full = True
    manager.save(4)
    with pytest.raises(SaveFailedError, match="step 4"):
        manager.close(60)

    manager = manager_of(FullStorage(), failures_allowed=1)
    manager.save(1)
    manager.save(2).wait_ended(60)
    with pytest.raises(SaveFailedError, match="step 2"):
        manager.save(3)
    manager.abandon()


def test_an_error_in_the_block_is_not_hidden_by_a_failed_save() -> None:
    def train() -> None:
        with manager_of(FullStorage()) as manager:
            manager.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "step 1 was not saved" in caught.value.__notes__[0]


def test_a_job_whose_directory_was_taken_over_is_fenced(tmp_path: Path) -> None:
    old = manager_of(tmp_path)
    old.save(1)
    old.wait(60)
    save_steps(tmp_path, 2)
    old.save(5)
    with pytest.raises(SaveFailedError, match="generation 2 was opened by process") as caught:
        old.close(60)
    assert isinstance(caught.value.__cause__, FencedError)
    with manager_of(tmp_path) as manager:
        assert manager.steps() == (1, 2)
    assert StoredRun(LocalStorage(tmp_path)).look().unfinished == ()


def test_a_job_whose_files_were_swept_away_says_who_has_taken_over(tmp_path: Path) -> None:
    class Slow(LocalStorage):
        def sync_directory(self, path: str) -> None:
            if path.startswith("step-000000005"):
                # Asleep, in the middle of a save, while a newer job comes, and sweeps.
                save_steps(tmp_path, 6, 7)
            super().sync_directory(path)

    manager = hf.CheckpointManager(Slow(tmp_path), hf.Checkpoint(**make_objects()))
    manager.save(1)
    manager.wait(60)
    manager.save(5)
    with pytest.raises(SaveFailedError) as caught:
        manager.close(60)
    assert isinstance(caught.value.__cause__, FencedError)
    with manager_of(tmp_path) as newer:
        assert newer.steps() == (1, 6, 7)


@pytest.mark.parametrize("restores", [True, False])
def test_a_job_that_slept_before_its_first_save_does_not_take_over(tmp_path: Path, restores: bool) -> None:
    save_steps(tmp_path, 1)
    late = manager_of(tmp_path)
    if restores:
        late.restore()
    with manager_of(tmp_path) as living:
        living.restore()
        living.save(2)
        living.wait(60)
        late.save(3)
        with pytest.raises(
            SaveFailedError, match=r"generation 2 was opened by process .* after this job chose"
        ) as caught:
            late.close(60)
        assert isinstance(caught.value.__cause__, FencedError)
        living.save(4)
    with manager_of(tmp_path) as manager:
        assert manager.steps() == (1, 2, 4)
        # It has looked again.
        manager.restore()
        manager.save(5)


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip_bit(data_file(tmp_path, 3), 4096 + 100)
    data_file(tmp_path, 2).unlink()
    objects = make_objects()
    events: list[Event] = []
    with manager_of(tmp_path, objects, sinks=[events.append]) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 1
        assert objects["counter"]["seen"] == 1
        assert (objects["weights"]["a"] == 1).all()
        passed = [event for event in events if isinstance(event, PassedOver)]
        assert [(event.step, event.tensor) for event in passed] == [(3, "weights/a"), (2, "")]
        assert (passed[0].file, passed[0].offset_bytes) == (
            "step-000000003.g0001/data-00000-of-00001.safetensors",
            4096,
        )
        with pytest.raises(NoWholeCheckpointError, match="step 3 is damaged"):
            manager.restore(3)
        manager.save(2)
        manager.wait(60)
        assert manager.steps() == (1, 2), "the line goes on from the whole one"


def test_checkpoints_but_none_whole_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(data_file(tmp_path, step), 5000)
    with (
        manager_of(tmp_path) as manager,
        pytest.raises(NoWholeCheckpointError, match=r"all checkpoints \(2\) are damaged") as caught,
    ):
        manager.restore()
    assert [damage.step for damage in caught.value.damages] == [2, 1]
    assert all(isinstance(damage, DamageError) for damage in caught.value.damages)


def test_a_step_that_does_not_exist_is_an_error_that_names_those_that_do(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with manager_of(tmp_path) as manager, pytest.raises(NoCheckpointError, match="1, 2"):
        manager.restore(7)


def test_differences_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    objects = {
        "weights": {"a": np.zeros((300, 101)), "b": np.zeros(7), "c": np.zeros(1)},
        "other": 5,
    }
    with manager_of(tmp_path, objects) as manager:
        with pytest.raises(MismatchError, match="nothing was changed") as caught:
            manager.restore()
        differences = caught.value.differences
        assert "other" in differences.missing
        assert not objects["weights"]["a"].any()  # type: ignore[index]
        restored = manager.restore(strict=False)
        assert restored is not None
        assert restored.differences
        assert manager.checkpoint["other"] == 5
        # A dict takes what is stored, and so does the checkpoint itself.
        stored = make_objects()
        assert objects["weights"].keys() == stored["weights"].keys()  # type: ignore[attr-defined]
        assert objects["weights"]["a"].shape == stored["weights"]["a"].shape  # type: ignore[index]
        assert manager.checkpoint["counter"] == {**stored["counter"], "seen": 1}


def test_a_part_alone_can_be_restored(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    objects = make_objects(9)
    with manager_of(tmp_path, objects) as manager:
        manager.restore(only="weights/b")
        assert objects["weights"]["b"].tolist() == [1.0] * 7
        assert (objects["weights"]["a"] == 9).all()
        assert objects["counter"]["seen"] == 9
        manager.restore(only=["counter"])
        assert objects["counter"]["seen"] == 1
        manager.restore(only="weights/*")
        assert (objects["weights"]["a"] == 1).all()
        with pytest.raises(UsageError, match="no object or leaf named"):
            manager.restore(only="weigths")


def test_retention_removes_what_it_may_and_says_why(tmp_path: Path) -> None:
    events: list[Event] = []
    objects = make_objects()
    keep = hf.Latest(1) | hf.Best("loss") | hf.EveryN(4)
    with manager_of(tmp_path, objects, keep=keep, sinks=[events.append]) as manager:
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0, 4.5], start=1):
            manager.save(step, metrics={"loss": loss})
        manager.wait(60)
        assert manager.steps() == (2, 4, 6)
    last = [event for event in events if isinstance(event, Retained)][-1]
    assert set(last.kept) == {2, 4, 6}
    assert "loss" in last.kept[2]


def test_a_users_own_files_are_never_removed(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep=hf.Latest(1)) as manager:
        manager.save(1).wait_committed(60)
        notes = tmp_path / "step-000000001.g0001" / "notes.txt"
        notes.write_text("mine")
        (tmp_path / "step-000000001.backup").mkdir()
        manager.save(2)
        manager.wait(60)
    assert notes.read_text() == "mine"
    assert (tmp_path / "step-000000001.backup").exists()
    assert [entry.name for entry in notes.parent.iterdir()] == ["notes.txt"]


def test_old_files_that_cannot_be_removed_do_not_fail_the_save(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(MemoryStorage):
        def delete(self, paths: Iterable[str]) -> bool:
            every = [*paths]
            if any(path.endswith("manifest.json") for path in every):
                raise StorageError("cannot remove", path=every[0])
            return super().delete(every)

    storage = Stubborn("stubborn")
    events: list[Event] = []
    with manager_of(storage, keep=hf.Latest(1), sinks=[events.append]) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    # A warning, once for each reason; and no step is lost.
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.stage, failed.step, failed.save_lost) == ("retain", 2, False)
    assert "step 2 is committed, but the cleanup failed" in str(failed)
    assert [record.levelname for record in caplog.records if record.message == str(failed)] == ["WARNING"]


def test_events_tell_seconds_and_bytes(tmp_path: Path) -> None:
    events: list[Event] = []
    with manager_of(tmp_path, sinks=[events.append]) as manager:
        manager.save(1).wait_ended(60)
        manager.save(2)
        manager.wait(60)
        totals = manager.totals
    kinds = [type(event).__name__ for event in events]
    assert kinds[:5] == ["Staged", "GenerationOpened", "Written", "Committed", "Retained"]
    committed = [event for event in events if isinstance(event, Committed)]
    assert all(event.size_bytes > 240_000 for event in committed)
    assert all(event.blocked_seconds > 0 and event.background_seconds > 0 for event in committed)
    assert totals.saves_committed == 2
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(events)


def test_closing_ends_all_threads_and_dropping_a_manager_frees_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)  # What is opened once and for all is open by now.
    before = set(threading.enumerate())
    files_before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    objects = make_objects()
    manager = manager_of(tmp_path, objects, threads=4)
    manager.restore()
    manager.save(2)
    manager.close(60)
    assert set(threading.enumerate()) <= before
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == files_before
    manager = manager_of(tmp_path, objects)
    manager.save(3)
    manager.wait(60)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None


PROGRAM = """
import sys, numpy as np, holdfast as hf
from holdfast.errors import StorageFullError
from holdfast.storage import LocalStorage
class Full(LocalStorage):
    def create(self, path, size_bytes):
        raise StorageFullError("no room", path=path)
def main():
    storage = Full(sys.argv[1]) if sys.argv[2] == "full" else sys.argv[1]
    manager = hf.CheckpointManager(storage, hf.Checkpoint(a=np.ones(1_000_000)))
    manager.save(1)
main()
print("end of the program", flush=False)
if sys.argv[3:] == ["error"]:
    raise ValueError("own error")
"""


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_program_that_ends_without_closing_still_saves(tmp_path: Path) -> None:
    done = run_program(str(tmp_path), "ok")
    assert (done.returncode, done.stderr) == (0, "")
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().living] == [1]
    done = run_program(str(tmp_path / "second"), "ok", "error")
    assert done.returncode == 1
    assert [name.step for name in StoredRun(LocalStorage(tmp_path / "second")).look().living] == [1]


def test_a_failed_last_save_is_never_an_exit_code_of_0(tmp_path: Path) -> None:
    done = run_program(str(tmp_path), "full")
    assert done.returncode == 74
    assert "step 1 was not saved: no room" in done.stderr
    assert done.stdout == "end of the program\n", "what the program printed is not lost"


def test_full_disk_error_names_the_needed_bytes(tmp_path: Path) -> None:
    program = """
    import resource, signal, sys, numpy as np, holdfast as hf
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(a=np.ones(1000)))
    manager.save(1); manager.wait(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    manager.checkpoint["b"] = np.ones(1_000_000)
    manager.save(2).wait_ended(60)
    del manager.checkpoint["b"]
    try:
        manager.save(3)
    except hf.errors.SaveFailedError as failure:
        print(type(failure.__cause__).__name__)
        failure.next_save.wait_committed(60)
    manager.close(60)
    print(manager.steps())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["StorageFullError", "(1, 3)"], done.stderr
    assert StoredRun(LocalStorage(tmp_path)).look().unfinished == ()


def test_sink_that_saves_or_waits_is_refused_at_once(tmp_path: Path) -> None:
    asked: list[str] = []
    handles: list[hf.SaveHandle] = []
    has_handle = threading.Event()

    def ask(event: hf.events.Event) -> None:
        if isinstance(event, hf.events.Committed) and event.step == 1:
            has_handle.wait(PATIENCE_SECONDS)
            for call in (lambda: manager.save(9), manager.wait, manager.close, handles[0].wait_ended):
                with pytest.raises(UsageError, match="sink") as caught:
                    call()
                asked.append(caught.value.hint)

    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(x=np.zeros(9)), sinks=[ask])
    with manager:
        handles.append(manager.save(1))
        has_handle.set()
        manager.wait()
        manager.save(2).wait_committed()
        assert manager.steps() == (1, 2)
    assert len(asked) == 4
