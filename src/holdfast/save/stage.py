"""Leaves to a snapshot: copies live arrays into host memory that is laid out as the data file."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from holdfast.format.layout import Layout, plan_layout, round_up
from holdfast.format.names import StepName
from holdfast.save.handoffs import Snapshot
from holdfast.state.leaves import ArrayBackend, Captured
from holdfast.storage.crew import Crew

_BATCH_BYTES: Final = 16 << 20
"""What one thread copies at a time: small enough to be shared out evenly, large enough for many small arrays."""


class HostBuffer:
    """Host memory for one snapshot, used again by the next.

    Memory that was touched before takes a copy about ten times faster than fresh memory, so it is kept between saves
    and only ever grows. Not thread-safe: one save uses it at a time.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        """How much memory is held."""
        return len(self._memory) if self._memory is not None else 0

    def take(self, size_bytes: int) -> memoryview:
        """A writable view of that many bytes, beginning on a page; what it held before stays in it."""
        if self._memory is None or len(self._memory) < size_bytes:
            # Let go of the old memory first, so that the two are never held at once. A view that somebody still has
            # keeps it alive, and it goes with the view.
            self._memory = None
            self._memory = mmap.mmap(-1, max(round_up(size_bytes), mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._memory)[:size_bytes]

    def release(self) -> None:
        """Gives the memory back as soon as no view of it is left."""
        self._memory = None


def stage(captured: Captured, name: StepName, buffer: HostBuffer, crew: Crew) -> Snapshot:
    """**Blocks.** Copies all arrays; when this returns, the snapshot holds the values of this moment.

    Args:
        captured: What to copy.
        name: The checkpoint that is being made; its step is noted in the file's header.
        buffer: The memory to copy into; the snapshot uses it until the save has ended.
        crew: The threads that copy, the calling one among them.

    Raises:
        UsageError: If there are more arrays than a header can name.
    """
    layout = plan_layout(
        [(leaf.name, leaf.spec.dtype, leaf.spec.shape) for leaf in captured.arrays],
        {"format": "holdfast", "step": str(name.step)},
    )
    image = buffer.take(layout.padded_bytes)
    image[: len(layout.header)] = layout.header
    # The buffer may hold an older snapshot behind the end of this one.
    image[layout.size_bytes :] = bytes(layout.padded_bytes - layout.size_bytes)
    crew.run(_copies(captured, layout, image))
    return Snapshot(layout, image, captured.objects)


def _copies(captured: Captured, layout: Layout, image: memoryview) -> Iterator[Callable[[], None]]:
    """One job for each batch of neighbouring arrays of one library."""
    leaves = {leaf.name: leaf for leaf in captured.arrays}
    batches: dict[str, _Batch] = {}
    for place in layout.places:
        leaf = leaves[place.name]
        batch = batches.setdefault(leaf.backend.name, _Batch(leaf.backend))
        batch.arrays.append(leaf.array)
        batch.offsets.append(place.begin)
        batch.size_bytes += place.end - place.begin
        if batch.size_bytes >= _BATCH_BYTES:
            del batches[leaf.backend.name]
            yield partial(batch.backend.copy_out, batch.arrays, image, batch.offsets)
    for batch in batches.values():
        yield partial(batch.backend.copy_out, batch.arrays, image, batch.offsets)


@dataclass(slots=True)
class _Batch:
    """Arrays of one library that are copied in one call."""

    backend: ArrayBackend
    arrays: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size_bytes: int = 0
