"""A worker that saves nothing but counts steps: it says which it is, and then does as its launcher's test says.

python -m holdfast worker worker_of_a_launcher.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import holdfast

directory = Path(sys.argv[1])
state = np.zeros(3)
with holdfast.resumable(directory / f"run-{os.environ['RANK']}", state=state, cluster="alone", quiet=True) as run:
    for _ in run.steps(run.step + 3):
        state += 1
nowhere = subprocess.DEVNULL
child = subprocess.Popen(["sleep", "1000"], stdin=nowhere, stdout=nowhere, stderr=nowhere)


def leave(*_: object) -> None:
    """Ends at SIGTERM, and leaves nothing."""
    child.kill()
    print("heard", flush=True)
    sys.exit(5)


signal.signal(signal.SIGTERM, leave)
print("trained", os.environ["RANK"], os.getpid(), os.getsid(0), flush=True)
for line in sys.stdin:
    exec(line)
child.kill()
