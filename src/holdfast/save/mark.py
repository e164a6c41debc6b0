"""The state at one moment, to be saved later if it has not changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import xxhash
from msgspec.structs import replace as replace_fields

from holdfast.save.handle import SaveHandle
from holdfast.state.leaves import Captured

_Trace: TypeAlias = tuple[int | None, int | None, bytes]


class Mark(msgspec.Struct, frozen=True):
    """The state that a save would have stored when the mark was made.

    Plain values, random generators and positions in the data are those of that moment. Arrays are not copied: changes
    are detected by digests in host memory, elsewhere by the library's counts of changes.
    """

    _captured: Captured
    _traces: list[_Trace]
    _save: Callable[[int, Captured, bool], SaveHandle]

    @property
    def changed(self) -> list[str]:
        """**Blocks** while it checks all arrays. The names of those that may have changed."""
        names = self._captured.names
        return [
            name
            for name, before, now in zip(names, self._traces, trace_arrays(self._captured), strict=True)
            if before != now or now == _UNKNOWN
        ]

    def save(self, step: int, *, replace: bool = False) -> SaveHandle:
        """**Blocks** while the state is copied. Like the manager's `save`, of that moment; check `changed` first."""
        # What others write is not traced, so that it cannot be compared any more.
        return self._save(step, replace_fields(self._captured, compared=()), replace)


_UNKNOWN: _Trace = (None, None, b"")


def trace_arrays(captured: Captured) -> list[_Trace]:
    """Returns for each array what shows whether it has changed: two traces are equal if it has not."""
    traces: list[_Trace] = []
    for spec, array, backend in zip(captured.specs, captured.arrays, captured.backends, strict=True):
        address = backend.address(array)
        if address is not None:
            content = (ctypes.c_char * spec.size_bytes).from_address(address)
            traces.append((None, address, xxhash.xxh3_128_digest(content)))
        elif spec.size_bytes == 0:
            traces.append((0, None, b""))
        else:
            traces.append((backend.versions([array])[0], None, b""))
    return traces
