"""Jobs of one handler that a signal ends: MODE DIRECTORY."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

import holdfast as hf


def ask_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail_without_block(directory: str, loop: str) -> None:
    state = {"text": ""}
    manager = hf.CheckpointManager(directory, hf.Checkpoint(state=state))
    handler = hf.PreemptionCheckpointHandler(manager)

    def step() -> None:
        state["text"] += "a"
        if handler.total_run_calls == 3:
            ask_to_leave()
            raise RuntimeError("half of the step is done")

    if loop == "run":
        while True:
            handler.run(step)
    for _ in handler.steps(9):
        step()


def go_back(directory: str) -> None:
    state = {"text": ""}

    def step(letter: str) -> None:
        state["text"] += letter

    manager = hf.CheckpointManager(directory, hf.Checkpoint(state=state), save_every=hf.Steps(5))
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        if handler.restored is not None:
            print(state["text"])
            sys.exit()
        for _ in range(10):
            handler.run(step, "a")
        manager.save(10)
        manager.restore(5)
        assert handler.total_run_calls == 5
        for _ in range(5):
            handler.run(step, "b")
        ask_to_leave()
        handler.run(step, "c")


def wait_for_data(directory: str) -> None:
    state = {"values": np.zeros(100)}
    manager = hf.CheckpointManager(directory, hf.Checkpoint(state=state))
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        for step in handler.steps(8):
            with handler.checkpointable(step_done=False):
                if step == 5 and handler.restored is None:
                    ask_to_leave()
                    threading.Event().wait()
            state["values"] = state["values"] * 1.5 + step
    print(handler.total_run_calls, state["values"][0])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fail", directory, loop]:
            fail_without_block(directory, loop)
        case ["go back", directory]:
            go_back(directory)
        case ["wait for data", directory]:
            wait_for_data(directory)
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
