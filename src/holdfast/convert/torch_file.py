"""Files of `torch.save`: written so that `torch.load(path, weights_only=True)` reads them, and read as data.

Neither imports torch, and nothing that is read is executed. A file is an archive: a zip of a pickle and the bytes of
each storage, uncompressed.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import msgspec

from holdfast.convert.files import InputFile, SourceTensor, open_output_file
from holdfast.convert.leaf_stream import LeafReader, StoredLeaf, take_bytes
from holdfast.convert.leaf_tree import ArrayRef, CodedValue, LeftOut, ObjectState
from holdfast.convert.pickle_read import PickledObject, read_pickle, shown
from holdfast.convert.pickle_write import FunctionCall, Global, Persistent, write_pickle
from holdfast.errors import FormatError
from holdfast.format.dtypes import ELEMENT_TYPES, ITEM_BYTES, MAX_DIMENSIONS, QUANTIZED_TYPES, array_bytes, names_in
from holdfast.format.encoding import escape
from holdfast.format.shapes import order_dimensions, row_major

MAX_PICKLE_BYTES: Final = 256 << 20
"""The pickle in a file contains no tensors, only their descriptions, and plain values."""

TORCH_DTYPES: Final = {
    name: Global("torch", torch_name) for torch_name, name in names_in("torch").items() if name not in QUANTIZED_TYPES
}
"""For each element type that a dense tensor may have, torch's name."""

DTYPES_OF_TORCH: Final = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}

_STORAGES: Final = {one.name: Global("torch", one.torch_storage) for one in ELEMENT_TYPES if one.torch_storage}
"""The storages of older element types; the newer ones are in storages of bytes, and name their type."""

_DTYPES_OF_STORAGES: Final = {storage: name for name, storage in _STORAGES.items()}

