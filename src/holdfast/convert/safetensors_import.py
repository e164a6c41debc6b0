"""Safetensors files: what lies where in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.convert.input_arrays import IncomingArray, StoredTensor, whole_array
from holdfast.convert.input_files import SourceFile
from holdfast.errors import FormatError
from holdfast.format.boxes import strides_of
from holdfast.format.dtypes import RAW_TYPES, array_bytes
from holdfast.format.layout import MAX_HEADER_BYTES, METADATA_KEY
from holdfast.format.scalars import is_text
from holdfast.format.soundness import MAX_DIMENSIONS

_MAX_MAP_BYTES: Final = 256 << 20


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(file: SourceFile) -> dict[str, IncomingArray]:
    """**Blocks.** The arrays of a safetensors file.

    Raises:
        FormatError: If it is malformed, or says what cannot be.
        StorageError: If it cannot be read.
    """
    path = str(file.path)
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file.size_bytes - 8):
        raise FormatError(f"{path}: a header of {length} bytes cannot be", path=path)
    try:
        raw = msgspec.json.decode(file.read(8, length), type=dict[str, msgspec.Raw])
        raw.pop(METADATA_KEY, None)
        entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items()}
        arrays = {name: _array(file, 8 + length, entry) for name, entry in entries.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{path}: its header is malformed: {error}", path=path) from error
    end = 0
    for begin, following in sorted(entry.data_offsets for entry in entries.values()):
        if begin < end:
            raise FormatError(f"{path}: its arrays overlap", path=path)
        end = following
    return arrays


def _array(file: SourceFile, begin: int, entry: _Entry) -> IncomingArray:
    first, last = entry.data_offsets
    if entry.dtype in RAW_TYPES:
        raise ValueError(f"{entry.dtype} is no type of such a file")
    if len(entry.shape) > MAX_DIMENSIONS or last - first != array_bytes(entry.dtype, entry.shape):
        raise ValueError(f"{entry.dtype} {list(entry.shape)} at {first} to {last} cannot be")
    if not 0 <= first <= last <= file.size_bytes - begin:
        raise ValueError(f"bytes {first} to {last} do not lie in the file")
    strides = strides_of(entry.shape, 1)
    return whole_array(StoredTensor(file, begin + first, entry.dtype, entry.shape, strides))


def list_files(directory: Path, index_name: str) -> list[str]:
    """**Blocks.** The files of a model that lies in a directory.

    Raises:
        FormatError: If the index is malformed, or names files elsewhere.
        StorageError: If it cannot be read.
    """
    index = directory / index_name
    if not index.exists():
        return sorted(one.name for one in directory.iterdir() if one.name.endswith(".safetensors"))
    with SourceFile(index) as file:
        if file.size_bytes > _MAX_MAP_BYTES:
            raise FormatError(f"{index} has {file.size_bytes} bytes, which cannot be", path=str(index))
        data = file.read(0, file.size_bytes)
    try:
        named: Any = json.loads(data)["weight_map"]
        names = sorted(set(named.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index} is malformed: {error!r}", path=str(index)) from error
    for name in names:
        if not is_plain_name(name):
            raise FormatError(f"{index} names {name!r}, which is no file beside it", path=str(index))
    return names


def is_plain_name(name: Any) -> bool:
    """**Pure.** Whether something is the name of a file, without a way to anywhere else."""
    return type(name) is str and name not in ("", ".", "..") and not {"/", "\0"} & set(name) and is_text(name)
