"""Tensors as arrays: their descriptions, and how they are copied out, also from devices, and filled."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import add, attrgetter, gt
from typing import Any, Final, cast

import torch

from holdfast.errors import UsageError
from holdfast.events.sinks import logger
from holdfast.format.dtypes import Quantizer, find_quantizer_problem, names_in
from holdfast.format.shapes import extent_of, find_layout, may_share_elements, row_major
from holdfast.state.leaves import ArrayBackend, ArraySpec, DeviceCopier, Facts, Pin, Sight, spec_of

INTEGERS: Final = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""For each type of quantized tensors, that of their integers."""

_PORTABLE: Final = 1
"""The flag that pins memory for all devices of the process."""


@dataclass(slots=True)
class DeviceCopies:
    """A `Transfer`: copies that CUDA devices make, each on a stream of holdfast's own.

    Attributes:
        done: For each device, the event after its copies.
        sources: The copied tensors, kept until then.
    """

    done: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    sources: list[torch.Tensor] = field(default_factory=list)

    def hold(self) -> None:
        """Lets the calling thread's current streams wait for the copies; the thread itself continues.

        Raises:
            UsageError: If the calling thread captures a CUDA graph, which cannot wait for anything outside of it.
        """
        if self.done and is_capturing():
            raise UsageError(
                "an optimizer's step is being captured in a CUDA graph while a save is still copying what the "
                "step changes",
                hint="Call manager.wait() before the capture begins.",
            )
        for device, event in self.done.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """**Blocks.** Waits for the copies, and lets other threads run meanwhile."""
        for device, event in self.done.items():
            # A thread begins with device 0, and most calls of CUDA take memory there unless another one is set.
            with torch.cuda.device(device):
                event.synchronize()
        self.sources.clear()


def is_capturing() -> bool:
    """Returns True if the calling thread's current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class TorchDevices:
    """Copies from any device; CUDA makes the copies in the background, for other devices the call waits."""

    def moment(self, arrays: Sequence[Any]) -> dict[torch.device, torch.cuda.Event]:
        """Returns for each CUDA device an event after everything that the calling thread has submitted to it."""
        devices = set(map(_device, arrays))
        return {device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"}

    def targets(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Returns a tensor over each array's place in the image."""
        # A tensor that is created in inference mode, as in an evaluation, cannot be changed by a thread outside of it.
        with torch.inference_mode(False):
            return [
                tensor_over(image[offset : offset + array.nbytes], _copied_dtype(array.dtype), array.shape)
                if array.numel()
                else torch.empty(array.shape, dtype=_copied_dtype(array.dtype))
                for array, offset in zip(arrays, offsets_bytes, strict=True)
            ]

    def start(self, arrays: Sequence[Any], targets: Any, moment: object) -> DeviceCopies | None:
        """**Thread-safe.** Begins the copies.

        One call of torch makes those of a device: a call for each would come back for the interpreter's lock each time,
        and training with it.
        """
        events = cast("dict[torch.device, torch.cuda.Event]", moment or {})
        copies = DeviceCopies()
        with torch.no_grad():
            for device, sources, own in _by_device(_sources(arrays), targets):
                if device.type != "cuda":
                    torch._foreach_copy_(own, sources, non_blocking=True)
                    if device.type != "cpu":
                        torch.accelerator.synchronize(device)
                    continue
                # The device is a setting of the thread, and this may be any thread.
                stream = _copy_stream(device)
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    try:
                        if device in events:
                            stream.wait_event(events[device])
                        torch._foreach_copy_(own, sources, non_blocking=True)
                        copies.sources += sources
                        # A thread that waits for it leaves the processor to training.
                        copies.done[device] = torch.cuda.Event(blocking=True)
                        copies.done[device].record(stream)
                    except BaseException:
                        # The image and the arrays may go now: no copy may still be under way.
                        stream.synchronize()
                        raise
        return copies if copies.done else None

    def find_pin(self, arrays: Sequence[Any]) -> Pin | None:
        """Returns pinned memory's registration: CUDA copies to it directly, and without waiting; other devices need
        none."""
        device = next((array.device for array in arrays if array.is_cuda), None)
        return None if device is None else partial(_pin, device)


