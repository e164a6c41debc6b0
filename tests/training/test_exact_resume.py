"""From whichever step a run goes on, it ends as if it had never stopped: bit by bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast as hf

TOTAL = 14
SAMPLES = 22


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples with an augmentation that draws from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.arange(8.0) * (index + 1) / 50
        x = x + torch.randn(8) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return x, x.sum() / 10, index


class EarlyStopping:
    """Ends a run when the loss has not fallen for a while; it is a user's own class with state."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def should_stop(self, loss: float) -> bool:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class Job:
    """All that a run consists of, seeded; a restore must overcome whatever the seed was."""

    def __init__(self, seed: int, workers: int, patience: int, stateful: bool) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
        groups = [
            {"params": self.model[0].parameters(), "weight_decay": 0.1},
            {"params": [*self.model[1].parameters(), *self.model[4].parameters()], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, cosine], [3])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)
        # So large a scale overflows at first, so that steps are skipped and the scale changes.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=3)
        self.stopping = EarlyStopping(patience)
        self.history: dict[str, list[Any]] = {"loss": [], "samples": []}
        self.rng = hf.RNG()
        self.loader: Any
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            self.loader = StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=0)
        else:
            self.loader = hf.ResumableDataLoader(Noisy(), batch_size=4, seed=seed, num_workers=workers)

    def objects(self) -> dict[str, Any]:
        names = "model optimizer scheduler plateau scaler stopping history loader rng"
        return {name: getattr(self, name) for name in names.split()}

    def train_step(self, batch: Any) -> bool:
        x, y, index = batch
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(self.model(x).squeeze(1), y.float())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.plateau.step(loss.item())
        self.history["loss"].append(float(loss.item()).hex())
        self.history["samples"].append(index.tolist())
        return self.stopping.should_stop(loss.item())

    def batches(self) -> Any:
        while True:
            yield from self.loader

    def fingerprint(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "plateau": self.plateau.state_dict(),
            "scaler": self.scaler.state_dict(),
            "stopping": self.stopping.state_dict(),
            "history": self.history,
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b)) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a).__name__ != "Counter":
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_same(job: Job, expected: dict[str, Any]) -> None:
    found = job.fingerprint()
    assert [name for name in expected if not equal(found[name], expected[name])] == []


def run_whole(job: Job, directory: Path | None) -> int:
    """The run that nobody stops; it saves at every step if it has a directory."""
    manager = hf.CheckpointManager(directory, hf.Checkpoint(**job.objects())) if directory else None
    step = 0
    batches = job.batches()
    while step < TOTAL:
        stop = job.train_step(next(batches))
        step += 1
        if manager is not None:
            manager.save(step)
        if stop:
            break
    if manager is not None:
        manager.close()
    return step


@pytest.mark.parametrize(
    ("workers", "stateful", "patience"),
    [(0, False, 99), (2, False, 99), (0, True, 99), (0, False, 3)],
    ids=["in process", "2 workers", "torchdata", "early stopping"],
)
def test_resuming_at_any_step_ends_the_same(tmp_path: Path, workers: int, stateful: bool, patience: int) -> None:
    torch.set_num_threads(1)
    undisturbed = Job(1, workers, patience, stateful)
    total = run_whole(undisturbed, None)
    expected = undisturbed.fingerprint()
    if patience < TOTAL:
        assert total < TOTAL, "the run is one that early stopping ends"
    else:
        assert len({*undisturbed.history["samples"][0]} & {*undisturbed.history["samples"][6]}) < 4, "it is shuffled"

    saving = Job(1, workers, patience, stateful)
    assert run_whole(saving, tmp_path) == total
    assert_same(saving, expected)

    for begin in range(1, total + 1):
        job = Job(1000 + begin, workers, patience, stateful)
        with hf.CheckpointManager(tmp_path, hf.Checkpoint(**job.objects())) as manager:
            restored = manager.restore(begin)
        assert restored is not None
        batches = job.batches()
        for step in range(begin, total):
            assert job.train_step(next(batches)) == (patience < TOTAL and step + 1 == total)
        assert_same(job, expected)


def test_resume_within_an_epoch_repeats_and_skips_no_sample(tmp_path: Path) -> None:
    job = Job(1, 2, 99, False)
    run_whole(job, tmp_path)
    epoch = [index for batch in job.history["samples"][:6] for index in batch]
    assert sorted(epoch) == list(range(SAMPLES))


def test_a_plain_loader_is_refused_with_what_to_use(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), batch_size=4)
    with (
        hf.CheckpointManager(tmp_path, hf.Checkpoint(loader=loader)) as manager,
        pytest.raises(hf.errors.UnsupportedValueError, match="ResumableDataLoader"),
    ):
        manager.save(1)
