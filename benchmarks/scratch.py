"""Where the contenders write: a directory that is gone afterwards, or at the latest when the next run begins."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.guard import Guard

_PREFIX: Final = "work-"


@contextmanager
def open_scratch(out: Path) -> Iterator[tuple[Path, Guard]]:
    """A new directory below `out`, and the guard that removes it; removes those that killed runs have left."""
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        for stale in out.glob(f"{_PREFIX}*"):
            _remove_unused(stale)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=out))
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with Guard(directory, lock) as guard:
            yield directory, guard
    finally:
        os.close(lock)


def _remove_unused(directory: Path) -> None:
    """Removes a directory that neither a run nor its guard holds."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two runs that begin at once must not take each other's directory for an old one, before its lock is taken."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
