"""What the machine is, and what it can do at best: copies from the device, pinning, and the disk."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.findings import FILES, report
from benchmarks.gpu.training import pick_device, synchronize
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.timing import timed

_BYTES = 1 << 30


def main() -> None:
    """Reports each thing as it is known."""
    device = pick_device()
    is_real = device.type == "cuda"
    size_bytes = _BYTES if is_real else _BYTES // 100
    place = Path(os.environ.get(FILES) or tempfile.gettempdir())
    machine = describe_machine(place)
    report(machine={name: getattr(machine, name) for name in machine.__struct_fields__})
    shared = shutil.disk_usage("/dev/shm").total / 1e9 if Path("/dev/shm").exists() else 0
    report(
        say=f"machine: {machine.processor}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB; files on "
        f"{machine.file_system}, {shutil.disk_usage(place).free / 1e9:.0f} GB free; /dev/shm {shared:.1f} GB"
    )
    if is_real:
        report(say=f"CUDA {torch.version.cuda}, driver {_driver()}, compute {torch.cuda.get_device_capability(device)}")
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    for name, target in {
        "pinned by torch": torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_real),
        "plain": torch.zeros(size_bytes, dtype=torch.uint8),
    }.items():

        def copy(target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)
            synchronize(device)

        copy()
        seconds = min(timed(copy) for _ in range(3))
        report(say=f"device to {name} memory: {size_bytes / seconds / 1e9:.1f} GB/s", copy=name, seconds=seconds)
    if is_real:
        _register(size_bytes)
    begun_at = time.perf_counter()
    with tempfile.TemporaryFile(dir=place) as file:
        with mmap.mmap(-1, 16 << 20) as piece:
            piece.write(os.urandom(16 << 20))
            for _ in range(max(1, size_bytes // (16 << 20))):
                os.write(file.fileno(), memoryview(piece))
        os.fsync(file.fileno())
    report(say=f"disk, one writer with fsync: {size_bytes / (time.perf_counter() - begun_at) / 1e9:.2f} GB/s")


def _register(size_bytes: int) -> None:
    """How long it takes to pin memory that is there already, as holdfast does."""
    import ctypes

    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * size_bytes).from_buffer(memory)
        address = ctypes.addressof(view)
        runtime = torch.cuda.cudart()
        begun_at = time.perf_counter()
        code = int(runtime.cudaHostRegister(address, size_bytes, 1))
        seconds = time.perf_counter() - begun_at
        if code == 0:
            runtime.cudaHostUnregister(address)
        del view
    report(
        say=f"cudaHostRegister of {size_bytes / 1e9:.1f} GB: {seconds:.2f} s, code {code}", seconds=seconds, code=code
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    main()
