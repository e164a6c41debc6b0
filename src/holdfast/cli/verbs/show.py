"""`holdfast show`: shows the contents of one checkpoint."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click

from holdfast.cli.contents import (
    Array,
    Contents,
    Heading,
    count_values,
    describe,
    list_values,
    read_checkpoint,
    read_witness,
)
from holdfast.cli.screen import (
    FAINT,
    GOOD,
    NOTABLE,
    STRONG,
    Screen,
    Words,
    age_text,
    figure_text,
    iso_text,
    local_time_text,
    shortened,
    write_json,
)
from holdfast.cli.survey import State
from holdfast.cli.target import RunTarget, find_target
from holdfast.errors import DamageError, UsageError
from holdfast.format.names import join
from holdfast.format.scalars import Node
from holdfast.restore.candidates import Selection, make_selection


@click.command()
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--depth", type=click.IntRange(0, 16), default=2, show_default=True, help="How many levels of the tree are shown."
)
@click.option("--largest", metavar="N", type=click.IntRange(0), default=0, help="Also list the N largest arrays.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(run: str, names: tuple[str, ...], depth: int, largest: int, as_json: bool) -> None:
    """Show what one checkpoint holds.

    RUN is the directory that a job saves into. Its newest checkpoint is shown unless you add a step, as in
    runs/gpt@500. RUN can also be the directory of a single step, or a copy of one.

    NAMEs select what is shown in full: an object (model), an array (model/layers.0.weight), or a pattern
    ('model/layers.*.weight').
    """
    target = find_target(run)
    selection = make_selection(names) if names else None
    heading, contents = read_checkpoint(target)
    page = None
    if not as_json:
        page = ContentsPage(Screen(sys.stdout))
        if selection is None:
            # First, so that it is seen also where an index is damaged.
            page.show_heading(heading, read_witness(target))
    if isinstance(contents, DamageError):
        raise contents
    if page is None:
        document = {**contents.document(selection), "witness": read_witness(target)}
        _check_found(contents, selection, target)
        write_json(sys.stdout, "show", document)
    elif selection is None:
        page.show_overview(contents, depth, largest)
    else:
        arrays, values = contents.arrays(selection), contents.values(selection)
        _check_found(contents, selection, target)
        page.show_details(contents, arrays, values)


def _check_found(contents: Contents, selection: Selection | None, target: RunTarget) -> None:
    if selection is not None and selection.unmatched:
        raise UsageError(
            f"step {contents.heading.manifest.step} of {target.location} has nothing named "
            f"{', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, contents.objects))}; an array is named like model/head.weight.",
        )


_MAX_NOTE_CHARACTERS: Final = 400
_MAX_VALUE_CHARACTERS: Final = 40


class ContentsPage:
    """Writes one checkpoint to a screen: sizes and times as people read them on a terminal, exact ones elsewhere."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def show_heading(self, heading: Heading, witness: Mapping[str, Any] | None) -> None:
        """Writes what the manifest records, and what the witness does."""
        manifest = heading.manifest
        standing: Words = ""
        if heading.is_newest:
            standing = ("  newest", GOOD)
        elif heading.state is State.OFF_LINE:
            standing = ("  off the current lineage", NOTABLE)
        self._screen.say((f"{heading.location}  step {manifest.step}", STRONG), standing)
        at = manifest.committed_at_unix_seconds
        committed = iso_text(at) or "?"
        if self._screen.is_terminal:
            committed = f"{local_time_text(at)}, {age_text(time.time() - at)}"
        attempt = "" if manifest.attempt == 1 else f", attempt {manifest.attempt}"
        facts = {
            "directory": f"{heading.url}/{heading.directory}".rstrip("/"),
            "committed": committed,
            "generation": f"{manifest.generation}{attempt}",
            "workers": str(manifest.world_size),
            "size": self._screen.size(heading.size_bytes),
            "refers to": ", ".join(
                f"{reference.name.directory} for {self._screen.size(reference.size_bytes)}"
                for reference in manifest.references
            ),
            "written by": ", ".join(f"{library} {version}" for library, version in sorted(manifest.versions.items())),
            "metrics": ", ".join(f"{metric} = {figure_text(value)}" for metric, value in manifest.metrics.items()),
            "metadata": shortened(json.dumps(manifest.metadata, ensure_ascii=False), _MAX_NOTE_CHARACTERS)
            if manifest.metadata
            else "",
            "witness": _witness_text(witness) if witness else "",
        }
        rows: list[list[Words]] = [[(label, FAINT), text] for label, text in facts.items() if text]
        self._screen.table(["", ""], rows, indent=2)

    def show_overview(self, contents: Contents, depth: int, largest: int) -> None:
        """Where the bytes are: the objects as a tree, and as many of the largest arrays as are asked for."""
        self._screen.say()
        self._show_tree(contents, depth)
        leaves = sorted(contents.leaves().items(), key=lambda leaf: -leaf[1][2])
        if largest and leaves:
            self._screen.say()
            title = "array" if len(leaves) <= largest else f"largest of {len(leaves)} arrays"
            rows = [
                [name, dtype, _list_text(shape), self._size(size_bytes)]
                for name, (dtype, shape, size_bytes) in leaves[:largest]
            ]
            self._table([title, "dtype", "shape", "size"], rows)

    def show_details(self, contents: Contents, arrays: Sequence[Array], values: Mapping[str, Node]) -> None:
        """The leaves and values that were asked for by name."""
        if arrays:
            titles = ["leaf", "dtype", "shape", "size", "offset", "file"]
            array_rows = [self._array_row(array) for array in arrays]
            if self._screen.is_terminal and len({(array.source, array.file) for array in arrays}) == 1:
                # The same name in every line says little and takes much room.
                self._table(titles[:-1], [row[:-1] for row in array_rows])
                directory = arrays[0].source or contents.heading.directory
                self._screen.say((f"in {join(directory, arrays[0].file)}", FAINT))
            else:
                self._table(titles, array_rows)
        rows: list[list[Words]] = [
            [place, text] for path, node in values.items() for place, text in list_values(path, node)
        ]
        if rows:
            if arrays:
                self._screen.say()
            self._table(["value", ""], rows)

    def _show_tree(self, contents: Contents, depth: int) -> None:
        objects = contents.objects
        sizes = contents.sizes()
        total_bytes = sum(sum(leaves.values()) for leaves in sizes.values())
        forms = contents.leaves()
        rows: list[list[Words]] = []
        for name, leaves in sizes.items():
            node = objects.get(name)
            for line in list_tree(grow_tree(name, leaves.items()), depth):
                is_root = line.depth == 0
                label = "  " * line.depth + line.label
                share = _share_text(line.size_bytes, total_bytes)
                has_leaves = line.leaves > 0
                dtype, shape, _ = forms.get(line.leaf, ("-", (), 0))
                rows.append(
                    [
                        (label, STRONG if is_root else FAINT if line.label.startswith("(") else ""),
                        str(line.leaves) if has_leaves else "-",
                        self._size(line.size_bytes) if has_leaves else "-",
                        (share, FAINT),
                        (dtype, FAINT),
                        (_list_text(shape) if dtype != "-" else "-", FAINT),
                        (_values_text(node, has_leaves) if is_root else "", FAINT),
                    ]
                )
        self._table(["object", "arrays", "size", "share", "dtype", "shape", "other values"], rows)

    def _array_row(self, array: Array) -> list[Words]:
        record, stored = array.stored.record, array.stored
        part = f" of {_list_text(stored.global_shape)} at {_list_text(stored.box.offsets)}"
        return [
            stored.leaf,
            record.dtype,
            _list_text(record.shape) + ("" if stored.box.is_whole(stored.global_shape) else part),
            self._size(record.end - record.begin),
            str(record.begin),
            (join(array.source, array.file), FAINT),
        ]

    def _table(self, titles: Sequence[str], rows: Sequence[Sequence[Words]]) -> None:
        shown = {title: title for title in titles}
        if not self._screen.is_terminal:
            shown = {title: "BYTES" if title == "size" else title.upper() for title in titles}
        figures = {shown[title] for title in titles if title in ("arrays", "size", "share", "offset")}
        self._screen.table(list(shown.values()), rows, figures=figures)

    def _size(self, size_bytes: int) -> str:
        return self._screen.size(size_bytes, unit="")


