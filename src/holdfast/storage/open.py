"""Opens the storage of a location that a user writes, by its scheme."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.protocol import Storage, Traits

# One slash is what pathlib leaves of two.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)")

# Guards the named stores of this process.
_lock = threading.Lock()
_memories: dict[str, MemoryStorage] = {}


class _Scheme(NamedTuple):
    example: str
    open: Callable[[str], Storage]


_schemes: Final[dict[str, _Scheme]] = {}


def register_scheme(scheme: str, example: str, factory: Callable[[str], Storage]) -> None:
    """Registers who opens the locations of a scheme.

    Args:
        scheme: What is before `://`, in lower case; empty for locations that have no scheme.
        example: A location as a person would write it, for error messages.
        factory: Returns the storage at a location, and reads or writes nothing yet; it raises `UsageError` for one that
            is malformed.
    """
    _schemes[scheme] = _Scheme(example, factory)


def open_storage(location: str | os.PathLike[str] | Storage) -> Storage:
    """Returns the storage at a location; nothing is read or written yet.

    Args:
        location: A directory's path, `~` for the user's home; a `file://` URL; `memory://name`, which is the same store
            each time it is opened under that name in this process, for tests; or a storage, which is returned.

    Raises:
        UsageError: If the location is of another kind.
    """
    hint = f"use {', '.join(scheme.example for scheme in _schemes.values())}"
    if not isinstance(location, str | os.PathLike):
        if isinstance(getattr(location, "traits", None), Traits):
            return location
        raise UsageError(f"expected the location of a storage, got {type(location).__name__}", hint=hint)
    text = os.fspath(location)
    found = _SCHEME.match(text)
    if found is not None and not found[2]:
        raise UsageError(
            f"{text!r} looks like a URL that went through pathlib, which removes a slash",
            hint=f"pass a URL as a str; write ./{text} for a directory of that name",
        )
    scheme = _schemes.get("" if found is None else found[1].lower())
    if scheme is None:
        raise UsageError(f"{text!r}: {found[1] if found else ''}:// is not supported", hint=hint)
    return scheme.open(text)


def _open_file(url: str) -> LocalStorage:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise UsageError(
            f"{url!r} is not a directory of this machine",
            hint="write file:///directory, with %3F for a question mark and %23 for a number sign",
        )
    return LocalStorage(unquote(parts.path))


def _open_memory(url: str) -> MemoryStorage:
    name = url.partition("://")[2]
    if not name:
        raise UsageError(f"{url!r} has no name", hint="write memory://name")
    with _lock:
        return _memories.setdefault(name, MemoryStorage(name))


# A path that is not `~` stays as it was given.
register_scheme("", "a directory's path", lambda path: LocalStorage(os.path.expanduser(path)))  # noqa: PTH111
register_scheme("file", "file:///directory", _open_file)
register_scheme("memory", "memory://name", _open_memory)
