"""The room on the disk that removed checkpoints had: the next save is written there, where the storage can do that."""

from __future__ import annotations

from contextlib import suppress

from holdfast.errors import FencedError, HoldfastError
from holdfast.format.names import DATA_SUFFIX, is_own_file
from holdfast.save.commit import check_fence
from holdfast.save.discard import remove_own_files
from holdfast.save.exit import hold, release
from holdfast.storage.protocol import FileWriter, SparingStorage, Storage


class Space:
    """Where the data files of one line are written, and what becomes of those of the steps that it removes.

    While the job lives, one data file stays as the spare. It goes when the line is closed, or else when the program
    ends; a crash leaves it to the next job that saves here. Not thread-safe but for `close`, which may be called twice.
    """

    def __init__(self, storage: Storage, *, reuse: bool) -> None:
        """Reads and writes nothing yet.

        Args:
            storage: The run.
            reuse: False to write new files, and to remove old ones, always.
        """
        self._storage = storage
        self._spare = storage.spare if isinstance(storage, SparingStorage) else None
        self._reuse = reuse and self._spare is not None
        # The generation for which a spare was kept here.
        self._kept_by: int | None = None

    def open_writer(self, path: str, size_bytes: int) -> FileWriter:
        """Begins a step's data file, in the room of one that was removed if there is any.

        Raises:
            StorageError: If the place fails.
        """
        if self._reuse and self._spare is not None:
            return self._spare.open_writer(path, size_bytes)
        return self._storage.open_writer(path, size_bytes)

    def discard_withdrawn(self, directory: str, generation: int, wanted_bytes: int) -> bool:
        """**Blocks.** Removes the files of a committed step that this line has withdrawn, and to which nobody refers.

        A data file may stay as the spare. Only such a step's may: whoever left another directory unfinished may be
        writing into its files still.

        Args:
            directory: The step's directory.
            generation: The generation that removes it.
            wanted_bytes: How large the next data file may be expected to be.

        Returns:
            True if the directory is gone.

        Raises:
            StorageError: If the place fails.
        """
        if self._reuse and self._spare is not None:
            for entry in self._storage.list(directory):
                is_data = is_own_file(entry.name) and entry.name.endswith(DATA_SUFFIX) and not entry.is_directory
                if is_data and self._spare.try_keep(f"{directory}/{entry.name}", wanted_bytes):
                    self._kept_by = generation
                    hold(self)
        return remove_own_files(self._storage, directory)

    def sweep(self) -> None:
        """**Blocks.** Removes the spare that an earlier job left, if this one does not use any.

        Raises:
            StorageError: If the place fails.
        """
        if self._spare is not None and not self._reuse:
            self._spare.remove()

    def close(self) -> None:
        """**Blocks.** Removes the spare that was kept here, unless a newer job has begun, whose it is then.

        From now on nothing is kept.

        Raises:
            StorageError: If the place fails.
        """
        self._reuse = False
        release(self)
        if self._kept_by is None or self._spare is None:
            return
        with suppress(FencedError):
            check_fence(self._storage, self._kept_by)
            self._spare.remove()
        self._kept_by = None

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends and nobody has closed the line."""
        with suppress(HoldfastError):
            self.close()
        return []
