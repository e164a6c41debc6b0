"""`python -m benchmarks.history`: what opening, restore, save and retention cost in a run with a long history.

A run is laid out with so many kept steps and so many generations, each step with a small state. It is then used as a
job uses it, in processes of their own: opened, restored, saved to, listed. Counted are the calls that open, list,
rename or remove something in the file system; on an object store each of them would be a request.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import click
import msgspec
import numpy as np

import holdfast as hf
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

_CALLS: Final = {"open": "opens", "os.scandir": "lists", "os.listdir": "lists", "os.rename": "renames"}
_REMOVALS: Final = ("os.remove", "os.rmdir")

Figures = dict[str, float]
Made = TypeVar("Made")


def lay_out(place: Path, steps: int, generations: int) -> None:
    """**Blocks.** Makes a run with so many kept steps, the last of them saved by the newest of so many generations.

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
    last = max(steps, generations)
    # Each generation saves the same number of steps, the newest generation those that are left.
    share = max(1, last // generations)
    for number in range(1, generations + 1):
        made = Opening(**opening | {"generation": number, "token": f"{number:032x}"})
        (place / generation_path(number)).write_bytes(seal(made))
        begun = None if number == 1 else StepName((number - 1) * share, number - 1)
        (place / base_path(number)).write_bytes(seal(make_base(number, begun)))
    for step in range(last - steps + 1, last + 1):
        name = StepName(step, min((step - 1) // share + 1, generations))
        _make_step(place, name, model, manifest, index)
    if steps < last:
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


def make_checkpoint() -> hf.Checkpoint:
    """A small state, as that of a run whose saves are quick."""
    return hf.Checkpoint(weights=np.arange(1000.0), count=1)


def measure(place: Path, steps: int, rounds: int, settling_saves: int) -> dict[str, Figures]:
    """**Blocks.** Uses the run as jobs do; gives seconds and calls of each thing that a job does."""
    calls: Counter[str] = Counter()
    is_counting = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_counting and (kind := _CALLS.get(event) or ("removals" if event in _REMOVALS else "")):
            calls[kind] += 1

    sys.addaudithook(note)

    def take(act: Callable[[], Made]) -> tuple[Figures, Made]:
        nonlocal is_counting
        calls.clear()
        is_counting = True
        begun_at, busy_before = time.perf_counter(), _busy_seconds()
        made = act()
        seconds, busy_seconds = time.perf_counter() - begun_at, _busy_seconds() - busy_before
        is_counting = False
        return {
            "seconds": seconds,
            "busy_seconds": busy_seconds,
            **{kind: calls[kind] for kind in ("opens", "lists", "renames", "removals")},
        }, made

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

    def hear(event: Event) -> None:
        if isinstance(event, Retained):
            retained.append(event.background_seconds)

    for keep, name in ((hf.All(), "save"), (hf.Latest(steps), "save that removes one")):
        for _ in range(rounds):
            opened, manager = take(partial(open_manager, keep=keep, sinks=[hear]))
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
        times = {kind: listed[kind] for kind in ("seconds", "busy_seconds")}
        found.setdefault("holdfast list", []).append(times)
    return {
        name: {key: median(one[key] for one in taken) for key in taken[0]}
        | {"most": max(one["seconds"] for one in taken)}
        for name, taken in found.items()
    }


def _busy_seconds() -> float:
    """What the processor has done for this process, all of its threads, and for those that it has started."""
    started = os.times()
    return time.process_time() + started.children_user + started.children_system


def render_table(results: dict[str, dict[str, Figures]]) -> str:
    """**Pure.** The figures as a table of Markdown: milliseconds, those of the processor, and files opened."""
    lines = [f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for name in next(iter(results.values())):
        cells = []
        for figures in results.values():
            one = figures[name]
            opens = f", {one['opens']:.0f} opens" if one.get("opens") else ""
            busy = f" ({1000 * one['busy_seconds']:.0f})" if "busy_seconds" in one else ""
            cells.append(f"{1000 * one['seconds']:.1f} ms{busy}{opens}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
@click.option("--steps", multiple=True, type=click.IntRange(1), default=(10, 1000, 10_000), help="How many are kept.")
@click.option("--generations", multiple=True, type=click.IntRange(1), default=(10, 400, 10_000), help="How many.")
@click.option("--both", is_flag=True, help="Also the largest of both together.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Medians of so many jobs.")
@click.option("--settling-saves", default=_SETTLING_SAVES, show_default=True, help="Saves before it is measured.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures there, as JSON.")
@click.option("--one", type=(click.Path(path_type=Path), int), hidden=True)
def main(
    steps: tuple[int, ...],
    generations: tuple[int, ...],
    both: bool,
    rounds: int,
    settling_saves: int,
    out: Path | None,
    one: tuple[Path, int] | None,
) -> None:
    """Measures by kept steps, then by generations with 10 kept steps, and prints the table.

    `--steps` and `--generations` may be repeated.
    """
    if one is not None:
        click.echo(json.dumps(measure(*one, rounds, settling_saves)))
        return
    runs = {f"{count:,} steps": (count, 1) for count in steps}
    runs |= {f"{count:,} generations": (10, count) for count in generations}
    if both:
        most = (max(steps), max(generations))
        runs[f"{most[0]:,} steps, {most[1]:,} generations"] = most
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for title, (kept, opened) in runs.items():
        with tempfile.TemporaryDirectory(prefix=".history-", dir=os.environ.get("HISTORY_DIR", Path.cwd())) as place:
            run = Path(place) / "run"
            lay_out(run, kept, opened)
            os.sync()
            command = [sys.executable, "-m", "benchmarks.history", "--one", str(run), str(kept)]
            command += ["--rounds", str(rounds), "--settling-saves", str(settling_saves)]
            results[title] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        click.echo(f"measured: {title}", err=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")
    click.echo(render_table(results))


if __name__ == "__main__":
    main()
