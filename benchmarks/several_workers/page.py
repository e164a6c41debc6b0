"""The page of the docs on several workers, its picture, and the figures that both are made of.

All three are in one directory: `publish` writes them after a run, and `render` writes page and picture again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from benchmarks.harness.guard import ROOT
from benchmarks.harness.picture import Panel, draw_panels
from benchmarks.harness.results import LIMITS, Results, read_results, write_results
from benchmarks.harness.summary import (
    Figure,
    Spread,
    limits_of,
    ratio_to_quickest,
    rounds_of,
    spread,
    summaries,
    summary_of,
)
from benchmarks.harness.tables import (
    Target,
    draw_table,
    draw_targets,
    show_machine,
    show_rounds,
    show_scale,
    show_strong,
    show_time,
    show_upper,
)
from benchmarks.several_workers import (
    ALSO,
    DCP,
    HOLDFAST,
    JOBS,
    TRAINING,
    TRAINING_JOBS,
    Setup,
    list_setups,
    name_restore,
    other_number,
)

DOCS: Final = ROOT / "docs" / "internals"
NAME: Final = "benchmarks-several-workers"

_DIGITS: Final = 4
_STEADY: Final = 1.25
"""A machine is steady if its own limits differ by no larger factor between the rounds."""
_MOST_STALL: Final = 1.15
_MOST: Final = 1.1
_MOST_LEAF_MICROSECONDS: Final = {"stall": ("stall", 5), "restore_warm": ("warm restore", 40)}
_LIMITS: Final = {"stall": "copy", "stall_apart": "copy", "durable": "write", "restore_cold": "read_cold"}
_PACKAGES: Final = ("Python", "torch", "torch_checkpointing", "numpy", "xxhash")
_NAMES: Final = [name for job, some in JOBS.items() for name in (*some, *ALSO.get(job, ())) if name != LIMITS]

_TITLE: Final = """# Benchmarks with several workers

`make bench BENCH="--only several-workers --only several-training"` writes this page and its picture.
"""
_NOT_YET: Final = "Not measured yet.\n"
_HEAD: Final = """![The medians as bars]({picture})

## How it is measured

Each contender runs in a torchrun job of its own, with 2 or 4 workers on one machine that meet over gloo on the
loopback interface. All jobs hold the same state. The jobs take turns in each round, and the first round does not
count. A time is that of the slowest worker; the tables show medians of {rounds}. **x** is the ratio to the bare
limit of the same round: as many processes that copy the same bytes at once into memory that was touched before,
write them directly, or read them directly, and do nothing else. Before each turn all values change, and after each
restore they are compared with what was saved.

- **Stall**: how long a save holds up training: the call, and the time that the next optimizer step would have to
  wait if it came at once. *Right after* another save means that the one before has just become durable; *a second
  after* means that nothing was done for a second in between.
- **Durable**: from the call until the checkpoint would survive a power cut, right after another save. Syncs that a
  contender leaves out are added. **x** is the ratio to a bare write of new files. A bare write over files that are
  there is often quicker. It is in brackets, and the goals hold holdfast against the quicker of the two.
- **Restore**: in place, from files that are not in the page cache. For many small tensors also from the page cache
  (warm). Another number of workers restores the same checkpoint.

With FSDP2 each worker holds and saves its part. With DDP each worker holds everything. The bare limits copy and
write it once, a part by each process, and each process reads all of it.

holdfast checks every byte that it reads against a digest, and keeps one checkpoint, whose disk space the next one
uses again. DCP async keeps its stager and its plan, and writes with two threads. torch_checkpointing copies in the
background under its lock and writes in a second process.
"""


def publish(results: Results, out: Path, docs: Path | None) -> Path:
    """Writes the files into `docs`; by itself into the docs if all was measured at full size, and into `out` otherwise.

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
    """**Pure.** True for what several workers have saved or restored."""
    setups = list_setups(1.0)
    return workload in {TRAINING, *(name for setup in setups for name in (setup.name, name_restore(setup)))}


