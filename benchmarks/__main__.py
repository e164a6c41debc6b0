"""`python -m benchmarks`: measures everything, writes the figures as JSON, and renders the page and its picture."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from msgspec.structs import replace

from benchmarks.frameworks.page import keep_section
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import (
    LIMITS,
    Results,
    UnreadableResultsError,
    find_misfit,
    merge,
    read_results,
    write_results,
)
from benchmarks.harness.turns import open_bench
from benchmarks.one_process.page import render_report
from benchmarks.one_process.parts import (
    compare_frozen,
    compare_many_saves,
    compare_saves,
    compare_training,
    measure_small,
)
from benchmarks.one_process.pictures import render_picture, render_speed
from benchmarks.peers import PEERS
from benchmarks.several_workers import ALSO, JOBS, TRAINING_JOBS, list_setups
from benchmarks.several_workers.comparison import (
    MOST_ROUNDS,
    WorkersPlan,
    compare_workers,
    compare_workers_training,
)
from benchmarks.several_workers.page import is_of_workers, publish, was_measured

_HERE: Final = Path(__file__).parent
_OUT: Final = _HERE / "out"
_DOCS: Final = _HERE.parent / "docs" / "internals"
PARTS: Final = (
    *("small", "model", "small-tensors", "training", "mostly-frozen", "many-saves"),
    *("several-workers", "several-training"),
)
RESULTS_NAME: Final = "results.json"


@click.command()
@click.option("--scale", default=1.0, show_default=True, help="Make all workloads smaller, for a quick look.")
@click.option("--rounds", default=5, show_default=True, help="How many rounds count; one more comes before them.")
@click.option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may be repeated.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(PEERS)),
    help="Only this one, and in every part; may be repeated.",
)
@click.option(
    "--setup",
    "setups",
    multiple=True,
    type=click.Choice([setup.name for setup in list_setups(1.0)]),
    help="Of several workers, only this; may be repeated.",
)
@click.option("--out", default=_OUT, type=click.Path(path_type=Path), help="Where the JSON goes, and what is written.")
@click.option(
    "--docs", type=click.Path(path_type=Path), help="Where page and picture go; by itself the docs, if all is measured."
)
@click.option("--anew", is_flag=True, help="Forget what earlier runs have measured.")
@click.option("--render", is_flag=True, help="Measure nothing; render what earlier runs have left.")
def main(
    scale: float,
    rounds: int,
    parts: tuple[str, ...],
    peers: tuple[str, ...],
    setups: tuple[str, ...],
    out: Path,
    docs: Path | None,
    anew: bool,
    render: bool,
) -> None:
    """Compares holdfast with other ways of saving, and with the machine's own limits.

    What is left out stays as an earlier run has measured it, so that a whole comparison can be made in pieces. Figures
    of another scale, machine or version do not go together: give a quick look an --out of its own, or begin --anew.
    """
    if rounds < 1 or not 0 < scale <= 1:
        raise click.UsageError("--rounds is at least 1, --scale more than 0 and at most 1")
    begun_at = time.monotonic()
    out = out.resolve()
    path = out / RESULTS_NAME
    if render and not path.exists():
        raise click.UsageError(f"nothing has been measured yet: {path} is not there")
    for place in (out, docs):
        if place is not None:
            # Before anything is measured: all that time would be lost.
            _make_directory(place)
    if not render:
        before = _read(path) if path.exists() and not anew else None
        misfit = find_misfit(before, describe_machine(out), scale) if before is not None else ""
        if misfit:
            raise click.UsageError(
                f"{path} holds figures that would be lost: {misfit}. Give another directory with --out, or --anew to "
                "forget them."
            )
        try:
            _measure(scale, rounds, parts or PARTS, peers, setups, out, before, begun_at)
        except KeyboardInterrupt:
            kept = f"; the parts that were measured to their end are in {path}" if path.exists() else ""
            click.echo(f"\nstopped{kept}", err=True)
            sys.exit(130)
    results = _read(path)
    shown = _split(results)
    if shown.rounds or not was_measured(results):
        place = docs or (_DOCS if _is_whole(shown) else out)
        page = place / "benchmarks.md"
        # Another command measures what it shows of frameworks.
        kept = page.read_text() if page.exists() else ""
        page.write_text(keep_section(render_report(shown, "benchmarks.svg"), kept))
        (place / "benchmarks.svg").write_text(render_picture(shown))
        (place / "speed.svg").write_text(render_speed(shown))
        click.echo(f"{page} after {time.monotonic() - begun_at:.0f} s")
    if was_measured(results):
        click.echo(f"{publish(results, out, docs)} after {time.monotonic() - begun_at:.0f} s")


def _split(results: Results) -> Results:
    """**Pure.** The results of one process; several workers have a page of their own."""
    return replace(
        results,
        rounds=[entry for entry in results.rounds if not is_of_workers(entry.workload)],
        failures=[failure for failure in results.failures if not is_of_workers(failure[0])],
    )


def _make_directory(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise click.UsageError(f"{place} is a file, not a directory") from None
    except OSError as error:
        raise click.UsageError(f"{place} cannot be made: {error.strerror}") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise click.UsageError(f"nothing can be written into {place}")


def _read(path: Path) -> Results:
    try:
        return read_results(path)
    except UnreadableResultsError as error:
        raise click.UsageError(f"{error}. Move it away, give another directory with --out, or --anew.") from None


def _is_whole(results: Results) -> bool:
    """Only a run of everything at full size is worth a page that stays."""
    measured = {(entry.workload, entry.contender) for entry in results.rounds}
    measured |= {(workload, contender) for workload, contender, _ in results.failures}
    return results.scale == 1 and all((part, name) in measured for name in PEERS for part in PEERS[name].parts)


def _asked(jobs: Mapping[str, Sequence[str]], peers: Sequence[str]) -> list[str]:
    """Those of the contenders with several workers that were asked for."""
    also = [name for job in jobs for name in ALSO.get(job, ()) if name in peers]
    names = [name for some in jobs.values() for name in some if name != LIMITS and (name in peers or not peers)]
    return list(dict.fromkeys([*names, *also]))


def _measure(
    scale: float,
    rounds: int,
    parts: Sequence[str],
    peers: Sequence[str],
    setups: Sequence[str],
    out: Path,
    before: Results | None,
    begun_at: float,
) -> None:
    """Measures part by part, and keeps what there is after each."""

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun_at), 60)
        click.echo(f"{minutes:3}:{seconds:02} {text}")

    with open_bench(out, scale, say) as bench:
        plan = WorkersPlan(rounds=min(rounds, MOST_ROUNDS), setups=setups, has_others=not setups)
        for part in parts:
            names = [name for name in PEERS if (name in peers if peers else part in PEERS[name].parts)]
            if part == "small":
                measure_small(bench, rounds)
            elif part == "training":
                compare_training(bench, names, rounds)
            elif part == "mostly-frozen":
                compare_frozen(bench, names)
            elif part == "many-saves":
                compare_many_saves(bench, names)
            elif part == "several-workers":
                compare_workers(bench, _asked(JOBS, peers), plan)
            elif part == "several-training":
                compare_workers_training(bench, _asked(TRAINING_JOBS, peers), plan)
            else:
                compare_saves(bench, part, names, rounds)
            write_results(merge(before, bench.results) if before else bench.results, out / RESULTS_NAME)


if __name__ == "__main__":
    main()
