"""The machine's memory: how much is left, a state that stands for a model's, and how fast it is copied and digested."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from holdfast.errors import UsageError
from holdfast.format.digests import SPAN_BYTES, digest
from holdfast.format.layout import round_up
from holdfast.save.buffer import HostBuffer
from holdfast.save.moves import plan_copies
from holdfast.save.write import PIECE_BYTES
from holdfast.storage.crew import Crew
from holdfast.storage.local.direct import address_of

_ARRAY_BYTES: Final = 16 << 20
_RANDOM_BYTES: Final = 16 << 20
_SAMPLE_BYTES: Final = 256 << 20
"""How much is copied and digested to find a rate: more than a processor's caches hold."""

_ARRAYS_BEGIN: Final = 64
"""Tensors are aligned to so many bytes, not to a page: what is only fast for whole pages must not look fast here."""


class State:
    """Memory that holds the arrays of a job, touched and full of bytes that no disk can make smaller."""

    def __init__(self, size_bytes: int) -> None:
        """Takes the memory.

        Raises:
            UsageError: If there is none.
        """
        self.size_bytes = size_bytes
        try:
            self._memory = mmap.mmap(-1, round_up(size_bytes + _ARRAYS_BEGIN))
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{size_bytes} bytes of memory cannot be had: {error}", hint="Measure with less (--trial)."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @property
    def image(self) -> memoryview:
        """The memory as a file's bytes: whole pages, beginning on a page."""
        return memoryview(self._memory)[: round_up(self.size_bytes)]

    def fill(self) -> Iterator[int]:
        """Fills it bit by bit; gives how many bytes each time."""
        random = np.frombuffer(np.random.default_rng(0).bytes(_RANDOM_BYTES), np.uint8)
        memory = np.frombuffer(self._memory, np.uint8)
        for begin in range(0, memory.size, _RANDOM_BYTES):
            part = memory[begin : begin + _RANDOM_BYTES]
            np.copyto(part, random[: part.size])
            yield part.size

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, which share the memory."""
        memory = np.frombuffer(self._memory, np.uint8, self.size_bytes, _ARRAYS_BEGIN)
        return {
            f"layers.{number}.weight": memory[begin : begin + _ARRAY_BYTES]
            for number, begin in enumerate(range(0, self.size_bytes, _ARRAY_BYTES))
        }


class MemoryProbe:
    """Copies and digests a part of a state as a save does. Each result is a rate in bytes a second."""

    def __init__(self, state: State, crew: Crew) -> None:
        self._source = state.image[: min(state.size_bytes, _SAMPLE_BYTES)]
        self._crew = crew
        self._buffer = HostBuffer()

    @property
    def size_bytes(self) -> int:
        """How much is copied or digested each time."""
        return len(self._source)

    def copy(self) -> float:
        """**Blocks.** Copies into memory of its own; that is fresh at the first call, and touched from then on."""
        begun_at = time.perf_counter()
        target = self._buffer.take(self.size_bytes)
        copies = plan_copies([(address_of(target), address_of(self._source), self.size_bytes)])
        self._crew.run(copy.run for copy in copies)
        return self.size_bytes / (time.perf_counter() - begun_at)

    def digest(self) -> float:
        """**Blocks.** Takes the digests of all spans."""

        def digest_piece(begin: int, end: int) -> None:
            for span in range(begin, end, SPAN_BYTES):
                digest(self._source[span : min(span + SPAN_BYTES, end)])

        begun_at = time.perf_counter()
        self._crew.run(self._jobs(digest_piece))
        return self.size_bytes / (time.perf_counter() - begun_at)

    def _jobs(self, work: Callable[[int, int], None]) -> Iterator[Callable[[], None]]:
        for begin in range(0, self.size_bytes, PIECE_BYTES):
            yield partial(work, begin, min(begin + PIECE_BYTES, self.size_bytes))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How much memory may still be taken: what the machine has left, or what the limits of its control groups leave.

    None if the system does not say.
    """
    found = [size for size in (_machine_bytes(proc), *_group_bytes(proc, cgroups)) if size is not None]
    return min(found, default=None)


def _machine_bytes(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What the limit of the process's control group, and of those around it, leaves."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                # Pages of files count as used, and go when memory is needed.
                yield max(int(limit) - int(used) + _file_bytes(group), 0)
            if group == root:
                break
            group = group.parent


def _file_bytes(group: Path) -> int:
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