def select(results: Results) -> Results:
    """**Pure.** The figures of several workers, with as many digits as say something."""
    names = {*_NAMES, LIMITS, *(name for some in TRAINING_JOBS.values() for name in some)}
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


def is_whole(results: Results) -> bool:
    """**Pure.** True if every contender was measured at full size, or is known to fail."""
    measured = {(entry.workload, entry.contender) for entry in results.rounds if entry.number > 0}
    measured |= {(workload, contender) for workload, contender, _ in results.failures}
    wanted = {(setup.name, name) for setup in list_setups(1.0) for some in JOBS.values() for name in some}
    wanted |= {(TRAINING, name) for some in TRAINING_JOBS.values() for name in some}
    return results.scale == 1 and wanted <= measured


def was_measured(results: Results) -> bool:
    """**Pure.** True if there is anything to show."""
    names = {setup.name for setup in list_setups(results.scale)} | {TRAINING}
    return any(entry.workload in names and entry.contender != LIMITS for entry in results.rounds)


def render_page(results: Results, picture: str) -> str:
    """**Pure.** The page in Markdown; `picture` is the name of its picture."""
    if not was_measured(results):
        return f"{_TITLE}\n{_NOT_YET}"
    setups = list_setups(results.scale)
    rounds = show_rounds(len(rounds_of(results, setup.name, HOLDFAST)) for setup in setups)
    parts = [_TITLE, *draw_targets(find_goals(results)), _noise(results), _HEAD.format(picture=picture, rounds=rounds)]
    parts += [f"{show_machine(results.machine, _PACKAGES)}\n", *show_scale(results, "The state was", "its")]
    for setup in setups:
        parts += _setup(results, setup)
    parts += _training(results)
    return "\n".join(parts).rstrip() + "\n"


def find_goals(results: Results) -> list[Target]:
    """**Pure.** All goals; one that was not measured says so."""
    setups = list_setups(results.scale)
    models = [goal for setup in setups if setup.model for goal in _for_model(results, setup)]
    small = [goal for setup in setups if not setup.model for goal in _for_leaves(results, setup)]
    return [*models, *small]


def _for_model(results: Results, setup: Setup) -> Iterator[Target]:
    own = summary_of(results, setup.name, HOLDFAST)
    figures = own.figures if own else {}
    stall, restore = figures.get("stall"), figures.get("restore_cold")
    title = f"{setup.title}: stall of a save right after another"
    yield _compare(title, _MOST_STALL, "the bare copy", stall, stall.ratio if stall else None)
    title = f"{setup.title}: until a save is durable"
    # It writes over a file that is there, and is held against the most that the disk gives.
    quickest = ratio_to_quickest(results, setup.name, HOLDFAST, "durable", ("write", "rewrite"))
    yield _compare(title, _MOST, "the quicker bare write", figures.get("durable"), quickest)
    yield _compare(f"{setup.title}: restore", _MOST, "the bare read", restore, restore.ratio if restore else None)


def _for_leaves(results: Results, setup: Setup) -> Iterator[Target]:
    own, shape = summary_of(results, setup.name, HOLDFAST), results.shapes.get(setup.name)
    figures = own.figures if own else {}
    for key, (title, most) in _MOST_LEAF_MICROSECONDS.items():
        figure, must = f"{setup.title}: {title}", f"at most {most} us a tensor"
        if key in figures and shape is not None and shape.tensors:
            seconds = figures[key].value.median
            each = seconds / shape.tensors * 1e6
            yield Target(figure, must, f"{each:.1f} us a tensor; {show_time(seconds)}", each <= most)
        else:
            yield Target(figure, must)


def _compare(figure: str, most: float, unit: str, found: Figure | None, ratio: Spread | None) -> Target:
    must = f"at most {most:g} x {unit}"
    if found is None or ratio is None:
        return Target(figure, must)
    seen = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.count > 1 else ""
    reached = f"{ratio.median:.2f}{seen} x; {show_time(found.value.median)}"
    return Target(figure, must, reached, ratio.median <= most)


