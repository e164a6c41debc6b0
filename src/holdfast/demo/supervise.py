"""Runs the training twice, once untouched and once under fire, in processes of their own."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.catalog import read_catalog
from holdfast.demo.kills import KillPlan, plan_kills
from holdfast.demo.process import Process
from holdfast.demo.reports import Evidence, StepDone
from holdfast.demo.settings import Settings
from holdfast.demo.show import Screen
from holdfast.demo.verdict import Comparison, compare_evidence, compare_steps
from holdfast.events import Committed, Restored, Staged, Written
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage import LocalStorage

_EXTRA_KILLS: Final = 3
_LOOK_SECONDS: Final = 2.0
_LOOK_EVERY_SECONDS: Final = 0.0005


@dataclass(slots=True)
class Life:
    """One process of the run under fire, from its start to its end.

    Attributes:
        number: Which process it was, from 1 on.
        restored: What it was brought back from; None if it began from nothing.
        steps: The steps that it did.
        killed: Whether it was killed.
        writing: The checkpoint's directory in the midst of whose writing it was killed, or an empty string.
    """

    number: int
    restored: Restored | None = None
    steps: list[StepDone] = field(default_factory=list)
    killed: bool = False
    writing: str = ""

    @property
    def began_with(self) -> int:
        """How many steps were complete when it began."""
        return self.restored.step if self.restored is not None else 0

    @property
    def ended_with(self) -> int:
        """How many steps were complete when it ended."""
        return self.steps[-1].step if self.steps else self.began_with


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of both runs.

    Attributes:
        untouched: The steps of the run that nobody touched.
        lives: The processes of the run under fire, in order.
        comparisons: What was held against each other.
        directory: The directory of the run under fire.
    """

    untouched: list[StepDone]
    lives: list[Life]
    comparisons: list[Comparison]
    directory: Path

    @property
    def objections(self) -> list[str]:
        """Why the verdict is no; empty if it is yes."""
        objections = [str(comparison) for comparison in self.comparisons if not comparison.identical]
        if not any(life.writing for life in self.lives):
            objections.append("no kill was in the middle of a write")
        return objections


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
    """Starts the job again and again until it is complete."""
    lives: list[Life] = []
    extra_kills = 0
    while True:
        known = _unfinished(directory)
        plan = plans[0] if plans else None
        life = Life(len(lives) + 1)
        lives.append(life)
        with Process(settings, directory.parent, f"process-{life.number}", directory, scratch) as process:
            _live(process, life, plan, directory, screen)
            if not life.killed:
                return lives, process.wait_evidence()
        plans = plans[1:]
        # A directory without a manifest that was not there before: it died in the middle of writing it.
        life.writing = next(iter(sorted(_unfinished(directory) - known)), "")
        screen.show_kill(life.ended_with, life.writing)
        if plan is not None and plan.in_write and not life.writing and extra_kills < _EXTRA_KILLS:
            # The checkpoint was committed first. Another try, at once when the next is being written.
            extra_kills += 1
            plans = [KillPlan(life.ended_with + 1, in_write=True, share=0.0), *plans]


def _live(process: Process, life: Life, plan: KillPlan | None, directory: Path, screen: Screen) -> None:
    """Follows a process to its end, and kills it when that is planned."""
    write_seconds = 0.0
    for report in process.reports():
        # What it has told before it was killed is still to be read.
        if life.killed and not isinstance(report, StepDone):
            continue
        match report:
            case Restored():
                life.restored = report
                screen.show_restored(life.number, report)
            case StepDone():
                if not life.steps and life.number > 1 and life.restored is None:
                    screen.show_anew(life.number)
                life.steps.append(report)
                screen.show_step(report.step, report.loss)
                if plan and not plan.in_write and not life.killed and report.step >= plan.step:
                    time.sleep(plan.share * _step_seconds(life.steps))
                    life.killed = True
            case Staged() if (
                plan and plan.in_write and report.step >= plan.step and _sees_write(directory, report.step)
            ):
                time.sleep(plan.share * write_seconds)
                life.killed = True
            case Written():
                write_seconds = report.background_seconds
            case Committed():
                screen.show_saved(report.step)
        if life.killed:
            process.kill()


def _sees_write(directory: Path, step: int) -> bool:
    """**Blocks.** Looks until a step is being written; False if it was over before it was seen."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while time.monotonic() < deadline:
        for found in directory.glob(f"step-{step:09d}.*"):
            if not (found / MANIFEST_NAME).exists():
                return True
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def _unfinished(directory: Path) -> set[str]:
    return {name.directory for name in read_catalog(LocalStorage(directory)).unfinished}


def _step_seconds(steps: list[StepDone]) -> float:
    return steps[-1].at_seconds - steps[-2].at_seconds if len(steps) > 1 else 0.0
