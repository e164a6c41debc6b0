"""Opens the storage of a location that a user writes, by its scheme."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple
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
    open: Callable[..., Storage]


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


def open_storage(location: str | os.PathLike[str] | Storage, **options: Any) -> Storage:
    """Returns the storage at a location; nothing is read or written yet.

    A URL can be passed wherever a directory is taken. What it cannot say is an option here; then pass the storage, and
    not the URL: `holdfast.open_storage("s3://bucket/run", endpoint="https://minio.example:9000")`.

    Args:
        location: A directory's path, `~` for the user's home; a `file://` URL; the URL of a bucket: `s3://bucket/run`,
            `gs://bucket/run` or `az://container/run`; `memory://name`, which is the same store each time it is opened
            under that name in this process, for tests; or a storage, which is returned.
        options: Of a bucket: `endpoint` (the address of the service), `region`, `path_style`, `kms_key` (SSE-KMS) for
            S3, `account` for Azure, `ca_file` (a private authority), `proxy`, and `anonymous` (send no credentials).

    Raises:
        UsageError: If the location is of another kind, or has no such option.
        MissingPackageError: If the location is a bucket, and obstore is not installed.
    """
    hint = f"use {', '.join(scheme.example for scheme in _schemes.values())}"
    if not isinstance(location, str | os.PathLike):
        if isinstance(getattr(location, "traits", None), Traits) and not options:
            return location
        if type(location).__name__ == "HostMemory" or getattr(location, "__name__", "") == "HostMemory":
            hint = 'HostMemory() is the first of tiers: pass Tiers(HostMemory(), "/nvme/run")'
        if isinstance(location, list | tuple) or type(location).__name__ == "Tier":
            hint = 'several places, nearest first, are Tiers("/nvme/run", "s3://bucket/run")'
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
    if options and scheme.open is not _open_bucket:
        raise UsageError(
            f"{text!r} has no options, got {', '.join(options)}", hint="they are for buckets: leave them out"
        )
    return scheme.open(text, **options)


def nearest_of(storage: Storage) -> Storage:
    """Returns the storage that saves write into: the nearest of `Tiers`, or else the storage itself."""
    tiers: Any = storage
    return tiers.nearest if storage.traits.has_tiers else storage


def _open_bucket(url: str, **options: Any) -> Storage:
    # Most programs need no bucket.
    from holdfast.storage.services import open_bucket

    return open_bucket(url, **options)


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
for _name, _example in (("s3", "s3://bucket/run"), ("gs", "gs://bucket/run"), ("az", "az://container/run")):
    register_scheme(_name, _example, _open_bucket)
