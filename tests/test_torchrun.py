"""Real jobs of several workers: FSDP2, meshes of two dimensions and replicas, saved in one layout, back in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "mesh_training.py"


def torchrun(workers: int, mode: str, layout: str, directory: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    ended = subprocess.run(
        [*launch, str(PROGRAM), mode, layout, str(directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


SAVED = {
    "fsdp": (2, [(2, "check", "fsdp"), (4, "check", "hsdp"), (1, "check", "plain"), (2, "check-stepped", "ddp")]),
    "2x2": (4, [(4, "check-stepped", "2x2"), (3, "check", "fsdp"), (1, "check", "plain")]),
    "hsdp": (4, [(4, "check", "2x2"), (2, "check-stepped", "fsdp")]),
    "ddp": (3, [(2, "check", "fsdp"), (3, "check-stepped", "fsdp"), (1, "check", "plain")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SAVED)
def test_what_one_job_saves_another_restores(layout: str, tmp_path: Path) -> None:
    workers, checks = SAVED[layout]
    torchrun(workers, "save", layout, tmp_path)
    for others, mode, other in checks:
        torchrun(others, mode, other, tmp_path)
