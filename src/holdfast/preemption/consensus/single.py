"""When all workers save and leave: what a guard asks, and what a process without others answers.

`coordinator.py` and `peer_failures.py` answer the same for several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from holdfast.concurrency import Latch
from holdfast.errors import ClusterError, HoldfastError, PeerError
from holdfast.preemption.consensus.stop_step import Turn, Wanted
from holdfast.preemption.grace import Action, Outlook, Verdict, has_time_to_save
from holdfast.preemption.sources.protocol import Demand, Hear


class CallRecord(msgspec.Struct, frozen=True):
    """What all workers are to do, and why.

    Attributes:
        rank: The worker that calls.
        wanted: `Wanted`, as a number.
        demand: The demand of what was heard, as a number.
        text: What was heard.
        reason: Why now.
        left_seconds: The time that was left then; None if that is not known.
        by_hand: Whether it was a person at a terminal.
        saves: Whether there is time to save, if a save was made since the notice.
    """

    rank: int
    wanted: int
    demand: int
    text: str
    reason: str
    left_seconds: float | None
    by_hand: bool
    saves: bool = True


class StopRecord(msgspec.Struct, frozen=True):
    """The stop step of a round.

    Attributes:
        step: The step.
        absent: Who did not pledge, being dead.
        done: Whose training had ended before.
    """

    step: int
    absent: tuple[int, ...] = ()
    done: tuple[int, ...] = ()


class SaveOutcome(msgspec.Struct, frozen=True):
    """The result of the last save: on one worker, or of all.

    Attributes:
        error: What went wrong; empty if nothing did.
        by_hand: Whether it was a person at a terminal that asked to leave, and no other source.
        is_proof: Whether a checkpoint of all workers is known to be committed, or there was nothing to be saved.
        is_cause: Whether what went wrong began on that worker, and is no consequence of what others have met with.
    """

    error: str
    by_hand: bool
    is_proof: bool
    is_cause: bool = False


class FailureReport(msgspec.Struct, frozen=True):
    """What is known of an error that has ended training here, once the others have been told.

    Attributes:
        cause: The error of another worker from which it results; None if it is this worker's own.
        blamed: What says which worker is missing; None if nothing does.
        loss: What the error says, if that is only that a worker is missing or a save has failed; else empty.
    """

    cause: ClusterError | None
    blamed: ClusterError | None
    loss: str


class NoFailures:
    """Failures of other workers, for a process without others. `PeerFailures` has the same for those with some.

    Attributes:
        error: The error to raise here because of one; None if there is none.
    """

    error: ClusterError | None = None

    def take_error(self) -> ClusterError | None:
        """The error, which is raised in the training loop now."""
        return None

    def postpone(self) -> None:
        """The error that was taken is still to be raised in the training thread."""

    def escalate(self) -> None:
        """Presses ever harder for an error that was not raised yet; called again and again beside the loop."""

    def report(
        self, error: BaseException, left_seconds: float | None = None, *, is_exit: bool = False
    ) -> FailureReport | None:
        """**Blocks** for a moment. Tells the others of an error that ends training here; None if they know.

        Args:
            error: The error.
            left_seconds: The time that is left; None if that is not known.
            is_exit: Whether it is an exit in which the others take no part. Then it is reported in any case.
        """
        return None

    def find_cause(self) -> ClusterError | None:
        """**Blocks** for a moment. The failure of another worker that explains why nothing can be saved, if any."""
        return None

    def describe_losses(self, ranks: Iterable[int]) -> list[PeerError]:
        """What is known of workers that are lost."""
        return []

    def finish(self, step: int) -> None:
        """**Blocks** for a moment. Training has ended here for good, as it should.

        Raises:
            PeerError: If another worker's training has ended at another step.
        """


class SingleConsensus:
    """Decides when to save and when to leave, for a process without others: at once, and as its notices ask for.

    `StopCoordinator` has the same for those with some.

    Attributes:
        has_peers: Whether other workers take part.
        failures: The failures of the others.
        call: What was called for in this round; None before a call.
        stop: The stop step of this round; None before it is known, and where there is no other worker.
        changed: Opened when there is something new; another latch has taken its place by then.
        is_alarmed: Whether the training thread has to ask before it begins another step.
        is_outcome_known: Whether the result of the last save on all workers is known.
        is_cut_short: Whether it was too late to wait until all had told the result of the last save.
        objection: Why the others are not waited for any longer, as the last `arrive` has found; else empty.
    """

    has_peers = False

    def __init__(self) -> None:
        self.failures = NoFailures()
        self.call: CallRecord | None = None
        self.stop: StopRecord | None = None
        self.changed = Latch()
        self.is_alarmed = self.is_outcome_known = self.is_cut_short = False
        self.objection = ""

    def open(self, hear: Hear, wake: Callable[[], object], find_left: Callable[[], float | None]) -> None:
        """Begins to speak with the others; waits for nothing.

        Args:
            hear: Takes notices that other workers have heard.
            wake: Called when there is something new.
            find_left: Gives the time until this process must be gone; None if that is not known.
        """

    def close(self) -> None:
        """**Blocks** for a moment. Ends; harmless twice."""

    def begin_step(self, step: int, *, is_asked: bool, is_tentative: bool) -> bool:
        """The training thread goes on after so many complete steps; False if it has to ask before (`arrive`).

        Args:
            step: How many.
            is_asked: Whether this worker has a notice to deal with.
            is_tentative: Whether it is not known if another step comes: the loop is the user's own.
        """
        return not is_asked

    def pause(self, step: int, *, begins: bool) -> None:
        """The training thread takes no steps for a while; `begins` if it took some until now."""

    def try_resume(self, step: int) -> bool:
        """Whether the training thread may go on with the step that it had begun before it paused."""
        return True

    def should_stop(self, is_to_leave: Callable[[], bool]) -> bool:
        """Whether the loop would leave if a step ended now; `is_to_leave` says if this worker would."""
        return is_to_leave()

    def propose(self, outlook: Outlook, verdict: Verdict, text: str, *, by_hand: bool) -> bool:
        """Calls for what this worker is to do because of its notices; False if it does not wait for that.

        Args:
            outlook: What this worker knows.
            verdict: What it is to do.
            text: What it has heard.
            by_hand: Whether a person at a terminal has asked for it, and no other source.
        """
        self.call = make_call(0, outlook, verdict, text, by_hand=by_hand)
        return True

    def arrive(
        self,
        step: int,
        *,
        holds: bool,
        left_seconds: float | None,
        ends: bool = False,
        is_over: bool = False,
        is_paused: bool = False,
    ) -> Turn:
        """What to do when so many steps are complete.

        Args:
            step: How many.
            holds: Whether the loop does not go on before something was called for.
            left_seconds: The time that is left; None if that is not known.
            ends: Whether it does not go on to another step at once.
            is_over: Whether it never will. If there is nothing to do, nothing more can be called for here then.
            is_paused: Whether the guard's thread asks, and the training thread is paused.
        """
        if not holds:
            self.call = None
        return Turn.STOP if holds else Turn.GO

    def try_end(self, end: Callable[[HoldfastError], bool], late: HoldfastError) -> bool:
        """**Blocks** for a moment. Ends a save on all workers, unless they have agreed to commit it."""
        return end(late)

    def share_outcome(
        self, outcome: SaveOutcome, end_at: float | None, told: Callable[[], object] | None
    ) -> SaveOutcome:
        """**Blocks.** Tells the result of the last save here.

        Args:
            outcome: The result; one that is a cause names the error's type first, as `ValueError: ...`.
            end_at: Until when to wait for the others, by the monotonic clock; None if the job's end is not known.
            told: Called once that is written down.

        Returns:
            The result on all workers, as far as that could be found out.
        """
        return outcome

    def end_round(self, provisional: int | None) -> int | None:
        """What was called for is done here. Takes and gives the step whose save may not hold all of it, if any."""
        self.call = None
        return provisional

    def find_last_call(self) -> CallRecord | None:
        """**Blocks** for a moment. What was called for when this worker had come to its end, if anything was."""
        call, self.call = self.call, None
        return call


def make_call(rank: int, outlook: Outlook, verdict: Verdict, text: str, *, by_hand: bool) -> CallRecord:
    """**Pure.** What a worker calls for; the arguments are those of `Consensus.propose`."""
    leaves = verdict.action is Action.LEAVE
    return CallRecord(
        rank=rank,
        wanted=Wanted.LEAVE if leaves else Wanted.SAVE,
        demand=Demand.LEAVE if leaves else outlook.demand,
        text=text,
        reason=verdict.reason,
        left_seconds=outlook.left_seconds,
        by_hand=by_hand,
        saves=has_time_to_save(outlook),
    )
