"""Makes the weights of runs nan in a random batch; they go back, and end bit for bit as without that batch.

`python -m crash.rollbacks`. The runs train in this process, the jobs as two workers under torchrun, where a random one
of them has the bad batch. All are those of `programs/gone_bad.py`, which takes batches in three ways, by turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from crash.command import WrongStateError, run_command, show_progress

PROGRAM: Final = Path(__file__).parents[1] / "programs" / "gone_bad.py"
LOOPS: Final = ("steps", "epochs", "own")
_STEPS, _STEPS_OF_JOB, _LONGEST_SECONDS = 40, 60, 600

Train = Callable[[Path, str, str, tuple[int, int], dict[int, int]], list[dict[str, Any]]]
"""Trains in a directory, with `on_nonfinite`, a loop, the rank and number of the bad batch, and what to leave out;
returns what each worker ends with."""


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gone_bad", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def train_here(
    directory: Path, on_nonfinite: str, loop: str, bad: tuple[int, int], left_out: dict[int, int]
) -> list[dict[str, Any]]:
    return [load()(directory, on_nonfinite, _STEPS, loop, bad=bad, left_out=left_out)]


def train_together(
    directory: Path, on_nonfinite: str, loop: str, bad: tuple[int, int], left_out: dict[int, int]
) -> list[dict[str, Any]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [directory, on_nonfinite, _STEPS_OF_JOB, *bad, loop, *(f"{step}:{n}" for step, n in left_out.items())]
    done = subprocess.run(
        [*torchrun, str(PROGRAM), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS,
        check=False,
    )
    if done.returncode:
        raise WrongStateError(f"{words} ended with {done.returncode}: {done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]


def go_back(directory: Path, train: Train, steps: int, loop: str, bad: tuple[int, int]) -> None:
    """One that goes back, and one without these batches.

    Raises:
        WrongStateError: If they do not end alike.
    """
    found = train(directory / "back", "rollback", loop, bad, {})
    backs = {tuple(one["back"]) for one in found}
    if len(backs) != 1 or len(found[0]["back"]) != 1:
        raise WrongStateError(f"batch {bad} of {loop}: went back to {backs}")
    left_out = {found[0]["back"][0]: found[0]["drawn"] - steps}
    plain = train(directory / "plain", "warn", loop, (0, 0), left_out)
    ends = {(one["digest"], one["step"]) for one in (*found, *plain)}
    if len(ends) != 1 or plain[0]["step"] != steps:
        raise WrongStateError(f"batch {bad} of {loop}, without {left_out}: {ends}")
    shutil.rmtree(directory)


def play(directory: Path, chosen: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    chance = random.Random(chosen.seed)
    for number in range(chosen.runs):
        bad = 0, chance.randrange(4, _STEPS - 9)  # It is known nine steps later: the next save but one waits for it.
        go_back(directory / f"run{number}", train_here, _STEPS, LOOPS[number % len(LOOPS)], bad)
        show_progress(number + 1, chosen.runs, "runs")
    for number in range(chosen.jobs):
        bad = chance.randrange(2), chance.randrange(4, 20)
        go_back(directory / f"job{number}", train_together, _STEPS_OF_JOB, chance.choice(LOOPS), bad)
        show_progress(number + 1, chosen.jobs, "jobs")
    return f"{chosen.runs} runs and {chosen.jobs} jobs of two workers went back bit for bit, in SECONDS"


OPTIONS: Final = {
    "--runs": {"type": int, "default": 1000, "help": "how many runs in this process"},
    "--jobs": {"type": int, "default": 50, "help": "how many jobs under torchrun"},
}

if __name__ == "__main__":
    run_command("rollbacks", __doc__ or "", OPTIONS, play)
