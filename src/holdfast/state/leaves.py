"""The records that pass between an object's state and the bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from holdfast.errors import UnsupportedValueError
from holdfast.format.dtypes import Quantizer, QuantizerRecord, array_bytes
from holdfast.format.index import BoxRecord, ElsewhereRecord
from holdfast.format.records import ALONE, Worker
from holdfast.format.shapes import Box, StridesRecord, fit_layout

Skeleton: TypeAlias = Any
"""A JSON value: the state of one named object, with a reference instead of each array."""

Cutting: TypeAlias = tuple[int, tuple[Box, ...]]
"""The number of a piece that a worker holds of an array, and the boxes to cut from it, one from the other."""


class ArraySpec(msgspec.Struct, frozen=True):
    """The description of an array, without its values.

    Attributes:
        dtype: The element type, a key of `holdfast.format.dtypes.ITEM_BYTES`.
        shape: The length of each dimension; empty for a scalar.
        strides: The memory layout of a new array, in elements; None for row-major order. A checkpoint's data file
            always has the values in row-major order.
        quantizer: The quantizer of a quantized array; None for any other.
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
    """Copies by a device in progress."""

    def hold(self) -> None:
        """Orders later work of the calling thread on the arrays after the copies, without waiting."""

    def wait(self) -> None:
        """**Blocks.** Waits until the copies are made."""


Pin: TypeAlias = Callable[[memoryview], Callable[[], None] | None]
"""Makes host memory quick to copy to. It returns a function that undoes that, or None if it could not."""


