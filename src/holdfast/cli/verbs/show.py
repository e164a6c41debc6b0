"""`holdfast show`: shows the contents of one checkpoint."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import click
from msgspec import to_builtins

from holdfast.catalog.survey import State
from holdfast.cli.completion import RunPath
from holdfast.cli.report import COUNT, SHARE, SIZE, Column, Report, manifest_fields, name_fields, text_columns, verb
from holdfast.cli.screen import (
    FAINT,
    GOOD,
    NOTABLE,
    PLAIN,
    STRONG,
    Words,
    age_text,
    figure_text,
    iso_text,
    local_time_text,
    shape_text,
    share_text,
)
from holdfast.cli.target import Array, Contents, Heading, RunTarget, find_target, read_checkpoint, takes_tiers
from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.errors import DamageError, UsageError
from holdfast.events import WitnessAgreed, WitnessDiffers, read_events
from holdfast.format.names import data_name, index_name, join
from holdfast.format.nodes import count_values, describe, find_nodes, list_values
from holdfast.format.records import Manifest
from holdfast.format.scalars import Node
from holdfast.restore.candidates import make_selection
from holdfast.witness.ring import read_ring


@verb("show")
@click.argument("run", metavar="RUN[@STEP]", type=RunPath())
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--depth", type=click.IntRange(0, 16), default=2, show_default=True, help="How many levels of the tree are shown."
)
@click.option("--largest", metavar="N", type=click.IntRange(0), default=0, help="Also list the N largest arrays.")
@takes_tiers
def command(report: Report, run: str, names: tuple[str, ...], depth: int, largest: int, tiers: tuple[str, ...]) -> None:
    """Show what one checkpoint holds.

    RUN is the directory that a job saves into. Its newest checkpoint is shown unless you add a step, as in
    runs/gpt@500. RUN can also be the directory of a single step, or a copy of one.

    NAMEs select what is shown in full: an object (model), an array (model/layers.0.weight), or a pattern
    ('model/layers.*.weight').
    """
    target = find_target(run, tiers)
    selection = make_selection(names) if names else None
    heading, contents = read_checkpoint(target)
    witness = _read_witness(target)
    if selection is None:
        # First, so that it is seen also where an index is damaged.
        _show_heading(report, heading, witness)
    if isinstance(contents, DamageError):
        raise contents
    arrays, values = contents.arrays(selection), dict(find_nodes(contents.objects, selection))
    if selection is not None and selection.unmatched:
        raise UsageError(
            f"step {heading.manifest.step} of {target.location} has nothing named "
            f"{', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, contents.objects))}; an array is named like model/head.weight.",
        )
    report.fields = {**_contents_fields(heading, contents, arrays), "values": values, "witness": witness}
    if selection is None:
        _show_tree(report, contents, depth)
        _show_largest(report, contents, largest)
    else:
        _show_arrays(report, heading, arrays)
        _show_values(report, values, after_arrays=bool(arrays))


def _read_witness(target: RunTarget) -> dict[str, Any] | None:
    """Returns the records of the last steps of a run, and how the last repeated ones compared; None without records."""
    place = target.storage.location
    records = {} if target.is_step else read_ring(target.storage, 0)
    if not records or place is None:
        return None
    events = read_events(place / "events.jsonl")
    compared = [event for event in events if isinstance(event, WitnessAgreed | WitnessDiffers)]
    last = {**to_builtins(compared[-1]), "text": str(compared[-1])} if compared else None
    return {"first_step": min(records), "last_step": max(records), "last_comparison": last}


def _contents_fields(heading: Heading, contents: Contents, arrays: Sequence[Array]) -> dict[str, Any]:
    manifest, objects = heading.manifest, contents.objects
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
            for name, leaves in contents.sizes().items()
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
            for stored, file, source in arrays
        ],
    }


_MAX_NOTE_CHARACTERS: Final = 400
_MAX_VALUE_CHARACTERS: Final = 40


def _show_heading(report: Report, heading: Heading, witness: Mapping[str, Any] | None) -> None:
    """Writes what the manifest records, and what the witness does."""
    manifest = heading.manifest
    state: Words = ""
    if heading.is_newest:
        state = ("  newest", GOOD)
    elif heading.state is State.OFF_LINE:
        state = ("  off the current lineage", NOTABLE)
    report.line((f"{heading.location}  step {manifest.step}", STRONG), state)
    at = manifest.committed_at_unix_seconds
    attempt = "" if manifest.attempt == 1 else f", attempt {manifest.attempt}"
    references = (
        f"{reference.name.directory} for {report.size(reference.size_bytes)}" for reference in manifest.references
    )
    notes = json.dumps(manifest.metadata, ensure_ascii=False) if manifest.metadata else ""
    last = witness["last_comparison"] if witness else None
    restart = f"; last restart: {last['text']}" if last else ""
    facts = {
        "directory": f"{heading.url}/{heading.directory}".rstrip("/"),
        "saved": f"{local_time_text(at)}, {age_text(time.time() - at)}" if report.is_page else iso_text(at) or "?",
        "generation": f"{manifest.generation}{attempt}",
        "workers": str(manifest.world_size),
        "size": report.size(heading.size_bytes),
        "refers to": ", ".join(references),
        "written by": ", ".join(f"{library} {version}" for library, version in sorted(manifest.versions.items())),
        "metrics": ", ".join(f"{metric} = {figure_text(value)}" for metric, value in manifest.metrics.items()),
        "not finite": _nonfinite_text(manifest),
        "metadata": notes if len(notes) <= _MAX_NOTE_CHARACTERS else notes[: _MAX_NOTE_CHARACTERS - 3] + "...",
        "witness": f"steps {witness['first_step']} to {witness['last_step']}{restart}" if witness else "",
    }
    report.facts(facts)


def _nonfinite_text(manifest: Manifest) -> str:
    if manifest.nonfinite is None or not manifest.nonfinite.leaves:
        return ""
    names, leaves = manifest.nonfinite.names, manifest.nonfinite.leaves
    return (
        "nan or infinity in " + ", ".join(names) + (f" and {leaves - len(names)} more" if leaves > len(names) else "")
    )


def _show_tree(report: Report, contents: Contents, depth: int) -> None:
    """Shows where the bytes are: the objects as a tree."""
    objects, leaves = contents.objects, contents.leaves()
    total_bytes = sum(leaf.size_bytes for leaf in leaves.values())
    lines = [
        line for name, sizes in contents.sizes().items() for line in list_tree(grow_tree(name, sizes.items()), depth)
    ]

    def label(line: Line) -> Words:
        style = STRONG if line.depth == 0 else FAINT if line.label.startswith("(") else PLAIN
        return "  " * line.depth + line.label, style

    def form(line: Line) -> StoredLeaf | None:
        return leaves[line.branch.leaf] if line.branch.leaf and line.branch.leaves == 1 else None

    columns: list[Column[Line]] = [
        Column("object", label),
        Column("arrays", lambda line: line.branch.leaves or None, COUNT, may_go=4),
        Column("size", lambda line: line.branch.size_bytes if line.branch.leaves else None, SIZE),
        Column("share", lambda line: share_text(line.branch.size_bytes, total_bytes), SHARE, style=FAINT, may_go=3),
        Column("dtype", lambda line: (leaf := form(line)) and leaf.dtype, style=FAINT, may_go=2),
        Column("shape", lambda line: (leaf := form(line)) and shape_text(leaf.shape), style=FAINT, may_go=2),
        Column(
            "other values",
            lambda line: _values_text(objects.get(line.label), line.branch.leaves > 0) if line.depth == 0 else "",
            plain="OTHER VALUES",
            style=FAINT,
            may_go=1,
        ),
    ]
    report.line()
    report.table(columns, lines)


def _show_largest(report: Report, contents: Contents, largest: int) -> None:
    leaves = sorted(contents.leaves().items(), key=lambda leaf: -leaf[1].size_bytes)
    if not largest or not leaves:
        return
    title = "array" if len(leaves) <= largest else f"largest of {len(leaves)} arrays"
    columns: list[Column[tuple[str, StoredLeaf]]] = [
        Column(title, lambda leaf: leaf[0], plain=title.upper()),
        Column("dtype", lambda leaf: leaf[1].dtype, may_go=1),
        Column("shape", lambda leaf: shape_text(leaf[1].shape), may_go=1),
        Column("size", lambda leaf: leaf[1].size_bytes, SIZE),
    ]
    report.line()
    report.table(columns, leaves[:largest])


def _show_arrays(report: Report, heading: Heading, arrays: Sequence[Array]) -> None:
    if not arrays:
        return
    # The same name in every line says little and takes much room.
    in_one_file = len({(array.source, array.file) for array in arrays}) == 1
    columns: list[Column[Array]] = [
        Column("leaf", lambda array: array.stored.leaf),
        Column("dtype", lambda array: array.stored.record.dtype, may_go=1),
        Column("shape", _box_text),
        Column("size", lambda array: array.stored.record.end - array.stored.record.begin, SIZE, may_go=1),
        Column("offset", lambda array: array.stored.record.begin, COUNT, may_go=3),
        Column("file", lambda array: join(array.source, array.file), style=FAINT, on_page=not in_one_file, may_go=2),
    ]
    report.table(columns, arrays)
    if in_one_file and report.is_page:
        report.line((f"in {join(arrays[0].source or heading.directory, arrays[0].file)}", FAINT))


def _box_text(array: Array) -> str:
    stored = array.stored
    part = f" of {shape_text(stored.global_shape)} at {shape_text(stored.box.offsets)}"
    return shape_text(stored.record.shape) + ("" if stored.box.is_whole(stored.global_shape) else part)


def _show_values(report: Report, values: Mapping[str, Node], *, after_arrays: bool) -> None:
    rows = [value for path, node in values.items() for value in list_values(path, node)]
    if rows:
        if after_arrays:
            report.line()
        report.table(text_columns("value", ""), rows)


def _values_text(node: Node, has_leaves: bool) -> str:
    """The value itself where it is the whole object and short, else how many there are."""
    if node is None and has_leaves:
        return "-"
    text = describe(node)
    if not has_leaves and len(text) <= _MAX_VALUE_CHARACTERS:
        return f"= {text}"
    return str(count_values(node) or "-")


SHOWN_CHILDREN: Final = 16
"""How many children of one branch are listed; those beyond are summed up."""

_MAX_PARTS: Final = 16
_SEPARATOR: Final = re.compile(r"([/.])")
_NUMBER: Final = re.compile(r"([0-9]+)")


@dataclass(slots=True)
class Branch:
    """All leaves whose names begin in the same way."""

    name: str
    leaves: int = 0
    size_bytes: int = 0
    leaf: str = ""
    children: dict[str, Branch] = field(default_factory=dict)


class Line(NamedTuple):
    """One line of a tree that is shown."""

    depth: int
    label: str
    branch: Branch


def grow_tree(root: str, leaves: Iterable[tuple[str, int]]) -> Branch:
    """**Pure.** The tree of one object."""
    tree = Branch(root)
    for name, size_bytes in leaves:
        branch = tree
        branch.leaves += 1
        branch.size_bytes += size_bytes
        for part in _parts(name.removeprefix(root)):
            branch = branch.children.setdefault(part, Branch(part))
            branch.leaves += 1
            branch.size_bytes += size_bytes
        branch.leaf = name
    return tree


def list_tree(tree: Branch, max_depth: int, depth: int = 0) -> Iterator[Line]:
    """**Pure.** The lines of a tree, down to a depth. Below the root, a branch is joined with its only child."""
    label = tree.name if depth == 0 else tree.name.lstrip("/.") or tree.name
    while depth > 0 and len(tree.children) == 1:
        (child,) = tree.children.values()
        if child.leaves < tree.leaves:
            break  # The branch is a leaf itself.
        label, tree = label + child.name, child
    yield Line(depth, label, tree)
    if depth == max_depth:
        return

    def order(child: Branch) -> list[tuple[int, str]]:
        # `layers.2` before `layers.10`.
        pieces = _NUMBER.split(child.name)
        return [(int(piece[:18]) if place % 2 else -1, piece) for place, piece in enumerate(pieces)]

    children = sorted(tree.children.values(), key=order)
    shown = children if len(children) <= SHOWN_CHILDREN else children[: SHOWN_CHILDREN - 1]
    for child in shown:
        yield from list_tree(child, max_depth, depth + 1)
    rest = children[len(shown) :]
    if rest:
        others = Branch("", sum(child.leaves for child in rest), sum(child.size_bytes for child in rest))
        yield Line(depth + 1, f"({len(rest)} more)", others)


def _parts(name: str) -> Iterator[str]:
    """The parts of a name, each with the separator before it."""
    pieces = _SEPARATOR.split(name, _MAX_PARTS)
    if pieces[0]:
        yield pieces[0]
    for separator, text in zip(pieces[1::2], pieces[2::2], strict=True):
        yield separator + text
