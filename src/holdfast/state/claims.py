"""Which array receives the bytes of each stored leaf."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from holdfast.state.adapters import Rules
from holdfast.state.leaves import ArrayBackend, ArraySpec, Differences, Target
from holdfast.state.registry import backend_named


@dataclass(slots=True)
class _Claim:
    spec: ArraySpec
    receivers: list[tuple[ArrayBackend, Any]] = field(default_factory=list)
    made: tuple[ArrayBackend, Any] | None = None


class Claims:
    """Collects, for each leaf that is needed, the arrays that want it.

    Arrays that were one when they were stored become one again where they are made anew; where live ones stand, each
    gets the values. Live memory takes one leaf only.
    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        # A leaf that one live array wants stands as its target, without a claim: of those there may be very many.
        self._claims: dict[str, _Claim | Target] = {}
        # By the library's name, then by what tells one piece of its memory from another.
        self._by_memory: dict[str, dict[Hashable, str]] = {}

    def new(self, leaf: str, spec: ArraySpec, backend: ArrayBackend, like: Any = None) -> Any:
        """An array made for the leaf, where a live one lies if there is one to go by."""
        claim = self._claim(leaf, spec)
        if claim.made is None or claim.made[0] is not backend:
            claim.made = (backend, backend.new(spec, like))
            claim.receivers.append(claim.made)
        return claim.made[1]

    def live(
        self, leaf: str, spec: ArraySpec, array: Any, backend: ArrayBackend, library: str, path: str, rules: Rules
    ) -> Any:
        """The live array if it is to be filled where it is or does not fit, otherwise one made like it.

        `library` is where the stored array came from: the live one's may not know its element type.

        Raises:
            UnsupportedValueError: If the live array has a form that cannot be filled.
        """
        live = backend.spec(array, path)
        if live.shape != spec.shape:
            if not rules.in_place and 0 in live.shape:
                is_known = live.dtype == spec.dtype or backend.name == library
                return (
                    self.new(leaf, spec, backend, array) if is_known else self.new(leaf, spec, backend_named(library))
                )
            self._differences.wrong_shape.append(f"{path}: stored {list(spec.shape)}, live {list(live.shape)}")
            return array
        if live.dtype != spec.dtype:
            self._differences.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {live.dtype}")
            return array
        memory = backend.alias_key(array)
        by_memory = self._by_memory.setdefault(backend.name, {})
        owner = by_memory.get(memory)
        if owner == leaf:
            return array
        if not (rules.in_place and backend.fillable(array)) or (owner is not None and not rules.fixed_keys):
            return self.new(leaf, spec, backend, array)
        if owner is not None:
            self._differences.wrong_kind.append(f"{path}: stored apart from {owner}, live the two share their memory")
            return array
        by_memory[memory] = leaf
        self._claim(leaf, spec).receivers.append((backend, array))
        return array

    def try_live(
        self, leaves: Sequence[str], specs: Sequence[ArraySpec], arrays: Sequence[Any], backend: ArrayBackend
    ) -> bool:
        """Does what `live` does in place for each of many arrays, if there is nothing to say about any of them.

        Args:
            leaves: The leaf that each of them is to get.
            specs: What these are.
            arrays: The live arrays.
            backend: The library of all of them.

        Returns:
            False if nothing was done: an array does not fit or is not plain, or a leaf or an array stands twice.
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
        """One target for each leaf that something wants."""
        return tuple(
            [claim if isinstance(claim, Target) else _target(leaf, claim) for leaf, claim in self._claims.items()]
        )

    def _claim(self, leaf: str, spec: ArraySpec) -> _Claim:
        claim = self._claims.get(leaf)
        if claim is None:
            claim = self._claims[leaf] = _Claim(spec)
        elif isinstance(claim, Target):
            claim = self._claims[leaf] = _Claim(claim.spec, [(claim.backend, claim.array)])
        return claim


def _target(leaf: str, claim: _Claim) -> Target:
    backend, array = claim.receivers[0]
    return Target(leaf, claim.spec, array, backend, tuple(claim.receivers[1:]), backend.address(array))
