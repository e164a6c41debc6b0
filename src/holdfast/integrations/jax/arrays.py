"""JAX arrays, on one device or sharded over many: their local parts, and how they are copied and created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, methodcaller
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, SingleDeviceSharding

from holdfast.errors import UnsupportedValueError
from holdfast.format.dtypes import names_in
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, whole_box
from holdfast.state.leaves import (
    ArrayBackend,
    ArraySpec,
    DeviceCopier,
    Facts,
    LocalBox,
    PendingArray,
    Pieces,
    Sharding,
    Sight,
    spec_of,
)
from holdfast.state.registry import register_backend, register_sharder

_ZEROS: Final[dict[str, Any]] = {"i": 0, "f": 0.0, "c": 0j}
"""For a kind of element types, the Python number from which JAX makes weakly typed arrays."""


class Key(NamedTuple):
    """The properties of a `jax.random.key`, apart from its numbers.

    Attributes:
        implementation: Its random number generator.
        sharding: The sharding of an array of keys, which has a dimension less than their numbers.
    """

    implementation: Any
    sharding: Any


class Placement(NamedTuple):
    """The placement and kind of an array.

    Attributes:
        sharding: Its sharding over devices; None for the default device.
        is_committed: True if the program has put it there, so that JAX does not move it.
        is_weak: True if it is weakly typed.
        key: A typed key, as which it is wrapped; None for plain numbers.
    """

    sharding: Any = None
    is_committed: bool = False
    is_weak: bool = False
    key: Key | None = None


def placement_of(array: Any) -> Placement:
    """Returns the placement of an array, present or future."""
    if isinstance(array, MadeArray):
        return array.place
    if isinstance(array, jax.ShapeDtypeStruct):
        key = Key(array.dtype._impl, array.sharding) if is_key(array) else None
        return Placement(array.sharding, array.sharding is not None, bool(array.weak_type), key)
    numbers = numbers_of(array)
    is_committed = numbers.committed or len(numbers.sharding.device_set) > 1
    key = Key(jax.random.key_impl(array), array.sharding) if is_key(array) else None
    return Placement(numbers.sharding, is_committed, numbers.weak_type, key)


def is_key(array: Any) -> bool:
    """Returns True if it is an array of typed keys."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def numbers_of(array: Any) -> Any:
    """Returns the array itself, or the numbers of its keys."""
    return jax.random.key_data(array) if is_key(array) else array


class MadeArray(PendingArray):
    """An array whose values have not arrived.

    Attributes:
        spec: The dtype and shape of the whole array.
        place: Its placement.
        buffers: By box, the memory.
    """

    def __init__(self, spec: ArraySpec, dtype: Any, place: Placement, boxes: Sequence[Box]) -> None:
        self.spec = spec
        self.shape = spec.shape
        self.place = place
        self.buffers = {box: np.empty(box.shape, dtype) for box in boxes}
        self._dtype = dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """Returns a part of the memory, if there is one box."""
        return self.memory[index]

    @property
    def memory(self) -> Any:
        """The memory of the only box."""
        (memory,) = self.buffers.values()
        return memory

    def check(self, leaf: str) -> None:
        """Checks that JAX can make the array: 64-bit types must be enabled, or it would make 32-bit ones."""
        if jax.dtypes.canonicalize_dtype(self._dtype) != self._dtype:
            raise UnsupportedValueError(
                f"{leaf}: stored as {self._dtype}, which JAX cannot represent here: its 64-bit types are disabled",
                path=leaf,
                hint='Enable them before the restore: jax.config.update("jax_enable_x64", True).',
            )

    def finish(self) -> Any:
        """Puts the values in place."""
        array, key = self._make(), self.place.key
        if key is None:
            return array
        keys = jax.random.wrap_key_data(array, impl=key.implementation)
        return jax.device_put(keys, key.sharding) if self.place.is_committed else keys

    def _make(self) -> Any:
        sharding, is_committed, is_weak, _ = self.place
        if not is_committed:
            with nullcontext() if sharding is None else jax.default_device(*sharding.device_set):
                array = jax.device_put(self.memory)
                return _weaken(array) if is_weak else array
        indices = sharding.addressable_devices_indices_map(self.shape)
        parts = [
            jax.device_put(
                self._values(box_of(index, self.shape)), SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            )
            for device, index in indices.items()
        ]
        divided = jax.make_array_from_single_device_arrays(self.shape, sharding, parts)
        return _weaken_divided(divided) if is_weak else divided

    def _values(self, box: Box) -> Any:
        own = self.buffers.get(box)
        return self.memory[tuple(map(slice, box.offsets, box.ends))] if own is None else own


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """**Pure.** Returns the part of an array that slices select."""
    bounds = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    return Box(tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds))


