"""What the operating system says went wrong, as holdfast's own errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.errors import DamageError, NotFoundError, StorageError, StorageFullError

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_HINTS: Final = {
    errno.EACCES: "check who owns the directory, and its permissions",
    errno.EPERM: "check who owns the directory, and its permissions",
    errno.EROFS: "the file system is mounted read-only, perhaps after an error: see the kernel's log",
    errno.EIO: "the device failed: see the kernel's log, and save elsewhere",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
    errno.ENOTDIR: "a file or a link stands where a directory should be; links below the root are not followed",
    errno.ESTALE: "the file server no longer knows the directory: mount it anew",
}


UNREADABLE: Final = frozenset(
    code for name in ("EIO", "EBADMSG", "EUCLEAN", "ENODATA") if (code := getattr(errno, name, None)) is not None
)
"""What a device or a file system says of bytes that it has lost."""


@contextmanager
def lost_bytes_as_damage(path: str) -> Iterator[None]:
    """Turns the `StorageError` of a device that has lost bytes into a `DamageError`: a reader may have others."""
    try:
        yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in UNREADABLE:
            raise DamageError(error.message, path=path, hint="the device failed: see the kernel's log") from error
        raise


def storage_error(error: OSError, doing: str, path: str, root: Path, needed_bytes: int | None = None) -> StorageError:
    """The error to raise for one of the operating system's.

    Args:
        error: What the system said.
        doing: What was tried, as it follows "cannot".
        path: The path below the root, or an empty string for the root.
        root: The storage's root.
        needed_bytes: How much room was asked for, where that is known.
    """
    code = errno.errorcode.get(error.errno or 0, "unknown")
    message = f"cannot {doing} {root / path}: {os.strerror(error.errno or 0)} ({code})"
    if error.errno in FULL:
        return StorageFullError(message, path=path, hint=_room_hint(error.errno or 0, root, needed_bytes))
    if error.errno == errno.ENOENT:
        return NotFoundError(message, path=path, hint="the path, or a directory on the way to it, is not there")
    if error.errno == errno.EEXIST:
        file = find_file_above(root / path)
        hint = f"{file} is no directory" if file else "something lies there already, and is never overwritten"
        return StorageError(message, path=path, hint=hint)
    return StorageError(message, path=path, hint=_HINTS.get(error.errno or 0, ""))


def find_file_above(path: Path) -> Path | None:
    """**Blocks.** The file that lies where a path needs a directory; None if there is none."""
    above = next((parent for parent in path.parents if parent.exists()), None)
    return None if above is None or above.is_dir() else above


@contextmanager
def as_storage_errors(doing: str, path: str, root: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns each `OSError` of the body into a `StorageError`; the arguments are those of `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, path, root, needed_bytes) from error


def _say_bytes(count: int, what: str) -> str:
    return f"{count} byte is {what}" if count == 1 else f"{count} bytes are {what}"


def _room_hint(code: int, root: Path, needed_bytes: int | None) -> str:
    needed = "more room is needed" if needed_bytes is None else _say_bytes(needed_bytes, "needed")
    try:
        status = os.statvfs(root)
        free = _say_bytes(status.f_bavail * status.f_frsize, "free")
    except OSError:
        free = "how much is free is not known"
    if code == errno.EFBIG:
        return f"{needed} and {free}, but no file may grow that large: see the limit of the process (ulimit -f)"
    if code == errno.EDQUOT:
        return f"{needed} and {free}, but the quota is used up: remove old checkpoints, or ask for more"
    return (
        f"{needed} and {free}: remove old checkpoints, or keep fewer of them; `holdfast prune RUN --unfinished` "
        "removes what saves that were cut off have left"
    )
