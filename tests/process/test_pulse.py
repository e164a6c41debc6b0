"""Which process, and which of its threads, notes its phases on an inherited board."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from holdfast.process.pulse import Pulse
from holdfast.supervise.board import COPY, DATA, ENVIRONMENT, STEP, Board

TRAINER = """
import os, subprocess, sys, threading
from holdfast.process.pulse import PULSE
from holdfast.supervise.board import STEP, DATA
called = []
PULSE.on_first_step = lambda: called.append(1)
PULSE.join()
PULSE.enter(STEP, 3)
other = threading.Thread(target=lambda: PULSE.enter(DATA, 9))
other.start()
other.join()
if (child := os.fork()) == 0:
    PULSE.enter(DATA, 8)
    PULSE.join()
    PULSE.enter(DATA, 8)
    os._exit(0)
os.waitpid(child, 0)
if sys.argv[1] == "outer":
    subprocess.run([sys.executable, __file__, "inner"], check=True)
    PULSE.enter(STEP, 4, completed=1)
    PULSE.enter(STEP, 5, completed=1)
    assert called == [1]
"""


def test_only_the_trainer_writes(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    board = Board.create()
    environment = os.environ | {ENVIRONMENT: f"{board.fd}:0"}
    trainer = subprocess.Popen([sys.executable, tmp_path / "trainer.py", "outer"], pass_fds=[board.fd], env=environment)
    assert trainer.wait() == 0
    reading = board.read()
    assert (reading.pid, reading.phase, reading.step) == (trainer.pid, STEP, 5)
    assert (reading.phases, reading.steps_done) == (3, 2)
    assert reading.first_step_at < reading.since
    board.close()


def test_without_a_board_nothing_is_noted() -> None:
    pulse, called = Pulse(), []
    assert pulse.join() is None
    pulse.on_first_step = lambda: called.append(threading.get_ident())
    assert pulse.enter(COPY, 1) == 0
    assert not called
    pulse.enter(DATA, 1, completed=1)
    assert called == [threading.get_ident()]
    assert pulse.on_first_step is None
