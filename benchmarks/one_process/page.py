"""The page of the docs, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from benchmarks.harness.results import LIMITS, Results, Shape
from benchmarks.harness.summary import Figure, Standing, limits_of, ratio_to, rounds_of, spread, standings
from benchmarks.harness.tables import multiple, seconds, show_number, show_spread
from benchmarks.one_process.parts import COUNTED, growth_of
from benchmarks.one_process.targets import find_targets, target_lines
from benchmarks.peers import PEERS

_SAVES: Final = (("stall", "stall"), ("held", "until the state may change"), ("durable", "until durable"))
_RESTORES: Final = (("restore_cold", "restore, cold"), ("restore_warm", "restore, warm"))
_LIMITS: Final = (
    ("copy", "copy of the same tensors into touched memory"),
    ("write", "direct write into a new file, fsync included"),
    ("rewrite", "the same over a file that is there"),
    ("read_cold", "direct read"),
    ("read_warm", "read from the page cache"),
)
_NAMES: Final = {"model": "A model and its optimizer", "small-tensors": "Many small tensors"}
_STEADY: Final = 1.25
"""A machine is steady if its own limits differ by no larger factor between the rounds."""

_TITLE: Final = """# Benchmarks

What a save and a restore cost, compared with other libraries. `make bench` measures it and writes this page.
"""

_HEAD: Final = """![Seconds that training stops, and seconds until the checkpoint is durable](speed.svg)

A model with its AdamW state; medians, each library with the settings that are best here. For advice see
[performance](../guides/performance.md).

## Goals

{targets}
{noise}

## All medians

![The medians as bars]({picture})

**x** is the ratio to the machine's own limit, measured in the same round: the same bytes copied by two threads,
written directly, or read. Times drift with the machine; ratios last.

## How it was measured

Every library runs in a process of its own, saves the same tensors from shared memory (JAX and TensorFlow copy them
into their own arrays), and is set up as its own documentation recommends. They take turns within each round; the first
round is not counted. The tables of saves and restores show the median of {rounds}, and the thin lines in the
picture the range.

- **Stall**: how long the call blocks training, from the second save on. **Until the state may change**: the stall,
  plus the wait of a change that comes at once.
- **Until durable**: until the checkpoint would survive a power cut; fsyncs that a library leaves out are added.
  holdfast overwrites the file of the checkpoint before, as in any run that keeps a fixed number; the others write new
  files.
- **Restore**: until the live tensors have the saved values (compared afterwards). Cold: no file is in the page cache;
  warm: all are. holdfast checks every byte. The others check nothing, except for the sums of zip files, and Orbax when
  it compresses.
- **Memory**: the most that was held beyond the live state, as a multiple of the state.

