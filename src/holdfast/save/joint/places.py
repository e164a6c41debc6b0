"""Which save of one worker belongs together with which of the others, and what they tell each other about it.

Nobody asks before a save begins, so each worker must find the same name for it by itself: how often the run was
restored, the step, and the how manieth try at that step it is.

    save/PLACE/name           the directory, by the leader
    save/PLACE/part/RANK      what a worker has written
    save/PLACE/question       what the leader asks some workers; see `save/joint/inquiry.py`
    save/PLACE/verdict        whether it is to be committed: written once, by whoever knows first
    save/PLACE/result         how the commit went, by the leader
    save/PLACE/left/RANK      that a worker has done with this save
    at/RANK                   where a worker is
    plan                      the next save that the leader has planned ahead
    plan-missed/NUMBER        that a worker had passed that step when it heard of the plan
"""

from __future__ import annotations

import threading
from typing import Final, Literal

import msgspec

from holdfast.cluster.peers import Failure
from holdfast.format.manifest import Reference, WorkerRecord
from holdfast.format.names import StepName
from holdfast.save.joint.replicas import Group
from holdfast.save.joint.roster import Roster
from holdfast.state.data.position import PositionRecord


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One save, as all workers know it.

    Attributes:
        epoch: How often the run had been restored.
        step: The step.
        turn: The how manieth try at it in that epoch, from 1.
    """

    epoch: int
    step: int
    turn: int

    def key(self, name: str) -> str:
        """The key of something about this save."""
        return f"save/{self.epoch}.{self.step}.{self.turn}/{name}"


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker is.

    Attributes:
        count: How many saves it has come to.
        place: The last of them.
        has_ended: Whether all that was said about that one has been deleted.
        was_committed: Whether it ended well; said with its end.
    """

    count: int
    place: Place
    has_ended: bool = False
    was_committed: bool = False

    def is_beyond(self, other: Position) -> bool:
        """Whether a worker at this position will not come to that of another one any more."""
        return self.place != other.place and self.count >= other.count


class Places:
    """**Thread-safe.** Gives each save of this worker its place."""

    def __init__(self) -> None:
        # Guards the other three.
        self._lock = threading.Lock()
        self._epoch = 0
        self._count = 0
        self._turns: dict[int, int] = {}

    @property
    def epoch(self) -> int:
        """How often the run has been restored."""
        return self._epoch

    @property
    def count(self) -> int:
        """How many saves this worker has come to."""
        return self._count

    def begin_epoch(self) -> None:
        """The run has been restored: from now on steps may come again."""
        with self._lock:
            self._epoch += 1
            self._turns = {}

    def pass_by(self) -> None:
        """A save was asked for that this worker could not come to: it is past it all the same."""
        with self._lock:
            self._count += 1

    def take(self, step: int) -> Position:
        """Where the next save of a step has its place."""
        with self._lock:
            self._count += 1
            turn = self._turns[step] = self._turns.get(step, 0) + 1
            return Position(self._count, Place(self._epoch, step, turn))


class NameRecord(msgspec.Struct, frozen=True):
    """Where a save lies.

    Attributes:
        generation: The generation of the job.
        attempt: Which attempt at the step.
        base: The checkpoint from which the generation began, as step, generation and attempt; None if anew.
        opening: The digest of the record that opened the generation: by it a worker knows that it sees the same run.
        url: Where the run lies for the leader.
    """

    generation: int
    attempt: int
    base: tuple[int, int, int] | None
    opening: str
    url: str

    @property
    def base_name(self) -> StepName | None:
        """The checkpoint from which the generation began, or None."""
        return None if self.base is None else StepName(*self.base)


class PartRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker has made to last.

    Attributes:
        worker: Its record for the manifest.
        references: The earlier steps that it refers to.
        features: What a reader has to understand to read its index.
        groups: What it says of what it holds together with others.
        shards: What it says of the boxes of its loose leaves; see `save/joint/coverage.py`.
        values: What it says of their values.
        check_replicas: At which saves it is to compare what workers hold alike.
        positions: How far it has got in its data.
        roster: Which objects it has.
    """

    worker: WorkerRecord
    references: tuple[Reference, ...]
    features: tuple[str, ...]
    groups: list[Group]
    shards: str = ""
    values: str = ""
    check_replicas: bool | Literal["first"] = "first"
    positions: list[PositionRecord] = []
    roster: Roster = Roster()


class EndRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict or a result; well unless one of these says otherwise.

    Attributes:
        failure: Whose failure ends the save; None if there is none.
        left_out: Why it is left out, which is no failure; empty if it is not.
    """

    failure: Failure | None = None
    left_out: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the save goes on, or has gone well."""
        return self.failure is None and not self.left_out


WELL: Final = EndRecord()
