"""Decodes stored state together with live objects, and notes the differences."""

from __future__ import annotations

import collections
import importlib
import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError, UnsupportedValueError, UsageError
from holdfast.format.codecs import (
    Codec,
    codec_tagged,
    is_namedtuple,
    is_plain_dataclass,
    is_tensor_subclass,
    name_of,
)
from holdfast.format.decoding import (
    ABSENT,
    UNFILLED,
    Decoder,
    SubclassNode,
    find_tags,
    malformed,
)
from holdfast.format.encoding import MAX_DEPTH, Encoder, escape
from holdfast.format.records import ALONE, Worker
from holdfast.format.scalars import ENCODERS, tagged
from holdfast.state.adapters import HANDED_OVER, OWNED, REPLACED, TREE, Adapter, CaptureContext, Rules
from holdfast.state.leaves import ArraySpec, Differences, Skeleton
from holdfast.state.match.pending import MatchJob, PendingCoded, PendingNode
from holdfast.state.match.targets import RestoreTargets
from holdfast.state.match.update_in_place import Finished, finish_arrays, update_in_place
from holdfast.state.registry import (
    INTEGRATIONS,
    adapter_of,
    backend_named,
    backend_of,
    backend_of_type,
    find_array,
    holds_objects,
    holds_state,
    list_members,
    node_parts,
    sharder_of_type,
    state_paths,
)

_MANY: Final = 16
"""From this many parts on, the arrays of a container are inspected together."""

_STATE_DICTS: Final = frozenset({"torch.module", "torch.optimizer", "state_dict", "flax.nnx"})
"""Kinds of objects whose state may be a plain dict."""

_REFERENCE: Final = frozenset({"$", "k", "v"})
_NUMBERS: Final = frozenset({"numpy", "int", "float", "complex"})
_NO_FORM: Final = frozenset({*ENCODERS, type(UNFILLED)})

_FORMS = {
    "array": "array",
    "tensor_subclass": "subclass",
    "object": "object",
    "tuple": "sequence",
    "deque": "sequence",
    "dict": "mapping",
    "OrderedDict": "mapping",
    "defaultdict": "mapping",
    "Counter": "mapping",
    "namedtuple": "fields",
    "dataclass": "fields",
    "pytree": "fields",
}


