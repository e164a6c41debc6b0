"""Copies captured live arrays into host memory that is laid out as the data file."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.errors import ChangedError, OutOfMemoryError
from holdfast.format.index import Layout, plan_layout, relabel, round_up
from holdfast.process.latch import Latch, gc_paused
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.copy_plan import PART_BYTES, Copy, Job, Move, plan_copies
from holdfast.save.records import CopyProgress, Snapshot
from holdfast.state.leaves import ArrayBackend, ArraySpec, Captured, DeviceCopier, Pin, Transfer, aliases_of
from holdfast.storage.buffers import batches

GENTLE: Final = 30.0
"""How many times as long as it works a gentle thread rests: training loses 3 % of one processor at most."""

_PINNED_PART_BYTES: Final = 64 << 20
"""How much a device copies to pinned memory in one go: few milliseconds' worth, of which writing begins early."""

_SMALL_BYTES: Final = 256 << 10
_TOUCHED_BYTES: Final = 1 << 20
_WIPE_ON_FORK: Final = 18
"""`MADV_WIPEONFORK`, which Python has no name for."""


class Stager:
    """Makes snapshots, one at a time, in one buffer. What stays the same from save to save is planned once."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._plan: _LayoutPlan | None = None

    @gc_paused()
    def stage(self, captured: Captured, step: int) -> Staging:
        """Lays the arrays out; copies nothing yet. Raises `UsageError` for more arrays than a header can name."""
        plan = self._plan = _plan_for(captured, {"format": "holdfast", "step": str(step)}, self._plan)
        layout = plan.layout
        image = self._buffer.take(round_up(layout.size_bytes))
        image[: len(layout.header)] = layout.header
        # The buffer may hold an older snapshot after the end of this one.
        image[layout.size_bytes :] = bytes(round_up(layout.size_bytes) - layout.size_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(image))
        moves, held = plan.moves, frozenset(captured.held)
        known = (base, held, captured.addresses, captured.backends)
        if moves is None or (moves.base, moves.held, moves.addresses, moves.backends) != known:
            moves = plan.moves = _plan_moves(plan, captured, image, base)
        # The columns go with the save; the rest is needed as long as what was written is spoken of.
        state = msgspec.structs.replace(
            captured, names=[], specs=[], arrays=[], addresses=[], backends=[], held={}, compared=()
        )
        snapshot = Snapshot(layout, image, state, CopyProgress())
        staging = Staging(snapshot, captured, [copy.run for copy in moves.now], [copy.run for copy in moves.later])
        # What is held may be given other memory before it is copied: these keep the memory that it has now.
        staging.kept = dict(zip(held, aliases_of(list(map(captured.arrays.__getitem__, held))), strict=True))
        if captured.compared:
            staging.moments = _record_moments(captured.compared)
        if moves.others_now or moves.others_later:
            self._add_others(staging, captured, moves.others_now, staging.now, staging.copy_across)
            self._add_others(staging, captured, moves.others_later, staging.later, staging.transfer)
        begins = [copy.begin - base for copy in moves.now] + [min(batch.offsets) for batch in moves.others_now]
        staging.snapshot = msgspec.structs.replace(snapshot, copied=CopyProgress(begins))
        return staging

    def forget(self) -> None:
        """Drops what the next save would use again, which keeps the buffer's memory alive."""
        self._plan = None

    def _add_others(
        self,
        staging: Staging,
        captured: Captured,
        planned: list[_Batch],
        jobs: list[Job],
        copy: Callable[[_Batch, list[Any], object], None],
    ) -> None:
        """Adds jobs for arrays that are not plain host memory: one for each batch."""
        moments: dict[str, object] = {}
        for batch in planned:
            backend = batch.backend
            if backend.devices is not None and backend.name not in moments:
                every = [captured.arrays[leaf] for one in planned if one.backend is backend for leaf in one.leaves]
                if (pin := backend.devices.find_pin(every)) is not None:
                    self._buffer.pin(pin)
                moments[backend.name] = backend.devices.moment(every)
            arrays = [staging.kept.get(leaf, captured.arrays[leaf]) for leaf in batch.leaves]
            jobs.append(partial(copy, batch, arrays, moments.get(backend.name)))