def _noise(results: Results) -> str:
    """The largest difference of the machine's own limits between the rounds of a setup with a model."""
    factor, count = 1.0, 0
    for setup in list_setups(results.scale):
        if setup.model is not None:
            limits = limits_of(results, setup.name).values()
            count = max([count, *(limit.count for limit in limits)])
            factor = max([factor, *(limit.high / limit.low for limit in limits)])
    if count <= 1:
        return "The machine's own limits were measured once: how steady it was is not known.\n"
    verdict = "The machine was steady" if factor <= _STEADY else "**The machine was not steady**"
    return f"{verdict}: between the rounds of a table, its own limits differed by a factor of {factor:.2f} at most.\n"


def _setup(results: Results, setup: Setup) -> Iterator[str]:
    shape = results.shapes.get(setup.name)
    if shape is None:
        return
    yield f"## {setup.title}\n"
    held = "held by each worker" if setup.is_replicated else "divided over the workers"
    yield f"{shape.size_bytes / 1e9:.3g} GB in {shape.tensors:,} tensors, {held}.\n"
    columns = [
        (setup.name, "stall", "stall, right after"),
        (setup.name, "stall_apart", "stall, a second after"),
        (setup.name, "durable", "durable"),
        (setup.name, "restore_cold", "restore"),
        *([] if setup.model else [(setup.name, "restore_warm", "restore, warm")]),
        (name_restore(setup), "restore_cold", f"restore by {other_number(setup.workers)} workers"),
    ]
    rows = []
    for name in _NAMES:
        cells = [_cell(results, workload, name, key) for workload, key, _ in columns]
        if any(cells):
            rows.append([show_strong(name), *cells])
        elif reason := _reason(results, setup.name, name):
            rows.append(_reason_row(name, reason, len(columns)))
    rows.append(["bare limit", *(_limit(results, workload, key) for workload, key, _ in columns)])
    yield from _trim(draw_table(["", *(title for _, _, title in columns)], rows))
    yield from _notes(results, setup)


def _cell(results: Results, workload: str, name: str, key: str) -> str:
    summary = summary_of(results, workload, name)
    figure = summary.figures.get(key) if summary else None
    if figure is None:
        return ""
    if figure.ratio is None:
        return show_time(figure.value.median)
    ratio = figure.ratio.median
    return f"{show_time(figure.value.median)}, {f'{ratio:.2f}' if ratio < 10 else f'{ratio:.0f}'} x"


def _limit(results: Results, workload: str, key: str) -> str:
    limits = limits_of(results, workload)
    limit = limits.get(_LIMITS.get(key, ""))
    over = limits.get("rewrite") if key == "durable" else None
    return f"{show_time(limit.median)}{f' ({show_time(over.median)})' if over else ''}" if limit else ""


def _notes(results: Results, setup: Setup) -> Iterator[str]:
    """The first saves, and the contenders that failed after a part."""
    firsts = []
    for name in _NAMES:
        summary = summary_of(results, setup.name, name)
        if summary is not None and "stall" in summary.first:
            firsts.append(f"{name} {show_time(summary.first['stall'].value.median)}")
    if firsts:
        yield f"The stall of the first save of a job: {'; '.join(firsts)}.\n"
    for workload in (setup.name, name_restore(setup)):
        for name in _NAMES:
            reason = _reason(results, workload, name)
            where = "" if workload == setup.name else f", restore by {other_number(setup.workers)} workers"
            if reason and (where or any(rounds_of(results, workload, name))):
                yield f"{name}{where}: {reason}.\n"


def _reason(results: Results, workload: str, name: str) -> str:
    """The reason why there are no figures; empty if nothing is known."""
    if name in results.missing:
        return results.missing[name]
    found = [reason for part, one, reason in results.failures if (part, one) == (workload, name)]
    return f"failed: {found[-1].replace('|', '/')}" if found else ""


def _reason_row(name: str, reason: str, columns: int) -> list[str]:
    return [show_strong(name), reason, *[""] * (columns - 1)]