class DeviceCopier(Protocol):
    """Copies arrays from the devices of one library, in another thread than the requesting one."""

    def moment(self, arrays: Sequence[Any]) -> object:
        """Returns what copies of these arrays must wait for, to get the values that the calling thread sees."""

    def targets(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> Any:
        """Returns what copies of these arrays fill, or of others with the same specs, also again and again.

        Args:
            arrays: The arrays.
            image: The destination, which stays in memory as long as the result.
            offsets_bytes: Where each begins in the image.
        """

    def start(self, arrays: Sequence[Any], targets: Any, moment: object) -> Transfer | None:
        """Begins a copy like `ArrayBackend.copy_out`, from any thread.

        Args:
            arrays: The arrays.
            targets: The result of `targets` for arrays with the same specs.
            moment: The result of `moment` in the thread that changes the arrays.

        Returns:
            The transfer in progress, or None if all is copied.
        """

    def find_pin(self, arrays: Sequence[Any]) -> Pin | None:
        """Returns what makes host memory quick to copy these arrays to; None if nothing does."""


def part_of(array: Any, box: Box) -> Any:
    """Returns a box of a plain array, as a view of the same memory."""
    # The ellipsis makes it a view also where there is no dimension left.
    return alias_of(array)[(*map(slice, box.offsets, box.ends), ...)]


def alias_of(array: Any) -> Any:
    """Returns another array of the same memory that autograd ignores; the same one if there is no such thing."""
    return array.detach() if hasattr(array, "detach") else array


def aliases_of(arrays: Sequence[Any]) -> list[Any]:
    """`alias_of` of many arrays."""
    if all(hasattr(kind, "detach") for kind in set(map(type, arrays))):
        return list(map(methodcaller("detach"), arrays))
    return list(map(alias_of, arrays))


def versions_of(captured: Captured, places: Collection[int]) -> dict[int, int]:
    """Returns the versions of captured arrays by position, without those of which no changes are counted."""
    backends, arrays = [captured.backends[place] for place in places], [captured.arrays[place] for place in places]
    found = zip(places, find_versions(backends, arrays), strict=True)
    return {place: version for place, version in found if version is not None}


def find_versions(backends: Sequence[ArrayBackend], arrays: Sequence[Any]) -> Sequence[int | None]:
    """Returns the version of each array; see `ArrayBackend.versions`."""
    if len(set(map(id, backends))) == 1:
        return backends[0].versions(arrays)
    return [backend.versions([array])[0] for backend, array in zip(backends, arrays, strict=True)]


def find_addresses(backends: Sequence[ArrayBackend], arrays: Sequence[Any]) -> list[int | None]:
    """Returns the address of each array; see `ArrayBackend.address`."""
    if len(set(map(id, backends))) == 1:
        return [address or None for address in backends[0].describe(arrays).addresses]
    return [backend.address(array) for backend, array in zip(backends, arrays, strict=True)]


@lru_cache(maxsize=1 << 16)
def spec_of(dtype: str, shape: tuple[int, ...]) -> ArraySpec:
    """**Pure.** Returns the record of that type and shape; most arrays are like many others, and share it."""
    return ArraySpec(dtype, tuple(shape))


def spec_like(spec: ArraySpec, shape: tuple[int, ...]) -> ArraySpec:
    """**Pure.** Describes an array of another shape with the same order of dimensions in memory, and no quantizer."""
    if spec.strides is None:
        return spec_of(spec.dtype, shape)
    return ArraySpec(spec.dtype, shape, fit_layout(spec.shape, spec.strides, shape))


class Facts(NamedTuple):
    """The facts of many arrays of one library: columns with an entry for each, and what is unusual about some, by row.

    Attributes:
        specs: Their descriptions; any for those that cannot be stored.
        keys: Numbers of which two are equal only if both arrays begin with the same memory: the address on the array's
            device, or a number below 0 that only the same array has.
        addresses: Where the values begin that are in host memory in the stored layout: contiguous and little-endian; 0
            for others, and for arrays without elements.
        forms: What else distinguishes an array from one with the same key, type and shape.
        extents: The addresses between which all elements are, the last exclusive, for arrays with gaps or overlaps;
            None if their addresses say nothing.
        unfillable: The rows of arrays that cannot hold any values in place: read-only ones, say.
        problems: Why an array cannot be stored, as a sentence, and what to do about it.
    """

    specs: list[ArraySpec]
    keys: list[int]
    addresses: list[int]
    forms: dict[int, Hashable]
    extents: dict[int, tuple[int, int] | None]
    unfillable: set[int]
    problems: dict[int, tuple[str, str]]

    def memory(self, row: int) -> Hashable:
        """Equal for two arrays of a library exactly if they show the same memory with the same type and form."""
        spec = self.specs[row]
        return self.keys[row], spec.dtype, spec.shape, self.forms.get(row)

    def extent(self, row: int) -> tuple[int, int] | None:
        """Returns the addresses between which all elements are; None if no other array can share its memory."""
        begin, spec = self.keys[row], self.specs[row]
        return self.extents[row] if row in self.extents else (begin, begin + spec.size_bytes) if begin > 0 else None

    def check(self, row: int, path: str) -> ArraySpec:
        """Returns an array's description.

        Raises:
            UnsupportedValueError: If it cannot be stored; `path` is its path.
        """
        if row in self.problems:
            what, hint = self.problems[row]
            raise UnsupportedValueError(f"{path}: {what}", path=path, hint=hint)
        return self.specs[row]


class Pieces(NamedTuple):
    """The plain arrays that hold many sharded arrays on this worker.

    Attributes:
        backend: The library of these.
        arrays: The pieces of the first one, then those of the next.
        marks: Equal for two results only if their arrays are sharded in the same way.
        firsts: For each sharded array the number of its first piece; None if each has one.
        keys: For each sharded array, a number below 0 that another one has only if it is the same; None if the pieces
            show that.
    """

    backend: ArrayBackend
    arrays: Sequence[Any]
    marks: object
    firsts: Sequence[int] | None = None
    keys: Sequence[int] | None = None


class Sight(NamedTuple):
    """Reads arrays of one library during training, without waiting for a device.

    Attributes:
        peek: Returns the values as an array of NumPy, or their bits as integers; None if that would wait.
        locate: For an array that is dense and in host memory, returns its type and shape, for a dict, and an object
            with its bytes in place; (None, None) for another.
        follow_number: Returns the only element, or what returns it once it is there, and None before; None if neither
            is possible.
    """

    peek: Callable[[Any], Any]
    locate: Callable[[Any], tuple[Any, Any]]
    follow_number: Callable[[Any], float | Callable[[], float | None] | None]


class ArrayBackend(Protocol):
    """Inspects, copies out, and fills the arrays of one library."""

    name: str
    """The library, such as `numpy` or `torch`."""

    devices: DeviceCopier | None
    """For libraries whose arrays may be outside of host memory."""

    sight: Sight

    is_immutable: bool
    """True if arrays cannot be changed once they are created."""

    def versions(self, arrays: Sequence[Any]) -> Sequence[int | None]:
        """Returns for each a number that grows whenever the values change; None if changes are not counted."""

    def describe(self, arrays: Sequence[Any]) -> Facts:
        """Returns the facts of many arrays: all that is asked about them, in no other way."""

    def address(self, array: Any) -> int | None:
        """Returns where the values of an array begin in host memory in the stored layout; None if they do not."""
        return self.describe([array]).addresses[0] or None

    def extent(self, array: Any) -> tuple[int, int] | None:
        """Returns the addresses between which all elements of an array are; None if no other can share its memory."""
        return self.describe([array]).extent(0)

    def copy_out(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> None:
        """**Blocks.** Copies the values of many arrays, each contiguous and little-endian, into one writable image.

        When this returns, the image holds the values at the time of the call. `image` has format `B`.
        """

    def lend_memory(self, arrays: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns the memory of arrays that have an `address`, which is about to be changed without their library.

        Returns:
            For each array the address of its first byte, and that of its last one, exclusive.
        """

    def copy_in(self, array: Any, data: memoryview) -> None:
        """Fills an array with any strides, on any device, from contiguous little-endian bytes.

        The array must be one that `new` created, or one that can be filled (`Facts.unfillable`).
        """

    def new(self, spec: ArraySpec, like: Any = None) -> Any:
        """Returns a new, uninitialized array: on the device of a live one of the same library, or in host memory.

        Its memory layout is `spec.strides`, as far as the library allows that.
        """


class LocalBox(msgspec.Struct, frozen=True):
    """A box of an array that this worker holds.

    Attributes:
        box: The part of the array.
        array: Its values: a plain array of the box's shape.
        holders: The ranks of all workers that hold this same box, in order, including this one; None for those that
            hold a plain array there.
        place: The part that `array` is of what this worker holds in one piece; None for all of it.
        piece: The number of that piece, if there are several.
    """

    box: Box
    array: Any
    holders: Sequence[int] | None
    place: Box | None = None
    piece: int = 0

    @property
    def cutting(self) -> Cutting:
        """The piece, and the part of it, that `array` is."""
        return self.piece, () if self.place is None else (self.place,)


class Sharding(msgspec.Struct, frozen=True):
    """The part of an array that one worker holds.

    Attributes:
        spec: The description of the whole array.
        backend: The library of the boxes.
        boxes: The local boxes; they do not overlap.
        memory: Equal for two arrays exactly if they are the same boxes of the same memory.
        key: See `Facts`: of its first box, or of itself.
        workers: How many workers hold it together, as far as known here; 0 for those that hold a plain array there.
        is_by_hand: True if a user described its boxes, which may be wrong.
        place: Its placement and kind, as far as its library has more than the boxes.
        is_abstract: True if it only describes an array that has no values yet.
        is_fillable: True if the boxes can hold any values in place.
    """

    spec: ArraySpec
    backend: ArrayBackend
    boxes: tuple[LocalBox, ...]
    memory: Hashable
    key: int
    workers: int = 0
    is_by_hand: bool = False
    place: Hashable = None
    is_abstract: bool = False
    is_fillable: bool = True


def list_whole(
    arrays: Sequence[Any], backend: ArrayBackend, facts: Facts, path_of: Callable[[int], str]
) -> list[Sharding]:
    """Describes plain arrays, each of which all its holders have whole.

    Raises:
        UnsupportedValueError: If one cannot be stored; `path_of` returns its path, by its number.
    """
    found: list[Sharding] = []
    for row, (array, spec, key) in enumerate(zip(arrays, facts.specs, facts.keys, strict=True)):
        if row in facts.problems:
            facts.check(row, path_of(row))
        local = LocalBox(Box((0,) * len(spec.shape), spec.shape), array, None)
        is_fillable = row not in facts.unfillable
        found.append(Sharding(spec, backend, (local,), facts.memory(row), key, is_fillable=is_fillable))
    return found


class Sharder(Protocol):
    """Inspects one kind of sharded array."""

    def look(self, arrays: Sequence[Any], path_of: Callable[[int], str], worker: Worker) -> list[Sharding]:
        """Returns what this worker holds of many arrays. It does not communicate.

        Raises:
            UnsupportedValueError: If one cannot be stored; `path_of` returns its path, by its number.
        """

    def take_apart(self, arrays: Sequence[Any]) -> Pieces | None:
        """Returns the pieces that this worker holds of many arrays; None, or any error, if one is unusual."""

    def new(self, like: Any, spec: ArraySpec) -> Any:
        """Returns a new array of that type and shape, uninitialized, with the boxes of another one."""


class PendingArray:
    """A placeholder of an array that is created once its values have arrived. Each library derives its own."""

    def check(self, leaf: str) -> None:
        """Checks that the library can create the array, before anything is read for it.

        Raises:
            UnsupportedValueError: If it cannot; `leaf` is the stored leaf.
        """

    def finish(self) -> Any:
        """Creates the array."""
        raise NotImplementedError  # The library of the array makes it.


class Replica(msgspec.Struct, frozen=True):
    """A box that several workers hold.

    Attributes:
        leaf: The leaf's name.
        spec: The description of the whole leaf.
        box: The part of it.
        holders: The ranks of all that hold it.
        same_as: If the array already has a leaf under another name, that leaf's name: then this is not a leaf.
        may_differ: True if data-parallel workers may have other values there, as in the statistics of batch norm.
        is_trained: True if it is a parameter, or state of an optimizer, so that it can only differ by a mistake.
        is_renewed: True if it may differ because the first worker's values are broadcast during training.
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
    """The state of all named objects at one moment: plain values are captured, arrays are still live.

    Arrays are stored in columns, because there may be very many. Each distinct array appears once; arrays that share
    their memory have one leaf.

    Attributes:
        names: Their leaves' names.
        specs: Their descriptions.
        arrays: The arrays themselves.
        addresses: Their addresses; see `ArrayBackend.address`.
        backends: Their libraries.
        objects: For each named object, in the user's order, its skeleton.
        held: The positions of arrays that do not change before a step that waits; and each one's version, until then.
        boxes: The boxes that arrays are, if not whole leaves.
        elsewhere: The leaves that other workers write in part or in full.
        worker: The worker whose state it is.
        replicas: The boxes that other workers hold too.
        compared: For each replica its array and library; None for a second name of one. Empty if values are not
            compared.
        digests: For each of these, the digest of its values, once they have been read; see `compared`.
        loose: The leaves of which this worker cannot know who else holds them, or whether all is held.
        own: The names of the objects that differ per worker.
        strides: The leaves that are not in row-major order here.
        quantizers: Those of quantized leaves.
    """

    names: list[str]
    specs: list[ArraySpec]
    arrays: list[Any]
    addresses: list[int | None]
    backends: list[ArrayBackend]
    objects: dict[str, Skeleton]
    held: Mapping[int, int] = MappingProxyType({})
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

    def add(
        self,
        names: Sequence[str],
        specs: Sequence[ArraySpec],
        arrays: Sequence[Any],
        addresses: Sequence[int | None],
        backends: Sequence[ArrayBackend],
    ) -> None:
        """Adds a leaf for each entry."""
        self.names.extend(names)
        self.specs.extend(specs)
        self.arrays.extend(arrays)
        self.addresses.extend(addresses)
        self.backends.extend(backends)

    @property
    def size_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(spec.size_bytes for spec in self.specs)


@dataclass(slots=True)
class Differences:
    """The differences between stored state and live objects; each list has names of leaves or objects, or sentences.

    Attributes:
        missing: In the live objects, but not in the checkpoint.
        extra: In the checkpoint, but not in the live objects.
        wrong_shape: Sentences such as `model/head.weight: stored [10, 4], live [12, 4]`.
        wrong_dtype: Sentences of the same form.
        wrong_kind: Sentences: the object of that name is of another kind than the stored one.
        replaced: Sentences, of arrays in the program's trees that were replaced by stored ones of another form. This
            is not counted as a difference: such a tree takes what is stored.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    wrong_kind: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.wrong_shape or self.wrong_dtype or self.wrong_kind)

    def __str__(self) -> str:
        """Returns one line for each difference, at most twenty of a kind."""
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
    """The destination of one stored leaf, or of a box of it.

    Attributes:
        leaf: The stored leaf's name.
        spec: The description of `array`, and of the stored leaf if it is the whole leaf.
        array: The destination: a live array, filled in place, or a new one.
        backend: The library of `array`.
        copies: Further arrays, not sharing memory with `array`, that `Matching.apply` gives the same values, each with
            its backend.
        address: The address of `array`; see `ArrayBackend.address`.
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
        """The part of the leaf."""
        shape = self.spec.shape
        return Box((0,) * len(shape) if self.offsets is None else self.offsets, shape)