def _pin(device: torch.device, image: memoryview) -> Callable[[], None] | None:
    runtime: Any = torch.cuda.cudart()
    address = ctypes.addressof(ctypes.c_char.from_buffer(image))
    # For all devices of the process. Without the right one set, it would take memory on device 0 as well.
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, image.nbytes, _PORTABLE))
        if code != 0:
            # CUDA keeps the error for the next call that asks, and torch would raise it at this thread's next kernel:
            # this call takes it.
            with suppress(RuntimeError):
                torch.ones((), device=device)
    if code != 0:
        logger.warning(
            "%.1f GB of host memory could not be pinned (CUDA error %d), so saves copy from the device more "
            "slowly. Raise the limit of locked memory (ulimit -l unlimited), or leave more memory free.",
            image.nbytes / 1e9,
            code,
        )
        return None
    process, getpid, is_finalizing = os.getpid(), os.getpid, sys.is_finalizing

    def unpin() -> None:
        # CUDA does not live on in a forked child, and torch not while the interpreter ends.
        if getpid() == process and not is_finalizing():
            with torch.cuda.device(device):
                runtime.cudaHostUnregister(address)

    return unpin


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the integers of a quantized tensor: a tensor of the same memory."""
    integers = torch.empty(0, dtype=INTEGERS[tensor.dtype], device=tensor.device)
    return integers.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def tensor_over(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Returns a tensor over contiguous bytes; those of a read-only view are copied."""
    if data.readonly:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device for all copies, besides those on which it computes."""
    if device not in _streams:
        # Several threads may come here at once, and are to share one.
        _streams.setdefault(device, torch.cuda.Stream(device))
    return _streams[device]


def _by_device(
    sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> Iterator[tuple[torch.device, list[torch.Tensor], list[torch.Tensor]]]:
    """Returns for each device its tensors and their targets."""
    devices = list(map(_device, sources))
    for device in dict.fromkeys(devices):
        places = [place for place, each in enumerate(devices) if each == device]
        yield device, [sources[place] for place in places], [targets[place] for place in places]


def _sources(arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors of which CUDA copies the bytes as they are, without the host's help."""
    if _BYTES_ALONE.issuperset(map(_dtype, arrays)) and not any(map(_is_neg, arrays)):
        return list(arrays)
    return list(map(_source, arrays))


def _source(array: torch.Tensor) -> torch.Tensor:
    if array.dtype in INTEGERS:
        return integers_of(array).view(_copied_dtype(array.dtype))
    # Otherwise torch would conjugate or negate in the host's memory, and not wait with it for the transfer.
    plain = array.detach().resolve_conj().resolve_neg()
    return plain.view(torch.uint8) if array.itemsize == 1 else plain


def _copied_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type as which tensors of a type are copied: of the same size.

    For some types of one byte, such as float4, CUDA has no kernel that makes them contiguous.
    """
    return torch.uint8 if dtype.itemsize == 1 else INTEGERS.get(dtype, dtype)


# An older torch may lack the newest ones.
DTYPES: Final[dict[torch.dtype, str]] = {
    getattr(torch, torch_name): name for torch_name, name in names_in("torch").items() if hasattr(torch, torch_name)
}
# Those that can be filled by writing to their memory alone.
_PLAIN_DTYPES: Final = {dtype: name for dtype, name in DTYPES.items() if dtype not in INTEGERS}
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}
# Those of which a copy needs nothing but their bytes, unless a tensor is lazily negated.
_BYTES_ALONE: Final = frozenset(dtype for dtype in _PLAIN_DTYPES if dtype.itemsize > 1 and not dtype.is_complex)
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})

_DEVICES: Final = TorchDevices()
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_is_cpu = attrgetter("is_cpu")
_layout = attrgetter("layout")
_device = attrgetter("device")
_STRIDED: Final = {torch.strided}
_address = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg
_version = attrgetter("_version")
_nbytes = attrgetter("nbytes")
_offset = torch.Tensor.storage_offset
_stride = torch.Tensor.stride
_storage = torch.Tensor.untyped_storage
_storage_bytes = torch.UntypedStorage.nbytes

_QUANTIZED_HINT: Final = "Store its int_repr() with scales and zero points."

_LOOKED_AT: Final = 256
"""How many tensors are inspected property by property, for speed, while they stay in the processor's cache."""


def _peek(array: Any) -> Any:
    if array.is_cpu and type(array) in _PLAIN_TYPES:
        try:
            return (array.detach() if array.requires_grad else array).numpy()
        except (TypeError, RuntimeError):  # NumPy lacks bfloat16, say.
            with suppress(TypeError, RuntimeError, KeyError):
                return array.detach().view(_SAME_SIZE[array.itemsize]).numpy()
    return None


