"""Directories of `torch.distributed.checkpoint`: the tree in them, and where their tensors lie.

The metadata is a pickle, and is read as data: of all that it may name, only the classes below mean anything, and none
of them is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from holdfast.convert.input_arrays import Chunk, IncomingArray
from holdfast.convert.input_files import SourceFile
from holdfast.convert.pickle_keys import Keys
from holdfast.convert.pickle_read import Made, read_pickle, shown
from holdfast.convert.pickle_write import Global
from holdfast.convert.safetensors_import import is_plain_name
from holdfast.convert.torch_file import ALLOWED, TorchArchive, lengths_of
from holdfast.convert.torch_pickles import DTYPES
from holdfast.errors import FormatError
from holdfast.format.boxes import Box, find_box_problem, find_overlap
from holdfast.format.dtypes import array_bytes
from holdfast.format.soundness import MAX_DIMENSIONS

METADATA_NAME: Final = ".metadata"
MAX_METADATA_BYTES: Final = 1 << 30
_MAX_NUMBER: Final = 1 << 32

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final = {
    name: Global(_MODULE, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
}
_INFO: Final = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_ALLOWED: Final = ALLOWED | {
    *_CLASSES.values(),
    _INFO,
    Global("torch.serialization", "_get_layout"),
    Global("pathlib", "PosixPath"),
    Global("pathlib", "PurePosixPath"),
    Global("pathlib._local", "PosixPath"),
}
_DTYPES: Final = {torch_name: name for name, torch_name in DTYPES.items()}
_DAMAGED: Final = "Load it with torch where it was written, and save it again; or import another copy."


class DcpDirectory:
    """One such checkpoint.

    Attributes:
        entries: For each entry, by its way in the tree: an `IncomingArray`, or the archive of another value.
    """

    def __init__(
        self,
        metadata: SourceFile,
        open_file: Callable[[str], SourceFile],
        *,
        keep_unknown: bool = False,
    ) -> None:
        """**Blocks.** Reads what is in it, but for the tensors' values.

        Args:
            metadata: Its metadata.
            open_file: Opens a file beside the metadata, by its plain name.
            keep_unknown: Whether what is unknown among the values is kept as what it is, and no error.

        Raises:
            FormatError: If it is malformed, names what it may not, or says what cannot be.
            StorageError: If it cannot be read.
        """
        self._path = str(metadata.path)
        self._open_file = open_file
        self._keep_unknown = keep_unknown
        self._keys = Keys(())
        if metadata.size_bytes > MAX_METADATA_BYTES:
            raise self._malformed(f"it has {metadata.size_bytes} bytes, and at most {MAX_METADATA_BYTES} may be")
        data = metadata.read(0, metadata.size_bytes)
        root = self._state(read_pickle(memoryview(data), _ALLOWED, self._path), "Metadata")
        named, ways, storage = root.get("state_dict_metadata"), root.get("planner_data"), root.get("storage_data")
        if type(named) is not dict or type(storage) is not dict:
            raise self._malformed("it has no entries")
        self._places = self._list_places(storage)
        self.entries: dict[tuple[str | int, ...], IncomingArray | TorchArchive] = {}
        for name, entry in named.items():
            way = ways.get(name, (name,)) if type(ways) is dict else (name,)
            if type(name) is not str or type(way) is not tuple or not all(map(_is_step, way)):
                raise self._malformed(f"the way to {shown(name)} is malformed")
            if not way or self._key(way) in self.entries:
                raise self._malformed(f"the way to {shown(name)} leads nowhere, or to another entry")
            self.entries[way] = self._entry(name, entry)

    def _list_places(self, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
        """By name and offsets of each piece: the file that it lies in, where, and how long it is."""
        places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for key, info in storage.items():
            index = self._state(key, "MetadataIndex")
            place = info.state if type(info) is Made and info.function == _INFO else None
            if type(place) is not dict or place.get("transform_descriptors"):
                raise self._malformed("where its pieces lie is not said as torch says it, or they are transformed")
            file, begin, length = place.get("relative_path"), place.get("offset"), place.get("length")
            if not is_plain_name(file):
                raise self._malformed(f"it names {shown(file)}, which is no file beside it")
            if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
                raise self._malformed("a piece cannot lie where it is said to lie")
            name, offset = index.get("fqn"), index.get("offset")
            offsets = None if offset is None else lengths_of(offset)
            if type(name) is not str or (offset is not None and offsets is None):
                raise self._malformed("a piece is not named as torch names one")
            places[self._key((name, offsets))] = (str(file), begin, length)
        return places

    def _entry(self, name: str, entry: Any) -> IncomingArray | TorchArchive:
        if type(entry) is Made and entry.function == _CLASSES["BytesStorageMetadata"]:
            return self._open(name, None)
        state = self._state(entry, "TensorStorageMetadata")
        shape, chunks = lengths_of(state.get("size")), state.get("chunks")
        if shape is None or len(shape) > MAX_DIMENSIONS or type(chunks) is not list:
            raise self._malformed(f"{shown(name)} is not described as torch describes a tensor")
        dtype = self._dtype(state.get("properties"))
        try:
            array_bytes(dtype, shape)
        except ValueError as error:
            raise self._malformed(f"{shown(name)} cannot be: {error}") from error
        boxes = [self._box(name, chunk, shape) for chunk in chunks]
        filled = [box for box in boxes if box.elements]
        if find_overlap(filled) or sum(box.elements for box in filled) != math.prod(shape):
            raise self._malformed(f"the pieces of {shown(name)} do not make it up: they overlap, or leave a gap")
        found = tuple(Chunk(box, self._tensor(name, box, dtype)) for box in filled)
        return IncomingArray(dtype, shape, found)

    def _tensor(self, name: str, box: Box, dtype: str) -> Any:
        archive = self._open(name, box.offsets)
        tensor = archive.tensor(archive.value) if type(archive.value) is Made else None
        if tensor is None or tensor.dtype != dtype or tensor.shape != box.shape:
            raise self._malformed(f"the piece {box} of {shown(name)} is another one than is said")
        return tensor

    def _open(self, name: str, offsets: tuple[int, ...] | None) -> TorchArchive:
        place = self._places.get((name, offsets))
        if place is None:
            raise self._malformed(f"where a piece of {shown(name)} lies is not said")
        file, begin, length = place
        keep_unknown = self._keep_unknown and offsets is None
        return TorchArchive(self._open_file(file), begin, length, keep_unknown=keep_unknown)

    def _dtype(self, properties: Any) -> str:
        made = type(properties) is Made and properties.function == _CLASSES["TensorProperties"]
        state = properties.state if made else None
        dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
        found = _DTYPES.get(dtype.name) if type(dtype) is Global else None
        if found is None:
            raise self._malformed("an element type cannot be taken in")
        return found

    def _box(self, name: str, chunk: Any, shape: tuple[int, ...]) -> Box:
        state = self._state(chunk, "ChunkStorageMetadata")
        offsets, sizes = lengths_of(state.get("offsets")), lengths_of(state.get("sizes"))
        if offsets is None or sizes is None or max(len(offsets), len(sizes)) > MAX_DIMENSIONS:
            raise self._malformed(f"a piece of {shown(name)} is malformed")
        box = Box(offsets, sizes)
        problem = find_box_problem(box, shape)
        if problem:
            raise self._malformed(f"a piece of {shown(name)} cannot be: {problem}")
        return box

    def _state(self, made: Any, name: str) -> dict[str, Any]:
        """The attributes of an object that has to be of a class."""
        state = made.state if type(made) is Made and made.function == _CLASSES[name] else None
        if type(state) is not dict:
            raise self._malformed(f"a {name} is expected, and something else stands there")
        return state

    def _malformed(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: {what}", path=self._path, hint=_DAMAGED)

    def _key(self, key: tuple[Any, ...]) -> Any:
        try:
            return self._keys.check(key)
        except ValueError as error:
            raise self._malformed(str(error)) from None


def _is_step(key: Any) -> bool:
    return type(key) is str or (type(key) is int and 0 <= key < _MAX_NUMBER)
