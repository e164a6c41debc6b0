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


@contextmanager
def small_disk(tmp_path: Path, size_bytes: int) -> Iterator[Path]:
    """A new file system of that size while the body runs; skips the test where that is not allowed."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as root:
        yield root


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