DCP keeps its stager and its plan, and writes with two threads, except where the row says otherwise.
torch_checkpointing copies under the lock that its documentation puts around the optimizer's step, and without direct
I/O, with which it fails on ext4. The bare copy is the C library's; holdfast's own bypasses the processor's cache, and
is faster for that reason ([why](../design/0012-what-a-save-does-again-and-again.md)). The machine has no accelerator:
what was measured on a GPU is [on a page of its own](gpu.md).
"""


def render_report(results: Results, picture: str) -> str:
    """**Pure.** The page in Markdown; `picture` is the name of its picture."""
    if not any(entry.contender != LIMITS for entry in results.rounds):
        return "\n".join([_TITLE, "Nothing was measured.\n", *_machine(results), *_failures(results)]).rstrip() + "\n"
    targets, noise, rounds = "\n".join(target_lines(find_targets(results))), _noise(results), _rounds(results)
    head = _HEAD.format(targets=targets, noise=noise, picture=picture, rounds=rounds)
    parts = [_TITLE, head, *_machine(results)]
    for workload in _NAMES:
        parts += _workload(results, workload)
    parts += _training(results)
    parts += _frozen(results)
    parts += _many_saves(results)
    parts += _small(results)
    parts += _failures(results)
    return "\n".join(parts).rstrip() + "\n"


def _rounds(results: Results) -> str:
    """How many there are to take the medians of."""
    saved = any(entry.workload in _NAMES and entry.number > 0 for entry in results.rounds)
    parts = tuple(_NAMES) if saved else ("training",)
    per_contender: dict[tuple[str, str], int] = {}
    for entry in results.rounds:
        if entry.workload in parts and entry.number > 0 and entry.contender != LIMITS:
            key = (entry.workload, entry.contender)
            per_contender[key] = per_contender.get(key, 0) + 1
    counts = sorted(set(per_contender.values()))
    if not counts:
        return "all rounds"
    if len(counts) == 1:
        return f"{counts[0]} round{'s' if counts[0] > 1 else ''}"
    return f"{counts[0]} to {counts[-1]} rounds"


def _noise(results: Results) -> str:
    """How far the machine's own limits differ between the rounds: no ratio is more exact than that."""
    factors: dict[str, float] = {}
    for workload in _NAMES:
        for key, limit in limits_of(results, workload).items():
            if limit.count == 1:
                return "The machine's own limits were measured once: how steady it was is not known."
            factors[key] = max(factors.get(key, 1.0), limit.high / limit.low)
    if not factors:
        return "The machine's own limits were not measured."
    shown = ", ".join(f"{title} {factors[key]:.2f}" for key, title in _LIMITS if key in factors)
    steady = max(factors.values()) <= _STEADY
    verdict = (
        "The machine was steady"
        if steady
        else "**The machine was not steady, and the spreads are wide for that reason**"
    )
    return f"{verdict}: between the rounds, its own limits differed by these factors: {shown}."


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
    if workload not in results.shapes:
        return
    shape = results.shapes[workload]
    found = [standing for standing in standings(results, workload) if standing.figures]
    yield f"## {_NAMES[workload]}\n"
    yield f"{_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors.\n"
    limits = limits_of(results, workload)
    if limits:
        yield "| The machine's limit | seconds | GB/s |"
        yield "|---|---|---|"
        for key, title in ((key, title) for key, title in _LIMITS if key in limits):
            yield f"| {title} | {show_spread(limits[key])} | {shape.size_bytes / limits[key].median / 1e9:.1f} |"
        yield ""
    last = [results.makes_last.get(standing.contender, "") for standing in found]
    yield from _table(found, _SAVES, ("makes durable by itself",), [[cell] for cell in last])
    memory = [[_times(s.save_extra_bytes, shape), _times(s.restore_extra_bytes, shape)] for s in found]
    yield from _table(found, _RESTORES, ("memory, save", "memory, restore"), memory)
    yield from _who(results, workload, found)
    yield from _remarks(results, workload, found)


def _table(
    found: Sequence[Standing], columns: Sequence[tuple[str, str]], ends: Sequence[str], cells: Sequence[Sequence[str]]
) -> Iterator[str]:
    """The times of all in some columns, each with its ratio, and what is beside them."""
    titles = [*(f"{title}, s | x" for _, title in columns), *ends]
    yield f"| | {' | '.join(titles)} |"
    yield "|---|" + "---|" * (2 * len(columns) + len(ends))
    for standing, end in zip(found, cells, strict=True):
        times = [cell for key, _ in columns for cell in _cells(standing.figures.get(key))]
        if any([*times, *end]):
            yield f"| {_strong(standing.contender)} | {' | '.join([*times, *end])} |"
        if columns == _RESTORES:
            yield from _load_file(standing)
    yield ""


