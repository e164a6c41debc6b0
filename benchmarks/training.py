"""A real training loop, and what saving takes from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.model import Model
from benchmarks.peers.peer import Peer
from benchmarks.state import State
from benchmarks.workloads import TRAINED

_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class Lost:
    """What was measured in one stretch of training.

    Attributes:
        step_seconds: The mean of a step while nothing was saved, before and after the saves.
        saving_seconds: All steps of the part with saves, the saves included.
        saving_steps: How many steps those were.
        saves: How many saves.
        stall_seconds: The mean time in the call that saves.
    """

    step_seconds: float
    saving_seconds: float
    saving_steps: int
    saves: int
    stall_seconds: float

    @property
    def lost_seconds(self) -> float:
        """Training time that one save has cost, its work in the background included."""
        return (self.saving_seconds - self.saving_steps * self.step_seconds) / self.saves


class Training:
    """A model of the GPT-2 kind with AdamW on random tokens, on two threads."""

    def __init__(self, scale: float) -> None:
        torch.manual_seed(0)
        size = TRAINED.scaled(scale)
        self._model = Model(size)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = torch.randint(size.vocabulary, (_SEQUENCES, size.context))
        self._next_step = 1
        for _ in range(3):
            self._train()
        self.state = State({"model": self._model, "optimizer": self._optimizer})

    @property
    def size_bytes(self) -> int:
        """The bytes of the model and its optimizer's state."""
        return sum(tensor.nbytes for tensor in self.state.tensors().values())

    def measure(self, peer: Peer, saves: int, interval_steps: int) -> Lost:
        """Trains half an interval, then `saves` intervals that begin with a save each, then half an interval."""
        plain_steps = max(1, interval_steps // 2)
        plain_seconds = self._stretch(plain_steps)
        stalls = []
        paths: list[int] = []
        begun_at = time.perf_counter()
        for _ in range(saves):
            asked_at = time.perf_counter()
            peer.save(self._next_step)
            stalls.append(time.perf_counter() - asked_at)
            paths.append(self._next_step)
            self._stretch(interval_steps)
        saving_seconds = time.perf_counter() - begun_at
        peer.wait_durable()
        plain_seconds += self._stretch(plain_steps)
        for step in paths:
            peer.remove(step)
        return Lost(
            plain_seconds / (2 * plain_steps), saving_seconds, saves * interval_steps, saves, sum(stalls) / len(stalls)
        )

    def _stretch(self, steps: int) -> float:
        begun_at = time.perf_counter()
        for _ in range(steps):
            self._train()
        return time.perf_counter() - begun_at

    def _train(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).backward()
        self._optimizer.step()
        self._next_step += 1


def open_training(peer: Peer, directory: Path, scale: float) -> Training:
    """A training loop whose state the peer saves."""
    training = Training(scale)
    peer.open(directory, training.state)
    return training