def _witness_text(witness: Mapping[str, Any]) -> str:
    last = witness["last_comparison"]
    return f"steps {witness['first_step']} to {witness['last_step']}" + (
        f"; last restart: {last['text']}" if last else ""
    )


def _list_text(numbers: Sequence[int]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _share_text(part_bytes: int, total_bytes: int) -> str:
    percent = 100 * part_bytes / total_bytes if total_bytes else 0.0
    return "-" if percent == 0 else f"{percent:.0f}%" if percent >= 1 else "<1%"


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


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a tree that is shown."""

    depth: int
    label: str
    leaves: int
    size_bytes: int
    leaf: str = ""


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
    label = tree.name.lstrip("/.") or tree.name
    while depth > 0 and len(tree.children) == 1:
        (child,) = tree.children.values()
        if child.leaves < tree.leaves:
            break  # The branch is a leaf itself.
        label, tree = label + child.name, child
    yield Line(depth, label, tree.leaves, tree.size_bytes, tree.leaf if tree.leaves == 1 else "")
    if depth == max_depth:
        return
    children = sorted(tree.children.values(), key=lambda child: _natural_key(child.name))
    shown = children if len(children) <= SHOWN_CHILDREN else children[: SHOWN_CHILDREN - 1]
    for child in shown:
        yield from list_tree(child, max_depth, depth + 1)
    rest = children[len(shown) :]
    if rest:
        yield Line(
            depth + 1,
            f"({len(rest)} more)",
            sum(child.leaves for child in rest),
            sum(child.size_bytes for child in rest),
        )


def _parts(name: str) -> Iterator[str]:
    """The parts of a name, each with the separator before it."""
    pieces = _SEPARATOR.split(name, _MAX_PARTS)
    if pieces[0]:
        yield pieces[0]
    for separator, text in zip(pieces[1::2], pieces[2::2], strict=True):
        yield separator + text


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Orders `layers.2` before `layers.10`."""
    pieces = _NUMBER.split(name)
    return [(int(piece[:18]) if place % 2 else -1, piece) for place, piece in enumerate(pieces)]
