"""`StorageReader`: lets `dcp.load` read a holdfast step; each worker reads what it needs, and every byte is checked."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.catalog import StoredRun, StoredStep
from holdfast.errors import DamageError, HoldfastError, NoCheckpointError, NoWholeCheckpointError, UsageError
from holdfast.format.codecs import Codec
from holdfast.format.decoding import UNFILLED, Decoder, malformed
from holdfast.format.names import MANIFEST_NAME, MAX_STEP, StepName
from holdfast.format.scalars import Node
from holdfast.integrations.dcp.state_tree import TREE, Items, find_path, leaf_name, list_items, list_leaves
from holdfast.integrations.dcp.writer import FLATTENED
from holdfast.integrations.torch.tensors import TORCH_DTYPES
from holdfast.numbers import check_whole
from holdfast.restore.candidates import choose_candidates
from holdfast.restore.plan import plan_reads
from holdfast.restore.read import open_pool, read_orders
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step, read_rank
from holdfast.state.leaves import ArraySpec, Target, spec_of
from holdfast.state.registry import backend_named
from holdfast.storage import Storage, open_storage

_THREADS: Final = 4


class _Opened:
    """An open step, with its items."""

    def __init__(self, storage: Storage, step: OpenedStep) -> None:
        objects = {name: node for index in step.indexes for name, node in index.objects.items()}
        if objects.keys() != {TREE}:
            raise UsageError(
                f"{storage.url} contains a run of {', '.join(sorted(objects))}, which dcp.load does not read",
                hint="A holdfast training loop wrote it: restore it with that loop, or with holdfast.load.",
            )
        self.storage, self.step = storage, step
        forms = list_leaves(step.indexes)
        self.specs: dict[str, ArraySpec] = {leaf: spec_of(*form) for leaf, form in forms.items()}
        flattened = bool(step.manifest.metadata.get(FLATTENED, True))
        self.items: Items = list_items(objects[TREE], forms, flattened=flattened)

    def describe(self) -> Metadata:
        """Returns the metadata that torch plans with: the items, and how their tensors are split."""
        chunks: dict[str, dict[Any, ChunkStorageMetadata]] = {leaf: {} for leaf in self.specs}
        for index in self.step.indexes:
            for stored in index.stored_boxes():
                if stored.box.elements or 0 in stored.global_shape:
                    offsets, sizes = stored.box.offsets, stored.box.shape
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    chunks[stored.leaf].setdefault((offsets, sizes), chunk)
        entries: dict[str, Any] = {}
        for name, leaf in self.items.leaves.items():
            if leaf:
                spec = self.specs[leaf]
                properties = TensorProperties(dtype=TORCH_DTYPES[spec.dtype])
                entries[name] = TensorStorageMetadata(properties, torch.Size(spec.shape), list(chunks[leaf].values()))
            else:
                entries[name] = BytesStorageMetadata()
        return Metadata(entries, planner_data=self.items.paths)


class StorageReader(dcp.StorageReader):
    """Lets `dcp.load` read what `holdfast.dcp.StorageWriter` wrote, on any number of workers.

    Example:
        ```python
        dcp.load(state, storage_reader=holdfast.dcp.StorageReader("runs/a"))
        ```

    It reads the newest committed step; the remains of a killed save do not count. A step with damaged records is
    skipped with a warning. Every byte that is read is checked: if one is damaged, `dcp.load` ends with an error that
    names file and tensor, and `step=` selects an older step. Nothing is executed. It also reads steps of
    `holdfast.save`.

    Attributes:
        loaded_step: The step that was loaded last, or None.
    """

    def __init__(self, path: str | os.PathLike[str] | Storage | None = None, *, step: int | None = None) -> None:
        """Stores the settings; reads nothing yet.

        Args:
            path: The directory of the run or of one step; a URL, or an open storage. A `checkpoint_id` given to
                `dcp.load` takes precedence.
            step: The step; None for the newest.

        Raises:
            UsageError: If the step is not a valid step number.
        """
        self.step = None if step is None else check_whole("step", step, most=MAX_STEP)
        self.loaded_step: int | None = None
        self._location = path
        self._opened: _Opened | None = None
        self._problem: HoldfastError | None = None

    def latest_step(self) -> int | None:
        """**Blocks.** Returns the newest step, or None if nothing was saved yet.

        Raises:
            NoWholeCheckpointError: If steps were committed, but have lost their manifests.
            UsageError: If no path was given.
            StorageError: If the storage fails.
        """
        storage = self._locate()
        if StoredStep(storage, "").has(MANIFEST_NAME):
            return open_step(storage, "", None).name.step
        StoredRun(storage).check_nothing_lost()
        newest = StoredRun(storage).look().newest
        return None if newest is None else newest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load."""
        if checkpoint_id is not None:
            self._location = checkpoint_id
        self._opened = self._problem = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """**Blocks.** Returns the step's metadata; `set_up_storage_reader` raises its errors.

        For an error raised here, torch would report that there is no metadata, and look for other metadata.
        """
        try:
            self._opened = self._open()
            return self._opened.describe()
        except HoldfastError as error:
            self._problem = error
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks that there is a step to read.

        Raises:
            NoCheckpointError: If there is none, or not that one.
            NoWholeCheckpointError: If all are damaged.
            DamageError: If the requested step is damaged.
            UsageError: If no path was given, or the directory contains something else.
            StorageError: If the storage fails.
        """
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes which step this worker has open."""
        return dataclasses.replace(plan, storage_data=self._get_opened().step.name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all workers read the same step.

        Raises:
            NoCheckpointError: If they do not.
        """
        found: dict[StepName, int] = {}
        for rank, plan in enumerate(plans):
            found.setdefault(plan.storage_data, rank)
        if len(found) > 1:
            told = ", ".join(f"step {name.step} on worker {rank}" for name, rank in found.items())
            raise NoCheckpointError(
                f"the workers found different newest steps: {told}",
                hint="If a save has just ended, load again; otherwise check that all workers use the same directory.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """**Blocks.** Reads what this worker needs, into its tensors.

        Raises:
            DamageError: If something is damaged; some tensors may have been filled by then.
            UnsupportedValueError: If a value has a type that this program does not know.
            StorageError: If the storage fails.
        """
        opened = self._get_opened()
        reading = _Reading(opened)
        tensors = [(item, *reading.want(item, planner)) for item in plan.items if item.type is LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        for item in values:
            reading.value(item)
        reading.read()
        for item, tensor, place in tensors:
            if place is not tensor:
                tensor.copy_(place)
            planner.commit_tensor(item, tensor)
        for item in values:
            # The planner takes values as torch has pickled them: this is made here, of a value.
            data = io.BytesIO()
            torch.save(reading.value(item), data)
            data.seek(0)
            planner.load_bytes(item, data)
        self.loaded_step = opened.step.name.step
        result: Future[None] = Future()
        result.set_result(None)
        return result

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True if it is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _get_opened(self) -> _Opened:
        assert self._opened is not None, "read_metadata() must be called first"
        return self._opened

    def _locate(self) -> Storage:
        if self._location is None:
            raise UsageError(
                "no path to load from was given", hint='Pass the path: holdfast.dcp.StorageReader("runs/a").'
            )
        return open_storage(self._location)

    def _open(self) -> _Opened:
        storage = self._locate()
        if StoredStep(storage, "").has(MANIFEST_NAME):
            return _Opened(storage, open_step(storage, "", None))
        catalog = StoredRun(storage).look()
        damages: list[DamageError] = []
        for name in choose_candidates(catalog, StoredRun(storage).find_lost(catalog), self.step, storage.url):
            try:
                return _Opened(storage, open_step(storage, name.directory, name))
            except DamageError as damage:
                if self.step is not None:
                    raise
                damages.append(damage)
                warnings.warn(f"step {name.step} is damaged and was skipped: {damage.message}", stacklevel=2)
        if damages:
            text = f"{storage.url}: every step is damaged: {'; '.join(damage.message for damage in damages)}"
            raise NoWholeCheckpointError(text, damages=tuple(damages))
        raise NoCheckpointError(f"{storage.url} contains no checkpoint")


class _Reading(Decoder):
    """The reads of one worker. Values are decoded twice: first to find the arrays in them, then with these."""

    def __init__(self, opened: _Opened) -> None:
        super().__init__()
        self._opened = opened
        self._targets: list[Target] = []
        # By leaf, those within values.
        self._arrays: dict[str, Any] = {}
        self._is_read = False

    def want(self, item: ReadItem, planner: LoadPlanner) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a box of a tensor. Returns the tensor that is to have it, and the one that it is read into."""
        leaf = self._opened.items.leaves[item.storage_index.fqn]
        spec = self._opened.specs[leaf]
        shape, dtype = tuple(item.lengths), TORCH_DTYPES[spec.dtype]
        begin = item.storage_index.offset or (0,) * len(shape)
        offsets = tuple(map(int.__add__, begin, item.storage_offsets))
        tensor = place = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{leaf}: the planner requested {list(shape)} for a tensor of {list(tensor.shape)}")
        library = backend_named("torch")
        if type(tensor) is not torch.Tensor or tensor.dtype != dtype or library.describe([tensor]).unfillable:
            place = torch.empty(shape, dtype=dtype)
        part = spec_of(spec.dtype, shape)
        self._targets.append(Target(leaf, part, place, library, (), library.address(place), offsets))
        return tensor, place

    def value(self, item: ReadItem) -> Any:
        """Returns a value. Before everything was read this adds its arrays."""
        items, name = self._opened.items, item.storage_index.fqn
        return self.decode(items.nodes[name], path=leaf_name(find_path(items.paths, name)))

    def read(self) -> None:
        """**Blocks.** Reads everything that was added."""
        storage, step = self._opened.storage, self._opened.step
        read_index = partial(read_rank, storage, step.directory, step.manifest)
        plan = plan_reads(step, self._targets, self._opened.specs, read_index)
        with open_pool(storage, _THREADS, step.manifest.data_bytes) as pool:
            read_orders(storage, plan.orders, {}, pool, storage)
        self._is_read = True

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        """Returns the array, which is new if it was not asked for before."""
        if leaf not in self._arrays:
            spec, backend = self._opened.specs[leaf], backend_named(library)
            self._arrays[leaf] = made = backend.new(spec)
            self._targets.append(Target(leaf, spec, made, backend, (), backend.address(made)))
        return self._arrays[leaf]

    def coded(self, codec: Codec, payload: Node, live: Any, path: str, depth: int) -> Any:
        """Returns the value that its codec makes, once all is read."""
        made = self.decode(payload, UNFILLED, path, depth)
        if not self._is_read:
            return made
        try:
            return codec.decode(made)
        except Exception as error:
            raise malformed(path, f"the codec {codec.tag!r} rejected the stored value: {error!r}") from error
