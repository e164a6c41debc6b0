"""Finds out in which format another program has saved something, and reads the tree in it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.convert.dcp import METADATA_NAME, DcpDirectory, EntryPath
from holdfast.convert.input_files import FilePool, InputArray, InputFile
from holdfast.convert.safetensors import list_files, read_header
from holdfast.convert.torch_file import TorchArchive
from holdfast.errors import FormatError, NoCheckpointError, NotFoundError, UsageError

_ZIP: Final = b"PK\x03\x04"
_LEGACY: Final = bytes.fromhex("80028a0a6cfc9c46f920")
_SOURCES: Final = "A torch.save file, a DCP directory, a safetensors file, or a directory of such can be imported."


@dataclass(eq=False, slots=True)
class ArchivedTree:
    """A part of a tree, with the archive that says which objects in it are tensors; None if it holds none."""

    value: Any
    archive: TorchArchive | None


class ImportSource:
    """An open source. `close` closes its files.

    Attributes:
        format: `torch`, `dcp` or `safetensors`.
        size_bytes: The size of all its files together.
        root: The tree: dicts and lists, in whose leaves stand `InputArray`, `ArchivedTree` and plain values.
    """

    def __init__(self, path: Path, *, keep_unknown: bool) -> None:
        """**Blocks.** Finds out what it is, and reads what is in it but for the arrays' values.

        Raises:
            NoCheckpointError: If nothing is there.
            UsageError: If it is nothing that can be imported.
            FormatError: If it is malformed.
            StorageError: If it cannot be read.
        """
        self._files = FilePool()
        self._path = path
        self.format = ""
        self.root: Any = None
        try:
            if path.is_dir():
                self._read_directory(keep_unknown)
            else:
                self._read_file(keep_unknown)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """The size of all its files together."""
        return self._files.size_bytes

    def close(self) -> None:
        """Closes the files; harmless twice."""
        self._files.close()

    def _read_file(self, keep_unknown: bool) -> None:
        try:
            file = self._files.find(self._path, follow_links=True)
        except NotFoundError:
            raise NoCheckpointError(f"{self._path} does not exist", hint="Check the path.") from None
        head = bytes(file.read(0, min(file.size_bytes, 16)))
        if head.startswith(_ZIP):
            self.format = "torch"
            archive = TorchArchive(file, 0, file.size_bytes, keep_unknown=keep_unknown)
            self.root = ArchivedTree(archive.value, archive)
        elif head.startswith(_LEGACY):
            raise UsageError(
                f"{self._path} is in the form that torch.save had before version 1.6",
                hint="Load it with torch and save it again.",
            )
        elif head[8:9] == b"{":
            self.format = "safetensors"
            self.root = read_header(file)
        else:
            raise UsageError(f"{self._path} is nothing that can be imported", hint=_SOURCES)

    def _read_directory(self, keep_unknown: bool) -> None:
        if (self._path / METADATA_NAME).exists():
            self.format = "dcp"
            with closing(InputFile(self._path / METADATA_NAME)) as metadata:
                found = DcpDirectory(metadata, self._beside, keep_unknown=keep_unknown)
            self.root = _nest(found.entries, str(self._path))
            return
        arrays: dict[str, InputArray] = {}
        for name in list_files(self._path):
            for key, array in read_header(self._beside(name)).items():
                if key in arrays:
                    raise FormatError(f"{self._path}: {key!r} stands in two files", path=str(self._path))
                arrays[key] = array
        if not arrays:
            raise UsageError(f"{self._path} holds nothing that can be imported", hint=_SOURCES)
        self.format = "safetensors"
        self.root = arrays

    def _beside(self, name: str) -> InputFile:
        """A file of the directory. Links of a model's are followed, as Hugging Face's cache has them; DCP's are not."""
        return self._files.find(self._path / name, follow_links=self.format != "dcp")


def _nest(entries: dict[EntryPath, Any], path: str) -> dict[Any, Any]:
    """The tree that entries make up; numbers among the keys are places in lists."""
    root: dict[Any, Any] = {}
    for keys, value in entries.items():
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if type(place) is not dict:
                raise FormatError(f"{path}: {'.'.join(map(str, keys))} leads through another entry", path=path)
        if keys[-1] in place:
            raise FormatError(f"{path}: {'.'.join(map(str, keys))} stands twice", path=path)
        place[keys[-1]] = ArchivedTree(value.value, value) if isinstance(value, TorchArchive) else value
    return {key: _listed(value, 0) for key, value in root.items()}


def _listed(value: Any, depth: int) -> Any:
    if type(value) is not dict or depth > 64:
        return value
    parts = {key: _listed(part, depth + 1) for key, part in value.items()}
    if parts and parts.keys() == set(range(len(parts))):
        return [parts[number] for number in range(len(parts))]
    return parts
