"""Leaves as safetensors files, named as those of Hugging Face's models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.convert.output_files import Delivery, deliver_file, deliver_files
from holdfast.errors import UsageError
from holdfast.format.layout import METADATA_KEY, Layout, plan_layout

SUFFIX: Final = ".safetensors"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


class PlannedFile(msgspec.Struct, frozen=True):
    """One file that is to be written.

    Attributes:
        name: Its name.
        layout: What lies where in it.
    """

    name: str
    layout: Layout


def is_model_file(name: str) -> bool:
    """**Pure.** Whether a name is one of those that this writes into a directory."""
    return name in (SINGLE_NAME, INDEX_NAME) or bool(_SHARD.fullmatch(name))


def plan_files(
    arrays: Mapping[str, StoredLeaf], file_bytes: int | None, metadata: Mapping[str, str]
) -> list[PlannedFile]:
    """**Pure.** Divides arrays into files, in their order; one that is larger than a file gets a file to itself.

    Args:
        arrays: What to write, by the name that it gets.
        file_bytes: How large the arrays of one file may be together; None for one file.
        metadata: Text to keep in each header.

    Raises:
        UsageError: If a name cannot be one, or there are too many arrays for one header.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    group_bytes = 0
    for name, leaf in arrays.items():
        if name == METADATA_KEY:
            raise UsageError(f"an array cannot be called {name!r} in a safetensors file")
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
    """**Pure.** The index that says in which file each array lies."""
    document = {
        "metadata": {"total_size": sum(leaf.size_bytes for leaf in arrays.values())},
        "weight_map": {place.name: file.name for file in files for place in file.layout.places},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def write_safetensors(
    reader: LeafReader,
    names: Mapping[str, str],
    out: Path,
    *,
    file_bytes: int | None,
    metadata: Mapping[str, str],
    overwrite: bool,
    expect: Callable[[int], None],
    advance: Callable[[int], None],
) -> list[str]:
    """**Blocks.** Writes leaves as safetensors files.

    Args:
        reader: Where the leaves come from.
        names: For each array the leaf that it is.
        out: A file, if its name ends so, or else a directory.
        file_bytes: How large the arrays of one file may be together; None for one file.
        metadata: Text to keep in each header.
        overwrite: Whether what is there may go.
        expect: Told how much will be written.
        advance: Told of each piece.

    Returns:
        The names of the files.

    Raises:
        UsageError: If something is there already, or the arrays cannot stand in such files.
        DamageError: If the checkpoint is damaged.
        StorageError: If a place fails.
    """
    arrays = {name: reader.leaves[leaf] for name, leaf in names.items()}
    is_file = out.name.endswith(SUFFIX)
    files = plan_files(arrays, None if is_file else file_bytes, metadata)
    size_bytes = sum(file.layout.size_bytes for file in files)
    expect(size_bytes)
    if is_file:
        with deliver_file(out, size_bytes, overwrite=overwrite) as delivery:
            _write(reader, names, files[0], delivery, advance)
            delivery.place_file(files[0].name, overwrite=overwrite)
        return [out.name]
    with deliver_files(out, size_bytes, is_model_file, overwrite=overwrite) as delivery:
        for file in files:
            _write(reader, names, file, delivery, advance)
        if len(files) > 1:
            with delivery.create(INDEX_NAME) as index:
                index.write(encode_weight_map(files, arrays))
        delivery.place_files(INDEX_NAME if len(files) > 1 else SINGLE_NAME, is_model_file)
    return [*(file.name for file in files), *([INDEX_NAME] if len(files) > 1 else [])]


def _write(
    reader: LeafReader,
    names: Mapping[str, str],
    file: PlannedFile,
    delivery: Delivery,
    advance: Callable[[int], None],
) -> None:
    with delivery.create(file.name) as target:
        target.write(file.layout.header)
        advance(len(file.layout.header))
        for piece in reader.stream(reader.whole(names[place.name]) for place in file.layout.places):
            target.write(piece)
            advance(len(piece))
