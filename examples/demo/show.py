"""The demo on the screen, live on a terminal, plain lines elsewhere; and what it says at the end."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.figures import Figures
from demo.reports import Settings
from demo.verdict import Comparison, Outcome
from holdfast.events import Restored
from holdfast.format.names import parse_step_directory

_LABEL_CELLS: Final = 12
_FIGURES_CELLS: Final = 28
_LINE_CELLS: Final = (10, 100)
_PLAIN_PARTS: Final = 4
_MARKS: Final = {"done": "━", "lost": "╌", "to do": "─", "saved": "●", "kill": "✗"}
_ASCII_MARKS: Final = {"done": "=", "lost": "~", "to do": "-", "saved": "o", "kill": "x"}
_STYLES: Final = {"done": "cyan", "lost": "yellow", "to do": "dim", "saved": "green", "kill": "bold red"}


class Screen:
    """Shows how far both runs are, where checkpoints were committed, and where processes were killed."""

    def __init__(self, console: Console, settings: Settings, kills: int) -> None:
        self._console = console
        self._kills = kills
        self._steps = settings.steps
        self._marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
        self._untouched = _Track()
        self._under_fire = _Track()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def show_untouched(self, step: int, loss: str) -> None:
        """A step of the run that nobody touches is complete."""
        self._untouched.go_to(step, loss)
        self._say_part("untouched", self._untouched)

    def show_step(self, step: int, loss: str) -> None:
        """A step of the run under fire is complete."""
        self._under_fire.go_to(step, loss)
        self._say_part("under fire", self._under_fire)

    def show_saved(self, step: int) -> None:
        """A step has been committed."""
        self._under_fire.saved.append(step)

    def show_kill(self, step: int, writing: str) -> None:
        """The process was killed, perhaps in the middle of writing a checkpoint."""
        self._under_fire.kills.append(step)
        name = parse_step_directory(writing)
        where = f" in the middle of writing the checkpoint of step {name.step}" if name else ""
        self._say(f"{self._marks['kill']} killed (SIGKILL) after step {step}{where}", "red")

    def show_back(self, process: int, restored: Restored | None, seconds: float) -> None:
        """A process has done its first step, so long after the death of the one before."""
        self._under_fire.step = restored.step if restored is not None else 0
        how = f"goes on: {restored}" if restored is not None else "begins from nothing: no checkpoint was committed yet"
        self._say(f"process {process} {how}; its first step is done {seconds:.2f} s after the kill", "green")

    def __enter__(self) -> Self:
        self._say(
            f"A small GPT learns Python from the source of its standard library, {self._steps} steps, twice: "
            f"untouched, then under fire, killed {self._kills} times."
        )
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)

    def _say_part(self, name: str, track: _Track) -> None:
        """One line for each part of the run; a terminal shows it all the time."""
        part = track.step * _PLAIN_PARTS // self._steps
        if not self._console.is_terminal and part > track.parts_told:
            track.parts_told = part
            self._say(f"{name}: step {track.step} of {self._steps}, loss {track.loss:.3f}")

    def _render(self) -> Group:
        return Group(self._line("untouched", self._untouched), self._line("under fire", self._under_fire))

    def _line(self, label: str, track: _Track) -> Text:
        least, most = _LINE_CELLS
        cells = max(least, min(most, self._console.width - _LABEL_CELLS - _FIGURES_CELLS))
        kinds = ["to do"] * cells

        def cell(step: int) -> int:
            return step * cells // self._steps

        kinds[: cell(track.furthest)] = ["lost"] * cell(track.furthest)
        kinds[: cell(track.step)] = ["done"] * cell(track.step)
        for kind, steps in (("saved", track.saved), ("kill", track.kills)):
            for step in steps:
                kinds[max(cell(step) - 1, 0)] = kind
        line = Text(f"{label:<{_LABEL_CELLS}}")
        for kind in kinds:
            line.append(self._marks[kind], _STYLES[kind])
        loss = f"  loss {track.loss:.3f}" if track.step else ""
        return line.append(f"  {track.step}/{self._steps}{loss}")


class _Track:
    """How far one run is.

    Attributes:
        step: How many steps are complete.
        furthest: How many were, before some were lost.
        loss: That of the last step.
        saved: The steps that were committed.
        kills: The steps after which a process was killed.
        parts_told: How many parts of the run have had their line.
    """

    def __init__(self) -> None:
        self.step = 0
        self.furthest = 0
        self.loss = 0.0
        self.saved: list[int] = []
        self.kills: list[int] = []
        self.parts_told = 0

    def go_to(self, step: int, loss: str) -> None:
        """Notes that a step is complete."""
        self.step = step
        self.furthest = max(self.furthest, step)
        self.loss = float.fromhex(loss)


_DIGEST_CELLS = 16


def show_summary(console: Console, outcome: Outcome, figures: Figures) -> None:
    """Prints what the run under fire has cost, what was compared, and the verdict."""
    console.print()
    console.print(_cost_table(figures))
    console.print()
    console.print(make_comparison_table(outcome.comparisons, "under fire"))
    console.print()
    objections = outcome.objections
    if objections:
        console.print(Text("VERDICT: no", "bold red"))
        for objection in objections:
            console.print(Text(f"  {objection}", "red"), soft_wrap=True)
    else:
        line = f"VERDICT: yes. Killed {_times(figures.kills)}, and bit-identical to an untouched run."
        console.print(Text(line, "bold green"), soft_wrap=True)


def _cost_table(figures: Figures) -> Table:
    sums = figures.sums
    untouched, under_fire = figures.step_seconds
    failed = f", {sums.saves_failed} failed" if sums.saves_failed else ", none failed"
    cut_off = f", {figures.saves_cut_off} cut off by a kill" if figures.saves_cut_off else ""
    from_nothing = f"; {_times(figures.fresh_starts)} there was none yet" if figures.fresh_starts else ""
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("kills survived", f"{figures.kills}, {figures.kills_in_write} of them in the middle of a write")
    table.add_row("steps lost and repeated", f"{figures.steps_repeated} (the run has {figures.steps})")
    table.add_row(
        "time lost to saving",
        f"{sums.blocked_seconds:.2f} s in which training waited: {figures.blocked_share:.1%} of "
        f"{figures.training_seconds:.1f} s of training",
    )
    table.add_row("a step, in the median", f"{under_fire:.3f} s under fire, {untouched:.3f} s untouched")
    table.add_row("saves", f"{sums.saves_committed} committed{failed}{cut_off}")
    table.add_row("bytes written", decimal(sums.written_bytes))
    table.add_row(
        "restores",
        f"{figures.restores} in {figures.restore_seconds:.2f} s, {decimal(figures.restored_bytes)} read and checked"
        f"{from_nothing}",
    )
    if figures.back_seconds:
        middle, last = median(figures.back_seconds), max(figures.back_seconds)
        at_most = f"{last:.2f} s at most, as the next process is ready some seconds after the first step"
        table.add_row("from a kill to the next step", f"{middle:.2f} s in the median, {at_most}")
    return table


def make_comparison_table(comparisons: Iterable[Comparison], other: str) -> Table:
    """What was compared, with the digests of both runs.

    Args:
        comparisons: Each item.
        other: What became of the run that is held against the untouched one.
    """
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("", "untouched (SHA-256)", f"{other} (SHA-256)", ""):
        table.add_column(heading, no_wrap=True)
    for comparison in comparisons:
        mark = Text("identical", "green") if comparison.identical else Text("DIFFERS", "bold red")
        digests = (comparison.untouched[:_DIGEST_CELLS], comparison.killed[:_DIGEST_CELLS])
        table.add_row(comparison.item, *digests, mark)
    return table


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