SIZE: Final = Global("torch", "Size")
_UNTYPED: Final = Global("torch.storage", "UntypedStorage")
_ORDERED: Final = Global("collections", "OrderedDict")
_DEVICE: Final = Global("torch", "device")
_REBUILD, _REBUILD_V2, _REBUILD_V3 = (
    Global("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
)
_REBUILDERS: Final = {_REBUILD: (4, None), _REBUILD_V2: (6, None), _REBUILD_V3: (7, 6)}
"""For each function that makes a tensor, the least number of arguments, and which one is the element type."""

_PARAMETERS: Final = frozenset(
    {Global("torch._utils", "_rebuild_parameter"), Global("torch._utils", "_rebuild_parameter_with_state")}
)

ALLOWED: Final = frozenset(
    {*DTYPES_OF_TORCH, *_DTYPES_OF_STORAGES, *_REBUILDERS, *_PARAMETERS, SIZE, _DEVICE, _UNTYPED}
)
"""The names that such a file may contain."""

_MAX_DEVICE_BITS: Final = 32
_RECORD_BYTES: Final = 512
"""The most that a record of the archive takes besides its bytes."""

_NOT_PLAIN: Final = "Only plain tensors can be imported: save the tensors that it is made of, dense and on the CPU."
_OPTIMIZER_FORM: Final = frozenset({"state", "groups", "loose", "rest"})


def write_torch(reader: LeafReader, tree: Any, out: Path, *, overwrite: bool, left: list[LeftOut]) -> list[str]:
    """**Blocks.** Writes a tree as `torch.save` does, a piece at a time. What is left out is added to `left`.

    Raises:
        UsageError: If the path already exists.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    # A leaf with several names is one storage, as it was one tensor's memory.
    keys: dict[str, str] = {}

    def to_tensor(array: ArrayRef) -> FunctionCall:
        key = keys.setdefault(array.leaf, str(len(keys)))
        return tensor_call(key, reader.leaves[array.leaf], reader.strides.get(array.leaf))

    def list_storages() -> Iterator[tuple[str, int, Iterable[memoryview]]]:
        pieces = reader.stream(map(reader.whole, keys))
        for leaf, key in keys.items():
            stored, strides = reader.leaves[leaf], reader.strides.get(leaf)
            own: Iterable[memoryview] = take_bytes(pieces, stored.size_bytes)
            yield key, stored.size_bytes, own if strides is None else [_reorder(own, stored, strides)]

    pickle = write_pickle(to_torch(tree, "", to_tensor, left))
    size_bytes = len(pickle) + sum(reader.leaves[leaf].size_bytes for leaf in keys) + _RECORD_BYTES * (len(keys) + 4)
    with open_output_file(out, size_bytes, overwrite=overwrite) as files:
        with files.create("archive") as file:
            write_archive(file, pickle, list_storages())
        files.publish_file("archive", overwrite=overwrite)
    return [out.name]


def _reorder(pieces: Iterable[memoryview], leaf: StoredLeaf, strides: tuple[int, ...]) -> memoryview:
    """Reorders the bytes of a leaf from row-major order to its order in memory. All are held."""
    import numpy as np

    data = bytearray(leaf.size_bytes)
    place = 0
    for piece in pieces:
        data[place : place + len(piece)] = piece
        place += len(piece)
    values = np.frombuffer(data, f"V{ITEM_BYTES[leaf.dtype]}").reshape(leaf.shape)
    return memoryview(values.transpose(order_dimensions(leaf.shape, strides)).tobytes())


def to_torch(value: Any, path: str, to_tensor: Callable[[ArrayRef], Any], left: list[LeftOut]) -> Any:
    """**Pure.** Returns a tree as it is pickled: with replacements for tensors, and for values of torch's own.

    What is left out is added to `left`.
    """
    if type(value) is ArrayRef:
        return to_tensor(value)
    if type(value) is ObjectState:
        state = number_parameters(value.state) if value.kind == "torch.optimizer" else value.state
        return to_torch(state, path, to_tensor, left)
    if isinstance(value, dict):
        return {key: to_torch(part, f"{path}/{escape(str(key))}", to_tensor, left) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = [to_torch(part, f"{path}/{number}", to_tensor, left) for number, part in enumerate(value)]
        return tuple(parts) if type(value) is tuple else parts
    if type(value) is CodedValue:
        found = _coded_call(value.tag, value.value)
        if found is None:
            left.append(LeftOut(path, f"it is a {value.tag}"))
        return found
    return value


def tensor_call(key: str, leaf: StoredLeaf, strides: tuple[int, ...] | None = None) -> FunctionCall:
    """**Pure.** Returns the call that makes a dense tensor of all of a storage."""
    elements = math.prod(leaf.shape)
    storage = _STORAGES.get(leaf.dtype)
    length = elements if storage else elements * ITEM_BYTES[leaf.dtype]
    persistent = Persistent(("storage", storage or _UNTYPED, key, "cpu", length))
    arguments = (persistent, 0, leaf.shape, strides or row_major(leaf.shape), False, FunctionCall(_ORDERED, ()))
    if storage:
        return FunctionCall(_REBUILD_V2, arguments)
    return FunctionCall(_REBUILD_V3, (*arguments, TORCH_DTYPES[leaf.dtype]))


def _coded_call(tag: str, value: Any) -> Global | FunctionCall | None:
    """Returns the replacement for a value of torch's own; None if `weights_only` does not accept it."""
    if tag == "torch.Size" and type(value) is list and all(type(one) is int for one in value):
        return FunctionCall(SIZE, (tuple(value),))
    if tag == "torch.device" and type(value) is str:
        return FunctionCall(_DEVICE, (value,))
    if tag == "torch.dtype" and type(value) is str:
        dtype = Global("torch", value.removeprefix("torch."))
        return dtype if dtype in DTYPES_OF_TORCH else None
    return None


def number_parameters(stored: Any) -> Any:
    """**Pure.** Returns the result of `optimizer.state_dict()`: parameters by number, in the order of the groups.

    State that is not in holdfast's form is returned unchanged.
    """
    names = _parameter_names(stored)
    return _rename_parameters(stored, None if names is None else {name: place for place, name in enumerate(names)})


def name_parameters(stored: Any, modules: Collection[str]) -> Any:
    """**Pure.** Returns the result of `get_optimizer_state_dict(model, optimizer)`: parameters by their names."""
    names = _parameter_names(stored)
    if names is None:
        return _rename_parameters(stored, None)
    prefix = next((f"{one}." for one in modules if names and all(name.startswith(f"{one}.") for name in names)), "")
    return _rename_parameters(stored, {name: name.removeprefix(prefix) for name in (*names, *stored["state"])})


def _parameter_names(stored: Any) -> list[str] | None:
    """Returns the names of all parameters in order; None if the state is not in holdfast's form, or partial."""
    if not isinstance(stored, dict) or not stored.keys() >= _OPTIMIZER_FORM or type(stored["groups"]) is not list:
        return None
    if not all(isinstance(stored[key], dict) for key in ("state", "loose", "rest")):
        return None
    names: list[str] = []
    for group in stored["groups"]:
        if not isinstance(group, dict) or type(group.get("params")) is not list:
            return None
        names += group["params"]
    return names if all(type(name) is str for name in names) and len(set(names)) == len(names) else None


def _rename_parameters(stored: Any, new: Mapping[str, Any] | None) -> Any:
    """Returns an optimizer's state as torch has it, each parameter under its new name; None if it has no names."""
    if new is None:
        return stored["whole"] if isinstance(stored, dict) and "whole" in stored else stored
    state = {new[name]: value for name, value in stored["state"].items() if name in new}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [new[name] for name in group["params"]]}
        for group in stored["groups"]
    ]
    return {**stored["rest"], "state": {**stored["loose"], **state}, "param_groups": groups}


