"""One way of saving, on one size of state: `python -m benchmarks.gpu.contender --peer NAME --gigabytes SIZE`."""

from __future__ import annotations

import argparse
import gc
import importlib
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.findings import BARE, FILES, report
from benchmarks.gpu.host_memory import HostMemory
from benchmarks.gpu.training import GpuTraining, synchronize
from benchmarks.harness.limits import read_into, write_directly
from benchmarks.harness.page_cache import drop
from benchmarks.harness.timing import timed
from benchmarks.peers import find_missing
from holdfast.format.index import round_up
from holdfast.storage.protocol import PIECE_BYTES

STEPS_BETWEEN: Final = 20
"""Steps between two saves."""

_LARGEST_ON_DISK: Final = 6.0
"""Of a larger state in GB there is no time to write and read as many bytes barely."""

_THREADS: Final = 6
"""As many as holdfast has by default."""

_ROOM: Final = 2.3
"""So many times the state is on the disk at once, at most."""


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """Where a peer's class is, the packages that not everybody has, and what it takes of shared memory."""

    place: str
    needs: tuple[str, ...] = ()
    is_shared: bool = False


PEERS: Final = {
    "holdfast": GpuEntry("benchmarks.peers.holdfast_manager:Holdfast"),
    "holdfast, overlapped": GpuEntry("benchmarks.peers.holdfast_manager:Overlapped"),
    "torch.save": GpuEntry("benchmarks.peers.torch_save:TorchSave"),
    "DCP async, thread": GpuEntry("benchmarks.peers.dcp:InThreadPinned"),
    "DCP async, process": GpuEntry("benchmarks.peers.dcp:InProcessPinned", is_shared=True),
    "torch_checkpointing": GpuEntry(
        "benchmarks.peers.torch_checkpointing_manager:TorchCheckpointingPinned", ("torch_checkpointing",), True
    ),
}


