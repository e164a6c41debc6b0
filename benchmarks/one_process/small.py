"""Small figures: what it costs to import holdfast, and to ask at each step whether a save is due."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness.timing import timed

import holdfast as hf

_STARTS: Final = 3
_STEPS: Final = 20_000
_PROGRAMS: Final = {"start": "pass", "start_holdfast": "import holdfast", "start_numpy": "import numpy"}


def start_seconds() -> dict[str, float]:
    """**Blocks.** How long fresh processes take that import something, or nothing; each the median of a few."""
    # As pip leaves an installed package, even if this process writes no bytecode.
    compileall.compile_dir(Path(hf.__file__).parent, quiet=1)
    times: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(_STARTS):
        for name, program in _PROGRAMS.items():
            command = [sys.executable, "-c", program]
            times[name].append(timed(lambda command=command: subprocess.run(command, check=True)))  # type: ignore[misc]
    return {name: median(seconds) for name, seconds in times.items()}


def step_seconds(directory: Path) -> dict[str, float]:
    """**Blocks.** How long one turn of `steps()` takes, by policy; the median, so of a turn that saves nothing."""
    policies = {"steps": hf.Steps(10**9), "auto": hf.Auto(), "seconds": hf.Seconds(3600)}
    found = {}
    for name, policy in policies.items():
        place = directory / name
        with hf.resumable(place, save_every=policy, rng=hf.RNG()) as run:
            turns = []
            before = time.perf_counter()
            for _ in run.steps(_STEPS):
                now = time.perf_counter()
                turns.append(now - before)
                before = now
        shutil.rmtree(place)
        found[f"turn_{name}"] = median(turns)
    return found
