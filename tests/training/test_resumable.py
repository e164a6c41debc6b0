"""`resumable`: the loop goes on where the last process stopped, however it stopped."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
import preloaded
from command_line import run_file, run_python
from faulty import FullStorage
from holdfast.catalog import StoredRun
from holdfast.errors import (
    MismatchError,
    SaveFailedError,
    StorageError,
    StorageFullError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.events import Event, Failed, Retained, Warned
from holdfast.storage import LocalStorage, open_storage
from mounts import fill, mounted
from patience import PATIENCE_SECONDS, killed_after, read_line
from places import PROGRAMS
from whole_runs import steps_of


def train(place: Any, total: int, *, fail_at: int | None = None, break_at: int | None = None, **options: Any) -> Any:
    """Trains a model whose value says how many steps it has had; gives the steps that were done."""
    state = {"value": np.zeros(10)}
    options = {"save_every": hf.Steps(3), "keep": hf.All(), **options}
    done: list[int] = []
    with hf.resumable(place, state=state, **options) as run:
        assert state["value"].tolist() == [run.step] * 10
        for step in run.steps(total):
            state["value"] += 1
            if step == fail_at:
                raise ZeroDivisionError
            done.append(step)
            if step == break_at:
                break
    return done


def test_a_run_saves_by_policy_and_at_the_end(tmp_path: Path) -> None:
    assert train(tmp_path, 7) == list(range(7))
    assert steps_of(tmp_path) == [3, 6, 7]


def test_failed_run_resumes_from_its_last_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 10, fail_at=4)
    assert steps_of(tmp_path) == [3], "the state in the middle of a step is not saved"
    assert train(tmp_path, 10) == list(range(3, 10))
    assert steps_of(tmp_path) == [3, 6, 9, 10]


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    train(tmp_path, 5)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert train(tmp_path, 5) == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("way", ["resumable", "manager"])
def test_the_step_that_a_run_resumed_from_goes_with_the_policy_at_its_end(tmp_path: Path, way: str) -> None:
    train(tmp_path, 6)
    kept: list[list[int]] = []

    def note(event: Event) -> None:
        if isinstance(event, Retained):
            kept.append(sorted(event.kept))  # On the disk the next save may be committed by now.

    options: dict[str, Any] = {"save_every": hf.Steps(3), "keep": hf.Latest(2), "sinks": [note]}
    if way == "resumable":
        assert train(tmp_path, 15, **options) == list(range(6, 15))
    else:
        with hf.CheckpointManager(tmp_path, hf.Checkpoint(state={"value": np.zeros(10)}), **options) as manager:
            manager.restore()
            for step in (9, 12, 15):
                manager.save(step)
    assert kept == [[6, 9], [6, 9, 12], [6, 12, 15], [12, 15]]
    assert steps_of(tmp_path) == [12, 15]


def test_a_run_that_ends_with_an_error_keeps_the_step_that_it_resumed_from(tmp_path: Path) -> None:
    train(tmp_path, 6)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 15, fail_at=13, save_every=hf.Steps(3), keep=hf.Latest(1))
    assert steps_of(tmp_path) == [6, 12]


def test_the_limit_is_that_of_the_new_run(tmp_path: Path) -> None:
    train(tmp_path, 5)
    assert train(tmp_path, 8) == [5, 6, 7]
    assert train(tmp_path, 6) == []


def test_break_and_stop_end_the_run_and_save(tmp_path: Path) -> None:
    assert train(tmp_path, 10, break_at=4) == [0, 1, 2, 3, 4]
    assert steps_of(tmp_path)[-1] == 5
    state = {"value": np.full(10, 5.0)}
    with hf.resumable(tmp_path, state=state, keep=hf.All()) as run:
        for _ in run.steps(10):
            state["value"] += 1
            run.stop()
    assert steps_of(tmp_path)[-1] == 6


def test_two_loops_of_one_run_follow_each_other(tmp_path: Path) -> None:
    state = {"value": np.zeros(1)}
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(100)) as run:
        assert list(run.steps(2)) == [0, 1]
        assert list(run.steps(4)) == [2, 3]
    assert steps_of(tmp_path) == [2, 4]


def test_figures_are_kept_with_the_save_that_follows_them(tmp_path: Path) -> None:
    state = {"value": np.zeros(1)}
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(2), keep=hf.All()) as run:
        for step in run.steps(6):
            if step in (1, 4):
                run.report(loss=float(step))
        storage = LocalStorage(tmp_path)
        run.manager.wait(60)
        names = StoredRun(storage).look().living
        assert [StoredRun(storage).step(name).manifest().metrics for name in names] == [
            {"loss": 1.0},
            {},
            {"loss": 4.0},
        ]


def test_a_save_by_hand_within_a_step_counts_it_as_complete(tmp_path: Path) -> None:
    state = {"value": np.zeros(1)}
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(100), keep=hf.All()) as run:
        assert run.save() is not None
        for step in run.steps(4):
            state["value"] += 1
            if step == 1:
                assert run.save() is not None
                assert run.save() is None
    assert steps_of(tmp_path) == [0, 2, 4]


def test_failed_saves_end_the_loop_unless_tolerated() -> None:
    with pytest.raises(SaveFailedError, match="no room"):
        train(FullStorage(), 20)
    events: list[Event] = []
    storage = FullStorage()

    def make_room(event: Event) -> None:
        events.append(event)
        if sum(isinstance(event, Failed) for event in events) == 2:
            storage.is_full = False

    assert train(storage, 20, failures_allowed=3, sinks=[make_room]) == list(range(20))
    assert steps_of(storage)[-1] == 20


def test_a_run_that_could_not_keep_its_end_raises() -> None:
    with pytest.raises(SaveFailedError):
        train(FullStorage(), 2, save_every=hf.Steps(100), failures_allowed=9)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no objects were given to save"):
        hf.resumable(tmp_path)
    with pytest.raises(UsageError):
        hf.resumable(tmp_path, a=1, threads=0)
    train(tmp_path, 2)
    with pytest.raises(MismatchError), hf.resumable(tmp_path, other={"value": np.zeros(10)}):
        pass
    with hf.resumable(tmp_path, other=1, strict=False) as run:
        assert run.step == 2


def test_a_restore_that_is_not_strict_names_a_few_of_what_it_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hf.resumable(tmp_path, model=np.zeros(2), old=hf.RNG()) as run:
        list(run.steps(1))
    new: dict[str, Any] = {name: np.zeros(2) for name in ("one", "two", "three", "four")}
    for _ in range(2):
        with hf.resumable(tmp_path, model=np.zeros(3), **new, strict=False) as run:
            list(run.steps(2))
    told = [text.partition("strict=False: ")[2] for text in caplog.messages if "strict=False" in text]
    # The second time there is nothing to tell.
    assert told == ["not restored: one, two, three (2 more); in the checkpoint only: old"]


def test_run_that_starts_over_begins_at_step_0_and_is_resumed(tmp_path: Path) -> None:
    train(tmp_path, 4)
    assert train(tmp_path, 2, begin_anew=True) == [0, 1]
    assert steps_of(tmp_path) == [2]
    assert train(tmp_path, 3) == [2]


def test_the_users_handler_of_interrupts_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    train(tmp_path, 2)
    assert signal.getsignal(signal.SIGINT) is before


def start(directory: Path, mode: str) -> subprocess.Popen[str]:
    program = preloaded.Popen(
        [sys.executable, PROGRAMS / "resumable_runs.py", mode, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert read_line(program) == "ready\n"
    return program


def end(program: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = program.communicate(timeout=60)
    return program.returncode, errors


def wait_for_line(program: subprocess.Popen[str], text: str) -> None:
    assert program.stderr is not None
    with killed_after(PATIENCE_SECONDS, program):
        assert any(text in line for line in program.stderr), f"it ended without a word of {text!r}"


def test_ctrl_c_finishes_the_step_saves_and_leaves(tmp_path: Path) -> None:
    program = start(tmp_path, "once")
    program.send_signal(signal.SIGINT)
    wait_for_line(program, "finishing this step, then saving and exiting")
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    code, errors = end(program)
    assert code == 130
    assert "step 6 is saved; leaving" in errors
    assert "Traceback" not in errors
    assert steps_of(tmp_path) == [6]


@pytest.mark.parametrize("mode", ["twice", "held"])
def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, mode: str) -> None:
    program = start(tmp_path, mode)
    program.send_signal(signal.SIGINT)
    wait_for_line(program, "finishing this step, then saving and exiting")
    if mode == "held":
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        assert read_line(program) == "held\n"
    program.send_signal(signal.SIGINT)
    code, errors = end(program)
    assert code in (130, -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors
    assert steps_of(tmp_path) == []


def test_a_killed_run_comes_back(tmp_path: Path) -> None:
    train(tmp_path, 3)
    assert run_file("resumable_runs", "kill in step", tmp_path).returncode == -signal.SIGKILL
    assert train(tmp_path, 8) == [3, 4, 5, 6, 7]


def test_a_loop_over_epochs_counts_its_own_steps(tmp_path: Path) -> None:
    def train_epochs(stop_at: int | None) -> list[tuple[int, list[int]]]:
        sampler = hf.ResumableSampler(10, batch_size=4, seed=3)
        done: list[tuple[int, list[int]]] = []
        with hf.resumable(tmp_path, sampler=sampler, save_every=hf.Steps(1), keep=hf.All()) as run:
            for epoch in sampler.epochs(3):
                for batch in sampler.batches(sampler):
                    done.append((epoch, batch))
                    run.finish_step()
                    if run.step == stop_at:
                        return done
        return done

    first = train_epochs(5)
    rest = train_epochs(None)
    assert len(first) == 5
    assert [epoch for epoch, _ in first + rest] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for epoch in range(3):
        seen = [index for number, batch in first + rest if number == epoch for index in batch]
        assert sorted(seen) == list(range(10))
    assert steps_of(tmp_path) == list(range(1, 10))


def test_misspelt_option_is_not_taken_for_an_object(tmp_path: Path) -> None:
    misspelt = {
        "save_evry": "save_every",
        "kep": "keep",
        "begin_anw": "begin_anew",
        "thread": "threads",
        "num_threads": "threads",
        "failure_allowed": "failures_allowed",
        "checkpoint_every": "save_every",
        "interval": "save_every",
        "keep_latest": "keep",
        "max_to_keep": "keep",
        "timeout": "timeout_seconds",
        "save_steps": "save_every",
        "latest": "keep=holdfast.Latest(1)",
        "best": 'keep=holdfast.Best("val_loss")',
        "monitor": 'keep=holdfast.Best("val_loss")',
    }
    for name, meant in misspelt.items():
        value = "val_loss" if "Best" in meant else 1
        objects: Any = {"a": np.zeros(3), name: value}
        text = re.escape(f"{name} is not an option of resumable; did you mean {meant}")
        with pytest.raises(UsageError, match=text):
            hf.resumable(tmp_path, **objects)
        assert hf.resumable(tmp_path, hf.Checkpoint(**objects)).checkpoint[name] == value


def test_an_object_with_the_name_of_an_option_is_kept_in_a_checkpoint(tmp_path: Path) -> None:
    names = [*(hf.resumable.__kwdefaults__ or ()), "directory"]
    for value in ({"a": 1}, torch.nn.Linear(1, 1), np.zeros(3)):
        for name in names[:-1]:
            objects: Any = {"epoch": 0, name: value}
            with pytest.raises(
                UsageError, match=f"^{name} is an option of resumable.*{type(value).__name__}"
            ) as refused:
                hf.resumable(tmp_path, **objects)
            assert f"resumable(directory, Checkpoint({name}=..., ...))" in str(refused.value)
    checkpoint = hf.Checkpoint(**{name: number for number, name in enumerate(names)})
    with hf.resumable(tmp_path, checkpoint) as run:
        assert run.checkpoint is checkpoint
        for _ in run.steps(1):
            checkpoint.threads = -1
    again = hf.Checkpoint(**dict.fromkeys(names))
    with hf.resumable(tmp_path, again):
        assert list(again.objects.values()) == [-1 if name == "threads" else n for n, name in enumerate(names)]
    given: Any
    for given in (
        lambda: hf.resumable(tmp_path, checkpoint, model=1),
        lambda: hf.resumable(tmp_path, checkpoint=checkpoint),
        lambda: hf.resumable(checkpoint, tmp_path),  # type: ignore[arg-type]
        lambda: hf.resumable(tmp_path, hf.Checkpoint()),
        lambda: hf.resumable(tmp_path, a=1, sinks=print),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            UsageError, match=r"Checkpoint|no objects were given to save|sinks must be a list of functions"
        ):
            given()


def test_what_cannot_be_meant_is_refused_with_what_to_write(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = hf.ResumableDataLoader(torch.arange(20.0), batch_size=4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"save_every": hf.Steps}, r"save_every must be a policy, got the class.*\n.*holdfast.Steps\(500\)"),
        ({"keep": hf.Best}, r'keep must be a policy, got the class Best.*\n.*holdfast.Best\("val_loss"\)'),
        ({"keep": 0}, r'keep must be a policy such as .* or text such as "7 days" or "all", got int 0\n.*Latest'),
        ({"save_every": "500"}, r'such as 500, or text such as "10min".*got str .500.\n.*Write 500 .*or "500 s"'),
        ({"save_every": True}, r"got bool True\n.*The policies are Steps"),
        ({"grace": "30"}, r'grace must be a number of seconds such as 600, or .* "10min".*\n.*Write the unit: "30s"'),
        ({"grace": "-1s"}, r"grace must be .*got .-1s."),
        ({"grace": -1}, r"grace must be a number of seconds of at least 0, got -1"),
        ({"grace": 5, "preemption": "off"}, r'grace=5 needs preemption="auto", got .off.'),
        (
            {"optimizer": optimizer.state_dict()},
            r"optimizer is the result of an optimizer's.*\n.*optimizer=optimizer, without",
        ),
        ({"loader": loader.stream()}, r"loader is an iterator.*\n.*Pass the loader itself"),
        ({"batches": iter(loader)}, r"batches is an iterator.*\n.*Pass the loader itself"),
    ]
    for given, text in wrong:
        with pytest.raises(UsageError, match=text):
            hf.resumable(tmp_path, model=model, **given)


def test_policy_as_an_object_and_odd_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="policy"):
        hf.resumable(tmp_path, a=np.zeros(3), every=hf.Steps(5))
    with pytest.raises(UsageError, match="strict"):
        hf.resumable(tmp_path, a=np.zeros(3), strict="no")  # type: ignore[arg-type]
    arrays: Any = np.zeros(3), 5
    for unnamed in (lambda: hf.resumable(tmp_path, *arrays), lambda: hf.Checkpoint(np.zeros(3), 5)):
        with pytest.raises(TypeError, match="ndarray, int without a name") as refused:
            unnamed()
        assert "model=model" in str(refused.value)
    run = hf.resumable(tmp_path, a=np.zeros(3))
    with pytest.raises(UsageError, match="entered"):
        run.steps(3)
    with run, pytest.raises(UsageError, match="whole number"):
        run.steps("10")  # type: ignore[arg-type]


def test_a_metric_that_no_checkpoint_has_is_warned_of_once(tmp_path: Path) -> None:
    events: list[Event] = []
    state = {"value": np.zeros(1)}
    keep = hf.Latest(9) | hf.Best("val_los")
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(1), keep=keep, sinks=[events.append]) as run:
        for _ in run.steps(5):
            run.report(val_loss=1.0)
    (line,) = [event.text for event in events if isinstance(event, Warned) and "val_los" in event.text]
    assert line.startswith("Best('val_los') keeps nothing")
    assert line.endswith("Reported so far: val_loss.")


def test_best_is_not_warned_of_before_any_metric_was_reported(tmp_path: Path) -> None:
    events: list[Event] = []
    keep = hf.Latest(9) | hf.Best("val_loss")
    with hf.resumable(tmp_path, state=[0], save_every=hf.Steps(1), keep=keep, sinks=[events.append]) as run:
        for step in run.steps(6):
            run.manager.wait()
            assert told(events) == []
            if step == 5:
                run.report(val_loss=1.0)
    assert told(events) == []


@pytest.mark.parametrize(("asked_in", "code", "last"), [(3, 42, 4), (5, 42, 6), (9, 0, 6)])
def test_a_step_that_the_user_has_saved_by_the_manager_is_saved(
    tmp_path: Path, asked_in: int, code: int, last: int
) -> None:
    done = run_file("resumable_runs", "save by hand", tmp_path, str(asked_in))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert (f"step {last} is saved; leaving" in done.stderr) == (code == 42)
    assert steps_of(tmp_path) == [*range(1, last + 1)]


@pytest.mark.parametrize("is_set", [False, True])
def test_epoch_kept_as_a_number_and_never_set_is_warned_of_at_the_end(tmp_path: Path, is_set: bool) -> None:
    events: list[Event] = []
    with hf.resumable(tmp_path, epoch=0, save_every=hf.Steps(2), sinks=[events.append]) as run:
        for epoch in range(run.checkpoint.epoch, 1):
            for _ in range(5):
                run.finish_step()
            if is_set:
                run.checkpoint.epoch = epoch
    told = [event.text for event in events if isinstance(event, Warned)]
    assert [text[:29] for text in told] == ([] if is_set else ["epoch is saved as the number "])
    with hf.resumable(tmp_path / "other", epoch=0, num_epochs=3, sinks=[events.append]) as run:
        run.finish_step()
    assert len([event for event in events if isinstance(event, Warned)]) == len(told)


@pytest.mark.parametrize("is_set", [False, True])
def test_best_value_that_the_loop_only_rebinds_is_warned_of_at_the_end(tmp_path: Path, is_set: bool) -> None:
    events: list[Event] = []
    with hf.resumable(tmp_path, best=9.0, best_state={}, save_every=hf.Steps(2), sinks=[events.append]) as run:
        best = run.checkpoint.best
        for step in run.steps(4):
            best = min(best, 8.0 - step)
            if is_set:
                run.checkpoint.best = best
    told = [event.text for event in events if isinstance(event, Warned)]
    assert [text[:21] for text in told] == ([] if is_set else ["best is saved as 9.0,"])


def told(events: list[Event]) -> list[tuple[str, bool]]:
    """What was warned of up to the colon before the advice, and whether as an error."""
    return [(event.text.partition(": ")[0], event.is_error) for event in events if isinstance(event, Warned)]


def test_loop_that_counts_no_step_is_warned_of_while_it_runs_and_at_end(tmp_path: Path) -> None:
    sampler = hf.ResumableSampler(20, batch_size=4)
    events: list[Event] = []
    count = len(list(hf.ResumableSampler(20, batch_size=4)))
    loss = "batches were taken from sampler, but no step was counted, so nothing was saved"
    with hf.resumable(tmp_path, sampler=sampler, save_every=hf.Steps(1), sinks=[events.append]) as run:
        for _ in range(2):
            for _ in sampler.batches(sampler):
                pass
        assert told(events) == [(f"8 {loss} yet", False)], "it is said while the loop runs, once"
        assert copy.deepcopy(sampler).state_dict() == pickle.loads(pickle.dumps(sampler)).state_dict()
    assert told(events)[1:] == [(f"{2 * count} {loss}", True)]
    assert "run.finish_step()" in str(events[-1])
    events.clear()
    with suppress(KeyboardInterrupt), hf.resumable(tmp_path, sampler=sampler, sinks=[events.append]) as run:
        for number, _ in enumerate(sampler.batches(sampler)):
            if number == 2:
                signal.raise_signal(signal.SIGINT)
    assert told(events) == [(f"3 {loss}", True)]
    # Where an error ends the block, or a step is counted, there is nothing to say; a new run has saved nothing.
    events.clear()
    with suppress(ZeroDivisionError), hf.resumable(tmp_path, sampler=sampler, sinks=[events.append]) as run:
        list(zip(sampler.batches(sampler), range(3), strict=False))
        raise ZeroDivisionError
    with hf.resumable(tmp_path, sampler=sampler, sinks=[events.append]) as run:
        next(sampler.batches(sampler))
    with hf.resumable(tmp_path, sampler=sampler, sinks=[events.append]) as run:
        for _ in sampler.batches(sampler):
            run.finish_step()
        list(zip(sampler.stream(sampler), range(20), strict=False))
    assert told(events) == [("no step was counted, so nothing was saved", False)]


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Trainer:
    """Keeps an optimizer in a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def test_optimizer_of_a_kept_model_that_is_not_kept_is_warned_of(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    other = copy.deepcopy(model)
    adam = torch.optim.AdamW(model.parameters())
    plain, scheduled = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 1)

    def train(*optimizers: torch.optim.Optimizer, thread: bool = False, **objects: Any) -> list[str]:
        events: list[Event] = []
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        with hf.resumable(place, **objects, save_every=hf.Steps(2), sinks=[events.append]) as run:
            for _ in run.steps(3):
                for optimizer in optimizers:
                    step = make_step(other if optimizer is aside else model, optimizer)
                    if thread:
                        (beside := threading.Thread(target=step)).start()
                        beside.join()
                    else:
                        step()
        return [text for text, _ in told(events)]

    aside = torch.optim.AdamW(other.parameters())
    adam_text = "AdamW updates the parameters of model but is not saved, so a restart begins with a new one"
    assert train(adam, model=model) == [adam_text]
    assert train(adam, model={"deep": model}) == [adam_text.replace("model", "model/deep")]
    assert train(scheduled, model=model, schedule=schedule) == [adam_text.replace("AdamW", "SGD")]
    # Neither the optimizer nor what it trains is saved, as the second pair of a GAN.
    [apart_text] = train(plain, aside, model=model)
    assert apart_text == "AdamW updates 2 parameters that no saved object holds, so a restart begins with new values"
    # Right programs: it is kept, in a state of another object too; it has no state; it trains a copy; another thread.
    assert train(adam, model=model, optimizer=[adam]) == []
    assert train(adam, model=model, trainer=Trainer(adam)) == []
    assert train(plain, aside, model=model, more={"deep": other}, second=aside) == []
    assert train(plain, aside, model=model, agent=Agent(other)) == []
    assert train(plain, aside, model=model, weights=list(other.parameters())) == []
    assert train(adam, thread=True, model=model) == []
    assert train(adam, optimizer=adam) == ["the parameters of optimizer belong to no saved object"]
    assert train(adam, optimizer=adam, weights=list(model.parameters())) == []
    assert train(adam, optimizer=adam, trainer=Trainer(adam)) == []
    # It is reached through objects of other classes.
    nested = Trainer(adam)
    nested.optimizer = SimpleNamespace(engine=SimpleNamespace(parts=[{"adam": adam}]), state_dict=dict)  # type: ignore[assignment]
    assert train(adam, model=model, trainer=nested) == []


