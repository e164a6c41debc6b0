"""Trains, saves to a bucket, and prints the steps that are committed: `bucket_job.py URL STEPS [KILL_AT]`."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import holdfast
from holdfast.events import Committed


def main(url: str, steps: int, kill_at: int = -1) -> None:
    weights, moments = np.zeros(300_000), np.zeros(300_000, dtype=np.float32)
    rng = np.random.default_rng(0)
    with holdfast.resumable(
        url,
        weights=weights,
        moments=moments,
        rng=rng,
        save_every=holdfast.Steps(3),
        keep=holdfast.Latest(2),
        sinks=[report],
    ) as run:
        for step in run.steps(steps):
            moments[:] = 0.9 * moments + rng.standard_normal(300_000, dtype=np.float32)
            weights += moments
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    print("end", weights.sum().hex(), rng.random().hex(), flush=True)


def report(event: object) -> None:
    if isinstance(event, Committed):
        print("committed", event.step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
