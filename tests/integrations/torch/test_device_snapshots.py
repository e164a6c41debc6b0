"""Saves of state on a device are never torn, however it is changed after the call; memory is pinned once."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import SaveFailedError, UsageError
from holdfast.events import Event, Held, Staged
from holdfast.integrations.torch.tensors import TorchDevices
from holdfast.save.host_memory import HostBuffer
from holdfast.storage import MemoryStorage
from holdfast.storage.memory import MemoryWriter
from on_device import WAYS, Job, assert_same, assert_stored, on_each_device, on_each_stream, on_stream

SAVES = 3


@pytest.fixture(autouse=True)
def _without_captured_optimizers() -> None:
    """As long as an optimizer lives of which a CUDA graph has captured a step, no step is waited for."""
    gc.collect()


def change_everything(job: Job, way: str) -> None:
    """At once, and behind the back of whatever could make it wait."""
    for tensor in job.tensors().values():
        if way == "in place":
            with torch.no_grad():
                tensor.add_(3.0)
        elif way == "unseen":
            tensor.data.mul_(2.0).sub_(1.0)
        else:
            torch._foreach_add_([tensor.data], 5.0)


@on_each_stream
@pytest.mark.parametrize("way", ["in place", "unseen", "foreach"])
def test_a_save_holds_what_was_there_when_it_was_called(device: str, other: bool, way: str) -> None:
    job, storage = Job(device), MemoryStorage()
    job.optimizer.step()
    expected = {}
    with hf.CheckpointManager(storage, job.checkpoint()) as manager:
        for step in range(1, SAVES + 1):
            expected[step] = job.values()
            manager.save(step)
            with on_stream(device, other):
                change_everything(job, way)
    for step, values in expected.items():
        assert_stored(storage, step, values, device)


@on_each_stream
@pytest.mark.parametrize("way", WAYS)
def test_a_step_right_after_the_save_tears_nothing(device: str, other: bool, way: str) -> None:
    if (way, device) == ("capturable", "cpu"):
        pytest.skip("torch steps a capturable optimizer on an accelerator only")
    job, storage = Job(device, way), MemoryStorage()
    job.optimizer.step()
    held: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, Held):
            held.append(event.step)

    expected = {}
    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True, sinks=[note]) as manager:
        for step in range(1, SAVES + 1):
            expected[step] = job.values()
            manager.save(step)
            with on_stream(device, other):
                job.optimizer.step()
    # What a graph could replay is copied before the call returns, so that no step waits for it.
    assert held == ([] if way == "capturable" else sorted(expected))
    for step, values in expected.items():
        assert_stored(storage, step, values, device)


@on_each_device
def test_a_step_on_another_thread_and_stream_waits_too(device: str) -> None:
    job, storage = Job(device, "fused"), MemoryStorage()
    job.optimizer.step()

    def step_elsewhere() -> None:
        with on_stream(device, other=True):
            job.optimizer.step()

    expected = {}
    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True) as manager:
        for step in range(1, SAVES + 1):
            expected[step] = job.values()
            manager.save(step)
            stepping = threading.Thread(target=step_elsewhere)
            stepping.start()
            stepping.join(60)
    for step, values in expected.items():
        assert_stored(storage, step, values, device)


@on_each_device
def test_what_a_graph_may_replay_is_copied_before_the_save_returns(device: str) -> None:
    """Nothing tells of a replay. On the processor a change that nothing tells of takes its place."""
    job, storage = Job(device, "capturable"), MemoryStorage()
    graph = None
    if device == "cuda":
        graph = capture_step(job)
    expected = {}
    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True) as manager:
        for step in range(1, SAVES + 1):
            expected[step] = job.values()
            manager.save(step)
            if graph is None:
                change_everything(job, "unseen")
            else:
                graph.replay()
    for step, values in expected.items():
        again = Job(device, "capturable")
        with hf.CheckpointManager(storage, again.checkpoint()) as manager:
            manager.restore(step)
        assert_same(again.tensors(), values)


def capture_step(job: Job) -> Any:
    """As torch's documents say: some steps on another stream first."""
    with on_stream("cuda", other=True):
        for _ in range(3):
            job.optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    return graph


@pytest.mark.cuda
def test_an_optimizer_that_was_seen_in_a_capture_is_not_held() -> None:
    """SGD does not say that it is made for graphs, so the capture itself has to be seen."""
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    checkpoint, storage = hf.Checkpoint(model=model, optimizer=optimizer), MemoryStorage()
    with hf.CheckpointManager(storage, checkpoint, overlap_copy=True) as manager:
        manager.save(1).wait_committed(60)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        expected = model.weight.detach().clone()
        handle = manager.save(2)
        graph.replay()
        handle.wait_committed(60)
        assert not torch.equal(model.weight, expected)
        manager.restore(2)
    assert torch.equal(model.weight, expected)


