"""Finds the storage of a location that a user writes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.protocol import Storage

SUPPORTED: Final = "a directory's path, file:///directory, memory://name"

# One slash is what pathlib leaves of two.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)")

# Guards the named stores of this process.
_lock = threading.Lock()
_memories: dict[str, MemoryStorage] = {}


def open_storage(location: str | os.PathLike[str] | Storage) -> Storage:
    """Returns the storage at a location; nothing is read or written yet.

    Args:
        location: A directory's path, `~` for the user's home; a `file://` URL; `memory://name`, which is the same store
            each time it is opened under that name in this process, for tests; or a storage, which is returned.

    Raises:
        UsageError: If the location is of another kind.
    """
    if not isinstance(location, str | os.PathLike):
        if isinstance(location, Storage):
            return location
        raise UsageError(f"expected the location of a storage, got {type(location).__name__}", hint=f"use {SUPPORTED}")
    text = os.fspath(location)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalStorage(os.path.expanduser(text))  # noqa: PTH111  A path that is not `~` stays as it was given.
    if not scheme[2]:
        raise UsageError(
            f"{text!r} looks like a URL that went through pathlib, which removes a slash",
            hint=f"pass a URL as a str; write ./{text} for a directory of that name",
        )
    if scheme[1].lower() == "file":
        return LocalStorage(_file_path(text))
    if scheme[1].lower() == "memory":
        return _memory(text)
    raise UsageError(f"{text!r}: {scheme[1]}:// is not supported", hint=f"use {SUPPORTED}")


def local_directory(storage: Storage) -> Path | None:
    """Returns the directory of this machine that a storage is; None if it is something else."""
    return Path(storage.url) if isinstance(storage, LocalStorage) else None


def find_location(storage: Storage) -> str | None:
    """Returns where other processes of this machine open the same storage with `open_storage`; None if they cannot."""
    return storage.url if type(storage) is LocalStorage else None


def pass_on_warnings(storage: Storage, warn: Callable[[str], None]) -> None:
    """Makes a storage that has warnings pass them to a function, from any thread."""
    if isinstance(storage, LocalStorage):
        storage.warn = warn


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise UsageError(
            f"{url!r} is not a directory of this machine",
            hint="write file:///directory, with %3F for a question mark and %23 for a number sign",
        )
    return unquote(parts.path)


def _memory(url: str) -> MemoryStorage:
    name = url.partition("://")[2]
    if not name:
        raise UsageError(f"{url!r} has no name", hint="write memory://name")
    with _lock:
        return _memories.setdefault(name, MemoryStorage(name))
