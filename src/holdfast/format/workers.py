"""Which worker of a job a process is. Pure."""

from __future__ import annotations

from typing import Final

import msgspec


class Worker(msgspec.Struct, frozen=True):
    """One process of a job.

    Attributes:
        rank: Its number, from 0 on.
        world_size: How many there are.
    """

    rank: int
    world_size: int

    @property
    def is_leader(self) -> bool:
        """Whether this is the worker that decides."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other worker."""
        return self.world_size == 1


ALONE: Final = Worker(0, 1)
"""The worker of a job of one process."""
