"""A saving process that is killed 100 times loses nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from crash.command import WrongStateError
from crash.single import Tally, Toy, check_after
from places import TESTS
from repetitions import repeated


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    kills = repeated(100, in_gate=40)
    command = [sys.executable, "-m", "crash.single", "--kills", str(kills), "--span", "0.15"]
    command += ["--directory", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout
    in_save = re.search(r"(\d+) hit an unfinished save", done.stdout)
    assert in_save is not None
    assert int(in_save[1]) >= kills // 33, "the kills hit saves, not only what lies between them"


def test_the_crash_driver_sees_what_is_wrong(tmp_path: Path) -> None:
    toy = Toy()
    with toy.manager(tmp_path) as manager:
        toy.train(5)
        manager.save(5)
    with pytest.raises(WrongStateError, match="promised was 6"):
        check_after(tmp_path, promised=6, begun=6, tally=Tally())
    toy.train(9)
    next(iter(toy.arrays.values()))[:] = 1
    with hf.CheckpointManager(
        tmp_path, hf.Checkpoint(arrays=toy.arrays, counter=toy.counter), begin_anew=True
    ) as manager:
        manager.save(9)
    with pytest.raises(WrongStateError, match="not that of step 9"):
        check_after(tmp_path, promised=9, begun=9, tally=Tally())