def _weaken_divided(array: Any) -> Any:
    sharding = array.sharding
    if array.is_fully_addressable:
        return jax.device_put(_weaken(jax.device_put(np.asarray(array))), sharding)
    axes = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    if AxisType.Explicit in axes and not array.is_fully_replicated:
        return array  # No process has all of it, and along such axes JAX fills nothing in place.
    return _weaken(array, sharding)


def _weaken(array: Any, sharding: Any = None) -> Any:
    """Returns the same values, weakly typed; the array itself if JAX has no weak form of its type."""
    zero = _ZEROS.get(array.dtype.kind)
    if zero is None or jnp.result_type(type(zero)) != array.dtype:
        return array
    # There is no public function for it, but what is made from a number of Python's stays weak when it is filled.
    return jax.jit(_fill, static_argnums=1, out_shardings=sharding)(array, zero)


def _fill(array: Any, zero: Any) -> Any:
    return jnp.full(array.shape, zero).at[...].set(array)


_placing, _shape, _dtype = attrgetter("sharding"), attrgetter("shape"), attrgetter("dtype")
_is_deleted = methodcaller("is_deleted")

DTYPES: Final = names_in("jax")
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def _peek(array: Any) -> Any:
    if is_key(array) or not array.is_fully_addressable or not _is_in_host(array.sharding) or not array.is_ready():
        return None
    return np.asarray(array)


def _follow_number(array: Any) -> Callable[[], float | None]:
    array.copy_to_host_async()  # As soon as it is computed.
    return lambda: float(np.asarray(array).reshape(())) if array.is_ready() else None


