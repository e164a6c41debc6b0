"""`follow`: the checkpoints of a run, as its job commits them, for an evaluation or an export beside it."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgspec

from holdfast.catalog import StoredRun
from holdfast.catalog.holds import (
    HOLDS_DIRECTORY,
    RENEWAL_SECONDS,
    Hold,
    ReaderPlace,
    read_places,
    wait_staying,
    write_hold,
    write_name,
)
from holdfast.checkpoint import Checkpoint, find_given
from holdfast.errors import DamageError, HoldfastError, NoCheckpointError, NotFoundError, StorageError, UsageError
from holdfast.events.sinks import JOURNAL_NAME, JOURNAL_NAMES
from holdfast.format.digests import digest
from holdfast.format.names import StepName
from holdfast.manager import CheckpointManager
from holdfast.numbers import check_seconds, check_whole
from holdfast.options import check_switches
from holdfast.process.latch import Latch, start_thread
from holdfast.process.terminal import inform
from holdfast.restore.records import Restoration
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import short_traceback

_LOOK_SECONDS: Final = 0.5
_REMOTE_LOOK_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0
_MOST_NAMED: Final = 10

_Key: TypeAlias = tuple[int, int]
"""The generation and the number of a step: a later save is greater."""


class Followed(msgspec.Struct, frozen=True):
    """A checkpoint of a run that is followed.

    Attributes:
        step: Its step.
        generation: The generation that saved it: a run that has gone back may save a step again.
        run: The URL of the run.
        directory: The path, or the URL, of the checkpoint.
        metrics: Its metrics.
        missed: The steps since the last one that were not given: with `every`, those that were removed before there was
            time for them; and one that an earlier start of this reader has begun, and not ended with.
        restored: The restore, if objects were given.
    """

    step: int
    generation: int
    run: str
    directory: str
    metrics: dict[str, float]
    missed: tuple[int, ...] = ()
    restored: Restoration | None = None


@short_traceback
def follow(
    run: str | os.PathLike[str] | Storage,
    *checkpoint: Checkpoint,
    every: bool = False,
    max_behind: int = 3,
    name: str | None = None,
    timeout_seconds: float | None = None,
    strict: bool = True,
    **objects: object,
) -> Follower:
    """Follows a run: gives the newest checkpoint each time, or with `every` each one, and waits for the next.

        for checkpoint in holdfast.follow("runs/gpt", model=model):
            log(checkpoint.step, evaluate(model))

    No checkpoint is removed while it is being read: a lease keeps it, which ends a minute after this process has. A
    disk that is full takes it all the same. A reader that may not write to the run follows without leases.

    No checkpoint is given twice, also after a restart of the job or of this program: a reader has a name, under which
    the run knows how far it has come. It is made of the program and its arguments, unless one is given.

    Args:
        run: The run's directory, which need not exist yet, a URL, or an open storage.
        checkpoint: A `Checkpoint` with the objects to restore, instead of `objects`.
        every: True for each checkpoint in order; False for the newest one only.
        max_behind: With `every`, how many checkpoints are kept for a slow reader besides the one that it reads.
            Others may be removed before they are read; the next one names them.
        name: The name of this reader: letters, digits, `-` and `_`; empty to begin with the newest one at each start.
        timeout_seconds: Ends the loop if no new checkpoint comes for so long; None to wait for ever.
        strict: False to restore what fits, as in `resumable`.
        **objects: Objects to restore before each checkpoint is given, by the names under which they were saved. They
            may be a part of what was saved.

    Returns:
        An iterator. Its `close` gives up the lease; so does the end of the program.

    Raises:
        UsageError: If an argument is wrong.
        MismatchError: In the loop, if a checkpoint does not fit the objects.
        StorageError: In the loop, if the storage fails.
    """
    check_switches(every=every, strict=strict)
    check_whole("max_behind", max_behind)
    if timeout_seconds is not None:
        check_seconds("timeout_seconds", timeout_seconds)
    kept = find_given(run, checkpoint, objects) if checkpoint or objects else None
    reader = _name_program() if name is None else name
    if not re.fullmatch(r"[0-9A-Za-z_-]{0,48}", reader):
        raise UsageError(f"name must be letters, digits, - and _, at most 48, got {name!r}")
    source = _Reader(open_storage(run), reader, every=every, max_behind=max_behind)
    return Follower(source, kept, timeout_seconds, strict=strict)


class Follower(Iterator[Followed]):
    """The checkpoints of a run that is followed; it belongs to one thread."""

    def __init__(
        self, reader: _Reader, checkpoint: Checkpoint | None, timeout_seconds: float | None, *, strict: bool
    ) -> None:
        """Stores its arguments."""
        self._reader, self._checkpoint, self._strict = reader, checkpoint, strict
        self._timeout_seconds = timeout_seconds
        self._end = weakref.finalize(self, reader.close)

    @short_traceback
    def __next__(self) -> Followed:
        reader, storage = self._reader, self._reader.storage
        reader.finish()
        end_at = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        while True:
            name = reader.take(end_at)
            if name is None:
                self.close()
                raise StopIteration
            try:
                metrics = dict(reader.run.step(name).manifest().metrics)
                restored = None if self._checkpoint is None else self._restore(name, self._checkpoint)
            except (NotFoundError, NoCheckpointError, DamageError) as error:
                reader.drop(name, "" if isinstance(error, NotFoundError) else error.message)
                continue
            directory = name.directory if storage.location is None else str(storage.location / name.directory)
            where = f"{storage.url}/{directory}" if storage.location is None else directory
            missed = reader.give(name)
            return Followed(name.step, name.generation, storage.url, where, metrics, missed, restored)

    def _restore(self, name: StepName, checkpoint: Checkpoint) -> Restoration:
        only = [*checkpoint.objects]
        with CheckpointManager(self._reader.storage, checkpoint, cluster="alone", reserve_bytes=0) as manager:
            manager.lineage.restored_by = "follow(...)"
            restored = manager.restore(name.step, only=only, strict=self._strict)
        if restored is None or restored.name != name:
            raise NotFoundError(f"{name} is no longer in the current lineage")
        return restored

    def close(self) -> None:
        """**Blocks** for a moment. Ends: the lease of the checkpoint that was being read is given up."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._reader.finish()
        self.close()


