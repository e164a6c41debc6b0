"""Says which modules and functions of holdfast a save calls, in all threads: for the rules of the house."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.cluster import Cluster
from memory_engine import run_workers

HOME = f"{Path(hf.__file__).parent}/"

touched: dict[str, set[int]] = defaultdict(set)


def note(frame: FrameType, event: str, argument: Any) -> None:
    """A profiler: notes the functions that are called, each by the line where it begins, but no expressions."""
    code = frame.f_code
    if is_noting.is_set() and event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(HOME):
        touched[code.co_filename.removeprefix(HOME)].add(code.co_firstlineno)


def save(directory: str, cluster: Any) -> None:
    """Saves twice, and has the second save noted: in the first, what comes once is done."""
    model = {"w": np.ones(100_000), "b": np.ones(10), "lr": 0.1}
    with hf.CheckpointManager(directory, hf.Checkpoint(model=model), cluster=cluster) as manager:
        manager.save(1).wait_ended()
        together.wait()
        is_noting.set()
        manager.save(2).wait_ended()
        together.wait()
        is_noting.clear()


def work(cluster: Cluster) -> None:
    """As one of several workers."""
    save(directory, cluster)


is_noting = threading.Event()
is_joint = sys.argv[1] == "joint"
together = threading.Barrier(2 if is_joint else 1)
threading.setprofile(note)
sys.setprofile(note)
with tempfile.TemporaryDirectory() as directory:
    if is_joint:
        run_workers(2, work)
    else:
        save(directory, "alone")
sys.setprofile(None)
sys.stdout.write(
    json.dumps({module: sorted(lines) for module, lines in touched.items() if not module.startswith("testing/")})
)
