"""Runs that are killed in a step and started again, each start in a process of its own: DIRECTORY CASE...

Prints, for each case, the lines that the restart says about the steps that it repeats. A case is a loop and a fault.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import ResumeDiffersError
from holdfast.events import Event, WitnessAgreed, WitnessDiffers

DATA = [np.arange(4.0) + number for number in range(300)]
OPTIONS: dict[str, Any] = {"save_every": hf.Steps(20), "quiet": True}


class Loader:
    """Batches of a sampler; with a fault from the given step of a restart on."""

    def __init__(self, sampler: hf.ResumableSampler, fault: str, is_restart: bool) -> None:
        self.sampler, self.fault, self.is_restart = sampler, fault, is_restart
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for indices in self.sampler:
            self.given += 1
            is_wrong = self.fault == "order" and self.is_restart and self.given > 5
            chosen = list(reversed(indices)) if is_wrong else indices
            yield {"x": np.stack([DATA[index] for index in chosen]), "names": [str(index) for index in chosen]}


def train(directory: str, case: str, *, kill_at: int) -> None:
    loop, _, fault = case.partition(":")
    is_restart = kill_at < 0
    weights, hidden = np.zeros(4), np.zeros(1)
    sampler = hf.ResumableSampler(len(DATA), batch_size=7 if fault == "batch_size" and is_restart else 8, seed=3)
    batches = sampler.stream(Loader(sampler, fault, is_restart))

    def say(event: Event) -> None:
        if isinstance(event, WitnessAgreed | WitnessDiffers):
            print(f"{case}: {type(event).__name__} {event}", flush=True)

    options = {**OPTIONS, "sinks": [say], "strict_resume": "strict" in loop}
    if fault == "begin_anew":
        options["begin_anew"] = is_restart

    def step(number: int) -> float:
        if number == kill_at:
            # Step 20 is saved by now, and no other step.
            manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = next(batches)
        if fault == "more" and is_restart and number == 30:
            next(batches)
        weights[:] += batch["x"].mean(0) / 10
        hidden[0] += 1
        return float(weights.sum() + (hidden[0] if fault == "hidden" else 0))

    if "handler" in loop:
        manager = hf.CheckpointManager(
            directory, hf.Checkpoint(weights=weights, sampler=sampler), save_every=OPTIONS["save_every"], sinks=[say]
        )
        with manager, hf.PreemptionCheckpointHandler(manager, quiet=True) as handler:
            while handler.total_run_calls < 70:
                handler.run(step, handler.total_run_calls)
        return
    objects = {"weights": weights} if "alone" in loop else {"weights": weights, "sampler": sampler}
    with hf.resumable(directory, **objects, **options) as run:
        manager = run.manager
        if "alone" in loop and is_restart:
            for _ in range(run.step):
                next(batches)
        if "own" in loop:
            while run.step < 70:
                run.report(loss=step(run.step))
                run.finish_step()
        for number in run.steps(70):
            loss = step(number)
            if "silent" not in loop:
                run.report(loss=np.float32(loss) if "alone" in loop else loss)


def start(directory: str, case: str, kill_at: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            train(directory, case, kill_at=kill_at)
        except ResumeDiffersError as error:
            print(f"{case}: {type(error).__name__} {error.step} {error.what}", flush=True)
            os._exit(1)
        except BaseException as error:
            print(f"{case}: {error!r}", flush=True)
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for number, case in enumerate(sys.argv[2:]):
        place = str(Path(sys.argv[1]) / str(number))
        assert start(place, case, 39) == -signal.SIGKILL
        print(f"{case}: exit {start(place, case, -1)}", flush=True)
