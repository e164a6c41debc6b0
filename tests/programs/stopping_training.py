"""Data-parallel training that is asked to leave, or of which a worker fails. Its last argument says what befalls it."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.testing.cluster_scenarios import say


def train(directory: Path, total: int, what: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    weights = torch.zeros(1000)
    with hf.resumable(directory, weights=weights, rng=hf.RNG(), save_every=hf.Steps(10**6)) as run:
        say({"rank": rank, "process": os.getpid(), "begun": run.step})
        for step in run.steps(total):
            gradient = torch.rand(1000)
            if what in ("fails", "lingers") and (rank, step) == (1, 5):
                raise ValueError("the loss is no number")
            if what == "asked" and (rank, step) == (1, 20):
                os.kill(os.getpid(), signal.SIGTERM)
            if what in ("breaks", "sends") and (rank, step) == (1, 5):
                break
            if what == "sends" and rank == 0:
                dist.send(gradient, 1)
            if what == "sends" and rank == 1:
                dist.recv(gradient, 0)
            # Nobody gets out of this before all are in it.
            dist.all_reduce(gradient)
            weights += gradient
            if what == "stops" and step == 5:
                if rank == 0:
                    late = dist.all_reduce(gradient, async_op=True)
                    time.sleep(7)  # What one of them does before it stops may take longer than a vain wait.
                break
            time.sleep(0.005)  # So that a notice finds it at a step and not at the end.
            if step == 20:
                say({"rank": rank, "process": os.getpid(), "reached": step})
    if what == "stops":
        # Begun by one within the block, and by the other behind it.
        _ = late.wait() if rank == 0 else dist.all_reduce(gradient)
    say({"rank": rank, "ended": hashlib.sha256(weights.numpy().tobytes()).hexdigest()})


def main(directory: Path, total: int, what: str) -> None:
    torch.set_num_threads(1)
    hf.init_process_group("gloo")
    code = 0
    try:
        train(directory, total, what)
    except SystemExit as leaving:
        code = int(str(leaving.code))
    except BaseException as error:
        traceback.print_exc()
        say({"rank": dist.get_rank(), "error": type(error).__name__, "text": str(error)})
        code = 1
        while what == "lingers" and isinstance(error, ValueError):
            # The process lives on, and so do its connections.
            time.sleep(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # The end of a process group may hang.
    os._exit(code)


if __name__ == "__main__":
    # Whoever waits for this process waits no longer than that.
    signal.alarm(300)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
