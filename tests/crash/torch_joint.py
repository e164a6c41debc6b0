"""Kills workers of saving jobs that meet as under torchrun: in a store of torch's, and with a process group of gloo.

`python -m crash.torch_joint`. All else is that of `crash.joint`. torch is imported once, by the process that forks all
others; it opens no store, and computes nothing, so that no thread of torch's is lost to those that it forks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed

import holdfast as hf
from crash.forked import ForkedJob
from crash.joint import Join, main
from crash.toy_worker import PATIENCE_SECONDS
from holdfast.cluster.protocol import Cluster
from holdfast.integrations.torch.cluster import open_environment

ADDRESS = "127.0.0.1"

dist: Any = torch.distributed


@contextmanager
def host_store(directory: Path) -> Iterator[Join]:
    """A store in a process of its own, which outlives the workers of a few jobs, as torchrun's agent does."""
    agent = ForkedJob(1, host)
    try:
        agent.wait_told("port")
        (port,) = agent.numbers("port")
        yield lambda rank, world_size: join(port, rank, world_size)
    finally:
        agent.close()


def host(rank: int, tell: Callable[[str], None]) -> NoReturn:
    store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    tell(f"port {store.port}")
    while True:
        # Until it is killed; or there is nobody any more to be told.
        time.sleep(1)
        tell("hosts")


def join(port: int, rank: int, world_size: int) -> Cluster:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    hf.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    return open_environment(PATIENCE_SECONDS)


if __name__ == "__main__":
    main(host_store)
