"""Preparations and checks before the first save: memory, the objects, the directory, and the event sinks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from holdfast.catalog import RunLock
from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError, StorageFullError
from holdfast.events import Fanout, Sink, Warned
from holdfast.events.sinks import LoggingSink, RunJournal
from holdfast.format.names import GENERATIONS_DIRECTORY, MANIFEST_NAME, TRASH_PREFIX
from holdfast.state import Captured, capture_objects
from holdfast.state.leaves import DeviceCopier
from holdfast.state.registry import find_stateful, may_change_when_read
from holdfast.storage import Storage


def make_readiness_check(
    storage: Storage,
    lock: RunLock,
    capture: Callable[[], object],
    agree: Callable[[Callable[[], None]], DamageError | None],
    *,
    is_leader: bool,
    failures_allowed: int,
    emit: Sink,
) -> Callable[[], None]:
    """Returns a function that checks, at its first call, that the objects and the directory can be saved.

    A job calls it after the restore, so that a mistake shows before training begins and not at the first save. It is
    **collective**, **blocks**, and raises `UnsupportedValueError` for an object that cannot be stored, `StorageError`
    if nothing can be written, `UsageError` if another process of this machine has the run open, and `PeerError` if the
    check has failed on another worker.
    """
    is_checked = False

    def check() -> None:
        capture()
        try:
            if is_leader:
                check_writable(storage)
                lock.take()
        except StorageFullError as error:
            if not failures_allowed:
                raise
            # There may be room by the time that something is saved.
            emit(Warned(text=error.message))

    def check_once() -> None:
        nonlocal is_checked
        if not is_checked:
            agree(check)
            is_checked = True

    return check_once


def check_writable(storage: Storage) -> None:
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
    return captured.size_bytes + count_awaited_bytes(objects) + _header_bytes(captured)


def count_awaited_bytes(objects: Mapping[str, object]) -> int:
    """Returns by how much the state of the objects will grow when they are first used, as far as that is known."""
    found = (each for obj in objects.values() for each in find_stateful(obj, ""))
    return sum(adapter.awaited_bytes(part) for _, part, adapter in found if adapter is not None)


def measure_bytes(captured: Captured) -> int:
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


def open_event_sinks(storage: Storage, sinks: Iterable[Sink], *, is_leader: bool) -> Fanout:
    """Returns the log, the sinks, and the run's journal if files of the storage can be appended to."""
    journal = [RunJournal(storage.location)] if is_leader and storage.location is not None else []
    return Fanout([LoggingSink(is_leader=is_leader), *journal, *sinks])
