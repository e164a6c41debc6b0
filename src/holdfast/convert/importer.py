"""Drives an import: files of other programs to a committed checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.catalog import read_catalog, read_generations
from holdfast.convert.detect import ArchivedTree, ImportSource
from holdfast.convert.exporter import ProgressWatcher
from holdfast.convert.input_files import InputArray, read_spans, whole_array
from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.pickle_read import PickledObject, shown
from holdfast.convert.pickle_write import Global, Persistent
from holdfast.convert.torch_file import TorchArchive, coded_value_of
from holdfast.errors import FormatError, HoldfastError, UnsupportedValueError, UsageError
from holdfast.format.digests import SPAN_BYTES, digest
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.encoding import Encoder, escape, path_part
from holdfast.format.index import Index, Layout, LeafRecord, plan_layout
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MAX_STEP,
    StepName,
    base_path,
    data_name,
    generation_path,
)
from holdfast.format.scalars import Node, is_text, tagged
from holdfast.format.shapes import StridesRecord, find_layout
from holdfast.numbers import check_whole
from holdfast.policies import All
from holdfast.restore.candidates import Selection, make_selection
from holdfast.save.commit.run_writer import RunWriter
from holdfast.save.records import Origin
from holdfast.save.write.writer import PIECE_BYTES, write_index
from holdfast.storage import Storage, local_directory, open_storage
from holdfast.storage.buffers import take_pages
from holdfast.tracebacks import short_traceback

_WRAPPERS: Final = ("module.", "_orig_mod.")
_MOST_TIMES: Final = 4
_ALWAYS_BYTES: Final = 64 << 20

_OPTIMIZER_STATE: Final = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})
"""State of an optimizer for one parameter has these: nothing in it is ever one with another thing."""


class Import(msgspec.Struct, frozen=True):
    """What an import has made.

    Attributes:
        step: The step.
        name: The checkpoint.
        run: The run that it lies in.
        format: What it was made of: `torch`, `dcp` or `safetensors`.
        objects: The names of its objects.
        arrays: How many arrays it has.
        size_bytes: What these take.
        left_out: What does not stand in it, and why.
        renamed: The objects from whose names was taken what wrappers put in front of them.
        seconds: How long it took.
    """

    step: int
    name: StepName
    run: str
    format: str
    objects: tuple[str, ...]
    arrays: int
    size_bytes: int
    left_out: tuple[LeftOut, ...]
    renamed: tuple[str, ...]
    seconds: float


@short_traceback
def import_checkpoint(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str] | Storage,
    *,
    step: int = 0,
    only: str | Iterable[str] | None = None,
    name: str = "model",
    skip_unknown: bool = False,
    watcher: ProgressWatcher | None = None,
) -> Import:
    """**Blocks.** Makes a committed checkpoint of what another program has saved; nothing in it is executed.

    It takes the same memory however large the arrays are. Its objects are the outermost entries of the source: with
    `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}` a run with a `model` and an `optimizer` goes on
    from it.

    Args:
        source: A file of `torch.save`, a directory of `torch.distributed.checkpoint`, a safetensors file, or a
            directory of such.
        run: The run's directory, a URL, or an open storage. It must have no checkpoint yet.
        step: The step that the checkpoint is of: a job goes on from there.
        only: The objects to take; None for all.
        name: What the object is called where the source is the state of one, such as a bare `model.state_dict()`.
        skip_unknown: True to leave out values of classes that are not known here, in place of an error.
        watcher: Told how far it has come.

    Raises:
        UsageError: If an argument is wrong, the source is nothing that can be imported, or the run has checkpoints.
        UnsupportedValueError: If something in the source cannot be stored.
        NoCheckpointError: If nothing is at the source.
        FormatError: If the source is malformed, or wants what no such file may have.
        StorageError: If a place fails.
    """
    begun_at = time.monotonic()
    step = check_whole("step", step, 0, MAX_STEP)
    if not is_text(name):
        raise UsageError(f"{name!r} is no name for an object", hint="A name is text that can be written as UTF-8.")
    storage = open_storage(run)
    committed = read_catalog(storage).committed
    if committed:
        raise UsageError(
            f"{storage.url} has checkpoints already, the newest of step {committed[-1].step}",
            hint="Import into a new run; a job that goes on from it may save there.",
        )
    with closing(ImportSource(Path(source), keep_unknown=skip_unknown)) as opened:
        objects = _select(list_objects(opened.root, name), make_selection(only), str(source))
        renamed = tuple(key for key, value in objects.items() if _unwrap(value))
        encoder = _ImportEncoder(str(source), skip_unknown=skip_unknown)
        nodes = {key: encoder.encode(value, escape(key)) for key, value in objects.items()}
        left = {one.path for one in encoder.left}
        nodes = {key: node for key, node in nodes.items() if escape(key) not in left}
        arrays = encoder.arrays
        size_bytes = sum(array.size_bytes for array in arrays.values())
        if size_bytes > _MOST_TIMES * opened.size_bytes + _ALWAYS_BYTES:
            raise FormatError(
                f"{source}: its arrays would take {size_bytes} bytes, and its files have {opened.size_bytes}",
                path=str(source),
                hint="Expanded tensors may be the reason: save them contiguous, or save what they are expanded from.",
            )
        if not arrays and not any(nodes.values()):
            raise UsageError(f"{source} holds nothing that could be kept", hint="Save state_dicts, not objects.")
        # Only torch's own files say which tensors were one.
        ties = [] if opened.format == "torch" else encoder.tied_candidates
        committed_name = _commit(storage, step, nodes, arrays, ties, escape(Path(source).name), watcher)
        return Import(
            step=step,
            name=committed_name,
            run=storage.url,
            format=opened.format,
            objects=tuple(nodes),
            arrays=len(arrays),
            size_bytes=size_bytes,
            left_out=tuple(encoder.left),
            renamed=renamed,
            seconds=time.monotonic() - begun_at,
        )


def list_objects(root: Any, name: str) -> dict[str, Any]:
    """**Pure.** The objects that a tree stands for: its outermost entries, or one if it is the state of one itself."""
    archive = root.archive if type(root) is ArchivedTree else None
    value = root.value if type(root) is ArchivedTree else root
    is_one = type(value) is not dict or not all(type(key) is str and key and is_text(key) for key in value)
    if is_one or not value or any(_is_array(part, archive) for part in value.values()):
        return {name: ArchivedTree(value, archive)}
    return {key: part if type(part) is ArchivedTree else ArchivedTree(part, archive) for key, part in value.items()}


def _select(objects: dict[str, Any], selection: Selection | None, source: str) -> dict[str, Any]:
    if selection is None:
        return objects
    chosen = {key: value for key, value in objects.items() if selection(escape(key))}
    if selection.unmatched:
        raise UsageError(
            f"{source} has nothing of the name {', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, objects))}.",
        )
    return chosen


def _is_array(value: Any, archive: TorchArchive | None) -> bool:
    if type(value) is PickledObject and archive is not None:
        return archive.tensor(value) is not None
    return type(value) is InputArray


def _unwrap(tree: ArchivedTree) -> bool:
    """Takes what wrappers of modules put in front of all names away."""
    value, was_wrapped = tree.value, False
    if type(value) is not dict or not value or not all(type(key) is str for key in value):
        return False
    if not any(_is_array(part, tree.archive) for part in value.values()):
        return False
    while prefix := next((one for one in _WRAPPERS if all(key.startswith(one) for key in value)), ""):
        value = {key.removeprefix(prefix): part for key, part in value.items()}
        was_wrapped = True
    tree.value = value
    return was_wrapped


class _ImportEncoder(Encoder):
    """Writes what was found as the format has it; arrays get names, and are read later.

    Attributes:
        arrays: By name.
        left: What was left out.
        tied_candidates: For each dict with several arrays, the nodes of these: some of them may be tied weights.
    """

    def __init__(self, source: str, *, skip_unknown: bool) -> None:
        super().__init__()
        self._source = source
        self._skip_unknown = skip_unknown
        self._archive: TorchArchive | None = None
        self._names: dict[Hashable, str] = {}
        self.arrays: dict[str, InputArray] = {}
        self.left: list[LeftOut] = []
        self.tied_candidates: list[dict[str, Node]] = []

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        if type(value) is ArchivedTree:
            outer, self._archive = self._archive, value.archive
            try:
                return self.encode(value.value, path, depth)
            finally:
                self._archive = outer
        if self._skip_unknown and self._is_unknown(value):
            self.left.append(LeftOut(path, f"it is a {_name_of(value)}"))
            return None
        if self._skip_unknown and type(value) is dict:
            # What is left out has no place in what is stored: a job that goes on from it would have to have one too.
            unknown = [(key, number) for number, key in enumerate(value) if self._is_unknown(value[key])]
            for key, number in unknown:
                self.left.append(LeftOut(f"{path}/{path_part(key, number)}", f"it is a {_name_of(value[key])}"))
            if unknown:
                value = {key: part for key, part in value.items() if not self._is_unknown(part)}
        node = super().encode(value, path, depth)
        if type(value) is dict and "$" not in node and _OPTIMIZER_STATE.isdisjoint(node):
            arrays = {key: part for key, part in node.items() if type(part) is dict and part.get("$") == "array"}
            self.tied_candidates += [arrays] if len(arrays) > 1 else []
        return node

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        if type(value) is InputArray:
            return self._array(value, path)
        given = coded_value_of(value)
        if given is not None:
            return tagged("codec", given[1], given[0])
        if type(value) is PickledObject and self._archive is not None:
            tensor = self._archive.tensor(value)
            if tensor is not None:
                return self._array(whole_array(tensor), path)
        if type(value) not in (PickledObject, Global, Persistent):
            return None
        raise UnsupportedValueError(
            f"{self._source}: {path} is a {_name_of(value)}, which cannot be stored",
            path=path,
            hint="Leave it out with --skip-unknown (skip_unknown=True), or save without it.",
        )

    def _is_unknown(self, value: Any) -> bool:
        is_odd = type(value) in (PickledObject, Global, Persistent)
        return is_odd and coded_value_of(value) is None and not _is_array(value, self._archive)

    def _array(self, array: InputArray, path: str) -> Node:
        key = array.key
        name = self._names.get(key) if key is not None else None
        if name is None:
            name, number = path, 2
            while name in self.arrays:
                name = f"{path}~{number}"
                number += 1
            self.arrays[name] = array
            if key is not None:
                self._names[key] = name
        return {"$": "array", "k": "torch", "v": name}


def _name_of(value: Any) -> str:
    what = value.function if type(value) is PickledObject else value
    return shown(what) if type(what) is Global else "storage without a tensor"


def _commit(
    storage: Storage,
    step: int,
    objects: dict[str, Node],
    arrays: Mapping[str, InputArray],
    ties: list[dict[str, Node]],
    source: str,
    watcher: ProgressWatcher | None,
) -> StepName:
    """Writes the checkpoint of a new generation. What ends it before it is committed leaves nothing."""
    layout = plan_layout(
        [(name, array.dtype, array.shape) for name, array in arrays.items()],
        {"format": "holdfast", "step": str(step)},
    )
    if watcher is not None:
        watcher.expect(layout.size_bytes)
    line = RunWriter(storage, All(), reuse_space=False)
    root = local_directory(storage)
    is_new = root is not None and not root.exists()
    name, _ = line.open(Origin(seen_generation=read_catalog(storage).generation), step)
    try:
        leaves = _write(storage, name, layout, arrays, watcher)
        _tie_equal(ties, {leaf.name: leaf for leaf in leaves}, arrays)
        index = Index(
            step=name.step,
            generation=name.generation,
            attempt=name.attempt,
            rank=0,
            world_size=1,
            data_bytes=layout.size_bytes,
            header_bytes=len(layout.header),
            header_digest=digest(layout.header),
            span_bytes=SPAN_BYTES,
            leaves=tuple(leaves),
            objects=objects,
            strides=tuple(_list_strides(arrays)),
        )
        receipts = write_index(index, storage, name.directory)
        line.commit(receipts, name, {}, {"imported_from": source})
    except BaseException as error:
        try:
            line.give_up(name)
            _take_back(storage, name.generation)
            if root is not None and is_new:
                # Files may lie in it, or it may be gone.
                with suppress(OSError):
                    root.rmdir()
        except HoldfastError as left:
            error.add_note(f"What was written is still there, and is no checkpoint: {left}")
        raise
    return name


def _take_back(storage: Storage, generation: int) -> None:
    """**Blocks.** Removes the records of a generation in which nothing was saved, unless another has begun since."""
    if max(read_generations(storage), default=0) == generation:
        # In this order: a crash in between leaves a generation that saved nothing.
        storage.remove(base_path(generation))
        storage.remove(generation_path(generation))
        storage.remove_directory(GENERATIONS_DIRECTORY)


def _write(
    storage: Storage,
    name: StepName,
    layout: Layout,
    arrays: Mapping[str, InputArray],
    watcher: ProgressWatcher | None,
) -> list[LeafRecord]:
    """Writes the data file piece by piece, with digests taken on the way."""
    storage.make_directory(name.directory)
    writer = storage.open_writer(f"{name.directory}/{data_name(0, 1)}", layout.size_bytes)
    leaves: list[LeafRecord] = []
    offset_bytes = 0

    def list_parts() -> Iterator[memoryview]:
        yield memoryview(layout.header)
        for place in layout.places:
            spans: list[str] = []
            for span in read_spans(arrays[place.name], SPAN_BYTES):
                spans.append(digest(span))
                yield span
            leaves.append(LeafRecord(place.name, place.dtype, place.shape, place.begin, place.end, "".join(spans)))

    try:
        for piece in _pack(list_parts(), take_pages(PIECE_BYTES)):
            writer.write_at(offset_bytes, piece)
            offset_bytes += len(piece)
            if watcher is not None:
                watcher.advance(len(piece))
        writer.finish()
    finally:
        writer.abandon()
    return leaves


def _pack(parts: Iterable[memoryview], memory: memoryview) -> Iterator[memoryview]:
    """Parts as pieces that fill the memory, but for the last; each is good until the next one is asked for."""
    filled = 0
    for part in parts:
        begin = 0
        while begin < len(part):
            count = min(len(part) - begin, len(memory) - filled)
            memory[filled : filled + count] = part[begin : begin + count]
            begin += count
            filled += count
            if filled == len(memory):
                yield memory
                filled = 0
    if filled:
        yield memory[:filled]


def _tie_equal(
    groups: Iterable[Mapping[str, Node]], leaves: Mapping[str, LeafRecord], arrays: Mapping[str, InputArray]
) -> None:
    """Lets the nodes of arrays that are equal refer to the first of them, where the format cannot say which were one.

    Two parameters that were trained apart do not have the same values, unless all of one value, as zeros. A live module
    whose parameters are two gets the values in both; one in which they are one would refuse two stored arrays.
    """
    for group in groups:
        first: dict[tuple[Any, ...], str] = {}
        for node in group.values():
            leaf = leaves[node["v"]]
            same = first.setdefault((leaf.dtype, leaf.shape, leaf.spans), leaf.name)
            if same != leaf.name and leaf.spans and not _is_constant(arrays[leaf.name]):
                node["v"] = same


def _is_constant(array: InputArray) -> bool:
    """Whether all elements of an array are the same bytes."""
    import numpy as np

    kind = f"V{ITEM_BYTES[array.dtype]}"
    element = b""
    for span in read_spans(array, SPAN_BYTES):
        element = element or bytes(span[: ITEM_BYTES[array.dtype]])
        if (np.frombuffer(span, kind) != np.frombuffer(element, kind)).any():
            return False
    return True


def _list_strides(arrays: Mapping[str, InputArray]) -> Iterator[StridesRecord]:
    """How tensors lie in their file, where each is one tensor there and is not in row-major order."""
    for name, array in arrays.items():
        layout = find_layout(array.shape, array.chunks[0].tensor.strides) if len(array.chunks) == 1 else None
        if layout is not None:
            yield StridesRecord(name, layout)