class TorchArchive:
    """One archive of `torch.save`, in a file of its own or inside another one.

    Attributes:
        value: The saved value; values that are not plain are a `PickledObject` or a `Global`.
    """

    def __init__(self, file: InputFile, begin: int, size_bytes: int) -> None:
        """**Blocks.** Reads everything except the tensors' values.

        Raises:
            FormatError: If it is malformed, or contains something that is not supported.
            StorageError: If it cannot be read.
        """
        self._file = file
        self._path = str(file.path)
        self._records = ArchiveReader(file, begin, size_bytes)
        pickle = self._read_small("data.pkl", MAX_PICKLE_BYTES)
        if self._records.find("byteorder") is not None and self._read_small("byteorder", 16) != b"little":
            raise FormatError(f"{self._path}: it is big-endian, which is not supported", path=self._path)
        self.value = read_pickle(pickle, ALLOWED, self._path, keep_unknown=True)

    def tensor(self, made: PickledObject, depth: int = 0) -> SourceTensor | None:
        """**Blocks.** Returns the tensor of a description; None if it is not one.

        Raises:
            FormatError: If it is not a valid tensor in the archive.
            StorageError: If the file cannot be read.
        """
        arguments = made.arguments
        if made.function in _PARAMETERS and arguments and type(arguments[0]) is PickledObject and depth < 2:
            return self.tensor(arguments[0], depth + 1)
        form = _REBUILDERS.get(made.function)
        if form is None:
            return None
        least, dtype_place = form
        if len(arguments) < least or type(arguments[0]) is not Persistent:
            raise self._malformed("a tensor is not described the way torch describes one")
        dtype, record = self._find_storage(arguments[0])
        if dtype_place is not None:
            named = arguments[dtype_place]
            dtype = DTYPES_OF_TORCH.get(named, "") if type(named) is Global else ""
        offset, shape, strides = arguments[1], lengths_of(arguments[2]), lengths_of(arguments[3])
        if not dtype or shape is None or strides is None or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise self._malformed("a tensor is not described the way torch describes one")
        if type(offset) is not int or offset < 0:
            raise self._malformed("a tensor begins before its storage")
        try:
            array_bytes(dtype, shape)
        except ValueError as error:
            raise self._malformed(f"a tensor is invalid: {error}") from error
        tensor = SourceTensor(self._file, record.offset_bytes + offset * ITEM_BYTES[dtype], dtype, shape, strides)
        if (offset + tensor.reach) * ITEM_BYTES[dtype] > record.size_bytes:
            raise self._malformed(f"a tensor of shape {list(shape)} extends beyond its storage")
        return tensor

    def _find_storage(self, persistent: Persistent) -> tuple[str, Record]:
        """Returns the element type and the bytes of a storage."""
        parts = persistent.id
        if len(parts) != 5 or parts[0] != "storage" or type(parts[2]) is not str or type(parts[4]) is not int:
            raise self._malformed("a storage is not named the way torch names one")
        dtype = "U8" if parts[1] == _UNTYPED else None
        if dtype is None and type(parts[1]) is Global:
            dtype = _DTYPES_OF_STORAGES.get(parts[1])
        if dtype is None:
            raise self._malformed(f"storages of type {shown(parts[1])} are not supported")
        record = self._records.find(f"data/{parts[2]}")
        if record is None or not 0 <= parts[4] * ITEM_BYTES[dtype] <= record.size_bytes:
            raise self._malformed(f"the storage {shown(parts[2])} is missing or shorter than recorded")
        return dtype, record

    def _read_small(self, name: str, limit_bytes: int) -> bytes:
        record = self._records.find(name)
        if record is None:
            raise self._malformed(f"{name} is missing")
        if record.size_bytes > limit_bytes:
            raise self._malformed(f"{name} has {record.size_bytes} bytes; the limit is {limit_bytes}")
        return self._file.read(record.offset_bytes, record.size_bytes)

    def _malformed(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: {what}", path=self._path, hint=_NOT_PLAIN)


@dataclass(eq=False, slots=True)
class ArchivedTree:
    """A part of a tree, with the archive that knows which objects in it are tensors; None if it has none."""

    value: Any
    archive: TorchArchive | None


def coded_value_of(value: Any) -> tuple[str, Any] | None:
    """**Pure.** Returns the codec's tag and its value, for values of torch's own; None for anything else."""
    if type(value) is Global and value in DTYPES_OF_TORCH:
        return "torch.dtype", f"torch.{value.name}"
    if type(value) is not PickledObject:
        return None
    if value.function == SIZE and len(value.arguments) == 1:
        lengths = lengths_of(value.arguments[0])
        return None if lengths is None else ("torch.Size", list(lengths))
    if value.function == _DEVICE and value.arguments and type(value.arguments[0]) is str:
        numbers = value.arguments[1:2]
        if all(type(number) is int and number.bit_length() < _MAX_DEVICE_BITS for number in numbers):
            return "torch.device", ":".join(map(str, (value.arguments[0], *numbers)))
    return None


def lengths_of(value: Any) -> tuple[int, ...] | None:
    """**Pure.** Returns the lengths of a shape or similar value; None if it is something else."""
    if type(value) is PickledObject and value.function == SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) not in (tuple, list) or not all(type(one) is int and one >= 0 for one in value):
        return None
    return tuple(value)


