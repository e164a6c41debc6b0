"""Numbers and tables as the pages show them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.machine import Machine
from benchmarks.harness.results import Results
from benchmarks.harness.summary import Spread


def show_spread(values: Spread) -> str:
    """**Pure.** The median, and after it the extremes if there are several values."""
    if values.count < 2:
        return show_number(values.median)
    return f"{show_number(values.median)} ({show_number(values.low)} to {show_number(values.high)})"


def show_number(value: float) -> str:
    """**Pure.** Three digits, and never more than three after the point."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def show_time(value: float) -> str:
    """**Pure.** Seconds, or milliseconds if it is shorter."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if abs(value) >= 0.01 else f"{value * 1e3:.1f} ms"


def show_rounds(counts: Iterable[int]) -> str:
    """**Pure.** How many rounds there are, where they are not the same everywhere from the least to the most."""
    found = sorted(set(counts) - {0})
    if not found:
        return "all rounds"
    return f"{found[0]} to {found[-1]} rounds" if len(found) > 1 else f"{found[0]} round{'s' * (found[0] > 1)}"


def show_strong(name: str) -> str:
    """**Pure.** A contender's name, bold if it is holdfast."""
    return f"**{name}**" if name.startswith("holdfast") else name


def show_upper(text: str) -> str:
    """**Pure.** A text that begins a sentence."""
    return text[:1].upper() + text[1:]


def show_machine(machine: Machine, packages: Sequence[str] = ()) -> str:
    """**Pure.** The machine, and the versions of these packages; of all if none are given."""
    shown = [f"{name} {machine.versions[name]}" for name in packages or machine.versions if name in machine.versions]
    place = f"{machine.memory_bytes / 2**30:.0f} GiB of memory, {machine.file_system}, {machine.system}"
    return f"{machine.cores} cores ({machine.processor}), {place}. {', '.join(shown)}."


def show_scale(results: Results, things: str, their: str = "their") -> Iterator[str]:
    """**Pure.** A warning, where things were made smaller."""
    if results.scale != 1:
        yield f"**{things} made smaller, to {results.scale:g} of {their} size: a quick look, no more.**\n"


def draw_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """**Pure.** The lines of a table, and an empty one."""
    yield f"| {' | '.join(heads)} |".replace("|  |", "| |")
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table of goals.

    Attributes:
        figure: What is measured.
        must: What it must reach, in words.
        reached: What it has reached, in words.
        holds: Whether that is enough; None where nothing is demanded, or nothing was measured.
    """

    figure: str
    must: str
    reached: str = "not measured"
    holds: bool | None = None


def draw_targets(targets: Iterable[Target]) -> Iterator[str]:
    """**Pure.** The lines of the table of goals."""
    verdicts = {True: "yes", False: "**no**", None: ""}
    rows = [[one.figure, one.must, one.reached, verdicts[one.holds]] for one in targets]
    return draw_table(["", "must reach", "has reached", ""], rows)
