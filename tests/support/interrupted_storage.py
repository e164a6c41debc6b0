"""A storage during whose calls another process does something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from holdfast.storage import Entry, MemoryStorage
from holdfast.storage.memory import MemoryReader, MemoryWriter


class Interrupted(MemoryStorage):
    """A storage that lets another process do something before one of its calls."""

    def __init__(self) -> None:
        super().__init__("interrupted")
        self.calls = 0
        self._at = 0
        self._act: Callable[[], object] | None = None
        self._thread = threading.local()

    def interrupt(self, at: int, act: Callable[[], object]) -> None:
        self.calls, self._at, self._act = 0, at, act

    @property
    def was_interrupted(self) -> bool:
        return self._act is None

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call from outside; those that a call makes itself are parts of it."""
        is_outermost = not getattr(self._thread, "is_inside", False)
        if is_outermost:
            self.calls += 1
            if self._act is not None and self.calls == self._at:
                act, self._act = self._act, None
                act()
            self._thread.is_inside = True
        try:
            yield
        finally:
            if is_outermost:
                self._thread.is_inside = False

    def make_directory(self, path: str) -> None:
        with self._call():
            super().make_directory(path)

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        with self._call():
            return super().create(path, size_bytes)

    def open_reader(self, path: str) -> MemoryReader:
        with self._call():
            return super().open_reader(path)

    def write(self, path: str, data: bytes) -> None:
        with self._call():
            super().write(path, data)

    def sync_directory(self, path: str) -> None:
        with self._call():
            super().sync_directory(path)

    def publish(self, path: str, data: bytes) -> bool:
        with self._call():
            return super().publish(path, data)

    def read(self, path: str, limit_bytes: int) -> bytes:
        with self._call():
            return super().read(path, limit_bytes)

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        with self._call():
            return super().list(path, deep=deep)

    def delete(self, paths: Iterable[str]) -> bool:
        with self._call():
            return super().delete(paths)

    def retire(self, directory: str) -> str:
        with self._call():
            return super().retire(directory)
