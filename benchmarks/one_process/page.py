"""The page of the docs, from what was measured. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from benchmarks.harness.results import LIMITS, Results, Shape
from benchmarks.harness.summary import Figure, Summary, limits_of, ratio_to, rounds_of, summaries, summary_of
from benchmarks.harness.tables import (
    draw_table,
    draw_targets,
    show_machine,
    show_number,
    show_rounds,
    show_scale,
    show_spread,
    show_strong,
    show_upper,
)
from benchmarks.one_process.parts import COUNTED, growth_of
from benchmarks.one_process.targets import find_targets
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
_LOST: Final = {
    "step": "a step without a save, s",
    "lost": "lost for each save, s",
    "stall": "of it in the call, s",
    "wait": "wait, s",
}
_NAMES: Final = {"model": "A model and its optimizer", "small-tensors": "Many small tensors"}
_SHORT: Final = (
    *("holdfast", "holdfast, overlapped", "torch.save", "DCP async, thread, cached"),
    *("Orbax async, uncompressed", "torch_checkpointing"),
)
"""Those that the page begins with: the usual ways to save, each at its quickest."""
_STEADY: Final = 1.25
"""A machine is steady if its own limits differ by no larger factor between the rounds."""

_TITLE: Final = """# Benchmarks

What a save and a restore cost, compared with other libraries. `make bench` measures it and writes this page.
"""

_HEAD: Final = """![Seconds that training stops, and seconds until the checkpoint is durable](speed.svg)

{answer}

A model with its AdamW state; medians, each library with the settings that are best here. For advice see
[performance](../guides/performance.md).

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

## Goals of the project

{targets}
{noise}
"""


def render_report(results: Results, picture: str) -> str:
    """**Pure.** The page in Markdown; `picture` is the name of its picture."""
    machine = ["## The machine\n", f"{show_machine(results.machine)}\n", *show_scale(results, "The workloads were")]
    if not any(entry.contender != LIMITS for entry in results.rounds):
        parts = [_TITLE, "Nothing was measured.\n", *machine]
    else:
        targets = "\n".join(draw_targets(find_targets(results)))
        answer = "\n".join(_answer(results)).strip()
        head = _HEAD.format(
            answer=answer, targets=targets, noise=_noise(results), picture=picture, rounds=_rounds(results)
        )
        parts = [_TITLE, head, *machine]
        for workload in _NAMES:
            parts += _workload(results, workload)
        parts += [*_training(results), *_frozen(results), *_many_saves(results), *_small(results)]
    return "\n".join([*parts, *_failures(results)]).rstrip() + "\n"


def _answer(results: Results) -> Iterator[str]:
    """The figures that most readers come for, one row for each library."""
    rows = []
    for name in _SHORT:
        found = summary_of(results, "model", name)
        if found is not None and "durable" in found.figures:
            times = [found.figures.get(key) for key in ("stall", "durable", "restore_cold")]
            rows.append([show_strong(name), *(show_number(time.value.median) if time else "" for time in times)])
    yield from draw_table(["", "training stops for, s", "durable after, s", "restored after, s (cold)"], rows)


def _rounds(results: Results) -> str:
    """The number of rounds that the medians are taken of."""
    counted = [entry for entry in results.rounds if entry.number > 0 and entry.contender != LIMITS]
    parts = tuple(_NAMES) if any(entry.workload in _NAMES for entry in counted) else ("training",)
    counts = Counter((entry.workload, entry.contender) for entry in counted if entry.workload in parts)
    return show_rounds(counts.values())


def _noise(results: Results) -> str:
    """The differences of the machine's own limits between the rounds: no ratio is more exact than these."""
    factors: dict[str, float] = {}
    for workload in _NAMES:
        for key, limit in limits_of(results, workload).items():
            if limit.count == 1:
                return "The machine's own limits were measured once: how steady it was is not known."
            factors[key] = max(factors.get(key, 1.0), limit.high / limit.low)
    if not factors:
        return "The machine's own limits were not measured."
    shown = ", ".join(f"{title} {factors[key]:.2f}" for key, title in _LIMITS if key in factors)
    verdict = "The machine was steady"
    if max(factors.values()) > _STEADY:
        verdict = "**The machine was not steady, and the spreads are wide for that reason**"
    return f"{verdict}: between the rounds, its own limits differed by these factors: {shown}."


