"""What a path below a storage's root may look like, and the names that a storage makes up by itself."""

from __future__ import annotations

import os
from typing import Final

from holdfast.errors import UsageError

MAX_PART_BYTES: Final = 255
"""No file system in use allows more for one name."""

MAX_PATH_BYTES: Final = 1024
"""What an object store allows for a whole key; most file systems allow more."""

TRASH_PREFIX: Final = ".trash-"
TEMPORARY_SUFFIX: Final = ".tmp"


def split_path(path: str) -> tuple[str, ...]:
    r"""**Pure.** The parts of a path, which is checked first.

    Bytes that are not UTF-8 may stand in a name as lone surrogates, as Python gives them, and so may a backslash and
    control characters: each is a plain character of a POSIX name, and what `list` shows must be removable.

    Raises:
        UsageError: If the path is empty, absolute, too long, holds NUL, or has a part that is empty, `.` or `..`.
    """
    if not path:
        raise UsageError("a path is empty", hint="name something that lies below the storage's root")
    parts = tuple(path.split("/"))
    for part in parts:
        if part in ("", ".", ".."):
            raise UsageError(
                f"a path has the part {part!r}: {path[:200]!r}",
                hint="a path is relative to the storage's root, with one / between its parts",
            )
        if "\0" in part or _length_bytes(part, path) > MAX_PART_BYTES:
            raise UsageError(
                f"a path has a part that no file system can name: {path[:200]!r}",
                hint=f"a part has at most {MAX_PART_BYTES} bytes, and no NUL",
            )
    if _length_bytes(path, path) > MAX_PATH_BYTES:
        raise UsageError(f"a path is longer than {MAX_PATH_BYTES} bytes: {path[:200]!r}...", hint="use a shorter path")
    return parts


def split_directory(path: str) -> tuple[str, ...]:
    """**Pure.** Like `split_path`, but `""` is the root and has no parts.

    Raises:
        UsageError: As `split_path`.
    """
    return split_path(path) if path else ()


def temporary_name(name: str) -> str:
    """A new name for what will be called `name` once it is whole."""
    return f".{_cut(name)}.{os.urandom(8).hex()}{TEMPORARY_SUFFIX}"


def trash_name(name: str) -> str:
    """A new name for what was called `name` and is to be removed."""
    return f"{TRASH_PREFIX}{os.urandom(8).hex()}-{_cut(name)}"


def _cut(name: str) -> str:
    """The beginning of a name, short enough that a made-up name around it is not too long."""
    return name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "surrogateescape")


def _length_bytes(text: str, path: str) -> int:
    try:
        return len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise UsageError(f"a path cannot be encoded: {path[:200]!r}", hint="use text that UTF-8 can hold") from error