def _who(results: Results, workload: str, found: Sequence[Standing]) -> Iterator[str]:
    """Who was measured otherwise than the rest, or not at all."""
    alike: dict[str, list[str]] = {}
    for standing in found:
        reader = PEERS[standing.contender].reads_as
        if reader:
            alike.setdefault(reader, []).append(standing.contender)
    for reader, names in alike.items():
        yield f"Same files and same code to read them as {reader}, so restores were checked only: {'; '.join(names)}.\n"
    counts = {standing.contender: standing.figures["stall"].value.count for standing in found}
    few = [f"{name} {count}" for name, count in counts.items() if count < max(counts.values())]
    if few:
        yield f"Measured in fewer rounds, as each takes so long or fewer were asked for: {'; '.join(few)}.\n"
    known = {*counts, *results.missing, *(name for part, name, _ in results.failures if part == workload)}
    absent = [name for name in PEERS if name not in known and name != "holdfast, incremental"]
    chosen = [name for name in absent if workload not in PEERS[name].parts]
    if chosen:
        yield f"Left out here, because a round takes minutes or would tell nothing new: {'; '.join(chosen)}.\n"
    unasked = [name for name in absent if name not in chosen]
    if unasked:
        yield f"Not measured so far, as no run was asked to: {'; '.join(unasked)}.\n"


def _load_file(standing: Standing) -> Iterator[str]:
    """A row of its own for what is not a restore."""
    if "load_file_cold" in standing.figures:
        cells = [cell for key in ("load_file_cold", "load_file_warm") for cell in _cells(standing.figures[key])]
        yield f"| {standing.contender}, `load_file` alone | {' | '.join(cells)} | | |"


def _remarks(results: Results, workload: str, found: Sequence[Standing]) -> Iterator[str]:
    firsts = [f"{s.contender} {show_number(s.first['stall'].value.median)}" for s in found if "stall" in s.first]
    if firsts:
        yield f"The stall of the very first save, in seconds: {'; '.join(firsts)}.\n"
    for warmth in ("cold", "warm"):
        ratio = ratio_to(results, workload, "holdfast", f"restore_{warmth}", "safetensors", f"restore_{warmth}")
        if ratio is not None:
            yield f"A {warmth} restore takes holdfast {show_spread(ratio)} times as long as safetensors.\n"
    if any("load_file_warm" in standing.figures for standing in found):
        yield (
            "safetensors' `load_file` alone is not a restore: it maps the file, and the bytes are read when they are "
            "first used. holdfast is compared with `load_file` and the copy into the live tensors.\n"
        )
    tensors = results.shapes[workload].tensors
    own = next((standing for standing in found if standing.contender == "holdfast"), None)
    if workload == "small-tensors" and own is not None:
        each = {key: own.figures[key].value.median / tensors * 1e6 for key in own.figures}
        yield (
            f"For each tensor, holdfast stalls for {each['stall']:.1f} microseconds, and restores it in "
            f"{each['restore_cold']:.1f} cold and {each['restore_warm']:.1f} warm.\n"
        )


def _training(results: Results) -> Iterator[str]:
    found = [standing for standing in standings(results, "training") if standing.figures]
    if not found:
        return
    shape = results.shapes["training"]
    yield "## Training time lost\n"
    yield (
        f"{_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB of state, on two threads. Lost is the extra time of "
        "ten steps with a save, compared with ten steps without: the stall, and what the background work takes from "
        "training. The wait is the extra time of the first change of the state after a save.\n"
    )
    yield (
        "Orbax and TensorFlow save from loops in their own frameworks, with the same tensors and a model of the same "
        "kind: their steps take another time, and the wait could not be timed.\n"
    )
    own = next((standing for standing in found if standing.contender == "holdfast"), None)
    yield "| | a step without a save, s | lost for each save, s | of it in the call, s | wait, s | holdfast loses |"
    yield "|---|---|---|---|---|---|"
    for standing in found:
        lost, wait = standing.figures["lost"].value, standing.figures.get("wait")
        share = (
            f"{max(0.0, own.figures['lost'].value.median) / lost.median:.2f} of it" if own and lost.median > 0 else ""
        )
        yield (
            f"| {_strong(standing.contender)} | {show_spread(standing.figures['step'].value)} | {show_spread(lost)} "
            f"| {show_spread(standing.figures['stall'].value)} | {show_spread(wait.value) if wait else ''} "
            f"| {share if standing is not own else ''} |"
        )
    yield ""