_MAX_DIRECTORY_BYTES: Final = 128 << 20
"""The largest directory of an archive that is read. Each of its records takes 46 bytes and its name."""

_ALIGNMENT_BYTES: Final = 64
"""Where torch lets records begin, so that it can map them into memory."""

_LARGE_RECORD_BYTES: Final = 1 << 30
"""From this size on, a record's size is in 64-bit fields. `zipfile` does that by itself from about 2 GiB on."""

_LOCAL: Final = struct.Struct("<4s22xHH")
"""The header before a record's bytes: a mark, and the lengths of its name and of its extra fields."""

_LARGE_FIELD_BYTES: Final = 20
_VERSION: Final = 45
_END_BYTES: Final = 22
_END_MARK: Final = b"PK\x05\x06"
_LONGEST_END_BYTES: Final = _END_BYTES + 0xFFFF
"""With a comment."""


class Record(msgspec.Struct, frozen=True):
    """The position of an archive's record, in the file that contains the archive."""

    offset_bytes: int
    size_bytes: int


def write_archive(
    file: BinaryIO, pickle: bytes, storages: Iterable[tuple[str, int, Iterable[bytes | memoryview]]]
) -> None:
    """**Blocks.** Writes one archive at the end of a file. A storage is its name, its size, and its bytes in pieces."""
    part = _WrittenPart(file)
    with ZipFile(part, "w", ZIP_STORED) as archive:
        _add(archive, part, "data.pkl", len(pickle), [pickle])
        _add(archive, part, "byteorder", 6, [b"little"])
        for name, size_bytes, pieces in storages:
            _add(archive, part, f"data/{name}", size_bytes, pieces)
        _add(archive, part, "version", 2, [b"3\n"])


def _add(
    archive: ZipFile, part: _WrittenPart, name: str, size_bytes: int, pieces: Iterable[bytes | memoryview]
) -> None:
    info = ZipInfo(f"archive/{name}")  # Of the first day that a zip can name: the same input gives the same archive.
    info.create_system, info.create_version, info.extract_version = 0, _VERSION, _VERSION
    is_large = size_bytes >= _LARGE_RECORD_BYTES
    begin = part.tell() + _LOCAL.size + len(info.filename) + 4 + _LARGE_FIELD_BYTES * is_large
    # Room that says it is none of the fields that readers know, as torch itself does it.
    padding = -begin % _ALIGNMENT_BYTES
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=is_large) as record:
        for piece in pieces:
            record.write(piece)
    # The directory, which is written at the end, needs no room.
    info.extra, info.external_attr = b"", 0


