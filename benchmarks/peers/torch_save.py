"""`torch.save` of the state dicts, and `torch.load`."""

from __future__ import annotations

import torch

from benchmarks.peers.peer import TorchPeer, sync_path


class TorchSave(TorchPeer):
    """Writes through the page cache while training waits."""

    makes_last = "nothing"

    def save(self, step: int) -> None:
        """Returns when the bytes are in the page cache."""
        self._newest = self.path(step)
        torch.save(self.state.tree(), self._newest)

    def wait_durable(self) -> None:
        """Adds the two fsyncs."""
        sync_path(self._newest)
        sync_path(self.directory)

    def restore(self, step: int) -> dict[str, float]:
        """Not with `mmap`: the optimizer keeps the tensors that it is given, and they would not have been read yet."""
        self.state.load_tree(torch.load(self.path(step), weights_only=True))
        return {}
