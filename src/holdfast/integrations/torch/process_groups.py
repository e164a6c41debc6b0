"""The process group of a job that torchrun may restart."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch.distributed

from holdfast.deadlines import JOIN_SECONDS
from holdfast.integrations.torch.cluster import open_environment

# What it exports depends on how torch was built, so that it has no types to go by.
dist: Any = torch.distributed

_OWN_STORE: Final = ("store", "init_method", "rank", "world_size")


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """**Collective.** **Blocks.** As `torch.distributed.init_process_group`, and sure when torchrun restarts the job.

    torchrun keeps its store when it starts the workers again, and what the process group of the start before had
    written there. torch (2.13) tells the starts not apart: a worker that is quicker than another one reads the address
    of the dead one, and fails, or waits for half an hour. Here each start has a part of the store that is its own: the
    workers agree on its name first. Without torchrun, or with a store of your own, it does what torch's does.

    Args:
        backend: "nccl", "gloo" or what else torch knows; None for all that suit the devices.
        timeout: How long a collective may take, and the other workers to come; None for torch's own limit, and 300 s.
        **options: What else torch's takes.

    Raises:
        AbsentError: If workers are missing; it names them.
        ClusterError: If torchrun's store does not answer.
    """
    if timeout is not None:
        options["timeout"] = timeout
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_agents or any(name in options for name in _OWN_STORE):
        dist.init_process_group(backend, **options)
        return
    cluster = open_environment(JOIN_SECONDS if timeout is None else timeout.total_seconds())
    cluster.close()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"process-group/{cluster.incarnation}", store)
    dist.init_process_group(backend, store=own, rank=cluster.rank, world_size=cluster.world_size, **options)
