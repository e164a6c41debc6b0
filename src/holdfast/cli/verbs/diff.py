"""`holdfast diff`: shows what changed from one checkpoint to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import click

from holdfast.cli.completion import RunPath
from holdfast.cli.difference import WINDOW_BYTES, LeafChange, ValueChange, compare_values, find_changed, measure
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import COUNT, NAME, SHARE, SIZE, TIME, Column, Kind, Report, name_fields, time_fields, verb
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, PLAIN, STRONG, counted, shape_text, share_text
from holdfast.cli.target import Contents, Heading, RunTarget, find_target, read_checkpoint
from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.errors import DamageError, NoCheckpointError, StorageError, UsageError
from holdfast.process.progress import show_progress
from holdfast.restore.candidates import make_selection
from holdfast.witness.ring import DATA, LOSS, differs, read_ring

_SHOWN: Final = 20
_SIGNS: Final = {"changed": "~", "added": "+", "removed": "-", "dtype": "!", "shape": "!"}
_STYLES: Final = {"changed": PLAIN, "added": GOOD, "removed": BAD, "dtype": NOTABLE, "shape": NOTABLE}
_CHANGE_KIND: Final = Kind(_SIGNS.__getitem__, str)
_NUMBER: Final = Kind("{:.4g}".format, "{:.4g}".format, True)
_CHANGE: Final = Kind("{:+.4g}".format, "{:+.4g}".format, True)


@verb("diff")
@click.argument("a", metavar="A", type=RunPath())
@click.argument("b", metavar="B", type=RunPath())
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--quick", is_flag=True, help="Compare digests only: read no arrays and compute no norms.")
@click.option("--all", "show_all", is_flag=True, help=f"Show every change on a terminal, not the {_SHOWN} largest.")
@click.option("--exit-code", "with_code", is_flag=True, help="End with exit code 6 if the checkpoints differ.")
def command(
    report: Report, a: str, b: str, names: tuple[str, ...], quick: bool, show_all: bool, with_code: bool
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
    (target_a, heading_a, contents_a), (target_b, heading_b, contents_b) = sides
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
    witness = _compare_witnesses(target_a, target_b)
    # Metrics may differ: they are not restored.
    is_same = not changes and not values
    before, after = heading_a.manifest.metrics, heading_b.manifest.metrics
    metrics: list[_Metric] = [
        (one, before.get(one), after.get(one), after[one] - before[one] if one in before and one in after else None)
        for one in dict.fromkeys((*before, *after))
    ]
    report.fields = {
        "a": _heading_fields(heading_a),
        "b": _heading_fields(heading_b),
        "is_same": is_same,
        "is_measured": not quick,
        "metrics": {metric: {"a": before, "b": after, "change": change} for metric, before, after, change in metrics},
        "same_arrays": same,
        "arrays": [_change_fields(change) for change in changes],
        "values": [{"path": one.path, "a": one.a, "b": one.b} for one in values],
        "witness": witness,
        "seconds": time.monotonic() - begun_at,
    }
    _show_headings(report, heading_a, heading_b, metrics)
    report.line()
    if is_same:
        report.line((f"the same: {counted(same, 'array')}, and all other values", GOOD))
    else:
        arrays, others = counted(len(changes), "array"), counted(len(values), "other value")
        report.line(f"{arrays} and {others} changed; {counted(same, 'array')} did not")
        limit = _SHOWN if report.is_page and not show_all else None
        objects = list(dict.fromkeys((*contents_a.objects, *(one.name.partition("/")[0] for one in changes))))
        # Arrays that cannot be compared first, then those of each object, the largest change first.
        changes.sort(
            key=lambda one: (one.kind == "changed", objects.index(one.name.partition("/")[0]), -(one.relative or 0.0))
        )
        _show_changes(report, changes, limit, is_measured=not quick)
        _show_values(report, values, limit)
    for what, one in (witness or {}).items():
        at = one["differs_at"]
        how = "is the same" if at is None else f"first differs at step {at}"
        report.line(f"{what} of steps {one['first_step']} to {one['last_step']}: {how}")
    if with_code and not is_same:
        report.exit_code = ExitCode.DIFFERENT


_Side = tuple[RunTarget, Heading, Contents]


def _open(place: str) -> _Side:
    target = find_target(place)
    heading, contents = read_checkpoint(target)
    if isinstance(contents, DamageError):
        raise contents
    return target, heading, contents


def _measure(sides: Sequence[_Side], changes: Sequence[LeafChange]) -> Iterator[LeafChange | None]:
    size_bytes = sum(leaf.size_bytes for one in changes for leaf in (one.a, one.b) if leaf is not None)
    with show_progress("comparing") as bar:
        bar.expect(size_bytes)
        readers = [
            LeafReader(target.storage, contents.opened, target.siblings, window_bytes=WINDOW_BYTES, advance=bar.advance)
            for target, _, contents in sides
        ]
        with closing(readers[0]), closing(readers[1]):
            try:
                yield from measure(changes, *readers)
            except (DamageError, StorageError) as error:
                for target, heading, _ in sides:
                    if heading.expected is not None and not target.run.step(heading.expected).is_committed():
                        raise NoCheckpointError(
                            f"step {heading.manifest.step} of {heading.location} was removed while it was read",
                            hint="A running job removes old steps. Compare steps that it keeps.",
                        ) from error
                raise


def _compare_witnesses(a: RunTarget, b: RunTarget) -> dict[str, Any] | None:
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


_Metric = tuple[str, float | None, float | None, float | None]
"""A metric, its value in both, and the change."""


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


def _change_fields(change: LeafChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "change": change.kind,
        "a": change.a and {"dtype": change.a.dtype, "shape": list(change.a.shape)},
        "b": change.b and {"dtype": change.b.dtype, "shape": list(change.b.shape)},
        "changed_elements": change.changed_elements,
        "norm_a": change.norm_a and change.norm_a.norm,
        "norm_b": change.norm_b and change.norm_b.norm,
        "norm_difference": change.norm_difference and change.norm_difference.norm,
        "relative_difference": change.relative,
        "largest_difference": change.norm_difference and change.norm_difference.largest,
        "nonfinite_a": change.norm_a and change.norm_a.nonfinite,
        "nonfinite_b": change.norm_b and change.norm_b.nonfinite,
    }


def _show_headings(report: Report, a: Heading, b: Heading, metrics: Sequence[_Metric]) -> None:
    columns: list[Column[tuple[str, Heading]]] = [
        Column("", lambda side: side[0], plain="SIDE"),
        Column("checkpoint", lambda side: side[1].location, NAME, style=STRONG),
        Column("step", lambda side: side[1].manifest.step, COUNT),
        Column("saved", lambda side: side[1].manifest.committed_at_unix_seconds, TIME, may_go=1),
        Column("size", lambda side: side[1].size_bytes, SIZE, may_go=2),
        Column("workers", lambda side: side[1].manifest.world_size, COUNT, may_go=3),
    ]
    report.table(columns, [("A", a), ("B", b)])
    if metrics:
        figures: list[Column[_Metric]] = [
            Column("metric", lambda row: row[0]),
            Column("A", lambda row: row[1], _NUMBER),
            Column("B", lambda row: row[2], _NUMBER),
            Column("change", lambda row: row[3], _CHANGE),
        ]
        report.line()
        report.table(figures, metrics)
    before, after = a.manifest.versions, b.manifest.versions
    libraries = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    if libraries:
        versions: list[Column[str]] = [Column("written by", str), Column("A", before.get), Column("B", after.get)]
        report.line()
        report.table(versions, libraries)


def _show_changes(report: Report, changes: Sequence[LeafChange], limit: int | None, *, is_measured: bool) -> None:
    if not changes:
        return
    columns: list[Column[LeafChange]] = [
        Column("", lambda one: (one.kind, _STYLES[one.kind]), _CHANGE_KIND, plain="CHANGE"),
        Column("array", lambda one: (one.name, _STYLES[one.kind]), NAME),
        Column("dtype", lambda one: _both(one, lambda leaf: leaf.dtype), may_go=3),
        Column("shape", lambda one: _both(one, lambda leaf: shape_text(leaf.shape)), may_go=2),
    ]
    if is_measured:
        columns += [
            Column(
                "changed", lambda one: share_text(one.changed_elements, one.a.elements if one.a else 0), SHARE, may_go=1
            ),
            Column("norm A", lambda one: one.norm_a and one.norm_a.norm, _NUMBER, may_go=2),
            Column("norm B", lambda one: one.norm_b and one.norm_b.norm, _NUMBER, may_go=2),
            Column("norm B-A", lambda one: one.norm_difference and one.norm_difference.norm, _NUMBER, may_go=1),
            Column("relative", lambda one: one.relative, _NUMBER),
        ]
    report.line()
    report.table(columns, changes[:limit])
    _count_hidden(report, len(changes), limit)
    for one in changes:
        after, before = one.norm_b.nonfinite if one.norm_b else 0, one.norm_a.nonfinite if one.norm_a else 0
        if after or before:
            report.line((f"not finite: {one.name} has {before} in A, {after} in B", BAD if after else NOTABLE))


def _show_values(report: Report, values: Sequence[ValueChange], limit: int | None) -> None:
    if values:
        columns: list[Column[ValueChange]] = [
            Column("value", lambda one: one.path),
            Column("A", lambda one: one.a),
            Column("B", lambda one: one.b),
        ]
        report.line()
        report.table(columns, values[:limit])
        _count_hidden(report, len(values), limit)


def _count_hidden(report: Report, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        report.line((f"and {count - limit} more (--all shows them)", FAINT))


def _both(change: LeafChange, describe: Callable[[StoredLeaf], str]) -> str:
    texts = dict.fromkeys(describe(leaf) for leaf in (change.a, change.b) if leaf is not None)
    return "->".join(texts)
