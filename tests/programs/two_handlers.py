"""Two handlers of one manager, one after the other; the second one leaves at step 5: MODE DIRECTORY."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

import holdfast as hf

STATE = {"values": np.zeros(100)}
MANAGER = hf.CheckpointManager(sys.argv[2], hf.Checkpoint(state=STATE))


def make_handler() -> hf.PreemptionCheckpointHandler:
    return hf.PreemptionCheckpointHandler(MANAGER)


def train() -> int:
    """Runs five steps, and returns how many were complete before."""
    with make_handler() as handler:
        before = handler.total_run_calls
        for _ in range(5):
            handler.run(STATE["values"].__iadd__, 1)
        return before


def leave() -> None:
    with make_handler():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


if __name__ == "__main__":
    with MANAGER:
        steps = train()
        match sys.argv[1]:
            case "first of two lives":
                MANAGER.save(steps + 5)
                sys.exit(0)
            case "one after the other":
                leave()
            case "saved by hand":
                MANAGER.save(5)
                leave()
            case mode:
                raise SystemExit(f"what is {mode}?")
