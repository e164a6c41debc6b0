"""Decides when all workers save and exit: the interface for a guard, and its implementation for a single process.

`coordinator.py` and `peer_failures.py` implement the same for several workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from holdfast.errors import ClusterError
from holdfast.preemption.decide import Verdict
from holdfast.preemption.grace import Action, Plan
from holdfast.preemption.sources.protocol import Hear
from holdfast.process.latch import Latch


class SaveOutcome(msgspec.Struct, frozen=True):
    """The result of the last save: on one worker, or on all.

    Attributes:
        error: The error; empty if there was none.
        by_hand: True if a person at a terminal asked to exit, and no other source.
        is_proof: True if a checkpoint of all workers is known to be committed, or there was nothing to save.
        is_cause: True if the error began on that worker, and is not a consequence of another worker's.
    """

    error: str
    by_hand: bool
    is_proof: bool
    is_cause: bool = False


class FailureReport(msgspec.Struct, frozen=True):
    """The knowledge about an error that has ended training here, once the others know it.

    Attributes:
        cause: The error of another worker from which it results; None if it is this worker's own.
        blamed: The error that names the worker that is missing; None if none does.
        loss: The message, if it only says that a worker is missing or a save has failed; else empty.
    """

    cause: ClusterError | None
    blamed: ClusterError | None
    loss: str


class GuardCalls(NamedTuple):
    """The part of a guard that a consensus calls, in its own thread.

    Attributes:
        receive: Receives notices of other workers.
        wake: Called when there is something new.
        find_left: Returns the time until this process must be gone; None if it is not known.
    """

    receive: Hear
    wake: Callable[[], object]
    find_left: Callable[[], float | None]


class NoFailures:
    """Failures of other workers, for a process without others. `PeerFailures` has the same interface for several.

    Attributes:
        error: The error to raise here because of one; None if there is none.
    """

    error: ClusterError | None = None

    def take_error(self) -> ClusterError | None:
        """Returns the error, which is raised in the training loop now."""
        return None

    def postpone(self) -> None:
        """Puts back the error that was taken: it is still to be raised in the training thread."""

    def escalate(self) -> None:
        """Enforces an error that was not raised yet, with ever stronger means; called repeatedly during the loop."""

    def report(
        self, error: BaseException, left_seconds: float | None = None, *, is_exit: bool = False
    ) -> FailureReport | None:
        """**Blocks** for a moment. Reports an error that ends training here to the others; None if they know it.

        Args:
            error: The error.
            left_seconds: The remaining time; None if it is not known.
            is_exit: True if it is an exit in which the others take no part. Then it is reported in any case.
        """
        return None

    def find_cause(self) -> ClusterError | None:
        """**Blocks** for a moment. Returns the failure of another worker that prevents all saves, if any."""
        return None

    def finish(self, step: int) -> None:
        """**Blocks** for a moment. Called when training has ended here for good, as it should.

        Raises:
            PeerError: If another worker's training has ended at another step.
        """


class SingleConsensus:
    """Decides when to save and when to exit, for a process without others: at once, and as its notices ask.

    `StopCoordinator` has the same interface for several workers.

    Attributes:
        has_peers: True if other workers take part.
        failures: The failures of the others.
        call: What was called for in this round; None before a call.
        changed: Opened when there is something new; another latch has taken its place by then.
        is_alarmed: True if the training thread must ask before it begins another step.
        is_outcome_known: True if the result of the last save on all workers is known.
        is_cut_short: True if there was no time to wait until all had reported the result of the last save.
    """

    has_peers = is_alarmed = is_outcome_known = is_cut_short = False

    def __init__(self) -> None:
        self.failures = NoFailures()
        self.call: Plan | None = None
        self.changed = Latch()

    def open(self, listener: GuardCalls) -> None:
        """Starts communicating with the others; waits for nothing."""

    def close(self) -> None:
        """**Blocks** for a moment. Ends; a second call does nothing."""

    def begin_step(self, step: int, *, is_asked: bool, is_tentative: bool) -> bool:
        """Called when training continues after that many complete steps; returns False if it must ask first (`settle`).

        Args:
            step: How many steps.
            is_asked: True if this worker has a notice to handle.
            is_tentative: True if it is not known whether another step comes: the loop is the user's own.
        """
        return not is_asked

    def pause(self, step: int) -> int:
        """Called when the training thread pauses; returns how many steps it had begun, or may have."""
        return step

    def try_resume(self, begun: int) -> bool:
        """Returns True if the training thread may continue with the step that it had begun before the pause."""
        return True

    def should_stop(self, is_to_leave: Callable[[], bool]) -> bool:
        """Returns True if the loop would exit if a step ended now; `is_to_leave` says if this worker would."""
        return is_to_leave()

    def ask(self, plan: Plan | None) -> bool:
        """Calls for what this worker plans; returns True if it waits for that."""
        self.call = plan
        return plan is not None

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
        """Asks for what this worker plans, and returns what to do when that many steps are complete.

        Args:
            step: How many steps.
            plan: What it asks for; None for nothing.
            is_tentative: As in `begin_step`.
            ends: True if the loop does not continue with another step at once.
            is_over: True if it never will. If there is nothing to do, nothing more can be called for here then.
            is_paused: True if the guard's thread asks, and the training thread is paused.
        """
        self.call = plan
        return Verdict(Action.TRAIN if plan is None else plan.action, plan)

    def share_outcome(
        self, outcome: SaveOutcome, end_at: float | None, abandon: Callable[[], object] | None
    ) -> SaveOutcome:
        """**Blocks.** Reports the result of the last save here.

        Args:
            outcome: The result; an error that is a cause begins with its type, as `ValueError: ...`.
            end_at: Until when to wait for the others, by the monotonic clock; None if the job's end is not known.
            abandon: Called once the result is written.

        Returns:
            The result on all workers, as far as that could be found out.
        """
        return outcome

    def end_round(self, provisional: int | None) -> int | None:
        """Called when this worker has done what was called for. Passes on the step whose save may be incomplete."""
        self.call = None
        return provisional

    def rewind(self, step: int) -> None:
        """Called when all workers have gone back to a step, before the round ends."""

    def find_last_call(self, plan: Plan | None) -> Plan | None:
        """**Blocks** for a moment. Returns what this worker asks for at its end, or what was called for by then."""
        return plan
