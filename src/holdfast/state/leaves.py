"""The records that pass between an object's state and the bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.format.dtypes import Quantizer, QuantizerRecord, array_bytes
from holdfast.format.index import BoxRecord, ElsewhereRecord
from holdfast.format.records import ALONE, Worker
from holdfast.format.shapes import Box, StridesRecord, fit_layout

Skeleton: TypeAlias = Any
"""A JSON value: the state of one named object, with a reference in place of each array."""


class ArraySpec(msgspec.Struct, frozen=True):
    """What an array is, apart from its values.

    Attributes:
        dtype: The element type, a key of `holdfast.format.dtypes.ITEM_BYTES`.
        shape: The length of each dimension; empty for a scalar.
        strides: How an array that is made anew lies in memory, in elements; None for row-major order. A checkpoint's
            data file holds the values in row-major order whatever the strides.
        quantizer: What the integers of a quantized array stand for; None for any other.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    quantizer: Quantizer | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes that the values take when they are contiguous."""
        return array_bytes(self.dtype, self.shape)


class Transfer(Protocol):
    """Copies that a device is making."""

    def hold(self) -> None:
        """Makes what the calling thread does with the arrays from now on come after the copies, without waiting."""

    def wait(self) -> None:
        """**Blocks.** Waits until the copies are made."""


Pin: TypeAlias = Callable[[memoryview], Callable[[], None] | None]
"""Makes host memory quick to copy to. It returns what undoes that, or None if it could not."""


class DeviceCopier(Protocol):
    """How arrays come from the devices of one library, behind the thread that asks for it."""

    def moment(self, arrays: Sequence[Any]) -> object:
        """What copies of these arrays have to wait for, so that they hold the values that the calling thread sees."""

    def start(
        self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int], moment: object
    ) -> Transfer | None:
        """Begins what `ArrayBackend.copy_out` does, from any thread.

        Args:
            arrays: The arrays.
            image: Where to.
            offsets_bytes: Where each begins in the image.
            moment: What `moment` returned in the thread that changes the arrays.

        Returns:
            What is still under way, or None if all is copied.
        """

    def find_pin(self, arrays: Sequence[Any]) -> Pin | None:
        """What makes host memory quick to copy these arrays to; None if nothing does."""


def part_of(array: Any, box: Box) -> Any:
    """A box of a plain array, as a view of the same memory."""
    # The ellipsis makes it a view also where there is no dimension left.
    return alias_of(array)[(*map(slice, box.offsets, box.ends), ...)]


def alias_of(array: Any) -> Any:
    """Another array of the same memory, of which autograd need not know; where there is no such thing, the same one."""
    return array.detach() if hasattr(array, "detach") else array


@lru_cache(maxsize=1 << 16)
def spec_of(dtype: str, shape: tuple[int, ...]) -> ArraySpec:
    """**Pure.** The record of that type and shape; most arrays are like many others, and share it."""
    return ArraySpec(dtype, tuple(shape))


def spec_like(spec: ArraySpec, shape: tuple[int, ...]) -> ArraySpec:
    """**Pure.** An array of another shape whose dimensions lie in memory in the same order; it has no quantizer."""
    if spec.strides is None:
        return spec_of(spec.dtype, shape)
    return ArraySpec(spec.dtype, shape, fit_layout(spec.shape, spec.strides, shape))


class Plain(msgspec.Struct, frozen=True):
    """Arrays that lie in host memory just as they are stored and may be written to; an entry for each.

    Attributes:
        specs: What they are.
        addresses: As `ArrayBackend.address` gives them.
        alias_keys: As `ArrayBackend.alias_key` gives them.
    """

    specs: list[ArraySpec]
    addresses: list[int]
    alias_keys: list[Hashable]


class ArrayBackend(Protocol):
    """How the arrays of one library are looked at, copied out, and filled."""

    name: str
    """The library, such as `numpy` or `torch`."""

    devices: DeviceCopier | None
    """For libraries whose arrays may lie elsewhere than in host memory."""

    is_immutable: bool
    """Whether arrays cannot be changed once they are made."""

    def spec(self, array: Any, path: str) -> ArraySpec:
        """What the array is.

        Raises:
            UnsupportedValueError: If it cannot be stored; `path` says where it stands.
        """

    def alias_key(self, array: Any) -> Hashable:
        """Equal for two arrays exactly when they show the same memory with the same type, shape and strides.

        Arrays of no elements have a key of their own.
        """

    def address(self, array: Any) -> int | None:
        """Where the bytes of its values lie, just as they are stored: contiguous, little-endian, in host memory.

        None if they lie otherwise, or there are none.
        """

    def extent(self, array: Any) -> tuple[int, int] | None:
        """The addresses between which all of its elements lie, the last exclusive, whether or not others lie there too.

        None if it has none, or if no other array can have anything of its memory.
        """

    def fingerprint(self, arrays: Sequence[Any]) -> object:
        """Something that is equal for two lists of arrays only if type, shape and address of all are equal.

        It is quicker than looking at each. It may raise anything for arrays that have no `address`.
        """

    def version(self, array: Any) -> int | None:
        """A number that grows whenever the values change; None if changes are not counted."""

    def try_plain(self, arrays: Sequence[Any]) -> Plain | None:
        """A look at very many arrays at once; None unless each can be stored, has an `address`, and is `fillable`."""

    def copy_out(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> None:
        """**Blocks.** Copies the values of many arrays, each contiguous and little-endian, into one writable image.

        When this returns, the image holds the values of the moment of the call. `image` has format `B`.
        """

    def lend_memory(self, arrays: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """The memory of arrays that have an `address`, which are about to be changed there, unseen by their library.

        Returns:
            For each array the address of its first byte, and that of its last one, exclusive.
        """

    def copy_in(self, array: Any, data: memoryview) -> None:
        """Fills an array, whatever its strides or device, from contiguous little-endian bytes.

        It is one that `new` made, or one that is `fillable`.
        """

    def new(self, spec: ArraySpec, like: Any = None) -> Any:
        """A new, uninitialised array: where a live one of the same library lies, or in host memory.

        It lies in memory as `spec.strides` say, as far as the library lets a program choose.
        """

    def fillable(self, array: Any) -> bool:
        """Whether the array can be given any values where it is: it may be written to, and no two of its elements
        may be the same memory.
        """


class LocalBox(msgspec.Struct, frozen=True):
    """A box of an array that this worker holds.

    Attributes:
        box: Which part of the array it is.
        array: Its values: a plain array of the box's shape.
        holders: The ranks of all workers that hold this very box, in order, this one among them; None for those that
            hold a plain array in that place.
    """

    box: Box
    array: Any
    holders: Sequence[int] | None


class Sharding(msgspec.Struct, frozen=True):
    """What one worker holds of an array.

    Attributes:
        spec: What the whole array is.
        backend: The library of the boxes.
        boxes: What lies here; they do not overlap.
        memory: Equal for two arrays exactly when they are the same boxes of the same memory.
        workers: How many workers hold it together, as far as is known here; 0 for those that hold a plain array in that
            place.
        is_by_hand: Whether its boxes are what a user has said of it, and so may be wrong.
        place: Where, and as what, it lies, as far as its library tells more of that than the boxes do.
        may_differ: Whether workers that train alike may have other values there.
        is_abstract: Whether it says only what an array is to be that has no values yet.
    """

    spec: ArraySpec
    backend: ArrayBackend
    boxes: tuple[LocalBox, ...]
    memory: Hashable
    workers: int = 0
    is_by_hand: bool = False
    place: Hashable = None
    may_differ: bool = False
    is_abstract: bool = False


class Sharder(Protocol):
    """How one kind of sharded array is looked at."""

    def look(self, array: Any, path: str, worker: Worker) -> Sharding:
        """What this worker holds of an array. It does not communicate.

        Raises:
            UnsupportedValueError: If the array cannot be stored; `path` says where it stands.
        """

    def new(self, like: Any, spec: ArraySpec) -> Any:
        """A new array of that type and shape, uninitialised, whose boxes lie as those of another one."""


class PendingArray:
    """Stands for an array that is made when its values have come. Each library of arrays derives one of its own."""

    def check(self, leaf: str) -> None:
        """Makes sure that the library can make the array, before anything is read for it.

        Raises:
            UnsupportedValueError: If it cannot; `leaf` says whose values it is to get.
        """

    def finish(self) -> Any:
        """Makes the array."""
        raise NotImplementedError  # The library of the array makes it.


class Replica(msgspec.Struct, frozen=True):
    """A box that several workers hold alike.

    Attributes:
        leaf: The leaf's name.
        spec: What the whole leaf is.
        box: Which part of it.
        holders: The ranks of all that hold it.
        same_as: If the array has a leaf under another name already, that leaf's name: then this one is none itself.
        may_differ: Whether workers that train alike may have other values there, as in the statistics of batch norm.
        is_trained: Whether it is a parameter, or state of an optimizer, so that it can only differ by a mistake.
        is_renewed: Whether it may differ, since the first worker's values go to all during training.
    """

    leaf: str
    spec: ArraySpec
    box: Box
    holders: Sequence[int]
    same_as: str = ""
    may_differ: bool = False
    is_trained: bool = False
    is_renewed: bool = False


class Captured(msgspec.Struct, frozen=True):
    """The state of all named objects at one moment: plain values already taken, arrays still live.

    The arrays stand in columns, since there may be very many. Each distinct array is there once; arrays that share
    their memory have one leaf.

    Attributes:
        names: Their leaves' names.
        specs: What they are.
        arrays: The arrays themselves.
        addresses: Where their bytes lie; see `ArrayBackend.address`.
        backends: Their libraries.
        objects: For each named object, in the user's order, its skeleton.
        held: The places, in the columns, of arrays that stay as they are until a step that waits.
        boxes: What those arrays are that are no whole leaves.
        elsewhere: The leaves of which other workers write a part, or all.
        worker: Whose state it is.
        replicas: The boxes that other workers hold too.
        compared: For each of these its array, with the library; None for a second name of one. Nothing if values are
            not to be compared.
        digests: For each of these, what tells its values from others, once they have been read; see `compared`.
        loose: The leaves of which this worker cannot know by itself who else holds them, or whether all is held.
        own: The names of the objects that are this worker's own.
        strides: The leaves that do not lie in row-major order here.
        quantizers: Those of leaves that are quantized.
    """

    names: list[str]
    specs: list[ArraySpec]
    arrays: list[Any]
    addresses: list[int | None]
    backends: list[ArrayBackend]
    objects: dict[str, Skeleton]
    held: frozenset[int] = frozenset()
    boxes: tuple[BoxRecord, ...] = ()
    elsewhere: tuple[ElsewhereRecord, ...] = ()
    worker: Worker = ALONE
    replicas: tuple[Replica, ...] = ()
    compared: tuple[tuple[ArrayBackend, Any] | None, ...] = ()
    digests: tuple[str, ...] = ()
    loose: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    strides: tuple[StridesRecord, ...] = ()
    quantizers: tuple[QuantizerRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(spec.size_bytes for spec in self.specs)


@dataclass(slots=True)
class Differences:
    """How stored state and live objects differ; each list holds the names of leaves or objects, or sentences.

    Attributes:
        missing: In the live objects, but not in the checkpoint.
        extra: In the checkpoint, but not in the live objects.
        wrong_shape: Sentences such as `model/head.weight: stored [10, 4], live [12, 4]`.
        wrong_dtype: Sentences of the same form.
        wrong_kind: Sentences: the object at that name is of another kind than the one stored.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    wrong_kind: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.wrong_shape or self.wrong_dtype or self.wrong_kind)

    def __str__(self) -> str:
        """One line for each difference, at most twenty of a kind."""
        lines: list[str] = []
        kinds = (
            ("missing from the checkpoint", self.missing),
            ("only in the checkpoint", self.extra),
            ("wrong shape", self.wrong_shape),
            ("wrong type", self.wrong_dtype),
            ("wrong kind", self.wrong_kind),
        )
        for kind, found in kinds:
            lines += [f"  {kind}: {one}" for one in found[:20]]
            if len(found) > 20:
                lines.append(f"  {kind}: and {len(found) - 20} more")
        return "\n".join(lines)


class Target(msgspec.Struct, frozen=True):
    """Where the bytes of one stored leaf, or of a box of it, are wanted.

    Attributes:
        leaf: The stored leaf's name.
        spec: What `array` is, and what is stored if it is the whole leaf.
        array: The destination: a live array, filled in place, or a new one.
        backend: The library of `array`.
        copies: Further arrays, not sharing memory with `array`, that get the same values afterwards, each with its
            backend; `Matching.apply` sees to them.
        address: Where the bytes of `array` lie; see `ArrayBackend.address`.
        offsets: Where `array` begins in the leaf; None if it is the whole leaf.
    """

    leaf: str
    spec: ArraySpec
    array: Any
    backend: ArrayBackend
    copies: tuple[tuple[ArrayBackend, Any], ...] = ()
    address: int | None = None
    offsets: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """Which part of the leaf it is."""
        shape = self.spec.shape
        return Box((0,) * len(shape) if self.offsets is None else self.offsets, shape)
