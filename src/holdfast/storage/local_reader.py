"""One file in a directory of this machine, read by several threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.errors import DamageError, UsageError
from holdfast.storage.descriptors import SharedDescriptor
from holdfast.storage.failures import as_storage_errors
from holdfast.storage.pieces import flat


class LocalReader:
    """One file, read in pieces by any number of threads; see `FileReader`.

    Attributes:
        size_bytes: The file's size when it was opened.
    """

    def __init__(self, descriptor: int, path: str, root: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._shared = SharedDescriptor(descriptor, f"the reader of {root / path}")
        self._path = path
        self._root = root

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Fills `into` from the file.

        Raises:
            DamageError: If the file ends before `into` is full.
            StorageError: If the device fails.
            UsageError: If the offset is negative, or the reader is closed.
        """
        if offset_bytes < 0:
            raise UsageError(f"{self._path}: cannot read at {offset_bytes}", hint="offsets begin at 0")
        left = flat(into)
        with self._shared.use() as descriptor, as_storage_errors("read", self._path, self._root):
            while left.nbytes:
                # Python calls again after EINTR; a long read may come back short without being at the end.
                read_bytes = os.preadv(descriptor, [left], offset_bytes)
                if read_bytes == 0:
                    raise DamageError(
                        f"{self._root / self._path} ends at {offset_bytes}, where {left.nbytes} bytes more should be",
                        path=self._path,
                        offset_bytes=offset_bytes,
                        hint="the file was cut short: restore an older step",
                    )
                left = left[read_bytes:]
                offset_bytes += read_bytes

    def close(self) -> None:
        """Closes, once reads in flight have come back; harmless twice."""
        # Nothing was written through it, so there is nothing that a failure could mean.
        with suppress(OSError):
            self._shared.close()
