"""Programs that leave the loop in their own way: by an exit, or as a generator that nobody asks for more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import run_file
from holdfast.errors import StorageFullError
from holdfast.storage import LocalStorage


def check_time(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


EXITS: dict[str, Callable[[], object]] = {
    "sys.exit()": sys.exit,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(None)": lambda: sys.exit(None),
    "a function": lambda: check_time(0),
    "the code of a restart": lambda: check_time(42),
}


def steps_of(run: Path) -> tuple[int, ...]:
    return hf.CheckpointManager(run, hf.Checkpoint(a=np.zeros(1))).steps()


@pytest.mark.parametrize("how", EXITS)
def test_an_exit_saves_what_return_would_save(tmp_path: Path, how: str) -> None:
    def train(run: Path, leave: Callable[[], object] | None) -> None:
        state = {"w": np.zeros(3)}
        with hf.resumable(run, state=state, save_every=hf.Steps(5)) as training:
            for step in training.steps(30):
                state["w"] += 1
                if step == 7:
                    if leave is None:
                        return
                    leave()

    train(tmp_path / "return", None)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "exit", EXITS[how])
    assert left.value.code in (None, 0, 42)
    assert steps_of(tmp_path / "exit") == steps_of(tmp_path / "return") == (5, 8)


def test_an_exit_between_the_steps_of_a_loop_of_ones_own_saves(tmp_path: Path) -> None:
    def train() -> None:
        state = {"w": np.zeros(3)}
        with hf.resumable(tmp_path / "run", state=state, save_every=hf.Steps(50)) as run:
            while True:
                state["w"] += 1
                run.finish_step()
                if run.step == 7:
                    check_time(0)

    with pytest.raises(SystemExit):
        train()
    assert steps_of(tmp_path / "run") == (7,)


def test_an_exit_from_a_handlers_loop_saves_what_is_due(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    manager = hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(state=state), save_every=hf.Steps(7))

    def train_step() -> None:
        state["w"] += 1

    def train() -> None:
        with manager, hf.PreemptionCheckpointHandler(manager) as handler:
            while True:
                handler.run(train_step)
                if handler.total_run_calls == 7:
                    sys.exit()

    with pytest.raises(SystemExit):
        train()
    assert steps_of(tmp_path / "run") == (7,)


def train_until(run: Path, leave: Callable[[], object], **options: Any) -> None:
    state = {"w": np.zeros(3)}
    with hf.resumable(run, state=state, save_every=hf.Steps(5), **options) as training:
        for step in training.steps(30):
            state["w"] += 1
            if step == 7:
                leave()
            state["w"] += 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exit_from_a_signal_handler_saves_nothing_and_says_so(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come in the middle of a step."""

    def take(*_: object) -> None:
        sys.exit(0)

    def leave() -> None:
        if when == "after":
            signal.signal(signal.SIGUSR1, take)
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, take)
    try:
        with pytest.raises(SystemExit) as left:
            train_until(tmp_path / "run", leave)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert left.value.code == 0
    assert steps_of(tmp_path / "run") == (5,)
    assert "exited in a signal handler, and nothing was saved: the 2 steps since step 5 are lost" in caplog.text


def test_an_exit_with_an_error_code_saves_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        train_until(tmp_path / "run", lambda: sys.exit("the loss is NaN"))
    assert left.value.code == "the loss is NaN"
    assert steps_of(tmp_path / "run") == (5,)
    assert "the 2 steps since step 5 are lost, and a restart trains from step 5" in caplog.text


class Full(LocalStorage):
    """A storage that has no room."""

    def create(self, path: str, size_bytes: int) -> Any:
        raise StorageFullError("no room", path=path)


def test_an_exit_whose_save_fails_has_the_code_of_a_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        with hf.resumable(Full(tmp_path / "run"), a=np.zeros(3)) as run:
            for _ in run.steps(9):
                sys.exit(0)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 74
    assert "step 1 was not saved: no room" in capsys.readouterr().err


def yield_steps(run: Path) -> Generator[int]:
    state = {"w": np.zeros(3)}
    with hf.resumable(run, state=state, save_every=hf.Steps(5)) as training:
        for step in training.steps(30):
            state["w"] += 1
            yield step


def test_a_training_generator_that_is_closed_saves(tmp_path: Path) -> None:
    with contextlib.closing(yield_steps(tmp_path / "run")) as steps:
        for step in steps:
            if step == 7:
                break
    assert steps_of(tmp_path / "run") == (5, 8)


@pytest.mark.parametrize(
    ("how", "code", "saved"),
    [("forgotten", 0, (5, 8)), ("exit", 0, (5, 8)), ("error", 1, (5,)), ("by hand", 0, (5, 8)), ("thread", 0, (5,))],
)
def test_a_run_that_is_open_at_the_programs_end(tmp_path: Path, how: str, code: int, saved: tuple[int, ...]) -> None:
    done = run_file("left_generators", how, tmp_path / "run")
    assert done.returncode == code, done.stderr
    assert steps_of(tmp_path / "run") == saved
    # A daemon thread may be in the midst of a step.
    assert ("the program exited while another thread trained, and nothing was saved" in done.stderr) == (
        how == "thread"
    )


def test_ctrl_c_in_asyncio_saves(tmp_path: Path) -> None:
    """Its handler would cancel the task in the middle of a step."""
    state = {"w": np.zeros(3)}

    async def train() -> None:
        with hf.resumable(tmp_path / "run", state=state, save_every=hf.Steps(50)) as run:
            for step in run.steps(30):
                state["w"] += 1
                await asyncio.sleep(0)
                if step == 7:
                    signal.raise_signal(signal.SIGINT)
                    await asyncio.sleep(0)

    with pytest.raises(SystemExit) as left:
        asyncio.run(train())
    assert left.value.code == 130
    assert steps_of(tmp_path / "run") == (8,)


def test_a_run_in_another_thread_names_the_way_to_stop_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    stop.set()
    leaving = hf.TerminationConfig(termination_watcher_fn=stop.is_set, exit_fn=lambda: None)

    def train() -> None:
        with hf.resumable(tmp_path / "run", state={"w": 0}, preemption=leaving) as run:
            for _ in run.steps(2):
                pass

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "TerminationConfig(termination_watcher_fn=stop.is_set)" in caplog.text


def test_an_exit_inside_of_an_optimizers_step_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def train() -> None:
        with hf.resumable(tmp_path / "run", weight=weight, optimizer=optimizer, save_every=hf.Steps(5)) as run:
            for step in run.steps(30):
                weight.grad = torch.ones(3)
                if step == 7:
                    optimizer.register_step_post_hook(lambda *_: sys.exit(0))
                optimizer.step()

    with pytest.raises(SystemExit):
        train()
    assert steps_of(tmp_path / "run") == (5,)
    assert "exited inside of torch.optim.optimizer, and nothing was saved: the 2 steps since step 5" in caplog.text


def test_a_canceled_task_says_which_steps_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here the program's main coroutine returns while another task trains: nothing is raised that a person sees."""

    async def train() -> None:
        with hf.resumable(tmp_path, a=np.zeros(2), save_every=hf.Steps(5)) as run:
            for step in run.steps(1000):
                if step == 7:
                    reached.set()
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(train())
        await reached.wait()
        assert not task.done()

    reached = asyncio.Event()
    asyncio.run(main())
    assert "the program exited as its task was canceled, and nothing was saved:" in caplog.text
    assert "a restart trains from step 5" in caplog.text
    assert steps_of(tmp_path)[-1] == 5
