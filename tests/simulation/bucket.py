"""A simulated bucket: a server, and the client that holdfast's own storage of buckets calls in place of obstore.

A request may be lost, be answered with nothing, be refused, or arrive when its sender has given up or died; the client
repeats it, as obstore does. Listings come in pages, each of its own moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from obstore import exceptions

from holdfast.errors import StorageError
from holdfast.format.digests import digest
from holdfast.storage.objects import ObjectStorage, ObjectWriter
from simulation.scheduler import Killed, Process, Scheduler, Task

_T = TypeVar("_T")
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Weather:
    """How often what goes wrong, of all requests: each from 0 to 1.

    Attributes:
        lost: A request never arrives.
        unanswered: It is done, and the reply is lost.
        late: It arrives later, when its sender has given up on it, or never.
        conflict: A create-only put meets another, and neither is done (409).
        refused: The service answers that it is busy (503).
        wrong: A read is answered with wrong bytes.
    """

    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    conflict: float = 0.0
    refused: float = 0.0
    wrong: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    attributes: Mapping[str, str]
    e_tag: str


@dataclass(eq=False)
class Bucket:
    """The server.

    Attributes:
        scheduler: Who is served next.
        weather: What goes wrong.
        page: The number of keys in a page of a listing.
        misses_fail: True if the removal of an object that is not there is an error.
        changed: Called with each path that was made (True), or overwritten or removed (False).
        late: Requests that have not arrived yet.
        cut_off: The machines from which no request arrives.
    """

    scheduler: Scheduler
    weather: Weather
    page: int
    misses_fail: bool
    changed: Callable[[str, bool], object] = lambda path, is_made: None
    late: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    objects: dict[str, _Stored] = field(default_factory=dict)
    cut_off: set[str] = field(default_factory=set)

    def open(self, process: Process | None = None) -> SimulatedStorage:
        """Returns the storage of a process; without one, calls are no scheduling points and meet no faults."""
        return SimulatedStorage(self, process)

    def crash(self) -> None:
        """Does nothing: the service of a bucket loses nothing."""

    def happen(self) -> None:
        """Lets a late request arrive, at times."""
        dice = self.scheduler.dice
        if self.late and dice.random() < 0.05:
            what, act = self.late.pop(dice.randrange(len(self.late)))
            self.scheduler.note(f"late: {what}")
            self.scheduler.is_late = True
            try:
                act()
            except Exception as error:
                self.scheduler.note(f"late: {error!r}")
            finally:
                self.scheduler.is_late = False

    def put(self, path: str, data: bytes, attributes: Mapping[str, str], *, creates: bool) -> dict[str, Any]:
        """Stores an object."""
        before = self.objects.get(path)
        if creates and before is not None:
            raise exceptions.AlreadyExistsError(f"Object at location {path} already exists")
        self.objects[path] = _Stored(data, attributes, digest(data))
        if before is not None and before.data != data:
            self.changed(path, False)
        if before is None or before.data != data:
            self.changed(path, True)
        return {"e_tag": None, "version": None}

    def find(self, path: str) -> _Stored:
        """Returns an object."""
        found = self.objects.get(path)
        if found is None:
            raise FileNotFoundError(f"Object at location {path} not found")
        return found

    def remove(self, paths: Iterable[str]) -> None:
        """Removes objects."""
        is_missing = False
        for path in paths:
            if self.objects.pop(path, None) is None:
                is_missing = True
            else:
                self.changed(path, False)
        if is_missing and self.misses_fail:
            raise FileNotFoundError("an object was not found")


class SimulatedStorage(ObjectStorage):
    """holdfast's own storage of buckets, with a simulated client. Each data file is uploaded in parts."""

    # Its own threads would read in an order of theirs.
    traits = msgspec.structs.replace(ObjectStorage.traits, read_parallel=1)

    def __init__(self, bucket: Bucket, process: Process | None) -> None:
        store: Any = process
        super().__init__("simulated://bucket", store)
        self._client = Client(bucket, process)

        self._bucket, self._process = bucket, process
        self.uploads: dict[str, deque[Task]] = {}

    def create(self, path: str, size_bytes: int) -> SimulatedWriter:
        """Begins an upload; see `Storage`."""
        assert self._process is not None
        return SimulatedWriter(self, path, size_bytes, self._bucket.scheduler, self._process)

    def upload(self, path: str, pieces: Iterator[bytearray], size_bytes: int) -> None:
        """Puts an object of parts, however small it is, as a task of its own; see `ObjectStorage`."""
        data = b"".join(pieces)
        failures: Sequence[BaseException] = [Killed()]

        def send() -> None:
            nonlocal failures
            try:
                with self.errors("write", path):
                    self._client.put(self._store, path, iter([data]), use_multipart=True)
                failures = ()
            except StorageError as error:
                failures = [error]

        self._bucket.scheduler.run_as(self.uploads[path].popleft(), send)
        for failure in failures:
            raise failure


class SimulatedWriter(ObjectWriter):
    """holdfast's own writer of an object; its upload is a task that begins when all pieces are there."""

    def __init__(
        self, storage: SimulatedStorage, path: str, size_bytes: int, scheduler: Scheduler, process: Process
    ) -> None:
        super().__init__(storage, path, size_bytes)
        self._uploads, self._scheduler, self._process = storage.uploads, scheduler, process
        self._name, self._end_bytes = path, size_bytes
        self._task: Task | None = None

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        if offset_bytes + data.nbytes >= self._end_bytes:
            self._task = self._scheduler.enlist(self._process, "upload")
            self._uploads.setdefault(self._name, deque()).append(self._task)
        return super().write_at(offset_bytes, data, parts)

    def finish(self) -> None:
        if self._task is not None:
            self._scheduler.join(self._task)
        super().finish()


