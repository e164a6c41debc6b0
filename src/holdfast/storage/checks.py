"""Checks that all storages share: paths, the pieces of a file, and errors of the operating system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.errors import DamageError, NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.format.index import round_up
from holdfast.format.names import TRASH_PREFIX
from holdfast.storage.protocol import Traits

MAX_PART_BYTES: Final = 255
"""The longest name in any file system in use."""

MAX_PATH_BYTES: Final = 1024
"""The longest key of an object store; most file systems allow more."""

TEMPORARY_SUFFIX: Final = ".tmp"

_C = TypeVar("_C")


def taking_options_by_name(cls: type[_C]) -> type[_C]:
    """Lets a dataclass say how to write an option that was passed without its name. A number alone says little."""
    init: Any = cls.__init__
    places = [one.name for one in fields(cls) if one.init and not one.kw_only]  # type: ignore[arg-type]
    option = next(one.name for one in fields(cls) if one.kw_only)  # type: ignore[arg-type]

    @wraps(init)
    def check(self: _C, *given: object, **named: object) -> None:
        if len(given) > len(places):
            shown = [*map(repr, given[: len(places)]), f"{option}={given[len(places)]!r}"]
            raise UsageError(
                f"{cls.__name__} takes its options by name", hint=f"For example {cls.__name__}({', '.join(shown)})."
            )
        init(self, *given, **named)

    cls.__init__ = check  # type: ignore[assignment]
    return cls


def plain_path(text: str) -> str:
    """**Blocks** if it has a `..`. Returns a path, or a URL, without doubled and final slashes.

    `..` goes with the directory before it, where that leads to the same place: not past a link or a missing directory.
    """
    if "://" in text:
        return text.rstrip("/")
    path = Path(text)
    if ".." not in path.parts:
        return str(path)
    plain, before = os.path.normpath(path), Path(text[: text.rindex("..")])
    return plain if before.is_dir() and os.path.realpath(plain) == os.path.realpath(path) else str(path)


def split_path(path: str) -> tuple[str, ...]:
    r"""**Pure.** Returns the parts of a path, after checks.

    Bytes that are not UTF-8 may be in a name as lone surrogates, as Python represents them, and so may a backslash and
    control characters: each is a plain character of a POSIX name, and everything that `list` shows must be removable.

    Raises:
        UsageError: If the path is empty, absolute, too long, contains NUL, or has a part that is empty, `.` or `..`.
    """
    if not path:
        raise UsageError("a path is empty", hint="use a path below the storage's root")
    try:
        encoded = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UsageError(f"a path cannot be encoded: {path[:200]!r}", hint="use text that UTF-8 can hold") from error
    parts = tuple(path.split("/"))
    for part, encoded_part in zip(parts, encoded.split(b"/"), strict=True):
        if part in ("", ".", ".."):
            raise UsageError(
                f"a path has the part {part!r}: {path[:200]!r}",
                hint="a path is relative to the storage's root, with one / between its parts",
            )
        if "\0" in part or len(encoded_part) > MAX_PART_BYTES:
            raise UsageError(
                f"a path has a part that no file system can name: {path[:200]!r}",
                hint=f"a part has at most {MAX_PART_BYTES} bytes, and no NUL",
            )
    if len(encoded) > MAX_PATH_BYTES:
        raise UsageError(f"a path is longer than {MAX_PATH_BYTES} bytes: {path[:200]!r}...", hint="use a shorter path")
    return parts


def split_directory(path: str) -> tuple[str, ...]:
    """**Pure.** Like `split_path`, but `""` is the root and has no parts."""
    return split_path(path) if path else ()


def temporary_name(name: str) -> str:
    """Returns a new temporary name for a file that will get `name` once it is whole; short enough for any `name`."""
    return f".{name[:50]}.{os.urandom(8).hex()}{TEMPORARY_SUFFIX}"


def trash_name(name: str) -> str:
    """Returns a new name for something called `name` that is to be removed."""
    return f"{TRASH_PREFIX}{os.urandom(8).hex()}-{name[:50]}"


MAX_PADDING_BYTES: Final = 4095
"""The most by which a piece may extend beyond its file's size."""


def flat(data: memoryview) -> memoryview:
    """Returns the same bytes as one row of bytes; raises `UsageError` if they are not contiguous."""
    if not data.c_contiguous:
        raise UsageError("a piece is not contiguous in memory", hint="copy it first")
    return data.cast("B") if data.nbytes else memoryview(bytearray())


def check_size(size_bytes: int, path: str) -> None:
    """Raises `UsageError` for a size below 0."""
    if size_bytes < 0:
        raise UsageError(f"{path}: the size of a file cannot be {size_bytes} bytes", hint="give a size of 0 or more")


