"""The kernel's memory of files: getting a file out of it, and into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.storage.crew import Crew
from holdfast.storage.local.residency import Residency

_READ_BYTES: Final = 1 << 20


def drop(paths: Iterable[Path]) -> bool:
    """**Blocks.** Lets go of files whose bytes are durable. `OSError` goes through.

    Returns:
        True if a read of them now comes from the disk. It is False for a file system that lies in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    dropped = True
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size_bytes = os.fstat(descriptor).st_size
            with closing(Residency(descriptor, size_bytes)) as residency:
                dropped = dropped and not (size_bytes and residency.holds(0, size_bytes))
        finally:
            os.close(descriptor)
    return dropped


def fill(paths: Iterable[Path], crew: Crew) -> None:
    """**Blocks.** Reads files through the page cache. `OSError` goes through."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            crew.run(_reads(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)


def _reads(descriptor: int, size_bytes: int) -> Iterator[Callable[[], None]]:
    for begin in range(0, size_bytes, _READ_BYTES):
        yield partial(_read, descriptor, begin)


def _read(descriptor: int, begin: int) -> None:
    os.pread(descriptor, _READ_BYTES, begin)
