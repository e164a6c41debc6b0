"""One file in a directory of this machine, read by several threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import DamageError, UsageError
from holdfast.storage.descriptors import SharedDescriptor
from holdfast.storage.direct import PAGE_BYTES, address_of, round_down, round_up, try_direct_reads
from holdfast.storage.failures import as_storage_errors, lost_bytes_as_damage
from holdfast.storage.pieces import flat
from holdfast.storage.residency import Residency

_SMALLEST_DIRECT_BYTES: Final = 1 << 20
"""A shorter read goes through the page cache, which reads ahead for the next one."""

_BOUNCE_BYTES: Final = 8 << 20


class LocalReader:
    """One file, read in pieces by any number of threads; see `FileReader`.

    A large piece that the page cache does not hold is read past it, which is several times faster on the disks that
    were measured; any other one through it. Both see the same bytes: nobody writes into a file that is being read.

    Attributes:
        size_bytes: The file's size when it was opened.
    """

    def __init__(self, descriptor: int, path: str, root: Path, size_bytes: int, *, direct: bool = True) -> None:
        self.size_bytes = size_bytes
        self._shared = SharedDescriptor(descriptor, f"the reader of {root / path}")
        self._path = path
        self._root = root
        self._bounce = _Bounce()
        self._direct: SharedDescriptor | None = None
        if direct and size_bytes >= _SMALLEST_DIRECT_BYTES:
            second = try_direct_reads(descriptor)
            if second is not None:
                self._direct = SharedDescriptor(second, f"the direct reader of {root / path}")
                self._residency = Residency(descriptor, size_bytes)

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Fills `into` from the file.

        Raises:
            DamageError: If the file ends before `into` is full.
            StorageError: If the device fails.
            UsageError: If the offset is negative, or the reader is closed.
        """
        if offset_bytes < 0:
            raise UsageError(f"{self._path}: cannot read at {offset_bytes}", hint="offsets begin at 0")
        target = flat(into)
        end_bytes = offset_bytes + target.nbytes
        is_large = target.nbytes >= _SMALLEST_DIRECT_BYTES and end_bytes <= self.size_bytes
        if self._direct is not None and is_large and not self._residency.holds(offset_bytes, end_bytes):
            with self._direct.use() as descriptor, self._errors():
                self._read_direct(descriptor, offset_bytes, target)
        else:
            with self._shared.use() as descriptor, self._errors():
                self._read_cached(descriptor, offset_bytes, target)

    def close(self) -> None:
        """Closes, once reads in flight have come back; harmless twice."""
        # Nothing was written through it, so there is nothing that a failure could mean.
        for shared in (self._shared, self._direct):
            if shared is not None:
                with suppress(OSError):
                    shared.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with lost_bytes_as_damage(self._path), as_storage_errors("read", self._path, self._root):
            yield

    def _read_cached(self, descriptor: int, offset_bytes: int, left: memoryview) -> None:
        while left.nbytes:
            # Python calls again after EINTR; a long read may come back short without being at the end.
            read_bytes = os.preadv(descriptor, [left], offset_bytes)
            if read_bytes == 0:
                raise self._too_short(offset_bytes, left.nbytes)
            left = left[read_bytes:]
            offset_bytes += read_bytes

    def _read_direct(self, descriptor: int, offset_bytes: int, left: memoryview) -> None:
        """Reads whole pages into aligned memory and copies from there what was asked for."""
        bounce = self._bounce.take()
        while left.nbytes:
            first_bytes = round_down(offset_bytes)
            skipped_bytes = offset_bytes - first_bytes
            wanted_bytes = min(round_up(skipped_bytes + left.nbytes), len(bounce))
            got_bytes = os.preadv(descriptor, [bounce[:wanted_bytes]], first_bytes) - skipped_bytes
            if got_bytes <= 0:
                raise self._too_short(offset_bytes, left.nbytes)
            part = min(got_bytes, left.nbytes)
            # Unlike an assignment of views, this lets the other threads read on.
            ctypes.memmove(address_of(left), address_of(bounce) + skipped_bytes, part)
            left = left[part:]
            offset_bytes += part

    def _too_short(self, end_bytes: int, missing_bytes: int) -> DamageError:
        return DamageError(
            f"{self._root / self._path} ends at {end_bytes}, where {missing_bytes} bytes more should be",
            path=self._path,
            offset_bytes=end_bytes,
            hint="the file was cut short: restore an older step",
        )


class _Bounce(threading.local):
    """Aligned memory, one piece to a thread, made when it is first needed."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self) -> memoryview:
        if self._memory is None:
            self._memory = mmap.mmap(-1, _BOUNCE_BYTES + PAGE_BYTES)
        return memoryview(self._memory)
