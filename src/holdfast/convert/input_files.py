"""Files of other programs, as they are read: many may be needed at once, and few are kept open."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from holdfast.errors import FormatError
from holdfast.format.scalars import is_text
from holdfast.storage.checks import as_storage_errors

_OPEN_FILES: Final = 64
_COPY: Final = "A pipe or a device cannot be read back and forth: copy what comes out of it into a file."


class InputFile:
    """A file that is read piece by piece. It is open while it is read, and for as long as few others are."""

    def __init__(self, path: Path, pool: FilePool | None = None, *, follow_links: bool = True) -> None:
        """**Blocks.** Opens it.

        Raises:
            NotFoundError: If it is not there.
            FormatError: If it is no plain file.
            StorageError: If it cannot be read.
        """
        self.path = path
        self._pool = pool
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        self._descriptor = -1
        self._identity: tuple[int, int, int] | None = None
        self.size_bytes = 0
        self.fileno()

    def fileno(self) -> int:
        """**Blocks.** The file's descriptor, good until another file is read.

        Raises:
            FormatError: If it is no plain file, or another one lies there now.
            StorageError: If it cannot be opened.
        """
        if self._descriptor < 0:
            with as_storage_errors("read", "", self.path):
                self._descriptor = os.open(self.path, self._flags)
                status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                self.close()
                raise FormatError(f"{self.path} is no plain file", path=str(self.path), hint=_COPY)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if self._identity not in (None, identity):
                raise FormatError(f"{self.path} was changed while it was being read", path=str(self.path))
            self._identity = identity
            self.size_bytes = status.st_size
        if self._pool is not None:
            self._pool.use(self)
        return self._descriptor

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Blocks.** Fills memory from the file.

        Raises:
            FormatError: If the file ends before that.
            StorageError: If it cannot be read.
        """
        left = into
        with as_storage_errors("read", "", self.path):
            while left:
                count = os.preadv(self.fileno(), [left], offset_bytes)
                if not count:
                    raise FormatError(f"{self.path} ends at byte {offset_bytes}, too early", path=str(self.path))
                offset_bytes += count
                left = left[count:]

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """**Blocks.** Some bytes of the file; the caller makes sure that they are few.

        Raises:
            FormatError: If the file ends before that.
            StorageError: If it cannot be read.
        """
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes:
            raise FormatError(
                f"{self.path}: bytes {offset_bytes} to {offset_bytes + size_bytes} are asked for, of {self.size_bytes}",
                path=str(self.path),
            )
        data = bytearray(size_bytes)
        self.read_into(offset_bytes, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Closes the file, until it is read again; harmless twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FilePool:
    """All files of one import. It keeps few of them open: those that were used last."""

    def __init__(self) -> None:
        self._files: dict[Path, InputFile] = {}
        self._open: OrderedDict[Path, InputFile] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """The size of all its files together."""
        return sum(file.size_bytes for file in self._files.values())

    def find(self, path: Path, *, follow_links: bool) -> InputFile:
        """**Blocks.** The file at a path; as `InputFile`."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = InputFile(path, self, follow_links=follow_links)
        return file

    def use(self, file: InputFile) -> None:
        """Notes that a file is used, and closes the one that has not been for longest if there are too many."""
        self._open.pop(file.path, None)
        self._open[file.path] = file
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()

    def close(self) -> None:
        """Closes the files; harmless twice."""
        for file in self._files.values():
            file.close()


def is_plain_name(name: Any) -> bool:
    """**Pure.** Whether something is the name of a file, without a path to anywhere else."""
    return type(name) is str and name not in ("", ".", "..") and not {"/", "\0"} & set(name) and is_text(name)
