"""Contents of one checkpoint, read from its records alone; no array is read.

Stored values are shown as text, without creating the objects that they describe: types are shown by the names under
which they were stored, and nothing is imported by those names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import to_builtins

from holdfast.catalog import StoredRun, StoredStep
from holdfast.cli.survey import State, checkpoint_bytes, manifest_fields, name_fields
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, NoWholeCheckpointError
from holdfast.events import WitnessAgreed, WitnessDiffers, read_events
from holdfast.format.dtypes import array_bytes
from holdfast.format.encoding import MAX_DEPTH, escape, path_part
from holdfast.format.index import StoredBox
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, data_name, index_name
from holdfast.format.records import Manifest
from holdfast.format.scalars import DECODERS, Malformed, Node, decode_numpy
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step
from holdfast.witness.ring import DATA, LOSS, differs, read_ring


@dataclass(frozen=True, slots=True)
class Heading:
    """Identity of one checkpoint, and its manifest.

    Attributes:
        location: The run, or the directory of the step, as it was written on the command line.
        url: The full path of `location`.
        directory: The name of the step's directory in the run; empty where the step's directory itself was named.
        expected: The step that the directory's name gives; None if the directory may have any name.
        state: Its state in its run; None if it was named by its own directory.
        is_newest: Whether it is the newest of the current lineage.
        manifest: Its manifest.
    """

    location: str
    url: str
    directory: str
    expected: StepName | None
    state: State | None
    is_newest: bool
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """Size of its data files and indexes."""
        return checkpoint_bytes(self.manifest)


class Array(NamedTuple):
    """One array, a leaf or a box of one, with the name of its data file.

    `source` is the directory of the step with that file, if it is another step.
    """

    stored: StoredBox
    file: str
    source: str


def _read_heading(target: RunTarget) -> Heading | None:
    """**Blocks.** Finds the checkpoint that is meant and reads its manifest; None if it has been removed meanwhile.

    Raises as `read_checkpoint`.
    """
    name, state, is_newest = None, None, False
    if not target.is_step:
        catalog = StoredRun(target.storage).look()
        name = choose_step(catalog, target)
        state = State.LIVING if name in catalog.living else State.OFF_LINE
        is_newest = name == catalog.newest
    directory = name.directory if name else ""
    step = StoredStep(target.storage, directory, name)
    try:
        manifest = step.manifest()
    except NotFoundError:
        if name is not None:
            return None
        if step.has(COMMITTED_NAME):
            raise NoWholeCheckpointError(
                f"{target.location} was committed, and its manifest is gone; the data files are still there",
                damages=(DamageError("the manifest is gone", path=MANIFEST_NAME),),
                hint=f"Bring it back: `{COMMITTED_NAME}` in that directory is a copy of `{MANIFEST_NAME}`, "
                "unless it is empty.",
            ) from None
        raise NoCheckpointError(
            f"{target.location} is not a checkpoint: it has no {MANIFEST_NAME}",
            hint="It is being saved or removed, or that was interrupted, or its manifest is lost: "
            "`holdfast list --all` on the run says which.",
        ) from None
    return Heading(target.location, target.storage.url, directory, name, state, is_newest, manifest)


@dataclass(frozen=True, slots=True)
class Contents:
    """The records of one checkpoint."""

    heading: Heading
    opened: OpenedStep

    @property
    def objects(self) -> dict[str, Node]:
        """For each named object its state, with references in place of arrays."""
        objects: dict[str, Node] = {}
        for index in self.opened.indexes:
            for name, node in index.objects.items():
                objects.setdefault(name, node)
        return objects

    def arrays(self, select: Callable[[str], bool] | None = None) -> list[Array]:
        """The selected arrays, in the order of the files; all of them by default."""
        arrays: list[Array] = []
        for index in self.opened.indexes:
            own = data_name(index.rank, index.world_size)
            sources = [(source.file_name, source.name.directory) for source in index.sources]
            places = [(own, "")] * len(index.leaves) + [sources[record.source] for record in index.referred]
            arrays += (Array(stored, *place) for stored, place in zip(index.stored_boxes(), places, strict=True))
        return [array for array in arrays if select is None or select(array.stored.leaf)]

    def leaves(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Returns the type, shape and size of each leaf, in the order in which the files list them."""
        leaves: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for stored, _, _ in self.arrays():
            dtype, shape = stored.dtype, stored.global_shape
            leaves.setdefault(stored.leaf, (dtype, shape, array_bytes(dtype, shape)))
        return leaves

    def values(self, select: Callable[[str], bool] | None = None) -> dict[str, Node]:
        """The selected nodes, by their path; all objects by default."""
        return dict(find_nodes(self.objects, select))

    def sizes(self) -> dict[str, dict[str, int]]:
        """For each object the size of each of its leaves."""
        sizes: dict[str, dict[str, int]] = {name: {} for name in self.objects}
        for leaf, (_, _, size_bytes) in self.leaves().items():
            sizes.setdefault(leaf.partition("/")[0], {})[leaf] = size_bytes
        return sizes

    def document(self, select: Callable[[str], bool] | None) -> dict[str, Any]:
        """The JSON document of the checkpoint, with the selected leaves and values."""
        heading = self.heading
        manifest = heading.manifest
        objects = self.objects
        return {
            "place": heading.url,
            "directory": heading.directory or None,
            "state": heading.state.value if heading.state else None,
            "is_newest": heading.is_newest if heading.state else None,
            **name_fields(manifest.name),
            "size_bytes": heading.size_bytes,
            **manifest_fields(manifest),
            "files": [
                {
                    "rank": rank,
                    "data": data_name(rank, manifest.world_size),
                    "data_bytes": worker.data_bytes,
                    "index": index_name(rank, manifest.world_size),
                    "index_bytes": worker.index_bytes,
                }
                for rank, worker in enumerate(manifest.workers)
            ],
            "objects": [
                {
                    "name": name,
                    "leaves": len(leaves),
                    "size_bytes": sum(leaves.values()),
                    "values": count_values(objects[name]) if name in objects else 0,
                }
                for name, leaves in self.sizes().items()
            ],
            "leaves": [
                {
                    "name": stored.leaf,
                    "dtype": stored.record.dtype,
                    "shape": list(stored.record.shape),
                    "global_shape": list(stored.global_shape),
                    "offsets": list(stored.box.offsets),
                    "size_bytes": stored.record.end - stored.record.begin,
                    "rank": stored.rank,
                    "file": file,
                    "source": source or None,
                    "offset_bytes": stored.record.begin,
                }
                for stored, file, source in self.arrays(select)
            ],
            "values": self.values(select),
        }


