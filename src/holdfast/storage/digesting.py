"""Digests many places of memory as a read fills them: in one compiled call, if it is available."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from holdfast.format.digests import DIGEST_CHARACTERS, digest_each

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
"""The functions that the compiled code calls, each with its possible names."""

_TRIAL_LENGTHS: Final = (0, 1, 240, 241, (256 << 10) + 1)
"""Shorter and longer than the sizes at which xxHash changes its method, and than one read."""


class NativeDigests:
    """**Thread-safe.** The compiled read (`_digesting.c`). It runs without the interpreter's lock."""

    def __init__(self, compiled: Any, functions: array[int]) -> None:
        self._compiled = compiled
        self._functions = functions

    def read(
        self, descriptor: int, offset_bytes: int, parts: Sequence[memoryview], pages: memoryview
    ) -> tuple[int, list[str]]:
        """**Blocks.** Fills places of memory from adjacent bytes of a file. `OSError` is not handled.

        Direct reads use `pages`; `NO_PAGES` is for others. Returns the offset at which that ended, which is early if
        the file ends there, and the digest of each place that was filled.
        """
        end_bytes, found = self._compiled.read_digested(descriptor, offset_bytes, parts, self._functions, pages)
        text = found.hex()
        return end_bytes, [text[at : at + DIGEST_CHARACTERS] for at in range(0, len(text), DIGEST_CHARACTERS)]


@cache
def find_native() -> NativeDigests | None:
    """Returns the compiled functions, with those of the package xxhash; None if one of them is missing."""
    # By their names, since those who check what imports what know of no compiled modules.
    try:
        path = Path(import_module("xxhash._xxhash").__file__ or "")
        library = ctypes.CDLL(str(path))
        functions = array("Q", (_address_of(library, names) for names in _FUNCTIONS))
        native = NativeDigests(import_module("holdfast.storage._digesting"), functions)
        return native if _works(native, path) else None
    except (ImportError, AttributeError, OSError, TypeError, ValueError):
        return None  # There is none, or it is of another version.


def _address_of(library: ctypes.CDLL, names: Sequence[str]) -> int:
    function = next(filter(None, (getattr(library, name, None) for name in names)), None)
    address = ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
    if address is None:
        raise AttributeError(names[0])
    return address


def _works(native: NativeDigests, path: Path) -> bool:
    """Checks that it reads a file as Python does, with the same digests; as much of it as the file has."""
    with path.open("rb") as file:
        content = file.read(sum(_TRIAL_LENGTHS))
        parts: list[memoryview] = []
        size_bytes = 0
        for length in _TRIAL_LENGTHS:
            if size_bytes + length <= len(content):
                parts.append(memoryview(bytearray(length)))
                size_bytes += length
        end_bytes, found = native.read(file.fileno(), 0, parts, NO_PAGES)
    expected = digest_each(parts)
    is_read = end_bytes == size_bytes and b"".join(parts) == content[:size_bytes]
    return is_read and found == expected
