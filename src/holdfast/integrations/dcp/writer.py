"""`StorageWriter`: lets `dcp.save` and `dcp.async_save` write a holdfast step, verified and durable.

The workers communicate through the protocol of `torch.distributed.checkpoint` alone: the plan tells each where to
write, each writes its own data file and index, and the coordinator, which receives the results of all, commits.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.futures import Future

from holdfast.catalog import Catalog, StoredRun
from holdfast.catalog.publish import Receipts
from holdfast.errors import DamageError, FencedError, HoldfastError, NotFoundError, StorageError, UsageError
from holdfast.format.encoding import MAX_DEPTH, Encoder, unsupported
from holdfast.format.index import MAX_INDEX_BYTES, BoxRecord, ElsewhereRecord, Index
from holdfast.format.index_checks import decode_index, find_cover_problem
from holdfast.format.names import MAX_STEP, StepName, index_name, join
from holdfast.format.records import Worker, WorkerRecord, list_features
from holdfast.format.scalars import Node
from holdfast.format.shapes import Box, StridesRecord, find_box_problem
from holdfast.integrations.dcp.state_tree import TREE, find_path, join_nodes, leaf_name, list_leaves
from holdfast.numbers import check_whole
from holdfast.policies import All, RetentionPolicy, read_keep
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.verify import list_objects
from holdfast.save.handle import Origin
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.run_writer import RunWriter
from holdfast.save.writer import StepFiles, write_index
from holdfast.state.leaves import ArrayBackend, ArraySpec, Captured, spec_of
from holdfast.state.registry import backend_of, sharder_of_type
from holdfast.storage import Storage, open_storage

_THREADS: Final = 4
_METADATA: Final = "torch.distributed.checkpoint"
FLATTENED: Final = "flattened"
"""Metadata of a step: True if its items are below the keys of the state, False if they are these themselves."""


class _Place(msgspec.Struct, frozen=True):
    """The place where one worker writes; it travels with the plan, and is recorded when it arrives.

    A planner that caches plans writes by the plan of an earlier save, and drops the new one with its place.
    """

    name: StepName
    worker: Worker

    def __reduce__(self) -> Any:
        return _arrive, (self.name, self.worker)


_arrived: Final = threading.local()
"""The place that last arrived in this thread: torch performs a save in one thread."""


def _arrive(name: StepName, worker: Worker) -> _Place:
    _arrived.place = place = _Place(name, worker)
    return place


class _Saving(NamedTuple):
    """A save in progress: its thread, and an event that is set once it has succeeded."""

    thread: threading.Thread
    ended: threading.Event


_beginning: Final = threading.Lock()
"""Guards the record of a writer's save in progress."""

_SAVE_BEFORE_SECONDS: Final = 1800
"""How long a save waits for the previous one."""


class _ItemsWritten(msgspec.Struct, frozen=True):
    """The files that one worker has written; they travel with the results.

    Attributes:
        record: Its files.
        nodes: The node of each of its items.
    """

    record: WorkerRecord
    nodes: bytes


