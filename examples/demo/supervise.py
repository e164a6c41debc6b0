"""Runs the training twice, once untouched and once under fire, in processes of their own."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from demo.process import Process, kill
from demo.reports import Begun, Evidence, Report, Settings, StepDone
from demo.show import Screen
from demo.verdict import Life, Outcome, compare_evidence, compare_steps
from holdfast.events import Committed, Restored, Staged, Written
from holdfast.format.names import MANIFEST_NAME, parse_step_directory


@dataclass(frozen=True, slots=True)
class KillPlan:
    """One kill that is to be made.

    Attributes:
        step: Not before so many steps are complete.
        in_write: True to wait until a checkpoint is being written.
        share: How much of a step, or of a write, is allowed to pass first, from 0 to 1.
    """

    step: int
    in_write: bool
    share: float


def plan_kills(seed: int, kills: int, steps: int) -> list[KillPlan]:
    """**Pure.** One kill at a random place in each of as many equal parts of the run; half of them in a write.

    Args:
        seed: Another seed, other moments.
        kills: How many.
        steps: How many steps the run has; at least twice as many.
    """
    chance = random.Random(seed)
    in_write = set(chance.sample(range(kills), (kills + 1) // 2))
    bounds = [1 + part * (steps - 1) // kills for part in range(kills + 1)]
    return [
        KillPlan(chance.randrange(bounds[part], bounds[part + 1]), part in in_write, chance.random())
        for part in range(kills)
    ]


_MOST_LIVES: Final = 20
_LOOK_SECONDS: Final = 2.0
_LOOK_EVERY_SECONDS: Final = 0.0005


def run_demo(settings: Settings, kills: int, files: Path, screen: Screen) -> Outcome:
    """**Blocks.** Runs both, and compares them.

    Args:
        settings: What is trained.
        kills: How often the run under fire is to be killed.
        files: An empty directory for the run and for what the processes leave.
        screen: Shows how it goes.

    Raises:
        DemoError: If a process fails of itself.
    """
    # A short name: the loaders have sockets in it, whose paths may not be long.
    with tempfile.TemporaryDirectory(prefix="hf-") as scratch:
        untouched, expected = _run_untouched(settings, files, scratch, screen)
        directory = files / "run"
        plans = plan_kills(settings.seed, kills, settings.steps)
        lives, evidence = _run_under_fire(settings, plans, directory, scratch, screen)
    steps = compare_steps(untouched, (done for life in lives for done in life.steps))
    return Outcome(untouched, lives, [*compare_evidence(expected, evidence), steps], directory)


def _run_untouched(settings: Settings, files: Path, scratch: str, screen: Screen) -> tuple[list[StepDone], Evidence]:
    untouched: list[StepDone] = []
    with Process(settings, files, "untouched", None, scratch) as process:
        for report in process.reports():
            if isinstance(report, StepDone):
                untouched.append(report)
                screen.show_untouched(report.step, report.loss)
        return untouched, process.wait_evidence()


def _run_under_fire(
    settings: Settings, plans: list[KillPlan], directory: Path, scratch: str, screen: Screen
) -> tuple[list[Life], Evidence]:
    """Kills the job again and again, which `holdfast run` starts each time, until it is complete."""
    lives: list[Life] = []
    plan, known = None, frozenset[str]()
    with Process(settings, directory.parent, "under-fire", directory, scratch) as job:
        for report in job.reports():
            if isinstance(report, Begun):
                if lives:
                    # All that the dead one has told is read by now.
                    screen.show_kill(lives[-1].ended_with, lives[-1].writing)
                    if plan is not None and plan.in_write and not lives[-1].writing:
                        _plan_another(plans, lives)
                lives.append(Life(len(lives) + 1, report.process, known))
                plan = plans.pop(0) if plans else None
                continue
            life = lives[-1]
            _note(report, lives, screen)
            if plan is not None and life.killed_at_seconds is None and _is_moment(plan, report, directory, known):
                # The kill is to strike so far into the step or the write, which are not reported.
                time.sleep(plan.share * (life.write_seconds if plan.in_write else _step_seconds(life.steps)))
                life.killed_at_seconds = kill(life.process)
                # Before the next one removes what is unfinished.
                found = _step_directories(directory)
                life.unfinished = tuple(one.name for one in found if not (one / MANIFEST_NAME).exists())
                known = frozenset(one.name for one in found)
        return lives, job.wait_evidence()


def _plan_another(plans: list[KillPlan], lives: list[Life]) -> None:
    """The checkpoint was committed before the kill: the next kill is to be in a write in its place, and at once."""
    if plans:
        plans[0] = replace(plans[0], in_write=True, share=0.0)
    elif len(lives) < _MOST_LIVES and not any(life.writing for life in lives):
        plans.append(KillPlan(lives[-1].ended_with + 1, in_write=True, share=0.0))


def _note(report: Report, lives: list[Life], screen: Screen) -> None:
    """Notes and shows what the last process has told."""
    life = lives[-1]
    match report:
        case Restored():
            life.restored = report
        case StepDone():
            if not life.steps and life.number > 1:
                life.back_seconds = report.at_seconds - (lives[-2].killed_at_seconds or report.at_seconds)
                screen.show_back(life.number, life.restored, life.back_seconds)
            life.steps.append(report)
            screen.show_step(report.step, report.loss)
        case Staged():
            life.staged_step = report.step
        case Written():
            life.write_seconds = report.background_seconds
        case Committed():
            screen.show_saved(report.step)


def _is_moment(plan: KillPlan, report: Report, directory: Path, known: frozenset[str]) -> bool:
    """**Blocks** until a checkpoint is being written, if that is planned. Whether the planned moment has come."""
    match report:
        case StepDone():
            return not plan.in_write and report.step >= plan.step
        case Staged():
            return plan.in_write and report.step >= plan.step and _wait_for_write(directory, known, report.step)
    return False


def _wait_for_write(directory: Path, known: frozenset[str], step: int) -> bool:
    """**Blocks.** Waits until a step is being written; False if that was over before it was seen."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while time.monotonic() < deadline:
        for found in _step_directories(directory):
            if found.name not in known and _step_of(found.name) == step:
                return not (found / MANIFEST_NAME).exists()
        # What the process is writing shows in the directory alone; a write may last no more than milliseconds.
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def _step_directories(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"))


def _step_of(name: str) -> int | None:
    parsed = parse_step_directory(name)
    return parsed.step if parsed is not None else None


def _step_seconds(steps: list[StepDone]) -> float:
    return steps[-1].at_seconds - steps[-2].at_seconds if len(steps) > 1 else 0.0
