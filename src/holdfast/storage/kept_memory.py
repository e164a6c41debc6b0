"""Memory that outlives a training program: its newest images stay in a process beside it, for the next start."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from holdfast.format.names import StepName
from holdfast.numbers import check_whole
from holdfast.storage.checks import taking_options_by_name
from holdfast.storage.kept_images import ImageRecord, KeptImage, KeptImages
from holdfast.supervise.client import find_own_place
from holdfast.supervise.keeper import PATIENCE_SECONDS
from holdfast.supervise.launch import KEEPER, make_command, receive, tell

_TALK_SECONDS: Final = 10.0
_TRIES: Final = 3
_SHARE: Final = 0.9
"""Of the free memory the images take at most so much: other programs, and the page cache, need some."""


@taking_options_by_name
@dataclass(frozen=True)
class HostMemory:
    """The host memory of this machine as the first of `Tiers`: the newest saves survive the training process there.

    A process that dies by a crash, SIGKILL or a lost GPU loses at most the save whose copy was under way; the next one
    on this machine restores from memory. It takes twice the memory of the state. Memory goes with the machine: a save
    counts as committed in the next tier only.

    Attributes:
        keep_seconds: How long the memory is kept after the last process has died, if no new one starts.
    """

    _: KW_ONLY
    keep_seconds: int = 300

    def __post_init__(self) -> None:
        check_whole("HostMemory(keep_seconds)", self.keep_seconds, 1)


class KeptMemory:
    """The images of one worker, and the connection to the process that keeps them. Not thread-safe.

    Attributes:
        images: What can be read: at first what earlier processes left, of all workers on this machine.
        keeper: The process that keeps the images, in words that are the same for all workers that share it.
        problem: Why no images are kept; empty if they are.
    """

    def __init__(self, options: HostMemory, url: str) -> None:
        """Starts nothing yet; `url` is that of the first tier that outlives this machine's processes."""
        self._options, self._url = options, url
        self.images = KeptImages()
        self.keeper = ""
        self.problem = "" if sys.platform == "linux" else "it needs Linux"
        self._connection: socket.socket | None = None
        # The two images of this worker, and which of them is the newest whole one.
        self._own: dict[int, KeptImage] = {}
        self._newest = self._taken = -1
        self._descriptors: list[int] = []
        self._leaving: weakref.finalize[[socket.socket, list[int]], KeptMemory] | None = None

    @property
    def is_open(self) -> bool:
        """True if images are kept."""
        return self._connection is not None and not self.problem

    def open(self, rank: int, start: str) -> None:
        """**Blocks.** Connects to the process that keeps the images, which is started if there is none.

        If a process of an earlier start does not end, or there is no such process to be had, none are kept.

        Args:
            rank: The rank of this worker.
            start: What all workers of this start have in common, and no other one has.
        """
        for _ in range(0 if self.problem else _TRIES):
            try:
                self._connection = connection = self._connect()
            except OSError as error:
                self.problem = str(error)
                return
            if tell(connection, {"start": start, "rank": rank}) and (received := receive(connection)) is not None:
                break
            # It had nothing to do any more, and ended just now.
            connection.close()
        else:
            self.problem = self.problem or "the process that keeps it does not answer"
            return
        answer = received[0]
        if not answer["is_alone"]:
            self.problem = "a process of an earlier start of this run, on this machine, is still there"
            if answer["is_own"]:
                self.problem = "another manager of this process has the run open: close that one first"
            connection.close()
            self._connection = None
            return
        self._leaving = weakref.finalize(self, _leave, connection, self._descriptors)
        self._leaving.atexit = False
        self.keeper = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {answer['keeper']}"
        whole: dict[int, tuple[int, int, int]] = {}
        for _ in range(answer["images"]):
            received = receive(connection)
            if received is None or len(received[1]) != 2:
                self.problem = "the process that keeps it has ended"
                return
            image = self._hold(*received[1])
            record = image.read()
            if record is not None:
                self.images.add(image, record)
            if received[0]["rank"] != rank:
                continue
            self._own[received[0]["number"]] = image
            if record is not None:
                whole[received[0]["number"]] = record.generation, record.step, record.attempt
        self._newest = max(whole, key=whole.__getitem__, default=-1)

    def grow(self, size_bytes: int) -> dict[int, int]:
        """Returns the descriptors of both images by number, with memory of at least that size; what is whole stays so.

        Raises `OSError` or `MemoryError` if there is not enough.
        """
        lacking_bytes = 0
        for number in (0, 1):
            held_bytes = os.fstat(self._own[number].data).st_blocks * 512 if number in self._own else 0
            lacking_bytes += max(size_bytes - held_bytes, 0)
        free_bytes = find_free_bytes()
        if free_bytes is not None and lacking_bytes > free_bytes * _SHARE:
            raise MemoryError(f"two images take {lacking_bytes:,} bytes more, and {free_bytes:,} are free")
        for number in (0, 1):
            if number not in self._own:
                image = self._hold(os.memfd_create("holdfast-image"), os.memfd_create("holdfast-record"))
                self._own[number] = image
                if self._connection is None or not tell(self._connection, {"image": number}, image):
                    raise ConnectionError("the process that keeps them has ended")
            if os.fstat(self._own[number].data).st_size < size_bytes:
                os.ftruncate(self._own[number].data, size_bytes)
        return {number: image.data for number, image in self._own.items()}

    def take(self) -> int:
        """Returns the number of the image that is to be written next, which is not whole any more.

        It is not the newest whole one. Raises `OSError` if there is no process any more that keeps it.
        """
        poll = select.poll()  # Unlike `select`, in a process with thousands of open files, too.
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN)
        if poll.poll(0):  # It sends nothing by itself.
            raise ConnectionError("the process that keeps them has ended")
        self._taken = 1 - self._newest if self._newest >= 0 else 0
        image = self._own[self._taken]
        self.images.remove(image)
        image.unseal()
        return self._taken

    def keep(self, record: ImageRecord) -> None:
        """Says that the image that was taken last is whole."""
        image = self._own[self._taken]
        try:
            image.seal(record)
        except OSError as error:
            self.problem = f"no memory for the record of an image: {error}"
            image.unseal()
            return
        self._newest = self._taken
        self.images.add(image, record)

    def forget(self, name: StepName) -> None:
        """Says that the image of a save, if it is there, is not to be restored."""
        image = self._own.get(self._newest)
        if image is not None and (record := image.read()) is not None and record.name == name:
            self.images.remove(image)
            image.unseal()
            self._newest = 1 - self._newest

    def give_up(self, problem: str) -> str:
        """Keeps no images any more, and gives back their memory; returns why."""
        self.problem = self.problem or problem
        self.close(is_done=True)
        return self.problem

    def close(self, *, is_done: bool) -> None:
        """**Blocks** for a moment. Writes no more; if the run `is_done`, nothing of this worker is kept."""
        leaving, connection = self._leaving, self._connection
        self._leaving = self._connection = None
        self.images.clear()
        self._own = {}
        if leaving is not None and connection is not None:
            leaving.detach()
            _leave(connection, self._descriptors, is_done=is_done)

    def _hold(self, data: int, record: int) -> KeptImage:
        self._descriptors += data, record
        return KeptImage(data, record)

    def _connect(self) -> socket.socket:
        place = find_own_place(outlasts_login=True)
        if place is None:
            raise OSError("there is no directory of this user alone for a socket; set XDG_RUNTIME_DIR")
        name = f"memory-{hashlib.sha256(self._url.encode()).hexdigest()[:24]}"
        path = place / name
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(OSError):
                return _try_connect(path)
            self._start(path)
            return _try_connect(path)

    def _start(self, path: Path) -> None:
        """**Blocks.** Starts the process that keeps the images."""
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(128)
            code = f"from holdfast.tiering.unwritten import main; main({self._url!r})"
            finisher = [sys.executable, "-c", code]
            arguments = listener.fileno(), str(path), self._options.keep_seconds, finisher
            command = make_command("keeper", *arguments, flags=["-S", "-E"], show=KEEPER)
            nowhere = subprocess.DEVNULL
            subprocess.run(
                command, stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=[listener.fileno()], check=False
            )


def _leave(connection: socket.socket, descriptors: list[int], *, is_done: bool = False) -> None:
    if tell(connection, {"leave": is_done}):
        receive(connection)
    connection.close()
    while descriptors:
        os.close(descriptors.pop())


def _try_connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_TALK_SECONDS + PATIENCE_SECONDS)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def find_free_bytes() -> int | None:
    """Returns how much memory this process may still take, of the machine's and its container's; None if unknown."""
    found: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError, StopIteration):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = Path("/sys/fs/cgroup") / own[3:].lstrip("/")
        for one in (group, *group.parents):
            with suppress(OSError, ValueError):
                limit = int((one / "memory.max").read_text())
                found.append(limit - int((one / "memory.current").read_text()) + _cached_bytes(one))
    with suppress(OSError, ValueError):
        old = Path("/sys/fs/cgroup/memory")
        limit = int((old / "memory.limit_in_bytes").read_text())
        found.append(limit - int((old / "memory.usage_in_bytes").read_text()) + _cached_bytes(old))
    return min(found, default=None)


def _cached_bytes(group: Path) -> int:
    """Returns how much of a group's memory is a cache of files, which goes when memory is needed."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (group / "memory.stat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
    return 0
