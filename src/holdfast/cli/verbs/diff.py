"""`holdfast diff`: shows what changed from one checkpoint to another."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import click

from holdfast.catalog import StoredRun
from holdfast.cli.contents import Contents, Heading, compare_witnesses, read_checkpoint
from holdfast.cli.difference import WINDOW_BYTES, LeafChange, ValueChange, compare_values, find_changed, measure
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    NOTABLE,
    STRONG,
    Screen,
    Words,
    byte_progress,
    counted,
    iso_text,
    unspaced,
    when_text,
    write_json,
)
from holdfast.cli.survey import name_fields, time_fields
from holdfast.cli.target import RunTarget, find_target
from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.errors import DamageError, NoCheckpointError, StorageError, UsageError
from holdfast.restore.candidates import make_selection

_SHOWN: Final = 20
_SIGNS: Final = {"changed": "~", "added": "+", "removed": "-", "dtype": "!", "shape": "!"}
_STYLES: Final = {"changed": "", "added": GOOD, "removed": BAD, "dtype": NOTABLE, "shape": NOTABLE}


@click.command()
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--quick", is_flag=True, help="Compare digests only: read no arrays and compute no norms.")
@click.option("--all", "show_all", is_flag=True, help=f"Show every change on a terminal, not the {_SHOWN} largest.")
@click.option("--exit-code", "with_code", is_flag=True, help="End with exit code 6 if the checkpoints differ.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(
    a: str, b: str, names: tuple[str, ...], quick: bool, show_all: bool, with_code: bool, as_json: bool
) -> None:
    """Show what changed from checkpoint A to checkpoint B.

    A and B are runs (their newest checkpoints are compared), steps of a run such as runs/gpt@500, or directories of
    single steps.

    For each array that changed: how many elements differ, the norms of both, and the norm of the difference. Arrays
    with equal digests are not read, and the others are read a few megabytes at a time.

    NAMEs limit the comparison to an object (model), an array (model/layers.0.weight) or a pattern
    ('model/layers.*.weight').
    """
    begun_at = time.monotonic()
    sides = [_open(place) for place in (a, b)]
    selection = make_selection(names) if names else None
    (_, heading_a, contents_a), (_, heading_b, contents_b) = sides
    changes, same = find_changed(contents_a, contents_b, selection)
    values = compare_values(contents_a.objects, contents_b.objects, selection)
    if selection is not None and selection.unmatched:
        raise UsageError(
            f"neither checkpoint has anything named {', '.join(map(repr, selection.unmatched))}, or it did not change"
            if not changes
            else f"nothing is named {', '.join(map(repr, selection.unmatched))}",
            hint=f"The objects are {', '.join(dict.fromkeys((*contents_a.objects, *contents_b.objects)))}.",
        )
    if not quick:
        measured = list(_measure(sides, changes))
        same += measured.count(None)
        changes = [one for one in measured if one is not None]
    found = CheckpointDifference(
        heading_a, heading_b, tuple(changes), same, tuple(values), not quick, tuple(contents_a.objects)
    )
    witness = compare_witnesses(sides[0][0], sides[1][0])
    if as_json:
        write_json(sys.stdout, "diff", {**found.fields(), "witness": witness, "seconds": time.monotonic() - begun_at})
    else:
        screen = Screen(sys.stdout)
        _show(screen, found, None if show_all else _SHOWN)
        for what, one in (witness or {}).items():
            at = one["differs_at"]
            how = "is the same" if at is None else f"first differs at step {at}"
            screen.say(f"{what} of steps {one['first_step']} to {one['last_step']}: {how}")
    if with_code and not found.is_same:
        raise click.exceptions.Exit(ExitCode.DIFFERENT)


_Side = tuple[RunTarget, Heading, Contents]


def _open(place: str) -> _Side:
    target = find_target(place)
    heading, contents = read_checkpoint(target)
    if isinstance(contents, DamageError):
        raise contents
    return target, heading, contents


def _measure(sides: Sequence[_Side], changes: Sequence[LeafChange]) -> Iterator[LeafChange | None]:
    size_bytes = sum(leaf.size_bytes for one in changes for leaf in (one.a, one.b) if leaf is not None)
    with byte_progress(sys.stderr, "comparing") as bar:
        if bar is not None:
            bar.expect(size_bytes)
        advance = bar.advance if bar is not None else None
        readers = [
            LeafReader(target.storage, contents.opened, target.beside, window_bytes=WINDOW_BYTES, advance=advance)
            for target, _, contents in sides
        ]
        with closing(readers[0]), closing(readers[1]):
            try:
                yield from measure(changes, *readers)
            except (DamageError, StorageError) as error:
                for target, heading, _ in sides:
                    if (
                        heading.expected is not None
                        and not StoredRun(target.storage).step(heading.expected).is_committed()
                    ):
                        raise NoCheckpointError(
                            f"step {heading.manifest.step} of {heading.location} was removed while it was read",
                            hint="A running job removes old steps. Compare steps that it keeps.",
                        ) from error
                raise


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The differences of two checkpoints.

    Attributes:
        a: The first checkpoint.
        b: The second.
        changes: The arrays that are not the same.
        same: Number of arrays that are the same.
        values: The other values that are not the same.
        is_measured: Whether the arrays that changed were read.
        objects: The objects of the first, in their order.
    """

    a: Heading
    b: Heading
    changes: tuple[LeafChange, ...]
    same: int
    values: tuple[ValueChange, ...]
    is_measured: bool
    objects: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """True if arrays and values are the same. Metrics may differ: they are not restored."""
        return not self.changes and not self.values

    def fields(self) -> dict[str, Any]:
        """**Pure.** The JSON document."""
        return {
            "a": _heading_fields(self.a),
            "b": _heading_fields(self.b),
            "is_same": self.is_same,
            "is_measured": self.is_measured,
            "metrics": {
                metric: {"a": before, "b": after, "change": _change(before, after)}
                for metric, before, after in self.metrics()
            },
            "same_arrays": self.same,
            "arrays": [change.fields() for change in self.changes],
            "values": [{"path": one.path, "a": one.a, "b": one.b} for one in self.values],
        }

    def metrics(self) -> Iterator[tuple[str, float | None, float | None]]:
        """**Pure.** Yields each metric with its value in both."""
        before, after = self.a.manifest.metrics, self.b.manifest.metrics
        for metric in dict.fromkeys((*before, *after)):
            yield metric, before.get(metric), after.get(metric)


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _heading_fields(heading: Heading) -> dict[str, Any]:
    manifest = heading.manifest
    return {
        "place": heading.url,
        "directory": heading.directory or None,
        **name_fields(manifest.name),
        **time_fields("committed_at", manifest.committed_at_unix_seconds),
        "workers": manifest.world_size,
        "size_bytes": heading.size_bytes,
        "versions": manifest.versions,
    }


