"""Copies of tensors that are not plain memory of the host: strided ones, and those on accelerators."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import torch

Items: TypeAlias = list[tuple[torch.Tensor, int]]
"""Tensors, each with the byte of the image where its values go."""

GATHERED_BYTES: Final = 1 << 16
"""Tensors on an accelerator that are smaller are put together there, so that one transfer brings many."""

INTEGERS: Final = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""For each type of quantized tensors, that of their integers."""

_PORTABLE: Final = 1
"""The flag by which memory is pinned for all devices of the process."""


@dataclass(slots=True)
class DeviceCopies:
    """A `Transfer`: copies that devices of CUDA make, each on a stream of holdfast's own.

    Attributes:
        done: For each device, the event that comes after its copies.
        sources: What is copied, kept until it is.
    """

    done: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    sources: list[torch.Tensor] = field(default_factory=list)

    def hold(self) -> None:
        """Lets the calling thread's current streams wait for the copies; the thread itself goes on."""
        for device, event in self.done.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """**Blocks.** Waits for the copies, and lets other threads run meanwhile."""
        for event in self.done.values():
            event.synchronize()
        self.sources.clear()


class TorchDevices:
    """Copies from any device; those of CUDA go on behind the call, other devices are waited for."""

    def moment(self, arrays: Sequence[Any]) -> dict[torch.device, torch.cuda.Event]:
        """For each device of CUDA, an event behind all that the calling thread has asked of it."""
        devices = {array.device for array in arrays if array.is_cuda}
        return {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def start(
        self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int], moment: object
    ) -> DeviceCopies | None:
        """**Thread-safe.** Begins the copies."""
        events = cast("dict[torch.device, torch.cuda.Event]", moment or {})
        on_cuda: dict[torch.device, Items] = {}
        synchronous: set[torch.device] = set()
        with torch.no_grad():
            for tensor, offset in zip(arrays, offsets_bytes, strict=True):
                tensor = integers_of(tensor) if tensor.dtype in INTEGERS else tensor.detach()
                if tensor.is_cuda:
                    on_cuda.setdefault(tensor.device, []).append((tensor, offset))
                elif tensor.numel():
                    _into(image, tensor, offset)
                    if not tensor.is_cpu:
                        synchronous.add(tensor.device)
            for device in synchronous:
                torch.accelerator.synchronize(device)
            if not on_cuda:
                return None
            copies = DeviceCopies()
            for device, own in on_cuda.items():
                # The device is a setting of the thread, and this may be any thread.
                stream = _copy_stream(device)
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    if device in events:
                        stream.wait_event(events[device])
                    for tensor, offset in _gathered(own):
                        _into(image, tensor, offset)
                        copies.sources.append(tensor)
                    # Whoever waits for it leaves the processor to training.
                    copies.done[device] = torch.cuda.Event(blocking=True)
                    copies.done[device].record(stream)
        return copies

    def pin(self, image: memoryview) -> Callable[[], None] | None:
        """Makes host memory such that CUDA copies to it directly and without waiting."""
        if not image.nbytes or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return None
        runtime: Any = torch.cuda.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(image))
        if int(runtime.cudaHostRegister(address, image.nbytes, _PORTABLE)) != 0:
            # As where the limit of locked memory is low: copies work all the same, only slower. CUDA keeps the error
            # for whoever asks next, and torch would raise it at this thread's next kernel: this one is there for that.
            with suppress(RuntimeError):
                torch.ones((), device="cuda")
            return None
        process = os.getpid()

        def unpin() -> None:
            if os.getpid() == process:  # CUDA does not live on in a forked child.
                runtime.cudaHostUnregister(address)

        return unpin


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The integers of a quantized tensor: a tensor of the same memory."""
    integers = torch.empty(0, dtype=INTEGERS[tensor.dtype], device=tensor.device)
    return integers.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def tensor_over(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor that shows contiguous bytes; those of a view that is read-only are copied."""
    if data.readonly:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which all copies go, beside those on which it computes."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _into(image: memoryview, tensor: torch.Tensor, offset: int) -> None:
    part = image[offset : offset + tensor.nbytes]
    tensor_over(part, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)


def _gathered(items: Items) -> Iterator[tuple[torch.Tensor, int]]:
    """The same values in fewer tensors: small ones that are neighbours in the image come as one."""
    run: list[torch.Tensor] = []
    begin = end = 0
    for tensor, offset in items:
        # Otherwise torch would conjugate or negate in the host's memory, and not wait with it for the transfer.
        tensor = tensor.resolve_conj().resolve_neg()
        if run and (offset != end or tensor.nbytes > GATHERED_BYTES):
            yield torch.cat(run), begin
            run = []
        if tensor.nbytes > GATHERED_BYTES:
            yield tensor, offset
        elif tensor.numel():
            begin = begin if run else offset
            end = offset + tensor.nbytes
            # One element counts as contiguous whatever its stride, which a view of its bytes does not take.
            run.append(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8))
    if run:
        yield torch.cat(run), begin
