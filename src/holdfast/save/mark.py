"""The state as it stood at one moment, to be saved later if it is still the same."""

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
    """What a save would have taken when the mark was made.

    Plain values, random generators and positions in the data are those of that moment, whatever becomes of them.
    Arrays are not copied: those in host memory are known by their digest, others by the count of changes that their
    library keeps.
    """

    _captured: Captured
    _traces: list[_Trace]
    _save: Callable[[int, Captured, bool], SaveHandle]

    @property
    def changed(self) -> list[str]:
        """**Blocks** as long as a look at all arrays takes. The names of those that are not known to be the same."""
        names = self._captured.names
        return [
            name
            for name, before, now in zip(names, self._traces, trace_arrays(self._captured), strict=True)
            if before != now or now == _UNKNOWN
        ]

    def save(self, step: int, *, replace: bool = False) -> SaveHandle:
        """**Blocks** while the state is copied. As the manager's `save`, of that moment; see `changed` first."""
        # What others write is not traced, so that it cannot be compared any more.
        return self._save(step, replace_fields(self._captured, compared=()), replace)


_UNKNOWN: _Trace = (None, None, b"")


def trace_arrays(captured: Captured) -> list[_Trace]:
    """What tells for each array whether it has changed: two traces are equal if it has not."""
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
