"""Open files and directories: shared between threads, opened without following links, made to last."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import UsageError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class SharedDescriptor:
    """**Thread-safe.** A file descriptor that is closed when the last thread that uses it has left.

    A number that is closed while another thread writes to it may by then belong to another file, which would be
    overwritten.
    """

    def __init__(self, descriptor: int, what: str) -> None:
        self._descriptor = descriptor
        self._what = what
        # Guards the two fields below.
        self._lock = threading.Lock()
        self._users = 0
        self._is_closing = False

    @property
    def users(self) -> int:
        """How many threads are using it at this moment."""
        return self._users

    @contextmanager
    def use(self) -> Iterator[int]:
        """Lends the descriptor to the body.

        Raises:
            UsageError: If it was closed before.
        """
        self._enter()
        try:
            yield self._descriptor
        finally:
            self._leave()

    def close(self) -> None:
        """Lets nobody in any more, and closes once all have left; harmless twice. `OSError` goes through."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
            is_idle = self._users == 0
        if is_first and is_idle:
            os.close(self._descriptor)

    def _enter(self) -> None:
        with self._lock:
            if self._is_closing:
                raise UsageError(f"{self._what} is closed", hint="open it anew")
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_closing and self._users == 0
        if is_last:
            # Whoever closed it has given the file up, so what closing says means nothing any more.
            with suppress(OSError):
                os.close(self._descriptor)


@contextmanager
def open_directory(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """Lends a descriptor of the directory that lies at `parts` below `root`. `OSError` goes through.

    The root may be reached by links: the user named it. Below it each step is taken from the directory before, and no
    link is followed, so that whoever can write into a checkpoint cannot lead holdfast out of it. A link in the way
    gives `NotADirectoryError`.
    """
    descriptor = os.open(root, _DIRECTORY)
    try:
        for part in parts:
            # Closed once it is no longer this one's: Ctrl-C in between must not let it be closed twice, when the number
            # may be another file's.
            above, descriptor = descriptor, _open_below(descriptor, part)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_below(directory: int, name: str) -> int:
    """Opens a directory in a directory, not through a link."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        # Which of the two a link gives depends on the system.
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
        raise


def make_last(descriptor: int) -> None:
    """**Blocks.** Makes a file's bytes, or a directory's names, outlive a power cut. `OSError` goes through."""
    if sys.platform == "darwin":
        # fsync leaves the bytes in the drive's own cache there. Some file systems know only fsync.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def write_all(descriptor: int, data: memoryview, offset_bytes: int) -> None:
    """**Blocks.** Writes all of `data`, however many calls that takes. `OSError` goes through.

    A signal does not cut it short: Python calls again after EINTR.
    """
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset_bytes)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]
        offset_bytes += written
