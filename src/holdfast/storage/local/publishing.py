"""How a small file appears in a directory: whole or not at all, once, and for good."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from typing import Final

from holdfast.storage.local.descriptors import make_last, write_all
from holdfast.storage.paths import temporary_name

_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_RENAME_NOREPLACE: Final = 1


class CannotPublishError(OSError):
    """The file system has no way to give a file a name only if that name is free."""


def publish_file(directory: int, name: str, data: bytes) -> bool:
    """**Blocks.** Makes a file appear in an open directory, unless something lies there. `OSError` goes through.

    What a crash leaves behind, by the step it comes after: the temporary file made, written or synced: that file, whole
    or not, under a name that nobody reads. The name given: the whole file, under both names; until the directory has
    been synced a power cut may take the name back, and nobody has been told of it yet. The temporary name removed: the
    same under one name. The directory synced: the file, for good.

    Returns:
        True if this call made it, False if something lay there before, which then lasts as well: whoever asks again
        after a failure, and finds their own file, may rely on it.
    """
    temporary = temporary_name(name)
    descriptor = os.open(temporary, _NEW_FILE, 0o666, dir_fd=directory)
    try:
        write_all(descriptor, memoryview(data), 0)
        make_last(descriptor)
        has_appeared = _give_name(directory, temporary, name, descriptor, data)
    finally:
        os.close(descriptor)
        # It is there no longer if it was renamed. If it cannot be removed, what was published still stands.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
    try:
        make_last(directory)
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
    """Gives the temporary file its name, unless that is taken; True if it has it now."""
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
    """For file systems without hard links. `OSError` goes through."""
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
    """Whether what lies under a name is the open file.

    Where file systems do not give one file one number, equal contents settle it if `data` is given: what is published
    carries a token that nobody else writes.
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
