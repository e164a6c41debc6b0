"""What a script forgets about its data and its scaler is said at the first save; what only evaluates is left alone."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import holdfast as hf  # noqa: E402

DATA = TensorDataset(torch.arange(8.0))
BEGIN = DataLoader.__iter__


def train(place: Path, batches: Any, *, scaler: Any = None, **objects: Any) -> tuple[float, ...]:
    """Trains six steps, saves, and evaluates in between; returns what each step has drawn."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    drawn = []
    with hf.resumable(place, model=model, optimizer=optimizer, rng=hf.RNG(), quiet=True, **objects) as run:
        for (rows,) in batches(run):
            loss = model(rows[:, None]).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            drawn.append(float(torch.rand(())))
            run.finish_step()
            run.save()
    return tuple(drawn)


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_plain_loader_is_named_once_and_one_for_evaluation_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(DATA, batch_size=2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "plain", lambda _: [*loader, *loader])
        assert ["whose place is not saved" in text for text in texts(caplog)] == [True]
        caplog.clear()

        def evaluated(run: Any) -> Iterator[Any]:
            own = hf.ResumableDataLoader(DATA, batch_size=2)
            for batch in own:
                with torch.no_grad():
                    list(loader)
                yield batch

        train(tmp_path / "evaluated", evaluated)
        kept = hf.ResumableDataLoader(DATA, batch_size=2)
        train(tmp_path / "kept", lambda _: [next(iter(loader)) and batch for batch in kept], loader=kept)
        assert texts(caplog) == []
    assert DataLoader.__iter__ is BEGIN, "outside of a run nothing of torch is changed"


def test_a_scaler_that_is_not_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = hf.ResumableDataLoader(DATA, batch_size=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(tmp_path / "saved", lambda _: kept, scaler=scaler, scaler_kept=scaler, loader=kept)
        train(tmp_path / "off", lambda _: kept, scaler=off, loader=kept)
        assert texts(caplog) == []
        train(tmp_path / "lost", lambda _: kept, scaler=scaler, loader=kept)
        assert ["scaler=scaler" in text for text in texts(caplog)] == [True]


def test_an_evaluation_with_persistent_workers_draws_nothing_of_training(tmp_path: Path) -> None:
    """Its workers get their seed once in a process, also in one that was started again."""

    def life(place: Path, last: int) -> tuple[float, ...]:
        kept = hf.ResumableDataLoader(DATA, batch_size=2)
        evaluation = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)

        def batches(run: Any) -> Iterator[Any]:
            for _ in kept.epochs(4):
                for batch in kept:
                    yield batch
                    if run.step == last:
                        return
                with torch.no_grad():
                    list(evaluation)

        torch.manual_seed(3)
        return train(place, batches, loader=kept)

    assert life(tmp_path / "again", 6) + life(tmp_path / "again", 16) == life(tmp_path / "whole", 16)


def test_step_of_an_unsaved_optimizer_counts_once_in_a_second_run(tmp_path: Path) -> None:
    """Making an optimizer imports Dynamo: from then on another hook of torch's does what the first one did."""
    program = """if True:
        import sys
        import torch
        import holdfast as hf

        place, model = sys.argv[1], torch.nn.Linear(2, 1)
        with hf.resumable(place + "/first", model=model) as run:
            list(run.steps(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hf.resumable(place + "/second", model=model) as run:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "SGD has stepped once, but no step was counted" in done.stderr
