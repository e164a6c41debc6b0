"""Recycles a removed file: a new one is written into its space on the disk.

If a disk gets its blocks only as they are written, and gives them back as files are removed, both take as long as the
writing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.format.index import round_up
from holdfast.format.names import SPARE_NAME
from holdfast.process import interrupt
from holdfast.storage.checks import as_storage_errors, split_path
from holdfast.storage.local.direct import SMALLEST_DIRECT_BYTES
from holdfast.storage.local.files import NEW_FILE, open_directory, sync_to_disk

# Without O_NONBLOCK a FIFO would block the opening, and so would a file on which another process has a lease.
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_OVERWRITING: Final = frozenset({0xEF53, 0x58465342})
"""The kinds of file systems that overwrite a file in place, by their magic numbers: ext2 to ext4, and XFS.

Copy-on-write file systems (Btrfs, ZFS, F2FS, bcachefs) gain nothing, and need space for both. Those in memory would
occupy the memory. Network file systems cannot tell whether another machine has the file open.
"""
_STATFS_BYTES: Final = 512


def try_keep(root_path: Path, path: str, limit_bytes: int) -> bool:
    """**Thread-safe.** Makes a whole file that no longer counts the spare, if it is more useful than the current one.

    A crash leaves it under its own name or as the spare. It is not kept if it is larger than the limit, if something
    already prevents its use, nor if less space is free on the disk than it takes: on a nearly full disk the rest
    belongs to others. Any number of processes may use the spare at the same time: the one that renames it has it, and
    the others find none.

    Returns:
        True if it has left its path. If False, it is there as before, and may be removed.
    """
    *parents, name = split_path(path)
    try:
        with open_directory(root_path, ()) as root, open_directory(root_path, parents) as directory:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
            if not is_plain or not SMALLEST_DIRECT_BYTES <= status.st_size <= limit_bytes:
                return False
            disk = os.fstatvfs(root)
            if not _can_be_used(root) or disk.f_bavail * disk.f_frsize < status.st_size:
                return False
            before = _look(root)
            if before is not None and stat.S_ISREG(before.st_mode) and before.st_size >= status.st_size:
                return False
            # If there is a smaller one, this removes it. It fails if a directory is in the way.
            os.rename(name, SPARE_NAME, src_dir_fd=directory, dst_dir_fd=root)
    except OSError:
        return False
    return True


def remove_spare(root_path: Path, beyond_bytes: int = -1) -> bool:
    """**Thread-safe.** Removes the spare, if it is larger than that; returns False if there was none to remove."""
    with as_storage_errors("remove", SPARE_NAME, root_path):
        try:
            with open_directory(root_path, ()) as root:
                status = _look(root)
                if status is None or stat.S_ISDIR(status.st_mode) or status.st_size <= beyond_bytes:
                    return False
                os.unlink(SPARE_NAME, dir_fd=root)
        except FileNotFoundError:
            return False  # Another process took it, or there is no root.
    return True


def take_spare(root: Path, directory: int, name: str, made: int, size_bytes: int) -> int | None:
    """Replaces a new empty file by the spare. `OSError` is not handled.

    Its bytes may be changed only if no other process sees them. A process that had the file open, or a link to it,
    before it was given up still has it: that is checked once it has its new name, so that no process can reach it any
    more through an older one. A spare that cannot be used is removed.

    The result of a crash, by the step it comes after: the file renamed: it, under the name of a new file that is not
    whole. The root synced: the same, and for good no other name by which it could be taken once more, when it may be
    needed again. Its size changed: the same.

    Returns:
        A descriptor of the file that now has the name, with bytes to overwrite or none; or None if that is the new one.
    """
    with open_directory(root, ()) as place:
        before = _look(place)
        if before is None or stat.S_ISDIR(before.st_mode):
            return None
        if not _is_alike(before, os.fstat(made)) or not _can_be_used(place):
            with suppress(OSError):
                os.unlink(SPARE_NAME, dir_fd=place)
            return None
        try:
            os.rename(SPARE_NAME, name, src_dir_fd=place, dst_dir_fd=directory)
        except OSError:
            return None  # Another process took it.
        sync_to_disk(place)
    taken = _open_unseen(directory, name, made)
    if taken is None:
        os.unlink(name, dir_fd=directory)
        return os.open(name, NEW_FILE, 0o666, dir_fd=directory)
    try:
        if os.fstat(taken).st_size > round_up(size_bytes):
            os.ftruncate(taken, round_up(size_bytes))
    except OSError:
        os.close(taken)
        raise
    return taken


def _look(root: int) -> os.stat_result | None:
    try:
        return os.stat(SPARE_NAME, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_alike(status: os.stat_result, new: os.stat_result) -> bool:
    """Returns True if a file has the owner and permissions of a new one."""
    # S_IFMT is a part of the mode: a link or a FIFO differs.
    return status.st_nlink == 1 and all(
        getattr(status, field) == getattr(new, field) for field in ("st_mode", "st_uid", "st_gid", "st_dev")
    )


def _open_unseen(directory: int, name: str, made: int) -> int | None:
    """Opens a file for writing if it is similar to another and no other process has it open or mapped; else None."""
    try:
        descriptor = os.open(name, _OPEN, dir_fd=directory)
    except OSError:
        return None
    try:
        if _is_alike(os.fstat(descriptor), os.fstat(made)) and _has_nobody_else(descriptor):
            # Back to what a new file has.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _has_nobody_else(descriptor: int) -> bool:
    """Returns True if this is the only open file of an inode, including mappings. `OSError` is not handled.

    The system grants a write lease only then. It is given back at once: a process that opens the file after this finds
    it by its new name, as one that is being written.
    """
    # If another process opens the file just now, the system sends a signal: by default SIGIO, which ends a process
    # that does not handle it. This one is ignored if it is not handled.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, interrupt.SIGNAL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _can_be_used(directory: int) -> bool:
    """Returns True if files of this file system are overwritten in place, and the system can tell which are open."""
    fstatfs = getattr(ctypes.CDLL(None, use_errno=True), "fstatfs", None)
    if fstatfs is None or not hasattr(fcntl, "F_SETLEASE") or not hasattr(fcntl, "F_SETSIG"):
        return False
    # The kind is the first field, as wide as a long wherever it is as Linux says; elsewhere it is none of ours.
    status = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    return fstatfs(ctypes.c_int(directory), status) == 0 and status[0] in _OVERWRITING
