"""torch's process groups: one for a job that torchrun may restart, and the collectives under way in all of them."""

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


def count_begun() -> int | None:
    """How many collectives of the default process group this process has begun; None if that is not known."""
    try:
        # There is no public way to it, nor to those of a group with several backends.
        group = dist.distributed_c10d._get_default_group()
        backends = {id(one): one for one in map(group._get_backend, group._device_types)}
        return sum(int(one._get_sequence_number_for_group()) for one in backends.values())
    except Exception:  # noqa: BLE001  No group, or a backend that does not count.
        return None


def abort() -> None:
    """Aborts all process groups: whoever waits in one gets an error. It may block; none can be used after it."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # There is no public way to all of them.
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            group.abort()
        except Exception:  # noqa: BLE001  A backend that cannot: whoever waits there is ended otherwise.
            continue
