"""One open file of this machine, written or read by several threads."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import DamageError, StorageError, UsageError
from holdfast.format.digests import digest_each
from holdfast.format.index import round_up
from holdfast.storage.buffers import Scratch, address_of, batches, parts_beyond
from holdfast.storage.checks import (
    as_storage_errors,
    check_offset,
    flat,
    kept_bytes,
    lost_bytes_as_damage,
    missing_error,
    storage_error,
    too_short_error,
)
from holdfast.storage.digesting import NO_PAGES, find_native
from holdfast.storage.local.direct import (
    PAGE_BYTES,
    Residency,
    round_down,
    try_direct_reads,
    write_pages,
)
from holdfast.storage.local.files import sync_to_disk, write_all

_WRITTEN_BYTES: Final = 1 << 20
"""How much is copied into aligned memory, and written from there, at a time."""


class SharedDescriptor:
    """**Thread-safe.** A file descriptor that is closed when the last thread that uses it has left.

    If a number is closed while another thread writes to it, it may belong to another file by then.

    Attributes:
        users: How many threads are using it at this moment.
    """

    def __init__(self, descriptor: int, what: str) -> None:
        self._descriptor = descriptor
        self._what = what
        # Guards the two fields below.
        self._lock = threading.Lock()
        self.users = 0
        self._is_closing = False

    @contextmanager
    def use(self) -> Iterator[int]:
        """Provides the descriptor to the body; raises `UsageError` if it was closed before."""
        with self._lock:
            is_closed = self._is_closing
            self.users += not is_closed
        if is_closed:
            raise UsageError(f"{self._what} is closed", hint="open it again")
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self.users -= 1
                is_last = self._is_closing and self.users == 0
            if is_last:
                # The thread that closed it has given the file up, so errors of closing do not matter any more.
                with suppress(OSError):
                    os.close(self._descriptor)

    def close(self) -> None:
        """Admits no more threads, and closes once all have left; may be repeated. `OSError` is not handled."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
            is_idle = self.users == 0
        if is_first and is_idle:
            os.close(self._descriptor)


class LocalWriter:
    """One new file of known size, written in pieces in any order; see `FileWriter`.

    A direct file is written by whole pages only, and never through the page cache as well: the two ways into one file
    agree only as long as no page of the cache, which may be larger than ours, is touched by both at once. So unaligned
    data is copied into aligned memory first, and a page that a piece covers only in part is read, changed and written
    again. (All writers of holdfast itself pass whole pages, aligned in memory.) If its file system refuses direct
    writes, a file is written through the page cache only.

    Attributes:
        is_direct: True if the bytes bypass the page cache.
    """

    def __init__(self, descriptor: int, path: str, root: Path, size_bytes: int, is_direct: bool) -> None:
        self._shared = SharedDescriptor(descriptor, f"the writer of {root / path}")
        self._path = path
        self._root = root
        self._size_bytes = size_bytes
        self.is_direct = is_direct
        # Guards the two fields below, and each page that is changed in part.
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._failure: StorageError | None = None

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        """**Thread-safe.** **Blocks.** Writes one piece; see `FileWriter`.

        After a failure it always raises that, because the result of a failed write is unknown.
        """
        if self._failure is not None:
            raise self._failure
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, self._size_bytes, self._path)
        native = find_native()
        with self._shared.use() as descriptor:
            try:
                if native is not None and kept and not self.is_direct:
                    digests = native.write(descriptor, offset_bytes, piece[:kept], parts, 1)
                elif native is not None and kept and _has_whole_pages(offset_bytes, piece):
                    digests = native.write(descriptor, offset_bytes, piece, parts, PAGE_BYTES)
                else:
                    digests = digest_each(parts)
                    if kept and self.is_direct:
                        self._write_direct(descriptor, offset_bytes, piece)
                    elif kept:
                        write_all(descriptor, piece[:kept], offset_bytes)
            except OSError as error:
                raise self._fail(error) from error
        with self._lock:
            self._written_bytes += kept
        return digests

    def finish(self) -> None:
        """**Blocks.** Makes the bytes durable (fsync), and closes.

        Raises:
            StorageError: If this or an earlier call failed. After a failed fsync the system may have dropped the bytes
                and will report the next fsync as a success; so there is none, and the file must never be trusted.
            UsageError: If pieces are missing or still being written, or the writer is closed.
        """
        if self._failure is not None:
            raise self._failure
        with self._shared.use() as descriptor:
            if self._shared.users > 1 or self._written_bytes != self._size_bytes:
                raise missing_error(self._path, self._written_bytes, self._size_bytes)
            try:
                if self._size_bytes % PAGE_BYTES:
                    os.ftruncate(descriptor, self._size_bytes)
                sync_to_disk(descriptor)
            except OSError as error:
                raise self._fail(error) from error
        try:
            self._shared.close()
        except OSError as error:
            raise self._fail(error) from error

    def abandon(self) -> None:
        """Closes without making anything durable, once writes in progress have returned; see `FileWriter`."""
        try:
            self._shared.close()
        except OSError as error:
            self._fail(error)

    def _write_direct(self, descriptor: int, offset_bytes: int, piece: memoryview) -> None:
        end_bytes = offset_bytes + piece.nbytes
        # The whole pages inside the piece: a piece within one page has none.
        first_bytes = min(round_up(offset_bytes), end_bytes)
        last_bytes = max(round_down(end_bytes), first_bytes)
        inside = piece[first_bytes - offset_bytes : last_bytes - offset_bytes]
        if inside.nbytes:
            if address_of(inside) % PAGE_BYTES:
                self._write_bounced(descriptor, first_bytes, inside)
            else:
                write_pages(descriptor, inside, first_bytes)
        self._write_edge(descriptor, offset_bytes, piece[: first_bytes - offset_bytes])
        self._write_edge(descriptor, last_bytes, piece[last_bytes - offset_bytes :])

    def _write_bounced(self, descriptor: int, offset_bytes: int, inside: memoryview) -> None:
        bounce = memoryview(mmap.mmap(-1, min(_WRITTEN_BYTES, inside.nbytes)))
        for start in range(0, inside.nbytes, _WRITTEN_BYTES):
            part = inside[start : start + _WRITTEN_BYTES]
            bounce[: part.nbytes] = part
            write_pages(descriptor, bounce[: part.nbytes], offset_bytes + start)

    def _write_edge(self, descriptor: int, offset_bytes: int, edge_piece: memoryview) -> None:
        """Changes a part of one page; its other parts are another piece's."""
        page_bytes = round_down(offset_bytes)
        edge_piece = edge_piece[: max(0, self._size_bytes - offset_bytes)]
        if not edge_piece.nbytes:
            return
        with self._lock:
            page = memoryview(mmap.mmap(-1, PAGE_BYTES))
            os.preadv(descriptor, [page], page_bytes)
            page[offset_bytes - page_bytes :][: edge_piece.nbytes] = edge_piece
            write_pages(descriptor, page, page_bytes)

    def _fail(self, error: OSError) -> StorageError:
        """Ends the writer; the first failure is the one that every later call raises."""
        if error.errno == errno.EINVAL and self._size_bytes > resource.getrlimit(resource.RLIMIT_FSIZE)[0] >= 0:
            # A direct write up to the limit is cut short within a page, which no such write may be.
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        failure = storage_error(error, "write", self._path, self._root, self._size_bytes)
        with self._lock:
            if self._failure is None:
                self._failure = failure
            failure = self._failure
        self.abandon()
        return failure


