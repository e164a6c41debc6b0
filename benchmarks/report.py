"""The page of the docs, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.results import Results, Shape
from benchmarks.summary import Figure, Spread, Standing, limits_of, ratio_to, spread, standings

_COLUMNS: Final = (
    ("stall", "stall"),
    ("durable", "until durable"),
    ("restore_cold", "restore, cold"),
    ("restore_warm", "restore, warm"),
)
_LIMITS: Final = (
    ("copy", "copy of the same tensors into touched memory"),
    ("write", "direct write into a new file, fsync included"),
    ("read_cold", "direct read"),
    ("read_warm", "read from the page cache"),
)
_NAMES: Final = {"model": "A model and its optimizer", "small-tensors": "Many small tensors"}

_HEAD: Final = """# Benchmarks

Made by `make bench`; not written by hand.

![The medians as bars]({picture})

Every contender runs in a process of its own and saves the same tensors, which lie in memory that all processes share.
They take turns within each round, and the first round is not counted. What is shown is the median of {rounds} rounds,
with the smallest and the largest behind it. **x** is the ratio to the machine's own limit, measured in the same round:
the same bytes copied, written directly or read with nothing else to do. Times drift with the machine; ratios last.

- **Stall**: how long the call that saves keeps training waiting, from the second save on.
- **Until durable**: from the call until the checkpoint would outlive a power cut. Where a contender does not see to
  that by itself, the fsyncs that it lacks are added and counted here.
- **Restore**: until the live tensors have their values. Cold: none of the files is in the page cache (checked); warm:
  all are. After each restore the tensors are compared with what was saved.
- **Memory**: the most that was held beyond the live state while saving and while restoring, as a multiple of the state;
  memory that a contender keeps between saves counts each time, pages of files do not.

holdfast checks every byte that it reads against a digest. The others check nothing, except for what a zip file's own
sums find.
"""


def render_report(results: Results, picture: str) -> str:
    """**Pure.** The page in Markdown; `picture` is the name of its picture."""
    counts = {entry.number for entry in results.rounds if entry.number > 0}
    parts = [_HEAD.format(picture=picture, rounds=len(counts)), *_machine(results)]
    for workload in results.shapes:
        parts += _training(results) if workload == "training" else _workload(results, workload)
    parts += _failures(results)
    return "\n".join(parts).rstrip() + "\n"


def _machine(results: Results) -> Iterator[str]:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield "## The machine\n"
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB of memory"
    place = f"{memory}, {machine.file_system}, {machine.system}"
    yield f"{machine.cores} cores ({machine.processor}), {place}. {versions}.\n"
    if results.scale != 1:
        yield f"**The workloads were made smaller, to {results.scale:g} of their size: a quick look, no more.**\n"


def _workload(results: Results, workload: str) -> Iterator[str]:
    shape = results.shapes[workload]
    found = [standing for standing in standings(results, workload) if standing.figures]
    yield f"## {_NAMES.get(workload, workload)}\n"
    yield f"{_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors.\n"
    limits = limits_of(results, workload)
    if limits:
        yield "| The machine's limit | seconds | GB/s |"
        yield "|---|---|---|"
        for key, title in _LIMITS:
            yield f"| {title} | {_spread(limits[key])} | {shape.size_bytes / limits[key].median / 1e9:.1f} |"
        yield ""
    titles = [title for _, title in _COLUMNS]
    ends = "memory, save | memory, restore | makes durable by itself"
    yield f"| | {' | '.join(f'{title}, s | x' for title in titles)} | {ends} |"
    yield "|---|" + "---|" * (2 * len(titles) + 3)
    for standing in found:
        cells = [cell for key, _ in _COLUMNS for cell in _cells(standing.figures.get(key))]
        cells += [_times(standing.save_extra_bytes, shape), _times(standing.restore_extra_bytes, shape)]
        last = results.makes_last.get(standing.contender, "")
        yield f"| {_strong(standing.contender)} | {' | '.join(cells)} | {last} |"
    yield ""
    yield from _remarks(results, workload, found)


def _remarks(results: Results, workload: str, found: list[Standing]) -> Iterator[str]:
    firsts = [f"{s.contender} {s.first_stall_seconds:.2f}" for s in found if s.first_stall_seconds is not None]
    if firsts:
        yield f"The stall of the very first save, in seconds: {', '.join(firsts)}.\n"
    for warmth in ("cold", "warm"):
        ratio = ratio_to(results, workload, "holdfast", f"restore_{warmth}", "safetensors", f"restore_{warmth}")
        if ratio is not None:
            yield f"A {warmth} restore takes holdfast {_spread(ratio)} times as long as safetensors.\n"
    if any("load_file_warm" in standing.figures for standing in found):
        yield (
            "safetensors' `load_file` alone is no measure: it maps the file, and the bytes come when they are first "
            "used. A restore is `load_file` and the copy into the live tensors.\n"
        )
    tensors = results.shapes[workload].tensors
    own = next((standing for standing in found if standing.contender == "holdfast"), None)
    if workload == "small-tensors" and own is not None:
        each = {key: own.figures[key].value.median / tensors * 1e6 for key, _ in _COLUMNS}
        yield (
            f"For each tensor, holdfast stalls for {each['stall']:.1f} microseconds, and restores it in "
            f"{each['restore_cold']:.1f} cold and {each['restore_warm']:.1f} warm.\n"
        )


def _training(results: Results) -> Iterator[str]:
    shape = results.shapes["training"]
    found = [standing for standing in standings(results, "training") if standing.figures]
    yield "## Training time lost\n"
    yield (
        f"{_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB of state, on two threads. Lost is what the steps with "
        "saves took longer than the same steps without, for each save: the stall, and what the work behind it takes "
        "from training.\n"
    )
    if not found:
        return
    steps = spread([standing.figures["step"].value.median for standing in found])
    yield f"A step without a save takes {_spread(steps)} s.\n"
    yield "| | lost for each save, s | of it in the call, s | holdfast's share of it |"
    yield "|---|---|---|---|"
    for standing in found:
        share = ratio_to(results, "training", "holdfast", "lost", standing.contender, "lost")
        yield (
            f"| {_strong(standing.contender)} | {_spread(standing.figures['lost'].value)} "
            f"| {_spread(standing.figures['stall'].value)} | {_spread(share) if share else ''} |"
        )
    yield ""


def _failures(results: Results) -> Iterator[str]:
    if results.failures:
        yield "## What could not be measured\n"
        yield from (f"- {workload}, {contender}: {reason}" for workload, contender, reason in results.failures)


def _cells(figure: Figure | None) -> tuple[str, str]:
    if figure is None:
        return "", ""
    return _spread(figure.value), _spread(figure.ratio) if figure.ratio else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _times(extra_bytes: float | None, shape: Shape) -> str:
    return f"{extra_bytes / shape.size_bytes:.2f}" if extra_bytes is not None and shape.size_bytes else ""


def _strong(name: str) -> str:
    return f"**{name}**" if name == "holdfast" else name


def _spread(values: Spread) -> str:
    return f"{_number(values.median)} ({_number(values.low)} to {_number(values.high)})"


def _number(value: float) -> str:
    """Three digits, and never more than three behind the point."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
