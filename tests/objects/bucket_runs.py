"""Whole runs in a bucket, in this process and in processes that are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np

import holdfast
from places import PROGRAMS

SEED = int(os.environ.get("HOLDFAST_SEED", "1"))
SIZES = 10 if "HOLDFAST_LONG" in os.environ else 1


def run_job(url: str, *args: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAMS / "bucket_job.py"), url, *map(str, args)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def committed_steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^committed (\d+)", output, re.M)]


def manager_of(url: str, array: np.ndarray, **options: object) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(url, holdfast.Checkpoint(array=array), cluster="alone", **options)  # type: ignore[arg-type]
