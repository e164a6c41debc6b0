"""The interface of a storage of bytes.

A path is relative to the storage's root, has `/` between its parts, and no part is empty, `.` or `..`. Every method
raises `StorageError`, or a subclass, when the storage fails, and `UsageError` for a malformed path. Methods are
thread-safe unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One entry of a directory.

    Attributes:
        name: Its last part only.
        is_directory: True for a real directory; False for files and for links of any kind.
        size_bytes: The size of a file; 0 for directories.
    """

    name: str
    is_directory: bool
    size_bytes: int


class Traits(msgspec.Struct, frozen=True):
    """The properties of a storage on which others depend: they are asked of the storage, never of its class.

    The defaults are those of a storage that promises nothing.

    Attributes:
        is_shared: True if another process that opens the storage's URL finds the same files.
        names_are_consistent: True if what one worker has written every other one finds at once. If not, as on some
            network file systems, it is looked for again for a while.
        hindrance: What makes saves slower than they could be, in words for a person; empty if nothing is known of.
    """

    is_shared: bool = False
    names_are_consistent: bool = False
    hindrance: str = ""


class FileWriter(Protocol):
    """One new file of known size, written in pieces in any order."""

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        """**Thread-safe.** Writes one piece. Pieces must not overlap and together cover the file.

        It is fast when offset, length and memory address are multiples of 4096; any are allowed. A piece may extend
        beyond the file's size by less than 4096 bytes: that is padding, and not part of the finished file.
        """

    def finish(self) -> None:
        """**Blocks.** Makes the bytes durable (fsync), and closes. The name is durable after `sync_directory`.

        Once a write or this has failed, the state of the bytes is unknown: every later call raises the same error.

        Raises:
            UsageError: If the pieces do not cover the file yet, or a write has not returned.
        """

    def abandon(self) -> None:
        """Closes without making anything durable; may follow `finish`. The file may stay, as debris."""


@runtime_checkable
class DigestingWriter(FileWriter, Protocol):
    """A writer that takes digests as well, because it can do both without holding up other threads. Most cannot."""

    def write_digested(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** Like `write_at`; also returns the digest of each part of memory.

        Args:
            offset_bytes: As there.
            data: As there.
            parts: Contiguous, of format `B`, in the order of their addresses; most are in `data`.
        """


class FileReader(Protocol):
    """One file, read in pieces by any number of threads."""

    size_bytes: int

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** Fills `into` from the file.

        Raises:
            DamageError: If the file ends before `into` is full.
        """

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** Fills many places of memory from adjacent bytes of the file.

        Args:
            offset_bytes: Where the first of them begins in the file.
            parts: Contiguous, of format `B`; they must not overlap.

        Returns:
            The digest of each (see `holdfast.format.digests.digest`), computed while the processor's cache holds it.

        Raises:
            DamageError: If the file ends before all are full.
        """

    def close(self) -> None:
        """Closes the file; may be repeated."""


class Storage(Protocol):
    """A tree of files with a create-only publish."""

    @property
    def url(self) -> str:
        """The URL, as a person would write it."""

    @property
    def traits(self) -> Traits:
        """The properties on which others depend; the hindrance may be found later."""

    @property
    def location(self) -> Path | None:
        """The directory of this machine in which the files are; None if they are elsewhere."""

    def make_directory(self, path: str) -> None:
        """Creates a directory, and those above it, durably. An existing one is fine."""

    def open_writer(self, path: str, size_bytes: int) -> FileWriter:
        """Begins a new file.

        Raises:
            StorageError: If the path already exists.
            StorageFullError: If there is clearly no space for it.
        """

    def write(self, path: str, data: bytes) -> None:
        """**Blocks.** Writes a whole new small file durably. The name is durable after `sync_directory`."""

    def sync_directory(self, path: str) -> None:
        """**Blocks.** Makes the names in a directory durable; `""` is the root."""

    def publish(self, path: str, data: bytes) -> bool:
        """**Blocks.** Makes a whole small file appear at once, durably, unless the path already exists.

        A reader of the path sees nothing or all of it, also after a crash at any point. `data` should contain a token
        that no other process writes: after a lost reply, equal contents may be the only proof of its origin. When this
        raises, the file may or may not exist, now or later.

        Returns:
            True if this call created it, False if it existed before, and is durable then as well.
        """

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Reads a whole small file.

        Raises:
            NotFoundError: If the path does not exist.
            DamageError: If it is larger than the limit, or not a regular file.
        """

    def open_reader(self, path: str) -> FileReader:
        """Opens a file for reading; a link is not followed.

        Raises:
            NotFoundError: If the path does not exist.
            DamageError: If it is not a regular file.
        """

    def list(self, path: str) -> list[Entry]:
        """Returns the entries of a directory, in order of name; none if there is no such directory."""

    def remove(self, path: str) -> None:
        """Removes one file or link. A missing one is fine."""

    def remove_directory(self, path: str) -> bool:
        """Removes a directory if it is empty.

        Returns:
            True if it no longer exists, False if it is not empty.
        """

    def set_aside(self, path: str) -> str:
        """Moves a directory at once to a name that no reader uses, so that a late writer finds its path gone.

        Returns:
            Its new path, which begins with `.trash-`. If the storage cannot do that, `path` itself.
        """


class Spare(Protocol):
    """At most one removed file, into whose space on the disk the next large one is written.

    It is in the storage's root under a name of its own, and has no content that anyone may rely on. It is overwritten
    only if no other process can notice; if that is uncertain, it is removed. It never causes a full disk: it is removed
    before a storage reports one.
    """

    def try_keep(self, path: str, limit_bytes: int) -> bool:
        """Makes a whole file that no longer counts the spare, if it is more useful than the current one.

        No process may be writing it any more, and all references to it must be gone for good.

        Args:
            path: The file.
            limit_bytes: A larger one is not kept.

        Returns:
            True if it has left its path. If False, it is there as before, and may be removed.
        """

    def remove(self, beyond_bytes: int = -1) -> bool:
        """Removes the spare, if it is larger than that.

        Returns:
            True if it was removed; False if there was none to remove.
        """


@runtime_checkable
class SparingStorage(Storage, Protocol):
    """A storage that supports a spare. Most do not."""

    @property
    def spare(self) -> Spare:
        """The spare, even if there is none at the moment."""
