"""Matches stored state with live objects: the differences, the destinations of stored bytes, and how to apply them.

Matching changes nothing. It decodes every plain value, finds or creates an array for each stored one that is needed,
and prepares each object's loading. After the arrays have been filled, `Matching.apply` puts everything in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any, Final

import msgspec

from holdfast.errors import ApplyError, HoldfastError, UnsupportedValueError
from holdfast.format.codecs import Codec, type_named
from holdfast.format.decoding import ABSENT, NAMED, UNFILLED, SubclassNode, find_tags
from holdfast.format.encoding import escape
from holdfast.format.names import OLD_RUN_CALLS, RUN_CALLS, is_own
from holdfast.format.records import ALONE, Worker
from holdfast.process.latch import gc_paused
from holdfast.state.adapters import MADE_ANEW, OWNED, TREE
from holdfast.state.leaves import ArraySpec, Differences, Skeleton, Target
from holdfast.state.match.compare import Comparison, MatchJob, find_codec
from holdfast.state.match.forms import live_form
from holdfast.state.match.targets import At, WantedArrays
from holdfast.state.match.update_in_place import Updated, update_in_place
from holdfast.state.registry import immutable_arrays_in
from holdfast.state.sharding import PER_WORKER, PerWorker

_OF_CLASSES: Final = frozenset({"namedtuple", "dataclass"})


class PlainForm:
    """A placeholder of an object of which only the name is known."""


PLAIN: Final = PlainForm()


class PlainDecoder(Comparison):
    """The decoder of objects without live ones: it needs no type of the program."""

    def __init__(self, beside: Comparison) -> None:
        """Collects the results where another comparison does."""
        super().__init__({}, beside.stored_arrays, None)
        self.claims, self.differences = beside.claims, beside.differences
        self._find_codec = lambda tag: find_codec(tag) or Codec(object, tag, lambda value: value, lambda value: value)

    def take(self, wanted: WantedArrays) -> list[Any]:
        """Returns NumPy arrays."""
        for number, spec in enumerate(wanted.specs):
            if spec.quantizer is not None:
                path = wanted.path_of(number)
                raise UnsupportedValueError(
                    f"{path}: NumPy cannot represent a quantized array",
                    path=path,
                    hint="Read it into the program's own tree, with `like`.",
                )
        return self.claims.take(wanted._replace(libraries=["numpy"] * len(wanted.leaves)), At())

    def stateful(self, kind: str, state: Any, live: Any, path: str, depth: int) -> Any:
        """Returns only the state."""
        return self.decode(state, UNFILLED, path, depth)

    def coded(self, codec: Codec, payload: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the value; if it contains arrays, the input of its codec."""
        if any(tag in ("array", "tensor_subclass") for tag, _ in find_tags(payload)):
            return self.decode(payload, UNFILLED, path, depth)
        return super().coded(codec, payload, live, path, depth)

    def node(self, name: str, parts: Mapping[str, Any] | None, live: Any, path: str, depth: int) -> Any:
        """Returns the parts by name; None for a value of the program itself."""
        return None if parts is None else self.mapping(parts, UNFILLED, path, depth)

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        """Returns the tensors of which it is made, by name."""
        return self.mapping(stored.tensors, UNFILLED, path, depth)

    def _tagged(self, node: Any, live: Any, path: str, depth: int) -> Any:
        tag, payload = node["$"], node.get("v")
        if tag in _OF_CLASSES and type(payload) is dict and "$" not in payload:
            return self.mapping(payload, UNFILLED, path, depth)
        if tag in ("enum", "flag") and node.keys() == {"$", "k", "v"}:
            return self.decode(payload, UNFILLED, path, depth)
        return super()._tagged(node, live, path, depth)


class _Renewal(msgspec.Struct, frozen=True):
    name: str
    live: Any
    value: Any


class Matching(msgspec.Struct, frozen=True):
    """A checkpoint matched with live objects, ready to be applied.

    Attributes:
        differences: What does not fit. Everything else is restored when `apply` is called.
        targets: The destination of each array that is needed.
        reseeded: Random generators that are reseeded, because the number of workers has changed.
        left: Per-worker state that is left unchanged, for the same reason.
    """

    differences: Differences
    targets: tuple[Target, ...]
    reseeded: tuple[str, ...]
    left: tuple[str, ...]
    _complete: Callable[[Any], Any]
    _renewals: tuple[_Renewal, ...]
    _jobs: tuple[MatchJob, ...]

    def apply(self) -> dict[str, object]:
        """Puts everything in place, once all targets are filled: their copies too, then values and objects.

        Random generators come last, because the loading of other objects may draw from them. With several workers
        the order is that of the paths, because some objects load only if all workers do.

        Returns:
            For each named object that could not be changed in place (a number, for example), its new value.

        Raises:
            ApplyError: If an object rejects its state; objects before it have been changed.
        """
        for target in self.targets:
            if target.copies:
                fill_copies(target)
        changed: dict[str, object] = {}
        updated: Updated = {}
        for renewal in self._renewals:
            stands = update_in_place(renewal.live, self._complete(renewal.value), updated)
            if stands is not renewal.live:
                changed[renewal.name] = stands
        for job in self._jobs:
            try:
                job.load()
            except HoldfastError:
                raise
            except Exception as error:
                raise ApplyError(
                    f"{job.path} rejected the stored state: {error!r}",
                    hint="Objects before it have already been changed: restore into new objects, or fix this one. "
                    f'keep_current=["{job.path.partition("/")[0]}"] leaves it as the program made it.',
                ) from error
        return changed