class Comparison(Decoder):
    """The decoder of one matching. It collects differences, claims on leaves, and the objects' jobs."""

    def __init__(
        self,
        objects: Mapping[str, object],
        stored_arrays: Mapping[str, ArraySpec],
        select: Callable[[str], bool] | None,
        worker: Worker = ALONE,
        stored_workers: int = 1,
        *,
        lacks_tuples: bool = False,
    ) -> None:
        super().__init__(find_codec)
        self.context = CaptureContext(objects, list_members)
        self.differences = Differences()
        self.claims = RestoreTargets(self.differences, worker)
        self.jobs: list[MatchJob] = []
        self.selected_count = 0
        self.rules = TREE
        self.like: Any = None
        # An array at the place where those for a codec are created.
        self.beside: Any = None
        self.reseeded: list[str] = []
        self.left: list[str] = []
        self._worker = worker
        self._finished: Finished = {}
        self._has_moved = worker.world_size != stored_workers
        self.stored_arrays = stored_arrays
        self._select = select
        self._lacks_tuples = lacks_tuples
        self.whole = select is None

    def wants(self, path: str) -> bool:
        """Returns True if a path is restored, with everything below it."""
        if self.whole or self._select is None:
            return True
        wanted = self._select(path)
        self.selected_count += wanted
        return wanted

    def decode(self, node: Any, live: Any = UNFILLED, path: str = "value", depth: int = 0) -> Any:
        """Returns the value of a node, or the live one if that stays."""
        if self._lacks_tuples and self.rules.fixed_objects:
            node = _as_tuple(node, live) if isinstance(live, tuple) else _as_node(node, live)
        if type(node) is dict and "$" not in node and not isinstance(live, dict):
            node = _as_state(node, live)
        if self.whole:
            return self._decode_whole(node, live, path, depth)
        if self.wants(path):
            self.whole = True
            try:
                return self._decode_whole(node, live, path, depth)
            finally:
                self.whole = False
        # Something within may be wanted, if both sides have such a value.
        form = _form(node)
        if form in ("object", "mapping", "sequence", "fields") and form == live_form(live):
            return super().decode(node, live, path, depth)
        if form == "mapping" and _is_nothing(live):
            before, made = self.selected_count, super().decode(node, UNFILLED, path, depth)
            if self.selected_count > before:
                return made
        return ABSENT if live is UNFILLED else live

    def standing(self, nodes: Collection[Any], lives: Sequence[Any], depth: int) -> Container[int]:
        """Returns the positions of live arrays that fit, all at once if there are many and none is unusual."""
        if not self.whole or not self.rules.in_place or len(nodes) < _MANY or depth > MAX_DEPTH:
            return ()
        served = {cls: backend_of_type(cls) for cls in set(map(type, lives))}
        library = next(filter(None, served.values()), None)
        if library is None:
            return ()
        own = {cls for cls, backend in served.items() if backend is library}
        places: list[int] = []
        known: dict[str, Any] = {}
        leaves: list[str] = []
        arrays: list[Any] = []
        for place, (node, live) in enumerate(zip(nodes, lives, strict=True)):
            # A reference that is not well-formed is left to the decoding of it, which says what is wrong.
            if type(live) in own and type(node) is dict and node.keys() == _REFERENCE and node["$"] == "array":
                if type(node["v"]) is not str or type(node["k"]) is not str:
                    return ()
                places.append(place)
                # Tied parameters are one array under two names.
                if known.get(node["v"]) is not live:
                    known[node["v"]] = live
                    leaves.append(node["v"])
                    arrays.append(live)
        specs = [spec for spec in map(self.stored_arrays.get, leaves) if spec is not None]
        if len(specs) < len(leaves) or not self.claims.try_live(leaves, specs, arrays, library):
            return ()
        return frozenset(places)

    def _new_arrays(self, leaves: Sequence[str], libraries: Collection[str]) -> Sequence[Any] | None:
        """Returns new arrays for many leaves of one library, all at once if nothing says what else they should be."""
        specs = list(filter(None, map(self.stored_arrays.get, leaves)))
        is_plain = self.whole and self.like is None and self.beside is None and len(libraries) == 1
        if not is_plain or len(specs) < len(leaves):
            return None
        return self.claims.try_new(leaves, specs, backend_named(*libraries))

    def _decode_whole(self, node: Any, live: Any, path: str, depth: int) -> Any:
        if type(live) not in _NO_FORM and self._stands_against(node, live, path):
            self.differences.wrong_kind.append(f"{path}: stored {_describe(node)}, live {_describe_live(live)}")
            return live
        return super().decode(node, live, path, depth)

    def _stands_against(self, node: Any, live: Any, path: str) -> bool:
        """Returns True if a live array or object, or a container of such, blocks something of another form."""
        if not self.rules.fixed_objects or (live_is := live_form(live)) in ("", _form(node)):
            return False
        if not self.rules.fixed_arrays:
            return holds_objects(live) or (is_namedtuple(type(live)) and holds_state(live))  # JAX: an optimizer's.
        # Arithmetic makes a number of a NumPy array without dimensions.
        is_number = "/" not in path and live_is == "array" and live.shape == () and _is_number(node)
        return not is_number and (live_is in ("array", "subclass", "object") or holds_state(live))

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        """Returns the array that will hold a stored leaf: the live one, or a new one."""
        spec = self.stored_arrays.get(leaf)
        if spec is None:
            raise malformed(path, f"there is no array {leaf!r}")
        sharder = sharder_of_type(type(live))
        if sharder is not None:
            return self.claims.live_shared(leaf, spec, live, sharder, library, path, self.rules)
        backend = backend_of(live)
        if backend is not None:
            return self.claims.live(leaf, spec, live, backend, library, path, self.rules)
        if live is ABSENT and self.rules.fixed_arrays:
            self.differences.extra.append(path)
            return ABSENT
        if "/" not in path and self.rules.fixed_arrays and not _is_nothing(live):
            self.differences.wrong_kind.append(f"{path}: stored an array, live {_describe_live(live)}")
            return live
        spec = self._laid_out(spec, path)
        like = sharder_of_type(type(self.like))
        if like is not None and self.like.shape == spec.shape:
            return self.claims.new_shared(leaf, spec, like, self.like, path)
        made_by = backend_named(library)
        return self.claims.new(leaf, spec, made_by, self.beside if backend_of(self.beside) is made_by else None)

    def _laid_out(self, spec: ArraySpec, path: str) -> ArraySpec:
        """Returns what to create for a leaf: with the layout of the array that it belongs to, if the checkpoint has no
        layouts.

        Old checkpoints have none. Some kernels of optimizers require the same layout for a parameter and its state.
        """
        if self.like is None or self._has_layouts:
            return spec
        sharder, backend = sharder_of_type(type(self.like)), backend_of(self.like)
        try:
            if sharder is not None:
                like = sharder.look(self.like, path, self._worker).spec
            elif backend is not None:
                like = backend.spec(self.like, path)
            else:
                return spec
        except UnsupportedValueError:  # It has no memory, or no shape, yet.
            return spec
        fits = like.strides is not None and like.shape == spec.shape
        return msgspec.structs.replace(spec, strides=like.strides) if fits else spec

    @cached_property
    def _has_layouts(self) -> bool:
        return any(spec.strides is not None for spec in self.stored_arrays.values())

    def coded(self, codec: Codec, payload: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the value, or its replacement until the arrays in it have been read: they are created for it."""
        if not any(tag in ("array", "tensor_subclass") for tag, _ in find_tags(payload)):
            return super().coded(codec, payload, live, path, depth)
        # They go to the device of the present ones; without such, to that of the parameter whose state it is.
        beside = find_array(codec.encode(live)) if type(live) is codec.cls else None
        beside = self.like if beside is None else beside
        outer = (self.like, self.beside, self.rules)
        self.like, self.beside, self.rules = None, beside, REPLACED
        try:
            made = self.decode(payload, UNFILLED, path, depth)
        finally:
            self.like, self.beside, self.rules = outer
        self.claims.has_pending = True
        return PendingCoded(codec, made, path, self._finished)

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        """Returns the live tensor, whose parts are filled in place; or a new one, if there is none of that form."""
        cls: Any = self._type(name, live, path, is_tensor_subclass)
        if cls is None:
            return self.unknown_type(name, live, path)
        lives: dict[str, Any] = {}
        context: Any = UNFILLED
        if type(live) is cls:
            names, context = live.__tensor_flatten__()
            if (
                tuple(live.shape) == stored.shape
                and set(names) == set(stored.tensors)
                and _says(context, stored.context)
            ):
                lives = {part: getattr(live, part) for part in names}
            elif self.rules.fixed_arrays:
                self.differences.wrong_kind.append(
                    f"{path}: stored a {cls.__qualname__} of {list(stored.shape)} with other settings than the "
                    f"live one of {list(live.shape)}"
                )
                return live
        outer, self.like = self.like, None
        try:
            parts = {
                part: self.decode(node, lives.get(part, UNFILLED), f"{path}/{escape(part)}", depth)
                for part, node in stored.tensors.items()
            }
        finally:
            self.like = outer
        if lives and all(parts[part] is lives[part] for part in parts):
            return live
        context = Decoder(find_codec).decode(stored.context, context, path, depth)
        try:
            return cls.__tensor_unflatten__(parts, context, stored.shape, stored.strides)
        except Exception as error:
            raise malformed(path, f"{cls.__qualname__} rejected the stored value: {error!r}") from error

    def node(self, name: str, parts: Mapping[str, Any] | None, live: Any, path: str, depth: int) -> Any:
        """Returns the replacement for a value like the live one, with the stored parts, until these have been read."""
        if parts is None and live is not ABSENT and live is not UNFILLED:
            return live
        if live is ABSENT or parts is None:
            self.differences.extra.append(path)
            return ABSENT
        own, cls = node_parts(live), name.rpartition(":")[2]
        if own is None or type(live).__qualname__ != cls:
            if not _is_nothing(live):
                self.differences.wrong_kind.append(f"{path}: stored a {cls}, live {_describe_live(live)}")
                return live
            raise UnsupportedValueError(
                f"{path}: a {cls} is stored, and can be restored only into one that the program has",
                path=path,
                hint=f"Put a {cls} of the same structure there before the restore.",
            )
        missing = [f"{path}/{escape(part)}" for part in own.parts if part not in parts]
        extra = [f"{path}/{escape(part)}" for part in parts if part not in own.parts]
        if missing or extra:
            self.other_fields(missing, extra, path)
        values = dict(own.parts)
        # Such a value is the program's model, whose arrays are known.
        outer, self.rules = self.rules, OWNED if self.rules is TREE else self.rules
        try:
            for part in values.keys() & parts.keys():
                value = self.decode(parts[part], values[part], f"{path}/{escape(part)}", depth)
                values[part] = values[part] if value is ABSENT else value
        finally:
            self.rules = outer
        if all(values[part] is own.parts[part] for part in values):
            return live
        self.claims.has_pending = True
        return PendingNode(own, values, path, self._finished)

    def stateful(self, kind: str, state: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the live object itself, whose loading is prepared."""
        adapter = adapter_of(live)
        if live is ABSENT or live is UNFILLED:
            self.differences.extra.append(path)
            return ABSENT
        if adapter is None or adapter.kind != kind:
            self.differences.wrong_kind.append(
                f"{path}: stored the state of an object ({kind}), live {_describe_live(live)}"
            )
            return live
        if adapter.is_per_worker and self._has_moved:
            self._begin_anew(adapter, state, live, path)
            return live
        rules, selected_before = self.rules, self.selected_count
        try:
            load = adapter.begin_load(live, state, ObjectLoading(self, path, depth))
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"{path}: the current state of {type(live).__qualname__} could not be compared: {error!r}",
                hint="The object itself raised the error; see its cause above.",
            ) from error
        finally:
            self.rules = rules
        if self.whole or self.selected_count > selected_before:
            self.jobs.append(MatchJob(path, adapter.last, load))
        return live

    def _begin_anew(self, adapter: Adapter, state: Any, live: Any, path: str) -> None:
        """Handles per-worker state of another number of workers, which belongs to no worker now."""
        if not self.whole and not self.wants(path):
            return
        load = adapter.begin_anew(live, state, self._worker)
        if load is None:
            self.left.append(path)
        else:
            self.reseeded.append(path)
            self.jobs.append(MatchJob(path, last=True, load=load))

    def complete(self, value: Any) -> Any:
        """Returns the value, with arrays instead of their replacements, now that all have been read."""
        return finish_arrays(value, self._finished) if self.claims.has_pending else value

    def keeps(self, part: Any, path: str) -> bool:
        """Notes what must be stored, and is not; it stays. The rest is removed: what is stored counts."""
        if not self.wants(path):
            return True
        lost: list[str] = []
        # What was asked for by name has to be there.
        if self.rules.fixed_objects or not self.whole:
            lost = state_paths(part, path, only_objects=self.whole and not self.rules.fixed_arrays)
        self.differences.missing += lost
        return bool(lost)

    def unknown_type(self, name: str, live: Any, path: str) -> Any:
        """Notes a difference if there is something else, raises an error if there is nothing."""
        if _is_nothing(live):
            return super().unknown_type(name, live, path)
        cls = name.rpartition(":")[2]
        self.differences.wrong_kind.append(
            f"{path}: stored a {cls}, live {_describe_live(live)} (holdfast.register_type({cls}) accepts the "
            "stored type)"
        )
        return live

    def other_fields(self, missing: list[str], extra: list[str], path: str) -> None:
        """Notes changed fields as differences, because they are part of the program."""
        self.differences.missing += [name for name in missing if self.wants(name)]
        self.differences.extra += [name for name in extra if self.wants(name)]


