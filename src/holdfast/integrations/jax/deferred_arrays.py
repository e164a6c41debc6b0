"""Arrays of JAX that are still to be made: host memory for their values, and where and as what they will lie."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, SingleDeviceSharding

from holdfast.errors import UnsupportedValueError
from holdfast.format.boxes import Box
from holdfast.state.leaves import ArraySpec, PendingArray

_ZEROS: Final[dict[str, Any]] = {"i": 0, "f": 0.0, "c": 0j}
"""For a kind of element types, the number of Python's from which JAX makes arrays whose type gives way."""


class Key(NamedTuple):
    """What a key of `jax.random.key` is, apart from its numbers.

    Attributes:
        implementation: What draws from it.
        sharding: How an array of keys is divided, which has a dimension less than their numbers.
    """

    implementation: Any
    sharding: Any


class Placement(NamedTuple):
    """Where, and as what, an array lies.

    Attributes:
        sharding: How it is divided over devices; None for the default device.
        is_committed: Whether the program has put it there, so that JAX does not move it to where others lie.
        is_weak: Whether its element type gives way to that of others.
        key: A typed key, as which it is wrapped; None for plain numbers.
    """

    sharding: Any = None
    is_committed: bool = False
    is_weak: bool = False
    key: Key | None = None


def placement_of(array: Any) -> Placement:
    """Where an array lies, or will."""
    if isinstance(array, MadeArray):
        return array.place
    numbers = numbers_of(array)
    is_committed = numbers.committed or len(numbers.sharding.device_set) > 1
    key = Key(jax.random.key_impl(array), array.sharding) if is_key(array) else None
    return Placement(numbers.sharding, is_committed, numbers.weak_type, key)


def is_key(array: Any) -> bool:
    """Whether it is an array of typed keys."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def numbers_of(array: Any) -> Any:
    """The array itself, or the numbers of which its keys are made."""
    return jax.random.key_data(array) if is_key(array) else array


class MadeArray(PendingArray):
    """An array whose values are still to come.

    Attributes:
        spec: What the whole array is.
        place: Where it will lie.
        buffers: By box, the memory.
    """

    def __init__(self, spec: ArraySpec, dtype: Any, place: Placement, boxes: Sequence[Box]) -> None:
        self.spec = spec
        self.shape = spec.shape
        self.place = place
        self.buffers = {box: np.empty(box.shape, dtype) for box in boxes}
        self._dtype = dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """A part of the memory, where there is one box."""
        return self.memory[index]

    @property
    def memory(self) -> Any:
        """The memory of the only box."""
        (memory,) = self.buffers.values()
        return memory

    def check(self, leaf: str) -> None:
        """JAX makes arrays of 64 bits only where it was told to, and of 32 otherwise."""
        if jax.dtypes.canonicalize_dtype(self._dtype) != self._dtype:
            raise UnsupportedValueError(
                f"{leaf}: stored as {self._dtype}, which JAX cannot hold here: its types of 64 bits are disabled",
                path=leaf,
                hint='Enable them before the restore: jax.config.update("jax_enable_x64", True).',
            )

    def finish(self) -> Any:
        """Puts the values where they belong."""
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
            jax.device_put(self._values(box_of(index, self.shape)), _on_device(device, sharding))
            for device, index in indices.items()
        ]
        divided = jax.make_array_from_single_device_arrays(self.shape, sharding, parts)
        return _weaken_divided(divided) if is_weak else divided

    def _values(self, box: Box) -> Any:
        own = self.buffers.get(box)
        return self.memory[tuple(map(slice, box.offsets, box.ends))] if own is None else own


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """**Pure.** The part of an array that slices select."""
    bounds = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    return Box(tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds))


def _on_device(device: Any, sharding: Any) -> Any:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _weaken_divided(array: Any) -> Any:
    sharding = array.sharding
    if array.is_fully_addressable:
        return jax.device_put(_weaken(jax.device_put(np.asarray(array))), sharding)
    axes = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    if AxisType.Explicit in axes and not array.is_fully_replicated:
        return array  # No process has all of it, and along such axes JAX fills nothing in place.
    return _weaken(array, sharding)


def _weaken(array: Any, sharding: Any = None) -> Any:
    """The same values, of a type that gives way; the array itself if JAX makes none of its type."""
    zero = _ZEROS.get(array.dtype.kind)
    if zero is None or jnp.result_type(type(zero)) != array.dtype:
        return array
    # There is no public function for it, but what is made from a number of Python's stays weak when it is filled.
    return jax.jit(_fill, static_argnums=1, out_shardings=sharding)(array, zero)


def _fill(array: Any, zero: Any) -> Any:
    return jnp.full(array.shape, zero).at[...].set(array)