class BlockedStorage(MemoryStorage):
    """A storage whose writers wait until they may go on, so that a save stays in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        assert self.may_write.wait(60)
        return super().create(path, size_bytes)


@pytest.mark.cuda
def test_a_capture_while_a_save_copies_is_refused() -> None:
    job, storage = Job("cuda"), BlockedStorage()
    job.optimizer.step()
    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True) as manager:
        handle = manager.save(1)
        handle.wait_staged(60)
        with pytest.raises(UsageError, match=r"captured in a CUDA graph.*"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            job.optimizer.step()
        storage.may_write.set()
        handle.wait_committed(60)
    job.optimizer.step()
    torch.cuda.synchronize()


@on_each_device
def test_the_step_does_not_wait_for_the_write(device: str) -> None:
    job, storage = Job(device, "fused"), BlockedStorage()
    job.optimizer.step()
    expected = job.values()
    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True) as manager:
        handle = manager.save(1)
        job.optimizer.step()  # Were the write waited for, this would hang.
        handle.wait_staged(60)
        assert not handle.committed
        storage.may_write.set()
        handle.wait_committed(60)
    assert_stored(storage, 1, expected, device)


@on_each_device
def test_a_change_under_the_copy_is_lost_and_spoils_no_later_save(device: str) -> None:
    job, storage = Job(device), MemoryStorage()
    job.optimizer.step()

    def change(event: Event) -> None:
        if isinstance(event, Staged) and event.step == 1:
            change_everything(job, "in place")

    with hf.CheckpointManager(storage, job.checkpoint(), overlap_copy=True, sinks=[change]) as manager:
        first = manager.save(1)
        with pytest.raises(SaveFailedError, match="changed while being copied"):
            first.wait_committed(60)
        expected = job.values()
        manager.save(2)  # Into the memory to which the first one was being copied.
        change_everything(job, "unseen")
        manager.wait(60)
        assert manager.steps() == (2,)
    assert_stored(storage, 2, expected, device)


@pytest.mark.cuda
@pytest.mark.parametrize("overlap", [False, True])
def test_saves_take_no_more_device_memory_than_the_first(overlap: bool, tmp_path: Path) -> None:
    job = Job("cuda", "fused")
    job.optimizer.step()
    with hf.CheckpointManager(tmp_path, job.checkpoint(), overlap_copy=overlap, keep=hf.Latest(1)) as manager:
        for step in range(1, 4):
            manager.save(step).wait_committed(60)
            job.optimizer.step()
        gc.collect()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for step in range(4, 12):
            manager.save(step).wait_committed(60)
            job.optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        # Small tensors are put together, and strided ones made contiguous, on the device.
        assert torch.cuda.max_memory_allocated() - allocated < 8 << 20


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.cuda
def test_memory_is_pinned_once_and_given_back(tmp_path: Path) -> None:
    job = Job("cuda")
    job.optimizer.step()
    manager = hf.CheckpointManager(tmp_path, job.checkpoint(), keep=hf.Latest(1))
    seen, addresses = set(), set()
    for step in range(1, 4):
        manager.save(step).wait_committed(60)
        memory = manager._engine._stager.buffer.memory
        assert memory is not None
        seen.add(id(memory.unpin))
        with memoryview(memory) as view:
            addresses.add(address_of(view))
            assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
    assert len(seen) == len(addresses) == 1
    gone = weakref.ref(memory)
    del memory, view
    manager.close()
    gc.collect()
    assert gone() is None
    runtime: Any = torch.cuda.cudart()
    # CUDA knows nothing of it any more, and says so.
    assert int(runtime.cudaHostUnregister(addresses.pop())) != 0
    forget_error()


@pytest.mark.cuda
def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """CUDA refuses memory of which a part is pinned already."""
    tensor = torch.arange(1 << 20, device="cuda")
    buffer = HostBuffer()
    image = buffer.take(16 << 20)
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(address_of(image), 1 << 20, 0)) == 0
    pin: Callable[[memoryview], Any] | None = TorchDevices().find_pin([tensor])
    assert pin is not None
    with caplog.at_level(logging.WARNING, "holdfast"):
        buffer.pin(pin)
        buffer.pin(pin)
    assert [record.message for record in caplog.records if "could not be pinned" in record.message] != []
    assert len(caplog.records) == 1
    torch.ones(3, device="cuda").add_(1)  # The error of CUDA is not met again.
    assert int(runtime.cudaHostUnregister(address_of(image))) == 0
    devices = TorchDevices()
    transfer = devices.start([tensor], devices.targets([tensor], image, [4096]), devices.moment([tensor]))
    assert transfer is not None
    transfer.wait()
    assert torch.equal(torch.frombuffer(image[4096 : 4096 + tensor.nbytes], dtype=torch.int64), tensor.cpu())


def forget_error() -> None:
    """CUDA keeps an error until it is asked for, and torch asks at the next kernel."""
    with suppress(RuntimeError):
        torch.ones((), device="cuda")


@on_each_device
def test_only_arrays_on_cuda_have_memory_pinned(device: str) -> None:
    strided = torch.zeros(4, 3, device=device).t()
    assert (TorchDevices().find_pin([torch.zeros(3), strided]) is not None) is (device == "cuda")
