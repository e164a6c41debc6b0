"""The room on the disk that removed checkpoints had: the next save is written there, where the storage can do that."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

from holdfast.errors import FencedError, HoldfastError
from holdfast.format.names import DATA_SUFFIX, is_own_file
from holdfast.save.commit.delete_step import remove_own_files
from holdfast.save.commit.publish import check_fence
from holdfast.save.drain import hold, release
from holdfast.storage.protocol import SparingStorage, Storage

_MAX_SHARE: Final = 2
"""How many times as large as the newest data file the spare may be: the next one is likely to be of that size."""


class FileRecycler:
    """What becomes of the data files of those steps that one line removes.

    While the job lives, one of them stays as the spare. It goes when the line is closed, or else when the program ends;
    a crash leaves it to the next job that saves here. One save uses it at a time; `close` may be called at any moment.
    """

    def __init__(self, storage: Storage, *, reuse: bool) -> None:
        """Reads and writes nothing yet.

        Args:
            storage: The run.
            reuse: False to keep nothing.
        """
        self._storage = storage
        self._spare = storage.spare if isinstance(storage, SparingStorage) else None
        self._generation = 0
        # Guards the two fields below, and that nothing is kept any more when they say so.
        self._lock = threading.Lock()
        self._reuse = reuse and self._spare is not None
        self._has_kept = False

    def begin(self, generation: int) -> None:
        """**Blocks.** A generation was opened, which now has the spare; one that keeps none removes what it finds."""
        self._generation = generation
        if self._spare is not None and not self._reuse:
            # If this fails, the sweep tells of it.
            with suppress(HoldfastError):
                self._spare.remove()

    def discard_withdrawn(self, directory: str, newest_bytes: int) -> bool:
        """**Blocks.** Removes the files of a committed step that this line has withdrawn, and to which nobody refers.

        A data file may stay as the spare. Only such a step's may: whoever left another directory unfinished may be
        writing into its files still.

        Args:
            directory: The step's directory.
            newest_bytes: How large the data file is that was committed last.

        Returns:
            True if the directory is gone.

        Raises:
            StorageError: If the place fails.
        """
        if self._reuse:
            for entry in self._storage.list(directory):
                if is_own_file(entry.name) and entry.name.endswith(DATA_SUFFIX) and not entry.is_directory:
                    self._try_keep(f"{directory}/{entry.name}", newest_bytes)
        return remove_own_files(self._storage, directory)

    def _try_keep(self, path: str, newest_bytes: int) -> None:
        with self._lock:
            if self._reuse and self._spare is not None and self._spare.try_keep(path, _MAX_SHARE * newest_bytes):
                self._has_kept = True
                hold(self)

    def sweep(self, newest_bytes: int) -> None:
        """**Blocks.** Removes a spare that is too large by now, or any if none is to be kept.

        Raises:
            StorageError: If the place fails.
        """
        if self._spare is not None:
            self._spare.remove(_MAX_SHARE * newest_bytes if self._reuse else -1)

    def close(self) -> None:
        """**Blocks.** Removes the spare that was kept here, unless a newer job has begun, whose it is then.

        From now on nothing is kept.

        Raises:
            StorageError: If the place fails.
        """
        if self._end() and self._spare is not None:
            with suppress(FencedError):
                check_fence(self._storage, self._generation)
                self._spare.remove()

    def abandon(self) -> None:
        """As `close`, but leaves the spare where it is, as a crash does."""
        self._end()

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends and nobody has closed the line."""
        with suppress(HoldfastError):
            self.close()
        return []

    def _end(self) -> bool:
        """Keeps nothing from now on; whether something was kept before."""
        with self._lock:
            release(self)
            had_kept, self._has_kept, self._reuse = self._has_kept, False, False
        return had_kept
