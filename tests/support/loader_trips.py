"""Loaders that are run, and taken up again where a checkpoint left them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch

from holdfast.integrations.torch.loader import ResumableDataLoader
from holdfast.state.capture import capture_objects
from holdfast.state.match.matching import match_objects


def plain(batch: Any) -> Any:
    """A batch as values that can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return tuple(map(plain, batch)) if isinstance(batch, list | tuple) else batch


def run(loader: ResumableDataLoader, epochs: int, taken: int | None = None) -> list[Any]:
    loop = ((epoch, plain(batch)) for epoch in loader.epochs(epochs) for batch in loader)
    return list(itertools.islice(loop, taken))


def through_checkpoint(before: dict[str, Any], after: dict[str, Any]) -> None:
    """State goes the way that it goes into a checkpoint and back."""
    stored = capture_objects(before)
    matching = match_objects(after, stored.objects, dict(zip(stored.names, stored.specs, strict=True)))
    assert not matching.differences, matching.differences
    for target in matching.targets:
        image = memoryview(bytearray(target.spec.size_bytes))
        place = stored.names.index(target.leaf)
        stored.backends[place].copy_out([stored.arrays[place]], image, [0])
        target.backend.copy_in(target.array, image)
    matching.apply()


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))
