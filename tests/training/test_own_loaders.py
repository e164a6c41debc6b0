"""A loader of the program's own, taken by `run.batches`, goes on after a kill as if there had been none."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import holdfast
import preloaded
from holdfast.errors import UsageError
from holdfast.integrations.torch.places import follow_loader
from holdfast.state.data.attributes import read_python
from jobs import find_port
from places import PROGRAMS

PROGRAM = PROGRAMS / "own_loaders.py"
PRELOAD = (*preloaded.TRAINING, "holdfast.integrations.torch.places", "torchdata.stateful_dataloader")


def begin(log: Path, *options: str, **variables: str) -> Any:
    command = [sys.executable, str(PROGRAM), str(log.with_suffix(".run")), str(log), *options]
    environment = {**os.environ, **variables}
    return preloaded.Popen(command, stderr=subprocess.PIPE, text=True, preload=PRELOAD, env=environment)


def end(process: Any, code: int) -> str:
    """Waits for a process; what it has written to standard error."""
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    return str(errors)


def live(log: Path, *options: str, code: int = 0) -> str:
    """One process of the program, from its start to its end."""
    return end(begin(log, *options), code)


def live_together(log: Path, *options: str, codes: tuple[int, int] = (0, 0)) -> str:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    workers = [begin(log, *options, **job, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    return "".join(end(worker, code) for worker, code in zip(workers, codes, strict=True))


def read(log: Path) -> Mapping[Any, Any]:
    """The lines of a log by what they are about; of each the newest."""
    found: dict[Any, Any] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        key = (line["step"], *line["batch"]) if "loss" in line else line.get("evaluated", "end")
        found[key] = line
    return found


CASES = [
    *((data, "plain") for data in ("plain", "workers", "weighted", "stateful", "own", "stream")),
    *((data, "plain") for data in ("list", "function", "shuffled", "resumable")),
    *(("plain", loop) for loop in ("two", "accumulated", "broken", "remade", "steps", "batches")),
    *(("generator", loop) for loop in ("steps first", "batches first", "without end")),
    *((data, "batches first") for data in ("stream", "kept", "function")),
    *((data, "validated") for data in ("generator", "kept", "shuffled")),
]


@pytest.mark.parametrize(("data", "loop"), CASES)
def test_a_killed_run_takes_the_batches_of_an_untouched_one(data: str, loop: str, tmp_path: Path) -> None:
    last, epochs = (3, 5) if loop == "accumulated" else (5, 3)
    options = (f"--data={data}", f"--loop={loop}", f"--epochs={epochs}")
    live(tmp_path / "untouched", *options)
    killed = tmp_path / "killed"
    live(killed, *options, f"--ends-at={last}", "--by=SIGTERM", code=42)  # The last step of an epoch.
    # Within an epoch, or in its first step if the epoch before was saved at its end.
    live(killed, *options, f"--ends-at={last + (7 if loop == 'validated' else 4)}", code=-signal.SIGKILL)
    live(killed, *options)
    assert read(killed) == read(tmp_path / "untouched")


def test_each_of_several_workers_continues_at_its_own_batch(tmp_path: Path) -> None:
    options = ("--data=distributed", "--epochs=2")
    live_together(tmp_path / "untouched", *options)
    live_together(tmp_path / "left", *options, "--ends-at=3", "--by=SIGTERM", codes=(42, 42))
    errors = live(tmp_path / "left", "--data=plain", code=1)
    assert "another number of workers" in errors
    assert "ResumableDataLoader" in errors
    live_together(tmp_path / "left", *options)
    for rank in "01":
        assert read(tmp_path / f"left{rank}") == read(tmp_path / f"untouched{rank}")


def train(directory: Path, loop: Callable[[holdfast.Run], object], **options: Any) -> list[int]:
    """Runs a loop in this process; the steps that are saved."""
    with holdfast.resumable(directory, model=torch.nn.Linear(1, 1), keep=holdfast.All(), **options) as run:
        loop(run)
    return list(run.manager.steps())


DATA = [torch.tensor([float(number)]) for number in range(5)]


def by_epochs(run: holdfast.Run) -> None:
    for _ in run.epochs(3):
        for _ in run.batches(DATA):
            run.finish_step()


def steps_first(run: holdfast.Run) -> None:
    for _ in zip(run.steps(15), run.batches(DATA), strict=False):
        pass


def batches_first(run: holdfast.Run) -> None:
    for _ in zip(run.batches(DATA), run.steps(15), strict=False):
        pass


@pytest.mark.parametrize("loop", [by_epochs, steps_first, batches_first])
def test_each_epoch_of_such_a_loader_is_saved_if_asked_for(loop: Callable[..., object], tmp_path: Path) -> None:
    assert train(tmp_path, loop, save_every="1 epoch") == [5, 10, 15]


def read_on(run: holdfast.Run) -> None:
    """Another size of the batches, in the middle of an epoch."""
    loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)
    for _ in run.epochs(1):
        for (batch,) in run.batches(loader):
            SEEN.extend(batch.tolist())
            run.finish_step()


SEEN: list[float] = []


def begin_singly(run: holdfast.Run) -> None:
    for _ in run.epochs(1):
        for (batch,) in run.batches(DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1)):
            SEEN.extend(batch.tolist())
            run.finish_step()
            if run.step == 3:
                return


def test_a_new_batch_size_gives_the_rest_of_the_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SEEN.clear()
    train(tmp_path, begin_singly)
    train(tmp_path, read_on)
    assert SEEN == [0, 1, 2, 3, 4]
    assert "batch size 2 (1 at the save)" in caplog.text


LONG = list(range(12))


def forget_in_epochs(run: holdfast.Run) -> None:
    for _ in run.epochs(2):
        list(run.batches(LONG))


def forget_without_end(run: holdfast.Run) -> None:
    list(zip(range(20), run.batches(LONG), strict=False))


def validate_whole(run: holdfast.Run) -> None:
    for _ in run.epochs(2):
        list(run.batches(LONG))
        for _ in run.batches(DATA):
            run.finish_step()
    list(run.batches(LONG) if run.step < 10 else [])


def validate_partly(run: holdfast.Run) -> None:
    list(zip(run.batches(LONG), range(12), strict=False))  # One more is taken than are used.
    for _, _ in zip(run.steps(3), run.batches(DATA), strict=False):
        pass


@pytest.mark.parametrize("loop", [forget_in_epochs, forget_without_end, validate_whole, validate_partly])
def test_only_batches_of_training_count_as_a_forgotten_step(tmp_path: Path, loop: Callable[..., object]) -> None:
    texts: list[str] = []
    forgets = loop in (forget_in_epochs, forget_without_end)
    for _ in range(2):
        with holdfast.resumable(tmp_path, w=1.0, sinks=[lambda event: texts.append(str(event))], quiet=True) as run:
            loop(run)
            assert any("no step was counted, so nothing was saved yet" in text for text in texts) == forgets
    assert any("was counted" in text for text in texts) == forgets


def test_bar_over_a_loader_begins_at_the_resumed_batch_and_ends_full(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    seen = []
    for stop in (2, 3, -1):
        with holdfast.resumable(tmp_path, w=[1.0], save_every=1) as run, suppress(InterruptedError):
            with pytest.raises(TypeError, match="do not end"):
                len(run.batches(range(3)))
            for _ in run.epochs(2):
                batches = run.batches(DATA)
                bar = tqdm(batches, initial=batches.batches_done, file=io.StringIO())
                seen.append((bar.n, bar.total))
                for _ in bar:
                    run.finish_step()
                    if run.step == stop:
                        raise InterruptedError
                assert bar.n == bar.total
    assert seen == [(0, 5), (2, 5), (3, 5), (0, 5)]


NO_DATA: Any = 5
SAMPLED: DataLoader[Any] = DataLoader(
    TensorDataset(torch.arange(5.0)), batch_sampler=holdfast.ResumableSampler(5, batch_size=2)
)
REFUSED: dict[str, tuple[Callable[[holdfast.Run], object], str]] = {
    "iterator": (lambda run: run.batches(iter(DATA)), "the iterator list_iterator"),
    "generator": (lambda run: run.batches(one for one in DATA), "run.batches\\(read\\)"),
    "no data": (lambda run: run.batches(NO_DATA), "got int"),
    "empty": (lambda run: next(run.batches([])), "list has no batches"),
    "named": (lambda run: run.batches(run.checkpoint["loader"]), "is saved by its name"),
    "sampled": (lambda run: run.batches(SAMPLED), "keeps its own place"),
    "named epochs": (lambda run: run.epochs(2), "loader.epochs\\(2\\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_uses_are_refused_with_what_to_write_instead(name: str, tmp_path: Path) -> None:
    loop, text = REFUSED[name]
    with pytest.raises(UsageError, match=text):
        train(tmp_path, loop, loader=holdfast.ResumableDataLoader(DATA, 2))


class Batches:
    """A batch sampler without a length, which torch allows."""

    def __iter__(self) -> Any:
        yield from ([0, 1], [2, 3], [4])


def take_steps(directory: Path, way: str, stop: int) -> list[tuple[int, int]]:
    """Trains in two phases, or with loaders that look the same, and stops in the middle of a step."""
    data = TensorDataset(torch.arange(20))
    first, second = DataLoader(data, 4), DataLoader(data, 4)
    third = DataLoader(data, batch_sampler=Batches())
    seen: list[tuple[int, int]] = []

    def step(batch: Any) -> None:
        seen.append((run.step, int(batch[0][0])))
        if run.step == stop:
            raise InterruptedError
        run.finish_step()

    with holdfast.resumable(directory, w=torch.zeros(2), save_every=1) as run, suppress(InterruptedError):
        if way == "warm-up" or (way == "warm-up left out" and run.step < 3):
            for _, batch in zip(run.steps(3), run.batches(first), strict=False):
                seen.append((run.step, int(batch[0][0])))
        if way == "a look":
            next(iter(run.batches(second)))
        for epoch in run.epochs(3):
            if way == "validation now and then" and epoch != 1:
                list(run.batches(first))
            for batch in run.batches(third if way == "no length" else second):
                step(batch)
        if way == "steps after the epochs":
            batches = iter(run.batches(second))
            while run.step < 24:
                step(next(batches))
    return seen


@pytest.mark.parametrize(
    "way",
    [
        "warm-up", "warm-up left out", "a look", "validation now and then", "steps after the epochs", "no length",
    ],
)  # fmt: skip
def test_phases_and_loaders_that_look_the_same_resume_where_they_were(tmp_path: Path, way: str) -> None:
    untouched = take_steps(tmp_path / "untouched", way, -1)
    found: dict[int, int] = {}
    for stop in (2, 4, 7, 12, 17, 22, -1):
        found.update(take_steps(tmp_path / "stopped", way, stop))
    assert found == dict(untouched)
    assert len(untouched) == len(dict(untouched))


class Drawing(Dataset[Any]):
    """Samples that are drawn from each generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def test_torch_manual_seed_gives_the_same_samples_and_each_epoch_others(tmp_path: Path) -> None:
    def train_seeded(number: int) -> list[list[Any]]:
        torch.manual_seed(7)
        random.seed(number)
        np.random.seed(number)
        loader, taken = DataLoader(Drawing(), batch_size=2), []
        with holdfast.resumable(tmp_path / str(number), model=torch.nn.Linear(1, 1)) as run:
            for _ in run.epochs(2):
                for batch in run.batches(loader):
                    taken.append(batch.tolist())
                    run.finish_step()
        return taken

    first, second = train_seeded(1), train_seeded(2)
    assert first == second
    assert [batch[0][1] for batch in first] == [*dict.fromkeys(batch[0][1] for batch in first)]


def test_an_epoch_of_an_older_checkpoint_goes_on_as_it_began() -> None:
    def restart(state: Mapping[str, Any]) -> list[Any]:
        place: Any = follow_loader(DataLoader(Drawing(), batch_size=2))
        place.load_state_dict(state)
        return list(next(place.start()).tolist())

    place: Any = follow_loader(DataLoader(Drawing(), batch_size=2))
    batches = place.start()
    next(batches)
    state = place.state_dict()
    assert restart(state) == next(batches).tolist()
    begin = {name: value for name, value in state["begin"].items() if name != "number"}
    older = {**{name: value for name, value in state.items() if name != "begun"}, "begin": begin}
    other = {**older, "begin": {**begin, "python": read_python(random.Random(3))}}
    assert restart(older) == restart(older)
    assert restart(older) != restart(other)
    assert restart({**state, "begin": {**state["begin"], "python": other["begin"]["python"]}}) == restart(state)
