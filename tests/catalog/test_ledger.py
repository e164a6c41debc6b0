"""Where the time of a run went: from its events alone, and of real runs that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

import preloaded
from command_line import call, call_json
from holdfast.catalog import StoredRun
from holdfast.catalog.ledger import sum_up
from holdfast.events import Clocked, Committed, PartsWritten
from holdfast.report.facts import read_facts
from holdfast.report.page import render_page
from holdfast.storage import LocalStorage
from holdfast.testing.processes import Workers, python
from jobs import HOST, environment, find_port
from patience import PATIENCE_SECONDS


def clocked(begun: float, at: float, first: int, step: int, *, repeated: int = 0, is_last: bool = False) -> Clocked:
    spent = at - begun - 4.0
    return Clocked(
        at_unix_seconds=at,
        begun_at_unix_seconds=begun,
        setup_seconds=2.0,
        restore_seconds=1.0,
        train_seconds=spent,
        data_seconds=0.0,
        save_seconds=1.0,
        leave_seconds=0.0,
        first_step=first,
        step=step,
        repeated_steps=repeated,
        is_last=is_last,
    )


def committed(at: float, generation: int) -> Committed:
    return Committed(
        at_unix_seconds=at,
        step=1,
        generation=generation,
        blocked_seconds=0.5,
        background_seconds=1.0,
        size_bytes=1,
        training_saved_seconds=1.0,
    )


def test_times_sum_to_those_from_the_first_start_to_the_last_record() -> None:
    events = [
        committed(10.0, 1),
        clocked(0.0, 14.0, 0, 10),
        committed(20.0, 1),
        # It was emitted before, and written later, by another thread.
        clocked(0.0, 23.0, 0, 20),
        # Of the 20 steps, step 20 was saved; the process died after step 25, and 5 s later the next one began.
        clocked(0.0, 24.0, 0, 20),
        committed(60.0, 2),
        clocked(40.0, 64.0, 20, 40, repeated=5),
        clocked(40.0, 74.0, 20, 50, repeated=5, is_last=True),
        clocked(100.0, 114.0, 50, 60),
    ]
    times = sum_up(events)
    first, second, third = times.starts
    assert (first.train, first.lost, first.away) == (20.0, 0.0, 0.0)
    assert (second.lost, second.away, second.train, second.is_whole) == (5.0, 11.0, 30.0, True)
    assert [one.end for one in times.starts] == ["died", "left", "died, or goes on"]
    assert (third.lost, third.away) == (0.0, 26.0)
    assert sum(times.shares) == 114.0
    assert times.save_seconds == 0.5
    assert times.interval_seconds == 10.0
    assert times.return_seconds == 14.0


def parts(**slowest_first: float) -> PartsWritten:
    seconds = tuple(slowest_first.values())
    ranks = tuple(int(name[1:]) for name in slowest_first)
    return PartsWritten(
        step=1,
        generation=1,
        ranks=ranks,
        blocked_seconds=(0.5,) * len(ranks),
        background_seconds=seconds,
        size_bytes=(100,) * len(ranks),
    )


def test_the_slowest_of_several_workers_is_named() -> None:
    times = sum_up([parts(r2=9.0, r0=2.0, r1=1.0), parts(r2=7.0, r1=3.0, r0=2.0), parts(r1=8.0, r2=5.0, r0=2.0)])
    assert [(one.rank, one.saves, one.last) for one in times.workers] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert [one.background_seconds for one in times.workers] == [2.0, 3.0, 7.0]
    assert [one.slowest_seconds for one in times.workers] == [2.0, 8.0, 9.0]
    assert times.describe_slowest() == (
        "Rank 2 is the slowest: its part of a save is durable after 7 s, that of another worker after 2.5 s. It was "
        "the last in 2 of 3 saves."
    )
    assert sum_up([parts(r0=1.0)]).describe_slowest() == ""


TWO_WORKERS = """
import sys, numpy as np, holdfast
with holdfast.resumable(sys.argv[1], w=np.zeros(9), own=holdfast.PerWorker({"x": np.zeros(9)}), save_every=5) as run:
    for step in run.steps(20):
        pass
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_the_times_and_sizes_of_each_worker_are_in_stats_and_report(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        port = find_port()
        for rank in range(2):
            command = python("-c", TWO_WORKERS, str(tmp_path / "run"))
            workers.start(command, environment(rank, 2, port, agent=True), preloaded.TrainingPopen)
        workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [0, 0], workers.report(0) + workers.report(1)
    run = StoredRun(LocalStorage(tmp_path / "run"))
    saves = [event for event in run.read_journal() if isinstance(event, PartsWritten)]
    assert [save.step for save in saves] == [5, 10, 15, 20]
    manifest = run.step(max(run.look().living)).manifest()
    sizes = [worker.data_bytes + worker.index_bytes for worker in manifest.workers]
    for save in saves:
        assert sorted(save.ranks) == [0, 1]
        assert list(save.background_seconds) == sorted(save.background_seconds, reverse=True)
        assert min(save.background_seconds) > 0
        assert min(save.blocked_seconds) > 0
    assert dict(zip(saves[-1].ranks, saves[-1].size_bytes, strict=True)) == dict(enumerate(sizes))
    words = [sys.executable, "-m", "holdfast", "stats", str(tmp_path / "run"), "--json"]
    shown = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["workers"]
    assert [(one["rank"], one["saves"]) for one in shown] == [(0, 4), (1, 4)]
    assert sum(one["last"] for one in shown) == 4
    assert "rank 1 is durable after " in render_page(read_facts(run.storage, "run"))


def test_what_the_first_step_takes_longer_is_set_up() -> None:
    event = msgspec.structs.replace(
        clocked(0.0, 34.0, 0, 21), first_step_seconds=10.0
    )  # 30 s in 21 steps, 20 after it.
    (start,) = sum_up([event]).starts
    assert (start.setup, start.train) == (11.0, 21.0)
    assert sum(sum_up([event]).shares) == 34.0
    # And the pace at which work is done twice is that of the others.
    again = msgspec.structs.replace(clocked(40.0, 74.0, 16, 37, repeated=5), first_step_seconds=10.0)
    assert sum_up([event, again]).starts[1].lost == 5.0


def test_steps_that_were_recorded_and_lost_do_not_count_twice() -> None:
    """A record comes when a save is committed, which may be many steps after it was asked for."""
    times = sum_up([clocked(0.0, 24.0, 0, 20), clocked(40.0, 64.0, 10, 30, repeated=15)])
    second = times.starts[1]
    # Ten of the steps are in the record of the first start, five came after it.
    assert (second.lost, second.train, second.away) == (15.0, 10.0, 11.0)
    assert sum(times.shares) == 64.0


def test_no_time_is_negative_if_clocks_go_back_or_starts_overlap() -> None:
    times = sum_up([clocked(0.0, 24.0, 0, 20), clocked(10.0, 20.0, 5, 6, repeated=100)])
    assert all(value >= 0 for value in times.shares)
    assert sum_up([]).starts == ()
    assert sum_up([committed(1.0, 1)]).best_interval_seconds is not None


TRAIN = """
import os, sys, time
import numpy as np
import holdfast
with holdfast.resumable("run", w=np.zeros(8), save_every=20, quiet=True) as run:
    for step, _ in zip(run.steps(100), run.batches(range(1000))):
        time.sleep(0.01)
        if step == int(sys.argv[1]):
            os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_times_of_real_starts_sum_to_the_time_that_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    began_at = time.time()
    for step, number in ((50, signal.SIGKILL), (75, signal.SIGTERM), (-1, 0)):
        subprocess.run([sys.executable, "train.py", str(step), str(int(number))], check=False)
    times = sum_up(StoredRun(LocalStorage(tmp_path / "run")).read_journal(Clocked, Committed))
    first, second, third = times.starts
    assert began_at <= first.begun_at_unix_seconds + 0.02  # It is known in hundredths.
    assert sum(times.shares) == pytest.approx(third.ended_at_unix_seconds - first.begun_at_unix_seconds, abs=0.001)
    assert (first.is_whole, second.is_whole, third.is_whole) == (False, True, True)
    assert (second.first_step, second.step, second.repeated_steps) == (40, 76, 10)
    assert second.lost > 0
    assert (third.first_step, third.step, third.repeated_steps) == (76, 100, 0)
    assert third.train >= 0.01 * 24
    assert min(one.setup for one in times.starts) > 0.05
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "stats", "run", "--json"], capture_output=True, text=True, check=True
    )
    document = json.loads(ended.stdout)
    assert document["wall_seconds"] == pytest.approx(sum(document["seconds"].values()))
    assert [one["step"] for one in document["starts"]] == [first.step, 76, 100]


EVALUATE = """
import time, holdfast
with holdfast.resumable("run", state=[0], save_every=5, quiet=True) as run:
    for step in run.steps(10):
        if step == 4:
            with run.checkpointable():
                for _ in zip(range(3), run.batches(range(9))):
                    time.sleep(0.1)
"""


def test_an_evaluation_in_a_block_does_not_count_as_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(EVALUATE)
    monkeypatch.setenv("HOLDFAST_WATCHDOG", "report")  # It is off in tests, and phases with it.
    subprocess.run([sys.executable, "train.py"], check=True)
    (start,) = sum_up(StoredRun(LocalStorage(tmp_path / "run")).read_journal(Clocked)).starts
    assert start.evaluate >= 0.3
    assert sum(sum_up(StoredRun(LocalStorage(tmp_path / "run")).read_journal(Clocked)).shares) == pytest.approx(
        start.ended_at_unix_seconds - start.begun_at_unix_seconds, abs=0.001
    )


FAILS = """
import holdfast
with holdfast.resumable("run", state={}, save_every=100) as run:
    for step in run.steps(20):
        if step == 3:
            raise ValueError("<b>loss</b> is odd\\nand more")
"""


def test_starts_that_failed_before_their_first_save_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
    times = sum_up(StoredRun(LocalStorage(tmp_path / "run")).read_journal())
    assert [(one.step, one.is_whole, one.end) for one in times.starts] == [
        (3, False, "failed: ValueError: <b>loss</b> is odd")
    ] * 2
    assert "failed: ValueError: <b>loss</b> is odd" in call("stats", "run", "--starts").stdout
    page = Path(call_json("report", "run", "-o", "page.html")["file"]).read_text()
    assert "failed: ValueError: &lt;b&gt;loss&lt;/b&gt; is odd" in page
    refusal = call("list", "run").stderr
    assert "A job has started there and has not saved yet" in refusal


def test_a_run_without_times_says_so(tmp_path: Path) -> None:
    import numpy as np

    import holdfast as hf

    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(w=np.zeros(3))) as manager:
        manager.save(1)
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "stats", tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3
    assert "has recorded no times" in ended.stderr


def test_the_second_run_of_a_process_does_not_count_its_imports_again(tmp_path: Path) -> None:
    import numpy as np

    import holdfast as hf

    for name in ("one", "other"):
        with hf.resumable(tmp_path / name, w=np.zeros(3), save_every=5, quiet=True, preemption="off") as run:
            for _ in run.steps(10):
                pass
    ends, begins = [], []
    for name in ("one", "other"):
        (start,) = sum_up(StoredRun(LocalStorage(tmp_path / name)).read_journal(Clocked)).starts
        ends.append(start.ended_at_unix_seconds)
        begins.append(start.begun_at_unix_seconds)
    assert begins[1] >= ends[0]
