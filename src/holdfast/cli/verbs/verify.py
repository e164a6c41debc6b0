"""`holdfast verify`: reads every byte of a checkpoint and checks it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import click

from holdfast.catalog import Catalog, StoredStep
from holdfast.catalog.named_step import LATEST
from holdfast.catalog.survey import State, find_damaged_records
from holdfast.cli.completion import RunPath
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import Report, name_fields, problem_fields, verb
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, counted
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step, find_target, no_living
from holdfast.errors import UsageError
from holdfast.format.names import COMMITTED_NAME, StepName
from holdfast.numbers import size_text, time_text
from holdfast.process.progress import show_progress
from holdfast.restore.verify import Checked, CheckOutcome, CheckVerdict, judge_step


@verb("verify")
@click.argument("run", metavar="RUN[@STEP]", type=RunPath())
@click.option(
    "--all", "verify_all", is_flag=True, help="Read every checkpoint, also those that are not in the current lineage."
)
def command(report: Report, run: str, verify_all: bool) -> None:
    """Read every byte of a checkpoint and check it.

    RUN is the directory that a job saves into. Its newest checkpoint is read unless you add a step, as in runs/gpt@500.
    RUN can also be the directory of a single step, or a copy of one.

    The exit code is 0 if everything that was read is whole, and 1 if there is damage.
    """
    target = find_target(run)
    if verify_all and (target.is_step or target.step is not None):
        raise UsageError("--all reads every checkpoint of a run", hint="Name the run alone, or leave out --all.")
    catalog, names = _choose(target, verify_all)
    records = find_damaged_records(target.run, catalog, closely=verify_all) if catalog is not None else []
    for damage in records:
        report.line(("damaged   ", BAD), damage.message)
    verdicts: list[CheckVerdict] = []
    for _ in range(MOST_LOOKS):
        for verdict in _judge(target, names):
            verdicts.append(verdict)
            _show_verdict(report, verdict, target)
            sys.stdout.flush()
        if verify_all or target.step not in (None, LATEST) or verdicts[-1].outcome is not CheckOutcome.REMOVED:
            break
        catalog, names = _choose(target, verify_all)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    if records or outcomes[CheckOutcome.DAMAGED] or outcomes[CheckOutcome.RESTORABLE]:
        report.exit_code = ExitCode.DAMAGED
    elif outcomes[CheckOutcome.UNREADABLE]:
        report.exit_code = ExitCode.FAILED
    elif not outcomes[CheckOutcome.WHOLE]:
        report.exit_code = ExitCode.NOTHING_THERE
    read_bytes = sum(verdict.read_bytes for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items())
    speed = f"   {size_text(read_bytes)} in {time_text(seconds)}, {size_text(read_bytes / (seconds or 1))}/s"
    report.line(f"{counted(len(verdicts), 'checkpoint')} read: {counts}", (speed if report.is_page else "", FAINT))
    _show_consequence(report, catalog, verdicts)
    if catalog is not None and target.step is None and (unread := len(catalog.committed) - len(verdicts)) > 0:
        report.note(("not read: ", FAINT), f"{counted(unread, 'other checkpoint')} (--all reads every one)")
    newest_whole = _find_newest(catalog, verdicts, CheckOutcome.WHOLE)
    report.fields = {
        "place": target.storage.url,
        "is_whole": report.exit_code is ExitCode.OK,
        "newest_whole_step": newest_whole.step if newest_whole else None,
        "read_bytes": read_bytes,
        "seconds": seconds,
        "steps": [
            {
                **name_fields(verdict.name),
                "directory": verdict.directory or None,
                "state": catalog and (State.LIVING if verdict.name in catalog.living else State.OFF_LINE).value,
                "outcome": verdict.outcome.value,
                "read_bytes": verdict.read_bytes,
                "seconds": verdict.seconds,
                "problems": [problem_fields(problem) for problem in verdict.problems],
                "has_copy": _has_copy(verdict, target),
            }
            for verdict in verdicts
        ],
        "damaged_records": [problem_fields(damage) for damage in records],
    }


def _choose(target: RunTarget, verify_all: bool) -> tuple[Catalog | None, Sequence[StepName | None]]:
    if target.is_step:
        return None, [None]
    catalog = target.run.look(closely=True)
    if not verify_all:
        return catalog, [choose_step(catalog, target)]
    if not catalog.committed:
        raise no_living(catalog, target)
    return catalog, catalog.committed


def _judge(target: RunTarget, names: Sequence[StepName | None]) -> Iterator[CheckVerdict]:
    checked: Checked = {}
    for number, name in enumerate(names, start=1):
        label = f"step {name.step}" if name else "reading"
        label += f" ({number} of {len(names)})" if len(names) > 1 else ""
        with show_progress(label) as bar:
            verdict = judge_step(
                target.storage,
                name.directory if name else "",
                name,
                beside=target.siblings,
                checked=checked,
                expect=bar.expect,
                progress=bar.advance,
            )
        yield verdict


_SHOWN_PROBLEMS: Final = 20
_STYLES: Final = {
    CheckOutcome.WHOLE: ("✓ ", GOOD),
    CheckOutcome.RESTORABLE: ("! ", NOTABLE),
    CheckOutcome.DAMAGED: ("✗ ", BAD),
    CheckOutcome.UNREADABLE: ("✗ ", BAD),
    CheckOutcome.REMOVED: ("- ", FAINT),
}


def _has_copy(verdict: CheckVerdict, target: RunTarget) -> bool:
    is_whole = verdict.outcome in (CheckOutcome.WHOLE, CheckOutcome.RESTORABLE)
    return not is_whole or StoredStep(target.storage, verdict.directory).has_copy()


def _show_verdict(report: Report, verdict: CheckVerdict, target: RunTarget) -> None:
    """Writes one line for a checkpoint, and one more for each damaged place."""
    symbol, style = _STYLES[verdict.outcome]
    report.line(
        (f"{symbol if report.has_symbols else ''}{verdict.outcome.value:<8}", style),
        f"  step {verdict.name.step if verdict.name else '?'}  ",
        (f"{verdict.directory or target.location}  {report.size(verdict.read_bytes)} read", FAINT),
    )
    if verdict.outcome is CheckOutcome.REMOVED:
        return
    if not _has_copy(verdict, target):
        copy = f"{COMMITTED_NAME}, the copy of its manifest, is missing or damaged"
        report.line("    ", f"{copy}; no restore needs it, and the next start of the job writes it")
    for problem in verdict.problems[:_SHOWN_PROBLEMS]:
        report.line("    ", problem.message)
    if len(verdict.problems) > _SHOWN_PROBLEMS:
        report.line(f"    and {len(verdict.problems) - _SHOWN_PROBLEMS} more places (--json names them all)")


def _find_newest(catalog: Catalog | None, verdicts: Sequence[CheckVerdict], *outcomes: CheckOutcome) -> StepName | None:
    """Returns the newest checkpoint of the current lineage with one of these outcomes, or None."""
    names = {verdict.name for verdict in verdicts if verdict.outcome in outcomes}
    return next((name for name in reversed(catalog.living if catalog else ()) if name in names), None)


def _show_consequence(report: Report, catalog: Catalog | None, verdicts: Sequence[CheckVerdict]) -> None:
    """Writes what damage of the newest checkpoint means for a restore."""
    newest = catalog.newest if catalog else None
    is_read = newest in {verdict.name for verdict in verdicts}
    if (
        catalog is None
        or newest is None
        or not is_read
        or newest == _find_newest(catalog, verdicts, CheckOutcome.WHOLE)
    ):
        return
    taken = _find_newest(catalog, verdicts, CheckOutcome.WHOLE, CheckOutcome.RESTORABLE)
    if taken == newest:
        text = f"A restore can use step {newest.step}; programs that read its data file without holdfast may fail."
        report.line((text, NOTABLE))
    elif taken is not None:
        report.line((f"A restore skips what is damaged and uses step {taken.step}.", NOTABLE))
    elif len(verdicts) == 1 and len(catalog.living) > 1:
        report.line(("A restore skips it and uses an older step; --all shows which are whole.", NOTABLE))
    else:
        report.line(("No checkpoint of the current lineage is whole.", BAD))