class Head(torch.nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(2, 2)
        self.temperature = torch.nn.Parameter(torch.ones(()))


class Agent:
    """Has everything in a state of its own class."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.parts = SimpleNamespace(modules={"all": modules})

    def state_dict(self) -> dict[str, Any]:
        return {str(n): module.state_dict() for n, module in enumerate(self.parts.modules["all"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for n, module in enumerate(self.parts.modules["all"]):
            module.load_state_dict(state[str(n)])


def test_trained_parameters_that_no_saved_object_has_are_warned_of(tmp_path: Path) -> None:
    model, head = torch.nn.Linear(2, 1), Head()
    adam = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    alone = torch.optim.AdamW([*model.parameters(), loose := torch.nn.Parameter(torch.ones(3))])
    frozen = torch.optim.AdamW([*model.parameters(), *head.parameters()])

    advice: list[str] = []

    def save(**objects: Any) -> list[str]:
        events: list[Event] = []
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        with hf.CheckpointManager(place, hf.Checkpoint(**objects), sinks=[events.append]) as manager:
            manager.save(1)
            manager.save(2)
        advice[:] = [event.text.partition(": ")[2] for event in events if isinstance(event, Warned)]
        return [text for text, _ in told(events)]

    rest = "so a restart begins with new values"
    assert save(model=model, optimizer=adam) == [
        f"optimizer trains 3 parameters of a Head that no saved object has (shape [], [2, 2], [2]), {rest}"
    ]
    assert advice == ["pass the module, as in criterion=criterion, too"]
    assert save(model=model, optimizer={"first": alone}) == [
        f"optimizer/first trains a parameter that no saved object has (shape [3]), {rest}"
    ]
    assert advice == ["pass the parameter itself, as in scale=scale, too"]
    # Right programs: the loss is saved too, by itself, within another module, as tensors, or by an object of theirs.
    assert save(model=model, head=head, optimizer=adam) == []
    assert save(both=torch.nn.ModuleList([model, head]), optimizer=adam) == []
    assert save(model=model, loose=[loose], optimizer=alone) == []
    assert save(model=model, agent=Agent(head), optimizer=adam) == []
    assert save(agent=Agent(model, head), optimizer=adam) == []
    # An object of theirs that has only the other parameters changes nothing.
    assert len(save(model=model, agent=Agent(model), optimizer=adam)) == 1
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    assert save(model=model, optimizer=frozen) == []


def test_training_without_counted_steps_shows_by_an_unkept_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    events: list[Event] = []
    with hf.resumable(tmp_path, model=model, sinks=[events.append]):
        for _ in range(9):
            step()
    text = "but no step was counted, so nothing was saved"
    assert told(events) == [
        (f"SGD has stepped 8 times, {text} yet", False),
        (f"SGD has stepped 9 times, {text}", True),
    ]
    events.clear()
    with hf.resumable(tmp_path, state=np.zeros(3), sinks=[events.append]):
        pass
    assert told(events) == [("no step was counted, so nothing was saved", False)]


def test_a_run_that_is_made_and_never_entered_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # What other tests have left is warned of as well.
    caplog.clear()
    hf.resumable(tmp_path / "never", state=[0])
    gc.collect()
    assert [text.partition(": ")[2][:41] for text in caplog.messages] == ["the run was created but never entered, so"]
    caplog.clear()
    with hf.resumable(tmp_path / "entered", state=[0]) as run:
        run.finish_step()
    del run
    gc.collect()
    assert caplog.messages == []
    program = f"import holdfast as hf; run = hf.resumable({str(tmp_path)!r} + '/end', state=[0]); "
    assert "created but never entered" in run_python(program).stderr
    assert "created but never entered" not in run_python(f"{program} 1 / 0").stderr


def test_saves_by_hand_of_a_loop_that_counts_no_step_are_warned_of(tmp_path: Path) -> None:
    sampler = hf.ResumableSampler(20, batch_size=4)
    events: list[Event] = []
    for life in range(2):
        with hf.resumable(tmp_path / "run", sampler=sampler, sinks=[events.append]) as run:
            for _ in range(2):
                list(zip(range(3), sampler.stream(sampler), strict=False))
                run.save()
        since = " since the newest save" if life == 0 else ""
        again = f"batches were taken from sampler{since}, but no step was counted, so"
        first, unsaved = (3, 3) if life == 0 else (3, 6)
        assert told(events) == [
            (f"{first} {again} run.save() saved nothing", False),
            (f"{unsaved} {again} nothing was saved", True),
        ]
        events.clear()
    # What is saved is saved, and steps may be counted by saves of the manager's.
    with hf.resumable(tmp_path / "once", sampler=sampler, sinks=[events.append]) as run:
        list(zip(range(3), sampler.stream(sampler), strict=False))
        run.save()
    with hf.resumable(tmp_path / "manager", sampler=sampler, sinks=[events.append]) as run:
        for step in range(12):
            next(sampler.stream(sampler))
            run.manager.save(step + 1)
    assert told(events) == []


def test_a_step_is_finished_within_a_loop_of_steps_by_that_alone(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, state=[0]) as run:
        for step in run.steps(10):
            with pytest.raises(UsageError, match="a second time") as refused:
                run.finish_step()
            if step == 3:
                break
        assert "Remove the call" in str(refused.value)
        run.finish_step()
        assert run.step == 5, "the step that was left by break, and this one"
        list(run.steps(7))
        run.finish_step()
        assert run.step == 8


def test_the_steps_that_are_left_have_a_length(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, state=[0]) as run:
        steps = run.steps(5)
        assert (len(steps), next(steps), next(iter(steps)), len(steps)) == (5, 0, 1, 3)
        assert [(step, len(steps)) for step in steps] == [(2, 2), (3, 1), (4, 0)]
        assert (len(run.steps(3)), len(run.steps(5)), len(run.steps(9))) == (0, 0, 4)


def test_steps_zipped_with_batches_count_those_that_have_a_batch(tmp_path: Path) -> None:
    def train(place: Path, total: int, stop_at: int | None = None) -> list[tuple[int, list[int]]]:
        sampler = hf.ResumableSampler(20, batch_size=4, seed=3)
        done: list[tuple[int, list[int]]] = []
        with hf.resumable(place, sampler=sampler, save_every=hf.Steps(1)) as run:
            while run.step < total and run.step != stop_at:
                for step, batch in zip(run.steps(total), sampler.batches(sampler), strict=False):
                    done.append((step, batch))
                    if step + 1 == stop_at:
                        break
                run.save()
        return done

    whole = train(tmp_path / "whole", 12)
    assert [step for step, _ in whole] == list(range(12))
    for stop_at in (4, 5, 6):
        place = tmp_path / str(stop_at)
        assert train(place, 12, stop_at) + train(place, 12) == whole
    with hf.resumable(tmp_path / "turned", sampler=(sampler := hf.ResumableSampler(20, batch_size=4))) as run:
        for batches in (sampler.stream(sampler), sampler.batches(sampler)):
            with pytest.raises(UsageError, match=r"sampler before the step .*zip\(loader, run.steps\(n\)\) does that"):
                list(zip(batches, run.steps(3), strict=False))
        assert list(zip(run.steps(3), sampler.stream(sampler), strict=False))[-1][0] == 2
        # A step that takes batches of several passes is one, and so is one that takes none of what is kept.
        for step in run.steps(5):
            if step == 3:
                list(sampler.batches(sampler))
        assert run.step == 5
    sampler = hf.ResumableSampler(20, batch_size=4)
    with hf.CheckpointManager(tmp_path / "handler", hf.Checkpoint(sampler=sampler)) as manager:
        with hf.PreemptionCheckpointHandler(manager) as handler:
            done = [step for _ in range(2) for step, _ in zip(handler.steps(9), sampler.batches(sampler), strict=False)]
        assert (done, handler.total_run_calls) == ([*range(9)], 9)
        with hf.PreemptionCheckpointHandler(manager) as handler, pytest.raises(UsageError, match=r"handler.steps\(n\)"):
            list(zip(sampler.stream(sampler), handler.steps(12), strict=False))


def test_run_says_at_its_end_that_it_ended_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with hf.resumable(tmp_path / "early", state=[0]) as run:
        assert len(list(zip(run.steps(20), range(3), strict=False))) == 3
    assert any("is at step 4 of 20, saved" in text for text in caplog.messages)
    caplog.clear()
    with hf.resumable(tmp_path / "kept", sampler=(sampler := hf.ResumableSampler(8, batch_size=4))) as run:
        while run.step < 8:
            list(zip(run.steps(8), sampler.batches(sampler), strict=False))
    assert not any("at step 8 of" in text for text in caplog.messages)


@pytest.mark.parametrize("entry", ["run", "handler"])
def test_own_loop_that_restarts_its_epochs_is_warned(
    tmp_path: Path, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")

    def train(epochs: Callable[[hf.ResumableSampler], Iterable[int]], **objects: Any) -> list[str]:
        sampler, aside = hf.ResumableSampler(8, batch_size=4), hf.ResumableSampler(8, batch_size=4)
        kept = hf.Checkpoint(sampler=sampler, aside=aside, **objects)
        events: list[Event] = []
        with ExitStack() as stack:
            if entry == "run":
                run = hf.resumable(tmp_path, kept, save_every=hf.Steps(1), sinks=[events.append])
                count = stack.enter_context(run).finish_step
            else:
                manager = stack.enter_context(
                    hf.CheckpointManager(tmp_path, kept, save_every=hf.Steps(1), sinks=[events.append])
                )
                count = stack.enter_context(hf.PreemptionCheckpointHandler(manager)).save_checkpoint_if_preempted
            for _ in epochs(sampler):
                for _ in sampler.batches(sampler):
                    count()
                list(aside.batches(aside))  # It evaluates, so the program has no need to ask where that stands.
        return [text for text, _ in told(events)]

    three = "sampler was restored with 3 complete epochs. A loop over range(n) trains n more epochs"
    assert train(lambda _: range(3)) == []
    assert train(lambda _: range(2)) == [three]
    assert train(lambda sampler: sampler.epochs(5)) == []
    assert train(lambda sampler: range(sampler.epoch, 6)) == []
    said = [text.partition(" (saved")[0] for text in caplog.messages if text.startswith("resumed")]
    assert [text.partition(", after ")[2] for text in said] == [
        f"{number} complete epochs of sampler" for number in (3, 4, 5)
    ]


def test_a_resumed_program_that_keeps_a_count_of_its_own_is_not_warned(tmp_path: Path) -> None:
    events: list[Event] = []
    for _ in range(2):
        with hf.resumable(tmp_path, progress={"done": 0}, sinks=[events.append]) as run:
            run.checkpoint.progress["done"] += 1
            run.finish_step()
    assert told(events) == []


def test_a_loader_that_trains_and_evaluates_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = hf.ResumableSampler(8, batch_size=4)
    seen = []
    for epoch in sampler.epochs(5):
        seen.append(epoch)
        for _ in range(2):  # It trains, and then it evaluates.
            list(sampler.batches(sampler))
    assert seen == [0, 2, 4]
    (record,) = caplog.records
    assert "epochs 0 to 1 ended within one turn of epochs(5)" in record.message

    def train() -> None:
        for _ in sampler.stream(sampler):
            list(sampler.batches(sampler))

    with pytest.raises(UsageError, match="another loop") as raised:
        train()
    assert "For evaluation, use a separate loader" in str(raised.value)
    frames = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [Path(name).name for name in frames] == [Path(__file__).name] * 2 + ["tracebacks.py"]


# What a run says of itself.

SAID = """
holdfast: runs/gpt is new; saves every 5 steps
holdfast: runs/gpt is at step 7, saved
holdfast: 2 saves; COST; 2 checkpoints, SIZE
--
holdfast: resumed runs/gpt at step 7 (saved N), saves every 5 steps
holdfast: runs/gpt: optimizer.lr 0.1 restored (your script says 0.5); keep_current=["optimizer.lr"] keeps the script's
holdfast: runs/gpt is at step 16, saved
holdfast: 3 saves; COST; 2 checkpoints, SIZE
--
holdfast: resumed runs/gpt at step 16 (saved N), saves every 5 steps
holdfast: runs/gpt was already at step 16; no step was added
--
--
holdfast: runs/gpt starts from the beginning; saves every 5 steps
holdfast: runs/gpt is at step 5, saved
holdfast: 1 save; COST; 1 checkpoint, SIZE
--
holdfast: runs/handled is new; saves only when the job is asked to stop, and at save(); \
to save while it trains: CheckpointManager(save_every=holdfast.Steps(n))
holdfast: runs/handled is at step 3, saved
holdfast: 1 save; COST; 1 checkpoint, SIZE
--
holdfast: resumed runs/handled at step 3 (saved N), saves only when the job is asked to stop, and at save(); \
to save while it trains: CheckpointManager(save_every=holdfast.Steps(n))
holdfast: runs/handled is at step 4; the newest checkpoint is step 3
--
--
holdfast: runs/backup has no backup; training starts from the beginning
holdfast: runs/backup: the backup of epoch 1 is kept
holdfast: 2 saves; COST; 2 checkpoints, SIZE
--
holdfast: resumed runs/backup after epoch 1 (saved N)
holdfast: runs/backup: the backup of epoch 2 is kept
holdfast: 1 save; COST; 2 checkpoints, SIZE
--
holdfast: PLACE/runs/backup: no backup was made after that of epoch 2, which was restored. If all epochs were \
trained, call delete_backup(); until then every run continues after that epoch
--
holdfast: resumed runs/backup after epoch 2 (saved N)
holdfast: runs/backup: training is complete, and its backup is deleted
holdfast: 1 save; COST
--
--
INFO step 6 restored: 0 B in N
INFO resumed runs/gpt at step 6 (saved N), saves every 5 steps
INFO runs/gpt was already at step 6; no step was added
--
"""


def test_a_run_says_where_it_begins_and_where_it_ends(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, PROGRAMS / "announcing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    said = re.sub(r"(?<=saved )(\d+ s ago|just now)|(?<=0 B in )[\d.]+ m?s", "N", done.stderr)
    said = re.sub(r"training stopped for [\d.]+ m?s of [\d.]+ m?s \([\d.]+ %\)", "COST", said)
    said = re.sub(r"(?<=heckpoint, |eckpoints, )[\d.]+ kB$", "SIZE", said, flags=re.MULTILINE)
    assert said == SAID.replace("\\\n", "").replace("PLACE", str(tmp_path)).lstrip()


def test_what_a_restore_sets_otherwise_than_the_script_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for life in range(2):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=(0.1, 0.5)[life])
        loader = hf.ResumableDataLoader(torch.arange(20.0), batch_size=4, seed=life, shuffle=life == 0)
        with hf.resumable(tmp_path, model=model, optimizer=optimizer, loader=loader, quiet=True) as run:
            if life == 0:
                run.finish_step()
        told = [record.message.partition(": ")[2] for record in caplog.records if record.levelno >= logging.WARNING]
        text = (
            "optimizer.lr 0.1 restored (your script says 0.5), loader.seed 0 restored (your script says 1), "
            'loader.shuffle True restored (your script says False); keep_current=["optimizer.lr"] keeps the script\'s'
        )
        assert told == [text] * life


@pytest.mark.parametrize("entry", ["resumable", "handler"])
def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path, entry: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(parameters, lr=0.1), lambda epoch: 1.0)
    scheduler.log = lambda: None  # type: ignore[attr-defined]
    loader: Any = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    for name, value, said in (
        ("loader", loader, "loader: this DataLoader cannot tell how far"),
        ("decay", lambda step: 0.1, "decay: a function cannot be stored"),
        ("counts", {"seen": [1, object()]}, "counts/seen/1: a value of type object"),
        ("scheduler", scheduler, "scheduler/log: a function cannot be stored"),
    ):
        with pytest.raises(UnsupportedValueError, match=said):
            begin(tmp_path / name, entry, **{name: value})
        assert not (tmp_path / name).exists()


def begin(place: Any, entry: str, **objects: Any) -> None:
    """Enters a loop, and trains nothing in it."""
    if entry == "resumable":
        with hf.resumable(place, **objects):
            pass
    elif entry == "handler":
        with hf.CheckpointManager(place, hf.Checkpoint(**objects)) as manager, hf.PreemptionCheckpointHandler(manager):
            pass
    else:
        with hf.WorkerTrainingState(place, hf.Checkpoint(**objects)) as state:
            state.restore()
            state.maybe_load_initial_epoch_from_ckpt(0, "test")
            if entry == "epochs":
                state.maybe_load_initial_epoch_from_ckpt(0, "train")


class Watched:
    """Counts how often its state is read, and how often it is asked to prepare that."""

    def __init__(self) -> None:
        self.read = self.prepared = 0

    def state_dict(self) -> dict[str, Any]:
        self.read += 1
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def prepare_for_checkpoint(self) -> None:
        self.prepared += 1


class Prepared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = object()

    def prepare_for_checkpoint(self) -> None:
        self.cache = None

    def get_extra_state(self) -> Any:
        return self.cache


def test_entering_a_run_reads_no_state_that_is_not_ready_or_may_change(tmp_path: Path) -> None:
    watched = Watched()
    objects: Any = {
        "later": None,
        "lazy": torch.nn.LazyLinear(2),
        "prepared": Prepared(),
        "deep": {"watched": [watched]},
    }
    with hf.resumable(tmp_path, **objects) as run:
        assert (watched.read, watched.prepared) == (0, 0)
        for _ in run.steps(1):
            objects["lazy"](torch.zeros(1, 3))
    assert (watched.read, watched.prepared) == (1, 1)
    assert steps_of(tmp_path) == [1]


def test_directory_that_takes_no_checkpoint_is_refused_at_entry(tmp_path: Path) -> None:
    state = {"value": np.zeros(10)}
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=100k", "tmpfs") as disk:
        begin(disk / "run", "resumable", state=state)
        assert list((disk / "run").iterdir()) == []
        train(disk / "run", 1)
        with hf.WorkerTrainingState(disk / "epochs", hf.Checkpoint(state=state)) as epochs:
            epochs.back_up(0)
        fill(disk)
        with pytest.raises(StorageFullError, match=r"run: no checkpoint can be saved here: .*ENOSPC"):
            begin(disk / "run", "resumable", state=state)
        warned: list[Event] = []
        begin(disk / "run", "resumable", state=state, failures_allowed=1, sinks=[warned.append])
        assert "ENOSPC" in str([event for event in warned if isinstance(event, Warned)])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for place, entry in (("run", "resumable"), ("run", "handler"), ("epochs", "epochs")):
            with pytest.raises(StorageError, match=rf"{place}: no checkpoint can be saved here: .*EROFS"):
                begin(disk / place, entry, state=state)
        # What is only evaluated is not written.
        begin(disk / "epochs", "evaluation", state=state)
        with hf.CheckpointManager(disk / "run", hf.Checkpoint(state=state)) as manager:
            assert manager.restore() is not None
    with pytest.raises(StorageError, match="/proc/nope/run: no checkpoint can be saved here: cannot make"):
        begin("/proc/nope/run", "resumable", state=state)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=rf"hint: {tmp_path}/file is not a directory"):
        begin(tmp_path / "file" / "x" / "run", "resumable", state=state)


@pytest.mark.parametrize("moment", ["make_directory", "publish", "read"])
def test_sweep_beside_another_job_that_tries_the_directory_ends_nothing(tmp_path: Path, moment: str) -> None:
    swept: list[str] = []

    class Swept(LocalStorage):
        def make_directory(self, path: str) -> None:
            super().make_directory(path)
            if path.startswith(".trash-") and moment == "make_directory":
                self.sweep()
                self.sync_directory(path)

        def publish(self, path: str, data: bytes) -> bool:
            if path.startswith(".trash-") and moment == "publish":
                self.sweep()
            return super().publish(path, data)

        def read(self, path: str, limit_bytes: int) -> bytes:
            if path.startswith(".trash-") and moment == "read":
                self.sweep()
            return super().read(path, limit_bytes)

        def sweep(self) -> None:
            with hf.CheckpointManager(tmp_path, hf.Checkpoint(state=1)) as other:
                other.save(1)
            swept.append(moment)

    begin(Swept(tmp_path), "resumable", state=1)
    assert swept == [moment]
    assert not list(tmp_path.glob(".trash-*"))


def test_a_job_killed_while_it_tries_the_directory_leaves_nothing_for_long(tmp_path: Path) -> None:
    assert run_file("resumable_runs", "kill at first look", tmp_path).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (left / ".manifest.json.0123456789abcdef.tmp").touch()  # As if it had died a little earlier.
    train(tmp_path, 1)
    assert not left.exists()


def test_metric_that_is_not_a_number_is_refused_by_its_call(tmp_path: Path) -> None:
    bad: Any
    for bad, said in (
        ("a", "metric 'loss' must be a number, got 'a'"),
        ("0.5", "metric 'loss' must be a number, got '0.5'"),
        (None, "metric 'loss' must be a number, got None"),
        ([0.5], r"metric 'loss' must be a number, got \[0.5\]"),
        (10**400, "metric 'loss' must be a number, got 1000"),
        (np.zeros(3), r"metric 'loss' must be a number, got a ndarray of shape \(3,\)"),
        (torch.zeros(2, 1), r"metric 'loss' must be a number, got a Tensor of shape \(2, 1\)"),
    ):
        with hf.resumable(tmp_path / "run", state=1) as run, pytest.raises(UsageError, match=said):
            run.report(loss=bad)
        manager = hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(state=1), save_every=hf.Steps(100))
        with manager, hf.PreemptionCheckpointHandler(manager) as handler, pytest.raises(UsageError, match=said):
            handler.save_checkpoint_if_preempted(metrics={"loss": bad})
        with pytest.raises(UsageError, match=said):
            manager.save_if_due(1, metrics={"loss": bad})
        with (
            hf.WorkerTrainingState(tmp_path / "epochs", hf.Checkpoint(state=1)) as state,
            pytest.raises(UsageError, match=said),
        ):
            state.back_up_if_due(0, 0, metrics={"loss": bad})
    with pytest.raises(UsageError, match=r"metrics must be numbers by name, got 0\.5"):
        manager.save_if_due(1, metrics=0.5)  # type: ignore[arg-type]
    loss = torch.ones(1, requires_grad=True)
    with hf.resumable(tmp_path / "run", state=1) as run:
        with pytest.raises(UsageError, match=r"run.report\(\*\*metrics\) for a dict"):
            run.report({"loss": 0.5})
        for _ in run.steps(1):
            run.report(loss=loss, lr=np.float32(0.5), acc=np.array(2), nan=float("nan"), seen=True)
    storage = LocalStorage(tmp_path / "run")
    manifest = StoredRun(storage).step(StoredRun(storage).look().living[-1]).manifest()
    assert manifest.metrics == {"loss": 1.0, "lr": 0.5, "acc": 2.0, "seen": 1.0}


def test_what_a_program_prints_says_how_far_it_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    loader = hf.ResumableDataLoader([1.0, 2.0], batch_size=1)
    checkpoint = hf.Checkpoint(model=model, loader=loader, epoch=3, note="x" * 99, sizes=[1, 2], later=None)
    assert repr(checkpoint) == (
        "Checkpoint(model=Linear, loader=ResumableDataLoader, epoch=3, note='xxxxxxxxxxxx...xxxxxxxxxxxxx', "
        "sizes=list of 2, later=None)"
    )
    run = hf.resumable(tmp_path, checkpoint, preemption="off")
    assert repr(run) == f"<Run not entered, <CheckpointManager of {tmp_path}: nothing saved yet>>"
    with run:
        for step in run.steps(2):
            if step == 1:
                handle = run.save()
                assert handle is not None
                assert handle.wait_committed()
                assert repr(handle) == f"<SaveHandle of step 2 of {tmp_path}: committed>"
    assert repr(run) == f"<Run at step 2, <CheckpointManager of {tmp_path}: newest step 2, closed>>"
    with hf.CheckpointManager(tmp_path, checkpoint) as manager, hf.PreemptionCheckpointHandler(manager) as handler:
        path = tmp_path / "step-000000002.g0001"
        assert repr(handler.restored) == f"<Restoration of {path}: step 2 of generation 1>"
        assert repr(handler) == f"<PreemptionCheckpointHandler: 2 steps run, {manager!r}>"
    with hf.WorkerTrainingState(tmp_path / "epochs", checkpoint) as state:
        state.back_up(4).wait_committed()
        assert repr(state) == f"<WorkerTrainingState of {tmp_path / 'epochs'}: newest backup of epoch 4, committed>"
    assert repr(state) == f"<WorkerTrainingState of {tmp_path / 'epochs'}: newest backup of epoch 4, closed>"
    assert repr(loader).startswith("<ResumableDataLoader of list: ResumableSampler(2, batch_size=1")
    assert repr(hf.RNG()).startswith("RNG(python, numpy")
    assert repr(hf.PerWorker(model)) == "PerWorker(Linear)"


def metrics_of(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns the steps of the current lineage, with their metrics."""
    storage = LocalStorage(directory)
    return [
        (name.step, dict(StoredRun(storage).step(name).manifest().metrics)) for name in StoredRun(storage).look().living
    ]


def test_metrics_reported_after_the_last_save_are_stored_at_the_end(tmp_path: Path) -> None:
    events: list[Event] = []
    with hf.resumable(tmp_path, state=[0], save_every=hf.Steps(2), sinks=[events.append]) as run:
        for step in run.steps(4):
            if step == 3:
                run.report(loss=2.0)
        assert run.save() is None, "nothing is new"
        run.report(val_loss=1.0)
    assert metrics_of(tmp_path)[-1] == (4, {"loss": 2.0, "val_loss": 1.0})
    assert told(events) == []


def test_save_after_a_report_stores_the_metric_with_the_weights_it_is_of(tmp_path: Path) -> None:
    def train(epochs: int) -> None:
        sampler = hf.ResumableSampler(20, batch_size=4)
        state = {"value": np.zeros(1)}
        keep = hf.Latest(1) | hf.Best("val_loss")
        with hf.resumable(tmp_path, sampler=sampler, state=state, save_every=hf.Steps(5), keep=keep) as run:
            for epoch in sampler.epochs(epochs):
                for _ in sampler.batches(sampler):
                    state["value"] += 1
                    run.finish_step()
                run.report(val_loss=abs(float(state["value"][0]) - 10))
                handle = run.save()
                assert handle is None or handle.step == 5 * (epoch + 1)

    train(3)
    assert metrics_of(tmp_path) == [(10, {"val_loss": 0.0}), (15, {"val_loss": 5.0})]
    before = sorted(path.name for path in tmp_path.iterdir())
    train(3)  # A complete run validates again, and saves nothing again.
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    train(4)
    assert metrics_of(tmp_path) == [(10, {"val_loss": 0.0}), (20, {"val_loss": 10.0})]


def test_a_restored_step_gets_the_metric_that_it_lacks_and_keeps_others(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, state=[0]) as run:
        for _ in run.steps(3):
            run.report(loss=1.0)
    with hf.resumable(tmp_path, state=[0]) as run:
        run.report(val_loss=2.0)
        assert run.save(metadata={"why": "validated"}) is not None
    assert metrics_of(tmp_path) == [(3, {"loss": 1.0, "val_loss": 2.0})]


def test_metrics_of_a_step_that_the_program_saved_are_stored_with_it(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, state=[0], save_every=hf.Steps(100)) as run:
        run.manager.save(1).wait_committed()
        run.finish_step()
        run.report(val_loss=1.0)
    assert metrics_of(tmp_path) == [(1, {"val_loss": 1.0})]


@pytest.mark.parametrize("order", ["evaluate, schedule", "schedule, evaluate", "average, evaluate"])
def test_an_evaluation_that_is_left_in_its_block_is_done_again(order: str, tmp_path: Path) -> None:
    """And whatever else follows the last step of the epoch, once; unless that changes arrays before the block."""

    def train(directory: Path, stop_in: int) -> tuple[int, str]:
        done = run_file("evaluated_epochs", directory, order, "3", str(stop_in), preload=preloaded.TRAINING)
        return done.returncode, done.stdout or done.stderr

    code, whole = train(tmp_path / "whole", -1)
    assert code == 0, whole
    for stop_in in (0, 2):
        directory = tmp_path / str(stop_in)
        code, problems = train(directory, stop_in)
        assert code == 42, problems
        assert steps_of(directory / "run") == [3 * (stop_in + 1)]
        assert train(directory, -1) == (0, whole)


def test_a_second_failure_of_a_save_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SaveFailedError, match="no room") as failed:
        train(FullStorage(), 20)
    assert failed.value.__notes__ == [f"holdfast: step {failed.value.step + 3} was not saved either"]


