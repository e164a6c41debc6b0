"""An object store in memory: no directories, and files that appear once they are finished."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.errors import NotFoundError, StorageError, UsageError
from holdfast.format.digests import digest, digest_each
from holdfast.storage import Entry, Traits
from holdfast.storage.checks import (
    check_size,
    choose_piece_bytes,
    flat,
    kept_bytes,
    missing_error,
    split_directory,
    split_path,
    too_large_error,
)
from holdfast.storage.memory import MemoryReader


class ObjectStorage:
    """**Thread-safe.** Objects by their keys, as a bucket has them; see `Storage`.

    Attributes:
        url: `objects://` and the name.
        location: None.
        traits: With `least_piece_bytes` and `most_pieces` among the limits it takes parts as S3 does.
        requests: The names of the calls that were made, in order.
    """

    location = None

    def __init__(self, name: str = "", **limits: Any) -> None:
        self.url = f"objects://{name}"
        self.traits = Traits(lists_deep=True, names_are_consistent=True, **limits)
        self.requests: list[str] = []
        # Guards the objects.
        self._lock = threading.Lock()
        self._objects: dict[str, bytearray] = {}

    def make_directory(self, path: str) -> None:
        split_directory(path)

    def create(self, path: str, size_bytes: int) -> ObjectWriter:
        self._begin("create", path)
        check_size(size_bytes, path)
        if path in self._objects:
            raise StorageError(f"{self.url}: {path} already exists", path=path)
        return ObjectWriter(self, path, size_bytes)

    def write(self, path: str, data: bytes) -> None:
        self._begin("write", path)
        self.put(path, bytearray(data))

    def sync_directory(self, path: str) -> None:
        split_directory(path)

    def publish(self, path: str, data: bytes) -> bool:
        self._begin("publish", path)
        with self._lock:
            return self._objects.setdefault(path, content := bytearray(data)) is content

    def read(self, path: str, limit_bytes: int) -> bytes:
        self._begin("read", path)
        content = self._find(path)
        if len(content) > limit_bytes:
            raise too_large_error(f"{self.url}:{path}", path, len(content), limit_bytes)
        return bytes(content)

    def open_reader(self, path: str) -> MemoryReader:
        self._begin("open_reader", path)
        return MemoryReader(self._find(path), path)

    def list(self, path: str, *, deep: bool = False) -> builtins.list[Entry]:
        split_directory(path)
        self.requests.append("list")
        prefix = f"{path}/" if path else ""
        with self._lock:
            found = {key.removeprefix(prefix): data for key, data in self._objects.items() if key.startswith(prefix)}
        above = set() if deep else {name.partition("/")[0] for name in found if "/" in name}
        entries = [Entry(name, True, 0) for name in above]
        entries += [
            Entry(name, False, len(data), digest(data)) for name, data in found.items() if deep or "/" not in name
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def delete(self, paths: Iterable[str]) -> bool:
        keys = [*paths]
        for key in keys:
            split_path(key)
        self.requests.append("delete")
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
            return True

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        self.delete(paths)

    def retire(self, directory: str) -> str:
        split_path(directory)
        return directory

    def put(self, path: str, content: bytearray) -> None:
        """Creates an object, or fails if there is one."""
        with self._lock:
            if self._objects.setdefault(path, content) is not content:
                raise StorageError(f"{self.url}: {path} already exists", path=path)

    def _begin(self, name: str, path: str) -> None:
        split_path(path)
        self.requests.append(name)

    def _find(self, path: str) -> bytearray:
        content = self._objects.get(path)
        if content is None:
            raise NotFoundError(f"{self.url}: there is no {path}", path=path)
        return content


class ObjectWriter:
    """An upload in parts, which is an object once it is finished."""

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int) -> None:
        self._storage, self._path, self._size_bytes = storage, path, size_bytes
        traits = storage.traits
        is_limited = bool(traits.least_piece_bytes or traits.most_pieces)
        self._least_bytes = choose_piece_bytes(traits, size_bytes, 1) if is_limited else 0
        # Guards the two fields below.
        self._lock = threading.Lock()
        self._parts: dict[int, bytes] = {}
        self._is_closed = False

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, self._size_bytes, self._path)
        with self._lock:
            self._check_open()
            if offset_bytes + kept < self._size_bytes and kept < self._least_bytes:
                raise StorageError(f"{self._path}: a part of {kept} bytes is too small", path=self._path)
            if kept:
                self._parts[offset_bytes] = bytes(piece[:kept])
            if self._storage.traits.most_pieces and len(self._parts) > self._storage.traits.most_pieces:
                raise StorageError(f"{self._path}: too many parts", path=self._path)
        return digest_each(parts)

    def finish(self) -> None:
        with self._lock:
            self._check_open()
            content = bytearray().join(self._parts[offset] for offset in sorted(self._parts))
            if len(content) != self._size_bytes:
                raise missing_error(self._path, len(content), self._size_bytes)
            self._storage.put(self._path, content)
            self._is_closed = True

    def abandon(self) -> None:
        with self._lock:
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"the writer of {self._path} is closed", hint="open it again")
