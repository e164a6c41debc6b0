"""Digests many places of memory as they are read or written: in one compiled call, if it is available.

Each return to the interpreter may hold up the thread that trains, which waits for its lock then.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.format.digests import digest_each
from holdfast.storage.protocol import PIECE_BYTES

FLOAT_MARKS: Final = {"F16": 1, "complex32": 1, "BF16": 2, "F32": 3, "C64": 3, "F64": 4, "complex128": 4}
"""By element type, the mark of floating-point numbers for the compiled code; complex ones are two of them."""

NONFINITE: Final = 128
_EXPONENTS: Final = {1: ("<u2", 0x7C00), 2: ("<u2", 0x7F80), 3: ("<u4", 0x7F800000), 4: ("<u8", 0x7FF0 << 48)}
"""By such a mark, the type of an integer of that size, and the bits of the exponent: a number is finite unless all are
set."""

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


class NativeDigests(NamedTuple):
    """**Thread-safe.** The compiled functions (`_digesting.c`). They **block** without the interpreter's lock.

    Nothing of Python is between them and who calls them. `OSError` is not handled.

    Attributes:
        read: Fills places of memory from adjacent bytes of a file: takes the file, the offset, the places, and memory
            that direct reads go through, or `NO_PAGES` for others. Returns the offset at which that ended, which is
            early if the file ends there, and the digest of each place that was filled.
        write: Writes memory to a file, by `PIECE_BYTES` at a time: takes the file, the offset, the memory, parts of
            memory, and the multiple of bytes at which a write that is cut short goes on. Returns the digest of each
            part. They are digested shortly before what surrounds them is written, if they are in the order of their
            addresses. `MarkedParts` are looked through as well.
    """

    read: Callable[[int, int, Sequence[memoryview], memoryview], tuple[int, list[str]]]
    write: Callable[[int, int, memoryview, Sequence[memoryview], int], list[str]]


LOOKED_THROUGH: Final = bytes((0, NONFINITE))
"""The marks of parts that were looked through."""


class MarkedParts(list[memoryview]):
    """Parts of memory, of which those that have floating-point numbers are to be looked through as they are digested.

    Attributes:
        marks: For each part that of `FLOAT_MARKS`, or 0 to leave it out; once it was looked through, `NONFINITE` if it
            has nan or an infinity, else 0.
    """

    marks: bytearray

    def look_through(self) -> None:
        """**Blocks.** Looks through the parts for which nothing else has done so."""
        numpy: Any = import_module("numpy")
        for number, mark in enumerate(self.marks):
            if mark in _EXPONENTS:
                kind, mask = _EXPONENTS[mark]
                numbers = numpy.frombuffer(self[number], kind)
                self.marks[number] = NONFINITE if ((numbers & numbers.dtype.type(mask)) == mask).any() else 0


def has_nan(mark: int, part: memoryview) -> bool:
    """**Pure.** Returns whether one of the floating-point numbers of a part is nan; `mark` is that of `FLOAT_MARKS`."""
    numpy: Any = import_module("numpy")
    kind, infinity = _EXPONENTS[mark]
    numbers = numpy.frombuffer(part, kind)
    return bool(((numbers & numpy.iinfo(kind).max // 2) > infinity).any())  # Without the sign.


def digest_parts(parts: Sequence[memoryview]) -> list[str]:
    """**Pure.** Returns the digest of each part; without the interpreter's lock, if that is possible."""
    native = find_native()
    return digest_each(parts) if native is None else native.write(-1, 0, NO_PAGES, parts, 1)


@cache
def find_native() -> NativeDigests | None:
    """Returns the compiled functions, with those of the package xxhash; None if one of them is missing."""
    # By their names, since those who check what imports what know of no compiled modules.
    try:
        path = Path(import_module("xxhash._xxhash").__file__ or "")
        library = ctypes.CDLL(str(path))
        functions = array("Q", (_address_of(library, names) for names in _FUNCTIONS))
        compiled = import_module("holdfast.storage._digesting")
        native = NativeDigests(
            partial(compiled.read_digested, functions), partial(compiled.write_digested, functions, PIECE_BYTES)
        )
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
    """Checks that it reads a file as Python does, with the same digests, as much of it as the file has; and that what
    it would write has these too."""
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
    return is_read and found == expected == native.write(-1, 0, NO_PAGES, parts, 1)
