"""The files that an export writes: complete under their names, or not there at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.errors import StorageFullError, UsageError
from holdfast.storage.checks import as_storage_errors, find_file_above

_OVERWRITE: Final = "Choose another path, or allow overwriting (--overwrite, overwrite=True)."


class OutputFiles:
    """New files in a hidden directory, until they are moved to their names.

    A crash leaves that directory, whose name begins with `.` and ends with `.tmp`, and only whole files under final
    names.
    """

    def __init__(self, out: Path, staging: Path) -> None:
        self._out = out
        self._staging = staging

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """**Blocks.** Opens a new file; after the body, its bytes are durable.

        Raises:
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", name, self._out):
            with (self._staging / name).open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())

    def publish_file(self, name: str, *, overwrite: bool) -> None:
        """**Blocks.** Gives the one file its name, which is that of the output.

        Raises:
            UsageError: If the path exists by now.
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", "", self._out):
            if overwrite:
                (self._staging / name).replace(self._out)
            else:
                try:
                    os.link(self._staging / name, self._out)
                except FileExistsError:
                    raise UsageError(f"{self._out} already exists", hint=_OVERWRITE) from None
            _sync_directory(self._out.parent)

    def publish_files(self, last: str, is_ours: Callable[[str], bool]) -> None:
        """**Blocks.** Moves all files into the directory of that name.

        A new directory appears at once, with all of them. In an existing one, each file appears whole; the one without
        which the others mean nothing is removed first and added last. Existing files whose names are not `is_ours`
        stay.

        Raises:
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", "", self._out):
            _sync_directory(self._staging)
            if self._staging.parent != self._out:
                self._staging.rename(self._out)
                _sync_directory(self._out.parent)
                return
            old = [entry.name for entry in os.scandir(self._out) if is_ours(entry.name) and entry.is_file()]
            for name in sorted(old, key=lambda name: name != last):
                (self._out / name).unlink()
                if name == last:
                    _sync_directory(self._out)
            names = sorted((entry.name for entry in os.scandir(self._staging)), key=lambda name: name == last)
            for name in names:
                (self._staging / name).rename(self._out / name)
            _sync_directory(self._out)


@contextmanager
def open_output_file(out: Path, size_bytes: int, *, overwrite: bool) -> Iterator[OutputFiles]:
    """**Blocks.** Prepares one file, which the body publishes; however the body ends, nothing else stays.

    Raises:
        UsageError: If the path exists and must not be overwritten.
        StorageFullError: If there is clearly no space.
        StorageError: If the storage fails.
    """
    if os.path.lexists(out) and (not overwrite or not out.is_file()):
        what = "already exists" if out.is_file() else "already exists and is not a file"
        raise UsageError(f"{out} {what}", hint=_OVERWRITE)
    with _staging(out, out.parent, size_bytes) as staging:
        yield OutputFiles(out, staging)


@contextmanager
def open_output_directory(
    out: Path, size_bytes: int, is_ours: Callable[[str], bool], *, overwrite: bool
) -> Iterator[OutputFiles]:
    """**Blocks.** Like `open_output_file`, for several files in one directory.

    Existing files whose names are not `is_ours` stay.

    Raises:
        UsageError: If a file exists and must not be overwritten.
        StorageFullError: If there is clearly no space.
        StorageError: If the storage fails.
    """
    is_there = out.is_dir()
    if os.path.lexists(out) and not is_there:
        raise UsageError(f"{out} already exists and is not a directory", hint="Choose another path.")
    if is_there:
        with as_storage_errors("read", "", out):
            old = sorted(entry.name for entry in os.scandir(out) if is_ours(entry.name))
        if old and not overwrite:
            raise UsageError(f"{out} already contains {_some(old)}", hint=_OVERWRITE)
    with _staging(out, out if is_there else out.parent, size_bytes) as staging:
        yield OutputFiles(out, staging)


@contextmanager
def _staging(out: Path, parent: Path, size_bytes: int) -> Iterator[Path]:
    with as_storage_errors("write", "", parent):
        if out.parent != Path() and not out.parent.is_dir():
            file = find_file_above(out)
            if file is not None:
                raise UsageError(f"{out} cannot be created: {file} is not a directory", hint="Check the path.")
            raise UsageError(f"the directory {out.parent} does not exist", hint="Create it first, or check the path.")
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < size_bytes:
            raise StorageFullError(
                f"{out} needs {size_bytes} bytes, but only {free_bytes} are free there",
                path=str(out),
                hint="Free some space, or choose a path on another disk.",
            )
        staging = parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
    try:
        yield staging
    finally:
        with suppress(OSError):
            shutil.rmtree(staging)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more files" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