@gc_paused()
def match_objects(
    objects: Mapping[str, object],
    stored_objects: Mapping[str, Skeleton],
    stored_arrays: Mapping[str, ArraySpec],
    *,
    select: Callable[[str], bool] | None = None,
    worker: Worker = ALONE,
    stored_workers: int = 1,
    left_out: Collection[str] = (),
    made_anew: Collection[str] = (),
    lacks_tuples: bool = False,
) -> Matching:
    """Compares stored state with live objects, which are not changed.

    Args:
        objects: The live objects by name.
        stored_objects: The stored skeleton of each object.
        stored_arrays: The description of each stored leaf.
        select: Called with paths, of whole objects (`model`) and of their parts (`model/layers.0.weight`). If it
            returns True, the path and everything below it is restored, and only that counts as a difference. Without
            it, everything is. The caller checks whether it was ever true.
        worker: The rank of this worker among all.
        stored_workers: The number of workers when the state was stored.
        left_out: The names of objects that are left unchanged.
        made_anew: The names of objects that only describe what to create; they are left unchanged. `PLAIN` says
            nothing.
        lacks_tuples: True if tuples may be stored as lists, and named tuples as dicts of their fields, as in an
            imported checkpoint. The live trees then tell which are.

    Raises:
        FormatError: If the stored state is malformed.
        UnsupportedValueError: If a type is not known here, or a live array has a form that cannot be filled.
        UsageError: If an object's state cannot be read.
        MemoryError: If there is no memory for new arrays.
    """
    # State that differs per worker must not be mixed with that of the worker whose state this one takes.
    has_moved = worker.world_size != stored_workers
    comparison = Comparison(objects, stored_arrays, select, worker, stored_workers, lacks_tuples=lacks_tuples)
    stored_objects = _rename_old(stored_objects, objects)
    renewals = []
    for name, live in objects.items() if worker.is_alone else sorted(objects.items(), key=itemgetter(0)):
        path = escape(name)
        if name in left_out:
            continue
        if name in stored_objects:
            if name in made_anew:
                renewals.append(_Renewal(name, UNFILLED, _make_anew(comparison, stored_objects[name], live, path)))
                continue
            # The program holds an array itself; but it has to take one that cannot be changed from the checkpoint.
            is_held = live_form(live) in ("array", "subclass") and not immutable_arrays_in(live)
            comparison.at = At(OWNED if is_held else TREE)
            value = comparison.decode(stored_objects[name], live, path)
            if value is not live and value is not ABSENT:
                renewals.append(_Renewal(name, live, value))
        elif comparison.wants(path) and not is_own(name):
            missing = comparison.left if has_moved and isinstance(live, PerWorker) else comparison.differences.missing
            missing.append(path)
    for name, stored in stored_objects.items():
        if has_moved and isinstance(stored, dict) and (stored.get("$"), stored.get("k")) == ("object", PER_WORKER):
            continue  # It belongs to a worker that does not exist any more.
        if name not in objects and name not in left_out and not is_own(name) and comparison.wants(escape(name)):
            comparison.at = At()
            if _can_be_made(stored):
                renewals.append(_Renewal(name, UNFILLED, comparison.decode(stored, UNFILLED, escape(name))))
            else:
                comparison.differences.extra.append(escape(name))
    # An object in another one comes before it.
    parts = {job.path: [] if worker.is_alone else [*job.path.split("/"), "\U0010ffff"] for job in comparison.jobs}
    return Matching(
        differences=comparison.differences,
        targets=comparison.claims.targets(),
        reseeded=tuple(comparison.reseeded),
        left=tuple(comparison.left),
        _complete=comparison.complete,
        _renewals=tuple(renewals),
        _jobs=tuple(sorted(comparison.jobs, key=lambda job: (job.last, parts[job.path]))),
    )


_ONLY_LIVE: Final = frozenset({"object", "pytree", "live"})


def _can_be_made(node: Skeleton) -> bool:
    """Returns True if a stored value needs no live one: no object, and no type that only a live value can name."""
    for tag, name in find_tags(node):
        is_known = (tag != "codec" or find_codec(str(name))) and (tag not in NAMED or type_named(str(name)))
        if tag in _ONLY_LIVE or not is_known:
            return False
    return True


def _make_anew(comparison: Comparison, stored: Skeleton, like: Any, path: str) -> Any:
    if like is PLAIN and comparison.wants(path):
        return PlainDecoder(comparison).decode(stored, UNFILLED, path)
    with comparison.under(At(MADE_ANEW)):
        return comparison.decode(stored, like, path)


def _rename_old(stored: Mapping[str, Skeleton], live: Mapping[str, object]) -> Mapping[str, Skeleton]:
    """**Pure.** Gives holdfast's own stored objects their current names."""
    state = stored.get(OLD_RUN_CALLS)
    if OLD_RUN_CALLS in live or not isinstance(state, dict) or state.get("k") != "state_dict":
        return stored
    count = state.get("v")
    if not isinstance(count, dict) or count.keys() != {"count"} or type(count["count"]) is not int:
        return stored
    return {RUN_CALLS if name == OLD_RUN_CALLS else name: node for name, node in stored.items()}


def fill_copies(target: Target) -> None:
    """Gives the further arrays of a target its values."""
    data = memoryview(bytearray(target.spec.size_bytes))
    target.backend.copy_out([target.array], data, [0])
    for backend, array in target.copies:
        backend.copy_in(array, data)
