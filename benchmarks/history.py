"""`python -m benchmarks.history`: what opening, restore, save and retention cost in a run with a long history.

A run is laid out with so many kept steps and so many generations, each step with a small state. It is then used as a
job uses it, in a process of its own: opened, restored, saved to, listed. Counted are the calls that open a file; on an
object store each of them would be a request. Another process saves, by turns, to a run that keeps a few steps and to
one that keeps many.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import click
import msgspec
import numpy as np

import holdfast as hf
from benchmarks.harness.tables import draw_table
from holdfast.events import Event, Retained
from holdfast.format.digests import digest, seal
from holdfast.format.index import Index
from holdfast.format.index_checks import decode_index
from holdfast.format.names import StepName, base_path, generation_path
from holdfast.format.records import Manifest, Opening, decode_manifest, make_base

_SETTLING_SAVES: Final = 40
"""So many saves sum up what was laid out, as if the run had been saved by this version from the beginning."""

_SAVES: Final = 5
"""Each job that is measured makes so many saves."""

_KEEP: Final = hf.Latest(3) | hf.EveryN(1000)
_KEPT: Final = {
    "3 kept steps": (),
    "66 kept steps": (*range(1000, 63_000, 1000), 62_001),
}
"""The runs that are saved to by turns, and the steps that they begin with, of which retention keeps the last one."""
_TURN_SAVES: Final = 20
_BY_TURNS: Final = "save with `Latest(3)` and `EveryN(1000)`, by turns"

Figures = dict[str, float]
Made = TypeVar("Made")


def lay_out(place: Path, steps: Sequence[int], generations: int) -> None:
    """**Blocks.** Makes a run with kept steps, the last of them saved by the newest of so many generations.

    One step is saved; the others are that step with other numbers. If there are more generations than steps, the older
    ones saved steps that retention has removed since.
    """
    with hf.CheckpointManager(place, make_checkpoint(), cluster="alone") as manager:
        manager.save(1, metrics={"loss": 1.0})
    first = StepName(1, 1)
    model = place / first.directory
    manifest = decode_manifest((model / "manifest.json").read_bytes(), path="", expected=first)
    index = decode_index((model / "index-00000-of-00001.json").read_bytes(), path="", step=1)
    opening = msgspec.json.decode((place / generation_path(1)).read_bytes())["body"]
    # Each generation saves the same number of steps, the newest generation those that are left.
    share = max(1, steps[-1] // generations)
    for number in range(1, generations + 1):
        made = Opening(**opening | {"generation": number, "token": f"{number:032x}"})
        (place / generation_path(number)).write_bytes(seal(made))
        begun = None if number == 1 else StepName((number - 1) * share, number - 1)
        (place / base_path(number)).write_bytes(seal(make_base(number, begun)))
    for step in steps:
        name = StepName(step, min((step - 1) // share + 1, generations))
        _make_step(place, name, model, manifest, index)
    if 1 not in steps:
        shutil.rmtree(model)


def _make_step(place: Path, name: StepName, model: Path, manifest: Manifest, index: Index) -> None:
    if name.directory == model.name:
        return
    directory = place / name.directory
    directory.mkdir()
    parts = {"step": name.step, "generation": name.generation}
    record = seal(msgspec.structs.replace(index, **parts))
    (directory / "index-00000-of-00001.json").write_bytes(record)
    shutil.copyfile(model / "data-00000-of-00001.safetensors", directory / "data-00000-of-00001.safetensors")
    worker = msgspec.structs.replace(manifest.workers[0], index_bytes=len(record), index_digest=digest(record))
    metrics = {"loss": 1 / name.step}
    sealed = seal(msgspec.structs.replace(manifest, **parts, workers=(worker,), metrics=metrics))
    for copy in ("manifest.json", "committed"):
        (directory / copy).write_bytes(sealed)


def make_checkpoint(numbers: int = 1000) -> hf.Checkpoint:
    """A small state, as that of a run whose saves are quick."""
    return hf.Checkpoint(weights=np.arange(float(numbers)), count=1)


def measure(place: Path, steps: int, rounds: int, settling_saves: int) -> dict[str, Figures]:
    """**Blocks.** Uses the run as jobs do; gives seconds and calls of each thing that a job does."""
    opens = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal opens
        opens += event == "open"

    sys.addaudithook(count)

    def take(act: Callable[[], Made]) -> tuple[Figures, Made]:
        begun_at, busy_before, opens_before = time.perf_counter(), _busy_seconds(), opens
        made = act()
        seconds, busy_seconds = time.perf_counter() - begun_at, _busy_seconds() - busy_before
        return {"seconds": seconds, "busy_seconds": busy_seconds, "opens": opens - opens_before}, made

    def save(manager: hf.CheckpointManager, step: int) -> None:
        manager.save(step, metrics={"loss": 1 / step}).wait_ended(600)

    def open_manager(**options: Any) -> hf.CheckpointManager:
        return hf.CheckpointManager(place, make_checkpoint(), cluster="alone", **options)

    found: dict[str, list[Figures]] = {}
    with open_manager(keep=hf.Latest(steps)) as manager:
        last = manager.steps()[-1]
        for step in range(last + 1, last + settling_saves + 1):
            save(manager, step)
    last += settling_saves
    retained: list[float] = []

    def note_retention(event: Event) -> None:
        if isinstance(event, Retained):
            retained.append(event.background_seconds)

    for keep, name in ((hf.All(), "save"), (hf.Latest(steps), "save that removes one")):
        for _ in range(rounds):
            opened, manager = take(partial(open_manager, keep=keep, sinks=[note_retention]))
            found.setdefault("opening", []).append(opened)
            found.setdefault("restore", []).append(take(manager.restore)[0])
            retained.clear()
            for number in range(_SAVES):
                last += 1
                kind = name if number else "first save of a job"
                found.setdefault(kind, []).append(take(partial(save, manager, last))[0])
                own = [{"seconds": retained[-1]}]
                found.setdefault("retention" if keep == hf.All() else "retention of one", []).extend(own)
            manager.close()
    command = [sys.executable, "-m", "holdfast", "list", str(place)]
    for _ in range(3):
        listed, _ = take(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL))
        # The other process's calls are not seen here.
        found.setdefault("holdfast list", []).append(listed | {"opens": 0})
    return {name: _take_medians(taken) for name, taken in found.items()}


def measure_kept(place: Path, rounds: int, settling_saves: int) -> dict[str, Figures]:
    """**Blocks.** Saves 64 KiB to runs that keep a few steps and many, by turns; gives the seconds of each save."""
    found: dict[str, list[Figures]] = {name: [] for name in _KEPT}
    with ExitStack() as stack:
        managers, last = {}, {}
        for name, steps in _KEPT.items():
            if steps:
                lay_out(place / name, steps, 1)
            manager = hf.CheckpointManager(place / name, make_checkpoint(8192), keep=_KEEP, cluster="alone")
            managers[name], last[name] = stack.enter_context(manager), max(steps, default=0)
        for number in range(rounds + 1):
            for name, manager in managers.items():
                saves = _TURN_SAVES if number else settling_saves
                begun_at, busy_before = time.perf_counter(), _busy_seconds()
                for step in range(last[name] + 1, last[name] + saves + 1):
                    manager.save(step).wait_ended(600)
                seconds, busy_seconds = time.perf_counter() - begun_at, _busy_seconds() - busy_before
                last[name] += saves
                if number:
                    found[name].append({"seconds": seconds / saves, "busy_seconds": busy_seconds / saves})
        for name, manager in managers.items():
            if name != f"{len(manager.steps())} kept steps":
                raise AssertionError(f"{name}, but there are {len(manager.steps())}")
    return {name: _take_medians(taken) for name, taken in found.items()}


def _take_medians(taken: Sequence[Figures]) -> Figures:
    return {key: median(one[key] for one in taken) for key in taken[0]}


def _busy_seconds() -> float:
    """The processor time of this process, with all of its threads, and of those that it has started."""
    started = os.times()
    return time.process_time() + started.children_user + started.children_system


def render_table(results: dict[str, dict[str, Figures]]) -> str:
    """**Pure.** The figures as a table of Markdown: milliseconds, those of the processor, and files opened."""
    rows = []
    for name in next(iter(results.values()), ()):
        cells = []
        for figures in results.values():
            one = figures[name]
            opens = f", {one['opens']:.0f} opens" if one.get("opens") else ""
            busy = f" ({1000 * one['busy_seconds']:.0f})" if "busy_seconds" in one else ""
            cells.append(f"{1000 * one['seconds']:.1f} ms{busy}{opens}")
        rows.append([name, *cells])
    return "\n".join(draw_table(["", *results], rows))


def render_kept(kept: dict[str, Figures]) -> str:
    """**Pure.** The figures of saves by turns as a table: milliseconds, and those of the processor."""
    cells = [f"{1000 * one['seconds']:.2f} ms ({1000 * one['busy_seconds']:.2f})" for one in kept.values()]
    return "\n".join(draw_table(["", *kept], [[_BY_TURNS, *cells]]))


@click.command()
@click.option("--steps", multiple=True, type=click.IntRange(1), default=(10, 1000, 10_000), help="How many are kept.")
@click.option("--generations", multiple=True, type=click.IntRange(1), default=(10, 400, 10_000), help="How many.")
@click.option("--both", is_flag=True, help="Also the largest of both together.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Medians of so many jobs.")
@click.option("--settling-saves", default=_SETTLING_SAVES, show_default=True, help="Saves before it is measured.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures there, as JSON.")
@click.option("--kept-only", is_flag=True, help="Only the saves with 3 and with 66 kept steps, by turns.")
@click.option("--one", type=(click.Path(path_type=Path), int), hidden=True)
def main(
    steps: tuple[int, ...],
    generations: tuple[int, ...],
    both: bool,
    rounds: int,
    settling_saves: int,
    out: Path | None,
    kept_only: bool,
    one: tuple[Path, int] | None,
) -> None:
    """Measures by kept steps, then by generations with 10 kept steps, then by turns with 3 and 66; prints the tables.

    `--steps` and `--generations` may be repeated.
    """
    if one is not None:
        act = partial(measure, *one) if one[1] else partial(measure_kept, one[0])
        click.echo(json.dumps(act(rounds=rounds, settling_saves=settling_saves)))
        return
    runs = {f"{count:,} steps": (count, 1) for count in steps}
    runs |= {f"{count:,} generations": (10, count) for count in generations}
    if both:
        most = (max(steps), max(generations))
        runs[f"{most[0]:,} steps, {most[1]:,} generations"] = most
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for title, (kept, opened) in (({} if kept_only else runs) | {_BY_TURNS: (0, 0)}).items():
        with tempfile.TemporaryDirectory(prefix=".history-", dir=os.environ.get("HISTORY_DIR", Path.cwd())) as place:
            run = Path(place) / "run"
            if kept:
                last = max(kept, opened)
                lay_out(run, range(last - kept + 1, last + 1), opened)
                os.sync()
            command = [sys.executable, "-m", "benchmarks.history", "--one", str(run), str(kept)]
            command += ["--rounds", str(rounds), "--settling-saves", str(settling_saves)]
            results[title] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        click.echo(f"measured: {title}", err=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")
    by_turns = results.pop(_BY_TURNS)
    if results:
        click.echo(render_table(results))
    click.echo(render_kept(by_turns))


if __name__ == "__main__":
    main()