def _has_whole_pages(offset_bytes: int, piece: memoryview) -> bool:
    """Returns True if a piece that is not empty can be written directly from where it is."""
    return not (offset_bytes % PAGE_BYTES or piece.nbytes % PAGE_BYTES or address_of(piece) % PAGE_BYTES)


_SMALLEST_READ_BYTES: Final = 1 << 20
"""A shorter read goes through the page cache, which reads ahead for the next one."""

_CACHED_BYTES: Final = 1 << 20
"""How much is read through the page cache, and digested, at a time: the processor's own cache still holds it then."""

_BOUNCE_BYTES: Final = (2 << 20) + 2 * PAGE_BYTES
"""Holds the pages of one read past the page cache, wherever it begins."""

_MOST_PARTS: Final = 1024
"""How many places of memory one call of the system fills."""


class LocalReader:
    """One file, read in pieces by any number of threads; see `FileReader`.

    The compiled function reads a large piece that the page cache does not hold past it, which is several times faster
    on the disks that were measured; any other piece goes through the cache. Both see the same bytes.

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
        self._direct: SharedDescriptor | None = None
        self._residency: Residency | None = None
        if direct and size_bytes >= _SMALLEST_READ_BYTES:
            second = try_direct_reads(descriptor)
            if second is not None:
                try:
                    self._bounce = Scratch()
                    self._residency = Residency(descriptor, size_bytes)
                    self._direct = SharedDescriptor(second, f"the direct reader of {root / path}")
                except BaseException:
                    # Ctrl-C, say: the caller that opened the other one closes that.
                    os.close(second)
                    raise

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Fills `into` from the file; see `FileReader`."""
        self.read_digested(offset_bytes, [flat(into)])

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** **Blocks.** Fills many places of memory, and returns the digest of each; see
        `FileReader`."""
        native = find_native() if self._wants_native else None
        if native is None:
            return digest_each(self._fill_each(offset_bytes, parts))
        check_offset(offset_bytes, self._path)
        size_bytes = sum(map(len, parts))
        direct = self._direct_for(offset_bytes, size_bytes)
        pages = NO_PAGES if direct is None else self._bounce.take(_BOUNCE_BYTES)
        with (direct or self._shared).use() as descriptor, self._errors():
            end_bytes, digests = native.read(descriptor, offset_bytes, parts, pages)
        if end_bytes < offset_bytes + size_bytes:
            raise self._too_short(end_bytes, offset_bytes + size_bytes - end_bytes)
        return digests

    def close(self) -> None:
        """Closes, once reads in progress have returned; may be repeated."""
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

    def _direct_for(self, offset_bytes: int, size_bytes: int) -> SharedDescriptor | None:
        """Returns what a direct read uses; None if it goes through the page cache."""
        end_bytes = offset_bytes + size_bytes
        if self._residency is None or size_bytes < _SMALLEST_READ_BYTES or end_bytes > self.size_bytes:
            return None
        return None if self._residency.holds(offset_bytes, end_bytes) else self._direct

    def _fill_each(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yields each part, in order, once it is full; the file stays open until all are, or the iterator is closed."""
        check_offset(offset_bytes, self._path)
        with self._shared.use() as descriptor, self._errors():
            for batch in batches(parts, len, _CACHED_BYTES):
                offset_bytes = self._read_cached(descriptor, offset_bytes, batch)
                yield from batch

    def _read_cached(self, descriptor: int, offset_bytes: int, parts: Sequence[memoryview]) -> int:
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

    def _too_short(self, end_bytes: int, missing_bytes: int) -> DamageError:
        return too_short_error(str(self._root / self._path), self._path, end_bytes, missing_bytes)
