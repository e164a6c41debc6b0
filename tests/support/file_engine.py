"""An engine whose store is a directory: for workers that are processes of one machine, without any framework."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.cluster.store import JoinedCluster


class FileEngine:
    """**Thread-safe.** A key is a file. Whoever is killed in the middle of a call leaves no half of one."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory if it is not there."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def connect(self, timeout_seconds: float) -> FileEngine:
        """A connection, which is the store itself."""
        return self

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        with self._written(value) as temporary:
            temporary.replace(self._path(key))

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        while True:
            with self._written(value) as temporary:
                try:
                    os.link(temporary, self._path(key))
                except FileExistsError:
                    standing = self.try_get(key)
                    if standing is not None:
                        return standing
                    # It was deleted between the two.
                else:
                    return value

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        # Without a lock: a process that is stopped while it holds one would stop all others. What each has added stands
        # in a line of its own, and the sum is that of the lines up to it.
        own = os.urandom(8).hex().encode()
        if amount:
            with self._path(key).open("ab", buffering=0) as file:
                file.write(b"%s %d\n" % (own, amount))
        total = 0
        for line in (self.try_get(key) or b"").splitlines():
            word, added = line.split()
            total += int(added)
            if word == own:
                break
        return total

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")

    @contextmanager
    def _written(self, value: bytes) -> Iterator[Path]:
        """A whole file with a value, under a name of its own."""
        temporary = self._directory / f".{os.urandom(8).hex()}"
        temporary.write_bytes(value)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def join_in_directory(
    directory: Path, rank: int, world_size: int, *, timeout_seconds: float, kind: type[JoinedCluster] = JoinedCluster
) -> JoinedCluster:
    """**Collective.** **Blocks.** The cluster of processes that meet in a directory; each calls this once.

    Raises:
        AbsentError: If workers are missing; it names them.
    """
    return kind(
        FileEngine(directory).connect,
        rank,
        world_size,
        host=str(directory),
        prefix="job",
        timeout_seconds=timeout_seconds,
    )
