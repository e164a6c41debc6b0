"""One worker's part in what all agree on: when to save and leave, and that one of them has failed.

A thread speaks with the others, through the store of the job. The training thread says between two steps how far it is,
by setting plain numbers, and looks at one plain flag. Only when that is up it takes a lock, and waits.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec.structs import replace as replace_fields

from holdfast.cluster.peers import Peers, make_brief
from holdfast.deadlines import LEAST_SECONDS
from holdfast.preemption.consensus.herald import Herald
from holdfast.preemption.consensus.peer_failures import Mishaps
from holdfast.preemption.consensus.records import Board, CallRecord, Outcome, StopRecord
from holdfast.preemption.consensus.stop_step import Agreement, Announce, Call, Deed, Pledge, Promise, Wanted
from holdfast.preemption.grace import Action, Outlook, Verdict, has_time_to_save
from holdfast.preemption.sources.protocol import Demand, Notice

_HEARD_SECONDS: Final = 3.0
"""How long the leader waits until all have read the verdict."""


class Turn(enum.Enum):
    """What the training thread is to do between two steps."""

    GO = "go on"
    WAIT = "wait until there is something new"
    STOP = "do what was called for: this is the stop step"
    OUT = "leave: the others have taken this worker for dead, and go on without it"


class Accord:
    """**Thread-safe**, but for `begun`, which belongs to the training thread.

    Attributes:
        begun: How many steps the training thread has begun, or may have.
        is_alarmed: Whether it has to ask before it begins another one.
        call: What was called for in this round; None before a call.
        stop: The stop step of this round; None before it is known.
        is_cut_short: Whether it was too late to wait until all had said what has come of the last save.
        mishaps: What has befallen other workers.
        herald: The thread.
    """

    def __init__(self, peers: Peers, deliver: Callable[[Notice], object], stir: Callable[[], object]) -> None:
        """Takes note of the others; `herald.open` begins.

        Args:
            peers: The workers. Each makes as many of these, in the same order.
            deliver: Told of what other workers have heard.
            stir: Called when there is something new.
        """
        self.begun = 0
        self.is_alarmed = self.is_cut_short = False
        self.call: CallRecord | None = None
        self.stop: StopRecord | None = None
        self._peers = peers
        self._deliver = deliver
        self._board = Board(peers)
        self.mishaps = Mishaps(peers, self._board)
        self.herald = Herald(self._look, self._is_busy, stir, self.mishaps.note_silence, peers.world_size)
        # Guards what is agreed on, as far as this worker knows.
        self._lock = threading.Lock()
        self._agreement = Agreement(peers.rank, peers.world_size)
        self._asked: tuple[CallRecord, float] | None = None
        self._is_over = False
        self._outcome: Outcome | None = None
        self._verdict: Outcome | None = None
        self._is_stale = True
        # What the thread has to write down; each is forgotten once the store has it.
        self._deeds: deque[Deed] = deque()
        # These are the thread's own.
        self._news: bytes | None = None
        self._outcomes: dict[int, Outcome] = {}

    def wish(self, call: CallRecord) -> None:
        """This worker wants all to do that. It is called for at once, or in the next round."""
        with self._lock:
            asked = 0 if self._asked is None else self._asked[0].wanted
            if max(self._agreement.called or 0, asked) >= call.wanted:
                return
            self._asked = (call, time.monotonic())
            self._agreement, deeds = self._agreement.wish(Wanted(call.wanted))
            self._deeds.extend(deeds)
        self.herald.wake()

    def arrive(self, step: int, *, holds: bool = False, ends: bool = False, is_over: bool = False) -> Turn:
        """The training thread, or who acts in its stead, asks what to do when that many steps are complete.

        Args:
            step: How many.
            holds: Whether it is not to go on before something was called for.
            ends: Whether it does not go on to another step at once.
            is_over: Whether it never will. If there is nothing to do, nothing more can be called for here then.
        """
        with self._lock:
            self.begun = step
            known = self._agreement = replace(self._agreement, begun=step, finished=is_over)
            if known.is_excluded:
                return Turn.OUT
            if known.stop is not None and (step >= known.stop or is_over):
                return Turn.STOP
            if known.stop is None and (known.called is not None or holds):
                return Turn.WAIT
            self._is_over = is_over
            self.is_alarmed = known.called is not None
            if not ends and not is_over:
                self.begun = step + 1
            return Turn.GO

    def try_begin(self, step: int) -> bool:
        """Whether the training thread may go on with a step that it had begun before it rested."""
        with self._lock:
            pledge, stop = self._agreement.pledge, self._agreement.stop
            may = pledge is None or step <= (pledge.step or 0) or (stop is not None and step <= stop)
            if may:
                self.begun = step
            return may

    def is_ahead(self, step: int) -> bool:
        """Whether all stop at a step beyond that one."""
        stop = self._agreement.stop
        return stop is not None and step < stop

    @property
    def verdict(self) -> Outcome | None:
        """What has come of the last save altogether; None before that is known."""
        return self._verdict

    def find_call(self) -> CallRecord | None:
        """**Blocks** for a moment. What was called for since this worker has come to its end, if anything was."""
        number = self._agreement.round
        found: list[CallRecord | None] = []
        self.herald.send(lambda: found.append(self._board.read(CallRecord, "call", number)))
        self.herald.wait(lambda: bool(found), time.monotonic() + _HEARD_SECONDS)
        return next(iter(found), None)

    def conclude(self, outcome: Outcome, end_at: float | None, told: Callable[[], object] | None = None) -> Outcome:
        """**Blocks.** Tells what has come of the last save here.

        Args:
            outcome: What has.
            end_at: Until when to wait for the others, but for a moment in any case; None for as long as
                the others are waited for at all.
            told: Called once that is written down.

        Returns:
            What has come of it altogether, as far as that could be found out.
        """
        with self._lock:
            self._outcome = outcome
            number = self._agreement.round
        settled: list[Outcome] = []
        self.herald.send(lambda: settled.append(self._board.settle(outcome, "outcome", number, self._peers.rank)))
        if told is not None:
            self.herald.wait(lambda: bool(settled), time.monotonic() + _HEARD_SECONDS)
            told()
        now = time.monotonic()
        end_at = now + self._peers.timeout_seconds if end_at is None else max(end_at, now + LEAST_SECONDS)
        if not self.herald.wait(lambda: self._verdict is not None, end_at):
            # What one worker writes down when its time is over is what all leave with.
            self.is_cut_short = True
            own = merge([outcome], is_complete=False)
            self.herald.send(lambda: self._hear_verdict(self._board.settle(own, "verdict", number), number))
            self.herald.wait(lambda: self._verdict is not None, time.monotonic() + _HEARD_SECONDS)
        verdict = self._verdict
        if verdict is None:
            return own
        if self._peers.is_leader and self.stop is not None:
            # The store may lie in this process.
            others = set(range(self._peers.world_size)) - {*self.stop.absent, *self.stop.done}
            self.mishaps.wait_heard(f"heard/{number}", others, self.herald, time.monotonic() + _HEARD_SECONDS)
        return verdict

    def end_round(self) -> int | None:
        """What was called for has been done here.

        Returns:
            The step that was saved, if all were there. Some may have saved it in a pause that goes on, so that all have
            to save it anew if any has to.
        """
        stop = self.stop
        with self._lock:
            self._agreement, deeds = self._agreement.end_round()
            self._deeds.extend(deeds)
            self.call = self.stop = self._outcome = self._verdict = None
            self._outcomes = {}
            self._is_stale = True
            self.is_alarmed = False
        self.herald.wake()
        return None if stop is None or stop.done else stop.step

    # The thread.

    def _is_busy(self) -> bool:
        known = self._agreement
        is_settling = known.called is not None and known.stop is None
        return is_settling or (self._outcome is not None and self._verdict is None)

    def _do(self, deed: Deed) -> None:
        """Writes something down, and hears what stands there then."""
        match deed:
            case Call(number):
                if self._asked is not None:
                    call, asked_at = self._asked
                    left = call.left_seconds
                    left = None if left is None else left - (time.monotonic() - asked_at)
                    standing = self._board.settle(replace_fields(call, left_seconds=left), "call", number)
                    self._board.rouse()
                    self._hear_call(number, standing)
            case Promise(number, rank, pledge):
                pledge = self._board.settle(pledge, "pledge", number, rank)
                self._hear(partial(_hear_pledge, rank, pledge))
            case Announce(number, step):
                pledges = self._agreement.pledges
                absent = tuple(rank for rank, pledge in sorted(pledges.items()) if pledge.step is None)
                stop = StopRecord(step, absent, self.mishaps.done)
                self._hear_stop(self._board.settle(stop, "stop", number))
                if number > 0:
                    # Who has pledged has ended the round before.
                    self._board.forget(number - 1)

    def _hear(self, hear: Callable[[Agreement], tuple[Agreement, list[Deed]]]) -> None:
        with self._lock:
            self._agreement, deeds = hear(self._agreement)
            self._deeds.extend(deeds)
        self.herald.tell_change()

    def _hear_call(self, number: int, call: CallRecord) -> None:
        with self._lock:
            known = self._agreement
            if self._is_over or known.called is not None or known.round != number:
                return
            # In this order: the training thread sets the one and then looks at the other.
            self.is_alarmed = True
            self._agreement, deeds = replace(known, begun=self.begun).hear_call(Wanted(call.wanted))
            self._deeds.extend(deeds)
            self.call = call
            if self._agreement.wished is None:
                self._asked = None
        if call.rank != self._peers.rank:
            self._deliver(
                Notice(
                    source=f"rank {call.rank}",
                    text=f"rank {call.rank}: {call.text}",
                    demand=Demand(call.demand),
                    left_seconds=call.left_seconds,
                    by_hand=call.by_hand,
                )
            )
        self.herald.tell_change()

    def _hear_stop(self, stop: StopRecord) -> None:
        with self._lock:
            if self._agreement.called is not None and self.stop is None:
                self._agreement = self._agreement.hear_stop(stop.step)
                self.stop = stop
        self.herald.tell_change()

    def _look(self) -> None:
        while self._deeds:
            self._do(self._deeds[0])
            self._deeds.popleft()
        with self._lock:
            is_stale, self._is_stale = self._is_stale, False
            known = self._agreement
        try:
            news = self._board.news()
            is_new = is_stale or news != self._news
            is_settling = known.called is Wanted.LEAVE and known.stop is None
            if self.mishaps.look(is_new=is_new, is_settling=is_settling):
                self.herald.tell_change()
            if is_new and known.called is None and not self._is_over:
                call = self._board.read(CallRecord, "call", known.round)
                if call is not None:
                    self._hear_call(known.round, call)
        except BaseException:
            self._is_stale = True
            raise
        self._news = news
        if self._agreement.called is not None and self._agreement.stop is None:
            self._seek_stop()
        if self._outcome is not None and self._verdict is None and self.stop is not None:
            self._seek_verdict(self._outcome, self.stop)
        if self._deeds:
            self.herald.wake()

    def _is_collector(self) -> bool:
        """Whether all before this worker are gone, or at their end and deaf to calls.

        The lowest one that is neither looks at what the others write. What follows from it is the same whoever looks.
        """
        dead = self._peers.dead
        before = (rank for rank in range(self._peers.rank) if rank not in dead)
        return all(self.mishaps.try_find_end(rank) is not None for rank in before)

    def _seek_stop(self) -> None:
        number = self._agreement.round
        stop = self._board.read(StopRecord, "stop", number)
        if stop is not None:
            self._hear_stop(stop)
        elif self._is_collector():
            # Before the look at what they have written.
            dead = self._peers.dead
            for rank in self._agreement.unheard:
                pledge = self._board.read(Pledge, "pledge", number, rank)
                end = None if pledge is not None else self.mishaps.try_find_end(rank)
                if end is not None:
                    pledge = Pledge(end.step, final=True)
                if pledge is not None:
                    self._hear(partial(_hear_pledge, rank, pledge))
                elif rank in dead:
                    self._hear(partial(_fence, rank))

    def _seek_verdict(self, own: Outcome, stop: StopRecord) -> None:
        number = self._agreement.round
        verdict = self._board.read(Outcome, "verdict", number)
        if verdict is None and self._is_collector():
            dead = self._peers.dead
            outcomes = self._outcomes
            outcomes[self._peers.rank] = own
            missing = set(range(self._peers.world_size)) - {*stop.absent, *stop.done, *outcomes}
            for rank in sorted(missing):
                outcome = self._board.read(Outcome, "outcome", number, rank)
                if outcome is None and rank in dead:
                    outcome = Outcome(f"rank {rank} was gone before it had said that all is saved", True, False)
                if outcome is not None:
                    outcomes[rank] = outcome
                    missing.discard(rank)
            if not missing:
                verdict = self._board.settle(merge(list(outcomes.values()), is_complete=True), "verdict", number)
        if verdict is not None:
            self._hear_verdict(verdict, number)

    def _hear_verdict(self, verdict: Outcome, number: int) -> None:
        if self._verdict is None:
            self._board.count(f"heard/{number}", 1)
            self._verdict = verdict
            self.herald.tell_change()


def _hear_pledge(rank: int, pledge: Pledge, known: Agreement) -> tuple[Agreement, list[Deed]]:
    return known.hear_pledge(rank, pledge)


def _fence(rank: int, known: Agreement) -> tuple[Agreement, list[Deed]]:
    return known.fence(rank)


def make_call(rank: int, outlook: Outlook, verdict: Verdict, text: str, *, by_hand: bool) -> CallRecord:
    """**Pure.** What a worker calls for.

    Args:
        rank: Which worker.
        outlook: What it knows.
        verdict: What it is to do because of that.
        text: What it has heard.
        by_hand: Whether that was a person at a terminal.
    """
    leaves = verdict.action is Action.LEAVE
    return CallRecord(
        rank=rank,
        wanted=Wanted.LEAVE if leaves else Wanted.SAVE,
        demand=Demand.LEAVE if leaves else outlook.demand,
        text=make_brief(text),
        reason=verdict.reason,
        left_seconds=outlook.left_seconds,
        by_hand=by_hand,
        saves=has_time_to_save(outlook),
    )


def merge(outcomes: list[Outcome], *, is_complete: bool) -> Outcome:
    """**Pure.** What has come of a save altogether.

    Args:
        outcomes: What has come of it on some workers.
        is_complete: Whether these are all.
    """
    by_hand = all(outcome.by_hand for outcome in outcomes)
    if any(outcome.is_proof for outcome in outcomes):
        return Outcome("", by_hand, True)
    failed = sorted((outcome for outcome in outcomes if outcome.error), key=lambda outcome: not outcome.is_cause)
    if failed:
        return Outcome(failed[0].error, by_hand, False, failed[0].is_cause)
    return Outcome("" if is_complete else "the others have not said whether their state is saved", by_hand, False)