def read_checkpoint(target: RunTarget) -> tuple[Heading, Contents | DamageError]:
    """**Blocks.** Finds the checkpoint that a target names, and reads its manifest and its indexes.

    If a running job removes the checkpoint meanwhile, it is looked for again. Returns its heading, and its contents or
    the damage of its indexes. Raises `NoCheckpointError` if there is none, and `DamageError` or
    `NoWholeCheckpointError` if its manifest is damaged or lost.
    """
    for _ in range(MOST_LOOKS):
        heading = _read_heading(target)
        if heading is None:
            continue
        try:
            return heading, Contents(heading, open_step(target.storage, heading.directory, heading.expected))
        except DamageError as damage:
            if heading.expected is None or StoredRun(target.storage).step(heading.expected).is_committed():
                return heading, damage
    raise NoCheckpointError(
        f"{target.location}: every checkpoint was removed before it could be read",
        hint="A running job removes them quickly. Try again, or let it keep more.",
    )


SHOWN_ELEMENTS: Final = 8
"""Number of elements of a sequence that are shown; the others are counted."""

SHOWN_CHARACTERS: Final = 200
"""Number of characters of one scalar that are shown."""

_ATOMS: Final = frozenset({type(None), bool, int, float, str})
_BRACKETS: Final = {
    "tuple": ("(", ")"),
    "set": ("{", "}"),
    "frozenset": ("frozenset({", "})"),
    "deque": ("deque([", "])"),
    "slice": ("slice(", ")"),
}
_MAPPINGS: Final = frozenset({"dict", "OrderedDict", "Counter", "defaultdict"})
_FIELDS: Final = frozenset({"namedtuple", "dataclass", "pytree"})
_WRAPPERS: Final = frozenset({"object", "codec"})