def _show(screen: Screen, found: CheckpointDifference, limit: int | None) -> None:
    now = time.time()
    rows: list[list[Words]] = []
    for label, heading in (("A", found.a), ("B", found.b)):
        manifest = heading.manifest
        at = manifest.committed_at_unix_seconds
        when = when_text(at, now) if screen.is_terminal else iso_text(at) or "-"
        place = heading.location if screen.is_terminal else unspaced(heading.location)
        size = screen.size(heading.size_bytes, unit="")
        rows.append([label, (place, STRONG), str(manifest.step), when, size, str(manifest.world_size)])
    _table(screen, ["", "checkpoint", "step", "saved", "size", "workers"], rows, {"step", "size", "workers"})
    versions_a, versions_b = found.a.manifest.versions, found.b.manifest.versions
    metrics: list[list[Words]] = [
        [metric, _figure(before), _figure(after), _figure(_change(before, after), sign=True)]
        for metric, before, after in found.metrics()
    ]
    if metrics:
        screen.say()
        _table(screen, ["metric", "A", "B", "change"], metrics, {"A", "B", "change"})
    changed_versions = [
        (library, versions_a.get(library, "-"), versions_b.get(library, "-"))
        for library in dict.fromkeys((*versions_a, *versions_b))
        if versions_a.get(library) != versions_b.get(library)
    ]
    if changed_versions:
        screen.say()
        _table(screen, ["written by", "A", "B"], [list(row) for row in changed_versions], set())
    screen.say()
    if found.is_same:
        screen.say((f"the same: {counted(found.same, 'array')}, and all other values", GOOD))
        return
    arrays, values = counted(len(found.changes), "array"), counted(len(found.values), "other value")
    screen.say(f"{arrays} and {values} changed; {counted(found.same, 'array')} did not")
    _show_changes(screen, found, limit)
    _show_values(screen, found, limit)


