"""Preparations before the first save: allocates its memory, and checks the objects and the directory."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, Literal

from holdfast.catalog import RunLock
from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError, StorageFullError
from holdfast.events import Fanout, Sink, Totals, Warned
from holdfast.events.sinks import LoggingSink, RunJournal
from holdfast.format.names import GENERATIONS_DIRECTORY, MANIFEST_NAME, TRASH_PREFIX
from holdfast.format.records import Worker
from holdfast.options import SaveOptions
from holdfast.process.terminal import inform
from holdfast.save.host_memory import GENTLE, Readying
from holdfast.save.image import Stager
from holdfast.save.journal import ObjectJournal
from holdfast.state import Captured, capture_objects
from holdfast.state.leaves import DeviceCopier
from holdfast.state.registry import find_stateful, list_members, may_change_when_read
from holdfast.storage import Storage
from holdfast.storage.digesting import find_native

_MOST_LOOKS: Final = 8
_LEAST_BYTES: Final = 16 << 20
"""A smaller state has its memory in milliseconds, and needs no thread for that."""


class Preparation:
    """Prepares the first save of a manager. All of it belongs to the training thread.

    Attributes:
        has_begun: True once that save has begun.
    """

    def __init__(
        self,
        storage: Storage,
        lock: RunLock,
        stager: Stager,
        list_objects: Callable[[], Mapping[str, object]],
        options: SaveOptions,
        emit: Sink,
        is_leader: bool,
    ) -> None:
        """Makes memory ready, as the options say; `list_objects` returns all that is saved, by name."""
        self._storage, self._lock, self._is_leader = storage, lock, is_leader
        self._stager, self._list_objects, self._emit = stager, list_objects, emit
        self._failures_allowed = options.failures_allowed
        self._is_checked = self.has_begun = False
        # The memory of the first save, made ready before it; and how often to look yet whether its size is known.
        self._readying: Readying | None = None
        self._looks_left = _MOST_LOOKS if options.reserve_bytes is None else 0
        self._ends: list[Callable[[], None]] = []
        # Now, since saves take no more memory than they say, and may be made when nothing can be imported any more.
        find_native()
        if options.reserve_bytes is not None or options.save_every is None:
            self._reserve(options.reserve_bytes)

    def _reserve(self, size_bytes: int | Literal["auto"] | None) -> None:
        """Allocates memory for a state of that size in the background, unless it is 0, or warns that it cannot.

        Then the first save allocates the memory. The objects need not be ready to be saved yet, such as a lazy module.
        If it is None, the steps of the saved optimizers show when the time for that has come.
        """
        try:
            if size_bytes is None:
                self._follow_steps()
            elif size_bytes == "auto":
                self._begin_readying(estimate_bytes(self._list_objects()), is_estimate=True)
            elif wanted_bytes := operator.index(size_bytes):
                self._begin_readying(wanted_bytes, is_estimate=False)
        except Exception as error:  # noqa: BLE001  It comes out of the objects' own code, and again if a save fails by it.
            reason = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
            self._emit(Warned(text=f"memory could not be allocated in advance: {reason}"))

    def look_ahead(self) -> None:
        """Called between two steps: makes the memory of the first save ready, once its size is known.

        An optimizer has most of its state from its first step on, so that step is awaited; but not for ever, as a
        frozen parameter never gets any. An estimate that is wrong costs time at the first save, and nothing else.
        """
        if not self._looks_left:
            return
        self._looks_left -= 1
        objects = self._list_objects()
        try:
            if self._looks_left and _count_awaited_bytes(objects):
                return
            size_bytes = _measure_bytes(self._stager.check_capture(objects, anew=True))
            self._looks_left = 0
            if size_bytes >= _LEAST_BYTES:
                self._begin_readying(size_bytes, is_estimate=True, rest_share=GENTLE)
        except HoldfastError:
            pass  # It comes again if a save fails by it, which then says so.

    def _follow_steps(self) -> None:
        """Looks ahead before each step of a saved optimizer: the program may make no call before it saves."""
        me = weakref.ref(self)

        def look(_: object) -> None:
            preparation = me()
            if preparation is not None:
                with suppress(Exception):  # It comes again if a save fails by it.
                    preparation.look_ahead()

        for _, obj, adapter in list_members(self._list_objects()):
            if (end := adapter.before_step(obj, look, is_own=True)) is not None:
                self._ends.append(end)

    def _begin_readying(self, size_bytes: int, *, is_estimate: bool, rest_share: float = 0.0) -> None:
        buffer = self._stager.buffer
        self._readying = readying = Readying(buffer.touch(), rest_share)
        # A save that begins in between, in the handler of a signal, ends that, or is seen here.
        if not self.has_begun:
            if is_estimate:
                buffer.reserve(size_bytes)
            else:
                buffer.take(size_bytes)
            readying.begin()

    def end(self) -> None:
        """Called when the first save begins, unless it `has_begun`: the memory is its own."""
        self.has_begun, self._looks_left = True, 0
        if self._readying is not None:
            self._readying.end()

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Ends what goes on, and follows no optimizer any more."""
        while self._ends:
            self._ends.pop()()
        if self._readying is not None:
            self._readying.end()
            self._readying.join(timeout_seconds)

    def wait_until_free(self) -> None:
        """**Blocks.** Waits a while if another process of this machine has the run open; called before a restore."""
        if self._is_leader:
            self._lock.take(inform)

    def check_once(self, agree: Callable[[Callable[[], None]], DamageError | None]) -> None:
        """**Collective.** **Blocks.** Checks, at the first call, that the objects and the directory can be saved.

        A job calls it after the restore, so that a mistake shows before training begins and not at the first save.
        `agree` runs the check on all workers.

        Raises:
            UnsupportedValueError: If an object cannot be stored.
            StorageError: If nothing can be written.
            UsageError: If another process of this machine has the run open.
            PeerError: If the check has failed on another worker.
        """
        if not self._is_checked:
            agree(self._check)
            self._is_checked = True

    def _check(self) -> None:
        self._stager.check_capture(self._list_objects())
        try:
            if self._is_leader:
                _check_writable(self._storage)
                self._lock.take()
        except StorageFullError as error:
            if not self._failures_allowed:
                raise
            # There may be room by the time that something is saved.
            self._emit(Warned(text=error.message))


