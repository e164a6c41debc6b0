"""What the demo says at the end."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from demo.figures import Figures
from demo.outcome import Outcome
from demo.verdict import Comparison

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
        line = f"VERDICT: yes. Killed {_times(figures.kills)}, and bit-identical to a run that nobody touched."
        console.print(Text(line, "bold green"), soft_wrap=True)


def _cost_table(figures: Figures) -> Table:
    sums = figures.sums
    untouched, under_fire = figures.step_seconds
    failed = f", {sums.saves_failed} failed" if sums.saves_failed else ", none failed"
    cut_off = f", {figures.saves_cut_off} cut off by a kill" if figures.saves_cut_off else ""
    anew = f"; {_times(figures.begun_anew)} there was none yet" if figures.begun_anew else ""
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
        f"{anew}",
    )
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
