"""Tries a directory as a job uses it: what works there, and what a save and a restore take."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from holdfast.checkpoint import Checkpoint
from holdfast.cli.wording import rough_text, size_text
from holdfast.errors import StorageError, StorageFullError
from holdfast.manager import CheckpointManager
from holdfast.policies import Auto, Latest, SaveMoment
from holdfast.policies.expectation import expect_losses
from holdfast.policies.saving import Bound
from holdfast.save.copy import plan as copy_plan
from holdfast.storage import LocalStorage, digesting
from holdfast.storage.failures import as_storage_errors
from holdfast.storage.local.direct import SMALLEST_DIRECT_BYTES
from holdfast.storage.local.recycle import has_spare
from holdfast.storage.local.residency import Residency

Status: TypeAlias = Literal["ok", "note", "unfit"]

PREFIX: Final = ".holdfast-doctor-"
"""What the trial's directory is called. It begins with a dot, so no verb and no job takes notice of it."""

_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{16}")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERED: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_PUBLISHED_BYTES: Final = 1024
_PUBLISHED_FILES: Final = 5
_FEW_FILES: Final = 1000
_CLOCK_SECONDS: Final = 2.0
_PILOT_BYTES: Final = 64 << 20
_SAVE_SECONDS: Final = 0.3
"""How long a save of the trial is to take: with five of them and as many restores the whole takes a few seconds."""
_TRIAL_BYTES: Final = (32 << 20, 512 << 20)
_ROOM_TIMES: Final = 4
"""A checkpoint and the one that follows it, and as much for everybody else."""
_ARRAY_BYTES: Final = 16 << 20
_SAVES: Final = 5
_TIMEOUT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        status: `unfit` if checkpoints are not safe there, or do not fit.
        text: What was found, in a few words.
        hint: What that means and what to do; empty where all is well.
    """

    name: str
    status: Status
    text: str
    hint: str = ""


@contextmanager
def open_scratch(root: Path) -> Iterator[Path]:
    """**Blocks.** Lends a new directory to the body, and removes it with all that is in it.

    A process that is killed leaves its directory behind, and the next call removes it, since the lock is gone.

    Raises:
        StorageError: If it cannot be made or removed.
    """
    with as_storage_errors("list", "", root):
        left = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    for path in left:
        with suppress(OSError), _locked(path):
            shutil.rmtree(path)
    scratch = root / f"{PREFIX}{os.urandom(8).hex()}"
    with as_storage_errors("make", scratch.name, root):
        scratch.mkdir(mode=0o700)
    try:
        with ExitStack() as stack:
            # Where the file system has no locks, each removes only what is its own.
            with suppress(OSError):
                stack.enter_context(_locked(scratch))
            yield scratch
    finally:
        with as_storage_errors("remove", scratch.name, root):
            shutil.rmtree(scratch)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def find_mount(mounts: str, place: Path) -> str:
    """**Pure.** The kind of file system over a path without links, by Linux's `mountinfo`; empty if not known."""
    kind, longest = "", 0
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 6 or not after:
            continue
        mount_point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # Of two that are mounted over each other the later one is seen.
        if place.is_relative_to(mount_point) and len(mount_point) >= longest:
            kind, longest = after.split(" ")[0], len(mount_point)
    return kind


