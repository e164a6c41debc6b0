"""Decodes stored state together with live objects, and notes the differences."""

from __future__ import annotations

import collections
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.errors import HoldfastError, UnsupportedValueError, UsageError
from holdfast.format.codecs import (
    Codec,
    codec_tagged,
    is_namedtuple,
    is_tensor_subclass,
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
from holdfast.state.adapters import HANDED_OVER, OWNED, REPLACED, TREE, Adapter, CaptureContext, Rules
from holdfast.state.describe import split_rows
from holdfast.state.leaves import ArraySpec, Differences, Skeleton
from holdfast.state.match.forms import (
    NO_FORM,
    as_node,
    as_state,
    as_tuple,
    describe,
    describe_live,
    form_of,
    is_nothing,
    is_number,
    live_form,
)
from holdfast.state.match.targets import At, RestoreTargets, WantedArrays
from holdfast.state.match.update_in_place import Finished, PendingValue, finish_arrays, update_in_place
from holdfast.state.registry import (
    INTEGRATIONS,
    adapter_of,
    find_array,
    holds_state,
    is_array_type,
    list_members,
    node_parts,
    state_paths,
)

_MANY_ROWS: Final = 32
"""From this many elements on, the parts of a sequence's rows, such as a replay buffer's, are decoded together."""


_ATOMS: Final = frozenset({type(None), bool, int, float, str})


_ROWS: Final[dict[tuple[type, str], type]] = {(list, ""): list, (dict, "tuple"): tuple, (dict, ""): dict}
"""For a node's class and tag, the class of rows that are decoded together."""


class MatchJob(msgspec.Struct, frozen=True):
    """The prepared loading of one object.

    Attributes:
        path: The object.
        last: True if it comes after all others.
        load: Performs it.
    """

    path: str
    last: bool
    load: Callable[[], None]


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
        self.claims = RestoreTargets(self.differences, stored_arrays, worker)
        self.jobs: list[MatchJob] = []
        self.selected_count = 0
        self.at = At()
        self.reseeded: list[str] = []
        self.left: list[str] = []
        self._worker = worker
        self._finished: Finished = {}
        self._has_moved = worker.world_size != stored_workers
        self.stored_arrays = stored_arrays
        self._select = select
        self._lacks_tuples = lacks_tuples
        self.whole = select is None

    @contextmanager
    def under(self, at: At) -> Iterator[None]:
        """Takes what is decoded in the block in another way."""
        outer, self.at = self.at, at
        try:
            yield
        finally:
            self.at = outer

    def wants(self, path: str) -> bool:
        """Returns True if a path is restored, with everything below it."""
        if self.whole or self._select is None:
            return True
        wanted = self._select(path)
        self.selected_count += wanted
        return wanted

    def decode(self, node: Any, live: Any = UNFILLED, path: str = "value", depth: int = 0) -> Any:
        """Returns the value of a node, or the live one if that stays."""
        if self._lacks_tuples and self.at.rules.fixed_objects:
            node = as_tuple(node, live) if isinstance(live, tuple) else as_node(node, live)
        if type(node) is dict and "$" not in node and not isinstance(live, dict):
            node = as_state(node, live)
        if self.whole:
            return self._decode_whole(node, live, path, depth)
        if self.wants(path):
            self.whole = True
            try:
                return self._decode_whole(node, live, path, depth)
            finally:
                self.whole = False
        # Something within may be wanted, if both sides have such a value.
        form = form_of(node)
        if form in ("object", "mapping", "sequence", "fields") and form == live_form(live):
            return super().decode(node, live, path, depth)
        if form == "mapping" and is_nothing(live):
            before, made = self.selected_count, super().decode(node, UNFILLED, path, depth)
            if self.selected_count > before:
                return made
        return ABSENT if live is UNFILLED else live

    def parts(
        self, nodes: Sequence[Any], lives: Sequence[Any], path_of: Callable[[int], str], depth: int
    ) -> Iterable[Any]:
        """Returns the values of the parts of one container; all arrays among them are found or created together."""
        if not self.whole or depth > MAX_DEPTH:
            return super().parts(nodes, lives, path_of, depth)
        kinds = list(map(type, lives))
        takes_arrays = {cls: cls in NO_FORM or is_array_type(cls) for cls in set(kinds)}
        values: list[Any] = list(nodes)
        arrays: list[int] = []
        others: list[int] = []
        for place, (node, cls) in enumerate(zip(nodes, kinds, strict=True)):
            if type(node) is dict and node.get("$") == "array" and takes_arrays[cls]:
                arrays.append(place)
            elif type(node) not in _ATOMS or cls not in NO_FORM:
                others.append(place)
        if len(arrays) < len(nodes):
            nodes_of_arrays, own = [nodes[place] for place in arrays], [lives[place] for place in arrays]
        else:
            nodes_of_arrays, own = list(nodes), list(lives)
        wanted = self._find_wanted(nodes_of_arrays, own, lambda number: path_of(arrays[number]))
        if wanted is None:  # What is wrong with one is found when it is decoded by itself.
            return super().parts(nodes, lives, path_of, depth)
        for place, array in zip(arrays, self.take(wanted) if arrays else (), strict=True):
            values[place] = array
        for place in others:
            values[place] = self.decode(nodes[place], lives[place], path_of(place), depth)
        return values

    def _find_wanted(
        self, nodes: Sequence[Any], lives: Sequence[Any], path_of: Callable[[int], str]
    ) -> WantedArrays | None:
        """Returns references to stored arrays; None if one of them is malformed."""
        try:
            leaves, libraries = list(map(itemgetter("v"), nodes)), list(map(itemgetter("k"), nodes))
        except KeyError:
            return None
        kinds = {*map(type, leaves), *map(type, libraries)}
        if not {str}.issuperset(kinds) or not {3}.issuperset(map(len, nodes)):
            return None
        specs = list(filter(None, map(self.stored_arrays.get, leaves)))
        return WantedArrays(leaves, specs, libraries, lives, path_of) if len(specs) == len(leaves) else None

    def take(self, wanted: WantedArrays) -> list[Any]:
        """Returns the arrays that will hold stored ones: live ones, or new ones."""
        return self.claims.take(wanted, self.at)

    def sequence(self, nodes: Any, live: Any, path: str, depth: int) -> list[Any]:
        """Returns the elements; those of similar rows at once."""
        is_long = self.whole and not self._lacks_tuples and type(nodes) is list and len(nodes) >= _MANY_ROWS
        made = self._try_rows(nodes, live, path, depth) if is_long and depth < MAX_DEPTH else None
        return super().sequence(nodes, live, path, depth) if made is None else made

    def _try_rows(self, nodes: list[Any], live: Any, path: str, depth: int) -> list[Any] | None:
        """Returns the elements of a sequence of rows of one form; None if they, or the live ones, are not."""
        kinds: set[type] = set(map(type, nodes))
        tags = {str(node.get("$", "")) for node in nodes} if kinds == {dict} else {""}
        kind, tag = kinds.pop(), tags.pop()
        cls: Any = _ROWS.get((kind, tag))
        if kinds or tags or cls is None:
            return None
        rows = [node.get("v") for node in nodes if len(node) == 2] if cls is tuple else nodes
        present = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
        if len(rows) < len(nodes) or not {list, dict}.issuperset(map(type, rows)) or len(present) > len(nodes):
            return None
        stored, own = split_rows(rows), split_rows(present) if present else None
        if stored.cls is None or (own is not None and (own.cls, own.keys) != (cls, stored.keys)):
            return None
        width, beyond = len(stored.keys), ABSENT if present or live is ABSENT else UNFILLED
        lives = [] if own is None else own.values
        lives += repeat(beyond, width * (len(nodes) - len(present)))
        values = list(self.parts(stored.values, lives, stored.name_paths(path), depth + 1))
        made: list[Any] = stored.join(values)
        if id(ABSENT) in set(map(id, values)):
            # They are left out, where there is no live row.
            made = [
                {key: part for key, part in row.items() if part is not ABSENT}
                if cls is dict
                else [part for part in row if part is not ABSENT]
                for row in made
            ]
        if cls is not tuple:
            return made
        # A row that stays as it is need not be compared again.
        kept = [
            old if len(row) == len(old) and all(map(is_, row, old)) else tuple(row)
            for row, old in zip(made, present, strict=False)
        ]
        return kept + list(map(tuple, made[len(kept) :]))

    def _decode_whole(self, node: Any, live: Any, path: str, depth: int) -> Any:
        if type(live) not in NO_FORM and self._stands_against(node, live, path):
            self.differences.wrong_kind.append(f"{path}: stored {describe(node)}, live {describe_live(live)}")
            return live
        return super().decode(node, live, path, depth)

    def _stands_against(self, node: Any, live: Any, path: str) -> bool:
        """Returns True if a live array or object, or a container of such, blocks something of another form."""
        if not self.at.rules.fixed_objects or (live_is := live_form(live)) in ("", form_of(node)):
            return False
        if not self.at.rules.fixed_arrays:
            has_objects = bool(state_paths(live, "", only_objects=True))
            return has_objects or (is_namedtuple(type(live)) and holds_state(live))  # JAX: an optimizer's.
        # Arithmetic makes a number of a NumPy array without dimensions.
        is_scalar = "/" not in path and live_is == "array" and live.shape == () and is_number(node)
        return not is_scalar and (live_is in ("array", "subclass", "object") or holds_state(live))

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        """Returns the array that will hold a stored leaf: the live one, or a new one."""
        spec = self.stored_arrays.get(leaf)
        if spec is None:
            raise malformed(path, f"there is no array {leaf!r}")
        return self.take(WantedArrays([leaf], [spec], [library], [live], lambda _: path))[0]

    def coded(self, codec: Codec, payload: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the value, or its replacement until the arrays in it have been read: they are created for it."""
        if not any(tag in ("array", "tensor_subclass") for tag, _ in find_tags(payload)):
            return super().coded(codec, payload, live, path, depth)
        # They go to the device of the present ones; without such, to that of the parameter whose state it is.
        near = find_array(codec.encode(live)) if type(live) is codec.cls else None
        with self.under(At(REPLACED, near=self.at.like if near is None else near)):
            made = self.decode(payload, UNFILLED, path, depth)
        self.claims.has_pending = True
        problem = f"{path}: the codec {codec.tag!r} rejected the stored value"
        return PendingValue(made, codec.decode, problem, self._finished)

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
            elif self.at.rules.fixed_arrays:
                self.differences.wrong_kind.append(
                    f"{path}: stored a {cls.__qualname__} of {list(stored.shape)} with other settings than the "
                    f"live one of {list(live.shape)}"
                )
                return live
        with self.under(At(self.at.rules, near=self.at.near)):
            parts = {
                part: self.decode(node, lives.get(part, UNFILLED), f"{path}/{escape(part)}", depth)
                for part, node in stored.tensors.items()
            }
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
            if not is_nothing(live):
                self.differences.wrong_kind.append(f"{path}: stored a {cls}, live {describe_live(live)}")
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
        with self.under(replace(self.at, rules=OWNED) if self.at.rules is TREE else self.at):
            for part in values.keys() & parts.keys():
                value = self.decode(parts[part], values[part], f"{path}/{escape(part)}", depth)
                values[part] = values[part] if value is ABSENT else value
        if all(values[part] is own.parts[part] for part in values):
            return live
        self.claims.has_pending = True
        return PendingValue(values, own.join, f"{path}: the stored tree could not be rebuilt", self._finished)

    def stateful(self, kind: str, state: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the live object itself, whose loading is prepared."""
        adapter = adapter_of(live)
        if live is ABSENT or live is UNFILLED:
            self.differences.extra.append(path)
            return ABSENT
        if adapter is None or adapter.kind != kind:
            self.differences.wrong_kind.append(
                f"{path}: stored the state of an object ({kind}), live {describe_live(live)}"
            )
            return live
        if adapter.is_per_worker and self._has_moved:
            self._begin_anew(adapter, state, live, path)
            return live
        at, selected_before = self.at, self.selected_count
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
            self.at = at
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
        if self.at.rules.fixed_objects or not self.whole:
            lost = state_paths(part, path, only_objects=self.whole and not self.at.rules.fixed_arrays)
        self.differences.missing += lost
        return bool(lost)

    def unknown_type(self, name: str, live: Any, path: str) -> Any:
        """Notes a difference if there is something else, raises an error if there is nothing."""
        if is_nothing(live):
            return super().unknown_type(name, live, path)
        cls = name.rpartition(":")[2]
        self.differences.wrong_kind.append(
            f"{path}: stored a {cls}, live {describe_live(live)} (holdfast.register_type({cls}) accepts the "
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
        with self._comparison.under(At(rules, like)):
            live_part = UNFILLED if live is None else live
            value = self._comparison.decode(stored, live_part, self.name(*at), self._depth + len(at))
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
        names: list[tuple[str, ...]] = []
        for name, node in stored.items() if self._comparison.whole else ():
            part = live.get(name)
            if type(node) is dict and type(part) is dict and "$" not in node and node.keys() == part.keys():
                nodes += node.values()
                parts += map(part.__getitem__, node)
                names += [(name, key) for key in node]
            elif part is not None or like is None:
                nodes.append(node)
                parts.append(UNFILLED if part is None else part)
                names.append((name,))
        with self._comparison.under(At(rules)):
            depth = self._depth + len(at) + 2
            made = self._comparison.parts(nodes, parts, lambda number: self.name(*at, *names[number]), depth)
            found = dict(zip(names, made, strict=True))
        values: dict[str, Any] = {}
        for name, node in stored.items():
            part = live.get(name)
            if (name,) in found:
                values[name] = part if found[name,] is ABSENT else found[name,]
            elif type(node) is dict and node and (name, next(iter(node))) in found:
                values[name] = {key: one for key in node if (one := found[name, key]) is not ABSENT}
            else:
                one = None if like is None else like.get(name)
                values[name] = self.value(node, part, *at, name, rules=rules, like=one)
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


def find_codec(tag: str) -> Codec | None:
    """Returns the codec of a tag. Codecs of frameworks are registered when the framework's integration is imported."""
    package = tag.partition(".")[0]
    if package in INTEGRATIONS and package in sys.modules and INTEGRATIONS[package] not in sys.modules:
        importlib.import_module(INTEGRATIONS[package])
    return codec_tagged(tag)
