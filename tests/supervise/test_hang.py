"""When a trainer is taken to hang: by its board alone, and real ones that hang in each phase."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.supervise.board import BETWEEN, COMMIT, COPY, DATA, ENDED, LEAVING, PHASES, RESTORE, STEP, Board
from holdfast.supervise.hang import OFF, REPORT, RESTART, Limits, decide
from holdfast.supervise.watcher import HangWatch
from holdfast.training.watchdog import read_watchdog
from patience import PATIENCE_SECONDS
from places import PROGRAMS


@contextmanager
def new_board(limits: Limits | None = None) -> Iterator[Board]:
    board = Board.create()
    board.set_watch(tuple(limits or Limits()), "runs/x")
    yield board
    board.close()


# The decision.


@pytest.mark.parametrize(
    ("phase", "durations", "limit"),
    [
        (STEP, (0.2, 0.3), 30.0),
        (STEP, (2.0, 10.0), 60.0),
        (STEP, (), 600.0),
        (DATA, (0.1,), 30.0),
        (COPY, (20.0, 1.0), 120.0),
        (COMMIT, (), 600.0),
        (RESTORE, (), 600.0),
        (BETWEEN, (0.1, 0.1), 600.0),
        (BETWEEN, (200.0,), 1200.0),
        (LEAVING, (), 600.0),
    ],
)
def test_limit_of_each_phase(phase: int, durations: tuple[float, ...], limit: float) -> None:
    with new_board() as board:
        board.enter(ENDED, 0, completed=1, at=1.0)
        now = 1.0
        for seconds in durations:
            board.enter(phase, 1, at=now)
            now += seconds
            board.enter(ENDED, 1, at=now)
        board.enter(phase, 1, at=now)
        assert not decide(board.read(), now + limit - 0.1).hangs
        verdict = decide(board.read(), now + limit + 0.1)
        assert (verdict.hangs, verdict.restarts) == (True, False)
        assert verdict.reason.startswith(f"{PHASES[phase]} for {limit:.0f} s (limit {limit:.0f} s: ")


def test_first_step_may_take_half_an_hour_in_each_part() -> None:
    with new_board() as board:
        for phase in (BETWEEN, DATA, STEP):
            board.enter(phase, 0, at=100.0)
            assert not decide(board.read(), 1890.0).hangs
            assert decide(board.read(), 1901.0).hangs
        board.enter(BETWEEN, 1, completed=1, at=1000.0)
        board.enter(STEP, 1, at=1000.0)
        board.enter(BETWEEN, 2, at=1000.1)
        board.enter(STEP, 2, at=1001.0)
        # What was compiled once is not waited for again.
        assert decide(board.read(), 1032.0).hangs


def test_restart_of_a_step_that_may_evaluate_waits_longer() -> None:
    with new_board(Limits(action=RESTART)) as board:
        board.enter(BETWEEN, 1, completed=1, at=1.0)
        for phase, restarts in ((STEP, False), (DATA, True)):
            board.enter(phase, 1, at=1.0)
            board.enter(BETWEEN, 1, at=2.0)
            board.enter(phase, 1, at=2.0)
            verdict = decide(board.read(), 40.0)
            assert (verdict.hangs, verdict.restarts) == (True, restarts)
            assert decide(board.read(), 603.0).restarts


def test_no_hang_where_it_is_off_or_the_run_has_ended() -> None:
    with new_board(Limits(action=OFF)) as board:
        assert not decide(board.read(), 1e9).hangs
        board.enter(STEP, 1, at=1.0)
        assert not decide(board.read(), 1e9).hangs
    with new_board() as board:
        board.enter(ENDED, 1, at=1.0)
        assert not decide(board.read(), 1e9).hangs


def test_each_hang_is_found_once_and_stopped_time_does_not_count() -> None:
    with new_board() as board:
        board.enter(DATA, 1, completed=1, at=0.5)
        board.enter(STEP, 1, at=1.0)
        board.enter(DATA, 1, at=2.0)
        watch, reading = HangWatch(seen_at=2.0), board.read()
        assert watch.look(reading, 3.0, 1.0) is None
        # All were stopped for 100 s.
        assert watch.look(reading, 104.0, 1.0) is None
        found = [now for now in range(105, 200) if watch.look(reading, float(now), 1.0)]
        assert found == [133]
        board.enter(STEP, 2, at=200.0)
        board.enter(DATA, 2, at=201.0)
        assert watch.look(board.read(), 201.0, 1.0) is None


def test_no_false_alarm_in_10_000_times() -> None:
    """Steps, data, saves, evaluations, epochs and compilations whose durations vary as those of real programs do."""
    generator, now, spans = random.Random(38), 0.0, 0
    with new_board() as board:

        def pass_phase(phase: int, seconds: float, completed: int = 0) -> None:
            nonlocal now, spans
            board.enter(phase, spans, completed=completed, at=now)
            now += seconds
            spans += 1
            verdict = decide(board.read(), now - 1e-6)
            assert not verdict.hangs, (spans, verdict)

        pass_phase(RESTORE, 500.0)
        pass_phase(DATA, 45.0)
        pass_phase(STEP, 1500.0)
        step = 0
        while spans < 10_000:
            step += 1
            pass_phase(BETWEEN, 0.001, completed=1)
            if step % 50 == 0:
                pass_phase(BETWEEN, generator.uniform(60, 590))
            if step % 20 == 0:
                pass_phase(COPY, generator.lognormvariate(-1, 1))
                pass_phase(COMMIT, generator.lognormvariate(0, 1))
            pass_phase(DATA, 40.0 if step % 100 == 0 else generator.lognormvariate(-4, 1))
            pass_phase(STEP, 2.0 * generator.lognormvariate(0, 0.4))


@pytest.mark.parametrize("text", ["", "on", "report 5min", "report step=0s", "report step=5", "restart steps=1min", 30])
def test_refuses_other_words(text: object) -> None:
    with pytest.raises(hf.errors.UsageError, match="watchdog must be"):
        read_watchdog(text)


def test_reads_words_and_times() -> None:
    assert read_watchdog("off").action == OFF
    assert read_watchdog("report") == Limits(action=REPORT)
    expected = Limits(action=RESTART, least_seconds=120.0, first_step_seconds=3600.0)
    assert read_watchdog("restart step=2min first=1h") == expected


# Trainers that hang.

FLOOR = "report step=1s unmarked=1s first=1s"


def find_watcher(pid: int) -> int:
    """The process that watches the trainer."""
    for place in Path("/proc").glob("[0-9]*"):
        words = (place / "cmdline").read_bytes().split(b"\0") if (place / "cmdline").exists() else []
        if words[-2:-1] == [str(pid).encode()] and b"watcher" in words[4]:
            return int(place.name)
    raise AssertionError("no watcher")


def hang(how: str, directory: Path) -> str:
    """Lets a trainer hang, and returns the report; the trainer is killed, and what watches it has ended."""
    program = [sys.executable, str(PROGRAMS / "hanging_worker.py"), how, str(directory)]
    environment = os.environ | {"HOLDFAST_WATCHDOG": FLOOR}
    trainer = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    assert trainer.stderr is not None
    try:
        line = next((line for line in trainer.stderr if "no progress" in line), "")
        assert "the stacks of all threads are in" in line
        watcher = os.pidfd_open(find_watcher(trainer.pid))
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stderr.close()
    assert select.select([watcher], [], [], PATIENCE_SECONDS)[0]
    os.close(watcher)
    return (directory / "hangs" / line.strip().rpartition("/")[2]).read_text()


PLACES = {
    "data": ("waiting for data", "in __iter__"),
    "locked": ("in the program's own code", "in hang"),
    "stopped": ("in the program's own code", "stopped by a signal"),
    "sleeping": ("in the program's own code", "in hang"),
    "spinning": ("in the program's own code", "in hang"),
    "searching": ("in the program's own code", "in hang"),
    "first": ("the first step", "in hang"),
    "copy": ("copying a save", "in state_dict"),
    "commit": ("waiting for a save", "in write_slowly"),
    "leaving": ("in the program's own code", "hanging_worker.py"),
}


@pytest.mark.parametrize(
    "how", [one if one in ("data", "locked") else pytest.param(one, marks=pytest.mark.long) for one in PLACES]
)
def test_a_hang_is_found_and_its_stacks_are_written(how: str, tmp_path: Path) -> None:
    report = hang(how, tmp_path / "run")
    for text in PLACES[how]:
        assert text in report
    assert "hanging_worker.py" in report or how == "stopped"
    assert "thread " in report


@pytest.mark.long
def test_a_restore_that_hangs(tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "hanging_worker.py"), "", str(tmp_path / "run")]
    subprocess.run(program, check=True)
    assert "in load_state_dict" in hang("restore", tmp_path / "run")


def test_a_healthy_run_leaves_no_process(tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "hanging_worker.py"), "", str(tmp_path / "run")]
    environment = os.environ | {"HOLDFAST_WATCHDOG": "report"}
    ended = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    _, errors = ended.communicate()  # Until all that has its standard error has ended.
    assert ended.returncode == 0
    assert "no progress" not in errors
    assert not (tmp_path / "run" / "hangs").exists()


@pytest.mark.long
def test_a_collective_that_waits_for_a_stopped_worker(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HOLDFAST_WATCHDOG": FLOOR, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "waiting_worker.py"), str(tmp_path / "run")],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert workers[0].stderr is not None
        line = next((line for line in workers[0].stderr if "no progress of worker 0" in line), "")
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.communicate()
    report = (tmp_path / "run" / "hangs" / line.strip().rpartition("/")[2]).read_text()
    parts = dict(zip([worker.pid for worker in workers], report.split("\nprocess ")[1:], strict=True))
    assert "in all_reduce" in parts[workers[0].pid]
    assert "stopped by a signal" in parts[workers[1].pid]


UNEVEN = """
import random, sys, time, torch, holdfast
draw = random.Random(1)
class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 70
    def __getitem__(self, index):
        time.sleep(draw.uniform(0.0, 0.5))
        return torch.ones(4)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.resumable(sys.argv[1], model=model, optimizer=optimizer, save_every=5) as run:
    for _ in run.epochs(1):
        for batch in run.batches(torch.utils.data.DataLoader(Dataset())):
            time.sleep(4.0 if run.step == 0 else draw.uniform(0.0, 0.5))  # It compiles first.
            model(batch).sum().backward()
            optimizer.step()
            if run.step % 20 == 19:
                time.sleep(5.0)  # An evaluation.
            run.finish_step()
"""


@pytest.mark.long
def test_real_phases_of_uneven_length_are_not_reported(tmp_path: Path) -> None:
    """Over 200 waits for data, steps and saves; evaluations and the first step last longer than the limit."""
    (tmp_path / "train.py").write_text(UNEVEN)
    ended = subprocess.run(
        [sys.executable, tmp_path / "train.py", tmp_path / "run"],
        env=os.environ | {"HOLDFAST_WATCHDOG": "report step=2s"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "no progress" not in ended.stderr
    assert not (tmp_path / "run" / "hangs").exists()
