"""One file in a directory of this machine, read by several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import DamageError, UsageError
from holdfast.format.digests import digest_each
from holdfast.storage.digesting import NO_PAGES, find_native
from holdfast.storage.failures import as_storage_errors, lost_bytes_as_damage
from holdfast.storage.local.descriptors import SharedDescriptor
from holdfast.storage.local.direct import PAGE_BYTES, round_down, round_up, try_direct_reads
from holdfast.storage.local.residency import Residency
from holdfast.storage.parts import batches, fill_parts, parts_beyond
from holdfast.storage.pieces import flat
from holdfast.storage.scratch import Scratch

_SMALLEST_DIRECT_BYTES: Final = 1 << 20
"""A shorter read goes through the page cache, which reads ahead for the next one."""

_CACHED_BYTES: Final = 1 << 20
"""So much is read through the page cache, and digested, at a time: the processor's own cache still holds it then."""

_DIRECT_BYTES: Final = 2 << 20
"""The same past the page cache, where the disk is the slower for smaller reads."""

_BOUNCE_BYTES: Final = _DIRECT_BYTES + 2 * PAGE_BYTES
"""Holds the pages on which as much lies, wherever it begins."""

_MOST_PARTS: Final = 1024
"""How many places of memory one call of the system fills."""


class LocalReader:
    """One file, read in pieces by any number of threads; see `FileReader`.

    A large piece that the page cache does not hold is read past it, which is several times faster on the disks that
    were measured; any other one through it. Both see the same bytes: nobody writes into a file that is being read.

    Attributes:
        size_bytes: The file's size when it was opened.
    """

    def __init__(
        self, descriptor: int, path: str, root: Path, size_bytes: int, *, direct: bool = True, native: bool = True
    ) -> None:
        self.size_bytes = size_bytes
        self._wants_native = native
        self._shared = SharedDescriptor(descriptor, f"the reader of {root / path}")
        self._path = path
        self._root = root
        self._bounce = Scratch()
        self._direct: SharedDescriptor | None = None
        self._residency: Residency | None = None
        if direct and size_bytes >= _SMALLEST_DIRECT_BYTES:
            second = try_direct_reads(descriptor)
            if second is not None:
                try:
                    self._residency = Residency(descriptor, size_bytes)
                    self._direct = SharedDescriptor(second, f"the direct reader of {root / path}")
                except BaseException:
                    # Ctrl-C, say: whoever opened the other one closes that.
                    os.close(second)
                    raise

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Fills `into` from the file.

        Raises:
            DamageError: If the file ends before `into` is full.
            StorageError: If the device fails.
            UsageError: If the offset is negative, or the reader is closed.
        """
        deque(self._fill_each(offset_bytes, [flat(into)]), maxlen=0)

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** **Blocks.** Fills many places of memory, and gives the digest of each; see `FileReader`.

        Raises:
            DamageError: If the file ends before all are full.
            StorageError: If the device fails.
            UsageError: If the offset is negative, or the reader is closed.
        """
        native = find_native() if self._wants_native else None
        if native is None:
            return digest_each(self._fill_each(offset_bytes, parts))
        self._check(offset_bytes)
        size_bytes = sum(map(len, parts))
        direct = self._direct_for(offset_bytes, size_bytes)
        pages = NO_PAGES if direct is None else self._bounce.take(_BOUNCE_BYTES)
        with (direct or self._shared).use() as descriptor, self._errors():
            end_bytes, digests = native.read(descriptor, offset_bytes, parts, pages)
        if end_bytes < offset_bytes + size_bytes:
            raise self._too_short(end_bytes, offset_bytes + size_bytes - end_bytes)
        return digests

    def close(self) -> None:
        """Closes, once reads in flight have come back; harmless twice."""
        if self._residency is not None:
            self._residency.close()
        # Nothing was written through it, so there is nothing that a failure could mean.
        for shared in (self._shared, self._direct):
            if shared is not None:
                with suppress(OSError):
                    shared.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with lost_bytes_as_damage(self._path), as_storage_errors("read", self._path, self._root):
            yield

    def _check(self, offset_bytes: int) -> None:
        if offset_bytes < 0:
            raise UsageError(f"{self._path}: cannot read at {offset_bytes}", hint="offsets begin at 0")

    def _direct_for(self, offset_bytes: int, size_bytes: int) -> SharedDescriptor | None:
        """What a read goes by that passes by the page cache; None if it goes through it."""
        end_bytes = offset_bytes + size_bytes
        if self._residency is None or size_bytes < _SMALLEST_DIRECT_BYTES or end_bytes > self.size_bytes:
            return None
        return None if self._residency.holds(offset_bytes, end_bytes) else self._direct

    def _fill_each(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yields each part, in order, once it is full; the file stays open until all are, or the iterator is closed."""
        self._check(offset_bytes)
        direct = self._direct_for(offset_bytes, sum(map(len, parts)))
        if direct is not None:
            with direct.use() as descriptor, self._errors():
                for batch in batches(parts, len, _DIRECT_BYTES):
                    offset_bytes = self._read_direct(descriptor, offset_bytes, batch)
                    yield from batch
        else:
            with self._shared.use() as descriptor, self._errors():
                for batch in batches(parts, len, _CACHED_BYTES):
                    offset_bytes = self._read_cached(descriptor, offset_bytes, batch)
                    yield from batch

    def _read_cached(self, descriptor: int, offset_bytes: int, parts: Sequence[memoryview]) -> int:
        """Reads straight into the parts, and returns where in the file they end."""
        left_bytes = sum(map(len, parts))
        while left_bytes:
            # Python calls again after EINTR; a long read may come back short without being at the end.
            got_bytes = os.preadv(descriptor, parts[:_MOST_PARTS], offset_bytes)
            if got_bytes == 0:
                raise self._too_short(offset_bytes, left_bytes)
            left_bytes -= got_bytes
            offset_bytes += got_bytes
            if left_bytes:
                parts = parts_beyond(parts, got_bytes)
        return offset_bytes

    def _read_direct(self, descriptor: int, offset_bytes: int, parts: Sequence[memoryview]) -> int:
        """Reads whole pages into aligned memory, copies from there what was asked for, and returns where that ends."""
        left_bytes = sum(map(len, parts))
        bounce = self._bounce.take(_BOUNCE_BYTES)
        while left_bytes:
            first_bytes = round_down(offset_bytes)
            skipped_bytes = offset_bytes - first_bytes
            wanted_bytes = min(round_up(skipped_bytes + left_bytes), len(bounce))
            got_bytes = os.preadv(descriptor, [bounce[:wanted_bytes]], first_bytes) - skipped_bytes
            if got_bytes <= 0:
                raise self._too_short(offset_bytes, left_bytes)
            got_bytes = min(got_bytes, left_bytes)
            fill_parts(parts, bounce[skipped_bytes : skipped_bytes + got_bytes])
            left_bytes -= got_bytes
            offset_bytes += got_bytes
            if left_bytes:
                parts = parts_beyond(parts, got_bytes)
        return offset_bytes

    def _too_short(self, end_bytes: int, missing_bytes: int) -> DamageError:
        return DamageError(
            f"{self._root / self._path} ends at {end_bytes}, where {missing_bytes} bytes more should be",
            path=self._path,
            offset_bytes=end_bytes,
            hint="the file was cut short: restore an older step",
        )
