"""What a person sees of a bench, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.bench.advice import MOST_SHARE, AdviceBound
from holdfast.bench.figures import Series, Work
from holdfast.cli.bench_report import BenchReport
from holdfast.cli.screen import BAD, FAINT, GOOD, PLAIN, STRONG, Column, Screen, Styled, Words, terminal_width
from holdfast.cli.wording import counted, rough_text, size_text
from holdfast.policies.saving import Auto

_RATES: Final = {
    "copy": "copy into memory",
    "copy_fresh": "copy into fresh memory",
    "digest": "digests",
    "write": "write a new file",
    "rewrite": "write over a file",
    "read_cold": "read, cold",
    "read_warm": "read, warm",
}
_COSTS: Final[dict[Work, str]] = {
    "first_stall": "first save holds training up",
    "stall": "every later one does",
    "durable": "durable, space used again",
    "durable_new": "durable, in new files",
    "restore_cold": "restore, cold",
    "restore_warm": "restore, warm",
}
_BOUNDS: Final[dict[AdviceBound, str]] = {
    "optimum": "At this interval saves and failures cost least together (Young and Daly).",
    "overhead": "Young and Daly's interval is {optimum}; but Auto keeps saves to {overhead} of the time.",
    "durable": "Young and Daly's interval is {optimum}; but a save takes longer to be durable.",
    "step": "Young and Daly's interval is {optimum}; but a step takes longer, and none is saved before its end.",
    "unmeasured": "",
}
_BAR_WIDTH: Final = 20
_WIDE: Final = 80
_MIDDLING: Final = 60
_ALL_SHARES: Final = 54
"""The table of intervals is so wide."""


class BenchPage:
    """Shows a bench; a narrow terminal gets the medians alone, and is told so."""

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
        if self._columns < 5 or self._screen.width < _ALL_SHARES:
            self._screen.say()
            self._screen.prose(Styled(f"Columns left out; {_WIDE} characters fit all.", FAINT))

    def _show_heading(self) -> None:
        subject, where, wish = self._report.subject, self._report.file_system, self._report.wish
        disk = where.kind or "an unknown file system"
        disk += f" on {where.source}" if where.source not in ("", where.kind) else ""
        disk += f", {size_text(where.free_bytes)} free" if where.free_bytes is not None else ""
        if terminal_width(subject.location) + 3 + terminal_width(disk) <= self._screen.width:
            self._screen.say(Styled(subject.location, STRONG), "   ", Styled(disk, FAINT))
        else:
            self._screen.say(Styled(subject.location, STRONG))
            self._screen.prose(Styled(disk, FAINT))
        nothing = "no checkpoint could be read" if subject.has_checkpoint else "there is no checkpoint"
        origin = {
            "option": "",
            "checkpoint": f", as in step {subject.step}",
            "default": f" (no size was given, and {nothing})",
        }[subject.size_from]
        how = f"; {counted(wish.threads, 'thread')}, {'medians of ' if wish.rounds > 1 else ''}"
        self._screen.prose(
            f"{size_text(subject.size_bytes)} of state", Styled(f"{origin}{how}{counted(wish.rounds, 'round')}", FAINT)
        )

    def _show_machine(self) -> None:
        measured = self._report.measured
        how = "direct" if measured.is_direct else "buffered"
        remarks = {"copy_fresh": "once", "write": how, "rewrite": how, "read_cold": how, "read_warm": "page cache"}
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
        costs, titles = dict(self._report.costs), dict(_COSTS)
        if not self._report.uses_space_again:
            del costs["durable"]
            titles["durable_new"] = "until it is durable"
        longest = max(cost.seconds.median for cost in costs.values())
        rows: list[list[Words]] = []
        for work, cost in costs.items():
            seconds = cost.seconds.median
            bar = "█" * max(1, round(_BAR_WIDTH * seconds / longest)) if self._screen.has_symbols else ""
            limit, times = rough_text(cost.limit_seconds), f"{cost.times_limit:.2f} x"
            rows.append(
                [
                    f"  {titles[work]}",
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
        report, advice, prose = self._report, self._report.advice, self._screen.prose
        choice = advice.choice
        self._screen.say()
        prose(Styled(f"how often to save, with a failure every {rough_text(report.mtbf_seconds)}", FAINT))
        about = f"   every {rough_text(choice.interval_seconds)}" if report.step_seconds is not None else ""
        prose(Styled(f"save_every={report.save_every}", f"bold {GOOD}"), Styled(about, FAINT), indent=2)
        optimum, overhead = rough_text(advice.optimum_seconds), share_text(advice.auto.overhead)
        prose(_BOUNDS[advice.bound].format(optimum=optimum, overhead=overhead), indent=2)
        usual = Auto()
        if advice.auto.overhead != usual.overhead:
            share = share_text(usual.overhead)
            prose(f"Auto by itself keeps saves to {share} of the time; here that would lose still more.", indent=2)
        undone = rough_text(choice.losses.per_failure_seconds)
        then = f"A failure then costs {undone} on average"
        prose(f"{then}: what was trained since the last durable save, and a restore.", indent=2)
        if choice.losses.lost_share > MOST_SHARE:
            prose(Styled(f"Most of the time is lost, whatever the interval. {self._say_help()}", BAD), indent=2)
        by_default = ", as hf.resumable does by default" if report.auto == "hf.Auto()" else ""
        prose(Styled(report.auto, STRONG), f" measures while training and chooses by itself{by_default}.", indent=2)
        rows: list[list[Words]] = []
        for other in sorted((choice, *report.advice.others), key=lambda one: one.interval_seconds):
            style = STRONG if other is choice else PLAIN
            losses = other.losses
            cells: list[Words] = [
                Styled(share_text(share), style)
                for share in (losses.saving_share, losses.failures_share, losses.lost_share)
            ]
            rows.append([Styled(f"  {rough_text(other.interval_seconds)}", style), *cells])
        titles = ("lost to saves", "to failures", "together")
        columns = [Column("a save every"), *(Column(title, is_figure=True) for title in titles)]
        if self._screen.width < _ALL_SHARES:
            columns = [columns[0], Column("time lost", is_figure=True)]
            rows = [[row[0], row[-1]] for row in rows]
        self._screen.say()
        self._screen.table(columns, rows)

    def _say_help(self) -> str:
        """What would make a job worth while that loses most of its time."""
        report, costs = self._report, self._report.costs
        restore = costs.get("restore_cold", costs["restore_warm"])
        save, failure = rough_text(costs["durable"].seconds.median), rough_text(report.mtbf_seconds)
        back = rough_text(restore.seconds.median)
        takes = f"a save takes {save}, a restore {back}, and failures come every {failure}"
        means = "Shorter steps" if report.advice.bound == "step" else "A faster disk, a smaller state"
        return f"{means} or rarer failures would help: {takes}."

    def _show_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Words]]) -> None:
        self._screen.say()
        self._screen.table(columns[: self._columns], [row[: self._columns] for row in rows])


def share_text(share: float) -> str:
    """**Pure.** A share of the time in percent, to two digits."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:#.2g} %" if percent >= 0.001 else "<0.001 %"


def _rate_text(bytes_per_second: float) -> str:
    return f"{size_text(bytes_per_second)}/s"