def kept_bytes(offset_bytes: int, length_bytes: int, size_bytes: int, path: str) -> int:
    """Returns how much of a piece belongs to the file; `UsageError` if it is outside, except for padding."""
    over_bytes = offset_bytes + length_bytes - size_bytes
    if not 0 <= offset_bytes <= size_bytes or over_bytes > MAX_PADDING_BYTES:
        raise UsageError(
            f"{path}: a piece of {length_bytes} bytes at {offset_bytes} does not fit into a file of {size_bytes} bytes",
            hint=f"a piece must begin within the file, and at most {MAX_PADDING_BYTES} of its bytes may be padding",
        )
    return length_bytes - max(0, over_bytes)


def check_offset(offset_bytes: int, path: str) -> None:
    """Raises `UsageError` for an offset below 0."""
    if offset_bytes < 0:
        raise UsageError(f"{path}: cannot read at offset {offset_bytes}", hint="offsets begin at 0")


def too_large_error(place: str, path: str, size_bytes: int, limit_bytes: int) -> DamageError:
    """Returns the error for a small file that is too large."""
    return DamageError(
        f"{place} has {size_bytes} bytes, more than the {limit_bytes} allowed",
        path=path,
        hint="it is not the file that was written there: restore an older step",
    )


def too_short_error(place: str, path: str, end_bytes: int, missing_bytes: int) -> DamageError:
    """Returns the error for a file that ends too early."""
    return DamageError(
        f"{place} ends at {end_bytes}, {missing_bytes} bytes too early",
        path=path,
        offset_bytes=end_bytes,
        hint="the file was cut short: restore an older step",
    )


def choose_piece_bytes(traits: Traits, size_bytes: int, wanted_bytes: int = 0) -> int:
    """**Pure.** Returns the size of the pieces in which a file is written, whole pages.

    Args:
        traits: Those of the storage.
        size_bytes: The size of the file.
        wanted_bytes: What the caller would like best; 0 for what the storage does.
    """
    least_bytes = -(-size_bytes // traits.most_pieces) if traits.most_pieces else 0
    return round_up(max(wanted_bytes or traits.best_piece_bytes, traits.least_piece_bytes, least_bytes))


def missing_error(path: str, written_bytes: int, size_bytes: int) -> UsageError:
    """Returns the error for a file that was to be finished before it was covered."""
    return UsageError(
        f"{path} cannot be finished: {written_bytes} of {size_bytes} bytes have been written",
        hint="finish after every piece has been written once and every write has returned",
    )


FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_HINTS: Final = {
    errno.EACCES: "Check who owns the directory, and its permissions.",
    errno.EPERM: "Check who owns the directory, and its permissions.",
    errno.EROFS: "the file system is mounted read-only, perhaps after an error: see the kernel's log",
    errno.EIO: "The device failed: see the kernel's log, and save elsewhere.",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
    errno.ENOTDIR: "a directory's path is a file or link; links below the root are not followed",
    errno.ESTALE: "The file server no longer knows the directory: mount it again.",
}


UNREADABLE: Final = frozenset(
    code for name in ("EIO", "EBADMSG", "EUCLEAN", "ENODATA") if (code := getattr(errno, name, None)) is not None
)
"""The error codes for bytes that a device or a file system has lost."""


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
    """Returns the error for an `OSError`; `doing` is the attempted action, as it follows "cannot"."""
    code = errno.errorcode.get(error.errno or 0, "unknown")
    message = f"cannot {doing} {root / path}: {os.strerror(error.errno or 0)} ({code})"
    if error.errno in FULL:
        return StorageFullError(message, path=path, hint=_room_hint(error.errno or 0, root, needed_bytes))
    if error.errno == errno.ENOENT:
        return NotFoundError(
            message, path=path, hint="Check the path, and that the file system is mounted and takes new directories."
        )
    if error.errno == errno.EEXIST:
        file = find_file_above(root / path)
        hint = f"{file} is not a directory" if file else "the path already exists, and is never overwritten"
        return StorageError(message, path=path, hint=hint)
    return StorageError(message, path=path, hint=_HINTS.get(error.errno or 0, ""))


def find_file_above(path: Path) -> Path | None:
    """**Blocks.** Returns the file where a path needs a directory; None if there is none."""
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
    needed = "more space is needed" if needed_bytes is None else _say_bytes(needed_bytes, "needed")
    try:
        status = os.statvfs(root)
        free = _say_bytes(status.f_bavail * status.f_frsize, "free")
        if code == errno.ENOSPC and status.f_files and not status.f_favail:
            return (
                f"{free}, but no inodes are left on the file system, so no file can be created (df -i): remove small "
                "files there, or old checkpoints"
            )
    except OSError:
        free = "the free space is not known"
    if code == errno.EFBIG:
        return f"{needed} and {free}, but no file may grow that large: see the limit of the process (ulimit -f)"
    if code == errno.EDQUOT:
        return f"{needed} and {free}, but the quota is used up: remove old checkpoints, or ask for more"
    return (
        f"{needed} and {free}: remove old checkpoints, or keep fewer of them; `holdfast prune RUN --unfinished` "
        "removes the remains of interrupted saves"
    )
