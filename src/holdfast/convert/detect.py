"""Detects the format in which another program has saved something, and reads the tree in it."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from holdfast.convert.dcp import METADATA_NAME, DcpDirectory
from holdfast.convert.files import FilePool, InputFile
from holdfast.convert.leaf_tree import nest
from holdfast.convert.orbax import OrbaxDirectory, is_orbax_directory
from holdfast.convert.recognized import STATE_NAME, Recognized, read_trainer_folder, recognize_lightning
from holdfast.convert.safetensors import read_header, read_model
from holdfast.convert.torch_file import ArchivedTree, TorchArchive
from holdfast.errors import FormatError, NoCheckpointError, NotFoundError, UsageError
from holdfast.format.names import GENERATIONS_DIRECTORY

_ZIP: Final = b"PK\x03\x04"
_LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f920")
_SOURCES: Final = (
    "These can be imported: a file of torch.save or Lightning, a folder of the Hugging Face Trainer, a directory "
    "of Orbax or torch.distributed.checkpoint, a safetensors file, or a directory of safetensors files."
)

_SUFFIXES: Final = frozenset({".ckpt", ".pt", ".pth", ".bin", ".tar"})
"""The endings of the names of files of `torch.save`."""


class ImportSource:
    """An open source. `close` closes its files.

    Attributes:
        format: `torch`, `dcp`, `safetensors`, `lightning`, `transformers` or `orbax`.
        root: The tree: dicts and lists of `InputArray`, `ArchivedTree` and plain values.
        recognized: The objects in it, if the format defines them; None if they are the entries of the tree.
    """

    def __init__(self, path: Path) -> None:
        """**Blocks.** Detects the format, and reads everything except the arrays' values.

        Raises:
            NoCheckpointError: If the source does not exist.
            UsageError: If it cannot be imported.
            FormatError: If it is malformed.
            StorageError: If it cannot be read.
        """
        self._files = FilePool()
        self._path = path
        self.format = ""
        self.root: Any = None
        self.recognized: Recognized | None = None
        self._size_bytes = 0
        try:
            if path.is_dir():
                self._read_directory()
            else:
                self._read_file()
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """The size of all its files together."""
        return self._files.size_bytes + self._size_bytes

    def close(self) -> None:
        """Closes the files; may be repeated."""
        self._files.close()

    def _read_file(self) -> None:
        try:
            file = self._files.find(self._path, follow_links=True)
        except NotFoundError:
            raise NoCheckpointError(f"{self._path} does not exist", hint="Check the path.") from None
        if not file.size_bytes:
            raise UsageError(f"{self._path} is empty", hint="Its writer may have been killed: import an earlier file.")
        head = bytes(file.read(0, min(file.size_bytes, 16)))
        if head.startswith(_ZIP):
            archive = TorchArchive(file, 0, file.size_bytes)
            self.recognized = recognize_lightning(archive)
            self.format = "torch" if self.recognized is None else "lightning"
            self.root = ArchivedTree(archive.value, archive)
        elif head.startswith(_LEGACY):
            raise UsageError(
                f"{self._path} is in the format that torch.save used before version 1.6",
                hint="Load it with torch and save it again.",
            )
        elif head[8:9] == b"{":
            self.format = "safetensors"
            self.root = read_header(file)
        else:
            raise UsageError(f"{self._path} is not in a format that can be imported", hint=_SOURCES)

    def _read_directory(self) -> None:
        if (self._path / METADATA_NAME).exists():
            self.format = "dcp"
            with closing(InputFile(self._path / METADATA_NAME)) as metadata:
                found = DcpDirectory(metadata, self._beside)
            trees = (
                (keys, ArchivedTree(value.value, value) if isinstance(value, TorchArchive) else value)
                for keys, value in found.entries.items()
            )
            root = nest(trees, lambda what: FormatError(f"{self._path}: {what}", path=str(self._path)))
            self.root = {key: _listed(value, 0) for key, value in root.items()}
            return
        if (self._path / STATE_NAME).exists():
            self.format = "transformers"
            self.recognized = read_trainer_folder(self._path, self._beside)
            return
        if is_orbax_directory(self._path):
            self.format = "orbax"
            orbax = OrbaxDirectory(self._path)
            self.recognized, self._size_bytes = orbax.recognized, orbax.size_bytes
            return
        arrays = read_model(self._path, self._beside)
        if not arrays:
            is_run = (self._path / GENERATIONS_DIRECTORY).is_dir()
            hint = "It is a holdfast run already: a job resumes from it as it is." if is_run else _SOURCES
            what = "contains nothing that can be imported"
            inner = [one for one in self._path.iterdir() if one.suffix in _SUFFIXES or (one / STATE_NAME).exists()]
            if inner and not is_run:
                # The oldest first, and `checkpoint-8` before `-16`.
                inner.sort(key=lambda one: (one.stat().st_mtime, len(one.name), one.name))
                hint = f"Import one of them: holdfast import {shlex.quote(str(inner[-1]))} RUN"
                what = f"is not a checkpoint itself; it holds {', '.join(map(str, inner[-3:]))}"
            raise UsageError(f"{self._path} {what}", hint=hint)
        self.format = "safetensors"
        self.root = arrays

    def _beside(self, name: str) -> InputFile:
        """Returns a file of the directory. A model's links are followed, as in Hugging Face's cache; DCP's are not."""
        return self._files.find(self._path / name, follow_links=self.format != "dcp")


def _listed(value: Any, depth: int) -> Any:
    """Returns a tree in which dicts with all indices of a list have become lists."""
    if type(value) is not dict or depth > 64:
        return value
    parts = {key: _listed(part, depth + 1) for key, part in value.items()}
    if parts and parts.keys() == set(range(len(parts))):
        return [parts[number] for number in range(len(parts))]
    return parts