def parts_of(node: Node) -> list[tuple[str, Node]] | None:
    """**Pure.** Returns the children of a container, each with its part of the path; None for any other node.

    The parts are named as at the save, so that paths here are those of errors, leaves and patterns.
    """
    if type(node) is list:
        return [(str(place), part) for place, part in enumerate(node)]
    if type(node) is not dict:
        return None
    if "$" not in node:
        return [(escape(str(key)), part) for key, part in node.items()]
    tag, payload = node["$"], node.get("v")
    if type(tag) is not str:
        return None
    if tag in _BRACKETS and type(payload) is list:
        return parts_of(payload)
    if tag in _MAPPINGS and type(payload) is list and all(_is_pair(pair) for pair in payload):
        return [(_key_part(key, place), part) for place, (key, part) in enumerate(payload)]
    if tag in _FIELDS and type(payload) is dict:
        return parts_of(payload) if "$" not in payload else None
    if tag == "tensor_subclass" and type(payload) is dict and type(payload.get("tensors")) is dict:
        return parts_of(payload["tensors"]) if "$" not in payload["tensors"] else None
    if tag in _WRAPPERS:
        return parts_of(payload)
    return None


def array_of(node: Node) -> str | None:
    """**Pure.** The leaf that a node refers to, or None if it refers to none."""
    if type(node) is dict and node.get("$") == "array" and type(node.get("v")) is str:
        return str(node["v"])
    return None


def count_values(node: Node, depth: int = 0) -> int:
    """**Pure.** Counts the values in a node that are not containers; arrays and live objects are not counted."""
    if array_of(node) is not None or (type(node) is dict and node.get("$") == "live"):
        return 0
    parts = parts_of(node) if depth <= MAX_DEPTH else None
    if parts is None:
        return 1
    return sum(count_values(part, depth + 1) for _, part in parts)


def find_nodes(objects: Mapping[str, Node], select: Callable[[str], bool] | None) -> Iterator[tuple[str, Node]]:
    """**Pure.** Yields the selected nodes with their paths; nodes inside a selected one are not repeated."""

    def search(path: str, node: Node, depth: int) -> Iterator[tuple[str, Node]]:
        if select is None or select(path):
            yield path, node
        elif depth <= MAX_DEPTH:
            for part, child in parts_of(node) or ():
                yield from search(f"{path}/{part}", child, depth + 1)

    for name, node in objects.items():
        yield from search(name, node, 0)


def list_values(path: str, node: Node, depth: int = 0) -> Iterator[tuple[str, str]]:
    """**Pure.** Yields the values in a node, each with its path and as text; a sequence of scalars is one value.

    Arrays are listed elsewhere and left out here, unless the name of one differs from its path: that one is shared.
    """
    leaf = array_of(node)
    if leaf is not None:
        if leaf != path:
            yield path, f"the array {leaf}"
        return
    parts = parts_of(node) if depth <= MAX_DEPTH else None
    if not parts or (is_sequence(node) and all(_is_scalar(part) for _, part in parts)):
        yield path, describe(node, depth)
        return
    for part, child in parts:
        yield from list_values(f"{path}/{part}", child, depth + 1)


def is_sequence(node: Node) -> bool:
    """**Pure.** True if a node is a list, a tuple, a set, or another container whose parts have no names."""
    return type(node) is list or (type(node) is dict and node.get("$") in _BRACKETS)


def _is_scalar(node: Node) -> bool:
    return parts_of(node) is None and array_of(node) is None


def describe(node: Node, depth: int = 0) -> str:
    """**Pure.** A node as text, much as Python would write the value; long ones are cut."""
    if type(node) in _ATOMS:
        return _cut(_repr(node))
    if depth > MAX_DEPTH:
        return "..."
    if type(node) is list:
        return f"[{_elements(node, depth)}]"
    if type(node) is not dict or type(node.get("$", "")) is not str:
        return "?"
    if "$" not in node:
        return f"{{{_items(((repr(key), part) for key, part in node.items()), len(node), depth)}}}"
    return _tagged(node, depth)