def _locate(array: Any) -> tuple[Any, Any]:
    try:  # Not by NumPy, which takes three times as long for a view. What has no such memory raises.
        if array.is_cpu and array.is_contiguous() and type(array) in _PLAIN_TYPES and (address := array.data_ptr()):
            return (array.dtype, array.shape), _memory_of(array.nbytes).from_address(address)
    except RuntimeError:
        pass
    return None, None


@lru_cache
def _memory_of(length_bytes: int) -> Any:
    return ctypes.c_char * length_bytes


def _follow_number(array: Any) -> float | Callable[[], float | None] | None:
    if not array.is_cuda:
        return float(array.item()) if array.is_cpu else None
    # Into pinned memory, on the stream that computes it.
    copied, arrived = array.detach().to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(array.device))
    return lambda: float(copied) if arrived.query() else None


class TorchBackend(ArrayBackend):
    """Tensors of torch, on any device."""

    name = "torch"
    devices: DeviceCopier | None = _DEVICES
    sight = Sight(_peek, _locate, _follow_number)
    is_immutable = False

    def versions(self, arrays: Sequence[Any]) -> Sequence[int | None]:
        """Returns autograd's version counter of each tensor, which all its views share."""
        try:
            return list(map(_version, arrays))
        except RuntimeError:  # Tensors of inference have none.
            return [None if array.is_inference() else int(array._version) for array in arrays]

    def describe(self, arrays: Sequence[Any]) -> Facts:
        """Returns the facts of many tensors: at once of dense ones that have their memory."""
        facts = Facts([], [], [], {}, {}, set(), {})
        for first in range(0, len(arrays), _LOOKED_AT):
            some = arrays[first : first + _LOOKED_AT]
            try:
                is_done = _try_facts(facts, some)
            except RuntimeError:  # Sparse and nested tensors do not have all of these properties.
                is_done = False
            if not is_done:
                for array in some:
                    _add_facts(facts, array)
        return facts

    def copy_out(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> None:
        """**Thread-safe.** **Blocks.** Copies the values of many tensors into one image."""
        targets = _DEVICES.targets(arrays, image, offsets_bytes)
        transfer = _DEVICES.start(arrays, targets, _DEVICES.moment(arrays))
        if transfer is not None:
            transfer.wait()

    def lend_memory(self, arrays: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns the memory of each; autograd, and other watchers of the version, notice the change that torch cannot
        see."""
        try:
            torch.autograd.graph.increment_version(arrays)
        except (RuntimeError, TypeError):
            # Older versions of torch take one tensor, and refuse those of inference, which have no version.
            for array in arrays:
                if not array.is_inference():
                    torch.autograd.graph.increment_version(array)
        begins = list(map(_address, arrays))
        return list(zip(begins, map(add, begins, map(_nbytes, arrays)), strict=True))

    def copy_in(self, array: Any, data: memoryview) -> None:
        """Fills a tensor from bytes."""
        if array.numel() == 0:
            return
        if array.is_cuda:
            # This may be any thread, whose stream is not that of the program: what that has asked for comes first.
            torch.cuda.synchronize(array.device)
        with torch.no_grad():
            live = integers_of(array) if array.is_quantized else array.detach()
            live.copy_(tensor_over(data, live.dtype, live.shape))
        if array.is_cuda and not array.is_contiguous():
            # The values have come to the device, and a kernel on this thread's stream still puts them in place.
            torch.cuda.synchronize(array.device)

    def new(self, spec: ArraySpec, like: Any = None) -> Any:
        """Returns a new tensor, in host memory or on the device of another."""
        return _empty(spec, torch.device("cpu") if like is None else like.device)


@lru_cache(maxsize=1 << 16)
def _spec(name: str, shape: torch.Size) -> ArraySpec:
    return spec_of(name, tuple(shape))


@lru_cache(maxsize=1 << 16)
def _spec_of_layout(name: str, shape: torch.Size, strides: tuple[int, ...]) -> ArraySpec:
    layout = find_layout(tuple(shape), strides)
    return _spec(name, shape) if layout is None else ArraySpec(name, tuple(shape), layout)


def _describe_quantized(name: str, array: torch.Tensor) -> tuple[ArraySpec, str]:
    """Returns the description of a quantized tensor, and what of it cannot be stored; empty if all can."""
    shape = tuple(array.shape)
    if array.qscheme() is torch.per_tensor_affine:
        quantizer = Quantizer(None, (array.q_scale(),), (array.q_zero_point(),))
    elif array.qscheme() is torch.per_channel_affine:
        scales, zero_points = array.q_per_channel_scales(), array.q_per_channel_zero_points()
        quantizer = Quantizer(array.q_per_channel_axis(), tuple(scales.tolist()), tuple(zero_points.tolist()))
    else:
        return _NO_SPEC, f"a quantized tensor of the scheme {array.qscheme()}"
    spec = ArraySpec(name, shape, find_layout(shape, array.stride()), quantizer)
    return spec, find_quantizer_problem(name, shape, quantizer)


def _empty_quantized(spec: ArraySpec, quantizer: Quantizer, device: torch.device) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    memory = torch.empty_strided(
        spec.shape, spec.strides or row_major(spec.shape), dtype=INTEGERS[dtype], device=device
    )
    if quantizer.axis is None:
        (scale,), (zero_point,) = quantizer.scales, quantizer.zero_points
        made = torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=dtype, device=device)
    else:
        scales = torch.tensor(quantizer.scales, dtype=torch.float64, device=device)
        zero_points = torch.tensor(quantizer.zero_points, dtype=torch.int64, device=device)
        made = torch._empty_per_channel_affine_quantized(
            spec.shape, scales=scales, zero_points=zero_points, axis=quantizer.axis, dtype=dtype, device=device
        )
    return made.set_(memory.untyped_storage(), 0, memory.shape, memory.stride())


def _empty(spec: ArraySpec, device: torch.device) -> torch.Tensor:
    try:
        if spec.quantizer is not None:
            return _empty_quantized(spec, spec.quantizer, device)
        if spec.strides is not None:
            return torch.empty_strided(spec.shape, spec.strides, dtype=TORCH_DTYPES[spec.dtype], device=device)
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
    except RuntimeError as error:  # torch has no error of its own for memory of the host
        raise MemoryError(f"no memory for an array of {spec.size_bytes} bytes on {device}: {error}") from error


def _why_not(array: Any) -> tuple[str, str]:
    """Returns what prevents a tensor from being stored, and what to do about it."""
    if isinstance(array, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return "a parameter of a lazy module", "Run one batch through the module first, so that it gets its shape."
    if array.is_meta:
        return "a tensor on the meta device", "Allocate its memory first (to_empty): it has no values."
    if array.is_nested:
        return "a nested tensor", "Store the tensors that it consists of, as a list."
    if array.layout is not torch.strided:
        return f"a tensor of layout {array.layout}", "Store its indices and values, or its dense form (to_dense)."
    if array.is_quantized:
        return f"a quantized tensor of dtype {array.dtype}", _QUANTIZED_HINT
    if type(array) not in _PLAIN_TYPES:
        cls = type(array)
        hint = (
            "Store the plain tensors that it consists of, or give its class __tensor_flatten__ and "
            "__tensor_unflatten__."
        )
        if cls.__module__.startswith("bitsandbytes."):
            hint = (
                "Its load_state_dict does not restore all of its values. Save what is trained: "
                "trained={name: p for name, p in model.named_parameters() if p.requires_grad}."
            )
        elif hasattr(cls, "__tensor_flatten__"):
            hint = "A tensor that is sharded over workers must consist of plain tensors. Use a plain optimizer for it."
        return f"a tensor of type {cls.__module__}.{cls.__qualname__}", hint
    if _lacks_memory(array):
        return (
            "a tensor whose storage was freed, or is too short for it,",
            "Let the engine that manages its memory restore its values first, or leave it out.",
        )
    return f"a tensor of dtype {array.dtype}", "Convert it to another type, such as torch.uint8 (tensor.view)."


def _lacks_memory(array: torch.Tensor) -> bool:
    """Returns True if a tensor's storage is too short for it, as when an engine has freed it until it is needed
    again."""
    try:
        held_bytes = array.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # Some devices have no storage.
        return False
    if held_bytes >= array.nbytes and not array.storage_offset() and array.is_contiguous():
        return False
    if not array.numel() or not (array.is_cpu or array.is_cuda):
        return False
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.stride(), strict=True))
    return (array.storage_offset() + last + 1) * array.itemsize > held_bytes


def _try_facts(facts: Facts, arrays: Sequence[torch.Tensor]) -> bool:
    """Adds the facts of plain tensors; returns False, and adds nothing, if one of them is unusual."""
    if not _PLAIN_TYPES.issuperset(map(type, arrays)) or set(map(_layout, arrays)) != _STRIDED:
        return False
    distinct = set(dtypes := list(map(_dtype, arrays)))
    if not _PLAIN_DTYPES.keys() >= distinct or any(map(_is_neg, arrays)):
        return False
    if any(dtype.is_complex for dtype in distinct) and any(map(_is_conj, arrays)):
        return False
    if any(map(gt, map(_nbytes, arrays), map(_storage_bytes, map(_storage, arrays)))):
        return False
    are_contiguous, shapes = all(map(_is_contiguous, arrays)), list(map(_shape, arrays))
    if (not are_contiguous or any(map(_offset, arrays))) and any(map(_lacks_memory, arrays)):
        return False
    devices = [] if all(map(_is_cpu, arrays)) else list(map(_device, arrays))
    addresses = keys = list(map(_address, arrays))
    if 0 in keys or not {"cpu", "cuda"}.issuperset(device.type for device in set(devices)):
        return False
    row, names, forms = len(facts.specs), map(_PLAIN_DTYPES.__getitem__, dtypes), set(shapes)
    lengths = set(chain.from_iterable(forms))
    # Where a length is 0 or 1, strides may be anything, and count as contiguous all the same.
    if are_contiguous and 1 not in lengths and 0 not in lengths:
        is_uniform = len(forms) == len(distinct) == 1
        facts.specs.extend([_spec(next(names), shapes[0])] * len(arrays) if is_uniform else map(_spec, names, shapes))
    else:
        facts.specs.extend(map(_spec_of_layout, names, shapes, map(_stride, arrays)))
    if devices or not are_contiguous:
        addresses = addresses.copy()
        for place, array in enumerate(arrays):
            if not array.is_contiguous():
                addresses[place] = 0
                _add_form(facts, row + place, array)
            elif not array.is_cpu:
                addresses[place] = 0
                facts.forms[row + place] = array.device, None, None
    facts.keys.extend(keys)
    facts.addresses.extend(addresses)
    return True


def _add_facts(facts: Facts, array: torch.Tensor) -> None:
    """Adds the facts of one tensor of any form."""
    row, name = len(facts.specs), DTYPES.get(array.dtype)
    facts.keys.append(-id(array))
    facts.addresses.append(0)
    if (
        name is None
        or type(array) not in _PLAIN_TYPES
        or array.layout is not torch.strided
        or array.is_nested
        or array.is_meta
        or _lacks_memory(array)
    ):
        what, hint = _why_not(array)
        facts.problems[row] = f"{what} cannot be stored", hint
        facts.specs.append(_NO_SPEC)
        facts.unfillable.add(row)
        return
    spec = _spec_of_layout(name, array.shape, array.stride())
    if array.is_quantized:
        spec, problem = _describe_quantized(name, array)
        facts.unfillable.add(row)  # It keeps the quantizer that it was created with.
        if problem:
            facts.problems[row] = f"{problem} cannot be stored", _QUANTIZED_HINT
    facts.specs.append(spec)
    address = array.data_ptr()
    if address:  # Else it has no elements.
        facts.keys[-1] = address
        is_dense = array.is_cpu and array.is_contiguous()
        if is_dense and not array.is_conj() and not array.is_neg():
            facts.addresses[-1] = address
        else:
            _add_form(facts, row, array)


def _add_form(facts: Facts, row: int, array: torch.Tensor) -> None:
    """Adds the form of one tensor with elements that is not contiguous in host memory as it is read."""
    shape, strides, item_bytes = array.shape, array.stride(), array.itemsize
    is_contiguous = array.is_contiguous()
    reading = array.is_neg(), array.is_conj()
    facts.forms[row] = array.device, None if is_contiguous else strides, reading if any(reading) else None
    if not (array.is_cpu or array.is_cuda):
        facts.extents[row] = None  # The addresses of such devices say nothing.
    elif not is_contiguous:
        strides_bytes = [stride * item_bytes for stride in strides]
        facts.extents[row] = extent_of(array.data_ptr(), shape, strides_bytes, item_bytes)
    if not is_contiguous and may_share_elements(shape, strides):
        facts.unfillable.add(row)


_NO_SPEC: Final = ArraySpec("U8", ())
