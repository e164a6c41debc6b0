"""Directories of `torch.distributed.checkpoint`: written so that it loads them, and read as data.

Their metadata is a pickle. It is written as records of torch's classes; when it is read, only the names of the classes
below have a meaning, and none of them is ever instantiated.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec

from holdfast.convert.files import Chunk, InputArray, InputFile, is_plain_name, open_output_directory
from holdfast.convert.leaf_stream import Extent, LeafReader, StoredLeaf, take_bytes
from holdfast.convert.leaf_tree import ArrayRef, LeftOut, ObjectState, list_arrays
from holdfast.convert.pickle_read import KeyChecker, PickledObject, read_pickle, shown
from holdfast.convert.pickle_write import FunctionCall, Global, Instance, Pairs, write_pickle
from holdfast.convert.torch_file import (
    ALLOWED,
    DTYPES_OF_TORCH,
    SIZE,
    TORCH_DTYPES,
    TorchArchive,
    lengths_of,
    name_parameters,
    tensor_call,
    to_torch,
    write_archive,
)
from holdfast.errors import FormatError, UsageError
from holdfast.format.dtypes import MAX_DIMENSIONS, array_bytes
from holdfast.format.encoding import escape
from holdfast.format.shapes import Box, find_box_problem, find_overlap

METADATA_NAME: Final = ".metadata"
MAX_METADATA_BYTES: Final = 1 << 30
CHUNK_BYTES: Final = 512 << 20
"""A larger leaf is split along its first dimension: to read a part of a chunk, torch reads all of it."""

EntryPath: TypeAlias = tuple[str | int, ...]
"""The keys and indices on the way to an entry."""

_RECORD_BYTES: Final = 2048
_MAX_NUMBER: Final = 1 << 32
_OWN_FILE = re.compile(r"\.metadata(?:\.tmp)?|__[0-9]+_[0-9]+\.distcp")

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA = Global(_MODULE, "Metadata")
_TENSOR = Global(_MODULE, "TensorStorageMetadata")
_VALUE = Global(_MODULE, "BytesStorageMetadata")
_PROPERTIES = Global(_MODULE, "TensorProperties")
_CHUNK = Global(_MODULE, "ChunkStorageMetadata")
_INDEX = Global(_MODULE, "MetadataIndex")
_STORAGE_META = Global(_MODULE, "StorageMeta")
_MEMORY_FORMAT = Global(_MODULE, "_MEM_FORMAT_ENCODING")
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = Global("torch.serialization", "_get_layout")
_ALLOWED: Final = ALLOWED | {
    *(_METADATA, _TENSOR, _VALUE, _PROPERTIES, _CHUNK, _INDEX, _STORAGE_META, _MEMORY_FORMAT, _STORAGE_INFO, _LAYOUT),
    Global("pathlib", "PosixPath"),
    Global("pathlib", "PurePosixPath"),
    Global("pathlib._local", "PosixPath"),
}
_DAMAGED: Final = "Load it with torch where it was written and save it again, or import another copy."


class _StoredItem(msgspec.Struct, frozen=True):
    """The position of the archive of a chunk or of a value."""

    file: str
    offset_bytes: int
    size_bytes: int


def write_dcp(
    reader: LeafReader,
    tree: Mapping[Any, Any],
    modules: list[str],
    out: Path,
    *,
    file_bytes: int,
    overwrite: bool,
    left: list[LeftOut],
) -> list[str]:
    """**Blocks.** Writes a tree as a directory of `torch.distributed.checkpoint`.

    Returns the names of the files, none of which gets more once it has `file_bytes`; `left` gets what is left out.

    Raises:
        UsageError: If the path already exists, or two entries get the same name.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    entries = flatten(tree, modules)
    paths: dict[str, EntryPath] = {}
    for path in entries:
        name = ".".join(map(str, path))
        if name in paths:
            raise UsageError(
                f"{'/'.join(map(str, paths[name]))} and {'/'.join(map(str, path))} would both be named {name!r}",
                hint="Export them one at a time, with --only.",
            )
        paths[name] = path
    leaf_of = {name: entry.leaf for name, path in paths.items() if type(entry := entries[path]) is ArrayRef}
    chunks = {leaf: plan_chunks(reader.leaves[leaf]) for leaf in dict.fromkeys(leaf_of.values())}
    values = {}
    for name, path in paths.items():
        if name not in leaf_of:
            before = len(left)
            value = to_torch(entries[path], "/".join(escape(str(key)) for key in path), _no_tensor, left)
            if len(left) == before:
                values[name] = write_pickle(value)
    size_bytes = sum(reader.leaves[leaf].size_bytes for leaf in chunks) + sum(map(len, values.values()))
    size_bytes += _RECORD_BYTES * (sum(map(len, chunks.values())) + len(values))
    stored_chunks: dict[tuple[str, Box], _StoredItem] = {}
    stored_values: dict[str, _StoredItem] = {}
    files: list[str] = []
    with open_output_directory(out, size_bytes, _is_dcp_file, overwrite=overwrite) as output:
        pieces = reader.stream(_list_extents(chunks))
        pending_values = deque(values.items())
        pending_chunks = deque((leaf, box) for leaf, boxes in chunks.items() for box in boxes)
        while pending_values or pending_chunks or not files:
            files.append(f"__0_{len(files)}.distcp")
            with output.create(files[-1]) as file:
                while pending_values and file.tell() < file_bytes:
                    name, pickle = pending_values.popleft()
                    stored_values[name] = _write_item(file, files[-1], pickle)
                while pending_chunks and file.tell() < file_bytes:
                    leaf, box = pending_chunks.popleft()
                    stored = StoredLeaf(reader.leaves[leaf].dtype, box.shape)
                    pickle = write_pickle(tensor_call("0", stored))
                    storage = ("0", stored.size_bytes, take_bytes(pieces, stored.size_bytes))
                    stored_chunks[leaf, box] = _write_item(file, files[-1], pickle, [storage])
        with output.create(METADATA_NAME) as file:
            file.write(_encode_metadata(reader, paths, leaf_of, chunks, stored_chunks, stored_values))
        output.publish_files(METADATA_NAME, _is_dcp_file)
    return [*files, METADATA_NAME]


