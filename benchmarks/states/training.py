"""A real training loop, and what saving takes from it; the same for all frameworks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import numpy as np
from benchmarks.peers.peer import Peer
from benchmarks.states.live import LiveState
from benchmarks.states.workloads import ModelSize, Workload, model_shapes, state_shapes

WARM_UP_STEPS = 3
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-4, 0.9, 0.999, 1e-8, 1e-2
"""Of AdamW."""
_SEQUENCES = 2

S = TypeVar("S", bound=LiveState)


class Training(ABC, Generic[S]):
    """A model of the GPT-2 kind with Adam on random tokens, on two threads.

    Attributes:
        state: What is saved.
    """

    state: S

    @abstractmethod
    def step(self, allow_update: Callable[[], object]) -> float | None:
        """One step; calls `allow_update` before it changes the state.

        Returns:
            The seconds of that call and of the change; None if these are not a part of their own.
        """

    def measure(self, peer: Peer[Any], first_step: int, pairs: int, interval_steps: int) -> dict[str, float]:
        """Trains pairs of intervals that begin with a save each, and half an interval before, between and after them.

        What the first of a pair leaves to be done counts in the second, as in a job that does not wait between saves.
        What a step takes without a save drifts with the machine, so that each pair is held against those steps that
        are next to it.

        Returns:
            In seconds: `step`, the mean of a step while nothing was saved; `lost`, the training time that a save has
            cost, its work in the background included, the median of the pairs; `stall`, the time in the call that
            saves; and `wait`, how much longer the first change of the state after a save took than others, where that
            change is a part of its own.
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
        nearby = [fmean(steps) for steps in pairwise(plain)]
        return {
            "lost": median(took - interval_steps * step for took, step in zip(taken, nearby, strict=True)),
            "step": fmean(plain),
            "stall": median(stalls),
            **({"wait": median(waits) - median(updates)} if updates else {}),
        }

    def _stretch(self, peer: Peer[Any], steps: int) -> tuple[float, list[float]]:
        """Trains; gives the seconds of all steps, and of the change of the state in each."""
        allow_update = nothing if peer.waits_by_itself else peer.wait_copied
        begun_at = time.perf_counter()
        updates = [self.step(allow_update) for _ in range(steps)]
        return time.perf_counter() - begun_at, [seconds for seconds in updates if seconds is not None]


def nothing() -> None:
    """Called where nothing has to be waited for."""
    return


def first_arrays(size: ModelSize) -> dict[str, np.ndarray]:
    """**Pure.** The arrays that training begins with: the model's parameters, and the optimizer's state for each."""
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
