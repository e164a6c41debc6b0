"""A tree of files in this process's memory, gone when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from holdfast.errors import DamageError, NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.format.digests import digest_each
from holdfast.storage.checks import (
    check_offset,
    check_size,
    flat,
    kept_bytes,
    missing_error,
    split_directory,
    split_path,
    too_large_error,
    too_short_error,
    trash_name,
)
from holdfast.storage.digesting import digest_parts
from holdfast.storage.protocol import Entry, Traits

Parts: TypeAlias = tuple[str, ...]

_ROOT: Final[Parts] = ()


class MemoryStorage:
    """**Thread-safe.** A tree of files in memory; see `Storage` for the contract of each method.

    As on a disk, a directory is created before something is published in it, a file is visible as soon as its writer is
    opened, and an open file can be used after its name has been removed. Syncing does nothing.

    Attributes:
        url: `memory://` and the name.
        traits: See `Storage`.
        location: None.
    """

    traits = Traits(has_directories=True, names_are_consistent=True)
    location = None

    def __init__(self, name: str = "") -> None:
        self._name = name
        self.url = f"memory://{name}"
        # Guards the two fields below, but not the bytes of a file.
        self._lock = threading.RLock()
        self._files: dict[Parts, bytearray] = {}
        self._directories: set[Parts] = {_ROOT}

    def __repr__(self) -> str:
        return f"MemoryStorage({self._name!r})"

    def make_directory(self, path: str) -> None:
        """Makes a directory, and those above it; see `Storage`."""
        parts = split_directory(path)
        with self._lock:
            above = [parts[:depth] for depth in range(1, len(parts) + 1)]
            for directory in above:
                if directory in self._files:
                    raise StorageError(f"{self._place(directory)} is a file, not a directory", path=path)
            self._directories.update(above)

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        """Begins a new file, and makes its directory; see `Storage`."""
        parts = split_path(path)
        check_size(size_bytes, path)
        self.make_directory("/".join(parts[:-1]))
        return MemoryWriter(self._add(path, size_bytes), path)

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole new small file; see `Storage`."""
        with self._lock:
            self._add(path, len(data))[:] = data

    def sync_directory(self, path: str) -> None:
        """Checks that the directory exists; see `Storage`."""
        parts = split_directory(path)
        with self._lock:
            if parts not in self._directories:
                raise NotFoundError(f"{self._place(parts)} is not a directory", path=path)

    def publish(self, path: str, data: bytes) -> bool:
        """Makes a whole small file appear at once; see `Storage`."""
        parts = split_path(path)
        with self._lock:
            if self._lies_at(parts):
                return False
            self.write(path, data)
        return True

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Reads a whole small file; see `Storage`."""
        with self._lock:
            content = self._find(path)
            if len(content) > limit_bytes:
                raise too_large_error(self._place(split_path(path)), path, len(content), limit_bytes)
            return bytes(content)

    def open_reader(self, path: str) -> MemoryReader:
        """Opens a file for reading; see `Storage`."""
        with self._lock:
            return MemoryReader(self._find(path), path)

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """Returns the entries of a directory, in order of name; see `Storage`."""
        depth = len(parts := split_directory(path))
        with self._lock:
            entries = [
                Entry("/".join(at[depth:]), False, len(data))
                for at, data in self._files.items()
                if at[:depth] == parts and depth < len(at) and (deep or len(at) == depth + 1)
            ]
            if not deep:
                entries += [Entry(at[-1], True, 0) for at in self._directories if at and at[:-1] == parts]
        return sorted(entries, key=lambda entry: entry.name)

    def delete(self, paths: Iterable[str]) -> bool:
        """Removes files and empty directories; see `Storage`."""
        all_parts = [split_path(path) for path in paths]
        with self._lock:
            for parts in all_parts:
                self._check_above(parts, "/".join(parts))
                self._files.pop(parts, None)
            # A directory after those in it.
            directories = sorted(self._directories.intersection(all_parts), reverse=True)
            for parts in directories:
                if not self.list("/".join(parts)):
                    self._directories.discard(parts)
            return self._directories.isdisjoint(directories)

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """Removes files; see `Storage`."""
        self.delete(paths)

    def retire(self, directory: str) -> str:
        """Moves a directory at once to a `.trash-` name in the root; see `Storage`."""
        parts = split_path(directory)
        with self._lock:
            self._check_above((*parts, ""), directory)
            if parts not in self._directories:
                raise NotFoundError(f"{self._place(parts)} does not exist", path=directory)
            aside = (trash_name(parts[-1]),)
            depth = len(parts)
            self._files = {aside + at[depth:] if at[:depth] == parts else at: data for at, data in self._files.items()}
            self._directories = {aside + at[depth:] if at[:depth] == parts else at for at in self._directories}
        return aside[0]

    def _add(self, path: str, size_bytes: int) -> bytearray:
        parts = split_path(path)
        with self._lock:
            self._check_above(parts, path)
            if parts[:-1] not in self._directories:
                raise NotFoundError(
                    f"cannot create {self._place(parts)}: its directory does not exist",
                    path=path,
                    hint="create the directory first",
                )
            if self._lies_at(parts):
                raise StorageError(
                    f"cannot create {self._place(parts)}: it already exists",
                    path=path,
                    hint="a file is never overwritten",
                )
            try:
                content = bytearray(size_bytes)
            except (MemoryError, OverflowError) as error:
                raise StorageFullError(
                    f"cannot create {self._place(parts)}: not enough memory for {size_bytes} bytes",
                    path=path,
                    hint="remove old checkpoints, or use a disk",
                ) from error
            self._files[parts] = content
            return content

    def _find(self, path: str) -> bytearray:
        parts = split_path(path)
        content = self._files.get(parts)
        if content is not None:
            return content
        is_blocked = parts in self._directories or any(parts[:depth] in self._files for depth in range(1, len(parts)))
        if is_blocked:
            raise DamageError(
                f"{self._place(parts)} is not a regular file, or is below something that is not a directory", path=path
            )
        raise NotFoundError(f"{self._place(parts)} does not exist", path=path)

    def _lies_at(self, parts: Parts) -> bool:
        return parts in self._files or parts in self._directories

    def _check_above(self, parts: Parts, path: str) -> None:
        """Checks that no directory above is a file."""
        for depth in range(1, len(parts)):
            if parts[:depth] in self._files:
                raise StorageError(f"{self._place(parts[:depth])} is a file, not a directory", path=path)

    def _place(self, parts: Sequence[str]) -> str:
        return f"{self.url}:{'/'.join(parts)}"


class MemoryWriter:
    """One new file in memory; see `FileWriter`."""

    def __init__(self, content: bytearray, path: str) -> None:
        self._content = content
        self._path = path
        # Guards the two fields below.
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._is_closed = False

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        """**Thread-safe.** Writes one piece; see `FileWriter`."""
        digests = digest_parts(parts)
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, len(self._content), self._path)
        with self._lock:
            self._check_open()
            self._content[offset_bytes : offset_bytes + kept] = piece[:kept]
            self._written_bytes += kept
        return digests

    def finish(self) -> None:
        """Closes; see `FileWriter`."""
        with self._lock:
            self._check_open()
            if self._written_bytes != len(self._content):
                raise missing_error(self._path, self._written_bytes, len(self._content))
            self._is_closed = True

    def abandon(self) -> None:
        """Closes; see `FileWriter`."""
        with self._lock:
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"the writer of {self._path} is closed", hint="open it again")


class MemoryReader:
    """One file in memory; see `FileReader`.

    Attributes:
        size_bytes: The file's size.
    """

    def __init__(self, content: bytearray, path: str) -> None:
        self.size_bytes = len(content)
        self._content = content
        self._path = path
        self._is_closed = False

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** Fills `into` from the file; see `FileReader`."""
        if self._is_closed:
            raise UsageError(f"the reader of {self._path} is closed", hint="open it again")
        check_offset(offset_bytes, self._path)
        wanted = flat(into)
        if offset_bytes + wanted.nbytes > self.size_bytes and wanted.nbytes:
            missing_bytes = offset_bytes + wanted.nbytes - self.size_bytes
            raise too_short_error(self._path, self._path, self.size_bytes, missing_bytes)
        if wanted.nbytes:
            wanted[:] = memoryview(self._content)[offset_bytes : offset_bytes + wanted.nbytes]

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** Fills many places of memory, and returns the digest of each; see `FileReader`."""
        for part in parts:
            self.read_into(offset_bytes, part)
            offset_bytes += part.nbytes
        return digest_each(parts)

    def close(self) -> None:
        """Closes; may be repeated."""
        self._is_closed = True
