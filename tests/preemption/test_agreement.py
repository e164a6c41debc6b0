"""The agreement on a stop step: as a table, and in every order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.preemption.consensus.stop_step import (
    ABSENT,
    Deed,
    Pledge,
    StopStepAgreement,
    Turn,
    Wanted,
    WriteCall,
    WritePledge,
    WriteStop,
)
from repetitions import repeated

# The table.


def called(agreement: StopStepAgreement, wanted: Wanted = Wanted.LEAVE) -> StopStepAgreement:
    return agreement.hear_call(wanted)[0]


def may_begin(agreement: StopStepAgreement) -> bool:
    return agreement.turn is Turn.GO and not agreement.finished


def test_a_wish_is_called_for_once_and_answered_by_a_pledge() -> None:
    agreement = StopStepAgreement(rank=1, world_size=2).reach(5)
    agreement, deeds = agreement.wish(Wanted.LEAVE)
    assert deeds == [WriteCall(0, Wanted.LEAVE)]
    assert may_begin(agreement), "until the call stands in the store, nothing is promised"
    agreement, deeds = agreement.hear_call(Wanted.LEAVE)
    assert deeds == [WritePledge(0, 1, Pledge(5))]
    assert not may_begin(agreement)
    assert agreement.hear_call(Wanted.LEAVE) == (agreement, [])
    assert agreement.wish(Wanted.SAVE) == (agreement, [])


def test_the_largest_pledge_is_the_stop_step() -> None:
    agreement = called(StopStepAgreement(rank=0, world_size=3).reach(5))
    agreement, deeds = agreement.hear_pledge(0, Pledge(5))
    assert deeds == []
    assert agreement.unheard == [1, 2]
    agreement, deeds = agreement.hear_pledge(2, Pledge(7))
    agreement, deeds = agreement.hear_pledge(1, Pledge(6))
    assert deeds == [WriteStop(0, 7)]
    agreement = agreement.hear_stop(7)
    assert may_begin(agreement)
    assert agreement.turn is not Turn.STOP
    agreement = agreement.reach(6).reach(7)
    assert not may_begin(agreement)
    assert agreement.turn is Turn.STOP


def test_a_dead_worker_is_fenced_and_does_not_count() -> None:
    agreement = called(StopStepAgreement(rank=0, world_size=2).reach(3))
    agreement, _ = agreement.hear_pledge(0, Pledge(3))
    assert agreement.fence(0) == (agreement, []), "not itself"
    agreement, deeds = agreement.fence(1)
    assert deeds == [WritePledge(0, 1, ABSENT)]
    agreement, deeds = agreement.hear_pledge(1, ABSENT)
    assert deeds == [WriteStop(0, 3)]
    assert agreement.fence(1) == (agreement, [])


def test_excluded_worker_finds_out_and_begins_no_step() -> None:
    agreement = called(StopStepAgreement(rank=1, world_size=2).reach(9))
    agreement, _ = agreement.hear_pledge(1, ABSENT)
    assert agreement.is_excluded
    agreement = agreement.hear_stop(20)
    assert not may_begin(agreement)
    assert agreement.turn is not Turn.STOP


def test_a_worker_whose_training_has_ended_saves_what_it_has() -> None:
    agreement = called(StopStepAgreement(rank=1, world_size=2).reach(4, finished=True))
    assert agreement.pledge == Pledge(4, final=True)
    agreement = agreement.hear_stop(6)
    assert not may_begin(agreement)
    assert agreement.turn is Turn.STOP


def test_what_one_round_does_not_bring_the_next_one_does() -> None:
    agreement = called(StopStepAgreement(rank=0, world_size=2), Wanted.SAVE)
    agreement, deeds = agreement.wish(Wanted.LEAVE)
    assert deeds == []
    agreement, deeds = agreement.end_round()
    assert deeds == [WriteCall(1, Wanted.LEAVE)]
    assert agreement.called is None
    agreement, _ = agreement.hear_call(Wanted.LEAVE)
    assert agreement.end_round()[1] == []


def test_a_call_that_wants_less_leaves_the_wish() -> None:
    agreement, _ = StopStepAgreement(rank=0, world_size=2).wish(Wanted.LEAVE)
    agreement = called(agreement, Wanted.SAVE)
    assert agreement.wished is Wanted.LEAVE
    agreement, _ = StopStepAgreement(rank=0, world_size=2).wish(Wanted.SAVE)
    assert called(agreement, Wanted.LEAVE).wished is None


def test_what_comes_late_changes_nothing() -> None:
    agreement = called(StopStepAgreement(rank=0, world_size=2).reach(2)).hear_stop(3)
    assert agreement.hear_stop(9) is agreement
    assert agreement.unheard == []
    fresh = StopStepAgreement(rank=0, world_size=2)
    assert fresh.hear_stop(3) is fresh
    assert fresh.hear_pledge(1, Pledge(1)) == (fresh, [])
    assert fresh.fence(1) == (fresh, [])


def test_training_that_begins_again_may_step() -> None:
    agreement = StopStepAgreement(rank=0, world_size=1).reach(3, finished=True)
    assert not may_begin(agreement)
    assert may_begin(agreement.reach(3))


# Every order of events.


@dataclass
class Store:
    """What was written first stays."""

    values: dict[object, object] = field(default_factory=dict)

    def do(self, deed: Deed) -> None:
        match deed:
            case WriteCall():
                self.values.setdefault(("call", deed.round), deed.wanted)
            case WritePledge():
                self.values.setdefault(("pledge", deed.round, deed.rank), deed.pledge)
            case WriteStop():
                self.values.setdefault(("stop", deed.round), deed.step)


@dataclass
class Worker:
    """One worker, and all that it has done."""

    agreement: StopStepAgreement
    total: int
    completed: int = 0
    joined: bool = True
    alive: bool = True
    left: bool = False
    saves: list[tuple[int, int, Wanted]] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.joined and self.alive and not self.left and not self.agreement.is_excluded


class Job:
    """Some workers, each of which does one small thing at a time."""

    def __init__(self, totals: list[int], late: set[int]) -> None:
        self.store = Store()
        self.workers = [
            Worker(StopStepAgreement(rank, len(totals)), total, joined=rank not in late)
            for rank, total in enumerate(totals)
        ]

    def apply(self, worker: Worker, result: tuple[StopStepAgreement, list[Deed]]) -> None:
        worker.agreement, deeds = result
        for deed in deeds:
            self.store.do(deed)

    def begin(self, worker: Worker) -> None:
        """Begins a step, or ends the training."""
        agreement = worker.agreement
        if worker.completed < agreement.begun or agreement.finished:
            return
        if worker.completed >= worker.total:
            worker.agreement = agreement.reach(agreement.begun, finished=True)
        elif may_begin(agreement):
            worker.agreement = agreement.reach(agreement.begun + 1)

    def complete(self, worker: Worker) -> None:
        worker.completed = worker.agreement.begun

    def read(self, worker: Worker) -> None:
        """Sees what stands in the store, in the order in which a driver asks."""
        agreement = worker.agreement
        wanted = self.store.values.get(("call", agreement.round))
        if isinstance(wanted, Wanted):
            self.apply(worker, worker.agreement.hear_call(wanted))
        for rank in list(worker.agreement.unheard):
            pledge = self.store.values.get(("pledge", agreement.round, rank))
            if isinstance(pledge, Pledge):
                self.apply(worker, worker.agreement.hear_pledge(rank, pledge))
        stop = self.store.values.get(("stop", agreement.round))
        if isinstance(stop, int):
            worker.agreement = worker.agreement.hear_stop(stop)

    def save(self, worker: Worker) -> None:
        agreement = worker.agreement
        if agreement.turn is Turn.STOP and worker.completed == agreement.begun:
            assert agreement.stop is not None
            assert agreement.called is not None
            worker.saves.append((agreement.round, agreement.stop, agreement.called))
            worker.left = agreement.called is Wanted.LEAVE
            self.apply(worker, agreement.end_round())

    def fence(self, worker: Worker, rank: int) -> None:
        self.apply(worker, worker.agreement.fence(rank))

    def check(self) -> None:
        stops: dict[int, set[int]] = {}
        for worker in self.workers:
            for number, step, _ in worker.saves:
                stops.setdefault(number, set()).add(step)
            stop = worker.agreement.stop
            if stop is not None:
                stops.setdefault(worker.agreement.round, set()).add(stop)
                if not worker.agreement.is_excluded:
                    assert worker.agreement.begun <= stop, "a stop step was passed"
        assert all(len(steps) == 1 for steps in stops.values()), "two stop steps"

    def settle(self) -> None:
        """Lets everybody go on until nothing happens any more; those that are dead or not there are fenced."""
        for _ in range(400):
            for worker in self.workers:
                if worker.active:
                    for act in (self.begin, self.complete, self.read, self.save):
                        act(worker)
                    for rank in list(worker.agreement.unheard):
                        # Who was left out by an earlier round ends with an error, and so is gone as well.
                        if not self.workers[rank].active:
                            self.fence(worker, rank)
                self.check()


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[int], set[int], list[tuple[str, int, int]]]:
    size = draw(st.integers(1, 4))
    # Workers whose totals differ end at different steps.
    totals = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    late = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    kinds = st.sampled_from(["begin", "begin", "complete", "complete", "read", "read", "save", "leave", "want", "join"])
    rare = st.sampled_from(["begin", "read", "kill", "fence"])
    events = draw(
        st.lists(
            st.tuples(st.one_of(kinds, kinds, rare), st.integers(0, size - 1), st.integers(0, size - 1)), max_size=60
        )
    )
    return totals, late, events


@settings(max_examples=repeated(600, in_gate=150), deadline=None)
@given(lives())
@example(([0, 0], set(), [("want", 0, 0), ("read", 1, 0), ("leave", 1, 0), ("fence", 1, 0)]))
def test_workers_stop_at_one_step_none_has_passed_in_every_order(
    life: tuple[list[int], set[int], list[tuple[str, int, int]]],
) -> None:
    totals, late, events = life
    job = Job(totals, late)
    acts: dict[str, Callable[[Worker], None]] = {
        "begin": job.begin,
        "complete": job.complete,
        "read": job.read,
        "save": job.save,
    }
    was_killed = False
    fenced_alive = False
    for kind, rank, other in events:
        worker = job.workers[rank]
        if kind == "join":
            worker.joined = True
        elif not worker.active:
            continue
        elif kind in acts:
            acts[kind](worker)
        elif kind == "leave":
            job.apply(worker, worker.agreement.wish(Wanted.LEAVE))
        elif kind == "want":
            job.apply(worker, worker.agreement.wish(Wanted.SAVE))
        elif kind == "kill":
            worker.alive = False
            was_killed = True
        elif kind == "fence":
            # Also of a worker that lives: whoever fences cannot know.
            fenced_alive |= job.workers[other].alive and other in worker.agreement.unheard
            job.fence(worker, other)
        job.check()
    job.settle()
    asked = any(isinstance(key, tuple) and key[0] == "call" for key in job.store.values)
    for worker in job.workers:
        if worker.active:
            assert not worker.agreement.unheard, "nobody waits for ever"
            assert worker.agreement.called is None or worker.agreement.turn is not Turn.STOP
        if asked and worker.joined and worker.alive and not worker.agreement.is_excluded:
            assert worker.saves, "what was called for is done by all who live and were not left out"
    rounds = [save for worker in job.workers for save in worker.saves]
    # In one round all do the same.
    assert len({(number, wanted) for number, _, wanted in rounds}) == len({number for number, _, _ in rounds})
    if not was_killed and not fenced_alive and not late:
        assert len({tuple(worker.saves) for worker in job.workers}) == 1


@pytest.mark.parametrize("ahead", [0, 1, 50])
def test_workers_that_step_at_their_own_speed_meet_at_the_fastest_one(ahead: int) -> None:
    job = Job([100, 100], set())
    slow, fast = job.workers
    for _ in range(ahead):
        job.begin(fast)
        job.complete(fast)
    job.begin(slow)
    job.apply(slow, slow.agreement.wish(Wanted.LEAVE))
    job.read(fast)
    job.settle()
    assert slow.saves == fast.saves == [(0, max(ahead, 1), Wanted.LEAVE)]
    assert slow.completed == fast.completed == max(ahead, 1)


def test_a_worker_that_joins_when_all_wait_for_it_takes_part() -> None:
    job = Job([9, 9], {1})
    first, late = job.workers
    for _ in range(4):
        job.begin(first)
        job.complete(first)
    job.apply(first, first.agreement.wish(Wanted.LEAVE))
    job.read(first)
    assert first.agreement.unheard == [1]
    late.joined = True
    job.settle()
    assert first.saves == late.saves == [(0, 4, Wanted.LEAVE)]
