"""Finds and frees a thread of this process that waits in a collective of torch for a worker that will not come."""

from __future__ import annotations

from typing import Any

import torch.distributed

# What it exports depends on how torch was built, so that it has no types to go by.
dist: Any = torch.distributed


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
