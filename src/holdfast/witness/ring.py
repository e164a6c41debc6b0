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
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from holdfast.storage import Storage

SLOTS: Final = 4096
_SIGN_SECONDS: Final = 0.05
FOLDER: Final = "witness"
DATA, LOSS = 1, 2
_FIELDS: Final = struct.Struct("<QIIIIIIQd8x")
_SIGN: Final = struct.Struct("<Qd")
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


@dataclass
class Repetition:
    """The steps of an earlier start that are repeated, compared with those records one by one.

    Attributes:
        expected: The records that were not repeated yet, by step.
        repeated: The steps that were compared and do not differ, each with what was known of it both times.
        why: Why something was not compared; empty if all was.
        reached: The last step that had been done before; 0 if that is not known.
        is_least: True if more steps may have been done: only a sign that is given now and then is known of them.
    """

    expected: dict[int, StepRecord] = field(default_factory=dict)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    why: str = ""
    reached: int = 0
    is_least: bool = False

    def compare(self, now: StepRecord) -> tuple[str, int, float, float] | None:
        """Returns what differs, what is known of both, and both values; None if nothing differs."""
        before = self.expected.pop(now.step, None)
        if before is None:
            return None
        known = before.known & now.known
        if before.data_context != now.data_context:
            known = 0
            self.why = "the number of workers, the batch size, the length or the seed of the data has changed"
        elif (before.data ^ now.data) & 1:
            known &= LOSS
        if known & LOSS and (before.loss_context, before.loss_line) != (now.loss_context, now.loss_line):
            known &= DATA
            self.why = "the software, the machine or what is restored has changed"
        differing = known & differs(before, now)
        if differing & DATA:
            return "data", known, before.batches, now.batches
        if differing:
            return "loss", known, before.loss, now.loss
        self.repeated.append((now.step, known))
        return None


class Ring:
    """The file of one worker, to be written. The first record opens it, once the run's directory exists."""

    def __init__(self, storage: Storage, rank: int) -> None:
        self._storage, self._rank = storage, rank
        self._descriptor: int | None = None
        self._has_place = True
        self._sign_at = 0.0

    def write(self, record: StepRecord) -> None:
        """Writes a record in place of the one that is `SLOTS` steps older, if there is a place for the file."""
        if self._descriptor is None:
            self._try_open()
        if self._descriptor is not None:
            body = _FIELDS.pack(*record)
            check = _CHECK.pack(xxhash.xxh3_64_intdigest(body, _FORMAT))
            os.pwrite(self._descriptor, body + check, record.step % SLOTS * _BYTES)

    def sign(self, step: int) -> None:
        """Notes how far training has come, and when, of steps without a record; at most twenty times a second."""
        if (now := time.time()) < self._sign_at:
            return
        self._sign_at = now + _SIGN_SECONDS
        if self._descriptor is None:
            self._try_open()
        if self._descriptor is not None:
            body = _SIGN.pack(step, now)
            check = _CHECK.pack(xxhash.xxh3_64_intdigest(body, _FORMAT))
            os.pwrite(self._descriptor, body + check, SLOTS * _BYTES)

    def _try_open(self) -> None:
        """Opens the file, if the run's directory or else the user's cache is on a local file system with space."""
        directory = self._storage.location
        if not self._has_place or (directory is not None and not directory.exists()):
            return  # Nothing is saved yet: that creates the directory.
        for path in list_rings(self._storage, self._rank):
            with suppress(OSError):
                path.parent.mkdir(parents=path.parent.parent != directory, exist_ok=True)
                if not path.parent.is_symlink():
                    self._descriptor = _open(path)
                    return
        self._has_place = False

    def close(self) -> None:
        """Closes the file; may be repeated."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None


def decode(data: bytes) -> dict[int, StepRecord]:
    """**Pure.** Returns the whole records in the bytes of a file, by step; everything else is passed over."""
    found = {}
    for begin in range(0, min(len(data), SLOTS * _BYTES) - _BYTES + 1, _BYTES):
        body, check = data[begin : begin + _FIELDS.size], data[begin + _FIELDS.size : begin + _BYTES]
        if any(check) and xxhash.xxh3_64_intdigest(body, _FORMAT).to_bytes(8, "little") == check:
            record = StepRecord(*_FIELDS.unpack(body))
            found[record.step] = record
    return found


def read_ring(storage: Storage, rank: int) -> dict[int, StepRecord]:
    """Returns the records of a worker by step, as far as they can be read."""
    found: dict[int, StepRecord] = {}
    for data in _read_files(storage, rank, 0, SLOTS * _BYTES):
        found |= decode(data)
    return found


def read_sign(storage: Storage, rank: int) -> tuple[int, float]:
    """Returns how far a worker had come, and when, as it was noted by `Ring.sign`; zeros if that is not known."""
    for data in _read_files(storage, rank, SLOTS * _BYTES, _SIGN.size + _CHECK.size):
        body, check = data[: _SIGN.size], data[_SIGN.size :]
        if xxhash.xxh3_64_intdigest(body, _FORMAT).to_bytes(8, "little") == check:
            step, at_seconds = _SIGN.unpack(body)
            return step, at_seconds
    return 0, 0.0


def _read_files(storage: Storage, rank: int, begin: int, size_bytes: int) -> Iterator[bytes]:
    for path in reversed(list_rings(storage, rank)):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                file.seek(begin)
                yield file.read(size_bytes)


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
