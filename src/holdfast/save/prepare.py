"""What is made ready and checked before the first save: memory, the objects, and the directory."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, Literal

from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError, StorageFullError
from holdfast.events import Sink, Warned
from holdfast.format.names import MANIFEST_NAME, TRASH_PREFIX
from holdfast.save.buffer import HostBuffer
from holdfast.state import capture_objects
from holdfast.state.registry import adapter_of
from holdfast.state.tree_walk import may_change_when_read
from holdfast.storage.crew import Crew
from holdfast.storage.protocol import Storage

_THREADS: Final = 2


class Readiness:
    """**Collective.** **Blocks.** Checks, at its first call, that the objects and the directory can be saved.

    A job calls it once it has restored, so that a mistake shows before training begins and not at the first save.
    """

    def __init__(
        self,
        storage: Storage,
        capture: Callable[[], object],
        agree: Callable[[Callable[[], None]], DamageError | None],
        *,
        is_leader: bool,
        failures_allowed: int,
        emit: Sink,
    ) -> None:
        """Checks nothing yet.

        Args:
            storage: The run.
            capture: Raises if the state of an object cannot be stored.
            agree: Runs the check; raises on all workers what it raises on one of them.
            is_leader: Whether this worker checks the directory.
            failures_allowed: How many saves in a row may fail.
            emit: Told of the warning.
        """
        self._storage = storage
        self._capture = capture
        self._agree = agree
        self._is_leader = is_leader
        self._failures_allowed = failures_allowed
        self._emit = emit
        self._is_checked = False

    def __call__(self) -> None:
        """Checks, unless that was done before.

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
            StorageError: If the directory cannot be made, or nothing can be written into it.
            PeerError: If the check has failed on another worker.
        """
        if not self._is_checked:
            self._agree(self._check)
            self._is_checked = True

    def _check(self) -> None:
        self._capture()
        if not self._is_leader:
            return
        try:
            check_writable(self._storage)
        except StorageFullError as error:
            if not self._failures_allowed:
                raise
            # There may be room by the time that something is saved.
            self._emit(Warned(text=error.message))


def check_writable(storage: Storage) -> None:
    """**Blocks.** Makes sure that a run can be saved: makes its directory, and publishes and removes a small file.

    A crash at any point leaves at most a directory that is set aside, which the next save sweeps away.

    Raises:
        StorageError: If something of that cannot be done.
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
                    raise StorageError(f"{path} does not hold what was just written", path=path)
        finally:
            with suppress(HoldfastError):
                storage.remove(path)
                storage.remove_directory(trial)
    except HoldfastError as error:
        kind = type(error) if isinstance(error, StorageError) else StorageError
        text = f"{storage.url}: no checkpoint can be saved here: {error.message}"
        raise kind(text, path=path, hint=error.hint or "Give a directory that can be written.") from error.__cause__


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
    captured = capture_objects({name: obj for name, obj in objects.items() if not may_change_when_read(obj)})
    awaited_bytes = sum(
        adapter.awaited_bytes(obj) for obj in objects.values() if (adapter := adapter_of(obj)) is not None
    )
    # And a header, of about so many bytes for each leaf.
    return captured.size_bytes + awaited_bytes + 4096 + 256 * len(captured.names)
