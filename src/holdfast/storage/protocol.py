"""What holdfast asks of a place where bytes lie.

A path is relative to the storage's root, has `/` between its parts, and no part is empty, `.` or `..`. Every
method raises `StorageError`, or one of its kinds, when the place fails, and `UsageError` for a path that is not of
that form. Methods are thread-safe unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One thing that lies in a directory.

    Attributes:
        name: Its last part only.
        is_directory: True for a real directory; False for files and for links of any kind.
        size_bytes: The size of a file; 0 for directories.
    """

    name: str
    is_directory: bool
    size_bytes: int


class FileWriter(Protocol):
    """One new file of known size, written in pieces in any order."""

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        """**Thread-safe.** Writes one piece. Pieces do not overlap and together cover the file.

        It is fast when offset, length and memory address are multiples of 4096; any are allowed. A piece may run over
        the file's size, by less than 4096 bytes: what is over is padding, and is not part of the finished file.
        """

    def finish(self) -> None:
        """**Blocks.** Makes the bytes last (fsync), and closes. The name lasts after `sync_directory`.

        Once a write or this has failed, the bytes' fate is unknown: every later call raises the same error.

        Raises:
            UsageError: If the pieces do not cover the file yet, or a write has not returned.
        """

    def abandon(self) -> None:
        """Closes without making anything last; harmless after `finish`. The file may stay, as debris."""


class FileReader(Protocol):
    """One file, read in pieces by any number of threads."""

    size_bytes: int

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** Fills `into` from the file.

        Raises:
            DamageError: If the file ends before `into` is full.
        """

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** Fills many places of memory, which lie one behind the other in the file.

        Args:
            offset_bytes: Where the first of them begins in the file.
            parts: Contiguous, of format `B`; the memory of each is its own.

        Returns:
            The digest of what each holds now (see `holdfast.format.digests.digest`), taken while the processor's cache
            has it.

        Raises:
            DamageError: If the file ends before all are full.
        """

    def close(self) -> None:
        """Gives the file back; harmless twice."""


@runtime_checkable
class Storage(Protocol):
    """A tree of files with a create-only publish."""

    @property
    def url(self) -> str:
        """Where it is, as a person would write it."""

    def make_directory(self, path: str) -> None:
        """Makes a directory, and those above it, so that they last. One that is there already is fine."""

    def open_writer(self, path: str, size_bytes: int) -> FileWriter:
        """Begins a new file.

        Raises:
            StorageError: If something lies at that path already.
            StorageFullError: If there is plainly no room for it.
        """

    def write(self, path: str, data: bytes) -> None:
        """**Blocks.** Writes a whole new small file and makes its bytes last. The name lasts after `sync_directory`."""

    def sync_directory(self, path: str) -> None:
        """**Blocks.** Makes the names in a directory last; `""` is the root."""

    def publish(self, path: str, data: bytes) -> bool:
        """**Blocks.** Makes a whole small file appear at once and last, unless something lies there already.

        Whoever reads the path sees nothing or all of it, also after a crash at any point. `data` should carry a token
        that nobody else writes: after a lost reply, equal contents may be all that tells whose it is. When this raises,
        the file may or may not be there, now or later.

        Returns:
            True if this call made it, False if something lay there before, which then lasts as well.
        """

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Reads a whole small file.

        Raises:
            NotFoundError: If nothing lies there.
            DamageError: If it is larger than the limit, or not a plain file.
        """

    def open_reader(self, path: str) -> FileReader:
        """Opens a file for reading; a link is not followed.

        Raises:
            NotFoundError: If nothing lies there.
            DamageError: If it is not a plain file.
        """

    def list(self, path: str) -> list[Entry]:
        """What lies directly in a directory, in order of name; nothing if there is no such directory."""

    def remove(self, path: str) -> None:
        """Removes one file or link. One that is not there is fine."""

    def remove_directory(self, path: str) -> bool:
        """Removes a directory if it is empty.

        Returns:
            True if it is gone now, False if something still lies in it.
        """

    def set_aside(self, path: str) -> str:
        """Moves a directory at once to a name where nobody looks for it, so that a late writer finds its way gone.

        Returns:
            The path where it lies now, which begins with `.trash-`. Where the place cannot do that, `path` itself.
        """


class Spare(Protocol):
    """At most one file that is no longer wanted, and into whose room on the disk the next large one is written.

    It lies in the storage's root under a name of its own, and holds nothing that anybody may rely on. It is written
    over only where nobody else can notice; if that cannot be made sure of, it is removed. It is never the reason why
    there is no room: it is removed before a storage says so.
    """

    def try_keep(self, path: str, limit_bytes: int) -> bool:
        """Makes a whole file that no longer counts the spare, if it is of more use than the one that is there.

        Nobody may be writing it any more, and what vouched for it must be gone for good.

        Args:
            path: The file.
            limit_bytes: A larger one is not kept.

        Returns:
            True if it has gone from its path. If False, it lies there as before, and may be removed.
        """

    def remove(self, beyond_bytes: int = -1) -> bool:
        """Removes the spare, if it is larger than that.

        Returns:
            True if it is gone now; False if there was none to be removed.
        """


@runtime_checkable
class SparingStorage(Storage, Protocol):
    """A storage that can do that. Most cannot."""

    @property
    def spare(self) -> Spare:
        """The spare, whether there is one or not."""
