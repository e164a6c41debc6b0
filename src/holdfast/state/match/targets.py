"""Chooses the arrays that receive the bytes of stored leaves: live ones, or new ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, repeat
from operator import is_
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from holdfast.errors import UnsupportedValueError
from holdfast.format.decoding import ABSENT, UNFILLED
from holdfast.format.records import ALONE, Worker
from holdfast.format.shapes import Box
from holdfast.state.adapters import TREE, Rules
from holdfast.state.leaves import (
    ArrayBackend,
    ArraySpec,
    Differences,
    Facts,
    PendingArray,
    Sharder,
    Sharding,
    Target,
    list_whole,
    spec_of,
)
from holdfast.state.registry import backend_named, backend_of, group_by_library, sharder_of_type

_Key: TypeAlias = str | tuple[str, Box]
"""A leaf, or a box that is a part of it."""

_NOTHING: Final = (None, UNFILLED, ABSENT)


class At(msgspec.Struct, frozen=True):
    """The way that stored arrays at a place are taken.

    Attributes:
        rules: How strictly they are compared with the live ones.
        like: An array; a new array with its shape gets its sharding, and its memory layout if the checkpoint has none.
        near: An array at whose place those for a codec are created.
    """

    rules: Rules = TREE
    like: Any = None
    near: Any = None


class WantedArrays(NamedTuple):
    """WantedArrays to stored arrays, a column for each of their properties.

    Attributes:
        leaves: The stored leaves.
        specs: Their descriptions.
        libraries: Those of the stored arrays: a live one's may not know its element type.
        lives: The live values at their places, or markers.
        path_of: Returns the path of one, by its number.
    """

    leaves: Sequence[str]
    specs: Sequence[ArraySpec]
    libraries: Sequence[str]
    lives: Sequence[Any]
    path_of: Callable[[int], str]

    def pick(self, numbers: Sequence[int]) -> WantedArrays:
        """Returns some of them."""
        return WantedArrays(
            [self.leaves[number] for number in numbers],
            [self.specs[number] for number in numbers],
            [self.libraries[number] for number in numbers],
            [self.lives[number] for number in numbers],
            lambda number: self.path_of(numbers[number]),
        )

    def rows(self) -> Iterator[WantedArray]:
        """Returns them one by one."""
        paths = map(self.path_of, range(len(self.leaves)))
        return map(WantedArray, self.leaves, self.specs, self.libraries, self.lives, paths)


class WantedArray(NamedTuple):
    """One of `WantedArrays`."""

    leaf: str
    spec: ArraySpec
    library: str
    live: Any
    path: str


@dataclass(slots=True)
class _Claim:
    spec: ArraySpec
    receivers: list[tuple[ArrayBackend, Any]] = field(default_factory=list)
    made: tuple[ArrayBackend, Any] | None = None


class RestoreTargets:
    """Collects, for each leaf that is needed, the arrays that need it.

    New arrays that were one when they were stored become one again; if there are live ones, each gets the values. Live
    memory takes one leaf only.
    """

    def __init__(
        self, differences: Differences, stored_arrays: Mapping[str, ArraySpec], worker: Worker = ALONE
    ) -> None:
        # True if a placeholder is used for an array that is created when its values have come.
        self.has_pending = False
        self._differences = differences
        self._worker = worker
        self._stored_arrays = stored_arrays
        # A leaf that one live array wants is stored as its target, without a claim: of those there may be very many.
        self._claims: dict[_Key, _Claim | Target] = {}
        # The leaves of those targets whose arrays are new.
        self._fresh: set[_Key] = set()
        # By leaf: the sharded array that was made for it.
        self._made: dict[str, tuple[Sharding, Any]] = {}
        # By the library's name, then where the memory begins: the facts, the row and the leaf of the array there that
        # came with many, or None. By the library's name and its memory, the leaf of each other one.
        self._firsts: dict[str, dict[int, tuple[Facts, int, str] | None]] = {}
        self._by_memory: dict[tuple[str, Hashable], str] = {}

    def take(self, wanted: WantedArrays, at: At) -> list[Any]:
        """Returns the array that will hold each stored leaf: the live one, or a new one.

        Raises:
            UnsupportedValueError: If a live array has a form that cannot be filled, or no similar one can be created.
        """
        groups = group_by_library(wanted.lives)
        if len(groups) == 1:
            return self._take_group(wanted, groups[0][0], at)
        found: list[Any] = [None] * len(wanted.lives)
        for handler, places in groups:
            for place, array in zip(places, self._take_group(wanted.pick(places), handler, at), strict=True):
                found[place] = array
        return found

    def _take_group(self, wanted: WantedArrays, handler: Any, at: At) -> list[Any]:
        """Does it for live values of one library, or of none."""
        if handler is None:
            made = self._try_new(wanted, at)
            return made if made is not None else [self._new_for(one, at) for one in wanted.rows()]
        sharder = sharder_of_type(type(wanted.lives[0]))
        if sharder is not None:
            live = sharder.look(wanted.lives, wanted.path_of, self._worker)
        else:
            facts = handler.describe(wanted.lives)
            if self._try_fill(wanted, facts, handler, at.rules):
                return list(wanted.lives)
            live = list_whole(wanted.lives, handler, facts, wanted.path_of)
        return [self._fill(one, own, sharder, at.rules) for one, own in zip(wanted.rows(), live, strict=True)]

    def _try_fill(self, wanted: WantedArrays, facts: Facts, backend: ArrayBackend, rules: Rules) -> bool:
        """Lets all live arrays be filled in place, unless there is anything to decide or to report about one."""
        if not rules.in_place or facts.unfillable or facts.problems or facts.specs != wanted.specs:
            return False
        leaves, arrays, specs, keys, addresses = wanted.leaves, wanted.lives, wanted.specs, facts.keys, facts.addresses
        targets = dict(
            zip(leaves, map(Target, leaves, specs, arrays, repeat(backend), repeat(()), addresses), strict=True)
        )
        # Tied parameters are one array under two names.
        if len(targets) < len(leaves):
            kept = [targets[leaf].array for leaf in leaves]
            if not all(map(is_, kept, arrays)):
                return False
        known = self._firsts.setdefault(backend.name, {})
        firsts: dict[int, tuple[Facts, int, str] | None]
        firsts = dict(zip(keys, zip(repeat(facts), count(), leaves), strict=False))
        if len(firsts) < len(targets) or 0 in addresses:
            return False
        if not known.keys().isdisjoint(firsts) or not self._claims.keys().isdisjoint(targets):
            return False
        known.update(firsts)
        self._claims.update(targets)
        return True

    def _fill(self, wanted: WantedArray, live: Sharding, sharder: Sharder | None, rules: Rules) -> Any:
        """Returns the live array if it is to be filled in place or does not fit, otherwise a similar new one.

        One that is divided, or of typed keys, must fit.
        """
        leaf, spec, _, array, path = wanted
        own, backend = live.spec, live.backend
        is_special = live.workers or live.is_by_hand or live.is_abstract or live.place
        if (
            len(live.boxes) == 1
            and not is_special
            and not rules.fixed_shapes
            and (own.dtype, own.shape) != (spec.dtype, spec.shape)
        ):
            return self._replace(wanted, own, backend)
        if own.shape != spec.shape:
            self._differences.wrong_shape.append(f"{path}: stored {list(spec.shape)}, live {list(own.shape)}")
            return array
        if own.dtype != spec.dtype:
            self._differences.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {own.dtype}")
            return array
        firsts = self._firsts.setdefault(backend.name, {})
        first = firsts.setdefault(live.key, None)
        owner = self._by_memory.get((backend.name, live.memory))
        if first is not None and first[0].memory(first[1]) == live.memory:
            owner = first[2]
        if owner == leaf:
            return array
        if not (rules.in_place and live.is_fillable) or (owner is not None and not rules.fixed_arrays):
            if sharder is not None:
                return self._new_shared(leaf, spec, sharder, array, path)
            return self.new(leaf, spec, backend, array)
        if owner is not None:
            text = f"{path}: stored separately from {owner}, but the live arrays share memory"
            self._differences.wrong_kind.append(text)
            return array
        self._by_memory[backend.name, live.memory] = leaf
        if sharder is None:
            self._claim(leaf, spec).receivers.append((backend, array))
        else:
            self._claim_boxes(leaf, live)
        return array

    def _new_for(self, wanted: WantedArray, at: At) -> Any:
        """Returns a new array where there is no live one; the live value if nothing new may come."""
        leaf, spec, library, live, path = wanted
        if live is ABSENT and at.rules.fixed_arrays:
            self._differences.extra.append(path)
            return ABSENT
        if "/" not in path and at.rules.fixed_arrays and not any(live is one for one in _NOTHING):
            self._differences.wrong_kind.append(f"{path}: stored an array, live a {type(live).__qualname__}")
            return live
        like = at.like
        sharder = sharder_of_type(type(like))
        spec = self._lay_out(spec, like, sharder, path)
        if sharder is not None and like.shape == spec.shape:
            return self._new_shared(leaf, spec, sharder, like, path)
        made_by = backend_named(library)
        return self.new(leaf, spec, made_by, at.near if backend_of(at.near) is made_by else None)

    def _lay_out(self, spec: ArraySpec, like: Any, sharder: Sharder | None, path: str) -> ArraySpec:
        """Returns what to create for a leaf: with the layout of the array that it belongs to, if the checkpoint has no
        layouts.

        Old checkpoints have none. Some kernels of optimizers require the same layout for a parameter and its state.
        """
        backend = backend_of(like)
        if (sharder is None and backend is None) or self._has_layouts:
            return spec
        try:
            if sharder is not None:
                own = sharder.look([like], lambda _: path, self._worker)[0].spec
            elif backend is not None:
                own = backend.describe([like]).check(0, path)
        except UnsupportedValueError:  # It has no memory, or no shape, yet.
            return spec
        fits = own.strides is not None and own.shape == spec.shape
        return msgspec.structs.replace(spec, strides=own.strides) if fits else spec

    @cached_property
    def _has_layouts(self) -> bool:
        return any(spec.strides is not None for spec in self._stored_arrays.values())

    def new(self, leaf: str, spec: ArraySpec, backend: ArrayBackend, like: Any = None) -> Any:
        """Returns a new array for the leaf, with a live one's placement if there is one.

        Raises:
            UnsupportedValueError: If the library cannot create it.
        """
        claim = self._claim(leaf, spec)
        if claim.made is None or claim.made[0] is not backend:
            claim.made = (backend, backend.new(spec, like))
            self._note(leaf, claim.made[1])
            claim.receivers.append(claim.made)
        return claim.made[1]

    def _try_new(self, wanted: WantedArrays, at: At) -> list[Any] | None:
        """Creates all arrays; returns None if something says what else they should be, or one is needed elsewhere."""
        leaves, libraries = wanted.leaves, set(wanted.libraries)
        if len(libraries) > 1 or at.like is not None or at.near is not None:
            return None
        nothing = _NOTHING[:2] if at.rules.fixed_arrays else _NOTHING
        if not set(map(id, nothing)).issuperset(map(id, wanted.lives)):
            return None
        distinct = dict(zip(leaves, wanted.specs, strict=True))
        if not self._claims.keys().isdisjoint(distinct):
            return None
        backend = backend_named(*libraries)
        arrays = {leaf: backend.new(spec) for leaf, spec in distinct.items()}
        for leaf, array in arrays.items():
            self._note(leaf, array)
        addresses = [address or None for address in backend.describe(list(arrays.values())).addresses]
        made = map(Target, arrays, distinct.values(), arrays.values(), repeat(backend), repeat(()), addresses)
        self._claims.update(zip(arrays, made, strict=True))
        self._fresh.update(arrays)
        return list(map(arrays.__getitem__, leaves))

    def _new_shared(self, leaf: str, spec: ArraySpec, sharder: Sharder, like: Any, path: str) -> Any:
        """Returns a new array for the leaf, with another one's sharding."""
        array = sharder.new(like, spec)
        (sharding,) = sharder.look([array], lambda _: path, self._worker)
        made = self._made.get(leaf)
        if made is not None and made[0].place == sharding.place:
            boxes = zip(made[0].boxes, sharding.boxes, strict=False)
            if len(made[0].boxes) == len(sharding.boxes) and all(own.box == other.box for own, other in boxes):
                return made[1]
        self._made[leaf] = (sharding, array)
        self._note(leaf, array)
        self._claim_boxes(leaf, sharding)
        return array

    def targets(self) -> tuple[Target, ...]:
        """Returns one target for each leaf that is needed."""
        arrays: dict[ArrayBackend, dict[_Key, Any]] = {}
        for key, claim in self._claims.items():
            if isinstance(claim, _Claim):
                backend, array = claim.receivers[0]
                arrays.setdefault(backend, {})[key] = array
        addresses: dict[_Key, int] = {}
        for backend, own in arrays.items():
            addresses.update(zip(own, backend.describe(list(own.values())).addresses, strict=True))
        return tuple(
            [
                claim if isinstance(claim, Target) else _target(key, claim, addresses[key] or None)
                for key, claim in self._claims.items()
            ]
        )

    def _note(self, leaf: str, array: Any) -> None:
        if isinstance(array, PendingArray):
            array.check(leaf)
            self.has_pending = True

    def _replace(self, wanted: WantedArray, live: ArraySpec, backend: ArrayBackend) -> Any:
        """Returns a new array for a stored one of another shape or type; another shape is noted."""
        leaf, spec, library, array, path = wanted
        if live.shape != spec.shape and 0 not in live.shape and live.shape:
            text = f"{path} {list(spec.shape)} (your script begins with {list(live.shape)})"
            self._differences.replaced.append(text)
        if live.dtype == spec.dtype or backend.name == library:
            return self.new(leaf, spec, backend, array)
        return self.new(leaf, spec, backend_named(library))

    def _claim(self, key: _Key, spec: ArraySpec) -> _Claim:
        claim = self._claims.get(key)
        if claim is None:
            claim = self._claims[key] = _Claim(spec)
        elif isinstance(claim, Target):
            receiver = (claim.backend, claim.array)
            claim = self._claims[key] = _Claim(claim.spec, [receiver], receiver if key in self._fresh else None)
        return claim

    def _claim_boxes(self, leaf: str, sharding: Sharding) -> None:
        for local in sharding.boxes:
            box = local.box
            key = leaf if box.is_whole(sharding.spec.shape) else (leaf, box)
            claim = self._claim(key, spec_of(sharding.spec.dtype, box.shape))
            claim.receivers.append((sharding.backend, local.array))


def _target(key: _Key, claim: _Claim, address: int | None) -> Target:
    leaf, offsets = (key, None) if isinstance(key, str) else (key[0], key[1].offsets)
    (backend, array), *copies = claim.receivers
    return Target(leaf, claim.spec, array, backend, tuple(copies), address, offsets)
