"""A storage that fails, or dies, at the call you choose."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from holdfast.errors import HoldfastError, StorageError, StorageFullError
from holdfast.storage.checks import flat, temporary_name
from holdfast.storage.memory import MemoryStorage, MemoryWriter
from holdfast.storage.protocol import Entry, FileReader, FileWriter, Storage, Traits

_T = TypeVar("_T")


class StoppedDead(BaseException):
    """The process is meant to have died at this storage call.

    It derives from `BaseException`, so that nothing which handles errors goes on after its own death.
    """


@dataclass(frozen=True, slots=True)
class Call:
    """One storage call, as it was counted.

    Attributes:
        name: The method: one of `Storage`'s, or `write_at`, `finish`, `read_into` or `read_digested`.
        path: What it was about.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one call.

    Attributes:
        call_number: Which call, from 1.
        done: How much of it is done before it goes wrong: `"all"` is a lost reply. Of a call that is done at once or
            not at all, `"half"` does nothing; a half `publish` leaves a half temporary file, a half `create` the
            file without its writer.
        stops_dead: True if the process dies there: `StoppedDead` is raised there and at every later call, none of which
            does anything. False if the caller gets an error and goes on.
        error: The error that the caller gets; one that names the call if None.
    """

    call_number: int
    done: Literal["nothing", "half", "all"] = "nothing"
    stops_dead: bool = False
    error: StorageError | None = None

    def raised_at(self, call: Call) -> BaseException:
        """What the caller gets."""
        if self.stops_dead:
            return StoppedDead(f"at call {self.call_number}: {call.name} {call.path}")
        if self.error is not None:
            return self.error
        return StorageError(
            f"call {self.call_number} was told to fail, with {self.done} of it done: {call.name} {call.path}",
            path=call.path,
        )


class FullStorage(MemoryStorage):
    """A storage that has no room for a data file as long as it is full."""

    def __init__(self, *, is_full: bool = True) -> None:
        super().__init__("full")
        self.is_full = is_full

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        """See `Storage`."""
        if self.is_full:
            raise StorageFullError("no room", path=path, hint="make room")
        return super().create(path, size_bytes)


class FaultyStorage:
    """**Thread-safe.** Another storage, whose calls are counted and fail where a plan says so.

    Every method of `Storage` is a call, and so are `write_at`, `finish`, `read_into` and `read_digested`; the URL,
    `abandon` and `close` are none, and work after death too, since they change nothing. Calls are let through one at a
    time, so that a call's number says exactly which others were done before it.
    """

    def __init__(self, inner: Storage, plan: Iterable[Fault] = ()) -> None:
        """Wraps a storage.

        Args:
            inner: Where the calls go.
            plan: The faults, at most one for each call.
        """
        self._inner = inner
        self._gate = _Gate({fault.call_number: fault for fault in plan})

    @property
    def url(self) -> str:
        """The inner storage's URL."""
        return self._inner.url

    @property
    def traits(self) -> Traits:
        """The inner storage's traits, but that no space is kept."""
        return msgspec.structs.replace(self._inner.traits, keeps_space=False)

    @property
    def location(self) -> None:
        """None: what does not come through here would not be counted."""

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls up to now, in order; those after death are left out."""
        return tuple(self._gate.calls)

    @property
    def is_dead(self) -> bool:
        """True once it has stopped dead."""
        return self._gate.is_dead

    def make_directory(self, path: str) -> None:
        """See `Storage`."""
        self._gate.pass_through(Call("make_directory", path), lambda: self._inner.make_directory(path))

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """See `Storage`."""

        def leave_file() -> None:
            self._inner.create(path, size_bytes).abandon()

        writer = self._gate.pass_through(
            Call("create", path), lambda: self._inner.create(path, size_bytes), leave_file, leave_file
        )
        return _FaultyWriter(writer, path, self._gate)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage`."""
        self._gate.pass_through(
            Call("write", path),
            lambda: self._inner.write(path, data),
            lambda: self._inner.write(path, data[: len(data) // 2]),
        )

    def sync_directory(self, path: str) -> None:
        """See `Storage`."""
        self._gate.pass_through(Call("sync_directory", path), lambda: self._inner.sync_directory(path))

    def publish(self, path: str, data: bytes) -> bool:
        """See `Storage`."""

        def leave_temporary() -> None:
            parent, slash, name = path.rpartition("/")
            self._inner.write(f"{parent}{slash}{temporary_name(name)}", data[: len(data) // 2])

        return self._gate.pass_through(Call("publish", path), lambda: self._inner.publish(path, data), leave_temporary)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """See `Storage`."""
        return self._gate.pass_through(Call("read", path), lambda: self._inner.read(path, limit_bytes))

    def open_reader(self, path: str) -> FileReader:
        """See `Storage`."""

        def leave_closed() -> None:
            self._inner.open_reader(path).close()

        reader = self._gate.pass_through(
            Call("open_reader", path), lambda: self._inner.open_reader(path), leave_closed, leave_closed
        )
        return _FaultyReader(reader, path, self._gate)

    def list(self, path: str, *, deep: bool = False) -> builtins.list[Entry]:
        """See `Storage`."""
        return self._gate.pass_through(Call("list", path), lambda: self._inner.list(path, deep=deep))

    def delete(self, paths: Iterable[str]) -> bool:
        """See `Storage`."""
        every = [*paths]
        return self._gate.pass_through(
            Call("delete", " ".join(every)),
            lambda: self._inner.delete(every),
            lambda: self._inner.delete(every[: len(every) // 2]),
        )

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """Like `delete`: no space is kept."""
        self.delete(paths)

    def retire(self, directory: str) -> str:
        """See `Storage`."""
        return self._gate.pass_through(Call("retire", directory), lambda: self._inner.retire(directory))


class _Gate:
    """Counts calls, and lets each through, or not."""

    def __init__(self, faults: dict[int, Fault]) -> None:
        self._faults = faults
        # Held through each call: guards the order of calls and the fields below.
        self._lock = threading.Lock()
        self._closers: list[Callable[[], None]] = []
        self.calls: list[Call] = []
        self.is_dead = False

    def pass_through(
        self,
        call: Call,
        do_all: Callable[[], _T],
        do_half: Callable[[], object] | None = None,
        do_all_but_reply: Callable[[], object] | None = None,
    ) -> _T:
        """Does a call as the plan says.

        Args:
            call: What is recorded.
            do_all: Does it.
            do_half: Does a part of it; nothing if None.
            do_all_but_reply: Does it when its result is lost; `do_all` if None.
        """
        with self._lock:
            if self.is_dead:
                raise StoppedDead(f"before {call.name} {call.path}")
            self.calls.append(call)
            fault = self._faults.get(len(self.calls))
            if fault is None:
                return do_all()
            # What the call itself says is lost as well.
            with suppress(HoldfastError):
                if fault.done == "all":
                    (do_all_but_reply or do_all)()
                elif fault.done == "half" and do_half is not None:
                    do_half()
            if fault.stops_dead:
                self.is_dead = True
                # As the system does for a process that has died.
                for close in self._closers:
                    close()
            raise fault.raised_at(call)

    def closes(self, close: Callable[[], None]) -> None:
        """Notes how to close an open file, for when the process dies."""
        with self._lock:
            self._closers.append(close)
            if self.is_dead:
                close()


class _FaultyWriter:
    """A writer whose calls are counted; what fails once has failed for good, as `FileWriter` promises."""

    def __init__(self, inner: FileWriter, path: str, gate: _Gate) -> None:
        gate.closes(inner.abandon)
        self._inner = inner
        self._path = path
        self._gate = gate
        self._failure: StorageError | None = None

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        def do_half() -> None:
            self._inner.write_at(offset_bytes, flat(data)[: data.nbytes // 2])

        return self._do("write_at", lambda: self._inner.write_at(offset_bytes, data, parts), do_half)

    def finish(self) -> None:
        self._do("finish", self._inner.finish)

    def abandon(self) -> None:
        self._inner.abandon()

    def _do(self, name: str, do_all: Callable[[], _T], do_half: Callable[[], None] | None = None) -> _T:
        if self._failure is not None:
            raise self._failure
        try:
            return self._gate.pass_through(Call(name, self._path), do_all, do_half)
        except StorageError as error:
            self._failure = error
            self._inner.abandon()
            raise


class _FaultyReader:
    """A reader whose calls are counted."""

    def __init__(self, inner: FileReader, path: str, gate: _Gate) -> None:
        gate.closes(inner.close)
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._path = path
        self._gate = gate

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        def do_half() -> None:
            self._inner.read_into(offset_bytes, flat(into)[: into.nbytes // 2])

        self._gate.pass_through(
            Call("read_into", self._path), lambda: self._inner.read_into(offset_bytes, into), do_half
        )

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        found: list[str] = []

        def read(wanted: Sequence[memoryview]) -> None:
            found[:] = self._inner.read_digested(offset_bytes, wanted)

        self._gate.pass_through(
            Call("read_digested", self._path), lambda: read(parts), lambda: read(parts[: len(parts) // 2])
        )
        return found

    def close(self) -> None:
        self._inner.close()
