"""The directory in which a bench works: made, locked, and removed, also where an earlier bench could not do that."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.errors import StorageError
from holdfast.storage.failures import as_storage_errors

PREFIX: Final = ".holdfast-bench-"
"""What the name begins with. No run has a directory of that name, and what begins with a dot is not shown."""

LOCK_NAME: Final = "lock"
"""The file that a bench has locked as long as it lives. It is the first thing made, and the last one removed."""

_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{16}")
_TRIES: Final = 100


@dataclass(frozen=True, slots=True)
class Swept:
    """What earlier benches had left.

    Attributes:
        removed: How many directories were removed.
        removed_bytes: What their files had taken.
        left_alone: Directories that belong to a bench that lives, or may do so.
    """

    removed: int
    removed_bytes: int
    left_alone: tuple[str, ...]


def sweep(root: Path) -> Swept:
    """**Blocks.** Removes the directories of benches that have died.

    The lock of a process goes with it. Where the file system has no locks, nothing is removed.

    Raises:
        StorageError: If the root cannot be read, or something in such a directory cannot be removed.
    """
    removed = removed_bytes = 0
    left_alone: list[str] = []
    with as_storage_errors("list", "", root):
        found = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    for directory in found:
        try:
            lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            # Just made, by a bench that makes another one if this is gone; or nearly removed.
            with suppress(OSError):
                directory.rmdir()
            continue
        except OSError:
            left_alone.append(directory.name)  # Another user's.
            continue
        if not _try_lock(lock):
            os.close(lock)
            left_alone.append(directory.name)
            continue
        with as_storage_errors("remove", directory.name, root):
            size_bytes = _size_bytes(directory)
            _remove(directory, lock)
        removed += 1
        removed_bytes += size_bytes
    return Swept(removed, removed_bytes, tuple(left_alone))


@contextmanager
def open_place(root: Path) -> Iterator[Path]:
    """**Blocks.** Lends a new directory in `root` to the body, and removes it with all that is in it.

    A process that is killed leaves it behind, for the next `sweep`.

    Raises:
        StorageError: If it cannot be made or removed.
    """
    for _ in range(_TRIES):
        directory = root / f"{PREFIX}{os.urandom(8).hex()}"
        with as_storage_errors("make", directory.name, root):
            directory.mkdir(mode=0o700)
            lock = _open_lock(directory)
        if lock is None:
            continue
        try:
            yield directory
        finally:
            with as_storage_errors("remove", directory.name, root):
                _remove(directory, lock)
        return
    raise StorageError(f"{root}: every directory for the bench was removed by somebody else", hint="Try again.")


def _open_lock(directory: Path) -> int | None:
    """The open lock; None if a sweep was faster and takes the directory away. `OSError` goes through."""
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        pass  # There are no locks here, and then no sweep removes anything.
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(directory: Path, lock: int) -> None:
    """Removes it with all that is in it, the lock last, which is closed in any case. `OSError` goes through."""
    try:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK_NAME:
                path.unlink()
    finally:
        # Over NFS a file that is removed while it is open stays under another name.
        os.close(lock)
    with suppress(FileNotFoundError):
        (directory / LOCK_NAME).unlink()
        directory.rmdir()


def _size_bytes(directory: Path) -> int:
    paths = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in paths)
