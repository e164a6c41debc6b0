"""The batches of a loader, as a loop takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from holdfast.process.pulse import take_batch
from holdfast.tracebacks import short_traceback

Batch = TypeVar("Batch")


class BatchIterator(Iterator[Batch]):
    """The batches of one epoch, as a loop takes them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        """Stores the batches."""
        self._batches = batches

    @short_traceback
    def __next__(self) -> Batch:
        return take_batch(self._batches)


class BatchStream(BatchIterator[Batch]):
    """Batches without end. Iterating it again continues."""

    def __init__(self, batches: Iterator[Batch], epoch_batches: int) -> None:
        """Stores the batches, and their number per epoch."""
        super().__init__(batches)
        self._epoch_batches = epoch_batches

    def __repr__(self) -> str:
        return f"<BatchStream: {self._epoch_batches} batches per epoch, endless>"

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch, for loops that ask for that many at a time."""
        return self._epoch_batches
