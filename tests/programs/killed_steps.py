"""A program for `holdfast run` that is killed at any moment. Its state follows from its steps alone.

It tells of its start, with the descriptors that it has and whether it was forked, of each step, and of its end.

Args: where it tells, the directory of the run, how many steps, and seconds for a step. With 0 steps it ends when there
is a file `enough` beside where it tells.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

is_forked = "numpy" in sys.modules
descriptors = []
for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda entry: int(entry.name)):
    try:
        target = str(entry.readlink())
    except OSError:
        continue  # That with which they are listed.
    if int(entry.name) > 2:
        descriptors.append(target.replace(" ", "_"))

told = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)


def tell(*words: object) -> None:
    os.write(told, f"{' '.join(map(str, words))}\n".encode())


tell("started", os.getpid(), "forked" if is_forked else "fresh", *descriptors)

import numpy as np  # noqa: E402

import holdfast as hf  # noqa: E402

directory, steps, pace_seconds = Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
enough = Path(sys.argv[1]).with_name("enough")
values, total = np.arange(5000.0), np.zeros(5000)
with hf.resumable(
    directory, values=values, total=total, save_every=hf.Steps(4 if pace_seconds else 1000), keep=hf.Latest(2)
) as run:
    for step in run.steps(steps or 1 << 40):
        values *= 1.0 - 1.0 / (step + 3)
        values += np.sin(total + step)
        total += values
        time.sleep(pace_seconds)
        tell("step", step)
        if steps == 0 and enough.exists():
            break
tell("ended", step, hashlib.sha256(values.tobytes() + total.tobytes()).hexdigest())