class ObjectLoading:
    """The interface for the adapter of one object; see `Loading`."""

    def __init__(self, comparison: Comparison, path: str, depth: int) -> None:
        self.path = path
        self.context = comparison.context
        self._comparison = comparison
        self._depth = depth

    @property
    def differences(self) -> Differences:
        """The differences."""
        return self._comparison.differences

    def name(self, *at: str) -> str:
        """Returns the path of something in the object."""
        return "/".join([self.path, *map(escape, at)])

    def complete(self, value: Any) -> Any:
        """Returns the value, with all arrays in place."""
        return self._comparison.complete(value)

    def put(self, live: Any, value: Any) -> Any:
        """Returns the value after the live one has been changed."""
        return update_in_place(live, self.complete(value), {})

    def wants(self, *at: str) -> bool:
        """Returns True if that path is restored."""
        return self._comparison.whole or self._comparison.wants(self.name(*at))

    def value(self, stored: Skeleton, live: Any, *at: str, rules: Rules = HANDED_OVER, like: Any = None) -> Any:
        """Returns the stored value."""
        comparison = self._comparison
        outer, comparison.rules = comparison.rules, rules
        outer_like, comparison.like = comparison.like, like
        try:
            path = self.name(*at)
            value = comparison.decode(stored, UNFILLED if live is None else live, path, self._depth + len(at))
        finally:
            comparison.rules, comparison.like = outer, outer_like
        return live if value is ABSENT else value

    def values(
        self,
        stored: Mapping[str, Skeleton],
        live: Mapping[str, Any],
        *at: str,
        rules: Rules = HANDED_OVER,
        like: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the stored values of many parts."""
        nodes: list[Skeleton] = []
        parts: list[Any] = []
        places: dict[str, range] = {}
        for name, node in stored.items():
            begin, part = len(nodes), live.get(name)
            if type(node) is dict and type(part) is dict and "$" not in node and node.keys() == part.keys():
                nodes += node.values()
                parts += map(part.__getitem__, node)
            else:
                nodes.append(node)
                parts.append(part)
            places[name] = range(begin, len(nodes))
        comparison = self._comparison
        outer, comparison.rules = comparison.rules, rules
        try:
            standing = comparison.standing(nodes, parts, self._depth + len(at) + 2)
        finally:
            comparison.rules = outer
        values: dict[str, Any] = {}
        for name, node in stored.items():
            if places[name] and all(map(standing.__contains__, places[name])):
                values[name] = dict(live[name]) if type(live[name]) is dict else live[name]
            else:
                one = None if like is None else like.get(name)
                values[name] = self.value(node, live.get(name), *at, name, rules=rules, like=one)
        return values

    def spec_of(self, stored: Skeleton) -> ArraySpec | None:
        """Returns the description of a stored array."""
        leaf = stored.get("v") if type(stored) is dict and stored.get("$") == "array" else None
        return self._comparison.stored_arrays.get(leaf) if type(leaf) is str else None

    def children(self, stored: Skeleton, *at: str) -> dict[str, Skeleton]:
        """Returns the parts of a stored dict."""
        if type(stored) is not dict or "$" in stored:
            raise malformed(self.name(*at), "expected a dict")
        return stored


def _says(context: Any, stored: Any) -> bool:
    """Returns True if a tensor subclass has the stored settings."""
    try:
        return bool(Encoder().encode(context, "") == stored)
    except UnsupportedValueError:
        return False


def _as_state(node: Any, live: Any) -> Any:
    """Converts the result of `state_dict()`, stored as a plain dict, to the state of the object that is to load it."""
    if type(live) in ENCODERS or live_form(live) != "object":
        return node
    adapter = adapter_of(live)
    kind = adapter.kind if adapter is not None else ""
    return {"$": "object", "k": kind, "v": node} if kind in _STATE_DICTS else node


def _as_tuple(node: Any, live: tuple[Any, ...]) -> Any:
    """Converts a list to the program's tuple, and a dict of its fields to its named tuple."""
    cls: Any = type(live)
    if cls is tuple:
        return {"$": "tuple", "v": node} if type(node) is list else node
    if not is_namedtuple(cls):
        return node
    if node is None and not cls._fields:
        node = {}
    if type(node) is not dict or node.keys() != set(cls._fields):
        return node
    return {"$": "namedtuple", "k": name_of(cls), "v": node}


def _as_node(node: Any, live: Any) -> Any:
    """Converts a dict of its parts to the program's node, such as a `TrainState`."""
    if type(node) is not dict or "$" in node or isinstance(live, dict):
        return node
    own = node_parts(live)
    return node if own is None or own.parts.keys() != node.keys() else tagged("pytree", node, name_of(type(live)))


def live_form(live: Any) -> str:
    """Returns the kind of tree that a live value is: empty for plain values."""
    if type(live) in _NO_FORM:
        return ""
    if backend_of(live) is not None or sharder_of_type(type(live)) is not None:
        return "array"
    if adapter_of(live) is not None:
        return "object"
    if isinstance(live, dict):
        return "mapping"
    if isinstance(live, (list, tuple, collections.deque)):
        return "fields" if is_namedtuple(type(live)) else "sequence"
    if is_tensor_subclass(type(live)):
        return "subclass"
    return "fields" if is_plain_dataclass(type(live)) or node_parts(live) is not None else ""


def _is_nothing(live: Any) -> bool:
    return live is None or live is ABSENT or live is UNFILLED


def _form(node: Any) -> str:
    if type(node) is list:
        return "sequence"
    if type(node) is not dict:
        return ""
    tag = node.get("$")
    return _FORMS.get(tag, "") if type(tag) is str else "mapping"


def _is_number(node: Any) -> bool:
    return type(node) in (bool, int, float) or (type(node) is dict and node.get("$") in _NUMBERS)


def _describe(node: Any) -> str:
    form = _form(node)
    if form == "object":
        return f"the state of an object ({node.get('k')})"
    if form == "subclass":
        return f"a tensor of type {str(node.get('k')).rpartition(':')[2]}"
    return {"array": "an array", "sequence": "a sequence", "mapping": "a dict", "fields": "a record"}.get(
        form, "None" if node is None else "a plain value"
    )


def _describe_live(live: Any) -> str:
    return "None" if live is None else f"a {type(live).__qualname__}"


def find_codec(tag: str) -> Codec | None:
    """Returns the codec of a tag. Codecs of frameworks are registered when the framework's integration is imported."""
    package = tag.partition(".")[0]
    if package in INTEGRATIONS and package in sys.modules and INTEGRATIONS[package] not in sys.modules:
        importlib.import_module(INTEGRATIONS[package])
    return codec_tagged(tag)
