"""`python -m benchmarks`: measures everything, writes the figures as JSON, and renders the page and its picture."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from benchmarks.machine import describe_machine
from benchmarks.peers import PEERS
from benchmarks.picture import render_picture
from benchmarks.report import render_report
from benchmarks.results import Results, merge, read_results, write_results
from benchmarks.rounds import compare_saves, compare_training
from benchmarks.workloads import WORKLOADS

_HERE: Final = Path(__file__).parent
_OUT: Final = _HERE / "out"
_DOCS: Final = _HERE.parent / "docs"
_PARTS: Final = (*WORKLOADS, "training")
RESULTS_NAME: Final = "results.json"


@click.command()
@click.option("--scale", default=1.0, show_default=True, help="Make all workloads smaller, for a quick look.")
@click.option("--rounds", default=5, show_default=True, help="How many rounds count; one more comes before them.")
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(_PARTS),
    help="Only this part, the others as they were measured before; may be repeated.",
)
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Only this one; may be repeated.")
@click.option("--out", default=_OUT, type=click.Path(path_type=Path), help="Where the JSON goes, and what is written.")
@click.option(
    "--docs", type=click.Path(path_type=Path), help="Where page and picture go; by itself the docs, if whole."
)
@click.option("--render", is_flag=True, help="Measure nothing; render what an earlier run has left.")
def main(
    scale: float,
    rounds: int,
    parts: tuple[str, ...],
    peers: tuple[str, ...],
    out: Path,
    docs: Path | None,
    render: bool,
) -> None:
    """Compares holdfast with other ways of saving, and with the machine's own limits."""
    if rounds < 1 or not 0 < scale <= 1:
        raise click.UsageError("--rounds is at least 1, --scale more than 0 and at most 1")
    begun_at = time.monotonic()
    out = out.resolve()
    if not render:
        # An end that is asked for politely still ends the processes and removes the files.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        results = _measure(scale, rounds, parts or _PARTS, list(peers or PEERS), out)
        if parts and (out / RESULTS_NAME).exists():
            results = merge(read_results(out / RESULTS_NAME), results)
        write_results(results, out / RESULTS_NAME)
    results = read_results(out / RESULTS_NAME)
    # Only a run of everything at full size is worth a page that stays.
    whole = (
        results.scale == 1
        and set(results.shapes) == set(_PARTS)
        and {e.contender for e in results.rounds} >= set(PEERS)
    )
    place = docs or (_DOCS if whole else out)
    place.mkdir(parents=True, exist_ok=True)
    (place / "benchmarks.md").write_text(render_report(results, "benchmarks.svg"))
    (place / "benchmarks.svg").write_text(render_picture(results))
    click.echo(f"{place / 'benchmarks.md'} after {time.monotonic() - begun_at:.0f} s")


def _measure(scale: float, rounds: int, parts: tuple[str, ...], peers: list[str], out: Path) -> Results:
    out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="work-", dir=out))
    try:
        results = Results(machine=describe_machine(directory), scale=scale)
        for part in parts:
            if part == "training":
                compare_training(results, peers, rounds, directory, click.echo)
            else:
                compare_saves(results, part, peers, rounds, directory, click.echo)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return results


if __name__ == "__main__":
    main()
