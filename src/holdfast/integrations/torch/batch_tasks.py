"""A sampler's batches as tasks, each with a seed for its samples: the same batch, with or without a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from holdfast.format.digests import derive
from holdfast.integrations.torch.loader import generators_put_back, seed_generators
from holdfast.state.data.replay import Untrained


class BatchTasks:
    """A `batch_sampler` that yields tasks in the order of another sampler.

    Attributes:
        begin: How the next iterator begins: the key of the epoch's seeds, its first batch, how many it skips.
        newest: The newest iterator.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.begin = sampler, (0, 0, 0)
        self.newest = TaskIterator(iter(()), *self.begin)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> TaskIterator:
        self.newest = TaskIterator(iter(self._sampler), *self.begin)
        return self.newest


class TaskIterator(Untrained):
    """Yields for each batch its indices and its seed."""

    def __init__(self, indices: Iterator[Any], key: int, number: int, skipped: int) -> None:
        super().__init__(indices, skipped)
        self._key, self._number = key, number
        self._ready: list[Any] = []
        self._has_begun = False

    def prime(self) -> None:
        """Prepares the next task, if it is not in progress already."""
        if not self._has_begun:
            with suppress(StopIteration):
                self._ready.append(next(self))

    def __next__(self) -> Any:
        self._has_begun = True
        if self._ready:
            return self._ready.pop()
        task = super().__next__(), derive(self._key, self._number)
        self._number += 1
        return task


class SeededBatches(Dataset[Any]):
    """A dataset that makes a whole batch, with every generator seeded for it.

    It has the attributes of the user's dataset, which a `worker_init_fn` may read and set by `get_worker_info()`.
    """

    def __init__(self, dataset: Any, collate: Any, is_batched: bool) -> None:
        vars(self)["_kept"] = dataset, collate, is_batched

    def __getattr__(self, name: str) -> Any:
        if name == "_kept" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._kept[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._kept[0], name, value)

    def __getitems__(self, task: tuple[Any, int]) -> Any:
        indices, seed = task
        # A worker's generators belong to nothing else.
        with generators_put_back() if get_worker_info() is None else nullcontext():
            seed_generators(seed)
            dataset, collate, is_batched = self._kept
            if not is_batched:
                return collate(dataset[indices])
            load_many = getattr(dataset, "__getitems__", None)
            return collate(load_many(indices) if callable(load_many) else [dataset[index] for index in indices])
