"""Checkpoints of Orbax: a description of the tree as JSON, and arrays that `tensorstore` reads.

Three kinds of directories are one of a `CheckpointManager`, with a folder for each step; that of a step, with a folder
for each item; and that of an item, with `_METADATA`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.convert.files import Chunk, InputArray, is_plain_name
from holdfast.convert.leaf_tree import LeftOut, nest
from holdfast.convert.recognized import MODEL, Recognized
from holdfast.convert.torch_file import ArchivedTree
from holdfast.errors import FormatError, MissingPackageError, NoCheckpointError, StorageError, UsageError
from holdfast.extras import install_command
from holdfast.format.dtypes import ITEM_BYTES, MAX_DIMENSIONS, array_bytes, names_in
from holdfast.format.scalars import is_text
from holdfast.format.shapes import Box, row_major, whole_box

TREE_NAME: Final = "_METADATA"
STEP_NAME: Final = "_CHECKPOINT_METADATA"

MOST_TIMES: Final = 64
"""How many times larger than its files the arrays may be: moments that are all zero are compressed to nothing."""

_ALWAYS_BYTES: Final = 64 << 20
_MAX_JSON_BYTES: Final = 256 << 20
_UNFINISHED: Final = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:[A-Za-z_-]+_)?([0-9]{1,18})")
_DTYPES: Final = names_in("jax")
_EMPTY: Final[Mapping[str, Any]] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int


class _Value(msgspec.Struct, frozen=True):
    value_type: str


class _Leaf(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _Tree(msgspec.Struct, frozen=True):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool = True
    use_zarr3: bool = False


class OrbaxArray:
    """An array that `tensorstore` has opened. For `strides` and so on, see `ArrayPart`."""

    def __init__(self, store: Any, name: str, directory: Path, shape: tuple[int, ...]) -> None:
        self._store = store
        self._name = name
        self._directory = directory
        self.strides = row_major(shape)

    @property
    def key(self) -> Hashable:
        """Each array has its own."""
        return (str(self._directory), self._name)

    def read(self, box: Box, into: Any) -> None:
        """**Blocks.** Reads the elements of a box.

        Raises:
            FormatError: If they cannot be read.
        """
        import numpy as np

        try:
            found = self._store[(*map(slice, box.offsets, box.ends),)].read().result()
        except Exception as error:
            raise _malformed(self._directory, f"{self._name} cannot be read: {_shortened(error)}") from error
        into[...] = np.ascontiguousarray(found).reshape(-1).view(into.dtype).reshape(box.shape)


def is_orbax_directory(directory: Path) -> bool:
    """**Blocks.** Returns True if Orbax has written a directory."""
    return (directory / TREE_NAME).exists() or (directory / STEP_NAME).exists() or bool(_list_steps(directory))


class OrbaxDirectory:
    """One such checkpoint.

    Attributes:
        recognized: Its objects: the outermost entries of its tree; if a step has items besides `default`, each of
            these.
        size_bytes: The size of its files.
    """

    def __init__(self, directory: Path) -> None:
        """**Blocks.** Reads everything except the arrays' values.

        Raises:
            MissingPackageError: If `tensorstore` is not installed.
            UsageError: If it contains no array.
            FormatError: If it is malformed.
            StorageError: If it cannot be read.
        """
        step: int | None = None
        if not (directory / TREE_NAME).exists() and not (directory / STEP_NAME).exists():
            step, directory = max(_list_steps(directory).items())
        elif not (directory / TREE_NAME).exists() and (named := _STEP.fullmatch(directory.name)):
            step = int(named[1])
        self._directory = directory
        self.size_bytes = _measure(directory)
        self._left: list[LeftOut] = []
        tree = self._read_item(directory) if (directory / TREE_NAME).exists() else self._read_items()
        is_dict = type(tree) is dict and all(type(key) is str and key and is_text(key) for key in tree)
        # The parameters of one layer alone are one object; a tree of several parts is several.
        objects = tree if is_dict and any(type(part) in (dict, list) for part in tree.values()) else {MODEL: tree}
        if not objects:
            raise UsageError(f"{directory} contains nothing that can be imported")
        trees = {name: ArchivedTree(part, None) for name, part in objects.items()}
        self.recognized = Recognized(trees, list(trees), step=step, left=self._left)

    def _read_items(self) -> Any:
        items: dict[str, Any] = {}
        for folder in sorted(self._directory.iterdir()):
            if (folder / TREE_NAME).exists():
                items[folder.name] = self._read_item(folder)
            elif (folder / "metadata").is_file():
                items[folder.name] = _read_json(folder / "metadata")
            elif folder.is_dir():
                self._left.append(LeftOut(folder.name, "it is an item of an unknown kind"))
        return items["default"] if items.keys() == {"default"} else items

    def _read_item(self, directory: Path) -> Any:
        try:
            described = msgspec.convert(_read_json(directory / TREE_NAME), _Tree)
        except msgspec.ValidationError as error:
            raise _malformed(directory, f"its {TREE_NAME} is not in the form that Orbax writes: {error}") from error
        leaves = {tuple(leaf.key_metadata): leaf.value_metadata.value_type for leaf in described.tree_metadata.values()}
        wanted = {path: _name_of(path) for path, kind in leaves.items() if kind not in _EMPTY and kind != "string"}
        strings = _read_json(directory / "_strings.json") if "string" in leaves.values() else {}
        arrays = self._open(directory, described, list(wanted.values()))
        found: list[tuple[tuple[Any, ...], Any]] = []
        for path, kind in leaves.items():
            if not path:
                raise _malformed(directory, "the path to a value is empty")
            if path in wanted:
                array = arrays[wanted[path]]
                value: Any = _number(array) if kind in ("scalar", "int", "float") and not array.shape else array
            elif kind == "string":
                value = strings.get(_name_of(path)) if type(strings) is dict else None
            else:
                value = _EMPTY[kind]
            found.append((tuple(_step(key, directory) for key in path), value))
        return _listed(nest(found, partial(_malformed, directory)), directory)

    def _open(self, directory: Path, described: _Tree, names: list[str]) -> dict[str, InputArray]:
        """Opens the arrays of an item, all at once."""
        try:
            import tensorstore
        except ImportError as error:
            raise MissingPackageError(
                f"{directory} was written by Orbax: reading it needs tensorstore, which is not installed",
                hint=f"Install it: {install_command('orbax')}",
            ) from error
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": self._limit_bytes}})
        base = {"driver": "file", "path": f"{directory.absolute()}/"}
        pending = {}
        for name in names:
            if not described.use_ocdbt and not all(map(is_plain_name, name.split("/"))):
                raise _malformed(directory, f"{name!r} is not the name of a folder in it")
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            if not described.use_ocdbt:
                kvstore = {**base, "path": f"{directory.absolute()}/{name}/"}
            spec = {"driver": "zarr3" if described.use_zarr3 else "zarr", "kvstore": kvstore}
            # Chunks are kept decoded: one may be as large as an array, of which windows are read.
            pending[name] = tensorstore.open(
                {**spec, "recheck_cached_data": False}, open=True, read=True, context=context
            )
        return {name: self._look(directory, name, store) for name, store in pending.items()}

    def _look(self, directory: Path, name: str, pending: Any) -> InputArray:
        try:
            store = pending.result()
            dtype, shape = _DTYPES.get(store.dtype.name, ""), tuple(map(int, store.shape))
            chunk = tuple(map(int, store.chunk_layout.read_chunk.shape or shape))
        except Exception as error:
            raise _malformed(directory, f"{name} cannot be opened: {_shortened(error)}") from error
        if not dtype or len(shape) > MAX_DIMENSIONS:
            raise _malformed(directory, f"{name} has type {store.dtype.name}, which is not supported")
        try:
            largest = max(array_bytes(dtype, shape), array_bytes(dtype, chunk))
        except ValueError as error:
            raise _malformed(directory, f"{name} is invalid: {error}") from error
        if largest > self._limit_bytes:
            raise _malformed(directory, f"{name} would take {largest} bytes, but its files have only {self.size_bytes}")
        part = OrbaxArray(store, name, directory, shape)
        return InputArray(dtype, shape, (Chunk(whole_box(shape), part),) if 0 not in shape else (), "jax")

    @property
    def _limit_bytes(self) -> int:
        return MOST_TIMES * self.size_bytes + _ALWAYS_BYTES


def _list_steps(directory: Path) -> dict[int, Path]:
    """Returns the finished steps of a `CheckpointManager`."""
    with suppress(OSError):
        found = ((one, _STEP.fullmatch(one.name)) for one in directory.iterdir() if _UNFINISHED not in one.name)
        return {int(named[1]): one for one, named in found if named and (one / STEP_NAME).exists()}
    return {}


def _measure(directory: Path) -> int:
    """Returns the size of all files below a directory, which must be regular files: a link could lead anywhere.

    Raises:
        FormatError: If there is something else among them.
        StorageError: If it cannot be read.
    """
    size_bytes, ahead = 0, [directory]
    try:
        while ahead:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        ahead.append(Path(entry.path))
                    elif stat.S_ISREG(status.st_mode):
                        size_bytes += status.st_size
                    else:
                        raise _malformed(directory, f"{entry.path} is not a regular file")
    except FileNotFoundError as error:
        raise NoCheckpointError(f"{directory} changed while it was being read") from error
    except OSError as error:
        raise StorageError(f"cannot read {directory}: {error.strerror or error}") from error
    return size_bytes


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise _malformed(path.parent, f"{path.name} is larger than {_MAX_JSON_BYTES} bytes")
        return json.loads(data)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _malformed(path.parent, f"{path.name} is not valid JSON: {_shortened(error)}") from error


def _name_of(path: tuple[_Key, ...]) -> str:
    """Returns the name of a leaf's array."""
    return ".".join(key.key for key in path)


