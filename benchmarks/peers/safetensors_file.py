"""One safetensors file of all tensors."""

from __future__ import annotations

import time

from safetensors.torch import load_file, save_file

from benchmarks.peers.peer import TorchPeer, sync_path
from benchmarks.states.torch_state import fill


class Safetensors(TorchPeer):
    """Writes through the page cache while training waits; keeps tensors alone."""

    makes_last = "nothing"

    def save(self, step: int) -> None:
        """Returns when the bytes are in the page cache."""
        self._newest = self.path(step)
        save_file(self.state.tensors(), self._newest)

    def wait_durable(self) -> None:
        """Adds the two fsyncs."""
        sync_path(self._newest)
        sync_path(self.directory)

    def restore(self, step: int) -> dict[str, float]:
        """Copies what `load_file` gives into the live tensors; `load_file` by itself is a figure of its own."""
        begun_at = time.perf_counter()
        read = load_file(self.path(step))
        seconds = time.perf_counter() - begun_at
        fill(self.state.tensors(), read)
        return {"load_file": seconds}
