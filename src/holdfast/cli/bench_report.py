"""What came of a bench, as programs are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.bench.advice import Advice, Choice
from holdfast.bench.figures import WORKS, Cost, Measured, Series, Work
from holdfast.bench.file_system import FileSystem
from holdfast.bench.measure import Wish
from holdfast.bench.plan import TrialPlan
from holdfast.cli.bench_notices import Notice
from holdfast.cli.bench_subject import Subject
from holdfast.cli.screen import Column, Screen, Words
from holdfast.cli.wording import figure_text
from holdfast.policies.saving import DEFAULT_MTBF_SECONDS, Auto

_NONE = "-"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that came of a bench.

    Attributes:
        subject: What was to be measured.
        file_system: Where it lies.
        wish: How it was measured.
        plan: How much was saved in a trial.
        measured: What was found.
        costs: What a state of the subject's size costs.
        advice: How often to save.
        mtbf_seconds: The mean time between failures that the advice assumes.
        step_seconds: How long a step takes; None if that was not given.
        notices: What else to know.
    """

    subject: Subject
    file_system: FileSystem
    wish: Wish
    plan: TrialPlan
    measured: Measured
    costs: dict[Work, Cost]
    advice: Advice
    mtbf_seconds: float
    step_seconds: float | None
    notices: Sequence[Notice]

    @property
    def save_every(self) -> str:
        """The policy as it is written in a program."""
        return f"hf.{self.advice.policy!r}"

    @property
    def auto(self) -> str:
        """The policy that finds the interval by itself, as it is written in a program."""
        auto, arguments = self.advice.auto, []
        if auto.overhead != Auto().overhead:
            arguments.append(f"overhead={auto.overhead:.12g}")
        if auto.mtbf_seconds != DEFAULT_MTBF_SECONDS:
            arguments.append(f"mtbf_seconds={auto.mtbf_seconds:.12g}")
        return f"hf.Auto({', '.join(arguments)})"

    @property
    def uses_space_again(self) -> bool:
        """Whether a save was written into the space of a removed one."""
        return self.measured.durable_again_seconds is not None

    @property
    def rates(self) -> dict[str, Series | None]:
        """What the machine gives, in bytes a second; None for what could not be measured."""
        measured = self.measured
        return {
            "copy": measured.copy,
            "copy_fresh": measured.copy_fresh,
            "digest": measured.digest,
            "write": measured.write,
            "rewrite": measured.rewrite,
            "read_cold": measured.read_cold,
            "read_warm": measured.read_warm,
        }

    def show_plain(self, screen: Screen) -> None:
        """Writes one table for other programs: no cell is empty or holds a space."""
        columns = [Column("FIGURE"), *(Column(title, is_figure=True) for title in ("MEDIAN", "LOWEST", "HIGHEST"))]
        screen.table([*columns, Column("LIMIT", is_figure=True), Column("UNIT")], self._plain_rows())

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        where = self.file_system
        return {
            "directory": str(self.subject.root),
            "file_system": {
                "kind": where.kind or None,
                "source": where.source or None,
                "mount_point": where.mount_point or None,
                "free_bytes": where.free_bytes,
                "total_bytes": where.total_bytes,
            },
            "size_bytes": self.subject.size_bytes,
            "size_from": self.subject.size_from,
            "size_of_step": self.subject.step,
            "trial_bytes": self.plan.size_bytes,
            "trial_limited_by": self.plan.limited_by,
            "threads": self.wish.threads,
            "rounds": self.wish.rounds,
            "is_direct": self.measured.is_direct,
            "bytes_per_second": {name: _series_fields(series) for name, series in self.rates.items()},
            "publish_seconds": _series_fields(self.measured.publish_seconds),
            "costs_seconds": {work: _cost_fields(self.costs.get(work)) for work in WORKS},
            "advice": {
                "mtbf_seconds": self.mtbf_seconds,
                "step_seconds": self.step_seconds,
                "save_every": self.save_every,
                "auto": self.auto,
                "bound": self.advice.bound,
                "optimum_seconds": self.advice.optimum_seconds,
                **_choice_fields(self.advice.choice),
                "others": [_choice_fields(other) for other in self.advice.others],
            },
            "notices": [{"kind": notice.kind, "text": notice.text} for notice in self.notices],
        }

    def _plain_rows(self) -> list[list[Words]]:
        rows: list[list[Words]] = []
        for name, series in self.rates.items():
            if series is not None:
                figures = (series.median, series.lowest, series.highest)
                rows.append([name, *(str(round(figure)) for figure in figures), _NONE, "bytes/s"])
        timed = {"publish": (self.measured.publish_seconds, _NONE)}
        timed |= {work: (cost.seconds, figure_text(cost.limit_seconds)) for work, cost in self.costs.items()}
        for name, (series, limit) in timed.items():
            figures = (series.median, series.lowest, series.highest)
            rows.append([name, *map(figure_text, figures), limit, "s"])
        choice = self.advice.choice
        for name, figure, unit in (
            ("interval", choice.interval_seconds, "s"),
            ("per_failure", choice.losses.per_failure_seconds, "s"),
            ("lost_to_saves", choice.losses.saving_share, "share"),
            ("lost_to_failures", choice.losses.failures_share, "share"),
        ):
            rows.append([name, figure_text(figure), *[_NONE] * 3, unit])
        rows.append(["save_every", self.save_every, *[_NONE] * 4])
        return rows


def _series_fields(series: Series | None) -> dict[str, float] | None:
    if series is None:
        return None
    return {"median": series.median, "lowest": series.lowest, "highest": series.highest}


def _cost_fields(cost: Cost | None) -> dict[str, float] | None:
    fields = _series_fields(cost.seconds) if cost is not None else None
    return {**fields, "limit": cost.limit_seconds} if cost is not None and fields is not None else None


def _choice_fields(choice: Choice) -> dict[str, float]:
    return {
        "interval_seconds": choice.interval_seconds,
        "saving_share": choice.losses.saving_share,
        "failures_share": choice.losses.failures_share,
        "per_failure_seconds": choice.losses.per_failure_seconds,
    }
