"""The page on which a trainer notes its work, read while it writes, and after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import supervise
from holdfast.supervise.board import BETWEEN, DATA, KEPT, PHASES, STEP, Board
from repetitions import repeated

WRITER = """
import sys, types
package = types.ModuleType("holdfast")
package.__path__ = [sys.argv[1]]
sys.modules["holdfast"] = package
from holdfast.supervise import board
page, step = board.Board.open(int(sys.argv[2])), 0
while True:
    step += 1
    page.enter(step % len(board.PHASES), step, completed=1)
    if step == 20:
        print(flush=True)
"""
"""A process that runs none of holdfast's own beginning, as those beside a trainer do."""


def test_killed_writer_leaves_a_page_that_can_be_read() -> None:
    board = Board.create()
    for _ in range(repeated(200, in_gate=8)):
        board.clear()
        writer = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", WRITER, Path(supervise.__path__[0]).parent, str(board.fd)],
            pass_fds=[board.fd],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = [board.read() for _ in range(500)]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        seen.append(board.read())
        for reading in seen:
            assert reading.pid == writer.pid
            assert reading.phase == reading.step % len(PHASES)
            assert reading.step == reading.steps_done == reading.phases
            assert 0 < reading.first_step_at <= reading.since
        assert [one.step for one in seen] == sorted(one.step for one in seen)
        assert seen[-1] == board.read()
    board.close()


def test_keeps_the_newest_durations_and_the_longest() -> None:
    board, now = Board.create(), 1.0
    board.enter(STEP, 0, completed=1, at=1.0)
    for seconds in (100.0, *range(1, KEPT + 1)):
        now += seconds
        board.enter(DATA, 0, at=now)
        board.enter(STEP, 0, at=now)
    reading = board.read()
    assert sorted(reading.last) == [float(one) for one in range(1, KEPT + 1)]
    assert reading.slowest == 100.0
    assert board.enter(BETWEEN, 1, completed=1, at=now) == STEP
    assert (board.read().last, board.read().first_step_at) == ((), 1.0)
    board.close()


def test_holds_what_a_watchdog_is_to_know() -> None:
    board = Board.create()
    assert board.read().committed == -1
    board.note_committed(7)
    board.note_saves(begun=2)
    board.note_saves(ended=1)
    board.set_watch((1.0, 2.5), "runs/\udcff" + "ü" * 1000, dump_signal=40, dump_thread=5)
    reading = Board.open(os.dup(board.fd)).read()
    assert (reading.committed, reading.saves_in_flight, reading.limits[:2]) == (7, 1, (1.0, 2.5))
    assert reading.text.startswith("runs/\udcffüü")
    assert (reading.dump_signal, reading.dump_thread) == (40, 5)
    board.clear()
    assert board.read() == Board.create().read()


def test_refuses_another_file() -> None:
    descriptor = os.memfd_create("another")
    for size in (10, 4096):
        os.ftruncate(descriptor, size)
        with pytest.raises(OSError, match="not a board"):
            Board.open(descriptor)
    os.close(descriptor)