class StorageWriter(dcp.StorageWriter):
    """Writes what `dcp.save` and `dcp.async_save` save as a holdfast step.

    Example:
        ```python
        writer = holdfast.dcp.StorageWriter("runs/a", keep=holdfast.Latest(3))
        dcp.save({"model": model, "optim": optimizer_state}, storage_writer=writer)
        ```

    A step appears whole or not at all, is durable when the save ends, and every byte of it has a digest. It contains
    one tree, like a step of `holdfast.save`: `holdfast list`, `show`, `verify` and `export` read it. Values other than
    tensors are stored as data: a value without a codec is refused by name, and nothing is pickled.

    Use one writer for a run. A save waits for the previous one; look at the future of each, which has its error.

    Attributes:
        step: The number of the next saved step; set it before a save, or leave it.
        saved_step: The step that was committed last, on the coordinating worker (rank 0); elsewhere None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage | None = None,
        *,
        step: int | None = None,
        keep: RetentionPolicy | int | str | None = None,
    ) -> None:
        """Stores the settings; writes nothing yet.

        Args:
            path: The run's directory, which is created if needed; a URL, or an open storage. A `checkpoint_id` given to
                `dcp.save` takes precedence.
            step: The number of the next saved step; None for the one after the newest, from 0. Existing steps with this
                number or a higher one are given up: the run continues from the one before.
            keep: Which steps to keep after each save; None for all.

        Raises:
            UsageError: If `step` is not a valid step number, or `keep` is not a policy.
        """
        self.step = None if step is None else check_whole("step", step, most=MAX_STEP)
        self.saved_step: int | None = None
        self._keep = read_keep(keep) or All()
        self._location = path
        self._storage: Storage | None = None
        self._line: RunWriter | None = None
        self._name: StepName | None = None
        self._stager: Stager | None = None
        self._saving: _Saving | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that `async_save` sends to the process that saves for this one and takes over the run."""
        state = {**vars(self), "_storage": None, "_line": None, "_name": None, "_stager": None, "_saving": None}
        self._line = self.step = None
        return state

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save."""
        if checkpoint_id is not None:
            self._location = checkpoint_id
            self._storage = self._line = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Opens the storage.

        Raises:
            UsageError: If no path was given, it has tiers, or the workers do not communicate.
        """
        if self._location is None:
            raise UsageError(
                "no path to save to was given", hint='Pass the path: holdfast.dcp.StorageWriter("runs/a").'
            )
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "dcp.save(use_collectives=False) creates one checkpoint for each worker, which holdfast does not "
                "support",
                hint="Leave the argument out: all workers write one step together.",
            )
        self._wait_save_before()
        if self._storage is None:
            storage = open_storage(self._location)
            if storage.traits.has_tiers:
                # Nothing would copy its steps on.
                raise UsageError("a StorageWriter has no tiers", hint="Pass one directory, or the URL of a bucket.")
            self._storage = storage

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """**Blocks.** Names the step, and tells each worker where it writes.

        Raises:
            FencedError: If another job has begun to save here since this writer did.
            UsageError: If the directory contains the run of a training loop.
            StorageError: If the storage fails.
        """
        storage = self._open()
        catalog = StoredRun(storage).look()
        if self._line is None:
            _check_no_run(storage, catalog)
            self._line = RunWriter(storage, self._keep, reuse_space=False)
        newest = -1 if catalog.newest is None else catalog.newest.step
        step = newest + 1 if self.step is None else check_whole("step", self.step, most=MAX_STEP)
        if step <= newest:
            self._line.leave_generation()
        before = max((name for name in catalog.living if name.step < step), default=None)
        with _explaining_fence():
            self._name, _ = self._line.open(Origin(before, catalog.generation), step)
        places = [_Place(self._name, Worker(rank, len(plans))) for rank in range(len(plans))]
        _arrived.place = places[0]  # A process alone sends nothing.
        return [dataclasses.replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[dcp.WriteResult]]:
        """**Blocks.** Writes this worker's items and makes them durable.

        Raises:
            UnsupportedValueError: If a value cannot be stored; the error has its path.
            UsageError: If the planner is of an unsupported kind.
            StorageError: If the storage fails.
        """
        storage, place = self._open(), _arrived.place
        collected = _Collector(place.worker)
        for item in plan.items:
            collected.take(item, planner, plan.planner_data)
        if self._stager is None:
            # Memory that was touched before takes a copy ten times as fast: it is kept for the next save.
            self._stager = Stager(HostBuffer())
        staging = self._stager.stage(collected.captured(), place.name.step)
        pool = WorkerPool(_THREADS, "holdfast-dcp")
        pool.start()
        try:
            pool.run(staging.copies_now())
            files = StepFiles(staging.snapshot, storage, place.name)
            try:
                receipts = files.finish(pool)
            finally:
                files.abandon()
        finally:
            pool.end()
        written = _ItemsWritten(receipts.workers[0], msgspec.json.encode(collected.nodes))
        result: Future[list[dcp.WriteResult]] = Future()
        result.set_result([dcp.WriteResult(MetadataIndex(TREE), receipts.size_bytes, written)])
        return result

    def finish(self, metadata: Metadata, results: list[list[dcp.WriteResult]]) -> None:
        """**Blocks.** Commits the step, which all workers have written, and removes steps that are not kept.

        Raises:
            UsageError: If the workers do not write to the same place, or lack a part of a tensor.
            FencedError: If another job has begun to save here meanwhile.
            StorageError: If the storage fails.
        """
        storage, line, name = self._open(), self._line, self._name
        assert line is not None, "prepare_global_plan() must be called first"
        assert name is not None, "prepare_global_plan() must be called first"
        try:
            receipts = self._complete(storage, name, [written[0].storage_data for written in results], metadata)
            notes = {"written_by": _METADATA, FLATTENED: metadata.planner_data is not None}
            with _explaining_fence():
                manifest = line.commit(receipts, name, {}, notes)
        except BaseException as error:
            try:
                line.give_up(name)
            except HoldfastError as left:
                error.add_note(f"The partly written step is still there, but is not a checkpoint: {left}")
            raise
        line.clean(name, {}, manifest)
        self.saved_step = name.step
        if self._saving is not None:
            self._saving.ended.set()
        if self.step == name.step:  # It may have been set for the next save already.
            self.step = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True if it is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _wait_save_before(self) -> None:
        """**Blocks** while a save is under way that `async_save` has begun before: both would write from one buffer.

        Raises:
            UsageError: If it does not end.
        """
        own = _Saving(threading.current_thread(), threading.Event())
        with _beginning:
            before, self._saving = self._saving, own
        if before is None or before.thread in (own.thread, threading.main_thread()):
            return
        deadline = time.monotonic() + _SAVE_BEFORE_SECONDS
        # A thread that has failed says so to its future alone.
        while not before.ended.wait(0.5) and before.thread.is_alive():
            if time.monotonic() > deadline:
                raise UsageError(
                    f"the save before this one has not ended within {_SAVE_BEFORE_SECONDS} seconds",
                    hint="Wait for the future of dcp.async_save before the next save: future.result().",
                )

    def _open(self) -> Storage:
        assert self._storage is not None, "set_up_storage_writer() must be called first"
        return self._storage

    def _complete(
        self, storage: Storage, name: StepName, shares: Sequence[_ItemsWritten], metadata: Metadata
    ) -> Receipts:
        """**Blocks.** Checks what all workers wrote, and puts the whole tree into the first worker's index."""
        nodes: dict[str, Node] = {}
        for share in shares:
            nodes |= msgspec.json.decode(share.nodes)
        tree = join_nodes({find_path(metadata.planner_data, item): node for item, node in nodes.items()})
        first, *others = (_read_back(storage, name, rank, len(shares)) for rank in range(len(shares)))
        first = msgspec.structs.replace(first, objects={TREE: tree}, elsewhere=tuple(_list_elsewhere(first, others)))
        problem = find_cover_problem([first, *others])
        if problem:
            raise UsageError(problem, hint="Save from all workers that hold a part of it, in one process group.")
        # A new file is written: existing files are never changed.
        storage.delete([join(name.directory, index_name(0, len(shares)))])
        (record,) = write_index(first, storage, name.directory).workers
        features = {feature for index in (first, *others) for feature in list_features(index)}
        return Receipts((record, *(share.record for share in shares[1:])), (), tuple(features))


