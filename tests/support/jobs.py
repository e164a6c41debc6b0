"""Starts the workers of a job in the ways in which frameworks start them."""

from __future__ import annotations

import socket
from pathlib import Path

import preloaded
from holdfast.testing.processes import Workers, python
from places import PROGRAMS

PROGRAM = PROGRAMS / "cluster_worker.py"

HOST = "import sys, time, torch.distributed as d; s = d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, \
wait_for_workers=False); time.sleep(600)"


def find_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world_size: int, port: int, *, agent: bool) -> dict[str, str]:
    """What torchrun tells a worker, or, without an agent, what other launchers do."""
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if agent:
        told |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return told


def start_like_torchrun(workers: Workers, count: int, *command: str | Path, world_size: int | None = None) -> None:
    """Starts workers with a store of their own, in one process more: nobody ends them when one of them dies.

    If there are fewer than the size of the world, the last ones never come.
    """
    port = find_port()
    for rank in range(count):
        told = environment(rank, world_size or count, port, agent=True)
        workers.start(python(*command), told, preloaded.TrainingPopen)
    workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
