"""The page of the docs on several workers, and its picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.harness.picture import Panel, draw_panels
from benchmarks.harness.results import LIMITS, Results
from benchmarks.harness.summary import Figure, Standing, limits_of, rounds_of, spread, standing_of, standings
from benchmarks.harness.tables import show_time
from benchmarks.one_process.targets import target_lines
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
from benchmarks.several_workers.goals import find_goals

_STEADY: Final = 1.25
"""A machine is steady if its own limits differ by no larger factor between the rounds."""

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


def render_page(results: Results, picture: str) -> str:
    """**Pure.** The page in Markdown; `picture` is the name of its picture."""
    if not was_measured(results):
        return f"{_TITLE}\n{_NOT_YET}"
    parts = [
        _TITLE,
        *target_lines(find_goals(results)),
        _noise(results),
        _HEAD.format(picture=picture, rounds=_rounds(results)),
    ]
    parts += _machine(results)
    for setup in list_setups(results.scale):
        parts += _setup(results, setup)
    parts += _training(results)
    return "\n".join(parts).rstrip() + "\n"


def render_workers_picture(results: Results) -> str:
    """**Pure.** The picture: 2 workers on the left, 4 on the right."""
    panels = list(_panels(results))
    return draw_panels(panels, "Benchmarks with several workers: medians as bars")


def is_whole(results: Results) -> bool:
    """**Pure.** Whether every contender was measured at full size, or is known to fail."""
    measured = {(entry.workload, entry.contender) for entry in results.rounds if entry.number > 0}
    measured |= {(workload, contender) for workload, contender, _ in results.failures}
    wanted = {(setup.name, name) for setup in list_setups(1.0) for some in JOBS.values() for name in some}
    wanted |= {(TRAINING, name) for some in TRAINING_JOBS.values() for name in some}
    return results.scale == 1 and wanted <= measured


def was_measured(results: Results) -> bool:
    """**Pure.** Whether there is anything to show."""
    names = {setup.name for setup in list_setups(results.scale)} | {TRAINING}
    return any(entry.workload in names and entry.contender != LIMITS for entry in results.rounds)


def _noise(results: Results) -> str:
    """How far the machine's own limits differ between the rounds of a setup with a model."""
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


def _rounds(results: Results) -> str:
    names = [setup.name for setup in list_setups(results.scale)]
    counts = sorted({len(rounds_of(results, name, HOLDFAST)) for name in names} - {0})
    if not counts:
        return "all rounds"
    return f"{counts[0]} to {counts[-1]} rounds" if len(counts) > 1 else f"{counts[0]} round{'s' * (counts[0] > 1)}"


def _machine(results: Results) -> Iterator[str]:
    machine = results.machine
    known = ("Python", "torch", "torch_checkpointing", "numpy", "xxhash")
    versions = ", ".join(f"{name} {machine.versions[name]}" for name in known if name in machine.versions)
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB of memory"
    place = f"{memory}, {machine.file_system}, {machine.system}"
    yield f"{machine.cores} cores ({machine.processor}), {place}. {versions}.\n"
    if results.scale != 1:
        yield f"**The state was made smaller, to {results.scale:g} of its size: a quick look, no more.**\n"


def _setup(results: Results, setup: Setup) -> Iterator[str]:
    shape = results.shapes.get(setup.name)
    if shape is None:
        return
    yield f"## {setup.title}\n"
    held = "held by each worker" if setup.is_replicated else "divided over the workers"
    yield f"{shape.size_bytes / 1e9:.3g} GB in {shape.tensors:,} tensors, {held}.\n"
    other = name_restore(setup)
    columns = [
        (setup.name, "stall", "stall, right after"),
        (setup.name, "stall_apart", "stall, a second after"),
        (setup.name, "durable", "durable"),
        (setup.name, "restore_cold", "restore"),
        *([] if setup.model else [(setup.name, "restore_warm", "restore, warm")]),
        (other, "restore_cold", f"restore by {other_number(setup.workers)} workers"),
    ]
    yield f"| | {' | '.join(title for _, _, title in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    names = [name for job, some in JOBS.items() for name in (*some, *ALSO.get(job, ())) if name != LIMITS]
    for name in names:
        cells = [_cell(standing_of(results, workload, name), key) for workload, key, _ in columns]
        if any(cells):
            yield f"| {_strong(name)} | {' | '.join(cells)} |"
        elif reason := _reason(results, setup.name, name):
            yield f"| {_strong(name)} | {reason} {'| ' * len(columns)}|"
    yield f"| bare limit | {' | '.join(_limit(results, workload, key) for workload, key, _ in columns)} |"
    yield ""
    yield from _notes(results, setup, names)


def _cell(standing: Standing | None, key: str) -> str:
    figure = standing.figures.get(key) if standing else None
    return _show(figure) if figure else ""


def _show(figure: Figure) -> str:
    ratio = f", {_short(figure.ratio.median)} x" if figure.ratio else ""
    return f"{show_time(figure.value.median)}{ratio}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _limit(results: Results, workload: str, key: str) -> str:
    kinds = {"stall": "copy", "stall_apart": "copy", "durable": "write", "restore_cold": "read_cold"}
    limits = limits_of(results, workload)
    limit = limits.get(kinds.get(key, ""))
    over = limits.get("rewrite") if key == "durable" else None
    return f"{show_time(limit.median)}{f' ({show_time(over.median)})' if over else ''}" if limit else ""


