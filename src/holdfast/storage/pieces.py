"""The pieces of a file that is being written: what each may be, and what they are together. Pure."""

from __future__ import annotations

from typing import Final

from holdfast.errors import UsageError

MAX_PADDING_BYTES: Final = 4095
"""How far a piece may run over its file's size."""


def flat(data: memoryview) -> memoryview:
    """The same bytes as one row of bytes.

    Raises:
        UsageError: If they are not contiguous.
    """
    if not data.c_contiguous:
        raise UsageError("a piece is not contiguous in memory", hint="copy it first")
    return data.cast("B") if data.nbytes else memoryview(b"")


def check_size(size_bytes: int, path: str) -> None:
    """Checks the size that a file is to have.

    Raises:
        UsageError: If it is negative.
    """
    if size_bytes < 0:
        raise UsageError(f"{path}: a file cannot have {size_bytes} bytes", hint="give a size of 0 or more")


def kept_bytes(offset_bytes: int, length_bytes: int, size_bytes: int, path: str) -> int:
    """How much of a piece belongs to the file; the rest is padding.

    Raises:
        UsageError: If the piece begins outside the file, or runs over its size by more than padding may.
    """
    over_bytes = offset_bytes + length_bytes - size_bytes
    if not 0 <= offset_bytes <= size_bytes or over_bytes > MAX_PADDING_BYTES:
        raise UsageError(
            f"{path}: a piece of {length_bytes} bytes at {offset_bytes} does not fit a file of {size_bytes} bytes",
            hint=f"a piece begins within the file, and at most {MAX_PADDING_BYTES} bytes of it are padding",
        )
    return length_bytes - max(0, over_bytes)


def missing_error(path: str, written_bytes: int, size_bytes: int) -> UsageError:
    """The error for a file that was to be finished before it was covered."""
    return UsageError(
        f"{path} cannot be finished: {written_bytes} of {size_bytes} bytes have been written",
        hint="finish once every piece has been written, each of them once, and every write has returned",
    )
