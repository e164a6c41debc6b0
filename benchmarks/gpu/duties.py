"""The orders of a part: one way of saving on one size of state, the tests, or the device itself."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from benchmarks.gpu.training import GpuTraining, pick_device, synchronize
from benchmarks.harness.limits import read_into, write_directly
from benchmarks.harness.messages import MissingError
from benchmarks.harness.page_cache import drop
from benchmarks.harness.timing import timed
from benchmarks.harness.worker import Duties, load
from benchmarks.peers import check_installed
from benchmarks.peers.holdfast_manager import Holdfast
from holdfast.format.index import round_up
from holdfast.storage.protocol import PIECE_BYTES

_STEPS_BETWEEN: Final = 20
"""Steps between two saves."""
_THREADS: Final = 6
"""As many as holdfast has by default."""
_ROOM: Final = 2.3
"""So many times the state is on the disk at once, at most."""
_PINNED_BYTES: Final = 1 << 30
_JAX_WIDTH: Final = 4096


class GpuPeer(NamedTuple):
    """A way of saving: the place of its class, the packages that are not installed everywhere, its shared memory."""

    place: str
    needs: Sequence[str] = ()
    is_shared: bool = False


PEERS: Final = {
    "holdfast": GpuPeer("benchmarks.peers.holdfast_manager:Holdfast"),
    "holdfast, overlapped": GpuPeer("benchmarks.peers.holdfast_manager:Overlapped"),
    "torch.save": GpuPeer("benchmarks.peers.one_file:TorchSave"),
    "DCP async, thread": GpuPeer("benchmarks.peers.dcp:InThreadPinned"),
    "DCP async, process": GpuPeer("benchmarks.peers.dcp:InProcessPinned", is_shared=True),
    "torch_checkpointing": GpuPeer(
        "benchmarks.peers.torch_checkpointing_manager:TorchCheckpointingPinned", ("torch_checkpointing",), True
    ),
    "JAX: holdfast": GpuPeer("benchmarks.gpu.duties:HoldfastJax", ("jax",)),
    "JAX: Orbax async": GpuPeer("benchmarks.peers.orbax_manager:OrbaxUncompressed", ("jax", "orbax-checkpoint")),
}


class _SavingDuties(Duties):
    """Saves and restores a state that changes between the saves."""

    def __init__(self, peer: str, gigabytes: float, directory: str) -> None:
        self._entry, self._gigabytes, self._directory = PEERS[peer], gigabytes, Path(directory)
        self._step = 0
        check_installed(self._entry.needs)
        if problem := _find_problem(self._entry, gigabytes, self._directory):
            raise MissingError(problem)
        self.state: Any = None

    def open(self) -> None:
        """Opens the way of saving."""
        self._peer = load(self._entry.place)()
        self._peer.open(self._directory, self.state, keep=1)

    def first_save(self) -> dict[str, float]:
        """The first save, which takes memory and pins it."""
        figures = self._save()
        return {"first_seconds": figures["free_seconds"], "first_durable_seconds": figures["durable_seconds"]}

    def saves(self) -> dict[str, float]:
        """Saves like all that follow; medians."""
        found = [self._save() for _ in range(self._count_saves())]
        return {key: median(figures[key] for figures in found) for key in found[0]} | {
            "device_bytes": max(figures["device_bytes"] for figures in found)
        }

    def restore(self) -> dict[str, float]:
        """From the disk, of what is there now; every bit is compared."""
        self._step += 1
        self._peer.save(self._step)
        self._peer.wait_copied()
        self._peer.wait_durable()
        expected = self.state.checksums()
        self.state.lose_values()
        cached = drop(self._directory)

        def restore() -> None:
            self._peer.restore(self._step)
            self.synchronize()

        self.synchronize()
        seconds = timed(restore)
        found = self.state.checksums()
        if wrong := [name for name in expected if found[name] != expected[name]]:
            raise ValueError(f"WRONG VALUES after the restore: {len(wrong)} tensors, such as {wrong[0]}")
        self.note = "" if cached < 0.01 else f"{cached:.0%} of the files were still in the page cache before a restore"
        return {"restore_seconds": seconds}

    def close(self) -> None:
        """Closes the way of saving."""
        self._peer.close()

    @abstractmethod
    def advance(self) -> None:
        """Changes the state, as a step of training does."""

    @abstractmethod
    def synchronize(self) -> None:
        """**Blocks** until the device has done all that it was asked for."""

    def _count_saves(self) -> int:
        return 3

    def _save(self) -> dict[str, float]:
        self._step += 1
        self.advance()
        held_bytes = self._reset_peak()
        begun_at = time.perf_counter()
        self._peer.save(self._step)
        returned = time.perf_counter() - begun_at
        free = returned + self._peer.wait_copied()
        self._peer.wait_durable()
        durable = time.perf_counter() - begun_at
        device_bytes = float(self._count_peak() - held_bytes)
        self._peer.retain(self._step)
        figures = {"returns_seconds": returned, "free_seconds": free, "durable_seconds": durable}
        return {**figures, "device_bytes": device_bytes}

    def _reset_peak(self) -> int:
        return 0

    def _count_peak(self) -> int:
        return 0


class GpuDuties(_SavingDuties):
    """Trains in torch, and saves."""

    def __init__(self, peer: str, gigabytes: float, directory: str) -> None:
        super().__init__(peer, gigabytes, directory)
        self._training = GpuTraining(gigabytes)
        self._device, self.state = self._training.device, self._training.state
        self._training.run(2)

    def copy_barely(self) -> dict[str, float]:
        """The median time to copy each tensor of the state to its place in one piece of pinned memory."""
        is_real = self._device.type == "cuda"
        memory = torch.empty(self.state.size_bytes, dtype=torch.uint8, pin_memory=is_real)
        pairs, begin = [], 0
        for tensor in self.state.homes.values():
            pairs.append((memory[begin : begin + tensor.nbytes], tensor.reshape(-1).view(torch.uint8)))
            begin += tensor.nbytes

        def copy() -> None:
            for place, values in pairs:
                place.copy_(values, non_blocking=True)
            self.synchronize()

        self.synchronize()
        copy()
        seconds = median(timed(copy) for _ in range(5))
        pairs.clear()
        del memory
        gc.collect()
        if is_real:
            getattr(torch._C, "_host_emptyCache", gc.collect)()
        return {"free_seconds": seconds, "state_bytes": float(self.state.size_bytes)}

    def use_disk_barely(self) -> dict[str, float]:
        """The median times of direct writes over a file that is there, synced, and of direct reads of it."""
        with mmap.mmap(-1, round_up(self.state.size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            view, path = memoryview(memory), self._directory / "bare"
            for begin in range(0, len(view), 1 << 20):
                view[begin : begin + 8] = begin.to_bytes(8, "little")
            write_directly(path, view, PIECE_BYTES, _THREADS)
            writes = [timed(lambda: write_directly(path, view, PIECE_BYTES, _THREADS, os.O_WRONLY)) for _ in range(3)]
            reads = [timed(lambda: read_into(path, view, PIECE_BYTES, _THREADS)) for _ in range(3)]
            path.unlink()
            view.release()
        return {"durable_seconds": median(writes), "restore_seconds": median(reads)}

    def lose(self) -> dict[str, float]:
        """The cost of a save in a training loop that waits for nothing but what the way of saving has it wait for.

        The write goes on during the steps; where it lasts longer than these, it is waited for outside of what is
        measured.
        """
        training, is_dry = self._training, self._device.type == "cpu"
        allow_update: Callable[[], object] = (lambda: None) if self._peer.waits_by_itself else self._peer.wait_copied
        steps = 2 if is_dry else _STEPS_BETWEEN
        training.run(2)
        plain = [training.run(steps) for _ in range(2)]
        lost = []
        for _ in range(1 if is_dry else 2 if self.state.size_bytes > 6e9 else 3):
            self._step += 1
            seconds = training.run(steps, lambda: self._peer.save(self._step), allow_update)
            lost.append(seconds - median(plain))
            self._peer.wait_durable()
            self._peer.retain(self._step)
            plain.append(training.run(steps))
        figures = {"lost_seconds": median(lost), "between_seconds": median(plain)}
        return {**figures, "lost_percent": 100 * median(lost) / median(plain)}

    def advance(self) -> None:
        """One step."""
        self._training.step()

    def synchronize(self) -> None:
        """**Blocks** until the device has done all that it was asked for."""
        synchronize(self._device)

    def _count_saves(self) -> int:
        return 2 if self._gigabytes > 6 or self._device.type == "cpu" else 3

    def _reset_peak(self) -> int:
        self.synchronize()
        if self._device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _count_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


class JaxDuties(_SavingDuties):
    """Saves arrays of JAX: weights in bfloat16 and moments in float32, which each step makes again."""

    def __init__(self, peer: str, gigabytes: float, directory: str) -> None:
        super().__init__(peer, gigabytes, directory)
        import jax

        self.state = JaxArrays(gigabytes)
        self.note = f"JAX {jax.__version__} computes on {jax.devices()[0]}"

    def advance(self) -> None:
        """Makes new arrays."""
        self.state.arrays = {name: array * 1.5 for name, array in self.state.arrays.items()}
        self.synchronize()

    def synchronize(self) -> None:
        """**Blocks** until all arrays are computed."""
        import jax

        jax.block_until_ready(self.state.arrays)


class JaxArrays:
    """The arrays, by name."""

    def __init__(self, gigabytes: float) -> None:
        import jax
        import jax.numpy as jnp

        count = max(1, round(gigabytes * 1e9 / (10 * _JAX_WIDTH * 1024)))
        self.arrays: dict[str, Any] = {}
        for number, key in enumerate(jax.random.split(jax.random.key(0), count)):
            self.arrays[f"weight-{number}"] = jax.random.normal(key, (1024, _JAX_WIDTH), jnp.bfloat16)
            for kind in ("exp_avg", "exp_avg_sq"):
                self.arrays[f"{kind}-{number}"] = jax.random.normal(key, (1024, _JAX_WIDTH), jnp.float32)
        jax.block_until_ready(self.arrays)

    @property
    def objects(self) -> dict[str, Any]:
        """The saved objects, by name."""
        return {"arrays": self.arrays}

    def checksums(self) -> dict[str, int]:
        """Sums over all bits."""
        import jax

        kinds = {2: "uint16", 4: "uint32"}
        return {
            name: int(jax.lax.bitcast_convert_type(array, kinds[array.dtype.itemsize]).sum(dtype="uint32"))
            for name, array in self.arrays.items()
        }

    def shapes(self) -> dict[str, Any]:
        """The shapes and types of the arrays."""
        import jax

        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in self.arrays.items()}

    def lose_values(self) -> None:
        """Nothing to do: a restore makes new arrays."""
        return


class HoldfastJax(Holdfast):
    """holdfast, on a dict of arrays of JAX."""

    state: Any

    def save(self, step: int) -> None:
        """Returns when the arrays may be donated."""
        self._checkpoint["arrays"] = self.state.arrays
        super().save(step)

    def restore(self, step: int) -> dict[str, float]:
        """Makes new arrays."""
        super().restore(step)
        self.state.arrays = self._checkpoint["arrays"]
        return {}


class DeviceDuties(Duties):
    """Describes the device, and pins memory that is there already, as holdfast does."""

    def __init__(self, directory: str) -> None:
        shared = shutil.disk_usage("/dev/shm").total / 1e9 if Path("/dev/shm").exists() else 0
        self.note = f"{shutil.disk_usage(directory).free / 1e9:.0f} GB free; /dev/shm {shared:.1f} GB"

    def pin(self) -> dict[str, float]:
        """The seconds for each GB."""
        device = pick_device()
        if device.type == "cpu":
            return {}
        with mmap.mmap(-1, _PINNED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            view = (ctypes.c_char * _PINNED_BYTES).from_buffer(memory)
            address, runtime = ctypes.addressof(view), torch.cuda.cudart()
            begun_at = time.perf_counter()
            code = int(runtime.cudaHostRegister(address, _PINNED_BYTES, 1))
            seconds = time.perf_counter() - begun_at
            if code == 0:
                runtime.cudaHostUnregister(address)
            del view
        capability = torch.cuda.get_device_capability(device)
        self.note += (
            f"; CUDA {torch.version.cuda}, driver {_driver()}, compute {capability}; "
            f"cudaHostRegister of {_PINNED_BYTES / 1e9:.1f} GB: {seconds:.2f} s, code {code}"
        )
        return {"pin_seconds": seconds}


class TestDuties(Duties):
    """The tests that are marked `cuda`."""

    __test__ = False

    def __init__(self, files: Sequence[str], dry: bool, directory: str) -> None:
        # A test that hangs fails before its part is ended.
        marks = ["-m", "cuda", "-vv", "-rfE", "--tb=short", "--durations=8", "-o", "timeout=75"]
        self._command = [sys.executable, "-m", "pytest", *marks, *files, "--basetemp", f"{directory}/pytest"]
        if not dry and importlib.util.find_spec("xdist") is not None:
            # A test that ends its process, as an error of CUDA may, takes no others with it.
            self._command += ["-n", "4", "--dist", "worksteal"]

    def test(self) -> dict[str, float]:
        """Runs them."""
        done = subprocess.run(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout, flush=True)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "nothing")
        self.note = f"tests marked cuda: {last.strip('= ')}"
        if done.returncode:
            raise RuntimeError(self.note)
        return {}


def _find_problem(entry: GpuPeer, gigabytes: float, place: Path) -> str:
    """The reason why the machine cannot run it; empty if it can."""
    free = shutil.disk_usage(place).free / 1e9
    if free < _ROOM * gigabytes:
        return f"needs {_ROOM * gigabytes:.1f} GB of disk, {free:.1f} are free"
    # A process that writes to a file of shared memory that has no room ends by a signal.
    shared = shutil.disk_usage("/dev/shm").free / 1e9 if Path("/dev/shm").exists() else 0.0
    if entry.is_shared and shared < 1.1 * gigabytes:
        return f"needs {1.1 * gigabytes:.1f} GB of shared memory, /dev/shm has {shared:.1f}"
    return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