def _workload(results: Results, workload: str) -> Iterator[str]:
    if workload not in results.shapes:
        return
    shape = results.shapes[workload]
    found = [one for one in summaries(results, workload) if one.figures]
    yield f"## {_NAMES[workload]}\n"
    yield f"{show_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors.\n"
    limits = limits_of(results, workload)
    if limits:
        rows = [
            [title, show_spread(limits[key]), f"{shape.size_bytes / limits[key].median / 1e9:.1f}"]
            for key, title in _LIMITS
            if key in limits
        ]
        yield from draw_table(["The machine's limit", "seconds", "GB/s"], rows)
    saves = [[show_strong(s.contender), *_times(s, _SAVES), results.makes_last.get(s.contender, "")] for s in found]
    yield from draw_table([*_heads(_SAVES), "makes durable by itself"], filter(_has_figures, saves))
    restores = []
    for one in found:
        memory = [_multiple(extra, shape) for extra in (one.save_extra_bytes, one.restore_extra_bytes)]
        restores.append([show_strong(one.contender), *_times(one, _RESTORES), *memory])
        if "load_file_cold" in one.figures:
            # A row of its own for what is not a restore.
            times = _times(one, (("load_file_cold", ""), ("load_file_warm", "")))
            restores.append([f"{one.contender}, `load_file` alone", *times, "", ""])
    lines = draw_table([*_heads(_RESTORES), "memory, save", "memory, restore"], filter(_has_figures, restores))
    yield from (line.replace("|  |  |", "| | |") if "`load_file` alone" in line else line for line in lines)
    yield from _who(results, workload, found)
    yield from _remarks(results, workload, found)


def _heads(columns: Sequence[tuple[str, str]]) -> list[str]:
    """The titles of columns of times, each with its ratio."""
    return ["", *(head for _, title in columns for head in (f"{title}, s", "x"))]


def _times(summary: Summary, columns: Sequence[tuple[str, str]]) -> list[str]:
    return [cell for key, _ in columns for cell in _cells(summary.figures.get(key))]


def _has_figures(row: Sequence[str]) -> bool:
    return any(row[1:])


def _who(results: Results, workload: str, found: Sequence[Summary]) -> Iterator[str]:
    """The contenders that were measured otherwise than the rest, or not at all."""
    same: dict[str, list[str]] = {}
    for one in found:
        if reader := PEERS[one.contender].reads_as:
            same.setdefault(reader, []).append(one.contender)
    for reader, names in same.items():
        yield f"Same files and same code to read them as {reader}, so restores were checked only: {'; '.join(names)}.\n"
    counts = {one.contender: one.figures["stall"].value.count for one in found}
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


def _remarks(results: Results, workload: str, found: Sequence[Summary]) -> Iterator[str]:
    firsts = [f"{s.contender} {show_number(s.first['stall'].value.median)}" for s in found if "stall" in s.first]
    if firsts:
        yield f"The stall of the very first save, in seconds: {'; '.join(firsts)}.\n"
    for warmth in ("cold", "warm"):
        ratio = ratio_to(results, workload, "holdfast", f"restore_{warmth}", "safetensors", f"restore_{warmth}")
        if ratio is not None:
            yield f"A {warmth} restore takes holdfast {show_spread(ratio)} times as long as safetensors.\n"
    if any("load_file_warm" in one.figures for one in found):
        yield (
            "safetensors' `load_file` alone is not a restore: it maps the file, and the bytes are read when they are "
            "first used. holdfast is compared with `load_file` and the copy into the live tensors.\n"
        )
    own = summary_of(results, workload, "holdfast")
    if workload == "small-tensors" and own is not None and own.figures:
        tensors = results.shapes[workload].tensors
        each = {key: own.figures[key].value.median / tensors * 1e6 for key in own.figures}
        yield (
            f"For each tensor, holdfast stalls for {each['stall']:.1f} microseconds, and restores it in "
            f"{each['restore_cold']:.1f} cold and {each['restore_warm']:.1f} warm.\n"
        )