@dataclass(slots=True)
class Staging:
    """A snapshot in progress.

    Attributes:
        snapshot: The future snapshot.
        captured: The captured state, kept until it is copied.
        now: Copies that must be made before training continues.
        later: Copies of held arrays: only a step changes them, which waits for the copies.
        kept: The held arrays, by position: another array of the same memory, which lasts as long as this.
        moments: By library, what reading the arrays that are compared with other workers' must wait for.
    """

    snapshot: Snapshot
    captured: Captured
    now: list[Job] = field(default_factory=list)
    later: list[Job] = field(default_factory=list)
    kept: dict[int, Any] = field(default_factory=dict)
    moments: dict[str, object] = field(default_factory=dict)
    _transfers: list[Transfer] = field(default_factory=list)

    def take_digests(self, digests: tuple[str, ...]) -> None:
        """Stores the digests of the compared values; the arrays are not needed for that any more."""
        state = msgspec.structs.replace(self.snapshot.state, digests=digests)
        self.snapshot = msgspec.structs.replace(self.snapshot, state=state)
        self.captured = msgspec.structs.replace(self.captured, compared=())

    def copies_now(self) -> list[Job]:
        """Returns the copies that training waits for, until `snapshot.copied` has ended; they may be made in any
        order."""
        self.snapshot.copied.begin()
        return [partial(self.snapshot.copied.make, number, copy) for number, copy in enumerate(self.now)]

    def copy_later(self, pool: WorkerPool, started: Callable[[list[Transfer]], None]) -> None:
        """**Blocks.** Makes the other copies; raises `ChangedError` if something has visibly changed during them.

        `started` is called when all are made, or made by devices that can be ordered after them.
        """
        try:
            pool.run(self.later)
            self.check_unchanged()
            started(list(self._transfers))
        finally:
            # After any failure: the next save uses the same memory, and no copy of this one may still arrive there.
            for transfer in self._transfers:
                transfer.wait()
            self._transfers.clear()

    def forget(self) -> None:
        """Drops the arrays: they are copied, or the save has ended."""
        # New ones, since another thread may be looking through the old.
        self.captured = msgspec.structs.replace(self.captured, arrays=[])
        self.now, self.later, self.kept = [], [], {}

    def copy_across(self, batch: _Batch, arrays: list[Any], moment: object) -> None:
        """**Thread-safe.** **Blocks.** Copies arrays with their library; waits for a device here, not later."""
        if transfer := self._start(batch, arrays, moment):
            transfer.wait()

    def transfer(self, batch: _Batch, arrays: list[Any], moment: object) -> None:
        """**Thread-safe.** Like `copy_across`, but `copy_later` waits for the device."""
        if transfer := self._start(batch, arrays, moment):
            self._transfers.append(transfer)

    def _start(self, batch: _Batch, arrays: list[Any], moment: object) -> Transfer | None:
        if batch.backend.devices is not None:
            return batch.backend.devices.start(arrays, batch.targets, moment)
        batch.backend.copy_out(arrays, self.snapshot.image, batch.offsets)
        return None

    @property
    def is_coarse(self) -> bool:
        """Returns True if most of it are large arrays."""
        layout = self.snapshot.layout
        return layout.size_bytes >= len(layout.places) * _SMALL_BYTES

    def check_unchanged(self) -> None:
        """**Thread-safe.** Raises `ChangedError` if a held array has changed since its capture, or has other memory."""
        captured = self.captured
        changed = [
            captured.names[place]
            # None is kept once the save has ended.
            for place, kept in self.kept.items()
            if captured.backends[place].versions([kept])[0] != captured.held[place]
            or captured.backends[place].address(kept) != captured.addresses[place]
        ]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ChangedError(
                f"{', '.join(changed[:3])}{more} changed while being copied, and not in a step of the optimizer",
                leaves=tuple(changed),
            )


def _record_moments(compared: Iterable[tuple[ArrayBackend, Any] | None]) -> dict[str, object]:
    """Records what the calling thread has submitted to devices by now: copies of other threads come after that."""
    arrays: dict[str, list[Any]] = {}
    copiers: dict[str, DeviceCopier] = {}
    for backend, array in filter(None, compared):
        if backend.devices is not None:
            arrays.setdefault(backend.name, []).append(array)
            copiers[backend.name] = backend.devices
    return {name: copiers[name].moment(own) for name, own in arrays.items()}


class _LayoutPlan(msgspec.Struct):
    """The layout that follows from names, types and shapes alone.

    Attributes:
        order: For each array in the order of the file, its position in the columns.
        begins, sizes: Where each begins in the file, and its size in bytes.
        moves: The moves of the last save.
    """

    names: list[str]
    specs: list[ArraySpec]
    layout: Layout
    order: list[int]
    begins: list[int]
    sizes: list[int]
    moves: _Moves | None = None