class JaxBackend(ArrayBackend):
    """The single boxes of arrays: those on a device, and the memory of those that are still to be created."""

    name = "jax"
    devices: DeviceCopier | None = None
    sight = Sight(_peek, lambda _: (None, None), _follow_number)
    is_immutable = True

    def versions(self, arrays: Sequence[Any]) -> Sequence[None]:
        """Returns None for each: immutable arrays have no versions, but their memory may be given to another array."""
        return [None] * len(arrays)

    def describe(self, arrays: Sequence[Any]) -> Facts:
        """Returns the facts of single boxes: arrays that cannot be changed, views of these, and those to be created."""
        facts = Facts([], [], [], {}, {}, set(), {})
        for row, array in enumerate(arrays):
            memory: Any = None
            if isinstance(array, MadeArray):
                spec, memory = array.spec, array.memory
            elif problem := _find_problem(array):
                spec, facts.problems[row] = _NO_SPEC, problem
            else:
                spec, memory = spec_of(DTYPES[array.dtype.name], array.shape), _memory_of(array)
            facts.specs.append(spec)
            facts.keys.append(-id(array))  # No two share memory that can be changed.
            described = None if memory is None else memory.__array_interface__
            address, is_read_only = (0, True) if described is None else described["data"]
            is_dense = described is not None and described["strides"] is None and memory.size
            facts.addresses.append(address if is_dense else 0)
            if is_read_only or not isinstance(array, np.ndarray):
                facts.unfillable.add(row)
        return facts

    def copy_out(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> None:
        """**Blocks.** Copies values into one image, from devices through pinned memory."""
        live = [array for array in arrays if isinstance(array, jax.Array)]
        fetched = iter(fetch(live) if live else ())
        for array, offset in zip(arrays, offsets_bytes, strict=True):
            held = next(fetched) if isinstance(array, jax.Array) else array
            values = np.ascontiguousarray(held.memory if isinstance(held, MadeArray) else held)
            if values.size:
                # Unlike an assignment of views, this lets the other threads work.
                np.copyto(np.frombuffer(image, np.uint8, values.nbytes, offset), values.reshape(-1).view(np.uint8))

    def lend_memory(self, arrays: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns the host memory from which each is created later."""
        extents = []
        for array in arrays:
            memory = _memory_of(array)
            begin = 0 if memory is None else memory.__array_interface__["data"][0]
            extents.append((begin, begin + (0 if memory is None else memory.nbytes)))
        return extents

    def copy_in(self, array: Any, data: memoryview) -> None:
        """Fills memory from bytes."""
        memory = _memory_of(array)
        if memory is not None and memory.size:
            memory[...] = np.frombuffer(data, np.uint8).view(memory.dtype).reshape(memory.shape)

    def new(self, spec: ArraySpec, like: Any = None) -> Any:
        """Returns the replacement for a new array, with a live one's placement, or on the default device."""
        place = Placement() if like is None else placement_of(like)
        return MadeArray(spec, _dtype_of(spec), place, [whole_box(spec.shape)])


class _Identity:
    """Equal only to that of the same array, which it keeps alive, so that no other one gets its id."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __hash__(self) -> int:
        return id(self._array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._array is other._array


class JaxSharder:
    """Inspects JAX arrays by their shards."""

    def look(self, arrays: Sequence[Any], path_of: Callable[[int], str], worker: Worker) -> list[Sharding]:
        """Returns what this worker holds of arrays."""
        return [self._look(array, path_of(row), worker) for row, array in enumerate(arrays)]

    def _look(self, array: Any, path: str, worker: Worker) -> Sharding:
        if isinstance(array, MadeArray):
            parts = tuple(LocalBox(box, memory, None) for box, memory in array.buffers.items())
            return Sharding(array.spec, _BACKEND, parts, id(array), -id(array), place=array.place)
        numbers = array if array.is_deleted() else numbers_of(array)
        if problem := _find_problem(numbers):
            raise UnsupportedValueError(f"{path}: {problem[0]}", path=path, hint=problem[1])
        spec = spec_of(DTYPES[numbers.dtype.name], tuple(numbers.shape))
        # An array that only one process has is like a plain array of that worker.
        holders = {} if numbers.is_fully_addressable else _find_holders(numbers.sharding, spec.shape)
        if holders and (jax.process_index(), jax.process_count()) != (worker.rank, worker.world_size):
            raise UnsupportedValueError(
                f"{path}: JAX process {jax.process_index()} of {jax.process_count()} cannot save an array as "
                f"worker {worker.rank} of {worker.world_size}",
                path=path,
                hint="Pass the cluster of the job, which numbers workers as jax.distributed does.",
            )
        boxes: dict[Box, LocalBox] = {}
        for shard in numbers.addressable_shards:
            box = box_of(shard.index, spec.shape)
            if box not in boxes:
                memory = _memory_of(shard.data)
                boxes[box] = LocalBox(box, shard.data if memory is None else memory, holders.get(box), piece=len(boxes))
        workers = _count_processes(numbers.sharding) if holders else 0
        kind = "keys" if is_key(array) else None
        held = tuple(boxes.values())
        return Sharding(spec, _BACKEND, held, _Identity(array), -id(array), workers, place=kind, is_fillable=False)

    def take_apart(self, arrays: Sequence[Any]) -> Pieces | None:
        """Returns the local pieces; the marks are shardings and shapes."""
        keys = {dtype for dtype in set(map(_dtype, arrays)) if jnp.issubdtype(dtype, jax.dtypes.prng_key)}
        numbers = [jax.random.key_data(one) if one.dtype in keys else one for one in arrays] if keys else arrays
        placings, shapes, dtypes = list(map(_placing, numbers)), list(map(_shape, numbers)), list(map(_dtype, numbers))
        if any(map(_is_deleted, arrays)) or not all(dtype.name in DTYPES for dtype in set(dtypes)):
            return None
        # Most are the same few objects, whose hashes are slow.
        distinct = set({id(placing): placing for placing in placings}.values())
        pieces, firsts = numbers, None
        if not all(placing.is_fully_addressable and len(placing.device_set) == 1 for placing in distinct):
            own = list(map(_find_pieces, placings, shapes))
            pieces = [one.addressable_data(place) for one, places in zip(numbers, own, strict=True) for place in places]
            firsts = list(accumulate(map(len, own[:-1]), initial=0))
        bases = _find_memory(pieces, {_is_in_host(placing) for placing in distinct})
        # What counts is which array it is: two never show memory that can be changed.
        return Pieces(_BACKEND, bases, (placings, shapes), firsts, [-id(array) for array in arrays])

    def new(self, like: Any, spec: ArraySpec) -> Any:
        """Returns the replacement for a new array, with another one's sharding."""
        place = placement_of(like)
        boxes = _local_boxes(place.sharding, spec.shape) if place.is_committed else [whole_box(spec.shape)]
        return MadeArray(spec, _dtype_of(spec), place, boxes)


class AbstractSharder(JaxSharder):
    """Inspects shapes of arrays that are still to be created, with or without a sharding."""

    def _look(self, array: Any, path: str, worker: Worker) -> Sharding:
        """Returns the description of a future array. Its box has no memory: nothing can be filled in place."""
        if isinstance(array, MadeArray):
            return super()._look(array, path, worker)
        numbers = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
        dtype = DTYPES.get(numbers.dtype.name)
        if dtype is None:
            raise UnsupportedValueError(f"{path}: an array of dtype {array.dtype} cannot be stored", path=path)
        spec = spec_of(dtype, tuple(numbers.shape))
        try:
            _ = array.sharding is None or _local_boxes(array.sharding, spec.shape)
        except ValueError as error:
            raise UnsupportedValueError(
                f"{path}: an array of {array.dtype}{list(array.shape)} cannot be sharded as requested: {error}",
                path=path,
                hint="Use a sharding that divides its dimensions evenly.",
            ) from error
        # One record may describe many arrays, none of which shares memory with another.
        box = LocalBox(whole_box(spec.shape), None, None)
        return Sharding(spec, _BACKEND, (box,), object(), -id(array), is_abstract=True, is_fillable=False)


def _find_problem(array: Any) -> tuple[str, str] | None:
    """Returns why an array cannot be stored, and what to do about it; None if it can."""
    if isinstance(array, jax.Array) and array.is_deleted():
        what = "the array was deleted (donated buffers are) and has no values"
        return what, "Replace it with the function's result, or save before it is donated."
    if array.dtype.name in DTYPES:
        return None
    hint = "Convert it to a dtype that numpy or ml_dtypes has and XLA supports."
    hint = "Store jax.random.key_data(...) of it instead." if is_key(array) else hint
    return f"an array of dtype {array.dtype} cannot be stored", hint


_NO_SPEC: Final = spec_of("U8", ())


def _memory_of(array: Any) -> Any:
    """Returns the host memory of a box, read-only if it is a made array's; None if it is elsewhere."""
    if isinstance(array, MadeArray):
        return array.memory
    if isinstance(array, jax.Array):
        if any(device.platform != "cpu" for device in array.devices()):
            return None
        return np.asarray(array)
    return array


def fetch(arrays: Sequence[Any]) -> list[Any]:
    """**Blocks.** Returns the values of arrays in host memory.

    They go through arrays in pinned memory, which devices fill several times faster than other memory, and which last
    no longer than the result. A direct conversion would leave a copy in each array for as long as the array lives.
    """
    # Without pinned memory: ValueError for a device that has none, JaxRuntimeError where none is left.
    with suppress(ValueError, jax.errors.JaxRuntimeError):
        pinned = jax.device_put(arrays, [_pinned(array.sharding) for array in arrays])
        return [np.asarray(array) for array in pinned]
    for array in arrays:
        array.copy_to_host_async()
    return [np.asarray(array) for array in arrays]


@lru_cache(maxsize=1 << 12)
def _pinned(placing: Any) -> Any:
    return placing.with_memory_kind("pinned_host")


def _find_memory(pieces: Sequence[Any], are_in_host: set[bool]) -> list[Any]:
    """Returns single boxes, or views of host memory, which is not donated while these live."""
    if True not in are_in_host:
        return list(pieces)
    if False not in are_in_host:
        with suppress(BufferError):  # Raised for types that Python has no format for, such as bfloat16.
            return [np.asarray(memoryview(piece)) for piece in pieces]
    views = [_memory_of(piece) for piece in pieces]
    return [piece if view is None else view for piece, view in zip(pieces, views, strict=True)]


@lru_cache(maxsize=1 << 12)
def _is_in_host(placing: Any) -> bool:
    return all(device.platform == "cpu" for device in placing.device_set)


@lru_cache(maxsize=1 << 12)
def _find_pieces(placing: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of this process's shards, without those that show the box of an earlier one."""
    boxes = [box_of(index, shape) for index in placing.addressable_devices_indices_map(shape).values()]
    return tuple(boxes.index(box) for box in dict.fromkeys(boxes))


def _dtype_of(spec: ArraySpec) -> Any:
    return jnp.dtype(_NAMES[spec.dtype])


@lru_cache(maxsize=1 << 12)
def _find_holders(placing: Any, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    """Returns for each box of an array the processes that hold it."""
    holders: dict[Box, set[int]] = {}
    for device, index in placing.devices_indices_map(shape).items():
        holders.setdefault(box_of(index, shape), set()).add(device.process_index)
    return {box: tuple(sorted(ranks)) for box, ranks in holders.items()}


@lru_cache(maxsize=1 << 12)
def _count_processes(placing: Any) -> int:
    return len({device.process_index for device in placing.device_set})


@lru_cache(maxsize=1 << 12)
def _local_boxes(placing: Any, shape: tuple[int, ...]) -> tuple[Box, ...]:
    indices = placing.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(box_of(index, shape) for index in indices))


_BACKEND: Final = JaxBackend()

register_backend(jax.Array, _BACKEND)
register_backend(MadeArray, _BACKEND)
register_sharder(jax.Array, JaxSharder())
register_sharder(jax.ShapeDtypeStruct, AbstractSharder())
