"""A run that is only saved and restored, as a job does it: what that costs here."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.manager import CheckpointManager
from holdfast.policies import Latest
from holdfast.storage import LocalStorage
from holdfast.storage.local.recycle import has_spare
from holdfast.storage.local.writer import LocalWriter

_TIMEOUT_SECONDS: Final = 7 * 86400.0
"""A person watches, and ends what takes too long."""


class Trial:
    """A run of its own that is saved to as often as is asked; only the newest checkpoint is kept."""

    def __init__(self, directory: Path, arrays: dict[str, Any], threads: int) -> None:
        """Writes nothing yet.

        Args:
            directory: Where the run lies; made by the first save.
            arrays: The state.
            threads: How many threads write and read.
        """
        self._directory = directory
        self._objects = Checkpoint(model=arrays)
        self._threads = threads
        self._storage = _StoppableStorage(directory)
        self._manager = self._open(self._storage)
        self._step = 0
        self._newest = directory

    def save(self) -> tuple[float, float]:
        """**Blocks.** Saves, and waits until nothing of it goes on any more.

        Returns:
            For how many seconds the call held its caller up, and how many it took from the call until the checkpoint
            was durable.

        Raises:
            SaveFailedError: If the place fails.
        """
        self._step += 1
        begun_at = time.perf_counter()
        handle = self._manager.save(self._step)
        stalled_at = time.perf_counter()
        self._newest = Path(handle.wait_committed())
        durable_at = time.perf_counter()
        self._manager.wait()
        return stalled_at - begun_at, durable_at - begun_at

    def restore(self) -> float:
        """**Blocks.** Restores the newest checkpoint.

        Returns:
            How many seconds that took.

        Raises:
            HoldfastError: If it cannot be restored.
        """
        # A manager that has restored opens a generation of its own when it saves next, which a job does only once.
        with self._open(self._directory) as manager:
            begun_at = time.perf_counter()
            manager.restore()
            return time.perf_counter() - begun_at

    @property
    def has_spare(self) -> bool:
        """Whether the next save is written over a file that is there already."""
        return has_spare(self._directory)

    def drop_spare(self) -> None:
        """Has the next save write new files, as in a run that keeps all checkpoints or has several workers.

        Raises:
            StorageError: If the place fails.
        """
        self._storage.spare.remove()

    @property
    def files(self) -> list[Path]:
        """The files of the newest checkpoint, the one with the arrays first."""
        return sorted(self._newest.iterdir(), key=lambda path: -path.stat().st_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._manager.close()
            return
        # Nobody waits for what is being written: the directory goes anyway.
        self._storage.stop()
        with suppress(HoldfastError):
            self._manager.close()

    def _open(self, directory: Path | LocalStorage) -> CheckpointManager:
        # Alone, whatever job the environment speaks of: a shell within one of its workers, say.
        return CheckpointManager(
            directory,
            self._objects,
            keep=Latest(1),
            threads=self._threads,
            timeout_seconds=_TIMEOUT_SECONDS,
            cluster="alone",
        )


class _StoppableStorage(LocalStorage):
    """A directory in which writing can be ended at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writer: LocalWriter | None = None
        self._is_stopped = False

    def open_writer(self, path: str, size_bytes: int) -> LocalWriter:
        """Begins a new file, which fails at the next piece once all is stopped."""
        self._writer = super().open_writer(path, size_bytes)
        if self._is_stopped:
            self._writer.abandon()
        return self._writer

    def stop(self) -> None:
        """**Thread-safe.** Gives up the file that is being written, and each that is begun from now on."""
        self._is_stopped = True
        if self._writer is not None:
            self._writer.abandon()