@pytest.mark.parametrize("kind", ["loader", "epochs", "batches", "manager"])
def test_save_every_epoch_saves_the_last_step_of_each(tmp_path: Path, kind: str) -> None:
    def train(batches: int, every: str) -> list[int]:
        data, given = torch.arange(12.0), {"count": torch.zeros(1)}
        loader = hf.ResumableDataLoader(data, batch_size=4, seed=1)
        if kind == "manager":
            with hf.CheckpointManager(tmp_path, hf.Checkpoint(loader=loader, count=given), save_every=every) as manager:
                manager.restore()
                for _ in zip(range(batches), loader.stream(), strict=False):
                    given["count"] += 1
                    manager.save_if_due(int(given["count"]))
        else:
            plain: Any = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
            objects = {"count": given, **({"loader": loader} if kind == "loader" else {})}
            with hf.resumable(tmp_path, **objects, save_every=every, keep="all") as run:  # type: ignore[arg-type]
                source: Any = loader.stream()
                if kind == "batches":
                    source = run.batches(plain)
                if kind == "epochs":
                    source = (batch for _ in run.epochs(9) for batch in run.batches(plain))
                for _ in zip(range(batches), source, strict=False):
                    given["count"] += 1
                    run.finish_step()
        return [name.step for name in StoredRun(open_storage(tmp_path)).look().living]

    # The end of a run saves, too.
    assert train(8, "1 epoch") == ([3, 6] if kind == "manager" else [3, 6, 8])
    # Two epochs are complete: the fourth is the next one.
    assert train(8, "2 epochs") == ([3, 6, 12] if kind == "manager" else [3, 6, 8, 12, 16])


def test_save_every_epoch_without_a_saved_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Epochs\(1\) saves at the end of an epoch.*\n.*run.batches\(loader\), or pass"
    ):
        with hf.resumable(tmp_path, count=[0], save_every="epoch") as run:
            run.finish_step()