def _plan_for(captured: Captured, metadata: dict[str, str], plan: _LayoutPlan | None) -> _LayoutPlan:
    """Returns the plan for these arrays; that of the previous save, if they are the same."""
    if plan is not None and plan.names == captured.names and plan.specs == captured.specs:
        layout = relabel(plan.layout, metadata)
        if layout is not None:
            plan.layout = layout
            return plan
    arrays = [(name, spec.dtype, spec.shape) for name, spec in zip(captured.names, captured.specs, strict=True)]
    layout = plan_layout(arrays, metadata)
    places = {name: place for place, name in enumerate(captured.names)}
    return _LayoutPlan(
        captured.names,
        captured.specs,
        layout,
        [places[place.name] for place in layout.places],
        [place.begin for place in layout.places],
        [place.end - place.begin for place in layout.places],
    )


@dataclass(slots=True)
class _Batch:
    """Arrays that one library copies in one go.

    Attributes:
        backend: The library.
        leaves: The arrays, by their position in the columns.
        offsets: Where each begins in the image.
        targets: See `DeviceCopier.targets`; None if there are no devices.
    """

    backend: ArrayBackend
    leaves: list[int]
    offsets: list[int]
    targets: Any


@dataclass(slots=True)
class _Moves:
    """Copies between addresses of this process, and the arrays that need others."""

    base: int
    addresses: list[int | None]
    backends: list[ArrayBackend]
    held: frozenset[int]
    now: list[Copy] = field(default_factory=list)
    later: list[Copy] = field(default_factory=list)
    others_now: list[_Batch] = field(default_factory=list)
    others_later: list[_Batch] = field(default_factory=list)


def _plan_moves(plan: _LayoutPlan, captured: Captured, image: memoryview, base: int) -> _Moves:
    moves = _Moves(base, captured.addresses, captured.backends, frozenset(captured.held))
    for is_held, copies, others in (
        (False, moves.now, moves.others_now),
        (True, moves.later, moves.others_later),
    ):
        plain: list[Move] = []
        by_backend: dict[str, list[int]] = {}
        for number, place in enumerate(plan.order):
            if (place in captured.held) is not is_held:
                continue
            address, size_bytes = captured.addresses[place], plan.sizes[number]
            if address is not None:
                plain.append((base + plan.begins[number], address, size_bytes))
            elif size_bytes:
                by_backend.setdefault(captured.backends[place].name, []).append(number)
        copies += plan_copies(plain)
        for numbers in by_backend.values():
            others += _plan_batches(plan, captured, image, numbers, is_held=is_held)
    return moves


def _plan_batches(
    plan: _LayoutPlan, captured: Captured, image: memoryview, numbers: list[int], *, is_held: bool
) -> Iterator[_Batch]:
    backend = captured.backends[plan.order[numbers[0]]]
    limit_bytes = PART_BYTES
    if backend.devices is not None:
        every = [captured.arrays[plan.order[number]] for number in numbers]
        if backend.devices.find_pin(every) is not None:
            # What is held is waited for as a whole.
            limit_bytes = sys.maxsize if is_held else _PINNED_PART_BYTES
    for batch in batches(numbers, plan.sizes.__getitem__, limit_bytes):
        leaves, offsets = [plan.order[number] for number in batch], [plan.begins[number] for number in batch]
        targets = None
        if backend.devices is not None:
            targets = backend.devices.targets([captured.arrays[leaf] for leaf in leaves], image, offsets)
        yield _Batch(backend, leaves, offsets, targets)


