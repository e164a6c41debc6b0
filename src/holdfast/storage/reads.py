"""The compiled way to read into many places of memory and take the digest of each, where there is one."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

from holdfast.format.digests import DIGEST_CHARACTERS, digest_each

NativeRead: TypeAlias = Callable[[int, int, Sequence[memoryview], memoryview], tuple[int, list[str]]]
"""Takes an open file, an offset in it, the places to fill, and memory of whole pages by way of which direct reads go.

Gives where in the file that ended, short of what was wanted if the file ends there, and the digest of each place that
was filled.
"""

NO_PAGES: Final = memoryview(bytearray())
"""For reads through the page cache."""

_FUNCTIONS: Final = (
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    # The first is there where the library finds out by itself what the processor has.
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
)
"""What the compiled function calls, each by the names that it may have."""

_TRIAL_LENGTHS: Final = (0, 1, 240, 241, (256 << 10) + 1)
"""Shorter and longer than where xxHash goes over from one way to the next, and than what is read at a time."""


@cache
def find_native() -> NativeRead | None:
    """The compiled read (`_reads.c`) with the functions of the xxHash library that the package of that name contains.

    Returns:
        None where holdfast was installed without a compiler, or where the library does not show its functions.
    """
    # By their names, since those who check what imports what know of no compiled modules.
    try:
        read_digested = import_module("holdfast.storage._reads").read_digested
        path = Path(import_module("xxhash._xxhash").__file__ or "")
        library = ctypes.CDLL(str(path))
        functions = array("Q", (_address_of(library, names) for names in _FUNCTIONS))

        def read(
            descriptor: int, offset_bytes: int, parts: Sequence[memoryview], pages: memoryview
        ) -> tuple[int, list[str]]:
            end_bytes, digests = read_digested(descriptor, offset_bytes, parts, functions, pages)
            text = digests.hex()
            return end_bytes, [text[at : at + DIGEST_CHARACTERS] for at in range(0, len(text), DIGEST_CHARACTERS)]

        return read if _works(read, path) else None
    except (ImportError, AttributeError, OSError, TypeError, ValueError):
        return None  # There is none, or it is of another version.


def _address_of(library: ctypes.CDLL, names: Sequence[str]) -> int:
    function = next(filter(None, (getattr(library, name, None) for name in names)), None)
    address = ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
    if address is None:
        raise AttributeError(names[0])
    return address


def _works(read: NativeRead, path: Path) -> bool:
    """Whether it reads a file as Python does, with the same digests; as much of it as the file has."""
    with path.open("rb") as file:
        content = file.read(sum(_TRIAL_LENGTHS))
        parts: list[memoryview] = []
        size_bytes = 0
        for length in _TRIAL_LENGTHS:
            if size_bytes + length <= len(content):
                parts.append(memoryview(bytearray(length)))
                size_bytes += length
        end_bytes, digests = read(file.fileno(), 0, parts, NO_PAGES)
    return end_bytes == size_bytes and b"".join(parts) == content[:size_bytes] and digests == digest_each(parts)