class ArchiveReader:
    """Finds the records of an archive. Only its directory is in memory."""

    def __init__(self, file: InputFile, begin: int, size_bytes: int) -> None:
        """**Blocks.** Reads the directory.

        Raises:
            FormatError: If it is not such an archive.
            StorageError: If the file cannot be read.
        """
        self._file = file
        self._begin = begin
        self._end = begin + size_bytes
        self._records: dict[str, ZipInfo | Record] = {}
        try:
            if size_bytes < _END_BYTES or self._end > file.size_bytes:
                raise ValueError("it is too short")
            records = ZipFile(_ReadPart(file, begin, size_bytes)).infolist()
            (count,) = struct.unpack("<H", file.read(self._end - _END_BYTES + 10, 2))
            if count not in (len(records), 0xFFFF):
                raise ValueError(f"its directory should have {count} records, but has {len(records)}")
            for record in records:
                # All records are in one folder, which torch names after the file.
                name = record.filename.partition("/")[2]
                if name in self._records:
                    raise ValueError(f"{name!r} appears twice")
                self._records[name] = record
        except (ValueError, OSError, BadZipFile, NotImplementedError, struct.error) as error:
            tail_bytes = min(_LONGEST_END_BYTES, file.size_bytes)
            tail = bytes(file.read(file.size_bytes - tail_bytes, tail_bytes))
            if not 0 <= tail.rfind(_END_MARK) <= tail_bytes - _END_BYTES:
                raise FormatError(
                    f"{file.path} is cut off: the end that torch.save writes is missing",
                    path=str(file.path),
                    hint="Copy it again, or import an earlier file.",
                ) from error
            raise self._malformed(error) from error

    def find(self, name: str) -> Record | None:
        """**Blocks.** Returns the position of a record; None if there is none of that name.

        Its name is without the folder that contains all records.

        Raises:
            FormatError: If it is compressed, or outside of the archive.
            StorageError: If the file cannot be read.
        """
        record = self._records.get(name)
        if isinstance(record, ZipInfo):
            record = self._records[name] = self._locate(name, record)
        return record

    def _locate(self, name: str, info: ZipInfo) -> Record:
        if info.compress_type != ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise self._malformed(f"{name!r} is compressed or encrypted, which torch.save never does")
        # What comes before a record's bytes may be longer than the directory says.
        header_at = self._begin + info.header_offset
        if self._begin <= header_at <= self._end - _LOCAL.size:
            mark, name_bytes, extra_bytes = _LOCAL.unpack(self._file.read(header_at, _LOCAL.size))
            first = header_at + _LOCAL.size + name_bytes + extra_bytes
            if mark == b"PK\x03\x04" and first + info.file_size <= self._end:
                return Record(first, info.file_size)
        raise self._malformed(f"{name!r} is outside of the file")

    def _malformed(self, what: object) -> FormatError:
        path = str(self._file.path)
        return FormatError(f"{path}: not a file that torch.save wrote: {what}", path=path)


class _WrittenPart:
    """The end of a file, as `zipfile` writes it: positions count from there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begin = file.tell()

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset_bytes: int) -> int:
        return self._file.seek(self._begin + offset_bytes) - self._begin

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Does nothing: the file belongs to the caller."""


class _ReadPart:
    """A part of a file, as `zipfile` reads it. A read returns at most the size of a directory."""

    def __init__(self, file: InputFile, begin: int, size_bytes: int) -> None:
        self._file = file
        self._begin = begin
        self._size_bytes = size_bytes
        self._place = 0

    def tell(self) -> int:
        return self._place

    def seek(self, offset_bytes: int, whence: int = os.SEEK_SET) -> int:
        place = offset_bytes + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size_bytes}[whence]
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._place = place
        return place

    def read(self, size_bytes: int | None = None) -> bytes:
        left = max(self._size_bytes - self._place, 0)
        size_bytes = left if size_bytes is None or size_bytes < 0 else min(size_bytes, left)
        if size_bytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size_bytes} bytes; the limit is {_MAX_DIRECTORY_BYTES}")
        data = self._file.read(self._begin + self._place, size_bytes)
        self._place += size_bytes
        return data
