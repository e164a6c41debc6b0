"""Incremental saves beside somebody who removes steps: whoever comes when, what is committed then is whole.

One of the two is let run to its end in the midst of the other, at each of its storage calls in turn.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.catalog.survey import RemovalPlan, Removed, carry_out, survey_run
from holdfast.cli.target import Contents, RunTarget, read_checkpoint
from holdfast.cluster import Cluster
from holdfast.errors import HoldfastError, NoCheckpointError, NoWholeCheckpointError, PeerError, SaveFailedError
from holdfast.format.names import StepName
from holdfast.policies import KeptCandidate
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import MemoryStorage
from interrupted_storage import Interrupted
from memory_engine import run_workers


def make_arrays() -> dict[str, np.ndarray]:
    return {"frozen": np.arange(900.0), "seldom": np.zeros(300), "often": np.zeros(200)}


def note(results: list[bool], act: Callable[[], bool]) -> None:
    results.append(act())


def check_all_whole(storage: MemoryStorage, where: str) -> None:
    for name in StoredRun(storage).look().committed:
        damages = verify_data(storage, open_step(storage, name.directory, name))
        assert damages == [], f"{where}: {damages}"


# A person removes the newest step, as one that is damaged may be, while the job goes on from it.


def lay_ground(storage: Interrupted) -> tuple[hf.CheckpointManager, dict[str, np.ndarray], RemovalPlan]:
    """Step 2 refers to step 1, and what comes next would refer to both; all of that is to be removed."""
    arrays = make_arrays()
    manager = hf.CheckpointManager(storage, hf.Checkpoint(arrays=arrays), incremental=True, threads=1)
    for step in (1, 2):
        arrays["seldom"][:] = arrays["often"][:] = step
        manager.save(step)
    manager.wait()
    return manager, arrays, RemovalPlan(survey_run(storage).found, ())


def save_on(manager: hf.CheckpointManager, arrays: dict[str, np.ndarray], step: int) -> bool:
    """Saves a step; whether it was committed."""
    arrays["often"][:] = step
    try:
        handle = manager.save(step)
        handle.wait_ended(60)
        handle.wait_committed(60)
    except SaveFailedError as failure:
        if "was removed while" not in failure.message:
            raise
        return False
    return True


def check_end(storage: Interrupted, manager: hf.CheckpointManager, arrays: dict[str, np.ndarray], where: str) -> None:
    """All that is committed is whole, and the job goes on."""
    check_all_whole(storage, where)
    assert save_on(manager, arrays, 4), where
    manager.close()
    check_all_whole(storage, where)
    restored = make_arrays()
    with hf.CheckpointManager(storage, hf.Checkpoint(arrays=restored)) as other:
        assert other.restore(4) is not None
    assert all((restored[name] == arrays[name]).all() for name in arrays), where


def run_prune_in_save(at: int) -> tuple[bool, bool, Sequence[Removed]]:
    storage = Interrupted()
    manager, arrays, plan = lay_ground(storage)
    done: list[Removed] = []
    storage.interrupt(at, lambda: done.extend(carry_out(storage, plan, StoredRun(storage).look())))
    is_committed = save_on(manager, arrays, 3)
    was_interrupted = storage.was_interrupted
    storage.interrupt(0, lambda: None)
    if is_committed:
        assert StepName(3, 1) in StoredRun(storage).look().committed
    check_end(storage, manager, arrays, f"pruned before call {at} of the save")
    return was_interrupted, is_committed, done


def test_prune_at_any_moment_of_a_save() -> None:
    outcomes = set()
    at = 1
    while True:
        was_interrupted, is_committed, done = run_prune_in_save(at)
        if not was_interrupted:
            break
        outcomes.add((is_committed, all(removed.is_gone for removed in done)))
        at += 1
    assert at > 20
    assert outcomes == {(True, True), (False, True), (False, False), (True, False)}


def test_a_save_at_any_moment_of_prune() -> None:
    outcomes = set()
    at = 1
    while True:
        storage = Interrupted()
        manager, arrays, plan = lay_ground(storage)
        saved: list[bool] = []
        storage.interrupt(at, partial(note, saved, partial(save_on, manager, arrays, 3)))
        done = carry_out(storage, plan, StoredRun(storage).look())
        if not saved:
            break
        outcomes.add((saved[0], all(removed.is_gone for removed in done)))
        check_end(storage, manager, arrays, f"saved before call {at} of the removal")
        at += 1
    assert at > 5
    assert {(True, True), (True, False)} <= outcomes


# A job that was thought dead goes on with its retention, while a new one has gone back to an older step.


class Switch:
    """Keeps everything, until it is told to keep only the newest."""

    keeps_all = True

    def choose_kept(self, committed: Sequence[KeptCandidate[Any]], now_seconds: float) -> dict[Any, str]:
        return {one.key: "all" for one in committed} if self.keeps_all else {committed[-1].key: "the newest"}


class Zombie:
    """A job whose next save gives up all steps before it."""

    def __init__(self, storage: Interrupted) -> None:
        self.arrays = make_arrays()
        policy = Switch()
        checkpoint = hf.Checkpoint(arrays=self.arrays)
        self.manager = hf.CheckpointManager(storage, checkpoint, keep=policy, incremental=True, threads=1)
        for step in (1, 2):
            self.arrays["seldom"][:] = step
            self.manager.save(step)
        for array in self.arrays.values():
            array += 100
        self.manager.save(3)
        self.manager.wait()
        policy.keeps_all = False
        for array in self.arrays.values():
            array += 100

    def save(self) -> None:
        with suppress(HoldfastError):
            self.manager.save(4).wait_ended(60)
        with suppress(HoldfastError):
            self.manager.close()


def go_back(storage: Interrupted, newest: int) -> bool:
    """A new job that goes on from step 2, if that is still there; whether it committed a step."""
    arrays = make_arrays()
    with hf.CheckpointManager(storage, hf.Checkpoint(arrays=arrays), incremental=True, threads=1) as manager:
        try:
            manager.restore(2)
        except NoCheckpointError:
            return False
        arrays["often"][:] = newest
        try:
            manager.save(newest).wait_committed(60)
        except SaveFailedError as failure:
            if "step 2, from which this job continues, was removed" not in failure.message:
                raise
            return False
    assert {reference.step for reference in StoredRun(storage).step(StepName(newest, 2)).manifest().references} <= {
        1,
        2,
    }
    return True


def test_a_new_job_at_any_moment_of_a_zombies_save() -> None:
    outcomes = set()
    at = 1
    while True:
        storage = Interrupted()
        zombie = Zombie(storage)
        went_back: list[bool] = []
        storage.interrupt(at, partial(note, went_back, partial(go_back, storage, 9)))
        zombie.save()
        if not went_back:
            break
        outcomes.add(went_back[0])
        check_all_whole(storage, f"a new job before call {at} of the zombie's save")
        if went_back[0]:
            assert StoredRun(storage).look().newest == StepName(9, 2)
        at += 1
    assert at > 20
    assert outcomes == {True, False}


def test_a_zombies_save_at_any_moment_of_a_new_job() -> None:
    outcomes = set()
    at = 1
    while True:
        storage = Interrupted()
        zombie = Zombie(storage)
        storage.interrupt(at, zombie.save)
        try:
            committed = go_back(storage, 9)
        except HoldfastError as error:
            raise AssertionError(f"the zombie before call {at}: {error}") from error
        if not storage.was_interrupted:
            break
        check_all_whole(storage, f"a zombie before call {at} of the new job")
        # Where the zombie has removed what the new job began from, the line is the zombie's, up to its newest step.
        assert StoredRun(storage).look().newest == (StepName(9, 2) if committed else StepName(4, 1)), at
        outcomes.add(committed)
        at += 1
    assert at > 20
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", [StepName(1, 1), StepName(2, 1)])
def test_what_cannot_be_withdrawn_keeps_what_it_refers_to(name: StepName) -> None:
    class Stubborn(Interrupted):
        stubborn = False

        def delete(self, paths: Iterable[str]) -> bool:
            every = [*paths]
            if self.stubborn and name.manifest_path in every:
                raise SaveFailedError("it stays", step=name.step)
            return super().delete(every)

    storage = Stubborn()
    manager, _, plan = lay_ground(storage)
    manager.close()
    storage.stubborn = True
    done = {removed.found.name: removed.is_gone for removed in carry_out(storage, plan, StoredRun(storage).look())}
    # Step 2 refers to step 1, and not the other way round.
    assert done == {StepName(1, 1): False, StepName(2, 1): name == StepName(1, 1)}
    check_all_whole(storage, "after a removal that failed")


# Readers beside a job that goes on, and removes what they have just seen.


class Going:
    """A job that keeps every fifth step and the newest, and goes on when a reader makes its call of that number."""

    def __init__(self, at: int) -> None:
        self.storage = Interrupted()
        self._state = np.zeros(5000)
        policy = hf.EveryN(5) | hf.Latest(1)
        self._manager = hf.CheckpointManager(
            self.storage, hf.Checkpoint(x=self._state), keep=policy, cluster="alone", incremental=True
        )
        for step in (5, 6, 7):
            self._save(step)
        self.storage.interrupt(at, partial(self._save, 8))

    def _save(self, step: int) -> None:
        self._state[...] = step
        self._manager.save(step).wait_ended()


def each_call() -> Iterator[Going]:
    for at in itertools.count(1):
        going = Going(at)
        yield going
        if not going.storage.was_interrupted:
            assert at > 5
            return


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [None, 7])
def test_restore_during_a_running_job_takes_an_existing_step(workers: int, step: int | None) -> None:
    def restore(going: Going, cluster: Cluster | None) -> int:
        state = np.zeros(5000)
        with hf.CheckpointManager(going.storage, hf.Checkpoint(x=state), cluster=cluster or "alone") as manager:
            try:
                restored = manager.restore(step)
            except NoCheckpointError as error:
                # It is gone, which is not to say that anything is damaged, or that one should begin anew.
                return -1 if isinstance(error, NoWholeCheckpointError) else 0
            except PeerError as error:
                return 0 if error.kind == NoCheckpointError.__name__ else -1
            assert restored is not None
            assert restored.passed_over == ()
            assert set(state) == {restored.step}
            return restored.step

    for going in each_call():
        found = {restore(going, None)} if workers == 1 else set(run_workers(workers, partial(restore, going)))
        assert found in ([{7}, {8}] if step is None else [{7}, {0}])


def test_show_during_a_running_job_shows_an_existing_step() -> None:
    for going in each_call():
        heading, contents = read_checkpoint(RunTarget(going.storage, "run", None, is_step=False))
        assert isinstance(contents, Contents)
        assert heading.manifest.step in (7, 8)
    for going in each_call():
        assert all(not found.damages for found in survey_run(going.storage).found)


def test_job_that_removes_everything_does_not_hold_up_a_restore() -> None:
    class Restless(Interrupted):
        def read(self, path: str, limit_bytes: int) -> bytes:
            if path.endswith("index-00000-of-00001.json") and threading.current_thread() is threading.main_thread():
                trainer.save((trainer.latest_step() or 0) + 1).wait_ended()
            return super().read(path, limit_bytes)

    storage = Restless()
    trainer = hf.CheckpointManager(storage, hf.Checkpoint(x=np.zeros(3)), keep=hf.Latest(1))
    trainer.save(1).wait_ended()
    with pytest.raises(NoWholeCheckpointError):
        hf.CheckpointManager(storage, hf.Checkpoint(x=np.ones(3))).restore()
