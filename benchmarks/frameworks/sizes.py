"""The models that fits of frameworks train."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class FitSize:
    """A model and its data.

    Attributes:
        vocabulary: How many rows the frozen embedding has.
        width: The width of the embedding and of each layer.
        layers: How many layers are trained, with AdamW.
        batch: How many samples a step takes.
        sample_seconds: How long it takes to load a sample.
        is_stream: Whether the samples come one after the other, and none of them by its index.
    """

    vocabulary: int
    width: int
    layers: int
    batch: int
    sample_seconds: float
    is_stream: bool = False

    def scaled(self, scale: float) -> FitSize:
        """A model with about that part of the parameters, narrower and with fewer layers."""
        part = math.cbrt(scale)
        return replace(
            self,
            vocabulary=max(16, round(self.vocabulary * part**2)),
            width=max(8, round(self.width * part)),
            layers=max(1, round(self.layers * part)),
        )

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """All tensors that a save has to keep."""
        shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (self.vocabulary, self.width))]
        for layer in range(self.layers):
            for kind in ("parameter", "exp_avg", "exp_avg_sq"):
                shapes.append((f"{layer}.{kind}.weight", (self.width, self.width)))
                shapes.append((f"{layer}.{kind}.bias", (self.width,)))
        return shapes


TRAINED: Final = FitSize(vocabulary=16, width=1024, layers=16, batch=4, sample_seconds=0.0)
"""All of it is trained: 0.20 GB with its optimizer's state."""
FROZEN: Final = FitSize(vocabulary=195_000, width=256, layers=1, batch=2, sample_seconds=0.001)
"""Most of it is frozen, so that thousands of steps take seconds: 0.20 GB as well."""
