"""The memory of the first save, which is made ready while training runs."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.save.host_memory import HostBuffer, Readying
from holdfast.storage import MemoryStorage
from interrupts import Interrupted

_SIZE = 5_000_000
_PATIENCE_SECONDS = 60.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what is resident is looked up in /proc")


def open_manager(storage: Any, state: Any, **options: Any) -> hf.CheckpointManager:
    given: dict[str, Any] = {"save_every": hf.Steps(10**6), "timeout_seconds": _PATIENCE_SECONDS, **options}
    return hf.CheckpointManager(storage, hf.Checkpoint(state=state), **given)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def threads_at_it() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-ready")]


def await_readiness() -> None:
    for thread in threads_at_it():
        thread.join(_PATIENCE_SECONDS)
    assert not threads_at_it()


def assert_saved(storage: Any, step: int, value: float, size: int = _SIZE) -> None:
    found = {"a": np.zeros(size, np.float32)}
    assert open_manager(storage, found).restore(step) is not None
    assert (found["a"] == value).all()


@on_linux
def test_the_first_save_finds_its_memory_ready_and_takes_no_more(tmp_path: Path) -> None:
    state = {"a": np.ones(_SIZE, np.float32)}
    with open_manager(tmp_path, state) as manager:
        before_bytes = resident_bytes()
        manager.save_if_due(1)
        assert threads_at_it()
        await_readiness()
        ready_bytes = resident_bytes() - before_bytes
        assert state["a"].nbytes * 0.95 < ready_bytes < state["a"].nbytes * 1.1
        state["a"][:] = 2
        manager.save(2).wait_committed()
        assert resident_bytes() - before_bytes < ready_bytes + (8 << 20)
    assert_saved(tmp_path, 2, 2)


@pytest.mark.parametrize(
    "options", [{"reserve_bytes": 0}, {"save_every": None}, {"reserve_bytes": 0, "save_every": hf.Auto()}]
)
def test_no_memory_is_prepared_if_off_or_no_save_is_ever_due(options: dict[str, Any]) -> None:
    with open_manager(MemoryStorage(), {"a": np.ones(_SIZE, np.float32)}, **options) as manager:
        for step in range(1, 4):
            manager.save_if_due(step)
            assert not threads_at_it()


def test_a_manager_that_only_restores_makes_nothing_ready() -> None:
    storage, state = MemoryStorage(), {"a": np.ones(_SIZE, np.float32)}
    with open_manager(storage, state) as manager:
        manager.save(1)
    with open_manager(storage, state) as manager:
        assert manager.restore() is not None
        assert not threads_at_it()
        manager.save_if_due(2)
        assert threads_at_it(), "but one that trains then does"
    assert not threads_at_it()


def test_a_save_and_a_close_in_the_middle_end_it_at_once() -> None:
    storage, state = MemoryStorage(), {"a": np.ones(_SIZE, np.float32)}
    for step in range(1, 20):
        with open_manager(storage, state, begin_anew=True) as manager:
            manager.save_if_due(1)
            if step % 3:
                state["a"][:] = step
                manager.save(step)
                state["a"][:] = -1
        assert not threads_at_it()
        if step % 3:
            assert_saved(storage, step, step)


@pytest.mark.parametrize("later_size", [_SIZE // 2, _SIZE * 2])
def test_a_wrong_estimate_changes_neither_values_nor_memory(later_size: int) -> None:
    storage, state = MemoryStorage(), {"a": np.ones(_SIZE, np.float32)}
    with open_manager(storage, state) as manager:
        manager.save_if_due(1)
        await_readiness()
        state["a"] = np.full(later_size, 3, np.float32)
        manager.save(2).wait_committed()
        state["a"][:] = 4
        manager.save(3).wait_committed()
    for step in (2, 3):
        assert_saved(storage, step, step + 1, later_size)


@on_linux
def test_memory_of_a_large_estimate_is_given_back_and_the_rest_kept() -> None:
    buffer = HostBuffer()
    buffer.reserve(64 << 20)
    readying = Readying(buffer.touch())
    readying.begin()
    await_readiness()
    readying.end()
    before_bytes = resident_bytes()
    buffer.take(16 << 20)
    assert buffer.size_bytes == 16 << 20
    assert before_bytes - resident_bytes() > 40 << 20
    assert len(buffer.take(8 << 20)) == 8 << 20
    assert buffer.size_bytes == 16 << 20, "only an estimate is cut"


def test_nothing_is_touched_after_the_end() -> None:
    for _ in range(50):
        buffer = HostBuffer()
        buffer.reserve(64 << 20)
        readying = Readying(buffer.touch())
        readying.begin()
        readying.end()
        image = buffer.take(64 << 20)
        image[:] = b"\x01" * len(image)
        readying.join(_PATIENCE_SECONDS)
        assert not threads_at_it()
        assert image[0] == image[-1] == 1
        assert np.frombuffer(image, np.uint8).all()


def test_it_waits_for_the_state_that_an_optimizer_gets_at_its_first_step() -> None:
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    with open_manager(MemoryStorage(), {"model": model, "optimizer": optimizer}) as manager:
        manager.save_if_due(1)
        assert not threads_at_it()
        model(torch.ones(1, 2000)).sum().backward()
        optimizer.step()
        manager.save_if_due(2)
        assert threads_at_it()
        assert manager._engine._stager.buffer.size_bytes > 3 * 16_000_000
        manager.save(3).wait_committed()


def test_it_does_not_wait_for_ever_for_a_parameter_that_is_never_used() -> None:
    model = torch.nn.Linear(3000, 3000)
    optimizer = torch.optim.AdamW(model.parameters())
    with open_manager(MemoryStorage(), {"model": model, "optimizer": optimizer}) as manager:
        for step in range(1, 20):
            manager.save_if_due(step)
        assert threads_at_it() or manager._engine._stager.buffer.size_bytes > 36_000_000


def look_struck(manager: hf.CheckpointManager, calls: int) -> bool:
    left = calls

    def strike(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event == "call":
            left -= 1
            if left == 0:
                raise Interrupted

    sys.setprofile(strike)
    try:
        manager.save_if_due(1)
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


def test_an_exception_at_any_call_while_it_begins_spoils_nothing() -> None:
    calls, state = 0, {"a": np.ones(_SIZE, np.float32)}
    is_struck = True
    while is_struck:
        calls += 1
        storage = MemoryStorage()
        with open_manager(storage, state) as manager:
            is_struck = look_struck(manager, calls)
            state["a"][:] = calls
            manager.save(2)
            state["a"][:] = 0
        assert_saved(storage, 2, calls)
    assert calls > 30


def test_a_fork_in_the_middle_changes_nothing() -> None:
    storage, state = MemoryStorage(), {"a": np.ones(_SIZE, np.float32)}
    with open_manager(storage, state) as manager:
        manager.save_if_due(1)
        child = os.fork()
        if child == 0:
            manager.close()
            os._exit(0)
        state["a"][:] = 7
        manager.save(2)
        state["a"][:] = 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_saved(storage, 2, 7)


class TrainedModel:
    """A model that a program trains with an optimizer of torch, and saves without asking whether a save is due."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(_SIZE // 1000, 1000, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.weight.grad = torch.zeros_like(self.model.weight)
        self.kept = hf.Checkpoint(model=self.model, optimizer=self.optimizer)