class _Reader:
    """One reader of a run, with the thread that renews its leases.

    Attributes:
        storage: The run's.
        run: The run.
    """

    def __init__(self, storage: Storage, name: str, *, every: bool, max_behind: int) -> None:
        self.storage, self.run = storage, StoredRun(storage)
        self._every, self._max_behind = every, max_behind
        self._look_seconds = _REMOTE_LOOK_SECONDS if storage.location is None else _LOOK_SECONDS
        # Guards all below, and the run, which the thread looks at, too.
        self._lock = threading.Lock()
        self._leases = _Leases(self.run, name or "reader")
        self._journey = _Journey(self._leases, name, every=every)
        self._current: StepName | None = None
        self._process = 0
        self._closing, self._ended = Latch(), Latch()

    def take(self, end_at: float | None) -> StepName | None:
        """**Blocks.** Waits for the next step and leases it; returns None at that time of the monotonic clock."""
        if not self._process:
            self._process = os.getpid()
            self._journey.begin()
            self._ended = start_thread(self._serve, "holdfast-follow")
            if self.run.look().newest is None:
                inform(f"{self.storage.url} has no checkpoint yet: waiting for one")
        while not self._closing.is_open:
            with self._lock:
                name = self._choose()
                if name is not None:
                    self._current, self._journey.taken = name, _key_of(name)
                    return name
            left_seconds = self._look_seconds if end_at is None else min(self._look_seconds, end_at - time.monotonic())
            if left_seconds <= 0 or self._closing.wait(left_seconds):
                break
        return None

    def give(self, name: StepName) -> tuple[int, ...]:
        """**Blocks.** Called when a step is about to be given; returns those before it that were not, and reports them.

        From now on it is not given again, also after a crash.
        """
        with self._lock:
            steps = self._journey.give(_key_of(name))
        if steps:
            few = ", ".join(map(str, steps[:_MOST_NAMED])) + (", ..." if len(steps) > _MOST_NAMED else "")
            inform(f"not read before step {name.step} of {self.storage.url}: {len(steps)} ({few})")
        return steps

    def finish(self) -> None:
        """**Blocks.** Called when the step that was given last is not read any more."""
        with self._lock:
            if self._current is not None:
                self._journey.note(ReaderPlace(*_key_of(self._current), is_done=True))
                self._leases.release([self._current])
                self._current = None

    def drop(self, name: StepName, problem: str) -> None:
        """**Blocks.** Called when a step was taken, and cannot be read, for a reason that is to be reported if any."""
        if problem:
            inform(f"step {name.step} of {self.storage.url} cannot be read: {problem}")
        with self._lock:
            self._journey.known.add(_key_of(name))
            self._leases.release([name])
            self._current = None

    def close(self) -> None:
        """**Blocks** for a moment. Ends the thread, and gives up the leases."""
        if self._process != os.getpid():
            return  # It was not begun, or in the process that this one was forked from.
        self._closing.open()
        self._ended.wait(_END_SECONDS)
        with self._lock:
            self._leases.release([*self._leases.held])

    def _choose(self) -> StepName | None:
        if self._every:
            self._look()
            return min((name for name in self._leases.held if name != self._current), key=_key_of, default=None)
        newest = self.run.look().newest
        is_new = newest is not None and _key_of(newest) > self._journey.taken
        return newest if newest is not None and is_new and self._leases.lease(newest) else None

    def _look(self) -> None:
        """Leases the next steps, and gives up those that no longer count."""
        ahead = [name for name in self.run.look().living if _key_of(name) > self._journey.taken]
        self._journey.known.update(map(_key_of, ahead))
        held = self._leases.held
        self._leases.release([name for name in held if name not in ahead and name != self._current])
        for name in ahead:
            if len(held) > self._max_behind:  # With the one that is being read, or comes next.
                break
            if name not in held:
                self._leases.lease(name)

    def _serve(self) -> None:
        """The main function of the thread: renews the leases, and takes those of new steps if each is wanted."""
        renewed_at = time.monotonic()
        while not self._closing.wait(self._look_seconds if self._every else RENEWAL_SECONDS):
            with self._lock, suppress(HoldfastError):  # The next look, or the reader itself, meets with it again.
                if time.monotonic() - renewed_at >= RENEWAL_SECONDS - 1:
                    renewed_at = time.monotonic()
                    self._leases.renew()
                if self._every and not self._closing.is_open:
                    self._look()


