"""The ways of saving that are compared. Each is one small class in a file of its own.

To add one, write a class that derives from `Peer` and name it in `PEERS`. It is imported in a process of its own, so
it may need packages that others do without; where they are missing, the results say so.
"""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.peers.peer import Peer

PEERS: Final = {
    "holdfast": "benchmarks.peers.holdfast_manager:Holdfast",
    "torch.save": "benchmarks.peers.torch_save:TorchSave",
    "safetensors": "benchmarks.peers.safetensors_file:Safetensors",
    "DCP sync": "benchmarks.peers.dcp:Synchronous",
    "DCP async, thread": "benchmarks.peers.dcp:InThread",
    "DCP async, thread, cached": "benchmarks.peers.dcp:InThreadCached",
    "DCP async, process": "benchmarks.peers.dcp:InProcess",
}
"""Where the class of each peer is, by the name that the results use."""


def make_peer(name: str) -> Peer:
    """The peer of that name.

    Raises:
        ImportError: If a package that it needs is not installed.
    """
    module, _, cls = PEERS[name].partition(":")
    peer = getattr(importlib.import_module(module), cls)()
    assert isinstance(peer, Peer)
    return peer
