"""A directory of this machine, or one that is mounted on it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from holdfast.errors import DamageError, HoldfastError, StorageError, StorageFullError, UsageError
from holdfast.format.index import round_up
from holdfast.format.names import SPARE_NAME
from holdfast.storage.checks import (
    as_storage_errors,
    check_size,
    lost_bytes_as_damage,
    plain_path,
    split_directory,
    split_path,
    too_large_error,
    trash_name,
)
from holdfast.storage.local.direct import SMALLEST_DIRECT_BYTES, try_direct
from holdfast.storage.local.files import (
    NEW_FILE,
    CannotPublishError,
    open_directory,
    preallocate,
    publish_file,
    remove_entry,
    sync_to_disk,
    write_all,
)
from holdfast.storage.local.mounts import find_mount
from holdfast.storage.local.recycle import remove_spare, take_spare, try_keep
from holdfast.storage.local.streams import LocalReader, LocalWriter
from holdfast.storage.protocol import Entry, Traits

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Without O_NONBLOCK, opening a FIFO in place of a file would wait forever.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_BYTES: Final = 1 << 20
_without_direct_lock: Final = threading.Lock()
# Guarded by the lock above: the roots of which this process has found that they have no direct writes.
_without_direct: Final[set[str]] = set()
_SPARE_SHARE: Final = 2
"""How many times larger than the next file the spare may be."""
_NOT_PLAIN: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})


def _with_room(method: _Method) -> _Method:
    """Makes a method that finds the disk full release the spare's space, and try once more."""

    @wraps(method)
    def call(self: LocalStorage, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except StorageFullError:
            has_given = False
            with suppress(HoldfastError):
                has_given = remove_spare(self.location)
            if not has_given:
                raise
        return method(self, *args, **options)

    return cast(_Method, call)


class LocalStorage:
    """**Thread-safe.** A tree of files below one directory; see `Storage` for the contract of each method.

    The directory is created when something is first written into it. Links in it are never followed.

    Attributes:
        url: The directory's absolute path.
        traits: See `Storage`. The first storage of a directory in a process finds the hindrance.
    """

    def __init__(self, root: str | os.PathLike[str], *, direct: bool = True) -> None:
        """Reads and writes nothing yet. `direct`: large files bypass the page cache if they can."""
        text = os.fspath(root)
        if not text or "\0" in text:
            raise UsageError(f"{text!r} is not the name of a directory", hint="pass the path of a directory")
        self._root = Path(plain_path(text)).absolute()
        self.url = str(self._root)
        self._wants_direct = direct
        self.traits = Traits(has_directories=True, is_shared=True, keeps_space=True)
        # Guards the two fields below.
        self._lock = threading.Lock()
        self._root_lasts = False
        self._devices_without_direct: set[int] = set()

    def __repr__(self) -> str:
        return f"LocalStorage({self.url!r})"

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        """Passes the path to another process."""
        return LocalStorage, (self.url,)

    @property
    def location(self) -> Path:
        """The directory's absolute path."""
        return self._root

    @_with_room
    def make_directory(self, path: str) -> None:
        """**Blocks.** Creates a directory, and those above it, durably; see `Storage`."""
        parts = split_directory(path)
        # Once, before training begins; what is published says it, too.
        if not parts and (hint := find_mount(self._root).bucket_hint):
            raise StorageError(f"{self._root} is in a mounted bucket, and on no disk", path=path, hint=hint)
        with as_storage_errors("make the directory", path, self._root):
            self._make_root()
            for depth, part in enumerate(parts):
                with open_directory(self._root, parts[:depth]) as above:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=above)
                    # Also if it existed: the process that made it may have died before it was durable.
                    sync_to_disk(above)
            with open_directory(self._root, parts):
                pass

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        """**Blocks.** Begins a new file; see `Storage`. A crash leaves debris until something publishes a name for it.

        If there is a spare, a large file takes its space on the disk.
        """
        check_size(size_bytes, path)
        if len(parts := split_path(path)) > 1:
            self.make_directory("/".join(parts[:-1]))
        if size_bytes >= SMALLEST_DIRECT_BYTES and os.path.lexists(self._root / SPARE_NAME):
            # If it has less room than is needed, and the disk no more, it is gone by now: that may have been too little
            # only because it was there.
            with suppress(StorageFullError):
                return self._create(path, size_bytes, takes_spare=True)
        return self._create(path, size_bytes, takes_spare=False)

    @_with_room
    def _create(self, path: str, size_bytes: int, *, takes_spare: bool) -> LocalWriter:
        *parents, name = split_path(path)
        with (
            as_storage_errors("make", path, self._root, size_bytes),
            open_directory(self._make_root(), parents) as directory,
        ):
            descriptor = os.open(name, NEW_FILE, 0o666, dir_fd=directory)
            try:
                taken = take_spare(self._root, directory, name, descriptor, size_bytes) if takes_spare else None
                if taken is not None:
                    descriptor, empty = taken, descriptor
                    os.close(empty)
                if size_bytes:
                    preallocate(descriptor, round_up(size_bytes))
                is_direct = size_bytes >= SMALLEST_DIRECT_BYTES and self._try_direct(descriptor)
            except BaseException:
                self._undo(descriptor, directory, name)
                raise
        return LocalWriter(descriptor, path, self._root, size_bytes, is_direct)

    @_with_room
    def write(self, path: str, data: bytes) -> None:
        """**Blocks.** Writes a whole new small file durably; see `Storage`."""
        *parents, name = split_path(path)
        with (
            as_storage_errors("write", path, self._root, len(data)),
            open_directory(self._make_root(), parents) as directory,
        ):
            descriptor = os.open(name, NEW_FILE, 0o666, dir_fd=directory)
            try:
                write_all(descriptor, memoryview(data), 0)
                sync_to_disk(descriptor)
            except BaseException:
                self._undo(descriptor, directory, name)
                raise
            os.close(descriptor)

    def sync_directory(self, path: str) -> None:
        """**Blocks.** Makes the names in a directory durable; see `Storage`."""
        with as_storage_errors("sync the directory", path, self._root):
            with open_directory(self._root, split_directory(path)) as directory:
                sync_to_disk(directory)

    @_with_room
    def publish(self, path: str, data: bytes) -> bool:
        """**Blocks.** Makes a whole small file appear at once, durably; see `Storage` and `publish_file`."""
        *parents, name = split_path(path)
        with (
            as_storage_errors("publish", path, self._root, len(data)),
            open_directory(self._make_root(), parents) as directory,
        ):
            try:
                return publish_file(directory, name, data)
            except CannotPublishError as error:
                raise StorageError(
                    f"cannot publish {self._root / path}: its file system has neither hard links nor an atomic "
                    "rename without overwriting, so two jobs could each believe that the checkpoint is theirs",
                    path=path,
                    hint=find_mount(self._root).bucket_hint or "use another kind of file system",
                ) from error

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Reads a whole small file; see `Storage`."""
        with lost_bytes_as_damage(path), as_storage_errors("read", path, self._root):
            descriptor, size_bytes = self._open_plain(path)
            try:
                pieces: list[bytes] = []
                # One byte more than is allowed, so that a file that grows meanwhile is noticed.
                left_bytes = limit_bytes + 1 if size_bytes <= limit_bytes else 0
                while left_bytes and (piece := os.read(descriptor, min(left_bytes, _READ_BYTES))):
                    pieces.append(piece)
                    left_bytes -= len(piece)
            finally:
                os.close(descriptor)
        data = b"".join(pieces)
        if max(size_bytes, len(data)) > limit_bytes:
            raise too_large_error(str(self._root / path), path, max(size_bytes, len(data)), limit_bytes)
        return data

    def open_reader(self, path: str) -> LocalReader:
        """Opens a file for reading; see `Storage`."""
        descriptor = -1
        try:
            with as_storage_errors("read", path, self._root):
                descriptor, size_bytes = self._open_plain(path)
            return LocalReader(descriptor, path, self._root, size_bytes, direct=self._wants_direct)
        except BaseException:
            # Ctrl-C, say, while it looks how the file can be read.
            if descriptor >= 0:
                os.close(descriptor)
            raise

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """Returns the entries of a directory, in order of name; see `Storage`."""
        parts = split_directory(path)
        entries: list[Entry] = []
        with as_storage_errors("list", path, self._root), suppress(FileNotFoundError, NotADirectoryError):
            with open_directory(self._root, parts) as directory, os.scandir(directory) as found:
                for item in found:
                    # A long run has thousands of directories, and the system tells them from files without a look.
                    if item.is_dir(follow_symlinks=False):
                        if deep:
                            inner = self.list("/".join([*parts, item.name]), deep=True)
                            entries += [Entry(f"{item.name}/{one.name}", False, one.size_bytes) for one in inner]
                        else:
                            entries.append(Entry(item.name, True, 0))
                        continue
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # What vanishes while it is looked at was not there.
                    size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    entries.append(Entry(item.name, stat.S_ISDIR(status.st_mode), size_bytes))
        return sorted(entries, key=attrgetter("name"))

    def delete(self, paths: Iterable[str]) -> bool:
        """Removes files, links and empty directories; see `Storage`."""
        is_gone = True
        failures: list[StorageError] = []
        # The deepest first: then a directory is tried after what is in it.
        for *parents, name in sorted(map(split_path, paths), key=len, reverse=True):
            try:
                with as_storage_errors("remove", "/".join((*parents, name)), self._root), suppress(FileNotFoundError):
                    with open_directory(self._root, parents) as directory:
                        is_gone &= remove_entry(directory, name)
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return is_gone

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """**Blocks.** Removes files, or keeps one as the spare; see `Storage`."""
        limit_bytes = _SPARE_SHARE * next_bytes
        self.delete([path for path in paths if not (limit_bytes and try_keep(self._root, path, limit_bytes))])
        remove_spare(self._root, limit_bytes or -1)

    def retire(self, directory: str) -> str:
        """**Blocks.** Moves a directory at once to a `.trash-` name in the root; see `Storage`.

        After a crash it has the old name or the new one, and is whole.
        """
        *parents, name = split_path(directory)
        aside = trash_name(name)
        with as_storage_errors("set aside", directory, self._root):
            with open_directory(self._root, ()) as root, open_directory(self._root, parents) as above:
                if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                os.rename(name, aside, src_dir_fd=above, dst_dir_fd=root)
                # The new name first: in this order a directory moved between two others is never in neither.
                sync_to_disk(root)
                if parents:
                    sync_to_disk(above)
        return aside

    def _make_root(self) -> Path:
        """Creates the root if it is missing, durably, and returns it. A crash leaves empty directories."""
        with self._lock:
            if self._root_lasts:
                return self._root  # Even if it is gone: what was moved or unmounted is not made again.
            missing = []
            place = self._root
            while not place.is_dir():
                missing.append(place)
                place = place.parent
            for directory in reversed(missing):
                directory.mkdir(exist_ok=True)
                with open_directory(directory.parent, ()) as above:
                    sync_to_disk(above)
            if not missing:
                # Another process may have made it and died before it was made to last. Where we may not look into the
                # directory above, an administrator made it.
                with suppress(PermissionError), open_directory(self._root.parent, ()) as above:
                    sync_to_disk(above)
            self._root_lasts = True
        return self._root

    def _try_direct(self, descriptor: int) -> bool:
        if not self._wants_direct:
            return False
        device = os.fstat(descriptor).st_dev
        with self._lock:
            if device in self._devices_without_direct:
                return False
        if try_direct(descriptor):
            return True
        with self._lock:
            self._devices_without_direct.add(device)
        with _without_direct_lock:
            is_first = self.url not in _without_direct
            _without_direct.add(self.url)
        if is_first:
            text = (
                f"{self.url}: its file system does not support direct writes, so saves go through the page cache, "
                "which takes CPU time and memory from training"
            )
            self.traits = msgspec.structs.replace(self.traits, hindrance=text)
        return False

    def _open_plain(self, path: str) -> tuple[int, int]:
        """Returns a descriptor of a regular file, and the file's size. `OSError` is not handled."""
        *parents, name = split_path(path)
        descriptor = -1
        try:
            with open_directory(self._root, parents) as directory:
                descriptor = os.open(name, _READ, dir_fd=directory)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise self._not_plain(path)
            return descriptor, status.st_size
        except BaseException as error:
            # Ctrl-C too: a program that catches it may restore again and again.
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError) and error.errno in _NOT_PLAIN:
                raise self._not_plain(path) from error
            raise

    def _not_plain(self, path: str) -> DamageError:
        return DamageError(
            f"{self._root / path} is not a regular file, or is below something that is not a directory",
            path=path,
            hint="links and special files are not followed: put the file itself there",
        )

    @staticmethod
    def _undo(descriptor: int, directory: int, name: str) -> None:
        with suppress(OSError):
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
