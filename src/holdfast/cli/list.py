"""`holdfast list`: the checkpoints of a run, one a line."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from holdfast.cli.screen import Screen
    from holdfast.cli.survey import Survey
    from holdfast.cli.target import Target
    from holdfast.errors import HoldfastError

_SHOWN_DAMAGES: Final = 10
"""Of each directory."""


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also show what a restore leaves alone: unfinished saves, say.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document; it always holds everything.")
def command(run: str, show_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run.

    RUN is the directory that a job saves into. The steps of its living line are listed, the newest last: those that a
    restore may begin from.
    """
    from holdfast.cli.screen import Screen, write_json
    from holdfast.cli.survey import NOTHING, State, survey_run
    from holdfast.cli.target import find_run, no_living
    from holdfast.errors import NoCheckpointError
    from holdfast.storage import open_storage

    try:
        target = find_run(run)
    except NoCheckpointError as error:
        if as_json:
            write_json(sys.stdout, "list", make_document(open_storage(run).url, NOTHING, error))
        raise
    survey = survey_run(target.storage)
    problem = no_living(survey.catalog, target) if survey.newest is None else None
    if as_json:
        write_json(sys.stdout, "list", make_document(target.storage.url, survey, problem))
    elif survey.found and (show_all or survey.of(State.LIVING)):
        _show(target, survey, show_all, Screen(sys.stdout))
    if problem is not None:
        raise problem


def _show(target: Target, survey: Survey, show_all: bool, screen: Screen) -> None:
    from holdfast.cli.screen import FAINT, STRONG, Styled
    from holdfast.cli.step_table import plain_sheet, terminal_sheet
    from holdfast.cli.survey import State
    from holdfast.cli.wording import age_text

    shown = survey.found if show_all else tuple(survey.of(State.LIVING))
    if not screen.is_terminal:
        sheet = plain_sheet(survey, shown)
        screen.table(sheet.columns, sheet.rows)
        return _remark(survey, show_all)
    now = time.time()
    opening = survey.opening
    by = ""
    if opening is not None:
        age = age_text(now - opening.opened_at_unix_seconds)
        by = f"   generation {opening.generation}, opened {age} by process {opening.process} on {opening.host}"
    screen.say(Styled(target.location, STRONG), Styled(by, FAINT))
    sheet = terminal_sheet(survey, shown, width=screen.width, now_unix_seconds=now)
    screen.table(sheet.columns, sheet.rows)
    if sheet.metrics_left_out:
        screen.say(Styled(f"no room for {', '.join(sheet.metrics_left_out)}", FAINT))
    return _remark(survey, show_all)


def _remark(survey: Survey, show_all: bool) -> None:
    """What the table does not say; on the error stream, so that a pipe gets the table alone."""
    from holdfast.cli.screen import BAD, FAINT, Screen, Styled
    from holdfast.cli.survey import State
    from holdfast.cli.wording import counted, size_text

    sys.stdout.flush()
    remarks = Screen(sys.stderr)
    # A directory that was lost is missing in two files for each worker, and there may be thousands.
    for damages in (survey.catalog.faults, *(one.damages for one in survey.found)):
        for damage in damages[:_SHOWN_DAMAGES]:
            remarks.say(Styled("damaged ", BAD), damage.message)
        if len(damages) > _SHOWN_DAMAGES:
            more = f"and {len(damages) - _SHOWN_DAMAGES} more places (--json names them all)"
            remarks.say(Styled("damaged ", BAD), more)
    if show_all:
        return
    hidden = []
    if off_line := len(survey.of(State.OFF_LINE)):
        hidden.append(f"{counted(off_line, 'step')} off the living line")
    if unfinished := len(survey.of(State.UNFINISHED)):
        hidden.append(f"{unfinished} unfinished")
    if lost := len(survey.of(State.LOST)):
        hidden.append(f"{counted(lost, 'step')} without a manifest")
    if aside := len(survey.of(State.SET_ASIDE)):
        hidden.append(f"{aside} being removed")
    if spare := survey.of(State.SPARE):
        hidden.append(f"a spare file of {size_text(spare[0].size_bytes)}")
    if hidden:
        remarks.say(Styled(f"not shown: {', '.join(hidden)} (--all shows them)", FAINT))


def make_document(url: str, survey: Survey, error: HoldfastError | None = None) -> dict[str, Any]:
    """**Pure.** The JSON document of a run, and what is wrong with it."""
    from holdfast.cli.survey import State, find_extremes, found_fields, problem_fields, time_fields

    living = survey.of(State.LIVING)
    opening = survey.opening
    opened = None
    if opening is not None:
        opened = {
            "host": opening.host,
            "process": opening.process,
            **time_fields("opened_at", opening.opened_at_unix_seconds),
        }
    return {
        "run": url,
        "generation": survey.catalog.generation,
        "opened": opened,
        "newest_step": survey.newest.name.step if survey.newest and survey.newest.name else None,
        "extremes": {
            metric: {"lowest_step": lowest.step if lowest else None, "highest_step": highest.step if highest else None}
            for metric, (lowest, highest) in find_extremes(living).items()
        },
        "steps": [found_fields(one) for one in living],
        "off_line": [found_fields(one) for one in survey.of(State.OFF_LINE)],
        "unfinished": [found_fields(one) for one in survey.of(State.UNFINISHED)],
        "lost": [found_fields(one) for one in survey.of(State.LOST)],
        "set_aside": [found_fields(one) for one in survey.of(State.SET_ASIDE)],
        "spare": [found_fields(one) for one in survey.of(State.SPARE)],
        "damaged_records": [problem_fields(fault) for fault in survey.catalog.faults],
        "error": {"message": error.message, "hint": error.hint} if error else None,
    }
