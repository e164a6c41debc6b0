"""Chooses the array that receives the bytes of each stored leaf."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias

from holdfast.format.records import ALONE, Worker
from holdfast.format.shapes import Box
from holdfast.state.adapters import Rules
from holdfast.state.leaves import ArrayBackend, ArraySpec, Differences, PendingArray, Sharder, Sharding, Target, spec_of
from holdfast.state.registry import backend_named

_Key: TypeAlias = str | tuple[str, Box]
"""A leaf, or a box that is a part of it."""


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

    def __init__(self, differences: Differences, worker: Worker = ALONE) -> None:
        # True if a placeholder is used for an array that is created when its values have come.
        self.has_pending = False
        self._differences = differences
        self._worker = worker
        # A leaf that one live array wants is stored as its target, without a claim: of those there may be very many.
        self._claims: dict[_Key, _Claim | Target] = {}
        # The leaves of those targets whose arrays are new.
        self._fresh: set[_Key] = set()
        # By leaf: the sharded array that was made for it.
        self._made: dict[str, tuple[Sharding, Any]] = {}
        # By the library's name, then by what tells one piece of its memory from another.
        self._by_memory: dict[str, dict[Hashable, str]] = {}

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

    def try_new(self, leaves: Sequence[str], specs: Sequence[ArraySpec], backend: ArrayBackend) -> list[Any] | None:
        """Does what `new` does for each of many leaves; returns None if one of them is needed elsewhere, too."""
        distinct = dict(zip(leaves, specs, strict=True))
        if not self._claims.keys().isdisjoint(distinct):
            return None
        arrays = {leaf: backend.new(spec) for leaf, spec in distinct.items()}
        for leaf, array in arrays.items():
            self._note(leaf, array)
        addresses = map(backend.address, arrays.values())
        made = map(Target, arrays, distinct.values(), arrays.values(), repeat(backend), repeat(()), addresses)
        self._claims.update(zip(arrays, made, strict=True))
        self._fresh.update(arrays)
        return list(map(arrays.__getitem__, leaves))

    def live(
        self, leaf: str, spec: ArraySpec, array: Any, backend: ArrayBackend, library: str, path: str, rules: Rules
    ) -> Any:
        """Returns the live array if it is to be filled in place or does not fit, otherwise a similar new one.

        `library` is that of the stored array: the live one's may not know its element type.

        Raises:
            UnsupportedValueError: If the live array has a form that cannot be filled, or no similar one can be created.
        """
        live = backend.spec(array, path)
        if not rules.fixed_shapes and (live.dtype, live.shape) != (spec.dtype, spec.shape):
            return self._replace(leaf, spec, live, array, backend, library, path)
        if not self._fits(live, spec, path):
            return array
        memory = backend.alias_key(array)
        owner = self._by_memory.setdefault(backend.name, {}).get(memory)
        if owner == leaf:
            return array
        if not (rules.in_place and backend.fillable(array)) or (owner is not None and not rules.fixed_arrays):
            return self.new(leaf, spec, backend, array)
        if self._takes(leaf, backend, memory, path):
            self._claim(leaf, spec).receivers.append((backend, array))
        return array

    def new_shared(self, leaf: str, spec: ArraySpec, sharder: Sharder, like: Any, path: str) -> Any:
        """Returns a new array for the leaf, with another one's sharding.

        Raises:
            UnsupportedValueError: If the library cannot create it.
        """
        array = sharder.new(like, spec)
        sharding = sharder.look(array, path, self._worker)
        made = self._made.get(leaf)
        if made is not None and _lie_alike(made[0], sharding):
            return made[1]
        self._made[leaf] = (sharding, array)
        self._note(leaf, array)
        self._claim_boxes(leaf, sharding)
        return array

    def live_shared(
        self, leaf: str, spec: ArraySpec, array: Any, sharder: Sharder, library: str, path: str, rules: Rules
    ) -> Any:
        """Like `live`, for an array of which this worker holds some boxes, or none.

        One that is divided, or of typed keys, must fit.

        Raises:
            UnsupportedValueError: If the live array has a form that cannot be filled, or no similar one can be created.
        """
        sharding = sharder.look(array, path, self._worker)
        live, backend = sharding.spec, sharding.backend
        is_special = sharding.workers or sharding.is_by_hand or sharding.is_abstract or sharding.place
        if (
            len(sharding.boxes) == 1
            and not is_special
            and not rules.fixed_shapes
            and (live.dtype, live.shape) != (spec.dtype, spec.shape)
        ):
            return self._replace(leaf, spec, live, array, backend, library, path)
        if not self._fits(live, spec, path):
            return array
        owner = self._by_memory.setdefault(backend.name, {}).get(sharding.memory)
        if owner == leaf:
            return array
        fillable = rules.in_place and all(backend.fillable(local.array) for local in sharding.boxes)
        if not fillable or (owner is not None and not rules.fixed_arrays):
            return self.new_shared(leaf, spec, sharder, array, path)
        if self._takes(leaf, backend, sharding.memory, path):
            self._claim_boxes(leaf, sharding)
        return array

    def try_live(
        self, leaves: Sequence[str], specs: Sequence[ArraySpec], arrays: Sequence[Any], backend: ArrayBackend
    ) -> bool:
        """Does what `live` does in place for each of many arrays, if there is nothing to report about any of them.

        Args:
            leaves: The leaf for each of them.
            specs: Their descriptions.
            arrays: The live arrays.
            backend: The library of all of them.

        Returns:
            False if nothing was done: an array does not fit or is not plain, or a leaf or an array appears twice.
        """
        plain = backend.try_plain(arrays)
        if plain is None or plain.specs != specs:
            return False
        memories = dict(zip(plain.alias_keys, leaves, strict=True))
        targets = dict(
            zip(leaves, map(Target, leaves, specs, arrays, repeat(backend), repeat(()), plain.addresses), strict=True)
        )
        by_memory = self._by_memory.setdefault(backend.name, {})
        if len(memories) < len(leaves) or len(targets) < len(leaves):
            return False
        if not by_memory.keys().isdisjoint(memories) or not self._claims.keys().isdisjoint(targets):
            return False
        by_memory.update(memories)
        self._claims.update(targets)
        return True

    def targets(self) -> tuple[Target, ...]:
        """Returns one target for each leaf that is needed."""
        return tuple(
            [claim if isinstance(claim, Target) else _target(key, claim) for key, claim in self._claims.items()]
        )

    def _note(self, leaf: str, array: Any) -> None:
        if isinstance(array, PendingArray):
            array.check(leaf)
            self.has_pending = True

    def _replace(
        self, leaf: str, spec: ArraySpec, live: ArraySpec, array: Any, backend: ArrayBackend, library: str, path: str
    ) -> Any:
        """Returns a new array for a stored one of another shape or type; another shape is noted."""
        if live.shape != spec.shape and 0 not in live.shape and live.shape:
            text = f"{path} {list(spec.shape)} (your script begins with {list(live.shape)})"
            self._differences.replaced.append(text)
        if live.dtype == spec.dtype or backend.name == library:
            return self.new(leaf, spec, backend, array)
        return self.new(leaf, spec, backend_named(library))

    def _fits(self, live: ArraySpec, spec: ArraySpec, path: str) -> bool:
        if live.shape != spec.shape:
            self._differences.wrong_shape.append(f"{path}: stored {list(spec.shape)}, live {list(live.shape)}")
        elif live.dtype != spec.dtype:
            self._differences.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {live.dtype}")
        return (live.dtype, live.shape) == (spec.dtype, spec.shape)

    def _takes(self, leaf: str, backend: ArrayBackend, memory: Hashable, path: str) -> bool:
        """Reserves live memory for a leaf; returns False if another leaf has it."""
        owner = self._by_memory[backend.name].setdefault(memory, leaf)
        if owner != leaf:
            self._differences.wrong_kind.append(
                f"{path}: stored separately from {owner}, but the live arrays share memory"
            )
        return owner == leaf

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


def _lie_alike(one: Sharding, other: Sharding) -> bool:
    return one.place == other.place and [local.box for local in one.boxes] == [local.box for local in other.boxes]


def _target(key: _Key, claim: _Claim) -> Target:
    leaf, offsets = (key, None) if isinstance(key, str) else (key[0], key[1].offsets)
    backend, array = claim.receivers[0]
    return Target(leaf, claim.spec, array, backend, tuple(claim.receivers[1:]), backend.address(array), offsets)