@contextmanager
def _explaining_fence() -> Iterator[None]:
    """Names the usual cause of a fence: a program that makes a writer for each save, and does not wait for the save."""
    try:
        yield
    except FencedError as error:
        error.hint = (
            "Use one StorageWriter for all saves of a program, or wait for the future of dcp.async_save before you "
            "make the next one. Only one job may save to a run."
        )
        raise


def _check_no_run(storage: Storage, catalog: Catalog) -> None:
    """**Blocks.** Checks that the newest step is a tree: `keep` would remove the steps of a training loop."""
    if catalog.newest is None:
        return
    try:
        names = list_objects(storage, catalog.newest)
    except DamageError:
        return  # The restore has spoken of it, and went on from an older step.
    if names != [TREE]:
        raise UsageError(
            f"{storage.url} contains the run of a training loop ({', '.join(sorted(names))}), so dcp.save does not "
            "save there",
            hint="Save to another directory.",
        )


def _read_back(storage: Storage, name: StepName, rank: int, world_size: int) -> Index:
    path = join(name.directory, index_name(rank, world_size))
    try:
        return decode_index(storage.read(path, MAX_INDEX_BYTES), path=path, step=name.step)
    except NotFoundError as error:
        raise StorageError(
            f"{storage.url}: worker 0 does not see what worker {rank} wrote to {path}",
            path=path,
            hint="All workers must write to one place, such as a file system that their machines share.",
        ) from error


