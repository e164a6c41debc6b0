"""File systems that are mounted for a test."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """Mounts something on a new directory while the body runs; skips the test where that is not allowed."""
    directory.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        # Lazily: a process that was just killed may hold it for a moment still.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(disk: Path) -> None:
    """Writes into a file until there is no room left."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 8, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
