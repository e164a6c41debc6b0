"""Memory for the first save, made ready before it comes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from holdfast.errors import HoldfastError
from holdfast.events import Sink, Warned
from holdfast.save.buffer import HostBuffer
from holdfast.state import capture_objects
from holdfast.state.finding import find_stateful
from holdfast.state.registry import adapter_of
from holdfast.storage.crew import Crew

_THREADS: Final = 2


class Preparation:
    """Touches the pages of a buffer behind the calling thread, until that needs the buffer."""

    def __init__(self, buffer: HostBuffer, size_bytes: int) -> None:
        """Begins.

        Raises:
            OutOfMemoryError: If there is not that much; then nothing was begun.
        """
        buffer.take(size_bytes)
        self._wanted = True
        self._crew = Crew(_THREADS, "holdfast-prepare")
        self._crew.start()
        self._crew.try_hand_over(lambda: self._touch(buffer))

    def end(self) -> None:
        """**Blocks** for some milliseconds. What has not been touched by now is left as it is."""
        self._wanted = False
        self._crew.close()

    def _touch(self, buffer: HostBuffer) -> None:
        self._crew.run(self._while_wanted(buffer.touch()))

    def _while_wanted(self, jobs: Iterator[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        for job in jobs:
            if not self._wanted:
                return
            yield job


def try_prepare(
    buffer: HostBuffer, size_bytes: int | Literal["auto"], objects: Mapping[str, object], emit: Sink
) -> Preparation | None:
    """Begins, or warns that it cannot: then the first save takes what memory it needs.

    Args:
        buffer: What is made ready.
        size_bytes: For how large a state; "auto" for that of the objects.
        objects: The objects to be saved. They need not be such as can be saved yet, like a module without its shapes.
        emit: Told of the warning.
    """
    try:
        return Preparation(buffer, reckon_bytes(objects) if size_bytes == "auto" else operator.index(size_bytes))
    except Exception as error:  # noqa: BLE001  It comes out of the objects' own code, and again if a save fails by it.
        reason = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    emit(Warned(text=f"memory could not be made ready beforehand: {reason}"))
    return None


def reckon_bytes(objects: Mapping[str, object]) -> int:
    """The memory that the state of the objects takes, and will take when all have been used once.

    Objects that may change when their state is read are left out: they are to be restored first.

    Raises:
        UnsupportedValueError: If something cannot be stored.
    """
    captured = capture_objects({name: obj for name, obj in objects.items() if not _may_change_when_read(obj)})
    awaited_bytes = sum(
        adapter.awaited_bytes(obj) for obj in objects.values() if (adapter := adapter_of(obj)) is not None
    )
    # And a header, of about so many bytes for each leaf.
    return captured.size_bytes + awaited_bytes + 4096 + 256 * len(captured.names)


def _may_change_when_read(obj: object) -> bool:
    found = find_stateful(obj, "")
    return any(adapter is not None and adapter.may_change_when_read(part) for _, part, adapter in found)