def _number(array: InputArray) -> Any:
    """Returns the number in an array without dimensions, which Orbax has made of a Python number."""
    import numpy as np

    raw = np.empty((), f"V{ITEM_BYTES[array.dtype]}")
    array.chunks[0].tensor.read(whole_box(()), raw)
    kind = next(name for name, dtype in _DTYPES.items() if dtype == array.dtype)
    return raw.view(kind).item() if kind in ("bool", "int32", "int64", "float32", "float64") else array


def _step(key: _Key, directory: Path) -> str | int:
    if key.key_type != 1:  # That of an index of a sequence.
        return key.key
    if not key.key.isdecimal() or len(key.key) > 9:
        raise _malformed(directory, f"{key.key[:100]!r} is not an index of a list")
    return int(key.key)


def _listed(root: Any, directory: Path, depth: int = 0) -> Any:
    """Returns a tree in which dicts with indices have become lists."""
    if type(root) is not dict:
        return root
    if depth > 64:
        raise _malformed(directory, "its tree is nested too deeply")
    parts = {key: _listed(part, directory, depth + 1) for key, part in root.items()}
    if not any(type(key) is int for key in parts):
        return parts
    if parts.keys() != set(range(len(parts))):
        raise _malformed(directory, "a list has missing entries")
    return [parts[number] for number in range(len(parts))]


def _shortened(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _malformed(directory: Path, what: str) -> FormatError:
    return FormatError(f"{directory}: {what}", path=str(directory))
