"""What a disk gives at best: the bytes of a checkpoint written and read with nothing else to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.save.write import PIECE_BYTES
from holdfast.storage import FileReader, FileWriter, LocalStorage
from holdfast.storage.crew import Crew

_FILE: Final = "written"
_PUBLISHED_BYTES: Final = 1024
"""About what a manifest has."""

Advance = Callable[[int], None]
"""Told, from any thread, of the bytes that have just been written or read."""


class DiskProbe:
    """Writes and reads as a save and a restore do, but without digests and records.

    Attributes:
        is_direct: Whether the last file was written past the page cache.
    """

    def __init__(self, storage: LocalStorage, crew: Crew, advance: Advance) -> None:
        self._storage = storage
        self._crew = crew
        self._advance = advance
        self._published = 0
        self._has_spare = False
        self.is_direct = False

    def write(self, image: memoryview, size_bytes: int, *, keep: bool = False) -> float:
        """**Blocks.** Writes a new file until it is durable, and removes it, or leaves it for `rewrite`.

        Args:
            image: What to write, in whole pages.
            size_bytes: How much of it the file has.
            keep: Whether to leave it for `rewrite`, where that can be.

        Returns:
            The bytes a second.

        Raises:
            StorageError: If the place fails.
        """
        begun_at = time.perf_counter()
        writer = self._storage.open_writer(_FILE, size_bytes)
        try:
            self._crew.run(self._writes(writer, image))
            writer.finish()
            self._storage.sync_directory("")
        finally:
            writer.abandon()
            seconds = time.perf_counter() - begun_at
            self._has_spare = keep and self._storage.spare.try_keep(_FILE, size_bytes)
            if not self._has_spare:
                self._storage.remove(_FILE)
        self.is_direct = writer.is_direct
        return size_bytes / seconds

    def rewrite(self, image: memoryview, size_bytes: int) -> float | None:
        """**Blocks.** Does the same over the bytes of the file that `write` has just left, as a save does over a spare.

        Returns:
            The bytes a second; None where the file system is none on which that is done.

        Raises:
            StorageError: If the place fails.
        """
        return self.write(image, size_bytes) if self._has_spare else None

    def read(self, path: Path, image: memoryview) -> float:
        """**Blocks.** Reads as much of a file as the image holds.

        Returns:
            The bytes a second.

        Raises:
            StorageError: If the place fails.
        """
        size_bytes = len(image)
        begun_at = time.perf_counter()
        reader = LocalStorage(path.parent).open_reader(path.name)
        try:
            size_bytes = min(reader.size_bytes, size_bytes)
            self._crew.run(self._reads(reader, image[:size_bytes]))
        finally:
            reader.close()
        return size_bytes / (time.perf_counter() - begun_at)

    def publish(self) -> float:
        """**Blocks.** Publishes a small file, as a commit does its manifest.

        Returns:
            How many seconds that took.

        Raises:
            StorageError: If the place fails.
        """
        self._published += 1
        name = f"published-{self._published}"
        data = os.urandom(_PUBLISHED_BYTES)
        begun_at = time.perf_counter()
        self._storage.publish(name, data)
        seconds = time.perf_counter() - begun_at
        self._storage.remove(name)
        return seconds

    def _writes(self, writer: FileWriter, image: memoryview) -> Iterator[Callable[[], None]]:
        for begin in range(0, len(image), PIECE_BYTES):
            yield partial(self._do, writer.write_at, begin, image[begin : begin + PIECE_BYTES])

    def _reads(self, reader: FileReader, image: memoryview) -> Iterator[Callable[[], None]]:
        for begin in range(0, len(image), PIECE_BYTES):
            yield partial(self._do, reader.read_into, begin, image[begin : begin + PIECE_BYTES])

    def _do(self, work: Callable[[int, memoryview], None], begin: int, piece: memoryview) -> None:
        work(begin, piece)
        self._advance(len(piece))