class Examination:
    """Looks at an empty directory. Each method may raise `StorageError` where the place itself fails.

    Attributes:
        size_bytes: The size of the state that is to be saved.
        findings: What was looked at.
        figures: What was measured, and what follows from that; the names end with their units.
        kind: The kind of file system.
        free_bytes: How much may still be written; None where it does not say.
        bound: What sets the interval between saves, as for `Auto`.
    """

    def __init__(self, scratch: Path, size_bytes: int) -> None:
        """Asks the system about the directory."""
        self.size_bytes = size_bytes
        self.bound: Bound = "unmeasured"
        self.findings: list[Finding] = []
        self.figures: dict[str, float] = {}
        self._storage = LocalStorage(scratch)
        with as_storage_errors("look at", "", scratch):
            place = scratch.resolve(strict=True)
            status = os.statvfs(place)
        mounts = ""
        with suppress(OSError):  # Another system than Linux.
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        self.kind = find_mount(mounts, place)
        # Some network file systems say zero for everything, and some know of no limit of files.
        self.free_bytes = status.f_bavail * status.f_frsize if status.f_blocks else None
        self._free_files = status.f_favail if status.f_files else None

    @property
    def is_fit(self) -> bool:
        """Whether checkpoints are safe there, and fit."""
        return all(finding.status != "unfit" for finding in self.findings)

    @property
    def can_publish(self) -> bool:
        """Whether a save could be committed; where not, there is nothing to measure."""
        return "publish_seconds" in self.figures

    def look(self, *, has_checkpoint: bool) -> None:
        """**Blocks.** Looks at all that a save needs; whether the run has a checkpoint decides how many have to fit."""
        self._look_at_kind()
        self._look_at_publishing()
        self._look_at_direct_writes()
        self._look_at_room(has_checkpoint)
        self._look_at_clock()
        if copy_plan.NATIVE is not None and digesting.find_native() is not None:
            self._note("compiled code", "ok", "in use")
        else:
            hint = "without a C compiler, or with an xxhash that hides its functions: saves block longer"
            self._note("compiled code", "note", "not in use", f"holdfast was installed {hint}")

    def _note(self, name: str, status: Status, text: str, hint: str = "") -> None:
        self.findings.append(Finding(name, status, text, hint))

    def _look_at_kind(self) -> None:
        if self.kind in _IN_MEMORY:
            self._note("file system", "unfit", self.kind, f"{self.kind} is memory: it is gone with the machine")
        elif self.kind in _LAYERED:
            hint = f"{self.kind} is mostly a container's own layer, which ends with it: save to a volume instead"
            self._note("file system", "note", self.kind, hint)
        else:
            self._note("file system", "ok", self.kind or "unknown")

    def _look_at_publishing(self) -> None:
        """A checkpoint is committed by a file that appears whole, for good, and only where there is none yet."""
        samples = []
        first, other = os.urandom(_PUBLISHED_BYTES), os.urandom(_PUBLISHED_BYTES)
        try:
            for number in range(_PUBLISHED_FILES):
                begun_at = time.perf_counter()
                self._storage.publish(f"published-{number}", first)
                samples.append(time.perf_counter() - begun_at)
            is_replaced = self._storage.publish("published-0", other)
            is_replaced = is_replaced or self._storage.read("published-0", 2 * len(first)) != first
        except StorageFullError:
            raise
        except StorageError as error:
            self._note("create-only", "unfit", "it fails", f"{error.message}; {error.hint}")
            return
        if is_replaced:
            hint = "a file that was there has been replaced: two jobs could both believe that theirs is the checkpoint"
            self._note("create-only", "unfit", "it replaces files", hint)
        else:
            self._note("create-only", "ok", "a file that is there is not replaced")
        self.figures["publish_seconds"] = median(samples)
        self._note("fsync", "ok", f"{rough_text(median(samples))} for a small file and its name")

    def _look_at_direct_writes(self) -> None:
        writer = self._storage.open_writer("direct", SMALLEST_DIRECT_BYTES)
        is_direct = writer.is_direct
        writer.abandon()
        self._storage.remove("direct")
        if is_direct:
            self._note("direct I/O", "ok", "large files pass by the page cache")
        else:
            hint = "bytes pass through the page cache, which takes time of the processor from training"
            self._note("direct I/O", "note", "none", hint)

    def _look_at_room(self, has_checkpoint: bool) -> None:
        if self.free_bytes is None:
            self._note("room", "note", "unknown", "the file system does not say how much room it has")
            return
        self.figures["free_bytes"] = self.free_bytes
        free, size = f"{size_text(self.free_bytes)} free", f"a checkpoint of {size_text(self.size_bytes)}"
        if self._free_files is not None and self._free_files < _FEW_FILES:
            self._note("room", "unfit", free, f"there is room for {self._free_files} files only (inodes): remove some")
        elif self.free_bytes < self.size_bytes:
            self._note("room", "unfit", free, f"{size} does not fit: remove old ones, or save elsewhere")
        elif error := self._try_room():
            self._note("room", "unfit", free, f"{size} does not fit, for all that: {error.message}; {error.hint}")
        elif self.free_bytes < 2 * self.size_bytes and not has_checkpoint:
            hint = f"only {size} fits, and the second is written before the first is removed"
            self._note("room", "note", free, hint)
        else:
            self._note("room", "ok", free)

    def _try_room(self) -> StorageError | None:
        """Takes the room for a moment, since a quota shows only then."""
        if self.kind in _IN_MEMORY:
            return None
        try:
            self._storage.open_writer("room", self.size_bytes).abandon()
        except StorageFullError as error:
            return error
        self._storage.remove("room")
        return None

    def _look_at_clock(self) -> None:
        before = time.time()
        self._storage.write("clock", b"x")
        with as_storage_errors("look at", "clock", Path(self._storage.url)):
            written_at = (Path(self._storage.url) / "clock").stat().st_mtime
        ahead_seconds = max(written_at - time.time(), 0.0) or min(written_at - before, 0.0)
        self.figures["clock_ahead_seconds"] = ahead_seconds
        if abs(ahead_seconds) <= _CLOCK_SECONDS:
            self._note("clock", "ok", "agrees with the file system's")
            return
        text = f"the file system's is {abs(ahead_seconds):.0f} s {'ahead' if ahead_seconds > 0 else 'behind'}"
        self._note("clock", "note", text, f"{text}: ages that are shown will be wrong; let a time server set both")

    def measure(self, trial_bytes: int | None, tell: Callable[[str], None]) -> None:
        """**Blocks.** Saves and restores as a job does; what that takes is scaled up to the size of the state.

        Args:
            trial_bytes: How much is really saved; None for as much as is quickly done.
            tell: Told what is being done.

        Raises:
            StorageFullError: If there is too little room.
            SaveFailedError: If the place fails in a save.
        """
        tell("writing a first file")
        trial_bytes = self._choose_trial_bytes() if trial_bytes is None else min(trial_bytes, self.size_bytes)
        if self.free_bytes is not None and 2 * trial_bytes > self.free_bytes:
            raise StorageFullError(
                f"a trial of {trial_bytes} bytes takes twice as much room, and {self.free_bytes} bytes are free",
                hint="Make room, or measure with less (--trial).",
            )
        directory = Path(self._storage.url) / "run"
        objects = Checkpoint(model=_make_arrays(trial_bytes))
        blocked, durable, restored = [], [], []
        is_cold = True
        with _open_manager(directory, objects) as manager:
            for number in range(1, _SAVES + 1):
                tell(f"saving, {number} of {_SAVES}")
                begun_at = time.perf_counter()
                handle = manager.save(number)
                blocked.append(time.perf_counter() - begun_at)
                place = Path(handle.wait_committed())
                durable.append(time.perf_counter() - begun_at)
                manager.wait()
                tell(f"restoring, {number} of {_SAVES}")
                with as_storage_errors("read", "", place):
                    is_cold = _forget(place) and is_cold
                # A manager that has restored opens a generation when it saves next, which a job does only once.
                with _open_manager(directory, objects) as reader:
                    begun_at = time.perf_counter()
                    reader.restore()
                    restored.append(time.perf_counter() - begun_at)
            is_reused = has_spare(directory)
        how = "saves are written over the files of removed ones" if is_reused else "each save writes new files"
        self._note("reuse of space", "ok", how)
        text = "measured from the disk" if is_cold else "measured from the page cache, which does not let go of files"
        self._note("restore", "ok", text)
        times = self.size_bytes / trial_bytes
        self.figures |= {
            "trial_bytes": trial_bytes,
            # The first one, which imports and touches fresh memory, is left out: it is no measure for others.
            "blocked_seconds": median(blocked[1:]) * times,
            # From the third on a save may be written over a removed one.
            "durable_seconds": median(durable[2:]) * times,
            "restore_seconds": median(restored) * times,
            "write_bytes_per_second": trial_bytes / median(durable[2:]),
            "read_bytes_per_second": trial_bytes / median(restored),
        }

    def _choose_trial_bytes(self) -> int:
        """As much as is saved in a short time, and leaves most of the room to others."""
        room_bytes = self.size_bytes if self.free_bytes is None else max(self.free_bytes // _ROOM_TIMES, 1)
        least, most = _TRIAL_BYTES
        if self.size_bytes <= least:
            return min(self.size_bytes, room_bytes)
        pilot_bytes = min(_PILOT_BYTES, room_bytes)
        with mmap.mmap(-1, pilot_bytes) as memory:
            memory.write(np.random.default_rng(0).bytes(pilot_bytes))
            begun_at = time.perf_counter()
            writer = self._storage.open_writer("first", pilot_bytes)
            try:
                with memoryview(memory) as image:
                    writer.write_at(0, image)
                writer.finish()
            finally:
                writer.abandon()
            rate = pilot_bytes / (time.perf_counter() - begun_at)
        self._storage.remove("first")
        return min(max(int(rate * _SAVE_SECONDS), least), most, room_bytes, self.size_bytes)

    def advise(self, mtbf_seconds: float) -> None:
        """**Pure.** Finds how often to save by what was measured, as `Auto` does, and what is lost with that."""
        blocked, durable = self.figures["blocked_seconds"], self.figures["durable_seconds"]
        moment = SaveMoment(step=0, save_blocked_seconds=blocked, save_durable_seconds=durable)
        chosen = Auto(mtbf_seconds=mtbf_seconds).chosen(moment)
        self.bound = chosen.bound
        interval_seconds = math.ceil(chosen.seconds)
        losses = expect_losses(
            interval_seconds,
            stall_seconds=blocked,
            durable_seconds=durable,
            restore_seconds=self.figures["restore_seconds"],
            mtbf_seconds=mtbf_seconds,
        )
        self.figures |= {
            "mtbf_seconds": mtbf_seconds,
            "young_seconds": math.sqrt(2 * blocked * mtbf_seconds),
            "interval_seconds": interval_seconds,
            "per_failure_seconds": losses.per_failure_seconds,
            "lost_share": losses.lost_share,
        }


def _open_manager(directory: Path, objects: Checkpoint) -> CheckpointManager:
    # Alone, whatever job the environment speaks of: a shell within one of its workers, say.
    return CheckpointManager(directory, objects, keep=Latest(1), timeout_seconds=_TIMEOUT_SECONDS, cluster="alone")


def _make_arrays(size_bytes: int) -> dict[str, Any]:
    """Arrays as large as a model's, of bytes that no disk can make smaller."""
    random = np.frombuffer(np.random.default_rng(0).bytes(min(size_bytes, _ARRAY_BYTES)), np.uint8)
    sizes = [min(_ARRAY_BYTES, size_bytes - begin) for begin in range(0, size_bytes, _ARRAY_BYTES)]
    return {f"layers.{number}.weight": random[:size].copy() for number, size in enumerate(sizes)}


def _forget(directory: Path) -> bool:
    """Has the page cache let go of files; True if it does. `OSError` goes through."""
    if not hasattr(os, "posix_fadvise"):
        return False
    is_forgotten = True
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size_bytes = os.fstat(descriptor).st_size
            with closing(Residency(descriptor, size_bytes)) as residency:
                is_forgotten = is_forgotten and not (size_bytes and residency.holds(0, size_bytes))
        finally:
            os.close(descriptor)
    return is_forgotten