def _list_elsewhere(own: Index, others: Sequence[Index]) -> list[ElsewhereRecord]:
    """Returns the leaves of which other workers wrote a part, or all."""
    wholes = own.list_leaves().keys() - {box.leaf or box.name for box in own.boxes}
    ranks: dict[str, list[int]] = {}
    for index in others:
        for leaf in index.list_leaves():
            if leaf not in wholes:
                ranks.setdefault(leaf, []).append(index.rank)
    forms = list_leaves(tuple(others))
    return [ElsewhereRecord(leaf, *forms[leaf], tuple(held)) for leaf, held in ranks.items()]


class _Collector(Encoder):
    """Collects the items of one worker: values are encoded at once, arrays are named.

    Attributes:
        nodes: The node of each item.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._columns = Captured([], [], [], [], [], {})
        self._boxes: list[BoxRecord] = []
        self._strides: list[StridesRecord] = []
        self._names: set[str] = set()
        self.nodes: dict[str, Node] = {}

    def captured(self) -> Captured:
        """Everything that was collected."""
        return msgspec.structs.replace(
            self._columns, worker=self._worker, boxes=tuple(self._boxes), strides=tuple(self._strides)
        )

    def take(self, item: WriteItem, planner: SavePlanner, paths: object) -> None:
        """Adds an item."""
        name = item.index.fqn
        way = find_path(paths, name)
        leaf = leaf_name(way)
        if len(way) > MAX_DEPTH:
            raise unsupported(leaf, f"a value nested more than {MAX_DEPTH} levels deep", "Make the state flatter.")
        if item.type is WriteItemType.BYTE_IO:
            look_up = getattr(planner, "lookup_object", None)
            if look_up is None:
                raise UsageError(
                    f"{type(planner).__name__} gives out pickled bytes, but values are needed",
                    hint="Derive the planner from torch's DefaultSavePlanner.",
                )
            self.nodes[name] = self.encode(look_up(item.index), leaf, len(way))
            return
        tensor: Any = planner.resolve_data(item)
        backend, data = backend_of(tensor), item.tensor_data
        assert backend is not None, "resolve_data() gives tensors"
        assert data is not None, "the planner says what a tensor is a part of"
        spec = backend.describe([tensor]).check(0, leaf)
        offsets = tuple(data.chunk.offsets)
        shape = tuple(data.size)
        problem = find_box_problem(Box(offsets, spec.shape), shape)
        if problem:
            raise unsupported(leaf, f"an invalid part ({problem})", "The planner sets its offsets and sizes.")
        array = leaf if leaf not in self._names else f"{leaf}~b{len(self._boxes)}"
        if spec.shape != shape:
            self._boxes.append(BoxRecord(array, "" if array == leaf else leaf, shape, offsets))
        self._add(array, spec, tensor, backend)
        self.nodes[name] = {"$": "array", "k": "torch", "v": leaf}

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """Returns the node of an array within a value."""
        backend = None if sharder_of_type(type(value)) else backend_of(value)
        if backend is None:
            return None
        name, number = path, 2
        while name in self._names:
            name = f"{path}~{number}"
            number += 1
        self._add(name, backend.describe([value]).check(0, path), value, backend)
        return {"$": "array", "k": backend.name, "v": name}

    def coded(self, made: Any, path: str, depth: int) -> Node:
        """Returns the node of a codec's result, which may contain arrays."""
        return self.encode_apart(made, path, depth)

    def _add(self, name: str, spec: ArraySpec, array: Any, backend: ArrayBackend) -> None:
        if spec.quantizer is not None:
            raise unsupported(name, "a quantized tensor", "Store its int_repr(), with scale and zero point next to it.")
        if spec.strides is not None and not any(box.name == name for box in self._boxes[-1:]):
            self._strides.append(StridesRecord(name, spec.strides))
        self._names.add(name)
        self._columns.names.append(name)
        self._columns.specs.append(spec_of(spec.dtype, spec.shape))
        self._columns.arrays.append(array)
        self._columns.addresses.append(backend.address(array))
        self._columns.backends.append(backend)
