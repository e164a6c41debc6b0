"""Files and directories of this machine: opened without following links, allocated, synced, and published."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.storage.checks import temporary_name

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_directory(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """Opens the directory at `parts` below `root` for the block. `OSError` is not handled.

    The root may be reached by links: the user named it. Below it each step starts from the previous directory, and no
    link is followed, so a writer of a checkpoint cannot lead holdfast out of it. A link in the way raises
    `NotADirectoryError`.
    """
    descriptor = os.open(root, _DIRECTORY)
    try:
        for part in parts:
            # Closed once it is no longer this one's: Ctrl-C in between must not let it be closed twice, when the number
            # may be another file's.
            try:
                above, descriptor = descriptor, os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                # Which of the two a link gives depends on the system.
                if error.errno == errno.ELOOP:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part) from error
                raise
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def sync_to_disk(descriptor: int) -> None:
    """**Blocks.** Makes a file's bytes, or a directory's names, survive a power cut. `OSError` is not handled."""
    if sys.platform == "darwin":
        # fsync leaves the bytes in the drive's own cache there. Some file systems know only fsync.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def write_all(descriptor: int, data: memoryview, offset_bytes: int) -> None:
    """**Blocks.** Writes all of `data`, with as many calls as needed. `OSError` is not handled.

    A signal does not cut it short: Python calls again after EINTR.
    """
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset_bytes)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]
        offset_bytes += written


_ALLOCATE_TRIES: Final = 3
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, independent of the file system's own."""

NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""The error codes of a file system that lacks a call, or a kind of access."""


def preallocate(descriptor: int, size_bytes: int) -> None:
    """Sets a file's size, and allocates space on the disk if the file system can. `OSError` is not handled.

    A file that has space already, and at most that size, keeps it.

    Measured on ext4 (8 MiB direct writes from two threads, fsync counted, medians): with fallocate 2.1 GB/s; with only
    the size, or without preparation, 2.0; with space but no size, 1.9. Converting unwritten extents to written ones
    costs nothing visible at that size of writes, and allocating 768 MiB takes 2 ms. The reason is that a full disk is
    detected here rather than after minutes of writing, and that a write within the file's size shares the inode's lock
    while one that makes the file grow does not.

    posix_fallocate is not used: if the file system cannot allocate, the C library writes into each block instead. Some
    file systems start over after a signal, and a profiler's timer would never let them end: so it is tried a few times.
    """
    status = os.fstatvfs(descriptor)
    # Asked first, since the call would take all the room there is from others before it fails. Some network file
    # systems say zero for everything.
    own_bytes = os.fstat(descriptor).st_blocks * _BLOCK_BYTES
    if status.f_blocks and status.f_bfree * status.f_frsize + own_bytes < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        for _ in range(_ALLOCATE_TRIES):
            if fallocate(descriptor, 0, 0, size_bytes) == 0:
                return
            if (code := ctypes.get_errno()) in NOT_SUPPORTED:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size_bytes)


def remove_entry(directory: int, name: str) -> bool:
    """Removes a file, a link or an empty directory from an open directory. `OSError` is not handled.

    Returns:
        True if the name no longer exists, False if it is a directory with something in it.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except (IsADirectoryError, PermissionError) as error:  # POSIX allows either for a directory.
        try:
            os.rmdir(name, dir_fd=directory)
        except NotADirectoryError:
            raise error from None
        except OSError as refusal:
            if refusal.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
    return True


_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_RENAME_NOREPLACE: Final = 1


class CannotPublishError(OSError):
    """The file system has no way to give a file a name only if that name is free."""


def publish_file(directory: int, name: str, data: bytes) -> bool:
    """**Blocks.** Makes a file appear in an open directory, unless the name exists. `OSError` is not handled.

    The result of a crash, by the step it comes after: the temporary file created, written or synced: that file, whole
    or not, under a name that no reader uses. The name given: the whole file, under both names; until the directory has
    been synced a power cut may remove the name, and no caller knows it yet. The temporary name removed: the same under
    one name. The directory synced: the file, for good.

    Returns:
        True if this call created it, False if it existed before, and is durable then as well: a caller that asks again
            after a failure, and finds its own file, may rely on it.
    """
    temporary = temporary_name(name)
    descriptor = os.open(temporary, NEW_FILE, 0o666, dir_fd=directory)
    try:
        write_all(descriptor, memoryview(data), 0)
        sync_to_disk(descriptor)
        has_appeared = _give_name(directory, temporary, name, descriptor, data)
    finally:
        os.close(descriptor)
        # It does not exist any more if it was renamed. If it cannot be removed, the publication is still valid.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
    try:
        sync_to_disk(directory)
    except OSError:
        # Whether the name lasts is not known, and no later fsync could tell. It is taken back, so that what is seen
        # agrees with the error that the caller gets: a name that stayed would be counted as kept, and older files that
        # do last would be removed on its account. After a power cut it may be there all the same; it is whole then.
        if has_appeared:
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
        raise
    return has_appeared


def _give_name(directory: int, temporary: str, name: str, descriptor: int, data: bytes) -> bool:
    """Gives the temporary file its name, unless that exists; returns True if it has it now."""
    try:
        try:
            os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _rename_without_replacing(directory, temporary, name)
    except FileExistsError:
        # A file server whose first answer was lost says this of our own link when it is asked again.
        return _is_same_file(directory, name, descriptor)
    except CannotPublishError:
        raise
    except OSError:
        # The answer may be wrong: over a network the name may have been given and the reply lost.
        if not _is_same_file(directory, name, descriptor, data):
            raise
    return True


def _rename_without_replacing(directory: int, temporary: str, name: str) -> None:
    """For file systems without hard links. `OSError` is not handled."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        old, new = os.fsencode(temporary), os.fsencode(name)
        if renameat2(directory, old, directory, new, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code in _NO_LINKS:
        raise CannotPublishError(code, os.strerror(code))
    raise OSError(code, os.strerror(code))


def _is_same_file(directory: int, name: str, descriptor: int, data: bytes | None = None) -> bool:
    """Returns True if a name refers to the open file.

    If file systems do not give a file a stable number, equal contents decide if `data` is given: published data
    contains a token that no other process writes.
    """
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False
    try:
        status = os.fstat(found)
        if os.path.samestat(status, os.fstat(descriptor)):
            return True
        if data is None or not stat.S_ISREG(status.st_mode) or status.st_size != len(data):
            return False
        return os.pread(found, len(data) + 1, 0) == data
    except OSError:
        return False
    finally:
        os.close(found)
