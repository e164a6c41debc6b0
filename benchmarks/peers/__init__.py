"""The ways of saving that are compared. Each is one small class, in a file with its kin.

To add one, write a class that derives from `Peer` and name it in `PEERS`. It is imported in a process of its own, so
it may need packages that others do without; where they are missing, the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from benchmarks.harness.messages import MissingError
from benchmarks.harness.worker import load
from benchmarks.peers.peer import Peer

_ALL: Final = ("model", "small-tensors", "mostly-frozen", "training")
_DCP: Final = "DCP async, thread, cached"


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer.

    Attributes:
        place: Where its class is.
        group: Those of one group run side by side, each in a process that stays. All at once would not fit in memory.
        parts: What it takes part in by itself. A round of many arrays takes some minutes.
        needs: The packages that not everybody has, as pip names them.
        reads_as: The peer that reads the same files by the same code; its restores are measured for both.
    """

    place: str
    group: str
    parts: Sequence[str]
    needs: Sequence[str] = ()
    reads_as: str = ""


PEERS: Final = {
    "holdfast": Entry(
        "benchmarks.peers.holdfast_manager:Holdfast",
        "plain",
        (*_ALL, "many-saves", "small"),
    ),
    "holdfast, overlapped": Entry(
        "benchmarks.peers.holdfast_manager:Overlapped",
        "plain",
        ("model", "training", "many-saves"),
        reads_as="holdfast",
    ),
    "holdfast, reserved": Entry("benchmarks.peers.holdfast_manager:Reserved", "plain", ("model",), reads_as="holdfast"),
    "holdfast, incremental": Entry(
        "benchmarks.peers.holdfast_manager:Incremental", "plain", ("mostly-frozen", "many-saves")
    ),
    "torch.save": Entry("benchmarks.peers.one_file:TorchSave", "plain", _ALL),
    "safetensors": Entry("benchmarks.peers.one_file:Safetensors", "plain", _ALL, ("safetensors",)),
    "DCP sync": Entry("benchmarks.peers.dcp:Synchronous", "DCP", ("model",), reads_as=_DCP),
    "DCP async, thread": Entry("benchmarks.peers.dcp:InThread", "DCP", ("model",), reads_as=_DCP),
    _DCP: Entry("benchmarks.peers.dcp:InThreadCached", "DCP", _ALL),
    "DCP async, thread, overlapped": Entry(
        "benchmarks.peers.dcp:InThreadOverlapped", "DCP", ("model", "training"), reads_as=_DCP
    ),
    "DCP async, process": Entry("benchmarks.peers.dcp:InProcess", "DCP", ("model",), reads_as=_DCP),
    "DCP async, process, overlapped": Entry(
        "benchmarks.peers.dcp:InProcessOverlapped", "DCP", ("model",), reads_as=_DCP
    ),
    "torch_checkpointing": Entry(
        "benchmarks.peers.torch_checkpointing_manager:TorchCheckpointing",
        "others",
        _ALL,
        ("torch_checkpointing",),
    ),
    "Orbax async": Entry(
        "benchmarks.peers.orbax_manager:OrbaxAsync",
        "others",
        ("model", "mostly-frozen", "training"),
        ("orbax-checkpoint", "jax"),
    ),
    "Orbax async, uncompressed": Entry(
        "benchmarks.peers.orbax_manager:OrbaxUncompressed",
        "others",
        ("model", "training"),
        ("orbax-checkpoint", "jax"),
    ),
    "TensorFlow async": Entry(
        "benchmarks.peers.tensorflow_checkpoint:TensorFlowAsync",
        "others",
        ("model", "mostly-frozen", "training"),
        ("tensorflow-cpu",),
    ),
}
"""All peers, by the name that the results use."""


def make_peer(name: str) -> Peer[Any]:
    """The peer of that name.

    Raises:
        MissingError: If a package that it needs is not installed.
    """
    entry = PEERS[name]
    check_installed(entry.needs)
    peer = load(entry.place)()
    assert isinstance(peer, Peer)
    return peer


def check_installed(packages: Sequence[str]) -> None:
    """Raises a `MissingError` if one of the packages is not installed."""
    if missing := find_missing(packages):
        raise MissingError(f"not installed: {', '.join(missing)}")


def find_missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    missing = []
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return missing
