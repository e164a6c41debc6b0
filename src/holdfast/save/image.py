"""Copies captured live arrays into host memory that is laid out as the data file."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.errors import ChangedError
from holdfast.format.index import Layout, plan_layout, relabel, round_up
from holdfast.format.records import ALONE, Worker
from holdfast.process.latch import Latch, gc_paused
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.copy_plan import PART_BYTES, Copy, Job, Move, plan_copies
from holdfast.save.host_memory import HostBuffer
from holdfast.state import CaptureCache, Captured, check_capture
from holdfast.state.finite import FloatTable, list_trained
from holdfast.state.leaves import (
    ArrayBackend,
    ArraySpec,
    DeviceCopier,
    Transfer,
    aliases_of,
    find_addresses,
    find_versions,
)
from holdfast.storage.buffers import batches

_PINNED_PART_BYTES: Final = 64 << 20
"""How much a device copies to pinned memory in one go: few milliseconds' worth, of which writing begins early."""


class CalledOffError(Exception):
    """The copy will never be complete, because the save was interrupted; nothing has failed."""


class CopyProgress:
    """**Thread-safe.** Up to which byte an image is complete, from the beginning.

    Copies are made in any order: this is the lowest byte of those that are not made yet.

    Attributes:
        copy_ended: Opens when all copies are made, or never will be.
        completed_at: When they were made, by the monotonic clock.
        error: Why they never will be, or None.
    """

    def __init__(self, begins: Sequence[int] = ()) -> None:
        """`begins` has for each copy, by its number, the lowest byte that it fills; all else is there."""
        self.copy_ended = Latch()
        self.completed_at = time.monotonic()
        self.error: BaseException | None = None
        self._is_called_off = False
        self._begins = begins
        self._order = sorted(range(len(begins)), key=begins.__getitem__)
        # Guards all below.
        self._lock = threading.Lock()
        self._made = bytearray(len(begins))
        self._first = 0
        self._waiting: list[tuple[float, Latch]] = []

    def begin(self) -> None:
        """Starts the copies; if there are none, that ends at once."""
        if not self._begins:
            self.completed_at = time.monotonic()
            self.copy_ended.open()

    def make(self, number: int, copy: Callable[[], object]) -> None:
        """**Blocks.** Makes the copy of that number, unless the save was called off."""
        try:
            if self._is_called_off:
                raise CalledOffError
            copy()
        except BaseException as error:
            self.fail(error)
            raise
        with self._lock:
            self._made[number] = True
            while self._first < len(self._order) and self._made[self._order[self._first]]:
                self._first += 1
            if self._first == len(self._order) and self.error is None:
                self.completed_at = time.monotonic()
                self.copy_ended.open()
            self._wake()

    def call_off(self) -> None:
        """Prevents further copies. It takes no lock, so that it may be interrupted as well."""
        self._is_called_off = True

    def fail(self, error: BaseException) -> None:
        """Called when the copy will never be complete."""
        with self._lock:
            if not self.copy_ended.is_open:
                self.error = error
                self.copy_ended.open()
            self._wake()

    def wait(self, end: float = math.inf) -> None:
        """**Blocks** until the image is complete up to that byte, exclusive, or whole; raises what ended the copy."""
        latch = Latch()
        with self._lock:
            self._waiting.append((end, latch))
            self._wake()
        latch.wait(threading.TIMEOUT_MAX)
        if self.error is not None:
            raise self.error

    def while_copied(self, jobs: Iterator[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        """Returns jobs as they are requested until all is copied; the rest stay where they are."""
        return iter(lambda: None if self.copy_ended.is_open else next(jobs, None), None)

    def _wake(self) -> None:
        """Wakes waiters whose range is complete."""
        if self._waiting:
            level = math.inf
            if not self.copy_ended.is_open:
                level = self._begins[self._order[self._first]] if self._first < len(self._order) else sys.maxsize
            for end, latch in self._waiting:
                if end <= level:
                    latch.open()
            self._waiting = [(end, latch) for end, latch in self._waiting if end > level]


class Snapshot(msgspec.Struct, frozen=True):
    """One worker's state in host memory, laid out as its data file.

    Attributes:
        layout: The position of each array.
        image: The data file's bytes, padded with zeros to whole blocks.
        state: What was captured, without the arrays and their descriptions.
        copied: Up to where the image is complete.
        floats: The numbers in it that training computes.
    """

    layout: Layout
    image: memoryview
    state: Captured
    copied: CopyProgress
    floats: FloatTable


class Stager:
    """Lays out the image of what was captured in one buffer, one save at a time.

    What stays the same from save to save is found and planned once.

    Attributes:
        buffer: The memory of the image.
        holders: The ranks that hold an object, for objects that not all workers hold.
        captures: What the next capture finds again.
    """

    def __init__(
        self,
        buffer: HostBuffer,
        worker: Worker = ALONE,
        holders: Mapping[str, Sequence[int]] | None = None,
        list_objects: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """`list_objects` returns the objects that are captured, by name."""
        self.buffer, self.holders, self.captures = buffer, holders or {}, CaptureCache()
        self._worker, self._list_objects = worker, list_objects
        self._plan: _LayoutPlan | None = None
        # What training computes, of these objects.
        self._trained: tuple[list[object], frozenset[str]] = ([], frozenset())

    def check_capture(self, objects: Mapping[str, object], *, anew: bool = False) -> Captured:
        """Raises `UnsupportedValueError` unless the state can be captured; changes nothing.

        With `anew` it shares nothing with the captures of saves: the handler of a signal may save meanwhile.
        """
        return check_capture(objects, CaptureCache() if anew else self.captures, self._worker, self.holders)

    @gc_paused()
    def stage(self, captured: Captured, step: int) -> Staging:
        """Lays the arrays out; copies nothing yet. Raises `UsageError` for more arrays than a header can name."""
        before = self._plan
        plan = self._plan = _plan_for(captured, {"format": "holdfast", "step": str(step)}, before)
        if plan is not before:
            plan.floats = self._list_floats(captured, plan.layout)
        layout = plan.layout
        image = self.buffer.take(round_up(layout.size_bytes))
        image[: len(layout.header)] = layout.header
        # The buffer may hold an older snapshot after the end of this one.
        image[layout.size_bytes :] = bytes(round_up(layout.size_bytes) - layout.size_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(image))
        moves, held = plan.moves.get(base), frozenset(captured.held)
        if moves is None or (moves.held, moves.addresses, moves.backends) != (
            held,
            captured.addresses,
            captured.backends,
        ):
            if len(plan.moves) >= self.buffer.count:
                plan.moves.clear()
            moves = plan.moves[base] = _plan_moves(plan, captured, image, base)
        # The columns go with the save; the rest is needed as long as what was written is spoken of.
        state = msgspec.structs.replace(
            captured, names=[], specs=[], arrays=[], addresses=[], backends=[], held={}, compared=()
        )
        snapshot = Snapshot(layout, image, state, CopyProgress(), plan.floats)
        staging = Staging(snapshot, captured, [copy.run for copy in moves.now], [copy.run for copy in moves.later])
        # What is held may be given other memory before it is copied: these keep the memory that it has now.
        staging.kept = dict(zip(held, aliases_of(list(map(captured.arrays.__getitem__, held))), strict=True))
        if captured.compared:
            staging.moments = _record_moments(captured.compared)
        if moves.others_now or moves.others_later:
            self._add_others(staging, captured, moves.others_now, staging.now, waits=True)
            self._add_others(staging, captured, moves.others_later, staging.later, waits=False)
        begins = [copy.begin - base for copy in moves.now] + [min(batch.offsets) for batch in moves.others_now]
        staging.snapshot = msgspec.structs.replace(snapshot, copied=CopyProgress(begins))
        return staging

    def _list_floats(self, captured: Captured, layout: Layout) -> FloatTable:
        objects = self._list_objects()
        if list(map(id, objects.values())) != list(map(id, self._trained[0])):
            self._trained = [*objects.values()], list_trained(objects)
        libraries = dict(zip(captured.names, captured.backends, strict=True))
        return FloatTable(layout, self._trained[1], libraries, captured.boxes)

    def forget(self) -> None:
        """Drops what the next save would use again, and the memory."""
        self._trained = [], frozenset()
        self._plan = None
        self.buffer.release()

    def _add_others(
        self,
        staging: Staging,
        captured: Captured,
        planned: list[_Batch],
        jobs: list[Job],
        *,
        waits: bool,
    ) -> None:
        """Adds jobs for arrays that are not plain host memory: one for each batch."""
        moments: dict[str, object] = {}
        for batch in planned:
            backend = batch.backend
            if backend.devices is not None and backend.name not in moments:
                every = [captured.arrays[leaf] for one in planned if one.backend is backend for leaf in one.leaves]
                if (pin := backend.devices.find_pin(every)) is not None:
                    self.buffer.pin(pin)
                moments[backend.name] = backend.devices.moment(every)
            arrays = [staging.kept.get(leaf, captured.arrays[leaf]) for leaf in batch.leaves]
            jobs.append(partial(staging.copy_others, batch, arrays, moments.get(backend.name), waits))


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

    def copy_others(self, batch: _Batch, arrays: list[Any], moment: object, waits: bool) -> None:
        """**Thread-safe.** **Blocks.** Copies arrays with their library; a device is waited for here or in
        `copy_later`."""
        if batch.backend.devices is None:
            batch.backend.copy_out(arrays, self.snapshot.image, batch.offsets)
        elif transfer := batch.backend.devices.start(arrays, batch.targets, moment):
            if waits:
                transfer.wait()
            else:
                self._transfers.append(transfer)

    def check_unchanged(self) -> None:
        """**Thread-safe.** Raises `ChangedError` if a held array has changed since its capture, or has other memory."""
        captured, kept = self.captured, self.kept  # Nothing is kept once the save has ended.
        backends, arrays = [captured.backends[place] for place in kept], [*kept.values()]
        # All at once: of thousands of arrays each one asked by itself would hold up the step.
        found = zip(kept, find_versions(backends, arrays), find_addresses(backends, arrays), strict=True)
        changed = [
            captured.names[place]
            for place, version, address in found
            if (version, address) != (captured.held[place], captured.addresses[place])
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
        floats: The numbers that training computes.
        moves: The moves of the last saves, by the address of the image.
    """

    names: list[str]
    specs: list[ArraySpec]
    layout: Layout
    order: list[int]
    begins: list[int]
    sizes: list[int]
    floats: FloatTable
    moves: dict[int, _Moves] = msgspec.field(default_factory=dict)


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
        FloatTable(layout, frozenset(), {}, ()),
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

    addresses: list[int | None]
    backends: list[ArrayBackend]
    held: frozenset[int]
    now: list[Copy] = field(default_factory=list)
    later: list[Copy] = field(default_factory=list)
    others_now: list[_Batch] = field(default_factory=list)
    others_later: list[_Batch] = field(default_factory=list)


def _plan_moves(plan: _LayoutPlan, captured: Captured, image: memoryview, base: int) -> _Moves:
    moves = _Moves(captured.addresses, captured.backends, frozenset(captured.held))
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