def flatten(tree: Mapping[Any, Any], modules: list[str]) -> dict[EntryPath, Any]:
    """**Pure.** Returns the entries of a tree, each with its path, as torch flattens a state."""
    entries: dict[EntryPath, Any] = {}

    def visit(path: EntryPath, value: Any) -> None:
        if type(value) is ObjectState:
            visit(path, name_parameters(value.state, modules) if value.kind == "torch.optimizer" else value.state)
        elif isinstance(value, dict):
            for key, part in value.items():
                visit((*path, str(key)), part)
        elif type(value) in (list, tuple) and _is_divided(value):
            for number, part in enumerate(value):
                visit((*path, number), part)
        else:
            entries[path] = value

    for name, value in tree.items():
        visit((str(name),), value)
    return entries


def _is_divided(value: Any) -> bool:
    """Returns True if a list is stored in parts: it contains dicts or tensors."""
    if any(True for _ in list_arrays(value)):
        return True
    return type(value) is list and any(
        isinstance(part, (dict, ObjectState)) or (type(part) is list and _is_divided(part)) for part in value
    )


def plan_chunks(stored: StoredLeaf) -> list[Box]:
    """**Pure.** Returns the boxes in which a leaf is stored: of a large one several, along its first dimension."""
    rows, *rest = stored.shape or (1,)
    most = max(1, CHUNK_BYTES // max(stored.size_bytes // max(rows, 1), 1))
    if rows <= most:
        return [Box((0,) * len(stored.shape), stored.shape)]
    zeros = (0,) * len(rest)
    return [Box((begin, *zeros), (min(most, rows - begin), *rest)) for begin in range(0, rows, most)]


def _is_dcp_file(name: str) -> bool:
    """Returns True for the names of files that are written here."""
    return bool(_OWN_FILE.fullmatch(name))


def _no_tensor(array: ArrayRef) -> Any:
    raise TypeError(f"{array.leaf} is inside another value")


def _list_extents(chunks: Mapping[str, list[Box]]) -> Iterator[Extent]:
    for leaf, boxes in chunks.items():
        begin = 0
        for box in boxes:
            yield Extent(leaf, begin, begin + box.elements)
            begin += box.elements


def _write_item(
    file: BinaryIO, name: str, pickle: bytes, storages: Iterable[tuple[str, int, Iterable[memoryview]]] = ()
) -> _StoredItem:
    """Writes each tensor and each value as an archive of its own."""
    begin = file.tell()
    write_archive(file, pickle, storages)
    return _StoredItem(name, begin, file.tell() - begin)


def _encode_metadata(
    reader: LeafReader,
    paths: Mapping[str, EntryPath],
    leaf_of: Mapping[str, str],
    chunks: Mapping[str, list[Box]],
    stored_chunks: Mapping[tuple[str, Box], _StoredItem],
    stored_values: Mapping[str, _StoredItem],
) -> bytes:
    """Returns the metadata record, with torch's classes for it."""
    entries: dict[str, Any] = {}
    storage: list[tuple[Any, Any]] = []
    for name in paths:
        if name in leaf_of:
            leaf = leaf_of[name]
            entries[name] = _tensor_metadata(reader.leaves[leaf], chunks[leaf])
            for number, box in enumerate(chunks[leaf]):
                index = Instance(_INDEX, {"fqn": name, "index": number, "offset": _size(box.offsets)})
                storage.append((index, _storage_info(stored_chunks[leaf, box])))
        elif name in stored_values:
            entries[name] = Instance(_VALUE, {})
            index = Instance(_INDEX, {"fqn": name, "index": None})
            storage.append((index, _storage_info(stored_values[name])))
    metadata = {
        "state_dict_metadata": entries,
        "planner_data": {name: paths[name] for name in entries},
        "storage_data": Pairs(storage),
        "storage_meta": Instance(_STORAGE_META, {"checkpoint_id": None, "modules": []}),
        "version": "1.0.0",
    }
    return write_pickle(Instance(_METADATA, metadata))


def _tensor_metadata(leaf: StoredLeaf, chunks: list[Box]) -> Instance:
    layout, contiguous = FunctionCall(_LAYOUT, ("torch.strided",)), FunctionCall(_MEMORY_FORMAT, (0,))
    properties = Instance(_PROPERTIES, (TORCH_DTYPES[leaf.dtype], layout, False, contiguous, False))
    boxes = [Instance(_CHUNK, {"offsets": _size(box.offsets), "sizes": _size(box.shape)}) for box in chunks]
    return Instance(_TENSOR, {"properties": properties, "size": _size(leaf.shape), "chunks": boxes})


def _storage_info(stored: _StoredItem) -> Instance:
    state = {"relative_path": stored.file, "offset": stored.offset_bytes, "length": stored.size_bytes}
    return Instance(_STORAGE_INFO, state)


def _size(lengths: tuple[int, ...]) -> FunctionCall:
    return FunctionCall(SIZE, (lengths,))


class DcpDirectory:
    """One such checkpoint.

    Attributes:
        entries: For each entry, by its path in the tree: an `InputArray`, or the archive of another value.
    """

    def __init__(self, metadata: InputFile, open_file: Callable[[str], InputFile]) -> None:
        """**Blocks.** Reads everything except the tensors' values.

        Raises:
            FormatError: If it is malformed, or contains something that is not supported or invalid.
            StorageError: If it cannot be read.
        """
        self._path = str(metadata.path)
        self._open_file = open_file
        self._keys = KeyChecker()
        if metadata.size_bytes > MAX_METADATA_BYTES:
            raise self._malformed(f"it has {metadata.size_bytes} bytes; the limit is {MAX_METADATA_BYTES}")
        data = metadata.read(0, metadata.size_bytes)
        root = self._state(read_pickle(data, _ALLOWED, self._path), _METADATA)
        named, paths, storage = root.get("state_dict_metadata"), root.get("planner_data"), root.get("storage_data")
        if type(named) is not dict or type(storage) is not dict:
            raise self._malformed("it has no entries")
        self._items = self._list_items(storage)
        self.entries: dict[EntryPath, InputArray | TorchArchive] = {}
        for name, entry in named.items():
            path = paths.get(name, (name,)) if type(paths) is dict else (name,)
            if type(name) is not str or type(path) is not tuple or not all(map(_is_key, path)):
                raise self._malformed(f"the path to {shown(name)} is malformed")
            if not path or self._key(path) in self.entries:
                raise self._malformed(f"the path to {shown(name)} does not exist, or leads to another entry")
            self.entries[path] = self._entry(name, entry)

    def _list_items(self, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _StoredItem]:
        """Returns the position of each piece, by its name and offsets."""
        items: dict[tuple[str, tuple[int, ...] | None], _StoredItem] = {}
        for key, info in storage.items():
            index = self._state(key, _INDEX)
            place = info.state if type(info) is PickledObject and info.function == _STORAGE_INFO else None
            if type(place) is not dict or place.get("transform_descriptors"):
                raise self._malformed(
                    "the location of its pieces is not in the form that torch writes, or the pieces are transformed"
                )
            file, begin, length = place.get("relative_path"), place.get("offset"), place.get("length")
            if not is_plain_name(file):
                raise self._malformed(f"it names {shown(file)}, which is not a file next to it")
            if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
                raise self._malformed("a piece has an invalid offset or length")
            name, offset = index.get("fqn"), index.get("offset")
            offsets = None if offset is None else lengths_of(offset)
            if type(name) is not str or (offset is not None and offsets is None):
                raise self._malformed("a piece is not named the way torch names one")
            items[self._key((name, offsets))] = _StoredItem(str(file), begin, length)
        return items

    def _entry(self, name: str, entry: Any) -> InputArray | TorchArchive:
        if type(entry) is PickledObject and entry.function == _VALUE:
            return self._open(name, None)
        state = self._state(entry, _TENSOR)
        shape, chunks = lengths_of(state.get("size")), state.get("chunks")
        if shape is None or len(shape) > MAX_DIMENSIONS or type(chunks) is not list:
            raise self._malformed(f"{shown(name)} is not described the way torch describes a tensor")
        dtype = self._dtype(state.get("properties"))
        try:
            array_bytes(dtype, shape)
        except ValueError as error:
            raise self._malformed(f"{shown(name)} is invalid: {error}") from error
        boxes = [self._box(name, chunk, shape) for chunk in chunks]
        filled = [box for box in boxes if box.elements]
        if find_overlap(filled) or sum(box.elements for box in filled) != math.prod(shape):
            raise self._malformed(f"the pieces of {shown(name)} overlap or leave a gap")
        found = tuple(Chunk(box, self._tensor(name, box, dtype)) for box in filled)
        return InputArray(dtype, shape, found)

    def _tensor(self, name: str, box: Box, dtype: str) -> Any:
        archive = self._open(name, box.offsets)
        tensor = archive.tensor(archive.value) if type(archive.value) is PickledObject else None
        if tensor is None or tensor.dtype != dtype or tensor.shape != box.shape:
            raise self._malformed(f"the piece {box} of {shown(name)} does not have the recorded dtype and shape")
        return tensor

    def _open(self, name: str, offsets: tuple[int, ...] | None) -> TorchArchive:
        item = self._items.get((name, offsets))
        if item is None:
            raise self._malformed(f"the location of a piece of {shown(name)} is missing")
        return TorchArchive(self._open_file(item.file), item.offset_bytes, item.size_bytes)

    def _dtype(self, properties: Any) -> str:
        made = type(properties) is PickledObject and properties.function == _PROPERTIES
        state = properties.state if made else None
        dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
        found = DTYPES_OF_TORCH.get(dtype) if type(dtype) is Global else None
        if found is None:
            raise self._malformed("an element type is not supported")
        return found

    def _box(self, name: str, chunk: Any, shape: tuple[int, ...]) -> Box:
        state = self._state(chunk, _CHUNK)
        offsets, sizes = lengths_of(state.get("offsets")), lengths_of(state.get("sizes"))
        if offsets is None or sizes is None or max(len(offsets), len(sizes)) > MAX_DIMENSIONS:
            raise self._malformed(f"a piece of {shown(name)} is malformed")
        box = Box(offsets, sizes)
        problem = find_box_problem(box, shape)
        if problem:
            raise self._malformed(f"a piece of {shown(name)} is invalid: {problem}")
        return box

    def _state(self, made: Any, cls: Global) -> dict[str, Any]:
        """Returns the attributes of an object, which must be of that class."""
        state = made.state if type(made) is PickledObject and made.function == cls else None
        if type(state) is not dict:
            raise self._malformed(f"expected a {cls.name}, got something else")
        return state

    def _malformed(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: {what}", path=self._path, hint=_DAMAGED)

    def _key(self, key: tuple[Any, ...]) -> Any:
        try:
            return self._keys.check(key)
        except ValueError as error:
            raise self._malformed(str(error)) from None


def _is_key(key: Any) -> bool:
    return type(key) is str or (type(key) is int and 0 <= key < _MAX_NUMBER)
