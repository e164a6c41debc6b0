"""A simulated disk with the promises of POSIX: what was not synced may be lost in a power cut, or be there in part.

A storage makes the same calls of it, in the same order, as `LocalStorage` makes of a real one; each is a scheduling
point.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.errors import DamageError, NotFoundError, StorageError
from holdfast.format.digests import digest_each
from holdfast.storage import Entry, Traits
from holdfast.storage.checks import flat, kept_bytes, missing_error, split_directory, too_large_error
from holdfast.storage.memory import MemoryReader
from simulation.scheduler import Process, Scheduler

_T = TypeVar("_T")


@dataclass(eq=False)
class File:
    """A file: its bytes, and those that a power cut leaves."""

    data: bytearray = field(default_factory=bytearray)
    lasting: bytes | None = None


@dataclass(eq=False)
class Directory:
    """A directory: its names, those that last, and what was done to its names since."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    lasting: dict[str, File | Directory] = field(default_factory=dict)
    journal: list[tuple[str, File | Directory | None, object]] = field(default_factory=list)

    def set(self, name: str, to: File | Directory | None, change: object = None) -> None:
        """Gives a name, or removes it; names with the same `change` last together."""
        if to is None:
            del self.names[name]
        else:
            self.names[name] = to
        self.journal.append((name, to, change))

    def sync(self) -> None:
        """Makes the names last."""
        self.lasting = dict(self.names)
        self.journal.clear()


@dataclass(eq=False)
class Disk:
    """The disk.

    Attributes:
        scheduler: Who is served next.
        errors: How often a call fails, from 0 to 1: nothing of it is done then, or all.
        wrong: How often a read is answered with wrong bytes.
        changed: As of `Bucket`.
    """

    scheduler: Scheduler
    errors: float
    wrong: float
    changed: Callable[[str, bool], object] = lambda path, is_made: None
    root: Directory = field(default_factory=Directory)

    def open(self, process: Process | None = None) -> DiskStorage:
        """Returns the storage of a process; see `Bucket.open`."""
        return DiskStorage(self, process)

    def happen(self) -> None:
        """Does nothing: what was called is done, or never will be."""

    def crash(self) -> None:
        """A power cut: of each change that was not synced, all, nothing or a part remains."""
        self.scheduler.note("power cut")
        self._recover(self.root, {}, set())

    def _recover(self, directory: Directory, lasts: dict[object, bool], seen: set[int]) -> None:
        dice = self.scheduler.dice
        kept = dict(directory.lasting)
        is_over: set[str] = set()
        for name, to, change in directory.journal:
            # Of one name, the later change does not last without the one before it.
            if not lasts.setdefault(change or object(), dice.random() < 0.5) or name in is_over:
                if change is None:
                    is_over.add(name)
            elif to is None:
                kept.pop(name, None)
            else:
                kept[name] = to
        directory.names = kept
        directory.sync()
        for one in kept.values():
            if isinstance(one, Directory):
                self._recover(one, lasts, seen)
            elif id(one) not in seen:
                seen.add(id(one))
                self._recover_file(one)

    def _recover_file(self, file: File) -> None:
        dice = self.scheduler.dice
        if file.lasting is None:
            size = len(file.data)
            match dice.randrange(4):
                case 0:
                    file.data = bytearray()
                case 1:
                    file.data = bytearray(size)
                case 2:
                    at = dice.randrange(size + 1)
                    file.data = file.data[:at] + bytearray(size - at)
                case _:
                    pass
            file.lasting = bytes(file.data)
        else:
            file.data = bytearray(file.lasting)


