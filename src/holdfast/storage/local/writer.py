"""One new file in a directory of this machine, written by several threads."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from pathlib import Path
from typing import Final

import msgspec

from holdfast.errors import StorageError
from holdfast.storage.failures import storage_error
from holdfast.storage.local.descriptors import SharedDescriptor, make_last, write_all
from holdfast.storage.local.direct import PAGE_BYTES, address_of, round_down, round_up, write_pages
from holdfast.storage.pieces import flat, kept_bytes, missing_error

_BOUNCE_BYTES: Final = 1 << 20


class _Edge(msgspec.Struct):
    """A page that several pieces share, until all of them have come."""

    page: memoryview
    filled_bytes: int = 0


class LocalWriter:
    """One new file of known size, written in pieces in any order; see `FileWriter`.

    A direct file is written by whole pages only, and never through the page cache as well: the two ways into one file
    agree only as long as no page of the cache, which may be larger than ours, is touched by both at once. So what is
    not aligned is copied into aligned memory first: the inside of a piece through a buffer, and the page that two
    pieces share into one that waits here until it is full. A file whose file system refuses direct writes is written
    through the page cache only.
    """

    def __init__(self, descriptor: int, path: str, root: Path, size_bytes: int, is_direct: bool) -> None:
        self._shared = SharedDescriptor(descriptor, f"the writer of {root / path}")
        self._path = path
        self._root = root
        self._size_bytes = size_bytes
        self._is_direct = is_direct
        # Guards the three fields below.
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._edges: dict[int, _Edge] = {}
        self._failure: StorageError | None = None

    @property
    def is_direct(self) -> bool:
        """True if the bytes pass by the page cache."""
        return self._is_direct

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Writes one piece; see `FileWriter`.

        Raises:
            StorageError: If this or an earlier write failed; always the same one, since what a failed write left is
                not known.
            UsageError: If the piece lies outside the file, or the writer is closed.
        """
        self._raise_failure()
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, self._size_bytes, self._path)
        with self._shared.use() as descriptor:
            if kept == 0:
                return
            try:
                if self._is_direct:
                    self._write_direct(descriptor, offset_bytes, piece)
                else:
                    write_all(descriptor, piece[:kept], offset_bytes)
            except OSError as error:
                raise self._fail(error) from error
        with self._lock:
            self._written_bytes += kept

    def finish(self) -> None:
        """**Blocks.** Makes the bytes last (fsync), and closes.

        Raises:
            StorageError: If this or an earlier call failed. After a failed fsync the system may have dropped the bytes
                and will call the next fsync a success; so there is none, and the file is never to be believed.
            UsageError: If pieces are missing or still being written, or the writer is closed.
        """
        self._raise_failure()
        with self._shared.use() as descriptor:
            if self._shared.users > 1 or self._written_bytes != self._size_bytes:
                raise missing_error(self._path, self._written_bytes, self._size_bytes)
            try:
                if self._size_bytes % PAGE_BYTES:
                    os.ftruncate(descriptor, self._size_bytes)
                make_last(descriptor)
            except OSError as error:
                raise self._fail(error) from error
        try:
            self._shared.close()
        except OSError as error:
            raise self._fail(error) from error

    def abandon(self) -> None:
        """Closes without making anything last, once writes in flight have come back; see `FileWriter`."""
        try:
            self._shared.close()
        except OSError as error:
            self._fail(error)

    def _write_direct(self, descriptor: int, offset_bytes: int, piece: memoryview) -> None:
        end_bytes = offset_bytes + piece.nbytes
        # The whole pages inside the piece: a piece that lies within one page has none.
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
        bounce = memoryview(mmap.mmap(-1, min(_BOUNCE_BYTES, inside.nbytes)))
        for start in range(0, inside.nbytes, _BOUNCE_BYTES):
            part = inside[start : start + _BOUNCE_BYTES]
            bounce[: part.nbytes] = part
            write_pages(descriptor, bounce[: part.nbytes], offset_bytes + start)

    def _write_edge(self, descriptor: int, offset_bytes: int, edge_piece: memoryview) -> None:
        """Keeps a part of one page until its other parts have come, then writes the page."""
        page_bytes = round_down(offset_bytes)
        edge_piece = edge_piece[: max(0, self._size_bytes - offset_bytes)]
        if not edge_piece.nbytes:
            return
        with self._lock:
            edge = self._edges.get(page_bytes)
            if edge is None:
                edge = self._edges[page_bytes] = _Edge(memoryview(mmap.mmap(-1, PAGE_BYTES)))
            start = offset_bytes - page_bytes
            edge.page[start : start + edge_piece.nbytes] = edge_piece
            edge.filled_bytes += edge_piece.nbytes
            if edge.filled_bytes < min(PAGE_BYTES, self._size_bytes - page_bytes):
                return
            del self._edges[page_bytes]
        write_pages(descriptor, edge.page, page_bytes)

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise failure

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
            self._edges.clear()
        self.abandon()
        return failure