def _tagged(node: dict[str, Any], depth: int) -> str:
    tag, payload, argument = node["$"], node.get("v"), node.get("k")
    kind = str(argument if tag in _FIELDS | _WRAPPERS | {"enum", "flag", "tensor_subclass"} else tag).replace(":", ".")
    parts = parts_of(node)
    if tag in _BRACKETS and parts is not None:
        opening, closing = _BRACKETS[tag]
        comma = "," if tag == "tuple" and len(parts) == 1 else ""
        return f"{opening}{_elements([part for _, part in parts], depth)}{comma}{closing}"
    if tag in _MAPPINGS and parts is not None and type(payload) is list:
        items = _items(((describe(key, depth + 1), part) for key, part in payload), len(payload), depth)
        return f"{{{items}}}" if tag == "dict" else f"{kind}({{{items}}})"
    if (tag in _FIELDS or tag == "tensor_subclass") and parts is not None:
        return f"{kind}({_items(parts, len(parts), depth, sign='=')})"
    if tag == "array":
        return f"<array {array_of(node) or '?'}>"
    if tag == "live" and type(payload) is str:
        return _cut(f"<the program's {payload}>")
    if tag == "enum" and type(payload) is str:
        return f"{kind}.{payload}"
    if tag in _WRAPPERS | {"flag"}:
        return f"{kind}({describe(payload, depth + 1)})"
    return _cut(_scalar(tag, payload, argument))


def _scalar(tag: Any, payload: Node, argument: Node) -> str:
    try:
        if tag == "numpy":
            return repr(decode_numpy(payload, argument))
        if tag == "int":
            return f"-0x{payload[1:]}" if payload.startswith("-") else f"0x{payload}"
        return repr(DECODERS[tag](payload))
    except (Malformed, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        # What is malformed is shown as it is stored; a restore will refuse it and say why.
        return f"<{tag} {json.dumps(payload)}>"


def _elements(nodes: list[Node], depth: int) -> str:
    shown = [describe(part, depth + 1) for part in nodes[:SHOWN_ELEMENTS]]
    return ", ".join(shown + _more(len(nodes)))


def _items(items: Any, count: int, depth: int, *, sign: str = ": ") -> str:
    shown = [f"{key}{sign}{describe(part, depth + 1)}" for key, part in itertools.islice(items, SHOWN_ELEMENTS)]
    return ", ".join(shown + _more(count))


def _more(count: int) -> list[str]:
    return [f"... {count - SHOWN_ELEMENTS} more"] if count > SHOWN_ELEMENTS else []


def _repr(atom: Any) -> str:
    # Cut before it is quoted, since text may be of any length.
    return repr(atom[: SHOWN_CHARACTERS + 1]) if type(atom) is str else repr(atom)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _is_pair(node: Node) -> bool:
    return type(node) is list and len(node) == 2


def _key_part(key: Node, place: int) -> str:
    """Names a key as the encoder does: short plain keys by their text, others by their position."""
    if type(key) in _ATOMS:
        return path_part(key, place)
    if type(key) is dict and key.get("$") == "tuple" and len(text := describe(key)) <= 64:
        return escape(text)
    return str(place)


def read_witness(target: RunTarget) -> dict[str, Any] | None:
    """Returns the records of the last steps of a run, and how the last repeated ones compared; None without records."""
    records = {} if target.is_step else read_ring(target.storage, 0)
    if not records:
        return None
    events = read_events(Path(target.storage.url) / "events.jsonl")
    compared = [event for event in events if isinstance(event, WitnessAgreed | WitnessDiffers)]
    last = {**to_builtins(compared[-1]), "text": str(compared[-1])} if compared else None
    return {"first_step": min(records), "last_step": max(records), "last_comparison": last}


def compare_witnesses(a: RunTarget, b: RunTarget) -> dict[str, Any] | None:
    """Returns the first steps of two runs with other data, or another loss; None if no step can be compared."""
    if a.is_step or b.is_step or a.storage.url == b.storage.url:
        return None
    before, now = read_ring(a.storage, 0), read_ring(b.storage, 0)
    found: dict[str, Any] = {}
    for name, bit in (("data", DATA), ("loss", LOSS)):
        pairs = [(before[step], now[step]) for step in sorted(before.keys() & now.keys())]
        pairs = [(one, two) for one, two in pairs if one.known & two.known & bit]
        pairs = [(one, two) for one, two in pairs if bit == LOSS or not (one.data ^ two.data) & 1]
        if pairs:
            differs_at = next((one.step for one, two in pairs if differs(one, two) & bit), None)
            found[name] = {"first_step": pairs[0][0].step, "last_step": pairs[-1][0].step, "differs_at": differs_at}
    return found or None
