"""Detects the format in which another program has saved something, and reads the tree in it."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from holdfast.convert.dcp import METADATA_NAME, DcpDirectory, EntryPath
from holdfast.convert.frameworks.lightning import recognize_lightning
from holdfast.convert.frameworks.orbax import OrbaxDirectory, is_orbax_directory
from holdfast.convert.frameworks.recognized import Recognized
from holdfast.convert.frameworks.trainer import STATE_NAME, read_trainer_folder
from holdfast.convert.input_files import FilePool, InputFile
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
        head = bytes(file.read(0, min(file.size_bytes, 16)))
        if head.startswith(_ZIP):
            self.format = "torch"
            self._read_archive(file)
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

    def _read_archive(self, file: InputFile) -> None:
        archive = TorchArchive(file, 0, file.size_bytes)
        self.recognized = recognize_lightning(archive)
        if self.recognized is not None:
            self.format = "lightning"
        else:
            self.root = ArchivedTree(archive.value, archive)

    def _read_directory(self) -> None:
        if (self._path / METADATA_NAME).exists():
            self.format = "dcp"
            with closing(InputFile(self._path / METADATA_NAME)) as metadata:
                found = DcpDirectory(metadata, self._beside)
            self.root = _nest(found.entries, str(self._path))
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
            if not is_run and (inner := _list_sources(self._path)):
                hint = f"Import one of them: holdfast import {shlex.quote(inner[-1])} RUN"
                what = f"is not a checkpoint itself; it holds {', '.join(inner[-3:])}"
            raise UsageError(f"{self._path} {what}", hint=hint)
        self.format = "safetensors"
        self.root = arrays

    def _beside(self, name: str) -> InputFile:
        """Returns a file of the directory. A model's links are followed, as in Hugging Face's cache; DCP's are not."""
        return self._files.find(self._path / name, follow_links=self.format != "dcp")


def _list_sources(directory: Path) -> list[str]:
    """Returns what can be imported directly below a directory, the oldest first: `checkpoint-8` before `-16`."""
    found = [one for one in directory.iterdir() if one.suffix in _SUFFIXES or (one / STATE_NAME).exists()]
    return list(map(str, sorted(found, key=lambda one: (one.stat().st_mtime, len(one.name), one.name))))


def _nest(entries: dict[EntryPath, Any], path: str) -> dict[Any, Any]:
    """Builds the tree of entries; numbers among the keys are indices of lists."""
    root: dict[Any, Any] = {}
    for keys, value in entries.items():
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if type(place) is not dict:
                raise FormatError(f"{path}: {'.'.join(map(str, keys))} passes through another entry", path=path)
        if keys[-1] in place:
            raise FormatError(f"{path}: {'.'.join(map(str, keys))} appears twice", path=path)
        place[keys[-1]] = ArchivedTree(value.value, value) if isinstance(value, TorchArchive) else value
    return {key: _listed(value, 0) for key, value in root.items()}


def _listed(value: Any, depth: int) -> Any:
    if type(value) is not dict or depth > 64:
        return value
    parts = {key: _listed(part, depth + 1) for key, part in value.items()}
    if parts and parts.keys() == set(range(len(parts))):
        return [parts[number] for number in range(len(parts))]
    return parts
