"""One file of all tensors, written through the page cache while training waits: torch's own, or safetensors'."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.peers.peer import TorchPeer, sync_path
from benchmarks.states.torch_state import State, fill


class TorchSave(TorchPeer):
    """`torch.save` of the state dicts, and `torch.load`."""

    makes_last = "nothing"

    def save(self, step: int) -> None:
        """Returns when the bytes are in the page cache."""
        self._newest = self.path(step)
        self._write(self._newest)

    def wait_durable(self) -> None:
        """Adds the two fsyncs."""
        sync_path(self._newest)
        sync_path(self.directory)

    def restore(self, step: int) -> dict[str, float]:
        """Not with `mmap`: the optimizer keeps the tensors that it is given, and they would not have been read yet."""
        self.state.load_tree(torch.load(self.path(step), weights_only=True))
        return {}

    def _write(self, path: Path) -> None:
        torch.save(self.state.tree(), path)


class Safetensors(TorchSave):
    """A safetensors file, which keeps tensors alone."""

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """Imports what is not installed everywhere."""
        import safetensors.torch

        super().open(directory, state, keep)
        self._library = safetensors.torch

    def restore(self, step: int) -> dict[str, float]:
        """Copies what `load_file` gives into the live tensors; `load_file` by itself is a figure of its own."""
        begun_at = time.perf_counter()
        read = self._library.load_file(self.path(step))
        seconds = time.perf_counter() - begun_at
        fill(self.state.tensors(), read)
        return {"load_file": seconds}

    def _write(self, path: Path) -> None:
        self._library.save_file(self.state.tensors(), path)