class _Got:
    def __init__(self, path: str, stored: _Stored) -> None:
        self.attributes = stored.attributes
        self.meta = {"path": path, "size": len(stored.data), "e_tag": stored.e_tag}
        self._data = stored.data

    def bytes(self) -> bytes:
        return self._data


class Client:
    """What is called of the module obstore."""

    exceptions = exceptions

    def __init__(self, bucket: Bucket, process: Process | None) -> None:
        self._bucket, self._process = bucket, process

    def put(
        self,
        store: object,
        path: str,
        file: bytes | Iterator[bytearray],
        *,
        attributes: Mapping[str, str] | None = None,
        mode: str = "overwrite",
        **options: object,
    ) -> dict[str, Any]:
        data = bytes(file) if isinstance(file, bytes | bytearray | memoryview) else b"".join(file)
        creates, kept = mode == "create", dict(attributes or {})
        act = lambda: self._bucket.put(path, data, kept, creates=creates)  # noqa: E731
        return self._ask("create" if creates else "put", path, act)

    def head(self, store: object, path: str) -> dict[str, Any]:
        return self._ask("head", path, lambda: _Got(path, self._bucket.find(path)).meta)

    def get(self, store: object, path: str, *, options: object = None) -> _Got:
        return self._ask("get", path, lambda: _Got(path, self._bucket.find(path)))

    def get_range(
        self, store: object, path: str, *, start: int, length: int | None = None, end: int | None = None
    ) -> bytes:
        stop = end if length is None else start + length
        data = self._ask("get_range", path, lambda: self._bucket.find(path).data[start:stop])
        scheduler, process = self._bucket.scheduler, self._process
        if process is None or process.is_calm or scheduler.dice.random() >= self._bucket.weather.wrong or not data:
            return data
        scheduler.note(f"wrong bytes of {path}")
        process.has_read_wrong_bytes = True
        at = scheduler.dice.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def list(self, store: object, prefix: str | None = None, **options: object) -> _Listing:
        return _Listing(self._list_pages(prefix))

    def list_with_delimiter(self, store: object, prefix: str | None = None) -> dict[str, Any]:
        skipped = len(prefix) + 1 if prefix else 0
        found = []
        above: dict[str, None] = {}
        for one in self._list_pages(prefix):
            name, slash, _ = one["path"][skipped:].partition("/")
            if slash:
                above[one["path"][:skipped] + name] = None
            else:
                found.append(one)
        return {"objects": found, "common_prefixes": [*above]}

    def delete(self, store: object, paths: str | Sequence[str]) -> None:
        if isinstance(paths, str):
            self._ask("delete", paths, lambda: self._bucket.remove([paths]))
            return
        dice = self._bucket.scheduler.dice
        keys = [*paths]
        if self._process is not None:
            dice.shuffle(keys)
        at = dice.randrange(len(keys) + 1) if self._process and dice.random() < 0.3 else len(keys)
        for part in (keys[:at], keys[at:]):
            if part:
                self._ask("delete", " ".join(part), lambda part=part: self._bucket.remove(part))  # type: ignore[misc]

    def _list_pages(self, prefix: str | None) -> Sequence[dict[str, Any]]:
        begin, after = f"{prefix}/" if prefix else "", ""
        found = []

        def look() -> Sequence[str]:
            return sorted(key for key in self._bucket.objects if key.startswith(begin) and key > after)

        while True:
            keys = self._ask("list", f"{prefix or '.'} after {after}" if after else prefix or ".", look)
            page = keys[: self._bucket.page]
            found += [_Got(key, self._bucket.objects[key]).meta for key in page]
            if len(page) == len(keys):
                break
            after = page[-1]
        if prefix == "generations" and self._process is not None:
            task = self._bucket.scheduler.task
            task.looked_at[self._bucket] = self._bucket.scheduler.now
        return found

    def _ask(self, kind: str, what: str, act: Callable[[], _T]) -> _T:
        """Sends a request, and again where no reply comes."""
        process = self._process
        if process is None:
            return act()
        scheduler, weather = self._bucket.scheduler, self._bucket.weather
        is_change, call = kind in ("create", "put", "delete"), f"{kind} {what}"
        for _ in range(_TRIES):
            try:
                scheduler.pause(call)
            except Killed:
                # It may have been sent already.
                if is_change and not scheduler.failure and scheduler.dice.random() < weather.late * 5:
                    self._bucket.late.append((call, act))
                raise
            if process.machine in self._bucket.cut_off:
                raise exceptions.GenericError(f"error sending request: {call}: no route to host")
            if process.is_calm:
                return act()
            chance = scheduler.dice.random() - weather.lost
            if chance < 0:
                continue
            if (chance := chance - weather.unanswered) < 0:
                scheduler.note(f"no reply to {call}")
                act()
                continue
            if (chance := chance - weather.refused) < 0:
                raise exceptions.GenericError(f"503 Service Unavailable: {call}")
            if is_change and (chance := chance - weather.late) < 0:
                scheduler.note(f"on the way: {call}")
                self._bucket.late.append((call, act))
                if scheduler.dice.random() < 0.7:
                    break
                continue
            if kind == "create" and (chance := chance - weather.conflict) < 0:
                raise exceptions.AlreadyExistsError(f"409 ConditionalRequestConflict: {call}")
            return act()
        scheduler.note(f"gives up: {call}")
        raise exceptions.GenericError(f"error sending request: {call}: operation timed out")


class _Listing:
    def __init__(self, found: Sequence[dict[str, Any]]) -> None:
        self._found = found

    def collect(self) -> Sequence[dict[str, Any]]:
        return self._found

    def __iter__(self) -> Iterator[Sequence[dict[str, Any]]]:
        return iter([self._found] if self._found else [])
