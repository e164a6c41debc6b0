"""`holdfast rollback`: makes an earlier step the newest one of the current lineage."""

from __future__ import annotations

import shlex

import click

from holdfast.catalog import StoredRun, describe_steps, find_owner
from holdfast.cli.completion import RunPath
from holdfast.cli.report import Report, name_fields, verb
from holdfast.cli.screen import FAINT, GOOD
from holdfast.cli.target import choose_step, find_target
from holdfast.errors import DamageError, UsageError
from holdfast.format.names import parse_step_directory
from holdfast.format.records import choose_living, make_base
from holdfast.process.progress import show_progress
from holdfast.restore.verify import CheckOutcome, judge_step
from holdfast.witness.ring import remove_rings


@verb("rollback")
@click.argument("checkpoint", metavar="RUN@STEP", type=RunPath())
def command(report: Report, checkpoint: str) -> None:
    """Make an earlier step the newest one: the next start of the job resumes there.

    Newer steps stay on the disk, and no longer count. A second rollback, to one of them, makes them count again. Of two
    checkpoints of one step, name the directory: runs/gpt/step-000000500.g0001.

    Every byte of the step is read first. While a job on this machine has the run open, nothing is changed.
    """
    target = find_target(checkpoint)
    storage, location = target.storage, target.location
    catalog = StoredRun(storage).look(closely=True)
    if target.is_step:
        directory = storage.location
        name = parse_step_directory(storage.url.rpartition("/")[2] if directory is None else directory.resolve().name)
        if name is None or target.siblings is None:
            raise UsageError(f"{location} is not in a run", hint="Name RUN@STEP.")
        storage, location = target.siblings, location.rstrip("/").rpartition("/")[0] or "."
        catalog = StoredRun(storage).look(closely=True)
    elif target.step is None:
        steps = ", ".join(str(one.step) for one in catalog.living) or "none"
        raise UsageError(f"{location}: to which step?", hint=f"Write {location}@STEP. The steps are: {steps}.")
    else:
        name = choose_step(catalog, target)
    if catalog.faults:
        raise catalog.faults[0]
    if owner := find_owner(storage):
        raise UsageError(
            f"a job has {location} open now: {owner}",
            hint="Stop it first (SIGTERM lets it save), then run the command again.",
        )
    with show_progress(f"is step {name.step} whole?") as bar:
        verdict = judge_step(storage, name.directory, name, expect=bar.expect, progress=bar.advance)
    if verdict.outcome not in (CheckOutcome.WHOLE, CheckOutcome.RESTORABLE):
        problem = verdict.problems[-1]
        text = f"step {name.step} of {location} is not whole, so nothing was changed: {problem.message}"
        raise DamageError(text, step=name.step, hint=f"`holdfast verify --all {location}` shows which steps are whole.")
    newest, generation, left = catalog.newest, None, []
    if name != newest:
        # A crash before the base is recorded leaves a generation that changes nothing.
        generation = StoredRun(storage).open_generation(seen_generation=catalog.generation)
        base = make_base(generation, name, catalog.start_from)
        StoredRun(storage).record_base(base)
        remove_rings(storage)  # What lies beyond is not repeated.
        left = sorted(set(catalog.living) - set(choose_living(catalog.committed, {**catalog.bases, generation: base})))
    report.fields = {
        "run": storage.url,
        **name_fields(name),
        "directory": name.directory,
        "opened_generation": generation,
        "off_line": [{**name_fields(one), "directory": one.directory} for one in left],
    }
    if name == newest:
        report.line(f"step {name.step} is the newest step of {location} already")
        return
    report.line((f"step {name.step} is now the newest step of {location}", GOOD))
    if left:
        report.line(f"no longer in the current lineage, but still there: {describe_steps([one.step for one in left])}")
        report.line(("to undo this: ", FAINT), f"holdfast rollback {shlex.quote(f'{location}/{left[-1].directory}')}")
        report.line(("to remove them: ", FAINT), f"holdfast prune {shlex.quote(location)} --off-line")
