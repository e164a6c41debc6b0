"""`holdfast show`: what one checkpoint holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from holdfast.cli.contents import Contents
    from holdfast.cli.target import Target
    from holdfast.restore.candidates import Selection


@click.command()
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--depth", type=click.IntRange(0, 16), default=2, show_default=True, help="How deep the tree goes.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(run: str, names: tuple[str, ...], depth: int, as_json: bool) -> None:
    """Show what one checkpoint holds.

    RUN is the directory that a job saves into, and its newest checkpoint is meant unless a step is given, as in
    runs/gpt@500. RUN may also be the directory of a single step, wherever that was copied to.

    With one or more NAMEs those leaves and values are shown in full: an object (model), a leaf
    (model/layers.0.weight), or a pattern ('model/layers.*.weight').
    """
    from holdfast.cli.contents import read_checkpoint
    from holdfast.cli.screen import Screen, write_json
    from holdfast.cli.target import find_target
    from holdfast.errors import DamageError
    from holdfast.restore.candidates import make_selection

    target = find_target(run)
    selection = make_selection(names) if names else None
    heading, contents = read_checkpoint(target)
    page = None
    if not as_json:
        from holdfast.cli.verbs.show import ContentsPage

        page = ContentsPage(Screen(sys.stdout))
        if selection is None:
            # First, so that it is seen also where an index is damaged.
            page.show_heading(heading)
    if isinstance(contents, DamageError):
        raise contents
    if page is None:
        document = contents.document(selection)
        _check_found(contents, selection, target)
        write_json(sys.stdout, "show", document)
    elif selection is None:
        page.show_overview(contents, depth)
    else:
        arrays, values = contents.arrays(selection), contents.values(selection)
        _check_found(contents, selection, target)
        page.show_details(contents, arrays, values)


def _check_found(contents: Contents, selection: Selection | None, target: Target) -> None:
    from holdfast.errors import UsageError

    if selection is not None and selection.unmatched:
        raise UsageError(
            f"step {contents.heading.manifest.step} of {target.location} has nothing of the name "
            f"{', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, contents.objects))}; a leaf is named like model/head.weight.",
        )