class _Leases:
    """The leases of one reader. Each method **blocks**.

    Attributes:
        run: The run.
        held: The leases by step.
        may_write: False once it is known that this process may not write to the run: then nothing is leased.
    """

    def __init__(self, run: StoredRun, name: str) -> None:
        self.run, self.held = run, dict[StepName, Hold]()
        self.may_write = True
        # Two processes of one name have leases of their own.
        self._reader = f"{name}-{os.urandom(4).hex()}"

    def lease(self, name: StepName) -> bool:
        """Leases a step; returns False if it is gone."""
        hold, storage = Hold(name, self._reader, int(time.time())), self.run.storage
        if self.may_write:
            try:
                write_hold(storage, hold)
            except StorageError as error:
                self.may_write = False
                inform(f"{storage.url} is followed without leases: {error.message}")
        if self.may_write and not wait_staying(self.run, name):
            with suppress(HoldfastError):
                storage.delete([hold.path])
            return False
        self.held[name] = hold
        return True

    def release(self, names: Sequence[StepName]) -> None:
        """Gives up leases; what cannot be removed ends by itself."""
        holds = [hold for name in names if (hold := self.held.pop(name, None)) is not None]
        if self.may_write and holds:
            with suppress(HoldfastError):
                self.run.storage.delete([hold.path for hold in holds])

    def renew(self) -> None:
        """Renews all."""
        for name, hold in list(self.held.items()):
            renewed = msgspec.structs.replace(hold, renewed_at_unix_seconds=int(time.time()))
            if self.may_write and renewed != hold:
                with suppress(HoldfastError):
                    write_hold(self.run.storage, renewed)
                    self.held[name] = renewed
                    self.run.storage.delete([hold.path])


