"""Datasets that can only be iterated: whether their own state is exact, and what that leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import IterableDataset

_LIBRARY: Final = "datasets."
"""The module of Hugging Face's streams and of all that they consist of."""


def has_state(obj: object) -> bool:
    """Returns True if an object has a position that can be read and restored."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def is_exact(dataset: Any) -> bool:
    """Returns True if the stream's own state resumes it exactly.

    That of `datasets` leaves out the samples in a buffer of `shuffle(buffer_size=...)`: they would never come.
    """
    return has_state(dataset) and not has_buffer(dataset)


def has_buffer(dataset: Any) -> bool:
    """Returns True if there is a shuffle buffer of `datasets` anywhere in a stream."""
    return any(type(part).__name__.startswith("BufferShuffled") and part.buffer_size > 1 for part in _walk(dataset))


def read_epochs(dataset: Any) -> list[int]:
    """Returns the epoch of each stream of `datasets` in a dataset: its shuffled order follows from that."""
    return [int(part._epoch) for part in _list_streams(dataset)]


def write_epochs(dataset: Any, epochs: list[int]) -> None:
    """Restores what `read_epochs` returned."""
    for part, epoch in zip(_list_streams(dataset), epochs, strict=False):
        part.set_epoch(epoch)


def begin_anew(dataset: Any) -> None:
    """Makes the next pass begin at the first sample: a stream of `datasets` begins each one at the state it loaded."""
    for part in _list_streams(dataset):
        part._starting_state_dict = None


def _list_streams(dataset: Any) -> list[Any]:
    return [part for part in _walk(dataset) if hasattr(part, "_starting_state_dict")]


def _walk(dataset: Any) -> Iterator[Any]:
    """Yields a stream and what it reads from, as far as these are streams too, or parts of those of `datasets`."""
    parts, seen = [dataset], {id(dataset)}
    for part in parts:
        yield part
        for value in getattr(part, "__dict__", {}).values():
            for each in value if isinstance(value, list | tuple) else (value,):
                is_known = isinstance(each, IterableDataset) or type(each).__module__.startswith(_LIBRARY)
                if is_known and id(each) not in seen:
                    seen.add(id(each))
                    parts.append(each)