def main() -> None:
    """Measures, and reports each figure as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--gigabytes", required=True, type=float)
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="contender-", dir=os.environ.get(FILES)))
    try:
        problem = _find_problem(PEERS[asked.peer], asked.gigabytes, place)
        if problem:
            report(peer=asked.peer, size=asked.gigabytes, note=problem)
        else:
            measure(asked.peer, asked.gigabytes, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _find_problem(entry: GpuEntry, gigabytes: float, place: Path) -> str:
    """What the machine lacks for it: a row of the table that says so."""
    if missing := find_missing(entry.needs):
        return f"not installed: {', '.join(missing)}"
    free = shutil.disk_usage(place).free / 1e9
    if free < _ROOM * gigabytes:
        return f"needs {_ROOM * gigabytes:.1f} GB of disk, {free:.1f} are free"
    # Who writes to a file of shared memory that has no room ends by a signal.
    shared = shutil.disk_usage("/dev/shm").free / 1e9 if Path("/dev/shm").exists() else 0.0
    if entry.is_shared and shared < 1.1 * gigabytes:
        return f"needs {1.1 * gigabytes:.1f} GB of shared memory, /dev/shm has {shared:.1f}"
    return ""


def measure(name: str, gigabytes: float, place: Path) -> None:
    """**Blocks.** All figures of one peer."""

    def tell(**figures: Any) -> None:
        report(peer=name, size=gigabytes, **figures)

    training = GpuTraining(gigabytes)
    device, state = training.device, training.state
    for _ in range(2):
        training.step()
    synchronize(device)
    if name == "holdfast":
        report(peer=BARE, size=gigabytes, free_seconds=copy_barely(training), state_bytes=state.size_bytes)
        if gigabytes < _LARGEST_ON_DISK:
            write_seconds, read_seconds = write_and_read_barely(place, state.size_bytes)
            report(peer=BARE, size=gigabytes, durable_seconds=write_seconds, restore_seconds=read_seconds)
    module, _, cls = PEERS[name].place.partition(":")
    peer = getattr(importlib.import_module(module), cls)()
    host = HostMemory()
    peer.open(place, state, keep=1)
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        peer.save(step)

    returned, freed, durable, beyond = [], [], [], [0]
    with host.watch():
        # The first, which takes memory and pins it, and what is like all that follow.
        for number in range(3 if gigabytes > 6 or device.type == "cpu" else 4):
            training.step()
            held_bytes = _reset_peak(device)
            begun_at = time.perf_counter()
            save()
            returned.append(time.perf_counter() - begun_at)
            freed.append(returned[-1] + peer.wait_copied())
            peer.wait_durable()
            durable.append(time.perf_counter() - begun_at)
            if device.type == "cuda":
                beyond.append(torch.cuda.max_memory_allocated(device) - held_bytes)
            peer.retain(step)
            if number == 0:
                tell(first_seconds=freed[0], first_durable_seconds=durable[0])
        tell(
            returns_seconds=statistics.median(returned[1:]),
            free_seconds=statistics.median(freed[1:]),
            durable_seconds=statistics.median(durable[1:]),
            saves_seconds=freed,
        )
    tell(host_bytes=host.peak_bytes, device_bytes=max(beyond))
    step = _lose_time(training, peer, save, tell, lambda: step)
    _restore(training, peer, step, place, tell)
    peer.close()


def copy_barely(training: GpuTraining) -> float:
    """**Blocks.** The median time to copy each tensor of the state to its place in one piece of pinned memory."""
    tensors = [tensor.detach() for tensor in training.state.tensors().values()]
    is_real = training.device.type == "cuda"
    memory = torch.empty(training.state.size_bytes, dtype=torch.uint8, pin_memory=is_real)
    pairs, begin = [], 0
    for tensor in tensors:
        pairs.append((memory[begin : begin + tensor.nbytes], tensor.reshape(-1).view(torch.uint8)))
        begin += tensor.nbytes

    def copy() -> None:
        for place, values in pairs:
            place.copy_(values, non_blocking=True)
        synchronize(training.device)

    synchronize(training.device)
    copy()
    seconds = statistics.median(timed(copy) for _ in range(5))
    pairs.clear()
    del memory
    gc.collect()
    if is_real:
        getattr(torch._C, "_host_emptyCache", gc.collect)()
    return seconds


def write_and_read_barely(place: Path, size_bytes: int) -> tuple[float, float]:
    """**Blocks.** The median seconds of direct writes over a file that is there, synced, and of direct reads of it."""
    with mmap.mmap(-1, round_up(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view, path = memoryview(memory), place / "bare"
        for begin in range(0, len(view), 1 << 20):
            view[begin : begin + 8] = begin.to_bytes(8, "little")
        write_directly(path, view, PIECE_BYTES, _THREADS)
        writes = [timed(lambda: write_directly(path, view, PIECE_BYTES, _THREADS, os.O_WRONLY)) for _ in range(3)]
        reads = [timed(lambda: read_into(path, view, PIECE_BYTES, _THREADS)) for _ in range(3)]
        path.unlink()
        view.release()
    return statistics.median(writes), statistics.median(reads)


def _lose_time(
    training: GpuTraining,
    peer: Any,
    save: Callable[[], None],
    tell: Callable[..., None],
    newest: Callable[[], int],
) -> int:
    """**Blocks.** What a save costs a training loop, that does not wait for anything but what the peer has it wait for.

    The write goes on beside the steps; where it lasts longer than these, it is waited for outside of what is measured.
    """
    is_dry = training.device.type == "cpu"
    allow_update = (lambda: None) if peer.waits_by_itself else peer.wait_copied
    steps = 2 if is_dry else STEPS_BETWEEN
    training.run(2)
    plain = [training.run(steps) for _ in range(2)]
    lost = []
    for _ in range(1 if is_dry else 2 if training.state.size_bytes > 6e9 else 3):
        seconds = training.run(steps, save, allow_update)
        lost.append(seconds - statistics.median(plain))
        peer.wait_durable()
        peer.retain(newest())
        plain.append(training.run(steps))
    between = statistics.median(plain)
    lost_seconds = statistics.median(lost)
    tell(
        lost_seconds=lost_seconds,
        lost_percent=100 * lost_seconds / between,
        between_seconds=between,
        without_seconds=plain,
        all_lost_seconds=lost,
    )
    return newest()


def _restore(training: GpuTraining, peer: Any, step: int, place: Path, tell: Callable[..., None]) -> None:
    """**Blocks.** From the disk, into the live tensors; every bit is compared."""
    # What was saved is of a few steps ago: save what is there now.
    peer.save(step + 1)
    peer.wait_copied()
    peer.wait_durable()
    expected = training.state.checksums()
    training.state.lose_values()
    cached = drop(place)
    synchronize(training.device)

    def restore() -> None:
        peer.restore(step + 1)
        synchronize(training.device)

    seconds = timed(restore)
    note = "" if cached < 0.01 else f"{cached:.0%} of the files were still in the page cache"
    found = training.state.checksums()
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        note = f"WRONG VALUES after the restore: {len(wrong)} tensors, such as {wrong[0]}"
    tell(restore_seconds=seconds, **({"note": note} if note else {}))
    if wrong:
        raise SystemExit(note)


def _reset_peak(device: torch.device) -> int:
    synchronize(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    main()