class HostBuffer:
    """Host memory for one snapshot, reused by the next.

    Copies to touched memory are about ten times faster than to fresh memory, so it is kept between saves and only ever
    grows, except that memory of an estimated size is cut to the size of the first save. Not thread-safe: one save uses
    it at a time.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._is_estimate = False

    @property
    def size_bytes(self) -> int:
        """How much memory is held."""
        return len(self._memory) if self._memory is not None else 0

    def take(self, size_bytes: int) -> memoryview:
        """Returns a writable view of that many bytes, beginning on a page, with its old content; or
        `OutOfMemoryError`."""
        wanted_bytes = max(round_up(size_bytes), mmap.PAGESIZE)
        held_bytes = 0 if self._memory is None else len(self._memory)
        is_other = held_bytes < wanted_bytes or (self._is_estimate and held_bytes > wanted_bytes)
        if self._memory is None or (is_other and not self._memory.try_resize(wanted_bytes)):
            # Let go of the old memory first, so that the two are never held at once. A view that is still in
            # use keeps it alive until the view is freed.
            self.release()
            self._memory = _map(wanted_bytes)
        self._is_estimate = False
        return memoryview(self._memory)[:size_bytes]

    def reserve(self, size_bytes: int) -> None:
        """Takes memory for a save that will need about that much; pages take none before they are touched."""
        self.take(size_bytes)
        self._is_estimate = True

    def pin(self, pin: Pin) -> None:
        """Pins the memory for a device, unless that was done, or tried, before."""
        if self._memory is not None and not self._memory.is_pin_tried:
            self._memory.is_pin_tried = True
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # Untouched pages stay unpinned: a device has fewer pages to register, and the processor copies nothing.
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory.unpin = pin(memoryview(self._memory))

    def touch(self) -> Iterator[Callable[[], object]]:
        """Returns jobs that give each page memory of its own, so that the first copy need not."""
        if self._memory is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for begin in range(0, len(self._memory), _TOUCHED_BYTES):
            yield partial(ctypes.memset, address + begin, 0, min(_TOUCHED_BYTES, len(self._memory) - begin))

    def release(self) -> None:
        """Frees the memory as soon as no view of it is left."""
        self._memory = None


class _Memory(mmap.mmap):
    """Memory that is unpinned right before it is freed.

    If it were freed while it is pinned, a device would take later memory at that address for pinned as well, and copy
    to the wrong pages.
    """

    unpin: Callable[[], None] | None = None
    is_pin_tried = False

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()

    def try_resize(self, size_bytes: int) -> bool:
        """Takes more memory or gives some back, and keeps what has been touched; returns False if it cannot, for
        example while there are views of it."""
        if self.unpin is not None:
            return False
        try:
            self.resize(size_bytes)
        except (BufferError, OSError, OverflowError, SystemError, ValueError):
            return False
        return True


def _map(size_bytes: int) -> _Memory:
    # Private memory is touched for the first time far more quickly than shared memory.
    try:
        memory = _Memory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(
            f"no memory for a copy of the state, {size_bytes:,} bytes: {error}",
            hint="A save needs as much host memory as the state; use a machine with more memory, or save less.",
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # In huge pages the first copy is quicker, and each one after it was found to be slower once files are written.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        # Otherwise each fork (a loader's workers, say) would let the next save copy every page once more.
        with suppress(OSError):  # A kernel may not know it.
            memory.madvise(_WIPE_ON_FORK)
    return memory


class Readying:
    """A thread that touches the pages of a host buffer, one small piece after the other, until it is ended.

    The thread has the usual priority and rests instead. A thread of low priority would wait for a processor while it
    holds the interpreter's lock, or the kernel's lock on the process's memory, and training would wait for it.

    An interrupt leaves nothing locked: `end` waits for a latch that each piece has of its own.

    Attributes:
        has_ended: True once `end` has returned.
    """

    def __init__(self, buffer: HostBuffer, rest_share: float = 0.0) -> None:
        """Begins nothing yet; the thread rests `rest_share` times as long as it works."""
        self._pages = buffer.touch()
        self._rest_share = rest_share
        self._over, self._touched = Latch(), Latch()
        self._touched.open()
        self.has_ended = False
        self._thread = WorkerPool(1, "holdfast-ready")

    def begin(self) -> None:
        """Starts the thread, which ends by itself. Nothing is touched if no thread is available, or after `end`."""
        if self._thread.start():
            # It knows this by a weak reference: a manager that is dropped takes its memory with it.
            me, over, share = weakref.ref(self), self._over, self._rest_share
            self._thread.put(lambda: _touch_all(me, over, share))
        self._thread.end()

    def end(self) -> None:
        """**Thread-safe.** **Blocks** for a millisecond. What is not touched by now is left as it is."""
        self._over.open()
        # The thread shows its latch before it looks whether this is over: one of the two sees the other.
        self._touched.wait(threading.TIMEOUT_MAX)
        self.has_ended = True

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the thread to end, after `end`."""
        # Not ended yet if `begin` was interrupted.
        self._thread.end()
        self._thread.join(timeout_seconds)

    def touch_next(self) -> bool:
        """Touches the next piece; returns False if there is none, or this is over. Called by the thread."""
        self._touched = touched = Latch()
        try:
            touch = None if self._over.is_open else next(self._pages, None)
            if touch is not None:
                touch()
            return touch is not None
        finally:
            touched.open()


def _touch_all(readying: weakref.ref[Readying], over: Latch, rest_share: float) -> None:
    while (one := readying()) is not None:
        begun_at = time.monotonic()
        if not one.touch_next():
            return
        del one
        if rest_share and over.wait((time.monotonic() - begun_at) * rest_share):
            return
