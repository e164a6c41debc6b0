"""The interface of a storage of bytes.

A path is relative to the storage's root, has `/` between its parts, and no part is empty, `.` or `..`. Every method
raises `StorageError`, or a subclass, when the storage fails, and `UsageError` for a malformed path. Methods are
thread-safe unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

PIECE_BYTES: Final = 8 << 20
"""The size of one write. Larger ones gain nothing on the disks that were measured, smaller ones lose."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a directory.

    Attributes:
        name: Its last part only; of a deep listing, its path below the directory.
        is_directory: True for a real directory; False for files and for links of any kind.
        size_bytes: The size of a file; 0 for directories.
        version: Differs from what it was once the file has been replaced; empty if the storage does not say.
    """

    name: str
    is_directory: bool
    size_bytes: int
    version: str = ""


class Traits(msgspec.Struct, frozen=True):
    """The properties of a storage on which others depend: they are asked of the storage, never of its class.

    The defaults are those of a storage that promises nothing, and takes pieces of any size.

    Attributes:
        has_directories: True if a directory exists by itself: nothing but `create` puts a file where there is none, and
            a late writer fails once `retire` has moved its directory. False if `/` is only a part of a name.
        lists_deep: True if a deep listing takes about as long as that of one directory.
        is_shared: True if another process that opens the storage's URL finds the same files.
        names_are_consistent: True if what one worker has written every other one finds at once. If not, as on some
            network file systems, it is looked for again for a while.
        keeps_space: True if `discard` may keep the space of a file for the next one.
        best_piece_bytes: The size of a write that is fast.
        least_piece_bytes: The least size of each piece of a file but the last one.
        most_pieces: How many pieces a file may have; 0 for any number.
        read_parallel: How many reads at once are fast; 0 for as many as the reader has threads of its own.
        replaces: True if it has `replace(path, data)` besides, which puts a small file in place of an older one.
        passes_on: True if workers that read the same had better read it once, and pass it on between them.
        has_tiers: True if it is several storages in one; see `storage/tiers.py`.
        hindrance: What makes saves slower than they could be, in words for a person; empty if nothing is known of.
    """

    has_directories: bool = False
    lists_deep: bool = False
    is_shared: bool = False
    names_are_consistent: bool = False
    keeps_space: bool = False
    best_piece_bytes: int = PIECE_BYTES
    least_piece_bytes: int = 0
    most_pieces: int = 0
    read_parallel: int = 0
    replaces: bool = False
    passes_on: bool = False
    has_tiers: bool = False
    hindrance: str = ""


class FileWriter(Protocol):
    """One new file of known size, written in pieces in any order.

    Each piece but the last one of the file has at least the `least_piece_bytes` of the storage's traits, and the part
    of the file that `most_pieces` of them need.
    """

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        """**Thread-safe.** Writes one piece. Pieces must not overlap and together cover the file.

        It is fast when offset, length and memory address are multiples of 4096; any are allowed. A piece may extend
        beyond the file's size by less than 4096 bytes: that is padding, and not part of the finished file.

        Args:
            offset_bytes: Where it begins in the file.
            data: Its bytes, contiguous.
            parts: Memory to be digested, contiguous, of format `B`, in the order of their addresses; most of them are
                in `data`.

        Returns:
            The digest of each part (see `holdfast.format.digests.digest`). A storage that can computes it without
            holding up other threads, while the processor's cache holds the bytes.
        """

    def finish(self) -> None:
        """**Blocks.** Makes the bytes durable (fsync), and closes. The name is durable after `sync_directory`.

        Once a write or this has failed, the state of the bytes is unknown: every later call raises the same error.

        Raises:
            UsageError: If the pieces do not cover the file yet, or a write has not returned.
        """

    def abandon(self) -> None:
        """Closes without making anything durable; may follow `finish`. The file may stay, as debris."""


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
        """Creates a directory, and those above it, durably, for files that are not begun by `create`.

        An existing one is fine. A storage without directories does nothing.
        """

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """Begins a new file; creates its directory, and those above it, durably.

        Raises:
            StorageError: If the path already exists. A storage without directories may find that out later: then
                `finish` raises it, and the file is as it was.
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

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """Returns the entries of a directory, in order of name; none if there is no such directory.

        Args:
            path: The directory; `""` is the root.
            deep: True for all files below it, at any depth, without the directories.
        """

    def delete(self, paths: Iterable[str]) -> bool:
        """Removes files, links, and directories that are empty by then; missing ones are fine.

        They go in any order, but a directory after what is in it. If one of the paths cannot be removed, the others
        are, and then its error is raised.

        Returns:
            True if none of the paths exists any more, False if there is something in a directory. A storage without
            directories does not look for that, and returns True.
        """

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """Removes files that no longer count, like `delete`, and may keep the space of one for the next large file.

        What is kept is at most one file in the root, under a name of its own, with no content that anyone may rely on.
        It is overwritten only if no other process can notice. It never causes a full disk: it is removed before the
        storage reports one. One that is more than twice as large as the next file is not kept.

        Args:
            paths: The files. No process may be writing them any more, and all references to them must be gone for good.
            next_bytes: The likely size of the next file; 0 to keep nothing.
        """

    def retire(self, directory: str) -> str:
        """Moves a directory at once to a name that no reader uses, so that a late writer finds its path gone.

        Returns:
            Its new path, which begins with `.trash-`. A storage without directories returns `directory`.
        """