class _Journey:
    """The steps that one reader was given, and those that it was not.

    Attributes:
        known: Committed steps that may be missed.
        taken: The last step that was taken, to be given.
    """

    def __init__(self, leases: _Leases, name: str, *, every: bool) -> None:
        self.known: set[_Key] = set()
        self.taken = self._given = (0, 0)
        self._leases, self._name, self._every = leases, name, every
        self._journal = _Journal(leases.run.storage)
        # The records on the storage: the last step that was ended with, and those that were given since.
        self._places: list[ReaderPlace] = []
        self._unfinished: tuple[int, ...] = ()

    def begin(self) -> None:
        """**Blocks.** Finds the place of an earlier start, which may have died before it could name what it missed."""
        if self._name and (places := read_places(self._leases.run.storage, self._name)):
            self._places, self.taken = places, _key_of(places[-1])
            ended = max((_key_of(place) for place in places if place.is_done), default=(0, 0))
            begun = [place for place in places if _key_of(place) > ended]
            self._unfinished = tuple(place.step for place in begun)
            # Without an end, from the first that was given: what came before it was not missed.
            self._given = ended if ended > (0, 0) or not begun else _key_of(begun[0])

    def give(self, key: _Key) -> tuple[int, ...]:
        """**Blocks.** Records that a step is given; returns the steps before it that were not."""
        if self._every:
            self.known.update(self._journal.read())
        # What was committed before the first step that is given was not missed.
        missed = {step for one in self.known if (0, 0) < self._given < one < key for step in one[1:]}
        self.note(ReaderPlace(*key))
        steps = tuple(sorted(missed.union(self._unfinished)))
        self.known = {one for one in self.known if one > key}
        self._given, self._unfinished = key, ()
        return steps

    def note(self, place: ReaderPlace) -> None:
        """**Blocks.** Records a place, for the next start; the older ones go once a step was ended with."""
        if not (self._name and self._leases.may_write):
            return
        storage, before = self._leases.run.storage, self._places
        with suppress(HoldfastError):
            write_name(storage, place.path(self._name))
            storage.sync_directory(HOLDS_DIRECTORY)
            self._places = [*before, place]
            if place.is_done:
                self._places = [place]
                storage.delete([one.path(self._name) for one in before if one != place])


class _Mark(NamedTuple):
    """A place in a file."""

    inode: int
    offset_bytes: int


class _Journal:
    """The committed steps in a run's journal of events on a disk, each once; none elsewhere."""

    def __init__(self, storage: Storage) -> None:
        self._location = storage.location
        self._mark: _Mark | None = None

    def read(self) -> list[_Key]:
        """**Blocks.** Returns what was committed since the last call."""
        found: list[_Key] = []
        if self._location is None:
            return found
        known = self._mark
        for name in JOURNAL_NAMES:
            with suppress(OSError), (self._location / name).open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if known is not None and inode == known.inode:
                    file.seek(known.offset_bytes)
                elif known is not None and name != JOURNAL_NAME:
                    continue  # An older one, read before.
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                found += filter(None, map(_read_committed, whole.splitlines()))
                self._mark = _Mark(inode, file.tell() - len(data) + len(whole))
        return found


def _read_committed(line: bytes) -> _Key | None:
    if b'"committed"' not in line:
        return None
    with suppress(ValueError, KeyError, TypeError):
        event: Any = json.loads(line)
        if event["kind"] == "committed":
            return int(event["generation"]), int(event["step"])
    return None


def _key_of(name: StepName | ReaderPlace) -> _Key:
    return name.generation, name.step


def _name_program() -> str:
    """Returns a name for this program and its arguments; empty if it is none, as at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return ""
    words = "\0".join([os.path.realpath(path), *sys.argv[1:]])
    return make_reader_name(Path(path).stem, words)


def make_reader_name(stem: str, words: str) -> str:
    """**Pure.** Returns a name of a reader that begins like its program, and differs if its words do."""
    legible = "".join(character if character.isascii() and character.isalnum() else "-" for character in stem)
    return f"{legible[:20]}-{digest(words.encode(errors='surrogateescape'))[:8]}"
