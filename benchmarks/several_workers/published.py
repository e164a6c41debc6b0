"""The three files of the docs on several workers: the page, its picture, and the figures that both are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec.structs import replace

from benchmarks.harness.results import Results, read_results, write_results
from benchmarks.several_workers import JOBS, TRAINING, TRAINING_JOBS, list_setups, name_restore
from benchmarks.several_workers.page import is_whole, render_page, render_workers_picture

DOCS: Final = Path(__file__).parent.parent.parent / "docs" / "internals"
NAME: Final = "benchmarks-several-workers"

_DIGITS: Final = 4


def publish(results: Results, out: Path, docs: Path | None) -> Path:
    """Writes them into `docs`; by itself into the docs if all was measured at full size, and into `out` otherwise.

    Returns:
        The page.
    """
    own = select(results)
    place = docs or (DOCS if is_whole(own) else out)
    write_results(own, place / f"{NAME}.json")
    return render(place)


def render(place: Path) -> Path:
    """Writes the page and the picture from the figures in the same directory."""
    results = read_results(place / f"{NAME}.json")
    page = place / f"{NAME}.md"
    page.write_text(render_page(results, f"{NAME}.svg"))
    page.with_suffix(".svg").write_text(render_workers_picture(results))
    return page


def is_of_workers(workload: str) -> bool:
    """**Pure.** Whether the results call so what several workers have saved or restored."""
    setups = list_setups(1.0)
    return workload in {TRAINING, *(name for setup in setups for name in (setup.name, name_restore(setup)))}


def select(results: Results) -> Results:
    """**Pure.** What was measured with several workers, with as many digits as say something."""
    names = {name for jobs in (JOBS, TRAINING_JOBS) for some in jobs.values() for name in some}
    return Results(
        machine=results.machine,
        scale=results.scale,
        shapes={name: shape for name, shape in results.shapes.items() if is_of_workers(name)},
        makes_last={name: note for name, note in results.makes_last.items() if name in names},
        rounds=[
            replace(entry, figures={key: float(f"{value:.{_DIGITS}g}") for key, value in entry.figures.items()})
            for entry in results.rounds
            if is_of_workers(entry.workload)
        ],
        failures=[failure for failure in results.failures if is_of_workers(failure[0])],
        missing={name: why for name, why in results.missing.items() if name in names},
    )