def _check_writable(storage: Storage) -> None:
    """**Blocks.** Creates the run's directory, publishes and removes a small file; raises `StorageError` if that fails.

    A crash at any point leaves at most a file or a directory that the next save removes.
    """
    trial = f"{TRASH_PREFIX}{os.urandom(8).hex()}-trial"
    path, token = f"{trial}/{MANIFEST_NAME}", os.urandom(16)
    try:
        storage.make_directory("")
        try:
            # A save that goes on there, of this job or of another one, may sweep it away meanwhile.
            with suppress(NotFoundError):
                storage.make_directory(trial)
                if not storage.publish(path, token) or storage.read(path, len(token)) != token:
                    raise StorageError(f"{path} does not contain what was just written", path=path)
            # Another user may have made it, so that only the top can be written.
            if storage.list(GENERATIONS_DIRECTORY):
                # A crash here leaves what the sweep after a save takes for half an opening.
                opening = f"{GENERATIONS_DIRECTORY}/.0000.json.{token.hex()}.tmp"
                storage.write(opening, token)
                storage.delete([opening])
        finally:
            with suppress(HoldfastError):
                storage.delete([path, trial])
    except HoldfastError as error:
        kind = type(error) if isinstance(error, StorageError) else StorageError
        text = f"{storage.url}: no checkpoint can be saved here: {error.message}"
        raise kind(text, path=path, hint=error.hint or "Use a directory that is writable.") from error.__cause__


def estimate_bytes(objects: Mapping[str, object]) -> int:
    """Returns the memory that the state of the objects takes, including state that they get when they are first used.

    Objects that may change when their state is read are left out: they are to be restored first.
    """
    captured = capture_objects({name: obj for name, obj in objects.items() if not may_change_when_read(obj)})
    return captured.size_bytes + _count_awaited_bytes(objects) + _header_bytes(captured)


def _count_awaited_bytes(objects: Mapping[str, object]) -> int:
    """Returns by how much the state of the objects will grow when they are first used, as far as that is known."""
    found = (each for obj in objects.values() for each in find_stateful(obj, ""))
    return sum(adapter.awaited_bytes(part) for _, part, adapter in found if adapter is not None)


def _measure_bytes(captured: Captured) -> int:
    """Returns the host memory that a save of what was captured takes; 0 if that has to be pinned for a device."""
    by_copier: dict[str, tuple[DeviceCopier, list[object]]] = {}
    for array, address, backend in zip(captured.arrays, captured.addresses, captured.backends, strict=True):
        if address is None and backend.devices is not None:
            by_copier.setdefault(backend.name, (backend.devices, []))[1].append(array)
    if any(copier.find_pin(arrays) is not None for copier, arrays in by_copier.values()):
        return 0
    return captured.size_bytes + _header_bytes(captured)


def _header_bytes(captured: Captured) -> int:
    """Returns about how many bytes the header of a file takes."""
    return 4096 + 256 * len(captured.names)


class RunEvents(Fanout):
    """The events of a run: to the log, the sinks, and the journal, where the storage can have one.

    Attributes:
        totals: Sums them up.
        entered_at: When training began, by the monotonic clock, if the cost of saving is reported here; None otherwise.
    """

    def __init__(self, storage: Storage, sinks: Iterable[Sink], worker: Worker) -> None:
        self.totals = Totals()
        self.entered_at: float | None = None
        journal: list[Sink] = []
        self._object_journal: ObjectJournal | None = None
        if worker.is_leader and storage.location is not None:
            journal = [RunJournal(storage.location)]
        elif worker.is_leader and storage.traits.replaces:
            replace: Callable[[str, bytes], object] = storage.replace  # type: ignore[attr-defined]
            journal = [found := ObjectJournal(replace)]
            self._object_journal = found
        log = LoggingSink(is_leader=worker.is_leader, is_second=worker.rank == 1)
        super().__init__([log, *journal, self.totals, *sinks])

    def close(self) -> None:
        """**Blocks.** Writes the events that are not in the journal yet, for a few seconds at most."""
        if self._object_journal is not None:
            self._object_journal.close()
