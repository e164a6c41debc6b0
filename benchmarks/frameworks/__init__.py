"""The costs of saves and restarts in the training loops of frameworks. `python -m benchmarks.frameworks --help`.

`__main__` lets holdfast and a framework's own checkpointing take turns (`comparison`), each in a fresh process that
trains with that framework (`fit`, and a file for each of them), and shows what was measured (`page`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOTHING: Final = "nothing"
"""The way of a fit that is not saved."""


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework.

    Attributes:
        title: Its name, for people.
        place: Where its fit is.
        ways: By what it is saved; holdfast is the first.
        needs: The packages that it needs, as pip names them.
        takes_streams: Whether restarts are measured with a stream of samples, too.
    """

    title: str
    place: str
    ways: tuple[str, ...]
    needs: tuple[str, ...]
    takes_streams: bool = False


FRAMEWORKS: Final = {
    "lightning": Framework(
        "Lightning",
        "benchmarks.frameworks.lightning_fit:LightningFit",
        ("holdfast", "ModelCheckpoint", "AsyncCheckpointIO"),
        ("lightning", "torch", "torchdata"),
    ),
    "transformers": Framework(
        "Hugging Face Trainer",
        "benchmarks.frameworks.transformers_fit:TransformersFit",
        ("holdfast", "save_steps"),
        ("transformers", "accelerate", "torch"),
        takes_streams=True,
    ),
    "keras": Framework(
        "Keras",
        "benchmarks.frameworks.keras_fit:KerasFit",
        ("holdfast", "BackupAndRestore"),
        ("keras", "torch"),
    ),
    "flax": Framework(
        "Flax NNX",
        "benchmarks.frameworks.flax_fit:FlaxFit",
        ("holdfast", "Orbax"),
        ("flax", "optax", "orbax-checkpoint", "torch"),
    ),
}
"""All frameworks, by the name that the results use."""
