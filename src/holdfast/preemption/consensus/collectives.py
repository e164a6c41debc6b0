"""The collectives of whichever frameworks are in use: how many were begun, and that they are aborted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Final, Protocol, cast

_MODULES: Final = {"torch.distributed": "holdfast.integrations.torch.collectives"}
"""By framework; imported by name, and only where the framework is in use."""


class Collectives(Protocol):
    """Those of one framework."""

    def count_begun(self) -> int | None:
        """How many this process has begun among all workers; None if there are none, or that is not known."""
        ...

    def abort(self) -> None:
        """Aborts all; whoever waits in one gets an error. It may block; none can be used after it."""
        ...


def find_collectives() -> Iterator[Collectives]:
    """Those of the frameworks that are in use."""
    for framework, module in _MODULES.items():
        if framework in sys.modules:
            yield cast("Collectives", import_module(module))


def count_begun() -> int | None:
    """How many collectives among all workers this process has begun; None if that is not known."""
    counts = [count for each in find_collectives() if (count := each.count_begun()) is not None]
    return sum(counts) if counts else None
