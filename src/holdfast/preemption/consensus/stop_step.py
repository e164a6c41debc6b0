"""The protocol by which workers agree on the step at which all of them stop. Pure: no I/O, no clock, no thread.

Workers may be at different steps, and a step in progress may need all of them to end. So no worker can say "stop now".
Instead:

1. A worker *calls*: all should save, or save and exit.
2. Each worker that reads the call *pledges*: it ends the step in progress and begins none beyond it. The pledge is made
   beside the training thread, so it does not wait for that step.
3. When all pledges are there, the largest one is the *stop step*. Each worker trains up to it, which each still can,
   because none has passed it, and saves there.

Calls, pledges and stop steps are in a store that the workers share, where the first record of a name stays. A worker
that does not pledge because it is dead is *fenced*: its pledge is written for it, as absent, so a worker that was only
slow finds that it was left out and does not continue. All workers that read the pledges see the same ones and find the
same stop step, so it does not matter which one does: the leader is the lowest live rank.

Rounds follow each other: a save within the grace period is one, exiting is the next.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias


class Wanted(enum.IntEnum):
    """The request of a call to all workers; the larger one includes the other."""

    SAVE = 1
    LEAVE = 2


class Turn(enum.Enum):
    """A worker's action between two steps."""

    GO = "go on"
    WAIT = "wait until there is something new"
    STOP = "do what was called for: this is the stop step"
    OUT = "leave: the others have taken this worker for dead, and go on without it"


@dataclass(frozen=True, slots=True)
class Pledge:
    """Up to where a worker trains while the stop step is not known.

    Attributes:
        step: How many steps it will have completed then; None if the worker is absent, and was left out.
        final: True if it will never complete another, because its training has ended.
    """

    step: int | None
    final: bool = False


ABSENT = Pledge(None)


@dataclass(frozen=True, slots=True)
class WriteCall:
    """Write this call create-only."""

    round: int
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class WritePledge:
    """Write this pledge create-only, then process the pledge that is stored."""

    round: int
    rank: int
    pledge: Pledge


@dataclass(frozen=True, slots=True)
class WriteStop:
    """Write this stop step create-only, then process the stored one."""

    round: int
    step: int


Deed: TypeAlias = WriteCall | WritePledge | WriteStop
"""A task of the agreement's driver."""


@dataclass(frozen=True, slots=True)
class StopStepAgreement:
    """The knowledge of one worker. Each method returns the new state, and what to do.

    Attributes:
        rank: This worker.
        world_size: How many workers there are.
        round: The number of the round that is in progress, or comes next.
        begun: How many steps this worker has begun, including complete ones.
        finished: True if it will begin no more, because its training has ended.
        wished: What this worker wants and no call asks for yet.
        called: What was called for in this round; None before a call.
        pledge: This worker's pledge of this round, once made.
        pledges: The known pledges, by rank.
        stop: The stop step of this round, once known.
    """

    rank: int
    world_size: int
    round: int = 0
    begun: int = 0
    finished: bool = False
    wished: Wanted | None = None
    called: Wanted | None = None
    pledge: Pledge | None = None
    pledges: Mapping[int, Pledge] = field(default_factory=dict)
    stop: int | None = None

    @property
    def is_excluded(self) -> bool:
        """True if the others have left this worker out as dead: it may neither train nor save."""
        return self.pledge is not None and self.pledge.step is None

    @property
    def turn(self) -> Turn:
        """This worker's action when the steps that it has begun are complete."""
        if self.is_excluded:
            return Turn.OUT
        if self.stop is not None:
            return Turn.STOP if self.begun >= self.stop or self.finished else Turn.GO
        return Turn.GO if self.called is None else Turn.WAIT

    @property
    def unheard(self) -> list[int]:
        """The workers whose pledge of this round is not known, once there was a call."""
        if self.called is None or self.stop is not None:
            return []
        return [rank for rank in range(self.world_size) if rank not in self.pledges]

    def reach(self, step: int, *, finished: bool = False) -> StopStepAgreement:
        """This worker has begun that many steps; if its training has ended, it may only save what it has."""
        return replace(self, begun=step, finished=finished)

    def wish(self, wanted: Wanted) -> tuple[StopStepAgreement, list[Deed]]:
        """This worker wants that; it is called for at once, or in the next round if this one does not bring it."""
        if self.called is not None and self.called >= wanted:
            return self, []
        known = replace(self, wished=max(wanted, self.wished or wanted))
        return known, [WriteCall(self.round, wanted)] if self.called is None else []

    def hear_call(self, wanted: Wanted) -> tuple[StopStepAgreement, list[Deed]]:
        """A call of this round is in the store."""
        if self.called is not None:
            return self, []
        wished = None if self.wished is None or self.wished <= wanted else self.wished
        pledge = Pledge(self.begun, self.finished)
        known = replace(self, called=wanted, wished=wished, pledge=pledge)
        return known, [WritePledge(self.round, self.rank, pledge)]

    def fence(self, rank: int) -> tuple[StopStepAgreement, list[Deed]]:
        """Another worker is no longer waited for: it is dead, or the time is over."""
        if rank not in self.unheard or rank == self.rank:
            return self, []
        return self, [WritePledge(self.round, rank, ABSENT)]

    def hear_pledge(self, rank: int, pledge: Pledge) -> tuple[StopStepAgreement, list[Deed]]:
        """A pledge of this round is in the store."""
        if self.called is None or rank in self.pledges:
            return self, []
        known = replace(self, pledges={**self.pledges, rank: pledge})
        if rank == self.rank:
            known = replace(known, pledge=pledge)
        if known.unheard or known.stop is not None:
            return known, []
        steps = [each.step for each in known.pledges.values() if each.step is not None]
        return known, [WriteStop(self.round, max(steps))] if steps else []

    def hear_stop(self, step: int) -> StopStepAgreement:
        """The stop step of this round is in the store."""
        return self if self.stop is not None or self.called is None else replace(self, stop=step)

    def end_round(self) -> tuple[StopStepAgreement, list[Deed]]:
        """This worker has done what was called for, or tried to. Anything else that it wished is called for now."""
        known = StopStepAgreement(
            self.rank, self.world_size, self.round + 1, self.begun, finished=self.finished, wished=self.wished
        )
        return known, [] if self.wished is None else [WriteCall(known.round, self.wished)]
