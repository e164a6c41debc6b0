"""Checkpoints as directories that `torch.distributed.checkpoint` loads."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.convert.leaf_stream import Extent, LeafReader, StoredLeaf
from holdfast.convert.leaf_tree import ArrayRef, LeftOut, ObjectState, list_arrays
from holdfast.convert.optimizer_forms import name_parameters
from holdfast.convert.output_files import NewFile, deliver_files
from holdfast.convert.pickle_write import Call, Global, Instance, Pairs, write_pickle
from holdfast.convert.torch_export import torch_value
from holdfast.convert.torch_pickles import SIZE, dtype_global, tensor_call
from holdfast.convert.torch_zip import ArchiveWriter, take
from holdfast.errors import UsageError
from holdfast.format.encoding import escape

METADATA_NAME: Final = ".metadata"
CHUNK_BYTES: Final = 512 << 20
"""A larger leaf is cut along its first dimension: whoever reads a part of a chunk has to read all of it."""

_RECORD_BYTES: Final = 2048
_OWN_FILE = re.compile(r"\.metadata(?:\.tmp)?|__[0-9]+_[0-9]+\.distcp")
_MODULE: Final = "torch.distributed.checkpoint.metadata"


class _Chunk(msgspec.Struct, frozen=True):
    """A box of a leaf that is stored in one piece."""

    leaf: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class _Stored(msgspec.Struct, frozen=True):
    """Where something lies."""

    file: str
    offset_bytes: int
    size_bytes: int


def is_dcp_file(name: str) -> bool:
    """**Pure.** Whether a name is one of those that this writes into a directory."""
    return bool(_OWN_FILE.fullmatch(name))


def flatten(tree: Mapping[Any, Any], modules: list[str]) -> dict[tuple[str | int, ...], Any]:
    """**Pure.** The entries of a tree, each with the way to it, as torch divides a state into entries.

    Args:
        tree: The state.
        modules: The names of modules, for the names of parameters.
    """
    entries: dict[tuple[str | int, ...], Any] = {}

    def visit(way: tuple[str | int, ...], value: Any) -> None:
        if type(value) is ObjectState:
            named = name_parameters(value.state, modules) if value.kind == "torch.optimizer" else value.state
            visit(way, named)
        elif isinstance(value, dict):
            for key, part in value.items():
                visit((*way, str(key)), part)
        elif type(value) in (list, tuple) and _is_divided(value):
            for number, part in enumerate(value):
                visit((*way, number), part)
        else:
            entries[way] = value

    for name, value in tree.items():
        visit((str(name),), value)
    return entries


def _is_divided(value: Any) -> bool:
    """Whether a list stands in parts: it holds dicts, or tensors."""
    if any(True for _ in list_arrays(value)):
        return True
    return type(value) is list and any(isinstance(part, (dict, ObjectState)) or _is_list(part) for part in value)


def _is_list(value: Any) -> bool:
    return type(value) is list and _is_divided(value)


def plan_chunks(leaf: str, stored: StoredLeaf) -> list[_Chunk]:
    """**Pure.** Cuts a leaf that is too large along its first dimension."""
    rows = stored.shape[0] if stored.shape else 1
    row_bytes = stored.size_bytes // max(rows, 1)
    most = max(1, CHUNK_BYTES // max(row_bytes, 1))
    if rows <= most:
        return [_Chunk(leaf, (0,) * len(stored.shape), stored.shape)]
    rest = stored.shape[1:]
    return [
        _Chunk(leaf, (begin, *(0,) * len(rest)), (min(most, rows - begin), *rest)) for begin in range(0, rows, most)
    ]


def write_dcp(
    reader: LeafReader,
    tree: Mapping[Any, Any],
    modules: list[str],
    out: Path,
    *,
    file_bytes: int,
    overwrite: bool,
    left: list[LeftOut],
    expect: Callable[[int], None],
    advance: Callable[[int], None],
) -> list[str]:
    """**Blocks.** Writes a tree as a directory of `torch.distributed.checkpoint`.

    Args:
        reader: Where the leaves come from.
        tree: What is saved.
        modules: The names of modules, for the names of parameters.
        out: The directory.
        file_bytes: From which size on a file gets nothing more.
        overwrite: Whether such files that lie there may go.
        left: What is left out is added here.
        expect: Told how much will be written.
        advance: Told of each piece.

    Returns:
        The names of the files.

    Raises:
        UsageError: If something is there already, or two entries get one name.
        DamageError: If the checkpoint is damaged.
        StorageError: If a place fails.
    """
    entries = flatten(tree, modules)
    ways: dict[str, tuple[str | int, ...]] = {}
    for way in entries:
        name = ".".join(map(str, way))
        if name in ways:
            raise UsageError(
                f"{'/'.join(map(str, ways[name]))} and {'/'.join(map(str, way))} would both be called {name!r}",
                hint="Export them one by one, with --only.",
            )
        ways[name] = way
    arrays = {name: entries[way] for name, way in ways.items() if type(entries[way]) is ArrayRef}
    leaves = dict.fromkeys(array.leaf for array in arrays.values())
    chunks = {leaf: plan_chunks(leaf, reader.leaves[leaf]) for leaf in leaves}
    values = {}
    for name, way in ways.items():
        if name not in arrays:
            before = len(left)
            value = torch_value(entries[way], "/".join(escape(str(key)) for key in way), _no_array, left)
            if len(left) == before:
                values[name] = write_pickle(value)
    leaves_bytes = sum(reader.leaves[leaf].size_bytes for leaf in leaves)
    records = sum(map(len, chunks.values())) + len(values)
    expect(leaves_bytes)
    stored_chunks: dict[_Chunk, _Stored] = {}
    stored_values: dict[str, _Stored] = {}
    size_bytes = leaves_bytes + _RECORD_BYTES * records + sum(map(len, values.values()))
    with deliver_files(out, size_bytes, is_dcp_file, overwrite=overwrite) as delivery:
        pieces = reader.stream(_extents(chunks))
        waiting = deque(chunk for some in chunks.values() for chunk in some)
        pending = deque(values.items())
        number = 0
        while waiting or pending or not number:
            name = f"__0_{number}.distcp"
            number += 1
            with delivery.create(name) as file:
                while pending and file.size_bytes < file_bytes:
                    key, pickle = pending.popleft()
                    stored_values[key] = _write_item(file, name, pickle, None, iter(()))
                while waiting and file.size_bytes < file_bytes:
                    chunk = waiting.popleft()
                    leaf = StoredLeaf(reader.leaves[chunk.leaf].dtype, chunk.shape)
                    pickle = write_pickle(tensor_call("0", leaf))
                    stored_chunks[chunk] = _write_item(file, name, pickle, leaf, pieces)
                    advance(leaf.size_bytes)
        with delivery.create(METADATA_NAME) as file:
            file.write(_encode_metadata(reader, ways, arrays, chunks, stored_chunks, stored_values))
        delivery.place_files(METADATA_NAME, is_dcp_file)
    return [*(f"__0_{one}.distcp" for one in range(number)), METADATA_NAME]


def _no_array(array: ArrayRef) -> Any:
    raise TypeError(f"{array.leaf} stands within a value")


def _extents(chunks: Mapping[str, list[_Chunk]]) -> Iterator[Extent]:
    for some in chunks.values():
        begin = 0
        for chunk in some:
            end = begin + math.prod(chunk.shape)
            yield Extent(chunk.leaf, begin, end)
            begin = end


def _write_item(
    file: NewFile, name: str, pickle: bytes, leaf: StoredLeaf | None, pieces: Iterator[memoryview]
) -> _Stored:
    """Each tensor and each value is an archive of its own."""
    begin = file.size_bytes
    archive = ArchiveWriter(file, "archive")
    archive.begin(pickle)
    if leaf is not None:
        archive.add("data/0", leaf.size_bytes, take(pieces, leaf.size_bytes))
    archive.finish()
    return _Stored(name, begin, file.size_bytes - begin)


def _encode_metadata(
    reader: LeafReader,
    ways: Mapping[str, tuple[str | int, ...]],
    arrays: Mapping[str, ArrayRef],
    chunks: Mapping[str, list[_Chunk]],
    stored_chunks: Mapping[_Chunk, _Stored],
    stored_values: Mapping[str, _Stored],
) -> bytes:
    """The record that says what lies where, with the classes that torch has for it."""
    entries: dict[str, Any] = {}
    storage: list[tuple[Any, Any]] = []
    for name in ways:
        if name in arrays:
            leaf = arrays[name].leaf
            entries[name] = _tensor_metadata(reader.leaves[leaf], chunks[leaf])
            for number, chunk in enumerate(chunks[leaf]):
                place = Instance(
                    Global(_MODULE, "MetadataIndex"), {"fqn": name, "index": number, "offset": _size(chunk.offsets)}
                )
                storage.append((place, _storage_info(stored_chunks[chunk])))
        elif name in stored_values:
            entries[name] = Instance(Global(_MODULE, "BytesStorageMetadata"), {})
            place = Instance(Global(_MODULE, "MetadataIndex"), {"fqn": name, "index": None})
            storage.append((place, _storage_info(stored_values[name])))
    metadata = Instance(
        Global(_MODULE, "Metadata"),
        {
            "state_dict_metadata": entries,
            "planner_data": {name: ways[name] for name in entries},
            "storage_data": Pairs(storage),
            "storage_meta": Instance(Global(_MODULE, "StorageMeta"), {"checkpoint_id": None, "modules": []}),
            "version": "1.0.0",
        },
    )
    return write_pickle(metadata)


def _tensor_metadata(leaf: StoredLeaf, chunks: list[_Chunk]) -> Instance:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Instance(
        Global(_MODULE, "TensorProperties"), (dtype_global(leaf.dtype), layout, False, contiguous, False)
    )
    return Instance(
        Global(_MODULE, "TensorStorageMetadata"),
        {
            "properties": properties,
            "size": _size(leaf.shape),
            "chunks": [
                Instance(
                    Global(_MODULE, "ChunkStorageMetadata"), {"offsets": _size(one.offsets), "sizes": _size(one.shape)}
                )
                for one in chunks
            ],
        },
    )


def _storage_info(stored: _Stored) -> Instance:
    return Instance(
        Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        {"relative_path": stored.file, "offset": stored.offset_bytes, "length": stored.size_bytes},
    )


def _size(lengths: tuple[int, ...]) -> Call:
    return Call(SIZE, (lengths,))