def _notes(results: Results, setup: Setup, names: list[str]) -> Iterator[str]:
    """The first saves, who failed after a part, and what each takes for a tensor."""
    firsts = []
    for name in names:
        standing = standing_of(results, setup.name, name)
        if standing is not None and "stall" in standing.first:
            firsts.append(f"{name} {show_time(standing.first['stall'].value.median)}")
    if firsts:
        yield f"The stall of the first save of a job: {'; '.join(firsts)}.\n"
    for workload in (setup.name, name_restore(setup)):
        for name in names:
            reason = _reason(results, workload, name)
            where = "" if workload == setup.name else f", restore by {other_number(setup.workers)} workers"
            if reason and (where or any(rounds_of(results, workload, name))):
                yield f"{name}{where}: {reason}.\n"


def _reason(results: Results, workload: str, name: str) -> str:
    """Why there are no figures; empty if nothing is known."""
    if name in results.missing:
        return results.missing[name]
    found = [reason for part, one, reason in results.failures if (part, one) == (workload, name)]
    return f"failed: {found[-1].replace('|', '/')}" if found else ""


def _training(results: Results) -> Iterator[str]:
    shape = results.shapes.get(TRAINING)
    if shape is None:
        return
    yield "## Training time lost with 2 workers\n"
    yield (
        f"{shape.title[:1].upper()}{shape.title[1:]}: {shape.size_bytes / 1e9:.2g} GB of state over the workers. Lost "
        "is what the steps between two saves took longer than as many steps without a save beside them: the stall, and "
        "what the work in the background takes from training.\n"
    )
    yield "| | a step without a save | lost for each save | of what DCP loses | in the call | first change after it |"
    yield "|---|---|---|---|---|---|"
    peer = standing_of(results, TRAINING, DCP)
    least = peer.figures["lost"].value.median if peer and "lost" in peer.figures else 0.0
    for name in [name for some in TRAINING_JOBS.values() for name in some]:
        standing = standing_of(results, TRAINING, name)
        if standing is None or "lost" not in standing.figures:
            if reason := _reason(results, TRAINING, name):
                yield f"| {_strong(name)} | {reason} {'| ' * 5}|"
            continue
        figures = {key: figure.value for key, figure in standing.figures.items()}
        lost = figures["lost"]
        # Nobody gains time by saving: less than nothing says how unsteady the machine was.
        share = f"{lost.median / least:.2f}" if lost.low > 0 else "within the noise"
        share = share if least > 0 and name != DCP else ""
        yield (
            f"| {_strong(name)} | {show_time(figures['step'].median)} "
            f"| {show_time(lost.median)} ({show_time(lost.low)} to {show_time(lost.high)}) | {share} "
            f"| {show_time(figures['stall'].median)} | {show_time(max(0.0, figures['wait'].median))} |"
        )
    yield ""


def _panels(results: Results) -> Iterator[Panel]:
    """A row for each figure."""
    setups = list_setups(results.scale)
    for replicated in (False, True):
        pair = [setup for setup in setups if setup.model and setup.is_replicated == replicated]
        for key, title, limit in (
            ("stall", "stall right after a save", "the bare copy"),
            ("durable", "until durable", "the bare direct write"),
            ("restore_cold", "restore", "the bare direct read"),
        ):
            yield from (_panel(results, setup.name, key, f"{setup.title}: {title}", limit) for setup in pair)
        for setup in pair:
            title = f"{setup.title}: restore by {other_number(setup.workers)} workers"
            yield _panel(results, name_restore(setup), "restore_cold", title, "the bare direct read")
    for setup in setups:
        if not setup.model and not setup.is_replicated:
            yield from _small_panels(results, setup)
    lost = [(one.contender, one.figures["lost"].value) for one in standings(results, TRAINING) if "lost" in one.figures]
    yield Panel("FSDP2, 2 workers: training time lost for each save", "seconds", lost, None)


def _panel(results: Results, workload: str, key: str, title: str, limit: str) -> Panel:
    ratios = [(one.contender, one.figures[key].ratio) for one in standings(results, workload) if key in one.figures]
    bars = [(name, ratio) for name, ratio in ratios if ratio is not None]
    return Panel(title, f"times {limit} of as many processes (the line)", bars, 1.0)


def _small_panels(results: Results, setup: Setup) -> Iterator[Panel]:
    tensors = results.shapes[setup.name].tensors if setup.name in results.shapes else 0
    if not tensors:
        return
    bars = []
    for one in standings(results, setup.name):
        values = [entry.figures["stall"] for entry in rounds_of(results, setup.name, one.contender)]
        if values:
            bars.append((one.contender, spread([value / tensors * 1e6 for value in values])))
    yield Panel(f"{setup.title}: stall", "microseconds a tensor", bars, None)


def _strong(name: str) -> str:
    return f"**{name}**" if name.startswith(HOLDFAST) else name
