"""`python -m benchmarks.planning`: planning a save with up to many thousand workers, and as torch's DCP does.

Everything runs in one process, with the code that a job would run; the network is not counted, but what would go over
it is. The figures go to `docs/internals/scale.json`, and the picture to the same directory.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.planning.job import measure_leader, measure_worker
from benchmarks.planning.page import render_scale, render_tables

_DOCS: Final = Path(__file__).parent.parent.parent / "docs" / "internals"
_WORKERS: Final = (8, 32, 128, 512, 2048, 4096, 16_384)
_DCP_RANKS: Final = (8, 32, 128, 256)


@click.command()
@click.option("--workers", multiple=True, type=click.IntRange(2), default=_WORKERS, help="How many; may be repeated.")
@click.option("--dcp-ranks", multiple=True, type=click.IntRange(2), default=_DCP_RANKS, help="The same for DCP.")
@click.option("--only", type=click.Choice(["holdfast", "dcp"]), help="Measure one of the two; what is known stays.")
@click.option("--tensors", default=1000, show_default=True, type=click.IntRange(1), help="How many each worker holds.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Medians of so many.")
@click.option("--docs", default=_DOCS, type=click.Path(path_type=Path), help="Where figures and picture go.")
@click.option("--render", is_flag=True, help="Measure nothing; draw what was measured before.")
def main(
    workers: tuple[int, ...],
    dcp_ranks: tuple[int, ...],
    only: str | None,
    tensors: int,
    rounds: int,
    docs: Path,
    render: bool,
) -> None:
    """Measures what a save costs each worker and the leader, and a restore, by the number of workers."""
    path = docs / "scale.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    figures = before
    if not render:
        wanted = ((), dcp_ranks) if only == "dcp" else (workers, () if only else dcp_ranks)
        figures = _measure(*wanted, tensors, rounds, docs)
        if only:
            for name in ("holdfast", "dcp"):
                known = {entry["workers"]: entry for entry in (*before.get(name, ()), *figures[name])}
                figures[name] = [known[count] for count in sorted(known)]
    path.write_text(json.dumps(figures, indent=1) + "\n")
    (docs / "scale.svg").write_text(render_scale(figures))
    click.echo(render_tables(figures))


def _measure(
    workers: tuple[int, ...], dcp_ranks: tuple[int, ...], tensors: int, rounds: int, docs: Path
) -> dict[str, Any]:
    begun_at = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - begun_at:5.0f} s  {text}", err=True)

    jobs = []
    for count in workers:
        with tempfile.TemporaryDirectory(prefix=".planning-", dir=docs) as place:
            figures = {"workers": count, **measure_leader(count, tensors, rounds, Path(place))}
            for kind, is_sharded in (("sharded", True), ("replicated", False)):
                one = measure_worker(count, tensors, 2 * rounds + 1, sharded=is_sharded)
                figures |= {f"{kind}_{key}": value for key, value in one.items()}
        jobs.append(figures)
        say(f"holdfast, {count} workers: leader {figures['leader_seconds']:.3f} s")
    peers = []
    for count in dcp_ranks:
        from benchmarks.planning.dcp import measure_dcp

        with tempfile.TemporaryDirectory(prefix=".planning-", dir=docs) as place:
            peers.append({"workers": count, **measure_dcp(count, tensors, Path(place))})
        say(f"DCP, {count} ranks: coordinator {peers[-1]['leader_seconds']:.2f} s")
    return {"tensors": tensors, "rounds": rounds, "holdfast": jobs, "dcp": peers}


if __name__ == "__main__":
    main()
