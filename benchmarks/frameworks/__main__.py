"""`python -m benchmarks.frameworks`: what saves and restarts cost in the training loops of frameworks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import click

from benchmarks.frameworks import FRAMEWORKS
from benchmarks.frameworks.comparison import Plan, compare, compare_streams
from benchmarks.frameworks.page import keep_section, render_section
from benchmarks.harness.results import write_results
from benchmarks.harness.turns import open_bench, open_values
from benchmarks.peers import find_missing
from benchmarks.states.workloads import make_workload

_HERE: Final = Path(__file__).parent.parent
_DRY_SCALE: Final = 0.0005
_DRY: Final = Plan(rounds=1, saves=1, interval_steps=2, trained_steps=10)


@click.command()
@click.option("--only", "names", multiple=True, type=click.Choice(list(FRAMEWORKS)), help="Only this; may be repeated.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Medians of so many.")
@click.option("--dry", is_flag=True, help="Tiny models and one round: whether all of it runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where every single figure goes.")
@click.option("--docs", type=click.Path(path_type=Path), help="The page whose section is to be written again.")
def main(names: tuple[str, ...], rounds: int, dry: bool, json_path: Path | None, docs: Path | None) -> None:
    """Compares holdfast with the checkpointing that frameworks have: time lost for each save, time until training."""
    if docs is not None and (names or dry):
        raise click.UsageError("--docs shows all frameworks at full size: leave --only and --dry away")
    plan = _DRY if dry else Plan(rounds=rounds)
    scale = _DRY_SCALE if dry else 1.0
    with open_bench(_HERE / "out", scale) as bench:
        results = bench.results
        with open_values(bench, make_workload("fit", scale)) as (_, memory):
            for name in names or FRAMEWORKS:
                missing = find_missing(FRAMEWORKS[name].needs)
                if missing:
                    results.missing[FRAMEWORKS[name].title] = f"not installed: {', '.join(missing)}"
                    continue
                compare(bench, name, plan, memory)
                if FRAMEWORKS[name].takes_streams:
                    compare_streams(bench, name, plan)
    section = render_section(results, plan)
    click.echo(section)
    if json_path is not None:
        write_results(results, json_path)
    if docs is not None:
        page = docs.read_text()
        docs.write_text(keep_section(page, f"\n{section}"))
    bench.say("done")
    if results.failures:
        sys.exit(1)


if __name__ == "__main__":
    # The processes that train keep what they have freed. Else the C library gives it back to the system or not as it
    # happens, which makes all steps of a fit a third slower or not, and hides what a save takes.
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(8 << 30))
    main()
