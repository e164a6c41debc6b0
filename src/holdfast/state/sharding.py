"""`Shard` and `PerWorker`: mark a part of an array, and state that differs per worker."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, find_box_problem
from holdfast.state.adapters import TREE, Adapter, CaptureContext, Loading, Readable
from holdfast.state.leaves import (
    ArrayBackend,
    ArraySpec,
    Facts,
    LocalBox,
    PendingArray,
    Pieces,
    Sharding,
    Skeleton,
    spec_like,
)
from holdfast.state.registry import (
    backend_of,
    backend_of_type,
    find_stateful,
    may_change_when_read,
    register_adapter,
    register_sharder,
)


class Shard:
    """A part of an array; other workers hold the rest.

    Use it instead of the array, wherever an array is allowed: `Checkpoint(table=holdfast.Shard(rows, (1_000_000, 64),
    (rank * 250_000, 0)))`. All workers together must hold the whole array, each element once; a part that several
    workers hold is written once if each names all holders. It can be restored into any other division, or into a plain
    array.
    """

    def __init__(
        self,
        tensor: Any,
        global_shape: Iterable[int],
        offsets: Iterable[int],
        *,
        holders: Iterable[int] | None = None,
    ) -> None:
        """Describes what a tensor is a part of.

        Args:
            tensor: A plain tensor or array, which holds the values.
            global_shape: The shape of the whole array.
            offsets: For each dimension, where the part begins.
            holders: The ranks of all workers that hold this same part; None if only this worker does.

        Raises:
            UsageError: If it is not a tensor or array, or cannot be such a part.
        """
        if backend_of(tensor) is None:
            raise UsageError(f"a Shard needs a tensor or an array, got {type(tensor).__qualname__}")
        self.tensor = tensor
        self.global_shape = _numbers("global_shape", global_shape)
        self.offsets = _numbers("offsets", offsets)
        self.holders = None if holders is None else tuple(sorted(set(_numbers("holders", holders))))
        problem = find_box_problem(Box(self.offsets, tuple(tensor.shape)), self.global_shape)
        if problem:
            raise UsageError(
                f"not a valid shard: {problem}",
                hint="offsets and the tensor's shape define its place in the global shape.",
            )

    def __repr__(self) -> str:
        return f"Shard({Box(self.offsets, tuple(self.tensor.shape))} of {list(self.global_shape)})"


def _numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise UsageError(
            f"{name} must be whole numbers, got {values!r} ({error})",
            hint="Divide sizes with //, and pass one number for each dimension.",
        ) from error


class _PendingShard(Shard, PendingArray):
    """A placeholder of a Shard whose tensor is created once its values have arrived."""

    def check(self, leaf: str) -> None:
        self.tensor.check(leaf)

    def finish(self) -> Shard:
        return Shard(self.tensor.finish(), self.global_shape, self.offsets, holders=self.holders)


class PerWorker:
    """State that differs per worker, such as the position in a stream of data that no other worker reads.

    Wrap an object in it: `Checkpoint(stream=holdfast.PerWorker(stream))`. Everything else is assumed to be the same on
    all workers, except random generators (`RNG`), which always differ per worker.

    Each worker restores what the worker of its rank saved. If the number of workers has changed, such state has no
    meaning any more: then it is left unchanged, and random generators are reseeded; an event says so.
    """

    def __init__(self, value: Any) -> None:
        """Wraps an object with state, a tensor, or a tree of these."""
        self.value = value

    def __repr__(self) -> str:
        return f"PerWorker({type(self.value).__name__})"


class _ShardSharder:
    def look(self, arrays: Sequence[Any], path_of: Callable[[int], str], worker: Worker) -> list[Sharding]:
        shardings: dict[int, Sharding] = {}
        rows: dict[ArrayBackend | None, list[int]] = {}
        for row, array in enumerate(arrays):
            rows.setdefault(backend_of(array.tensor), []).append(row)
        for backend, own in rows.items():
            if backend is None:
                path = path_of(own[0])
                raise UnsupportedValueError(f"{path}: the tensor of this Shard is no longer an array", path=path)
            facts = backend.describe([arrays[row].tensor for row in own])
            for number, row in enumerate(own):
                shardings[row] = self._look(arrays[row], path_of(row), worker, backend, facts, number)
        return [shardings[row] for row in range(len(arrays))]

    def _look(self, array: Shard, path: str, worker: Worker, backend: ArrayBackend, facts: Facts, row: int) -> Sharding:
        own = facts.check(row, path)
        holders = (worker.rank,) if array.holders is None else array.holders
        if worker.rank not in holders or holders[-1] >= worker.world_size:
            raise UnsupportedValueError(
                f"{path}: this Shard names the workers {list(holders)} as its holders, but this is worker "
                f"{worker.rank} of {worker.world_size}",
                path=path,
                hint="Name the ranks of all workers of this job that hold it, including this one.",
            )
        memory = (facts.memory(row), array.offsets, array.global_shape)
        local = LocalBox(Box(array.offsets, own.shape), array.tensor, holders)
        spec, is_fillable = spec_like(own, array.global_shape), row not in facts.unfillable
        return Sharding(spec, backend, (local,), memory, facts.keys[row], is_by_hand=True, is_fillable=is_fillable)

    def take_apart(self, arrays: Sequence[Any]) -> Pieces | None:
        """Returns the local tensors; the marks are what the program has declared of each."""
        tensors = [array.tensor for array in arrays]
        backends = set(map(backend_of_type, set(map(type, tensors))))
        backend = backends.pop()
        if backends or backend is None:
            return None
        return Pieces(backend, tensors, [(array.global_shape, array.offsets, array.holders) for array in arrays])

    def new(self, like: Any, spec: ArraySpec) -> Any:
        backend = backend_of(like.tensor)
        assert backend is not None  # It was looked at before.
        tensor = backend.new(spec_like(spec, tuple(like.tensor.shape)), like.tensor)
        kind = _PendingShard if isinstance(tensor, PendingArray) else Shard
        return kind(tensor, like.global_shape, like.offsets, holders=like.holders)


PER_WORKER: Final = "per_worker"


class _PerWorkerAdapter(Adapter):
    kind = PER_WORKER
    is_per_worker = True

    def prepare(self, obj: Any) -> None:
        for _, part, adapter in find_stateful(obj.value, ""):
            (adapter or Adapter()).prepare(part)

    def readable(self, obj: Any) -> Readable:
        return Readable.WHEN_SAVED if may_change_when_read(obj.value) else Readable.ALWAYS

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        return obj.value

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        value = loading.value(stored, obj.value, rules=TREE)

        def load() -> None:
            obj.value = loading.put(obj.value, value)

        return load

    def begin_anew(self, obj: Any, stored: Skeleton, worker: Worker) -> Callable[[], None] | None:
        parts = ((part, adapter) for _, part, adapter in find_stateful(obj.value, "") if adapter is not None)
        begins = [begin for part, adapter in parts if (begin := adapter.begin_anew(part, stored, worker)) is not None]

        def load() -> None:
            for begin in begins:
                begin()

        return load if begins else None


register_sharder(Shard, _ShardSharder())
register_adapter(PerWorker, _PerWorkerAdapter())
