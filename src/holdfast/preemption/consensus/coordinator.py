"""One worker's part in what all agree on: the step at which they save, or save and exit.

The mailbox's thread communicates with the others. Between two steps, the training thread publishes its progress by
setting plain numbers, and reads one plain flag. Only if the flag is set does it take a lock and wait.

    call/ROUND             a `Plan`: what all should do, save, or save and exit
    pledge/ROUND/RANK      a `Pledge`: up to where a worker trains while the stop step is not known
    stop/ROUND             a `StopRecord`: the stop step
    outcome/ROUND/RANK     a `SaveOutcome`: the result of the save there
    result/ROUND           a `SaveOutcome`: the result of it on all workers
    read/ROUND             how many have read that; read/ROUND/RANK: this one has
    news                   is incremented whenever there is something new

The first record under a name stays, except for the counters. `peer_failures.py` has further records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from msgspec.structs import replace as replace_fields

from holdfast.cluster.barrier import READ_SECONDS, wait_counted
from holdfast.cluster.mailbox import Watch
from holdfast.cluster.peers import Failure, Peers, make_brief
from holdfast.deadlines import LEAST_SECONDS
from holdfast.events import Event, Warned
from holdfast.preemption.consensus.peer_failures import PeerFailures
from holdfast.preemption.consensus.single import GuardCalls, SaveOutcome
from holdfast.preemption.consensus.stop_step import (
    Deed,
    Pledge,
    StopStepAgreement,
    Turn,
    Wanted,
    WriteCall,
    WritePledge,
    WriteStop,
)
from holdfast.preemption.decide import StopRecord, Verdict
from holdfast.preemption.grace import MARGIN_SECONDS, Action, Plan, to_spare
from holdfast.preemption.sources.protocol import Notice
from holdfast.process.latch import Latch

_SETTLE_SECONDS: Final = 3.0
"""How long a worker that cannot wait for the others any more waits until its result is written."""

_BEING_READ: Final = -1
"""The number of news while it is being read."""

_WARN_SECONDS: Final = 10.0
"""How long a wait for the others lasts before a warning."""


@dataclass
class _Round:
    """The knowledge of the round in progress. Another one takes its place once this worker has done its part.

    Attributes:
        asked: What this worker asks for, and since when; it goes over to the next round if this one does not bring it.
        call: What was called for; None before a call.
        stop: The stop step; None before it is known.
        own: The result of the save here; None before there is one.
        outcomes: The results of the save on the workers, as far as they were read by this one.
        result: The result on all workers; None before it is known.
        is_cut_short: True if there was no time to wait for that.
    """

    asked: tuple[Plan, float] | None = None
    call: Plan | None = None
    stop: StopRecord | None = None
    own: SaveOutcome | None = None
    outcomes: dict[int, SaveOutcome] = field(default_factory=dict)
    result: SaveOutcome | None = None
    is_cut_short: bool = False


class StopCoordinator:
    """**Thread-safe**, except `begun`, which belongs to the training thread. See `SingleConsensus`.

    Attributes:
        begun: How many steps the training thread has begun, or may have.
    """

    has_peers = True

    def __init__(self, peers: Peers, emit: Callable[[Event], object], url: str) -> None:
        self.begun = 0
        self.is_alarmed = False
        self.changed = Latch()
        self._peers = peers
        self._records = peers.open_namespace("stop")
        self.failures = PeerFailures(peers, self._records, emit, url)
        self._watch = Watch(self._look, is_urgent=self._is_urgent, on_silence=self._note_silence)
        self._timeout = ConsensusTimeout(peers, emit)
        self._listener = GuardCalls(lambda notice: True, lambda: None, lambda: None)
        # Guards what is agreed on, as far as this worker knows.
        self._lock = threading.Lock()
        self._agreement = StopStepAgreement(peers.rank, peers.world_size)
        self._round = _Round()
        self._is_over = False
        # What is to be written down; each is forgotten once the store has it.
        self._deeds: deque[Deed] = deque()
        # How much news there was at the last look of the mailbox's thread; None to look in any case.
        self._news: int | None = None

    @property
    def call(self) -> Plan | None:
        """The plan that was called for in this round; None before a call."""
        return self._round.call

    @property
    def is_outcome_known(self) -> bool:
        """True if the result of the last save on all workers is known."""
        return self._round.result is not None

    @property
    def is_cut_short(self) -> bool:
        """True if there was no time to wait until all had reported the result of the last save."""
        return self._round.is_cut_short

    def open(self, listener: GuardCalls) -> None:
        """Starts, as in `SingleConsensus`."""
        self._listener = listener
        self._peers.set_end_of_job(lambda: to_spare(listener.find_left()))
        self.failures.open()
        self._peers.mailbox.watch(self._watch)

    def close(self) -> None:
        """Ends; a second call does nothing."""
        self.failures.close()
        self._peers.mailbox.unwatch(self._watch)

    def begin_step(self, step: int, *, is_asked: bool, is_tentative: bool) -> bool:
        """Called when the training thread continues; returns False if it must ask first."""
        failures = self.failures
        failures.step = step
        if not is_asked:
            # In this order: what is pledged for this worker is never less than what it has begun.
            self.begun = step + 1
        failures.certain = step if is_tentative else step + 1
        if is_asked or self.is_alarmed or failures.error is not None:
            failures.certain = step
            return False
        return True

    def pause(self, step: int) -> int:
        """Called when the training thread pauses; returns how many steps it had begun, or may have."""
        begun, self.begun, self.failures.step = self.begun, step, step
        self.failures.certain = max(self.failures.certain, step)
        return begun

    def try_resume(self, begun: int) -> bool:
        """Returns True if the training thread may continue with the step that it had begun."""
        with self._lock:
            pledge, stop = self._agreement.pledge, self._agreement.stop
            may = pledge is None or begun <= (pledge.step or 0) or (stop is not None and begun <= stop)
            if may:
                self.begun = begun
            return may or self.failures.error is not None

    def should_stop(self, is_to_leave: Callable[[], bool]) -> bool:
        """Returns True if the loop would exit if a step ended now. This worker does not decide that alone."""
        call, stop = self._round.call, self._round.stop
        if call is None or stop is None or call.action is not Action.LEAVE:
            return self.failures.error is not None
        return self.begun >= stop.step

    def ask(self, plan: Plan | None) -> bool:
        """Makes the call at once, or in the next round. Without the others only an exit is waited for."""
        if plan is None or (plan.action is Action.SAVE and self._peers.mailbox.trouble):
            return False
        wanted = _wanted(plan)
        with self._lock:
            asked = 0 if self._round.asked is None else _wanted(self._round.asked[0])
            if max(self._agreement.called or 0, asked) >= wanted:
                return True
            self._round.asked = (
                replace_fields(plan, rank=self._peers.rank, text=make_brief(plan.text)),
                time.monotonic(),
            )
            self._agreement, deeds = self._agreement.wish(wanted)
            self._deeds.extend(deeds)
        self._peers.mailbox.wake()
        return True

    def settle(
        self,
        step: int,
        plan: Plan | None,
        *,
        is_tentative: bool = True,
        ends: bool = False,
        is_over: bool = False,
        is_paused: bool = False,
    ) -> Verdict:
        """Asks for what this worker plans, and returns what to do when that many steps are complete."""
        is_asked = self.ask(plan)
        is_at_end = is_paused and self._is_over
        if is_at_end:
            # The others learn of it, and this worker leaves with them when all is saved.
            turn = Turn.WAIT if is_asked else Turn.GO
        else:
            turn = self._find_turn(step, is_asked, is_tentative, ends=ends or is_paused, is_over=is_over)
        call, stop = self._round.call, self._round.stop
        is_behind = is_paused and not is_at_end and stop is not None and step < stop.step
        trouble = self._peers.mailbox.trouble
        objection = self._timeout.find_objection(turn, self._listener.find_left(), trouble, is_behind=is_behind)
        action = Action.TRAIN if turn is Turn.GO else None
        if turn is Turn.STOP and call is not None:
            action = call.action
        return Verdict(action, call, stop, objection)

    def share_outcome(
        self, outcome: SaveOutcome, end_at: float | None, abandon: Callable[[], object] | None
    ) -> SaveOutcome:
        """**Blocks.** Reports the result of the last save here, and returns that on all workers."""
        if outcome.is_cause:
            mistake = Failure.of(self._peers.rank, *outcome.error.split(": ", 1))
            outcome = replace_fields(outcome, error=self._peers.failures.make_error(mistake).message)
        outcome = replace_fields(outcome, error=make_brief(outcome.error))
        with self._lock:
            known, number = self._round, self._agreement.round
            known.own = outcome
        write = partial(self._records.post_once, outcome, "outcome", number, self._peers.rank)
        if abandon is None:
            self._peers.mailbox.post(write)
        else:
            self._peers.mailbox.ask(write)
            abandon()
        self._peers.mailbox.wake()
        now = time.monotonic()
        end_at = now + self._peers.timeout_seconds if end_at is None else max(end_at, now + LEAST_SECONDS)
        if not self._peers.mailbox.wait(lambda: known.result is not None, end_at):
            # What one worker writes down when its time is over is what all leave with.
            known.is_cut_short = True
            own = merge([outcome], is_complete=False)
            self._peers.mailbox.post(lambda: self._note_result(self._records.post_once(own, "result", number), number))
            if not self._peers.mailbox.wait(lambda: known.result is not None, time.monotonic() + _SETTLE_SECONDS):
                return own
        assert known.result is not None, "it was waited for"
        if self._peers.is_leader and known.stop is not None:
            # The store may be in this process.
            absent = {*known.stop.absent, *known.stop.done}
            read = self._records.key("read", number)
            end_at = time.monotonic() + READ_SECONDS
            wait_counted(self._peers.cluster, read, lambda: absent | self._peers.failures.dead, end_at)
        return known.result

    def end_round(self, provisional: int | None) -> int | None:
        """Called when this worker has done what was called for.

        Returns:
            The step that was saved, if all were there. Some may have saved it in a pause that continues, so all must
            save again if one must.
        """
        stop = self._round.stop
        with self._lock:
            self._agreement, deeds = self._agreement.end_round()
            self._deeds.extend(deeds)
            self._round, self._news, self.is_alarmed = _Round(self._round.asked), None, False
        self._peers.mailbox.wake()
        return None if stop is None or stop.done else stop.step

    def rewind(self, step: int) -> None:
        """Called when all workers have gone back to a step, before the round ends."""
        with self._lock:
            self.begun = self.failures.step = self.failures.certain = step
            self._agreement = self._agreement.reach(step)

    def find_last_call(self, plan: Plan | None) -> Plan | None:
        """**Blocks** for a moment. Returns what was called for when this worker had finished, if anything was."""
        self.ask(plan)
        number = self._agreement.round
        return self._peers.mailbox.ask(lambda: self._records.read(Plan, "call", number))

    def _find_turn(self, step: int, is_asked: bool, is_tentative: bool, *, ends: bool, is_over: bool) -> Turn:
        with self._lock:
            self.begun = step
            known = self._agreement = self._agreement.reach(step, finished=is_over)
            if known.turn is not Turn.GO:
                return known.turn
            if known.stop is None and is_asked:
                return Turn.WAIT
            self._is_over = is_over
            self.is_alarmed = known.called is not None
            if not ends and not is_over:
                self.begun = step + 1
                self.failures.certain = step if is_tentative else step + 1
            return Turn.GO

    # In the mailbox's thread.

    def _notify(self) -> None:
        changed, self.changed = self.changed, Latch()
        changed.open()
        self._peers.mailbox.notify()
        self._listener.wake()

    def _note_silence(self, seconds: float, error: str) -> None:
        self.failures.note_silence(seconds, error)
        self._notify()

    def _is_urgent(self) -> bool:
        known = self._agreement
        is_settling = known.called is not None and known.stop is None
        return is_settling or (self._round.own is not None and self._round.result is None)

    def _do(self, deed: Deed) -> None:
        """Writes a record, and processes what is in the store then."""
        match deed:
            case WriteCall(number):
                if self._round.asked is not None:
                    call, asked_at = self._round.asked
                    left = call.left_seconds
                    left = None if left is None else left - (time.monotonic() - asked_at)
                    first = self._records.post_once(replace_fields(call, left_seconds=left), "call", number)
                    self._records.count(1, "news")
                    self._note_call(number, first)
            case WritePledge(number, rank, pledge):
                pledge = self._records.post_once(pledge, "pledge", number, rank)
                self._note_pledge(rank, pledge)
            case WriteStop(number, step):
                pledges = self._agreement.pledges
                absent = tuple(rank for rank, pledge in sorted(pledges.items()) if pledge.step is None)
                stop = StopRecord(step, absent, tuple(sorted(self.failures.done)))
                self._note_stop(self._records.post_once(stop, "stop", number))
                if number > 0:
                    # A worker that has pledged has ended the round before.
                    self._delete_round(number - 1)

    def _note_pledge(self, rank: int, pledge: Pledge | None) -> None:
        """Processes a pledge; None for a worker that is dead and has made none."""
        with self._lock:
            known = self._agreement
            self._agreement, deeds = known.fence(rank) if pledge is None else known.hear_pledge(rank, pledge)
            self._deeds.extend(deeds)
        self._notify()

    def _note_call(self, number: int, call: Plan) -> None:
        with self._lock:
            known = self._agreement
            if self._is_over or known.called is not None or known.round != number:
                return
            # In this order: the training thread sets the one and then looks at the other.
            self.is_alarmed = True
            self._agreement, deeds = replace(known, begun=self.begun).hear_call(_wanted(call))
            self._deeds.extend(deeds)
            self._round.call = call
            if self._agreement.wished is None:
                self._round.asked = None
        if call.rank != self._peers.rank and call.action is not Action.OBEY:
            self._listener.receive(
                Notice(
                    source=f"rank {call.rank}",
                    text=f"rank {call.rank}: {call.text}",
                    demand=call.demand,
                    left_seconds=call.left_seconds,
                    by_hand=call.by_hand,
                )
            )
        self._notify()

    def _note_stop(self, stop: StopRecord) -> None:
        with self._lock:
            if self._agreement.called is not None and self._round.stop is None:
                self._agreement = self._agreement.hear_stop(stop.step)
                self._round.stop = stop
        self._notify()

    def _look(self) -> None:
        while self._deeds:
            self._do(self._deeds[0])
            self._deeds.popleft()
        with self._lock:
            before, known = self._news, self._agreement
            self._news = _BEING_READ
        try:
            news = self._records.count(0, "news")
            is_new = news != before
            is_settling = known.called is Wanted.LEAVE and known.stop is None
            if self.failures.look(is_new=is_new, is_settling=is_settling):
                self._notify()
            if is_new and known.called is None and not self._is_over:
                call = self._records.read(Plan, "call", known.round)
                if call is not None:
                    self._note_call(known.round, call)
        except BaseException:
            self._news = None
            raise
        with self._lock:
            # A round that has ended meanwhile has another one's records to read.
            self._news = news if self._news == _BEING_READ else None
        if self._agreement.called is not None and self._agreement.stop is None:
            self._seek_stop()
        if self._round.own is not None and self._round.result is None and self._round.stop is not None:
            self._seek_result(self._round)
        if self._deeds:
            self._peers.mailbox.wake()

    def _is_collector(self) -> bool:
        """Returns True if all lower ranks are gone, or have finished and no longer read calls.

        The lowest remaining rank reads what the others write. The result is the same, whichever worker reads.
        """
        dead = self._peers.failures.dead
        before = (rank for rank in range(self._peers.rank) if rank not in dead)
        return all(self.failures.find_end(rank) is not None for rank in before)

    def _seek_stop(self) -> None:
        number = self._agreement.round
        stop = self._records.read(StopRecord, "stop", number)
        if stop is not None:
            self._note_stop(stop)
        elif self._is_collector():
            # Before the look at what they have written.
            dead = self._peers.failures.dead
            for rank in self._agreement.unheard:
                pledge = self._records.read(Pledge, "pledge", number, rank)
                end = None if pledge is not None else self.failures.find_end(rank)
                if end is not None:
                    pledge = Pledge(end.step, final=True)
                if pledge is not None or rank in dead:
                    self._note_pledge(rank, pledge)

    def _seek_result(self, known: _Round) -> None:
        number = self._agreement.round
        result = self._records.read(SaveOutcome, "result", number)
        if result is None and self._is_collector() and known.own is not None and known.stop is not None:
            dead = self._peers.failures.dead
            outcomes = known.outcomes
            outcomes[self._peers.rank] = known.own
            missing = set(range(self._peers.world_size)) - {*known.stop.absent, *known.stop.done, *outcomes}
            for rank in sorted(missing):
                outcome = self._records.read(SaveOutcome, "outcome", number, rank)
                if outcome is None and rank in dead:
                    outcome = SaveOutcome(
                        f"rank {rank} was gone before it reported that its state was saved", True, False
                    )
                if outcome is not None:
                    outcomes[rank] = outcome
                    missing.discard(rank)
            if not missing:
                whole = merge(list(outcomes.values()), is_complete=True)
                result = self._records.post_once(whole, "result", number)
        if result is not None:
            self._note_result(result, number)

    def _note_result(self, result: SaveOutcome, number: int) -> None:
        if self._round.result is None:
            if not self._peers.is_leader:
                # The leader waits for the others before it takes the store along.
                self._records.count_read("read", number)
            self._round.result = result
            self._notify()

    def _delete_round(self, number: int) -> None:
        """Deletes the records of a round that all have ended."""
        names: list[tuple[object, ...]] = [(name, number) for name in ("call", "stop", "result", "read")]
        for rank in range(self._peers.world_size):
            names += [(name, number, rank) for name in ("pledge", "outcome", "read")]
        self._records.delete(*(self._records.key(*name) for name in names))


def _wanted(plan: Plan) -> Wanted:
    return Wanted.LEAVE if plan.action is Action.LEAVE else Wanted.SAVE


class ConsensusTimeout:
    """How long one worker waits until all know at which step they stop. One thread uses it at a time."""

    def __init__(self, peers: Peers, emit: Callable[[Event], object]) -> None:
        self._peers = peers
        self._emit = emit
        self._waiting_since: float | None = None
        self._is_reported = False

    def find_objection(self, turn: Turn, left_seconds: float | None, trouble: str, *, is_behind: bool) -> str:
        """Returns why to stop waiting for the others; an empty string to wait on, or if no wait is needed.

        Args:
            turn: What this worker is to do.
            left_seconds: The remaining time; None if it is not known.
            trouble: Why the others cannot be reached; empty if they can.
            is_behind: True if all stop at a step that this worker, which is paused, has not begun.
        """
        if turn is Turn.STOP or (turn is Turn.GO and not is_behind):
            self._waiting_since, self._is_reported = None, False
            return ""
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited_seconds = now - self._waiting_since
        if turn is Turn.OUT:
            return "the other workers took this one for dead and continued without it"
        if trouble:
            return trouble
        is_late = left_seconds is not None and left_seconds <= MARGIN_SECONDS / 2
        what = "not all workers reported {} {:.0f} s at which step they can stop"
        if is_behind:
            what = (
                "the loop did not reach, {} {:.0f} s, the step at which all workers stop, and which others have begun"
            )
        if (is_late and waited_seconds >= LEAST_SECONDS) or waited_seconds > self._peers.timeout_seconds:
            return what.format("within", waited_seconds)
        if waited_seconds > _WARN_SECONDS and not self._is_reported:
            self._is_reported = True
            self._emit(Warned(text=what.format("for", waited_seconds)))
        return ""


def merge(outcomes: list[SaveOutcome], *, is_complete: bool) -> SaveOutcome:
    """**Pure.** Returns the result of a save on all workers, from those of some; `is_complete` if these are all."""
    by_hand = all(outcome.by_hand for outcome in outcomes)
    if any(outcome.is_proof for outcome in outcomes):
        return SaveOutcome("", by_hand, True)
    failed = sorted((outcome for outcome in outcomes if outcome.error), key=lambda outcome: not outcome.is_cause)
    if failed:
        return SaveOutcome(failed[0].error, by_hand, False, failed[0].is_cause)
    return SaveOutcome(
        "" if is_complete else "the other workers did not report whether their state is saved", by_hand, False
    )
