"""What a person sees of a bench, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.bench.figures import Series, Work
from holdfast.cli.bench_report import BenchReport
from holdfast.cli.screen import BAD, FAINT, GOOD, PLAIN, STRONG, Column, Screen, Styled, Words
from holdfast.cli.wording import counted, rough_text, size_text
from holdfast.policies.saving import Bound

_RATES: Final = {
    "copy": "copy into memory",
    "copy_fresh": "copy into fresh memory",
    "digest": "digests",
    "write": "write until durable",
    "read_cold": "read, cold",
    "read_warm": "read, warm",
}
_COSTS: Final[dict[Work, str]] = {
    "first_stall": "first save holds training up",
    "stall": "every later one does",
    "durable": "until it is durable",
    "restore_cold": "restore, cold",
    "restore_warm": "restore, warm",
}
_BOUNDS: Final[dict[Bound, str]] = {
    "optimum": "At this interval saves and failures cost least together (Young and Daly).",
    "overhead": "Young and Daly's interval is {optimum}; but Auto keeps saves to {overhead} of the time.",
    "durable": "Young and Daly's interval is {optimum}; but a save takes longer to be durable.",
    "unmeasured": "",
}
_BAR_WIDTH: Final = 20
_WIDE: Final = 80
_MIDDLING: Final = 60
_MOST: Final = 0.5


class BenchPage:
    """Shows a bench; a narrow terminal gets the medians alone."""

    def __init__(self, screen: Screen, report: BenchReport) -> None:
        self._screen = screen
        self._report = report
        self._columns = 5 if screen.width >= _WIDE else 4 if screen.width >= _MIDDLING else 2

    def show(self) -> None:
        """Writes all of it."""
        self._show_heading()
        self._show_machine()
        self._show_costs()
        self._show_advice()

    def _show_heading(self) -> None:
        subject, where, wish = self._report.subject, self._report.file_system, self._report.wish
        disk = where.kind or "an unknown file system"
        disk += f" on {where.source}" if where.source not in ("", where.kind) else ""
        disk += f", {size_text(where.free_bytes)} free" if where.free_bytes is not None else ""
        self._screen.say(Styled(subject.location, STRONG), "   ", Styled(disk, FAINT))
        origin = {
            "option": "",
            "checkpoint": f", as in step {subject.step}",
            "default": " (no size was given, and there is no checkpoint)",
        }[subject.size_from]
        how = f"; {counted(wish.threads, 'thread')}, {'medians of ' if wish.rounds > 1 else ''}"
        self._screen.say(
            f"{size_text(subject.size_bytes)} of state", Styled(f"{origin}{how}{counted(wish.rounds, 'round')}", FAINT)
        )

    def _show_machine(self) -> None:
        measured = self._report.measured
        how = "direct" if measured.is_direct else "buffered"
        remarks = {"copy_fresh": "once", "write": how, "read_cold": how, "read_warm": "page cache"}
        rows = [
            self._machine_row(_RATES[name], series, _rate_text, remarks.get(name, ""))
            for name, series in self._report.rates.items()
            if series is not None
        ]
        rows.append(self._machine_row("publish a manifest", measured.publish_seconds, rough_text, "fsync, link, fsync"))
        columns = [Column("what the machine gives"), Column("", is_figure=True)]
        columns += [Column("lowest", is_figure=True), Column("highest", is_figure=True), Column("")]
        self._show_table(columns, rows)

    @staticmethod
    def _machine_row(label: str, series: Series, text: Callable[[float], str], remark: str) -> list[Words]:
        bounds = (series.lowest, series.highest) if len(series.samples) > 1 else ()
        cells: list[Words] = [Styled(text(bound), FAINT) for bound in bounds] or ["", ""]
        return [f"  {label}", text(series.median), *cells, Styled(remark, FAINT)]

    def _show_costs(self) -> None:
        costs = self._report.costs
        longest = max(cost.seconds.median for cost in costs.values())
        rows: list[list[Words]] = []
        for work, cost in costs.items():
            seconds = cost.seconds.median
            bar = "█" * max(1, round(_BAR_WIDTH * seconds / longest)) if self._screen.has_symbols else ""
            limit, times = rough_text(cost.limit_seconds), f"{cost.times_limit:.2f} x"
            rows.append(
                [
                    f"  {_COSTS[work]}",
                    rough_text(seconds),
                    Styled(limit, FAINT),
                    Styled(times, FAINT),
                    Styled(bar, "cyan"),
                ]
            )
        columns = [Column(f"what a save of {size_text(self._report.subject.size_bytes)} costs")]
        columns += [Column("", is_figure=True), Column("limit", is_figure=True), Column("", is_figure=True), Column("")]
        self._show_table(columns, rows)

    def _show_advice(self) -> None:
        report, say = self._report, self._screen.say
        choice = report.advice.choice
        say()
        say(Styled(f"how often to save, with a failure every {rough_text(report.mtbf_seconds)}", FAINT))
        about = f"   every {rough_text(choice.interval_seconds)}" if report.step_seconds is not None else ""
        say("  ", Styled(f"save_every={report.save_every}", f"bold {GOOD}"), Styled(about, FAINT))
        optimum, overhead = rough_text(report.advice.optimum_seconds), share_text(report.advice.auto.overhead)
        say("  ", _BOUNDS[report.advice.bound].format(optimum=optimum, overhead=overhead))
        undone = rough_text(choice.losses.per_failure_seconds)
        say(f"  A failure then costs {undone} on average: what was trained since the last durable save, and a restore.")
        if min(one.losses.lost_share for one in (choice, *report.advice.others)) > _MOST:
            say("  ", Styled("Most of the time is lost at any interval: failures come too often for this disk.", BAD))
        elif choice.losses.lost_share > _MOST:
            say("  ", Styled("Most of the time is lost; with another interval, below, less is.", BAD))
        by_default = ", as hf.resumable does by default" if report.auto == "hf.Auto()" else ""
        say("  ", Styled(report.auto, STRONG), f" measures while training and chooses by itself{by_default}.")
        rows: list[list[Words]] = []
        for other in sorted((choice, *report.advice.others), key=lambda one: one.interval_seconds):
            style = STRONG if other is choice else PLAIN
            shares = (other.losses.saving_share, other.losses.failures_share, other.losses.lost_share)
            cells: list[Words] = [Styled(share_text(share), style) for share in shares]
            rows.append([Styled(f"  {rough_text(other.interval_seconds)}", style), *cells])
        titles = ("lost to saves", "to failures", "together")
        columns = [Column("a save every"), *(Column(title, is_figure=True) for title in titles)]
        say()
        self._screen.table(columns, rows)

    def _show_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]]) -> None:
        self._screen.say()
        self._screen.table(columns[: self._columns], [row[: self._columns] for row in rows])


def share_text(share: float) -> str:
    """**Pure.** A share of the time in percent, to two digits."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:#.2g} %" if percent >= 0.001 else "<0.001 %"


def _rate_text(bytes_per_second: float) -> str:
    return f"{size_text(bytes_per_second)}/s"
