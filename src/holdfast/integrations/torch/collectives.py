"""Frees a thread of this process that waits in a collective of torch for a worker that will not come."""

from __future__ import annotations

from typing import Any

import torch.distributed

# What it exports depends on how torch was built, so that it has no types to go by.
dist: Any = torch.distributed


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