def _training(results: Results) -> Iterator[str]:
    found = [one for one in summaries(results, "training") if one.figures]
    if not found:
        return
    shape = results.shapes["training"]
    yield "## Training time lost\n"
    yield (
        f"{show_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB of state, on two threads. Lost is the extra time "
        "of ten steps with a save, compared with ten steps without: the stall, and what the background work takes from "
        "training. The wait is the extra time of the first change of the state after a save.\n"
    )
    yield (
        "Orbax and TensorFlow save from loops in their own frameworks, with the same tensors and a model of the same "
        "kind: their steps take another time, and the wait could not be timed.\n"
    )
    own = next((one.figures["lost"].value.median for one in found if one.contender == "holdfast"), None)
    rows = []
    for one in found:
        lost = one.figures["lost"].value
        is_compared = own is not None and one.contender != "holdfast" and lost.median > 0
        share = f"{max(0.0, own or 0.0) / lost.median:.2f} of it" if is_compared else ""
        cells = [show_spread(one.figures[key].value) if key in one.figures else "" for key in _LOST]
        rows.append([show_strong(one.contender), *cells, share])
    yield from draw_table(["", *_LOST.values(), "holdfast loses"], rows)


def _frozen(results: Results) -> Iterator[str]:
    changing, shape = results.changing, results.shapes.get("mostly-frozen")
    if changing is None or shape is None:
        return
    yield "## Mostly frozen\n"
    yield (
        f"{show_upper(shape.title)}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors, of which "
        f"{changing.changed_bytes / 1e6:.0f} MB change between the saves. {changing.saves} saves, all kept. Bytes are "
        f"those that the files take on the disk, over one full state and {changing.saves - 1} times what changed.\n"
    )
    rows = []
    for one in summaries(results, "mostly-frozen"):
        growth, ratio = growth_of(results, one.contender), one.first["durable"].ratio
        if growth is not None:
            rows.append(
                [
                    show_strong(one.contender),
                    f"{growth.bytes_ratio:.2f} x",
                    show_number(growth.first_seconds),
                    show_spread(ratio) if ratio else "",
                    show_spread(growth.later),
                    f"{growth.seconds_share:.2f}",
                    show_number(growth.restore_seconds),
                ]
            )
    heads = ("bytes", "first save durable, s", "x", "a later save durable, s", "of the first one's", "restore, cold, s")
    yield from draw_table(["", *heads], rows)


def _many_saves(results: Results) -> Iterator[str]:
    shape = results.shapes.get("many-saves")
    if shape is None:
        return
    yield f"## {COUNTED[-1]} saves\n"
    yield (
        f"{show_upper(shape.title)}: {shape.size_bytes / 1e6:.0f} MB. What is held beyond the live state once a save "
        "is durable, as a multiple of the state; and how many file descriptors and threads there are then.\n"
    )
    rows = []
    for one in summaries(results, "many-saves"):
        held = {e.number: e.figures for e in rounds_of(results, "many-saves", one.contender)}
        extra = [_multiple(held.get(number, {}).get("held_bytes"), shape) for number in COUNTED]
        others = [
            " / ".join(f"{held[number][key]:.0f}" for number in COUNTED if number in held)
            for key in ("descriptors", "threads")
        ]
        rows.append([show_strong(one.contender), *extra, *others])
    heads = ["", *(f"after {number}" for number in COUNTED), "descriptors", "threads"]
    yield from draw_table(heads, rows)


def _small(results: Results) -> Iterator[str]:
    rounds = [entry.figures for entry in rounds_of(results, "small", "holdfast")]
    if not rounds:
        return
    value = {key: median(figures[key] for figures in rounds) for key in rounds[0]}
    yield "## Small figures\n"
    yield (
        f"A fresh process that does nothing takes {value['start'] * 1000:.0f} ms, one that imports holdfast "
        f"{value['start_holdfast'] * 1000:.0f} ms, one that imports numpy {value['start_numpy'] * 1000:.0f} ms.\n"
    )
    turns = (("steps", "Steps(10**9)"), ("auto", "Auto()"), ("seconds", "Seconds(3600)"))
    shown = ", ".join(f"{value[f'turn_{key}'] * 1e6:.1f} microseconds with `{name}`" for key, name in turns)
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


def _multiple(extra_bytes: float | None, shape: Shape) -> str:
    return f"{extra_bytes / shape.size_bytes:.2f}" if extra_bytes is not None and shape.size_bytes else ""
