"""The law of crashes: whatever storage call a save dies at or fails at, the old checkpoint or the new one is whole.

And nobody has been told anything else. It holds for incremental saves as for others; what these refer to stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import holdfast as hf
from faulty import Fault, FaultyStorage
from holdfast.catalog import StoredRun
from holdfast.errors import HoldfastError, SaveFailedError
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from whole_runs import check_whole

Job = Callable[[hf.CheckpointManager, dict[str, np.ndarray]], None]


def manager_of(storage: Storage, arrays: dict[str, np.ndarray], *, incremental: bool = False) -> hf.CheckpointManager:
    checkpoint = hf.Checkpoint(arrays=arrays)
    return hf.CheckpointManager(storage, checkpoint, keep=hf.Latest(1), threads=2, incremental=incremental)


def set_step(arrays: dict[str, np.ndarray], step: int) -> None:
    for name, array in arrays.items():
        array[...] = FROZEN if name == "frozen" else step


FROZEN = 77.0


def make_arrays() -> dict[str, np.ndarray]:
    return {"a": np.zeros(3000), "b": np.zeros((10, 10), np.float32), "frozen": np.zeros(2000)}


def lay_ground(storage: Storage, *, incremental: bool = False) -> None:
    """Two checkpoints of an earlier generation, and the debris of a save that died.

    The second of them refers to the first, which is kept for that, if they were saved incrementally.
    """
    arrays = make_arrays()
    with manager_of(storage, arrays, incremental=incremental) as manager:
        for step in (1, 2):
            set_step(arrays, step)
            manager.save(step)
    storage.make_directory("step-000000009.g0001")
    storage.write("step-000000009.g0001/index-00000-of-00001.json", b"half")


def save_on(manager: hf.CheckpointManager, arrays: dict[str, np.ndarray]) -> None:
    manager.restore()
    set_step(arrays, 3)
    manager.save(3)


def save_replacement(manager: hf.CheckpointManager, arrays: dict[str, np.ndarray]) -> None:
    manager.restore()
    set_step(arrays, 3)
    manager.save(3)
    manager.wait(60)
    set_step(arrays, 4)  # The same step with other values.
    manager.save(3, replace=True)


def restored_value(storage: Storage) -> tuple[int, float]:
    """The step and the value that a restart finds; fails if its state is no single step's."""
    arrays = make_arrays()
    with manager_of(storage, arrays) as manager:
        restored = manager.restore()
    assert restored is not None, "everything is lost"
    assert restored.passed_over == (), "a committed checkpoint is not whole"
    assert (arrays.pop("frozen") == FROZEN).all(), "what never changed came back changed"
    values = {float(value) for array in arrays.values() for value in array.flat}
    assert len(values) == 1, "a mixture came back"
    return restored.step, values.pop()


def count_calls(make: Callable[[], Storage], job: Job, *, incremental: bool = False) -> int:
    inner = make()
    lay_ground(inner, incremental=incremental)
    storage = FaultyStorage(inner)
    arrays = make_arrays()
    with manager_of(storage, arrays, incremental=incremental) as manager:
        job(manager, arrays)
    return len(storage.calls)


JOBS: dict[str, tuple[Job, dict[int, float]]] = {
    # What may come back: by step, the value that goes with it. Step 2 is the one from before.
    "save": (save_on, {2: 2.0, 3: 3.0}),
    "replace": (save_replacement, {2: 2.0, 3: 4.0}),
}


@pytest.mark.parametrize("stops_dead", [True, False], ids=["dead", "error"])
@pytest.mark.parametrize(
    ("place", "incremental", "done", "name"),
    [
        # In the gate each way of saving ends in each way once, on either place, with the job that begins with all that
        # the other one does.
        pytest.param(
            *(place, incremental, done, name),
            marks=[] if done in usual and name == "replace" else pytest.mark.long,
        )
        for place, incremental, usual in (
            ("memory", False, ("nothing", "half", "all")),
            ("disk", False, ("half",)),
            ("memory", True, ("nothing", "all")),
            ("disk", True, ("half",)),
        )
        for done in ("nothing", "half", "all")
        for name in JOBS
    ],
)
def test_old_or_new_checkpoint_is_whole_after_a_fault_at_any_call(
    tmp_path: Path, place: str, done: Literal["nothing", "half", "all"], stops_dead: bool, name: str, incremental: bool
) -> None:
    made = 0

    def make() -> Storage:
        nonlocal made
        made += 1
        return MemoryStorage(str(made)) if place == "memory" else LocalStorage(tmp_path / str(made))

    job, allowed = JOBS[name]
    calls = count_calls(make, job, incremental=incremental)
    assert calls > 15
    outcomes = set()
    numbers = range(1, calls + 1)
    if "HOLDFAST_LONG" not in os.environ:
        # Each kind of fault with others. On a disk syncs take their time.
        numbers = numbers[("nothing", "half", "all").index(done) :: 3] if place == "disk" else numbers[stops_dead::2]
    for number in numbers:
        inner = make()
        lay_ground(inner, incremental=incremental)
        storage = FaultyStorage(inner, [Fault(number, done=done, stops_dead=stops_dead)])
        arrays = make_arrays()
        told: list[int] = []
        try:
            with manager_of(storage, arrays, incremental=incremental) as manager:
                job(manager, arrays)
            told.append(3)
        except (HoldfastError, BaseException) as error:
            if not isinstance(error, HoldfastError) and not storage.is_dead:
                raise
        where = f"fault at call {number}: {storage.calls[-1] if stops_dead else storage.calls[number - 1]}"
        check_whole(inner)
        step, value = restored_value(inner)
        assert allowed.get(step) == value or (name == "replace" and (step, value) == (3, 3.0)), where
        if told:
            assert step == 3, f"{where}: a commit was told of that did not happen"
            assert value == max(allowed.values()), where
        outcomes.add(step)

        # The next start goes on, and clears what was left behind.
        with manager_of(inner, arrays, incremental=incremental) as manager:
            manager.restore()
            set_step(arrays, 10)
            manager.save(10)
        check_whole(inner)
        assert restored_value(inner) == (10, 10.0), where
        catalog = StoredRun(inner).look()
        assert (catalog.unfinished, catalog.trash) == ((), ()), where
        assert not [entry for entry in inner.list("generations") if entry.name.endswith(".tmp")], where
    assert outcomes == {2, 3}, "faults before and after the commit were both met"


@pytest.mark.parametrize("incremental", [False, True], ids=["plain", "incremental"])
def test_after_an_error_the_same_manager_saves_on(incremental: bool) -> None:
    def make() -> Storage:
        return MemoryStorage("again")

    for number in range(1, count_calls(make, save_on, incremental=incremental) + 1):
        inner = make()
        lay_ground(inner, incremental=incremental)
        arrays = make_arrays()
        storage = FaultyStorage(inner, [Fault(number)])
        try:
            manager = manager_of(storage, arrays, incremental=incremental)
            manager.restore()
        except HoldfastError:
            continue  # The fault met the restore, which tells of it at once.
        failures = 0
        for step in (3, 4, 5):
            set_step(arrays, step)
            try:
                manager.save(step).wait_ended(60)
            except SaveFailedError as failure:
                failures += 1
                failure.next_save.wait_ended(60)
            except HoldfastError:
                failures += 1
                manager.wait(60)
        manager.close(60)
        assert failures <= 1, "each failure is told once"
        check_whole(inner)
        assert restored_value(inner) == (5, 5.0)
        assert StoredRun(inner).look().unfinished == ()
