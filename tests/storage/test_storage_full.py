"""A directory of this machine when no room is left: a disk, a limit of the process, a file system that is read-only."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
import preloaded
from crash.forked import ForkedJob
from holdfast.catalog import StoredRun
from holdfast.errors import StorageError, StorageFullError
from holdfast.events import Event, Written
from holdfast.storage import LocalStorage
from holdfast.storage.checks import storage_error
from holdfast.storage.local.direct import PAGE_BYTES
from mounts import mounted

PRELUDE = """
import resource, sys
from holdfast.errors import StorageError, StorageFullError
from holdfast.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
content = bytes(range(256)) * 8192

def failure(call, *arguments):
    try:
        call(*arguments)
    except StorageError as error:
        return error
    raise SystemExit(f"{call} did not fail")
"""


def _run(root: Path, code: str) -> None:
    """Runs code in a process of its own, whose limits it may set."""
    command = [sys.executable, "-c", PRELUDE + code, str(root)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_one_byte_is_one(tmp_path: Path) -> None:
    for needed_bytes, words in (
        (1, "1 byte is needed and "),
        (0, "0 bytes are needed and "),
        (2, "2 bytes are needed"),
    ):
        error = storage_error(OSError(errno.ENOSPC, "no room"), "write", "file", tmp_path, needed_bytes)
        assert error.hint.startswith(words)


def test_limit_on_the_size_of_files(tmp_path: Path) -> None:
    _run(
        tmp_path,
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for call, arguments in (
    (storage.create, ("data", len(content))),
    (storage.write, ("data", content)),
    (storage.publish, ("data", content)),
):
    error = failure(call, *arguments)
    assert isinstance(error, StorageFullError), error
    assert f"{len(content)} bytes are needed" in error.hint and "ulimit -f" in error.hint, error
    assert storage.list("") == []
storage.write("small", b"1")
""",
    )


def test_limit_on_the_size_of_files_that_is_met_in_the_room_of_another(tmp_path: Path) -> None:
    """Nothing is allocated then, and a direct write that the limit cuts short within a page is called invalid."""
    _run(
        tmp_path,
        """
import mmap
large = memoryview(mmap.mmap(-1, 4 << 20))
writer = storage.create("data", len(large))
resource.setrlimit(resource.RLIMIT_FSIZE, ((2 << 20) + 1, resource.RLIM_INFINITY))
error = failure(writer.write_at, 0, large)
assert isinstance(error, StorageFullError), error
assert "ulimit -f" in error.hint, error
""",
    )


def test_a_writer_that_ran_out_of_room_is_at_its_end(tmp_path: Path) -> None:
    """Room that is made afterwards does not revive it."""
    _run(
        tmp_path,
        """
writer = storage.create("data", len(content))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
error = failure(writer.write_at, 1 << 20, memoryview(content)[1 << 20:])
assert isinstance(error, StorageFullError), error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failure(writer.write_at, 0, memoryview(content)) is error
assert failure(writer.finish) is error
writer.abandon()
storage.delete(["data"])
""",
    )


def _fill(storage: LocalStorage) -> int:
    """Writes files until there is no room for more; how many."""
    number = 0
    while True:
        try:
            storage.write(f"filler-{number}", bytes(PAGE_BYTES))
        except StorageFullError:
            return number
        number += 1


def _check_full_disk(root: Path) -> None:
    storage = LocalStorage(root)
    with pytest.raises(StorageFullError, match=r"10000000 bytes are needed and \d+ bytes are free"):
        storage.create("data", 10_000_000)
    fillers = _fill(storage)
    assert fillers > 10
    for call in (storage.write, storage.publish):
        with pytest.raises(StorageFullError, match="100000 bytes are needed"):
            call("file", bytes(100_000))
    names = [entry.name for entry in storage.list("") if entry.name != "lost+found"]
    assert sorted(names) == sorted(f"filler-{number}" for number in range(fillers))
    for number in range(fillers):
        storage.delete([f"filler-{number}"])
    assert storage.publish("manifest", b"room again")


def test_full_memory_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=200k", "tmpfs") as root:
        _check_full_disk(root)


def test_full_ext4(tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as root:
        _check_full_disk(root)


def test_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=200k,ro", "tmpfs") as root:
        with pytest.raises(StorageError, match="mounted read-only"):
            LocalStorage(root).publish("manifest", b"")


def test_job_killed_in_its_first_save_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    """The disk has room for a checkpoint and two more, unfinished or not."""
    weights = np.zeros(130_000)

    def start(place: Path, *, is_killed: bool = False) -> None:
        def kill(event: Event) -> None:
            # All is written, and nothing is committed.
            if is_killed and isinstance(event, Written):
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint = hf.Checkpoint(weights=weights)
        with hf.CheckpointManager(place, checkpoint, keep=hf.Latest(1), sinks=[kill]) as manager:
            restored = manager.restore()
            step = 1 if restored is None else restored.step + 1
            weights[:] = step
            manager.save(step)

    def die(rank: int, tell: Callable[[str], None]) -> int:
        start(disk, is_killed=True)
        return 0

    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3500k", "tmpfs") as disk:
        start(disk)
        for _ in range(4):
            job = ForkedJob(1, die)
            job.wait({0}, 60.0, "a job that kills itself in its first save")
            assert job.codes == {0: -signal.SIGKILL}, job.told
        catalog = StoredRun(LocalStorage(disk)).look()
        assert ([name.step for name in catalog.living], len(catalog.unfinished)) == ([1], 1)
        start(disk)
        catalog = StoredRun(LocalStorage(disk)).look()
        assert ([name.step for name in catalog.living][-1], catalog.unfinished) == (2, ())


def test_a_disk_without_inodes_is_named_as_such(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs") as disk:
        for number in range(19):
            (disk / str(number)).touch()
        with pytest.raises(StorageFullError) as failure:
            LocalStorage(disk).write("file", b"1")
    assert "no inodes are left" in failure.value.hint
