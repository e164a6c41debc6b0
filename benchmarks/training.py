"""A real training loop, and what saving takes from it; the same for all frameworks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import numpy as np

from benchmarks.live import LiveState
from benchmarks.peers.peer import Peer
from benchmarks.workloads import ModelSize, Workload, model_shapes, state_shapes

WARM_UP_STEPS = 3
_SEQUENCES = 2

S = TypeVar("S", bound=LiveState)


@dataclass(frozen=True, slots=True)
class Lost:
    """What was measured in one stretch of training.

    Attributes:
        step_seconds: The mean of a step while nothing was saved, before, between and after the saves.
        lost_seconds: Training time that a save has cost, its work in the background included; the median of the pairs.
        stall_seconds: The time in the call that saves; of several, the median.
        wait_seconds: How much longer the first change of the state after a save took than others; None where the
            change is not a part of the step that can be told from the rest.
    """

    step_seconds: float
    lost_seconds: float
    stall_seconds: float
    wait_seconds: float | None


class Training(ABC, Generic[S]):
    """A model of the GPT-2 kind with Adam on random tokens, on two threads.

    Attributes:
        state: What is saved.
    """

    state: S

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The bytes of the model and its optimizer's state."""

    @abstractmethod
    def step(self, allow_update: Callable[[], object]) -> float | None:
        """One step; calls `allow_update` before it changes the state.

        Returns:
            The seconds of that call and of the change, if they can be told.
        """

    def measure(self, peer: Peer[Any], first_step: int, pairs: int, interval_steps: int) -> Lost:
        """Trains pairs of intervals that begin with a save each, and half an interval before, between and behind them.

        What the first of a pair leaves to be done counts in the second, as in a job, where nobody waits between saves.
        What a step takes without a save drifts with the machine, so that each pair is held against those steps that
        are next to it.
        """
        plain_steps = max(1, interval_steps // 2)
        # While others had their turns, the machine took back what memory was free, and the first steps fetch it again.
        self._stretch(peer, plain_steps)
        seconds, updates = self._stretch(peer, plain_steps)
        plain = [seconds / plain_steps]
        taken: list[float] = []
        stalls: list[float] = []
        waits: list[float] = []
        saves = range(first_step, first_step + 2 * pairs)
        for first in saves[::2]:
            begun_at = time.perf_counter()
            for step in (first, first + 1):
                asked_at = time.perf_counter()
                peer.save(step)
                stalls.append(time.perf_counter() - asked_at)
                _, changes = self._stretch(peer, interval_steps)
                waits += changes[:1]
            taken.append((time.perf_counter() - begun_at) / 2)
            # What is not over by then would be counted as training's own.
            peer.wait_durable()
            seconds, changes = self._stretch(peer, plain_steps)
            plain.append(seconds / plain_steps)
            updates += changes
        for step in saves:
            peer.remove(step)
        beside = [fmean(steps) for steps in pairwise(plain)]
        return Lost(
            fmean(plain),
            median(took - interval_steps * step for took, step in zip(taken, beside, strict=True)),
            median(stalls),
            median(waits) - median(updates) if updates else None,
        )

    def _stretch(self, peer: Peer[Any], steps: int) -> tuple[float, list[float]]:
        """Trains; gives the seconds of all steps, and of the change of the state in each."""
        allow_update = _nothing if peer.waits_by_itself else peer.wait_copied
        begun_at = time.perf_counter()
        updates = [self.step(allow_update) for _ in range(steps)]
        return time.perf_counter() - begun_at, [seconds for seconds in updates if seconds is not None]


def _nothing() -> None:
    return


def first_arrays(size: ModelSize) -> dict[str, np.ndarray]:
    """**Pure.** What training begins with: the model's parameters, and the optimizer's state for each."""
    random = np.random.default_rng(0)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in state_shapes(Workload("", "", model=size))}
    for name, shape in model_shapes(size):
        if "norm" in name:
            arrays[name][...] = 1.0 if name.endswith("weight") else 0.0
        else:
            arrays[name][...] = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return arrays


def first_batch(size: ModelSize) -> np.ndarray:
    """**Pure.** Random tokens, which every step is trained on."""
    return np.random.default_rng(1).integers(size.vocabulary, size=(_SEQUENCES, size.context))
