"""Saves into a bucket until the first credentials have expired that long ago: `saves_for_long.py URL LOG SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import holdfast


def main(url: str, log: str, seconds: str) -> None:
    array = np.zeros(1000)
    with holdfast.CheckpointManager(url, holdfast.Checkpoint(array=array), keep=holdfast.Latest(2)) as manager:
        step, end_at = 0, 0.0
        while not end_at or time.time() < end_at:
            step += 1
            array += 1
            manager.save(step)
            manager.wait(60)
            end_at = float(Path(log).read_text().split()[2]) + float(seconds)
    print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
