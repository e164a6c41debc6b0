"""The records of the last steps of one worker, in a file that outlives a process that is killed.

A record is written into the page cache by one call, which waits for no disk. The file is not mapped: a page fault on a
volume that is full or gone would end the program; a write returns an error. What is read is compared, never trusted.
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from holdfast.storage import Storage

SLOTS: Final = 4096
FOLDER: Final = "witness"
DATA, LOSS = 1, 2
_FIELDS: Final = struct.Struct("<QIIIIIIQd8x")
_CHECK: Final = struct.Struct("<Q")
_BYTES: Final = 64
_FORMAT: Final = 0x686F6C64_00000002
"""Seeds the check of a record, so that one of another format, or with digests of another kind, is none."""

_LOCAL: Final = frozenset(
    {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x858458F6, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E}
)
"""The file systems of one machine: ext2 to ext4, XFS, Btrfs, tmpfs, ramfs, overlayfs, ZFS, F2FS, bcachefs."""


class StepRecord(NamedTuple):
    """The data and the loss of one worker in one step.

    Attributes:
        step: How many steps were complete after it.
        line: The same for all steps that continue each other; another one after the program went back on purpose.
        loss_line: The same for those of them between which a restart changed nothing that changes the loss.
        data_context: A digest of what data must have in common to be compared.
        loss_context: The same for losses.
        known: DATA if the data are known, LOSS if the loss is, or the sum.
        batches: How many batches it took.
        data: A digest of them, in order. The lowest bit is set if a part of them was not seen.
        loss: The loss.
    """

    step: int
    line: int
    loss_line: int
    data_context: int
    loss_context: int
    known: int
    batches: int
    data: int
    loss: float


def differs(before: StepRecord, now: StepRecord) -> int:
    """**Pure.** Returns DATA if two steps took other data, LOSS if they gave another loss, or the sum."""
    is_same_loss = before.loss == now.loss or (math.isnan(before.loss) and math.isnan(now.loss))
    return (DATA if (before.batches, before.data) != (now.batches, now.data) else 0) | (0 if is_same_loss else LOSS)


def write_record(ring: int, record: StepRecord) -> None:
    """Writes a record into an open file, in place of the one that is `SLOTS` steps older."""
    body = _FIELDS.pack(*record)
    os.pwrite(ring, body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, _FORMAT)), record[0] % SLOTS * _BYTES)


def decode(data: bytes) -> dict[int, StepRecord]:
    """**Pure.** Returns the whole records in the bytes of a file, by step; everything else is passed over."""
    found = {}
    for begin in range(0, min(len(data), SLOTS * _BYTES) - _BYTES + 1, _BYTES):
        body, check = data[begin : begin + _FIELDS.size], data[begin + _FIELDS.size : begin + _BYTES]
        if any(check) and xxhash.xxh3_64_intdigest(body, _FORMAT).to_bytes(8, "little") == check:
            record = StepRecord(*_FIELDS.unpack(body))
            found[record.step] = record
    return found


def try_open_ring(storage: Storage, rank: int) -> int | None:
    """Opens the file of a worker, with its space on the disk: in the run's directory, else in the user's cache.

    Returns:
        A file descriptor; None if neither place is on a file system of this machine that has space.

    Raises:
        FileNotFoundError: If the run's directory does not exist. It is not created here.
    """
    directory = storage.location
    if directory is not None:
        directory.stat()
    for path in list_rings(storage, rank):
        with suppress(OSError):
            path.parent.mkdir(parents=path.parent.parent != directory, exist_ok=True)
            if path.parent.is_symlink():
                continue
            return _open(path)
    return None


def read_ring(storage: Storage, rank: int) -> dict[int, StepRecord]:
    """Returns the records of a worker by step, as far as they can be read."""
    found: dict[int, StepRecord] = {}
    for path in reversed(list_rings(storage, rank)):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                found |= decode(file.read(SLOTS * _BYTES))
    return found


def remove_rings(storage: Storage) -> None:
    """Removes the records of all workers, as far as that is possible; nothing else."""
    for path in list_rings(storage, 0):
        if path.parent.is_symlink():
            continue  # Those of another run.
        for one in path.parent.glob(path.name.replace("00000", "[0-9]" * 5)):
            with suppress(OSError):
                one.unlink()
        with suppress(OSError):
            path.parent.rmdir()


def list_rings(storage: Storage, rank: int) -> list[Path]:
    """Returns where the file of a worker may be, the better place first."""
    if not storage.traits.is_shared:
        return []  # It ends with this process.
    paths = [] if storage.location is None else [storage.location / FOLDER / f"{rank:05d}.ring"]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  It never fails.
    name = xxhash.xxh3_128_hexdigest(storage.url.encode(errors="surrogateescape"))
    return [*paths, cache / "holdfast" / FOLDER / f"{name}-{rank:05d}.ring"]


def _open(path: Path) -> int:
    statfs = getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)
    # The kind is the first field, as wide as a long wherever it is as Linux says.
    status = (ctypes.c_long * 64)()
    if statfs is None or statfs(os.fsencode(path.parent), status) != 0 or status[0] not in _LOCAL:
        raise OSError(f"{path.parent} may be on another machine")
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a file")
        os.posix_fallocate(descriptor, 0, SLOTS * _BYTES)
    except OSError:
        os.close(descriptor)
        if is_new:
            path.unlink(missing_ok=True)
        raise
    return descriptor