def _frozen(results: Results) -> Iterator[str]:
    changing, shape = results.changing, results.shapes.get("mostly-frozen")
    if changing is None or shape is None:
        return
    yield "## Mostly frozen\n"
    yield (
        f"{_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors, of which "
        f"{changing.changed_bytes / 1e6:.0f} MB change between the saves. {changing.saves} saves, all kept. Bytes are "
        f"those that the files take on the disk, over one full state and {changing.saves - 1} times what changed.\n"
    )
    yield "| | bytes | first save durable, s | x | a later save durable, s | of the first one's | restore, cold, s |"
    yield "|---|---|---|---|---|---|---|"
    for standing in standings(results, "mostly-frozen"):
        growth = growth_of(results, standing.contender)
        if growth is None:
            continue
        ratio = standing.first["durable"].ratio
        yield (
            f"| {_strong(standing.contender)} | {multiple(growth.bytes_ratio)} | {show_number(growth.first_seconds)} "
            f"| {show_spread(ratio) if ratio else ''} | {show_spread(growth.later)} | {growth.seconds_share:.2f} "
            f"| {show_number(growth.restore_seconds)} |"
        )
    yield ""


def _many_saves(results: Results) -> Iterator[str]:
    shape = results.shapes.get("many-saves")
    if shape is None:
        return
    counts = " | ".join(f"after {number}" for number in COUNTED)
    yield f"## {COUNTED[-1]} saves\n"
    yield (
        f"{_upper(shape.title)}: {shape.size_bytes / 1e6:.0f} MB. What is held beyond the live state once a save is "
        "durable, as a multiple of the state; and how many file descriptors and threads there are then.\n"
    )
    yield f"| | {counts} | descriptors | threads |"
    yield "|---|" + "---|" * (len(COUNTED) + 2)
    for standing in standings(results, "many-saves"):
        held = {e.number: e.figures for e in rounds_of(results, "many-saves", standing.contender)}
        extra = " | ".join(_times(held.get(number, {}).get("held_bytes"), shape) for number in COUNTED)
        others = [
            " / ".join(f"{held[number][key]:.0f}" for number in COUNTED if number in held)
            for key in ("descriptors", "threads")
        ]
        yield f"| {_strong(standing.contender)} | {extra} | {' | '.join(others)} |"
    yield ""


def _small(results: Results) -> Iterator[str]:
    rounds = [entry.figures for entry in rounds_of(results, "small", "holdfast")]
    if not rounds:
        return
    values = {key: spread([figures[key] for figures in rounds]) for key in rounds[0]}
    yield "## Small figures\n"
    yield (
        f"A fresh process that does nothing takes {seconds(values['start'].median)}, one that imports holdfast "
        f"{seconds(values['start_holdfast'].median)}, one that imports numpy {seconds(values['start_numpy'].median)}.\n"
    )
    turns = [
        (f"`{name}`", median([figures[f"turn_{key}"] for figures in rounds]) * 1e6)
        for key, name in (("steps", "Steps(10**9)"), ("auto", "Auto()"), ("seconds", "Seconds(3600)"))
    ]
    shown = ", ".join(f"{value:.1f} microseconds with {name}" for name, value in turns)
    yield f"One turn of `steps()` that saves nothing takes {shown}.\n"


def _failures(results: Results) -> Iterator[str]:
    if results.failures or results.missing:
        yield "## What could not be measured\n"
        yield from (f"- {contender}: {reason}" for contender, reason in results.missing.items())
        yield from (f"- {workload}, {contender}: {reason}" for workload, contender, reason in results.failures)


def _cells(figure: Figure | None) -> tuple[str, str]:
    if figure is None:
        return "", ""
    return show_number(figure.value.median), show_number(figure.ratio.median) if figure.ratio else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _times(extra_bytes: float | None, shape: Shape) -> str:
    return f"{extra_bytes / shape.size_bytes:.2f}" if extra_bytes is not None and shape.size_bytes else ""


def _strong(name: str) -> str:
    return f"**{name}**" if name.startswith("holdfast") else name