class DiskStorage:
    """A directory on the disk; see `Storage`. Two machines have mounted it, so nothing is locked."""

    traits = Traits(has_directories=True, is_shared=True)
    location = None
    url = "/simulated"

    def __init__(self, disk: Disk, process: Process | None) -> None:
        self._disk, self._process = disk, process

    def make_directory(self, path: str) -> None:
        above = self._disk.root
        for part in split_directory(path):
            self._call("mkdir", path, lambda above=above, part=part: _make(above, part))  # type: ignore[misc]
            self._call("sync above", path, above.sync)
            found = above.names.get(part)
            if not isinstance(found, Directory):
                raise NotFoundError(f"{path} is gone", path=path)
            above = found

    def create(self, path: str, size_bytes: int) -> DiskWriter:
        self.make_directory(path.rpartition("/")[0])
        file = self._call("create", path, lambda: self._add(path, File(bytearray(size_bytes))))
        return DiskWriter(self, path, file)

    def write(self, path: str, data: bytes) -> None:
        file = self._call("create", path, lambda: self._add(path, File()))
        try:
            self.sync_file(path, file, data)
        except StorageError:
            self._drop(path)
            raise

    def sync_file(self, path: str, file: File, data: bytes | None = None) -> None:
        """Writes all of a file, if `data` is given, and syncs it; a sync that failed says nothing of its bytes."""
        if data is not None:
            self._call("write", path, lambda: file.data.__setitem__(slice(None), data))

        def sync() -> None:
            file.lasting = bytes(file.data)

        self._call("fsync", path, sync)

    def sync_directory(self, path: str) -> None:
        self._call("fsync", path or ".", lambda: self._find_directory(path).sync())

    def publish(self, path: str, data: bytes) -> bool:
        parent, slash, name = path.rpartition("/")
        temporary = f"{parent}{slash}.{name}.{self._disk.scheduler.now:016x}.tmp"
        file = self._call("create", temporary, lambda: self._add(temporary, File()))

        def link() -> bool:
            directory = self._find_directory(parent)
            if name in directory.names:
                return False
            self._add(path, file)
            return True

        try:
            self.sync_file(temporary, file, data)
            # A reply that is lost does no harm: the file tells whether it is its own.
            is_ours = self._call("link", path, link, asks_again=True)
        except StorageError:
            self._drop(temporary)
            raise
        self._drop(temporary)
        try:
            self._call("fsync", parent or ".", lambda: self._find_directory(parent).sync())
        except StorageError:
            if is_ours:
                self._drop(path)
            raise
        return is_ours

    def read(self, path: str, limit_bytes: int) -> bytes:
        data = self._call("read", path, lambda: bytes(self._find(path).data))
        if len(data) > limit_bytes:
            raise too_large_error(path, path, len(data), limit_bytes)
        return data

    def open_reader(self, path: str) -> DiskReader:
        return DiskReader(self, self._call("open", path, lambda: self._find(path)), path)

    def list(self, path: str, *, deep: bool = False) -> builtins.list[Entry]:
        parts = split_directory(path)
        names = self._call("list", path or ".", lambda: self._list_names(path))
        scheduler = self._disk.scheduler
        if path == "generations" and self._process is not None:
            scheduler.task.looked_at[self._disk] = scheduler.now
        if self._process is not None and names and scheduler.dice.random() < 0.2:
            # What comes or goes meanwhile may be seen or not.
            later = self._call("list on", path or ".", lambda: self._list_names(path))
            changed = [name for name in {**names, **later} if (name in names) != (name in later)]
            names = {name: one for name, one in {**names, **later}.items() if name not in changed or _tosses(scheduler)}
        found: builtins.list[Entry] = []
        for name, one in sorted(names.items()):
            if isinstance(one, File):
                found.append(Entry(name, False, len(one.data)))
            elif deep:
                inner = self.list("/".join((*parts, name)), deep=True)
                found += [Entry(f"{name}/{below.name}", False, below.size_bytes) for below in inner]
            else:
                found.append(Entry(name, True, 0))
        return found

    def delete(self, paths: Iterable[str]) -> bool:
        is_gone = True
        for path in sorted(paths, key=lambda path: (-path.count("/"), path)):
            is_gone &= self._call("unlink", path, lambda path=path: self._remove(path))  # type: ignore[misc]
        return is_gone

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        self.delete(paths)

    def retire(self, directory: str) -> str:
        aside = f".trash-{self._disk.scheduler.now:016x}-{directory}"
        root = self._disk.root

        def rename() -> None:
            moved, change = self._find_directory(directory), object()
            root.set(directory, None, change)
            root.set(aside, moved, change)
            for name in sorted(moved.names, reverse=True):  # The manifest first: all go at once.
                self._disk.changed(f"{directory}/{name}", False)

        self._call("rename", directory, rename)
        self.sync_directory("")
        return aside

    def reads_wrong(self, path: str) -> bool:
        """Returns True if a read is to be answered with wrong bytes."""
        scheduler, process = self._disk.scheduler, self._process
        if process is None or process.is_calm or scheduler.dice.random() >= self._disk.wrong:
            return False
        scheduler.note(f"wrong bytes of {path}")
        process.has_read_wrong_bytes = True
        return True

    def _call(self, kind: str, path: str, act: Callable[[], _T], *, asks_again: bool = False) -> _T:
        process, scheduler = self._process, self._disk.scheduler
        if process is None:
            return act()
        scheduler.pause(f"{kind} {path}")
        if process.is_calm or scheduler.dice.random() >= self._disk.errors:
            return act()
        done = scheduler.dice.random() < 0.3 and kind != "fsync"
        scheduler.note(f"{'lost reply' if done else 'error'}: {kind} {path}")
        if done:
            result = act()
            if asks_again:
                return result
        raise StorageError(f"cannot {kind} {path}: EIO", path=path)

    def _drop(self, path: str) -> None:
        """Removes a file that the call has made, as well as it can."""
        with suppress(StorageError):
            self._call("unlink", path, lambda: self._remove(path))

    def _remove(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        try:
            directory = self._find_directory(parent)
        except NotFoundError:
            return True
        found = directory.names.get(name)
        if isinstance(found, Directory) and found.names:
            return False
        if found is not None:
            directory.set(name, None)
            if isinstance(found, File):
                self._disk.changed(path, False)
        return True

    def _add(self, path: str, file: File) -> File:
        parent, _, name = path.rpartition("/")
        directory = self._find_directory(parent)
        if name in directory.names:
            raise StorageError(f"{path} exists", path=path)
        directory.set(name, file)
        self._disk.changed(path, True)
        return file

    def _list_names(self, path: str) -> dict[str, File | Directory]:
        try:
            return dict(self._find_directory(path).names)
        except NotFoundError:
            return {}

    def _find_directory(self, path: str) -> Directory:
        found: File | Directory | None = self._disk.root
        for part in split_directory(path):
            found = found.names.get(part) if isinstance(found, Directory) else None
        if not isinstance(found, Directory):
            raise NotFoundError(f"{path} is no directory", path=path)
        return found

    def _find(self, path: str) -> File:
        parent, _, name = path.rpartition("/")
        found = self._find_directory(parent).names.get(name)
        if found is None:
            raise NotFoundError(f"{path} does not exist", path=path)
        if isinstance(found, Directory):
            raise DamageError(f"{path} is a directory", path=path)
        return found


class DiskWriter:
    """One new file; see `FileWriter`."""

    def __init__(self, storage: DiskStorage, path: str, file: File) -> None:
        self._storage, self._path, self._file = storage, path, file
        self._written_bytes = 0

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> builtins.list[str]:
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, len(self._file.data), self._path)
        self._file.data[offset_bytes : offset_bytes + kept] = piece[:kept]
        self._written_bytes += kept
        return digest_each(parts)

    def finish(self) -> None:
        if self._written_bytes != len(self._file.data):
            raise missing_error(self._path, self._written_bytes, len(self._file.data))
        self._storage.sync_file(self._path, self._file)

    def abandon(self) -> None:
        """Closes it."""


class DiskReader(MemoryReader):
    """One file; see `FileReader`."""

    def __init__(self, storage: DiskStorage, file: File, path: str) -> None:
        super().__init__(file.data, path)
        self._storage, self._path = storage, path

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> builtins.list[str]:
        for part in parts:
            self.read_into(offset_bytes, part)
            offset_bytes += part.nbytes
            if part.nbytes and self._storage.reads_wrong(self._path):
                part[0] ^= 1
        return digest_each(parts)


def _make(above: Directory, name: str) -> None:
    if name not in above.names:
        above.set(name, Directory())


def _tosses(scheduler: Scheduler) -> bool:
    return scheduler.dice.random() < 0.5