def _show_changes(screen: Screen, found: CheckpointDifference, limit: int | None) -> None:
    objects = list(dict.fromkeys((*found.objects, *(one.name.partition("/")[0] for one in found.changes))))
    changes = sorted(
        found.changes,
        key=lambda one: (one.kind == "changed", objects.index(one.name.partition("/")[0]), -(one.relative or 0.0)),
    )
    shown = changes[:limit] if screen.is_terminal else changes
    if not shown:
        return
    titles = ["", "array", "dtype", "shape"]
    if found.is_measured:
        titles += ["changed", "norm A", "norm B", "norm B-A", "relative"]
    rows: list[list[Words]] = []
    for one in shown:
        sign = _SIGNS[one.kind] if screen.is_terminal else one.kind
        name = one.name if screen.is_terminal else unspaced(one.name)
        dtype = _both(one.a.dtype if one.a else None, one.b.dtype if one.b else None)
        row: list[Words] = [(sign, _STYLES[one.kind]), (name, _STYLES[one.kind]), dtype]
        row.append(_both(_shape(one.a), _shape(one.b)))
        if found.is_measured:
            norms = (one.norm_a, one.norm_b, one.norm_difference)
            row += [_share(one), *(_figure(norm.norm if norm else None) for norm in norms), _figure(one.relative)]
        rows.append(row)
    screen.say()
    figures = {"changed", "norm A", "norm B", "norm B-A", "relative"}
    _table(screen, titles, rows, figures)
    if len(shown) < len(changes):
        screen.say((f"and {len(changes) - len(shown)} more (--all shows them)", FAINT))
    for one in changes:
        after, before = one.norm_b.nonfinite if one.norm_b else 0, one.norm_a.nonfinite if one.norm_a else 0
        if after or before:
            screen.say((f"not finite: {one.name} has {before} in A, {after} in B", BAD if after else NOTABLE))


def _show_values(screen: Screen, found: CheckpointDifference, limit: int | None) -> None:
    shown = found.values[:limit] if screen.is_terminal else found.values
    if not shown:
        return
    screen.say()
    rows: list[list[Words]] = [[one.path, one.a or "-", one.b or "-"] for one in shown]
    _table(screen, ["value", "A", "B"], rows, set())
    if len(shown) < len(found.values):
        screen.say((f"and {len(found.values) - len(shown)} more (--all shows them)", FAINT))


def _table(screen: Screen, titles: Sequence[str], rows: Sequence[Sequence[Words]], figures: set[str]) -> None:
    if screen.is_terminal:
        screen.table(titles, rows, figures=figures)
        return
    names = {title: title.upper().replace(" ", "_") or "SIDE" for title in titles}
    names |= {"size": "BYTES"} if "size" in names else {}
    names |= {"": "CHANGE"} if "array" in names else {}
    screen.table(
        [names[title] for title in titles], rows, figures={names[title] for title in titles if title in figures}
    )


def _both(a: str | None, b: str | None) -> str:
    if a is None or b is None or a == b:
        return a or b or "-"
    return f"{a}->{b}"


def _shape(leaf: StoredLeaf | None) -> str | None:
    return None if leaf is None else "[" + ",".join(map(str, leaf.shape)) + "]"


def _share(change: LeafChange) -> str:
    if change.changed_elements is None or change.a is None or not change.a.elements:
        return "-"
    percent = 100 * change.changed_elements / change.a.elements
    return f"{percent:.0f}%" if percent >= 1 else "<1%"


def _figure(figure: float | None, *, sign: bool = False) -> str:
    return "-" if figure is None else f"{figure:+.4g}" if sign else f"{figure:.4g}"
