"""Safetensors files, single or as Hugging Face stores a large model: the positions of arrays in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.convert.files import (
    InputArray,
    InputFile,
    OutputFiles,
    SourceTensor,
    is_plain_name,
    open_output_directory,
    open_output_file,
    whole_array,
)
from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.errors import FormatError, UsageError
from holdfast.format.dtypes import MAX_DIMENSIONS, RAW_TYPES, array_bytes
from holdfast.format.index import MAX_HEADER_BYTES, METADATA_KEY, Layout, plan_layout
from holdfast.format.shapes import strides_of

SUFFIX: Final = ".safetensors"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_MAX_INDEX_BYTES: Final = 256 << 20


ADAPTER_NAME: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
DESCRIPTIONS: Final = ("config.json", "generation_config.json", ADAPTER_CONFIG)
"""The files that describe a model, next to its weights."""


class PlannedFile(msgspec.Struct, frozen=True):
    """One file to write."""

    name: str
    layout: Layout


class _Entry(msgspec.Struct):
    """The header's entry of an array."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_safetensors(
    reader: LeafReader,
    names: Mapping[str, str],
    out: Path,
    *,
    file_bytes: int,
    metadata: Mapping[str, str],
    overwrite: bool,
    beside: Mapping[str, str] | None = None,
) -> list[str]:
    """**Blocks.** Writes leaves as safetensors files.

    Writes one file if the name of `out` ends so, or else into a directory, and returns the names of the files. `beside`
    is the text of further files, by name, for a directory like that of `save_pretrained`.

    Raises:
        UsageError: If the path already exists, or the arrays cannot be in such files.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    arrays = {name: reader.leaves[leaf] for name, leaf in names.items()}
    texts = beside or {}
    is_file, is_adapter = out.name.endswith(SUFFIX), ADAPTER_CONFIG in texts
    planned = plan_files(arrays, None if is_file or is_adapter else file_bytes, metadata)
    if is_adapter:
        planned = [PlannedFile(ADAPTER_NAME, planned[0].layout)]
    size_bytes = sum(file.layout.size_bytes for file in planned)
    if is_file:
        with open_output_file(out, size_bytes, overwrite=overwrite) as files:
            _write(reader, names, planned[0], files)
            files.publish_file(planned[0].name, overwrite=overwrite)
        return [out.name]
    written = [*texts, *(file.name for file in planned)]
    # A directory with a model's description may get its weights; one that gets both is to have neither.
    is_ours = _is_described_file if texts else _is_model_file
    with open_output_directory(out, size_bytes, is_ours, overwrite=overwrite) as files:
        for name, text in texts.items():
            with files.create(name) as described:
                described.write(text.encode())
        for file in planned:
            _write(reader, names, file, files)
        if len(planned) > 1:
            written.append(INDEX_NAME)
            with files.create(INDEX_NAME) as index:
                index.write(encode_weight_map(planned, arrays))
        files.publish_files(written[-1], is_ours)
    return written


def _write(reader: LeafReader, names: Mapping[str, str], planned: PlannedFile, files: OutputFiles) -> None:
    with files.create(planned.name) as file:
        file.write(planned.layout.header)
        for piece in reader.stream(reader.whole(names[place.name]) for place in planned.layout.places):
            file.write(piece)


def plan_files(
    arrays: Mapping[str, StoredLeaf], file_bytes: int | None, metadata: Mapping[str, str]
) -> list[PlannedFile]:
    """**Pure.** Divides arrays into files, in order; one that is larger than a file gets a file of its own.

    Raises:
        UsageError: If a name is not allowed, or there are too many arrays for one header.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    group_bytes = 0
    for name, leaf in arrays.items():
        if name == METADATA_KEY:
            raise UsageError(f"an array in a safetensors file cannot be named {name!r}")
        if groups[-1] and file_bytes is not None and group_bytes + leaf.size_bytes > file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append((name, leaf.dtype, leaf.shape))
        group_bytes += leaf.size_bytes
    count = len(groups)
    return [
        PlannedFile(
            SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}{SUFFIX}", plan_layout(group, metadata)
        )
        for number, group in enumerate(groups, start=1)
    ]


def encode_weight_map(files: Sequence[PlannedFile], arrays: Mapping[str, StoredLeaf]) -> bytes:
    """**Pure.** Returns the index with the file of each array."""
    document = {
        "metadata": {"total_size": sum(leaf.size_bytes for leaf in arrays.values())},
        "weight_map": {place.name: file.name for file in files for place in file.layout.places},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _is_model_file(name: str) -> bool:
    """Returns True for the names of files that are written into a directory here."""
    return name in (SINGLE_NAME, INDEX_NAME) or bool(_SHARD.fullmatch(name))


def _is_described_file(name: str) -> bool:
    """The same for a directory that gets a description of the model as well."""
    return name in (ADAPTER_NAME, *DESCRIPTIONS) or _is_model_file(name)


def list_files(directory: Path) -> list[str]:
    """**Blocks.** Returns the files of a model in a directory.

    Raises:
        FormatError: If the index is malformed, or names files elsewhere.
        StorageError: If it cannot be read.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        return sorted(one.name for one in directory.iterdir() if one.name.endswith(SUFFIX))
    with closing(InputFile(index)) as file:
        if file.size_bytes > _MAX_INDEX_BYTES:
            raise FormatError(f"{index} has {file.size_bytes} bytes, which is not a valid size", path=str(index))
        data = file.read(0, file.size_bytes)
    try:
        named: Any = json.loads(data)["weight_map"]
        names = sorted(set(named.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index} is malformed: {error!r}", path=str(index)) from error
    for name in names:
        if not is_plain_name(name):
            raise FormatError(f"{index} names {name!r}, which is not a file next to it", path=str(index))
    return names


def read_model(
    directory: Path, open_file: Callable[[str], InputFile], names: Sequence[str] | None = None
) -> dict[str, InputArray]:
    """**Blocks.** Returns the arrays of a model in a directory, from all of its files or those with some names.

    Raises:
        FormatError: If a file is malformed.
        StorageError: If one cannot be read.
    """
    arrays: dict[str, InputArray] = {}
    for name in list_files(directory) if names is None else names:
        for key, array in read_header(open_file(name)).items():
            if key in arrays:
                raise FormatError(f"{directory}: {key!r} appears in two files", path=str(directory))
            arrays[key] = array
    return arrays


def read_header(file: InputFile) -> dict[str, InputArray]:
    """**Blocks.** Returns the arrays of a safetensors file.

    Raises:
        FormatError: If it is malformed or invalid.
        StorageError: If it cannot be read.
    """
    path = str(file.path)
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file.size_bytes - 8):
        raise FormatError(f"{path}: a header of {length} bytes is not valid", path=path)
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


def _array(file: InputFile, begin: int, entry: _Entry) -> InputArray:
    first, last = entry.data_offsets
    if entry.dtype in RAW_TYPES:
        raise ValueError(f"{entry.dtype} is not a safetensors dtype")
    if len(entry.shape) > MAX_DIMENSIONS or last - first != array_bytes(entry.dtype, entry.shape):
        raise ValueError(f"{entry.dtype} {list(entry.shape)} does not fit bytes {first} to {last}")
    if not 0 <= first <= last <= file.size_bytes - begin:
        raise ValueError(f"bytes {first} to {last} are outside of the file")
    strides = strides_of(entry.shape, 1)
    return whole_array(SourceTensor(file, begin + first, entry.dtype, entry.shape, strides))