def _trim(lines: Iterator[str]) -> Iterator[str]:
    """Empty cells at the end of a row without figures are narrow."""
    return (line.replace("|  |", "| |") if "not installed" in line or "failed: " in line else line for line in lines)


def _training(results: Results) -> Iterator[str]:
    shape = results.shapes.get(TRAINING)
    if shape is None:
        return
    yield "## Training time lost with 2 workers\n"
    yield (
        f"{show_upper(shape.title)}: {shape.size_bytes / 1e9:.2g} GB of state over the workers. Lost "
        "is what the steps between two saves took longer than as many steps without a save beside them: the stall, and "
        "what the work in the background takes from training.\n"
    )
    peer = summary_of(results, TRAINING, DCP)
    least = peer.figures["lost"].value.median if peer and "lost" in peer.figures else 0.0
    heads = ("a step without a save", "lost for each save", "of what DCP loses", "in the call", "first change after it")
    rows = []
    for name in [name for some in TRAINING_JOBS.values() for name in some]:
        summary = summary_of(results, TRAINING, name)
        if summary is None or "lost" not in summary.figures:
            if reason := _reason(results, TRAINING, name):
                rows.append(_reason_row(name, reason, len(heads)))
            continue
        figures = {key: figure.value for key, figure in summary.figures.items()}
        lost = figures["lost"]
        # No save gains time: less than nothing shows how unsteady the machine was.
        share = f"{lost.median / least:.2f}" if lost.low > 0 and least > 0 else "within the noise"
        rows.append(
            [
                show_strong(name),
                show_time(figures["step"].median),
                f"{show_time(lost.median)} ({show_time(lost.low)} to {show_time(lost.high)})",
                share if least > 0 and name != DCP else "",
                show_time(figures["stall"].median),
                show_time(max(0.0, figures["wait"].median)),
            ]
        )
    yield from _trim(draw_table(["", *heads], rows))


def render_workers_picture(results: Results) -> str:
    """**Pure.** The picture: 2 workers on the left, 4 on the right, a row for each figure."""
    setups = list_setups(results.scale)
    panels: list[Panel] = []
    for replicated in (False, True):
        pair = [setup for setup in setups if setup.model and setup.is_replicated == replicated]
        for key, title, limit in (
            ("stall", "stall right after a save", "the bare copy"),
            ("durable", "until durable", "the bare direct write"),
            ("restore_cold", "restore", "the bare direct read"),
        ):
            panels += [_panel(results, setup.name, key, f"{setup.title}: {title}", limit) for setup in pair]
        for setup in pair:
            title = f"{setup.title}: restore by {other_number(setup.workers)} workers"
            panels.append(_panel(results, name_restore(setup), "restore_cold", title, "the bare direct read"))
    for setup in setups:
        if not setup.model and not setup.is_replicated:
            panels += _small_panels(results, setup)
    lost = [(one.contender, one.figures["lost"].value) for one in summaries(results, TRAINING) if "lost" in one.figures]
    panels.append(Panel("FSDP2, 2 workers: training time lost for each save", "seconds", lost, None))
    return draw_panels(panels, "Benchmarks with several workers: medians as bars")


def _panel(results: Results, workload: str, key: str, title: str, limit: str) -> Panel:
    ratios = [(one.contender, one.figures[key].ratio) for one in summaries(results, workload) if key in one.figures]
    bars = [(name, ratio) for name, ratio in ratios if ratio is not None]
    return Panel(title, f"times {limit} of as many processes (the line)", bars, 1.0)


def _small_panels(results: Results, setup: Setup) -> Iterator[Panel]:
    tensors = results.shapes[setup.name].tensors if setup.name in results.shapes else 0
    if not tensors:
        return
    bars = []
    for one in summaries(results, setup.name):
        values = [entry.figures["stall"] for entry in rounds_of(results, setup.name, one.contender)]
        if values:
            bars.append((one.contender, spread([value / tensors * 1e6 for value in values])))
    yield Panel(f"{setup.title}: stall", "microseconds a tensor", bars, None)