def test_a_program_that_only_saves_is_known_by_its_optimizer(tmp_path: Path) -> None:
    training = TrainedModel()
    with hf.CheckpointManager(tmp_path, training.kept) as manager:
        training.optimizer.step()
        assert not threads_at_it(), "the state is not there before that step"
        training.optimizer.step()
        assert threads_at_it()
        await_readiness()
        training.optimizer.step()
        assert not threads_at_it()
        ready_bytes = resident_bytes() if sys.platform == "linux" else 0
        manager.save(3).wait_ended()
        if sys.platform == "linux":
            assert resident_bytes() - ready_bytes < 3 * _SIZE, "the state has four times as many bytes"
        training.optimizer.step()
        assert not threads_at_it()
    training.optimizer.step()
    assert not threads_at_it()


@pytest.mark.parametrize("options", [{"reserve_bytes": 0}, {"save_every": hf.Steps(5)}])
def test_optimizers_are_not_followed_if_that_is_off_or_saves_are_due(options: dict[str, Any]) -> None:
    training = TrainedModel()
    with hf.CheckpointManager(MemoryStorage(), training.kept, **options):
        for _ in range(4):
            training.optimizer.step()
        assert not threads_at_it()


def test_an_optimizer_that_is_not_saved_makes_nothing_ready() -> None:
    training = TrainedModel()
    with hf.CheckpointManager(MemoryStorage(), hf.Checkpoint(model=training.model)):
        for _ in range(20):
            training.optimizer.step()
        assert not threads_at_it()


def test_an_optimizer_keeps_no_manager_alive_and_steps_on_without_it() -> None:
    training = TrainedModel()
    manager = hf.CheckpointManager(MemoryStorage(), training.kept)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    for _ in range(3):
        training.optimizer.step()
    assert not threads_at_it()


def test_what_cannot_be_measured_stops_no_step() -> None:
    training = TrainedModel()
    with hf.CheckpointManager(MemoryStorage(), training.kept):
        training.kept["other"] = threading.Lock()
        for _ in range(10):
            training.optimizer.step()
        assert not threads_at_it()
