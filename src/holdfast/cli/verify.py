"""`holdfast verify`: whether every byte is what was written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.catalog import Catalog
    from holdfast.cli.target import Target
    from holdfast.cli.verdicts import Verdict
    from holdfast.errors import DamageError
    from holdfast.format.names import StepName


@click.command()
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
@click.option("--all", "verify_all", is_flag=True, help="Read every checkpoint, also those off the living line.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(run: str, verify_all: bool, as_json: bool) -> None:
    """Read every byte and say whether it is what was written.

    RUN is the directory that a job saves into, and its newest checkpoint is read unless a step is given, as in
    runs/gpt@500; if a job removes that one meanwhile, the newest that is there then. RUN may also be the directory of a
    single step, wherever that was copied to.

    The exit code is 0 if all that was read is whole, and 1 if there is damage.
    """
    from holdfast.cli.screen import Screen, write_json
    from holdfast.cli.target import MOST_LOOKS, find_target
    from holdfast.cli.verdicts import Outcome
    from holdfast.cli.verify_report import VerifyReport
    from holdfast.errors import UsageError

    target = find_target(run)
    if verify_all and (target.is_step or target.step is not None):
        raise UsageError("--all reads every checkpoint of a run", hint="Name the run alone, or leave out --all.")
    catalog, names = _choose(target, verify_all)
    report = VerifyReport(target, catalog, tuple(_find_damaged_records(target, catalog, verify_all)))
    screen = None if as_json else Screen(sys.stdout)
    if screen is not None:
        report.show_records(screen)
    for _ in range(MOST_LOOKS):
        is_removed = False
        for verdict in _judge(target, names):
            report.add(verdict)
            is_removed = verdict.outcome is Outcome.REMOVED
            if screen is not None:
                report.show_verdict(screen, verdict)
                sys.stdout.flush()
        if verify_all or target.step is not None or not is_removed:
            break
        catalog, names = _choose(target, verify_all)
        report.look_again(catalog)
    if screen is None:
        write_json(sys.stdout, "verify", report.document())
    else:
        report.show_sum(screen)
    raise click.exceptions.Exit(report.exit_code)


def _choose(target: Target, verify_all: bool) -> tuple[Catalog | None, Sequence[StepName | None]]:
    """The run, and what of it to read."""
    from holdfast.catalog import read_catalog
    from holdfast.cli.target import choose_step, no_living

    if target.is_step:
        return None, [None]
    catalog = read_catalog(target.storage)
    if not verify_all:
        return catalog, [choose_step(catalog, target)]
    if not catalog.committed:
        raise no_living(catalog, target)
    return catalog, catalog.committed


def _find_damaged_records(target: Target, catalog: Catalog | None, verify_all: bool) -> Iterator[DamageError]:
    """The run's own records that are damaged: which step follows which is told by them."""
    from holdfast.catalog import find_lost, read_generations, read_opening
    from holdfast.errors import DamageError, NotFoundError

    if catalog is None:
        return
    yield from catalog.faults
    for name in find_lost(target.storage, catalog):
        if catalog.newest is None or verify_all or name > catalog.newest:
            path = name.manifest_path
            yield DamageError(f"{path} is missing, and the step was committed", step=name.step, path=path)
    for generation in read_generations(target.storage) if verify_all else ():
        try:
            read_opening(target.storage, generation)
        except NotFoundError:
            continue
        except DamageError as damage:
            yield damage


def _judge(target: Target, names: Sequence[StepName | None]) -> Iterator[Verdict]:
    from holdfast.cli.verdicts import judge_step
    from holdfast.restore.verify import Checked

    checked = Checked()
    for number, name in enumerate(names, start=1):
        label = f"step {name.step}" if name else "reading"
        label += f" ({number} of {len(names)})" if len(names) > 1 else ""
        directory = name.directory if name else ""
        yield judge_step(target.storage, directory, name, label, beside=target.beside, checked=checked)
