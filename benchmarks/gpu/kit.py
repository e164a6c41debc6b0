"""Goes through the parts in the environment that was prepared: `python -m benchmarks.gpu.kit RUN`, `RUN` as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.page import BARE, Outcome, Run, make_table
from benchmarks.harness.contender import Contender, ContenderError, ContenderMissingError
from benchmarks.harness.guard import ROOT
from benchmarks.harness.memory import taken_bytes
from benchmarks.harness.results import write_json
from benchmarks.harness.turns import Bench, open_bench

SMALL, LARGE = 2.0, 12.0
"""The sizes of the state that is saved, in GB."""
_LARGEST_ON_DISK: Final = 6.0
"""Of a larger state in GB there is no time to write and read as many bytes barely."""
_DRY_SCALE: Final = 0.01
_FIRST_PORT: Final = 29600
_GOOD_PEER: Final = "DCP async, thread"
_OTHER_PEERS: Final = ("torch_checkpointing", "DCP async, process", "torch.save")
_DUTIES: Final = "benchmarks.gpu.duties"


@dataclass(frozen=True, slots=True)
class Part:
    """A process that measures something.

    Attributes:
        name: Its name in the results.
        duties: The class of its duties.
        arguments: What they are made with.
        orders: What it is to do, in this order.
        limit_seconds: It is ended after that time.
        least_seconds: It is not begun if there is less time left.
        size: The size of the state, as the results name it.
        contender: Its name among those with the same size.
    """

    name: str
    duties: str
    arguments: dict[str, Any]
    orders: tuple[str, ...]
    limit_seconds: float
    least_seconds: float = 15.0
    size: str = ""
    contender: str = ""


def list_parts(*, dry: bool) -> list[Part]:
    """**Pure**, but for a look at which files of tests there are."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_device_*.py"))
    both = ("holdfast", "holdfast, overlapped")
    parts = [
        Part("device", "DeviceDuties", {}, ("pin",), 40),
        *(_compare(peer, SMALL, 45, dry=dry) for peer in both),
        Part("tests", "TestDuties", {"files": tests, "dry": dry}, ("test",), 110, 40),
        _compare(_GOOD_PEER, SMALL, 45, dry=dry),
        *(_compare(peer, LARGE, 100, dry=dry) for peer in both),
        _compare(_GOOD_PEER, LARGE, 110, dry=dry),
        *(_compare(peer, SMALL, 40, dry=dry) for peer in _OTHER_PEERS),
        *(_compare(peer, SMALL, 45, dry=dry) for peer in ("JAX: holdfast", "JAX: Orbax async")),
        *(_compare(peer, LARGE, 110, dry=dry) for peer in _OTHER_PEERS),
    ]
    # Where a dry run is made, other programs run as well.
    return [replace(part, limit_seconds=4 * part.limit_seconds) for part in parts] if dry else parts


def _compare(peer: str, gigabytes: float, limit_seconds: float, *, dry: bool) -> Part:
    arguments = {"peer": peer, "gigabytes": gigabytes * (_DRY_SCALE if dry else 1.0)}
    name, least = f"{peer}, {gigabytes:g} GB", 15.0 if gigabytes == SMALL else 40.0
    is_jax = peer.startswith("JAX: ")
    orders = ("open", "first_save", "saves", *(() if is_jax else ("lose",)), "restore")
    if peer == "holdfast":
        orders = ("copy_barely", *(("use_disk_barely",) if gigabytes < _LARGEST_ON_DISK else ()), *orders)
    duties = "JaxDuties" if is_jax else "GpuDuties"
    return Part(name, duties, arguments, orders, limit_seconds, least, f"{gigabytes:g} GB", peer)


def choose(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """**Pure.** Those whose names contain one of some words; all if there are none."""
    return [part for part in parts if not only or any(word in part.name for word in only)]


class Kit:
    """One run.

    Attributes:
        run: All that is known so far.
    """

    def __init__(self, place: Path, run: Run, bench: Bench, end_at: float) -> None:
        self.run = run
        self._place, self._bench, self._end_at = place, bench, end_at
        (place / "gpu.log").write_bytes(b"")
        self._write()

    def measure(self, part: Part) -> None:
        """**Blocks.** Runs a part, unless too little time is left. What it has found is kept after each order."""
        begun_at, left_seconds = time.monotonic(), self._end_at - time.monotonic()
        if left_seconds < part.least_seconds:
            self._end(part, "no time left", 0.0, "")
            return
        os.environ["MASTER_PORT"] = str(_FIRST_PORT + len(self.run.parts))
        deadline = begun_at + min(part.limit_seconds, left_seconds)
        contender = self._bench.start(part.size, part.name, count_memory=taken_bytes, threads=None)
        state = "done"
        try:
            contender.wait_started()
            directory = str(contender.directory)
            contender.send("make", place=f"{_DUTIES}:{part.duties}", directory=directory, **part.arguments)
            contender.receive("make", deadline - time.monotonic())
            for verb in part.orders:
                self._order(part, contender, verb, deadline - time.monotonic())
            contender.close()
        except ContenderMissingError as error:
            self._bench.fail(part.size, part.contender, str(error))
        except ContenderError as error:
            state = "failed"
            self._bench.fail(part.size or part.name, part.contender or part.name, str(error))
        finally:
            contender.kill()
            shutil.rmtree(contender.directory, ignore_errors=True)
        self._end(part, state, time.monotonic() - begun_at, contender.read_log())

    def _order(self, part: Part, contender: Contender, verb: str, seconds: float) -> None:
        if verb == "open":
            contender.open(seconds)
            return
        figures = contender.order(verb, seconds=seconds)
        extra_bytes = figures.pop("extra_bytes")
        if verb == "saves":
            figures["host_bytes"] = extra_bytes
        if part.size:
            name = BARE if verb.endswith("_barely") else part.contender
            self._bench.keep(part.size, name, 1, figures)
        if contender.note and contender.note not in self.run.notes:
            self.run.notes.append(contender.note)
        self._write()

    def _end(self, part: Part, state: str, seconds: float, text: str) -> None:
        self.run.parts[part.name] = Outcome(state, seconds, text)
        with (self._place / "gpu.log").open("a") as output:
            output.write(f"\n==== {part.name}: {state}\n{text}\n")
        self._write()
        print(f"{part.name}: {state} after {seconds:.0f} s", flush=True)

    def _write(self) -> None:
        """Replaces both files; a crash at any point leaves the ones before."""
        write_json(self.run, self._place / "gpu.json")
        table = self._place / "gpu.md"
        table.with_suffix(".new").write_text(make_table(self.run))
        table.with_suffix(".new").replace(table)


def main(asked: dict[str, Any]) -> int:
    """**Blocks.** Runs all parts; 0 if they have ended well."""
    end_at = time.monotonic() + asked["seconds"]
    place, about = Path(asked["place"]), asked["about"]
    dry = "dry" in about
    try:
        scale = _DRY_SCALE if dry else 1.0
        with open_bench(place, scale, lambda text: print(f"    {text}", flush=True)) as bench:
            run = Run(about=about, notes=asked["notes"], results=bench.results)
            kit = Kit(place, run, bench, end_at)
            for part in choose(list_parts(dry=dry), asked["only"]):
                kit.measure(part)
    finally:
        for left in (Path(asked["scratch"]), place / "site"):
            shutil.rmtree(left, ignore_errors=True)
    print((place / "gpu.md").read_text())
    print(f"results: {place / 'gpu.json'} and {place / 'gpu.md'}, output: {place / 'gpu.log'}")
    return 0 if all(outcome.state in ("done", "no time left") for outcome in run.parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
