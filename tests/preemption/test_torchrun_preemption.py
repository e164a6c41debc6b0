"""Training with collectives of torch that is asked to leave, or of which a worker fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import preloaded
from holdfast.testing.processes import Workers, python
from places import PROGRAMS
from whole_runs import steps_of

pytest.importorskip("torch")

TRAINING = PROGRAMS / "stopping_training.py"
PATIENCE_SECONDS = 120.0


def start_torchrun(workers: Workers, directory: Path, total: int, restarts: int, what: str = "-") -> int:
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command = python("-m", "torch.distributed.run", *options, TRAINING, directory, str(total), what)
    # The agent is forked; it starts the workers as it does for users, so that these have their own signal handlers.
    return workers.start(command, {"OMP_NUM_THREADS": "1"}, preloaded.TrainingPopen)


def start_pair(workers: Workers, directory: Path, what: str, world_size: int = 2, total: int = 100_000) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(world_size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        told = place | {"OMP_NUM_THREADS": "1"}
        workers.start(python(TRAINING, directory, str(total), what), told, preloaded.TrainingPopen)


def found(records: list[dict[str, Any]], key: str) -> dict[int, Any]:
    return {record["rank"]: record[key] for record in records if key in record}


def wait_until_watching(process: int) -> None:
    """Waits until a worker watches the process of its neighbor, which it does from its second look at the store on."""
    end_at = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end_at:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):
                if "pidfd" in str(descriptor.readlink()):
                    return
        time.sleep(0.01)
    raise TimeoutError(f"process {process} watches no other")


@pytest.mark.slow
def test_worker_asked_to_leave_takes_other_along_and_both_restart(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "untouched", "-", total=60)
        assert workers.wait(PATIENCE_SECONDS) == [0, 0], workers.report(0)
        asked = start_torchrun(workers, tmp_path / "asked", 60, 1, "asked")
        assert workers.wait(PATIENCE_SECONDS, [asked]) == [0], workers.report(asked)
        left = [step for step in steps_of(tmp_path / "asked") if step != 60]
        assert len(left) == 1
        assert workers.errors(asked).count(f"step {left[0]} is saved; leaving with exit code 42") == 2
        begun = [record["begun"] for record in workers.records(asked) if "begun" in record]
        assert sorted(begun) == [0, 0, left[0], left[0]]
        untouched = found([*workers.records(0), *workers.records(1)], "ended")
        assert found(workers.records(asked), "ended") == untouched


@pytest.mark.slow
def test_a_killed_worker_that_hosts_the_store_is_named(tmp_path: Path) -> None:
    """Without torchrun's agent the store is gone with rank 0. The other worker sees on this machine which one died."""
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "run", "-")
        workers.wait_said(1, "reached", PATIENCE_SECONDS)
        wait_until_watching(found(workers.records(1), "process")[1])
        workers.kill(0)
        assert workers.wait(PATIENCE_SECONDS, [1]) == [1], workers.report(1)
        assert "rank 0 has died: its process has ended" in workers.errors(1), workers.report(1)


@pytest.mark.slow
def test_what_torchrun_is_asked_it_passes_on_and_all_leave(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        number = start_torchrun(workers, tmp_path / "run", 100_000, 3)
        workers.wait_said(number, "reached", PATIENCE_SECONDS)
        workers.kill(number, signal.SIGTERM)
        assert workers.wait(PATIENCE_SECONDS, [number]) != [0]
        (step,) = steps_of(tmp_path / "run")
        assert workers.errors(number).count(f"step {step} is saved; leaving with exit code 42") == 2
        # It has started nobody again.
        assert len([record for record in workers.records(number) if "begun" in record]) == 2


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_other_which_says_who_has_died(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        number = start_torchrun(workers, tmp_path / "run", 100_000, 0)
        workers.wait_said(number, "reached", PATIENCE_SECONDS)
        process = found(workers.records(number), "process")[1]
        os.kill(process, signal.SIGKILL)
        assert workers.wait(PATIENCE_SECONDS, [number]) != [0]
        errors = workers.errors(number)
        assert re.search(r"rank 1 on \S+ has died: its process has ended", errors), workers.report(number)
        # As a rule torchrun has asked it to leave by then, and it says what a restart does.
        assert "could NOT be saved" not in errors
        assert (
            "leaving with exit code" not in errors
            or "A restart starts from the beginning: there is no checkpoint" in errors
        )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fails", "lingers"])
def test_worker_in_a_collective_is_freed_and_raises_the_cause(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If it is not freed, the stacks say where it is.
    monkeypatch.setenv("HOLDFAST_WATCHDOG", "report step=40s unmarked=40s first=40s")
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "run", what)
        assert workers.wait_said(1, "error", PATIENCE_SECONDS) == "ValueError"
        try:
            assert workers.wait(PATIENCE_SECONDS, [0]) == [1]
        except AssertionError as error:
            stacks = "\n".join(path.read_text() for path in (tmp_path / "run" / "hangs").glob("*.txt"))
            raise AssertionError(f"{error}\n{stacks}") from None
        assert "ValueError: the loss is no number" in workers.errors(0), workers.report(0)
        assert "raise ValueError" in workers.errors(0)
        if what == "fails":
            assert found(workers.records(0), "error") == {0: "PeerError"}, workers.report(0)
        else:
            # The other one's connections are still there, and Gloo waits for them whatever is aborted.
            assert "This worker was in:" in workers.errors(0)
            assert "dist.all_reduce(gradient)" in workers.errors(0)


@pytest.mark.slow
def test_worker_in_collective_with_one_that_left_loop_is_ended(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "run", "breaks")
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [1, 1], workers.report(0)
        # The one that has left hears it too, and waits no longer for a save to which the other one does not come.
        text = "rank 1 on {}: AbsentError: its training ended after step 6, but another worker is still in a collective"
        for number in (0, 1):
            assert re.search(text.format(r"\S+"), workers.errors(number)), workers.report(number)


@pytest.mark.slow
def test_worker_that_left_its_loop_is_named_by_all(tmp_path: Path) -> None:
    """Those that send to each other have begun more collectives: the third worker's count does not tell it anything."""
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "run", "sends", 3)
        assert workers.wait(PATIENCE_SECONDS, [0, 1, 2]) == [1, 1, 1], workers.report(0)
        # The one that has left hears it from the others, in place of waiting for a save that they do not come to.
        for number in range(3):
            text = "failed: rank 1 on "
            lines = [line for line in workers.errors(number).splitlines() if line.startswith("holdfast: training of")]
            assert [text in line for line in lines] == [True] * (number == 0), workers.report(number)
            assert "its training ended after step 6" in workers.errors(number)


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_leaves_the_same_step_much_later_is_waited_for(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_pair(workers, tmp_path / "run", "stops")
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [0, 0], workers.report(0)
        assert steps_of(tmp_path / "run") == [6]
