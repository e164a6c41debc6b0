"""Failures of peers: a worker failed, vanished, or ended its training before the others.

done/RANK              a `TrainingEnd`: where a worker's training has ended for good
end                    a `TrainingEnd`: where the first worker's training has ended
failure                a `Failure`: the first error that has ended a worker's training
failure-read           how many have read that; failure-read/RANK: this one has
news                   is incremented whenever there is something new
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from holdfast.cluster.barrier import LEADER, READ_SECONDS, wait_counted
from holdfast.cluster.peers import Failure, Namespace, Peers
from holdfast.deadlines import LEAST_SECONDS
from holdfast.errors import ClusterError, HoldfastError, SaveFailedError
from holdfast.events import Event, Failed
from holdfast.preemption.consensus.abort import StuckThreadAborter, VainWait, count_begun
from holdfast.preemption.consensus.error_cause import (
    describe_early_exit,
    find_loss,
    find_missing,
    is_cause,
    is_of_collective,
    may_follow,
)
from holdfast.preemption.consensus.single import FailureReport
from holdfast.process.latch import Latch

_HOLD_SHARE: Final = 1.5
_HOLD_LOOKS: Final = 150
"""How much longer than the detection of a dead worker takes a collective's error is held back. Looks are
counted, and not the time: while this process is suspended, it does not detect anything either.
"""

_STORE_HINT: Final = (
    "Check whether the process that hosts the job's store is still running and can be reached from here."
)
_EARLY_HINT: Final = "All workers must take the same steps; a `break` counts the step that it leaves as taken."


class TrainingEnd(msgspec.Struct, frozen=True):
    """Where a worker's training has ended.

    Attributes:
        rank: The worker.
        step: How many steps it has completed.
        collectives: How many collectives among all workers it has begun; None if that is not known.
    """

    rank: int
    step: int
    collectives: int | None = None


class PeerFailures:
    """**Thread-safe**, except `certain`, which belongs to the training thread. See `NoFailures`.

    Attributes:
        certain: How many steps the training thread has certainly begun.
        step: How many steps are complete here.
        error: That another worker has failed, or that none can be reached any more; None if all is well.
        done: The workers that are known to have ended for good.
    """

    def __init__(self, peers: Peers, records: Namespace, emit: Callable[[Event], object], url: str) -> None:
        self.certain = self.step = 0
        self.error: ClusterError | None = None
        self.done: set[int] = set()
        self._peers = peers
        self._records = records
        # Logs in one line what has ended training; None once it has. At worst it is in the log twice.
        self._emit_failed: Callable[..., object] | None = lambda **facts: emit(Failed(**facts, path=url))
        self._aborter, self._vain_wait = StuckThreadAborter(), VainWait()
        self._is_reported = self._is_over = self._is_holding = False
        # Known to the mailbox's thread: who was looked at, who has ended first, and the first failure of all.
        self._asked: set[int] = set()
        self._end: TrainingEnd | None = None
        self._failure: Failure | None = None

    def open(self) -> None:
        """Prepares; from now on failures here are reported to the others. Called in the training thread."""
        self._aborter.open()

    def close(self) -> None:
        """Ends; a second call does nothing."""
        self._aborter.close()

    def take_error(self) -> ClusterError | None:
        """Returns the error, which is raised in the training loop now."""
        error = self.error
        if error is not None:
            self._aborter.is_raised = True
            self._log(error)
            self._aborter.count_raise(error)
        return error

    def postpone(self) -> None:
        """Puts back the error that was taken: it is still to be raised in the training thread."""
        self._aborter.is_raised = False

    def escalate(self) -> None:
        """Enforces an error that was not raised yet, with ever stronger means; called repeatedly during the loop."""
        if self.error is not None:
            self._log(self.error)
            if not self._aborter.is_raised:
                self._aborter.escalate(self.error)

    def report(
        self, error: BaseException, left_seconds: float | None = None, *, is_exit: bool = False
    ) -> FailureReport | None:
        """**Blocks** for a moment. Reports an error that ends training here to the others; None if they know it."""
        if is_exit:
            self._publish(error, left_seconds)
        if is_exit or self._is_reported or not self._aborter.is_open:
            return None
        self._is_reported = True
        cause = self._publish(error, left_seconds)
        self._log(cause or error)
        blamed = error if isinstance(error, ClusterError) else cause
        return FailureReport(cause, blamed, find_loss(blamed or error))

    def find_cause(self) -> ClusterError | None:
        """**Blocks** for a moment. Returns the failure of another worker that prevents all saves, if any."""
        self._peers.mailbox.ask(self._look_for_failure)
        error = self.error
        if error is None or not is_cause(error):
            return None
        self._aborter.is_raised = True
        return error

    def finish(self, step: int) -> None:
        """**Blocks** for a moment. Called when training has ended here for good, as it should."""
        self._is_over = True
        end = TrainingEnd(self._peers.rank, step, count_begun())

        def write() -> TrainingEnd:
            self._records.post_once(end, "done", end.rank)
            first = self._records.post_once(end, "end")
            self._records.count(1, "news")
            return first

        first = self._peers.mailbox.ask(write) or end
        if first.step != step:
            raise self._peers.failures.make_error(_describe_end(first, step))

    # What the coordinator asks, in the mailbox's thread.

    def look(self, *, is_new: bool, is_settling: bool) -> bool:
        """Checks for news.

        Args:
            is_new: True if something was written since the last look.
            is_settling: True while a stop step is being agreed on, which handles lost workers in its own way.

        Returns:
            True if there is an error that was not there before.
        """
        before = self.error
        if is_new:
            self._look_for_failure()
        if is_new and self._end is None:
            self._end = self._records.read(TrainingEnd, "end")
        if self._end is not None and self._end.step < self.certain:
            self._err(_describe_end(self._end, self.certain))
        elif self._end is not None:
            self._look_for_vain_wait(self._end)
        self._look_for_explanation()
        if self.error is None and (self._is_holding or not is_settling):
            for rank in sorted(self._peers.failures.lost - self.done):
                if self.find_end(rank) is None:
                    self._err(self._peers.failures.describe_loss(rank))
        return self.error is not before

    def note_silence(self, seconds: float, what: str) -> None:
        """Called when the store of the job does not respond.

        Whether the store's machine is gone or unreachable, no worker can be reached any more. So it counts like the
        loss of a worker, and after the same time.
        """
        if self._peers.failures.leader_failure is not None:
            # The store has gone with the leader.
            self._err(self._peers.failures.leader_failure)
        elif LEADER in self._peers.failures.lost:
            # Its process has ended on this machine, which is seen without the store.
            self._err(self._peers.failures.describe_loss(LEADER))
        if self.error is None and not self._is_over and seconds >= self._peers.liveness_seconds:
            self._aborter.erred_at = time.monotonic()
            self.error = ClusterError(f"no other worker could be reached for {seconds:.0f} s: {what}", hint=_STORE_HINT)

    def find_end(self, rank: int) -> TrainingEnd | None:
        """**Blocks.** Returns where another worker's training has ended for good, if it has."""
        end = self._records.read(TrainingEnd, "done", rank)
        if end is not None:
            self.done.add(rank)
        return end

    def _publish(self, error: BaseException, left_seconds: float | None = None) -> ClusterError | None:
        """**Blocks** for a moment. Reports an error that ends this worker's training to the others.

        A collective's error only says that some worker is missing. So it is held back until it is known which one.

        Returns:
            The error of another worker from which this one results, as far as that can be known.
        """
        self._aborter.is_raised = True
        cause: ClusterError | None = find_missing(error)
        if cause is None and is_of_collective(error):
            cause = self._await_cause()
        if self._failure is not None and (cause or error) is self.error and not self._peers.is_leader:
            # That was written down when it was read, and the store may be gone with the worker that it is about.
            return cause
        begun_at = time.monotonic()
        failure = replace(self._peers.failures.describe(cause or error, traced=True), step=self.step)

        def write() -> Failure:
            first = self._records.post_once(failure, "failure")
            self._records.count(1, "news")
            return first

        found = self._peers.mailbox.ask(write)
        if found is not None and self._peers.is_leader:
            # The store may be in this process.
            most_seconds = READ_SECONDS if left_seconds is None else min(left_seconds, READ_SECONDS)
            end_at = max(begun_at + most_seconds, time.monotonic() + LEAST_SECONDS)
            # One that has ended counts, too: it waits for the last save of all, and learns why that does not come.
            read = self._records.key("failure-read")
            wait_counted(self._peers.cluster, read, lambda: self._peers.failures.dead, end_at)
        if found is None and cause is None and error is not self.error:
            trouble = self._peers.mailbox.trouble or "the store of the job is slow"
            _note(error, f"The failure could not be reported to the other workers: {trouble}")
        # The others may have found this worker gone from the loop before it came to its end.
        if found is None or found == failure or (found.rank == self._peers.rank and not self._is_over):
            return cause
        first = self._peers.failures.make_error(found)
        if may_follow(error, first.kind):
            return first
        if not (isinstance(error, SaveFailedError) and first.kind == SaveFailedError.__name__):  # Of one save.
            is_same = (found.kind, found.text) == (failure.kind, failure.text)
            more = (
                f"Rank {found.rank} failed in the same way"
                if is_same
                else f"Another worker failed too: {first.message}"
            )
            _note(error, more)
        return None

    def _log(self, error: BaseException) -> None:
        """Logs once, in one line, what has ended training on which worker."""
        if self._emit_failed is None or describe_early_exit(error):
            return
        emit, self._emit_failed = self._emit_failed, None
        failure = (self.error and self._failure) or self._peers.failures.describe(error)
        text = " ".join(self._peers.failures.make_error(failure).message.split())
        step, is_logged = self.step if failure.step is None else failure.step, failure.kind == SaveFailedError.__name__
        emit(stage="training", error=text, step=step, rank=failure.rank, is_raised=is_logged)

    def _await_cause(self) -> ClusterError | None:
        """**Blocks** until another worker has failed or is missed; None if all stay alive for longer than that takes.

        It waits no longer than the job's remaining time, if it is to exit.
        """
        begun_at = time.monotonic()
        self._is_holding = True
        for _ in range(_HOLD_LOOKS):
            if self.error is not None:
                break
            left_seconds = self._peers.find_left_seconds()
            if left_seconds is not None and left_seconds <= 0 and time.monotonic() - begun_at >= LEAST_SECONDS:
                break
            Latch().wait(_HOLD_SHARE * self._peers.liveness_seconds / _HOLD_LOOKS)
        self._is_holding = False
        return self.error

    def _look_for_failure(self) -> None:
        if self._failure is None and (failure := self._records.read(Failure, "failure")) is not None:
            self._failure = failure
            self._confirm_failure_is_read()
            self._err(failure)

    def _confirm_failure_is_read(self) -> None:
        """Makes the leader wait for the others before its process, and perhaps the store, is gone."""
        if not self._peers.is_leader:
            self._records.count_read("failure-read")

    def _look_for_vain_wait(self, end: TrainingEnd) -> None:
        """Checks whether this worker is in a collective of the step in which another one has left its loop."""
        begun = None if self.error is not None or self._is_over or end.collectives is None else count_begun()
        if begun is None or end.collectives is None or begun <= end.collectives:
            return
        if self._is_holding:
            # A collective has raised here, and that worker was not in it.
            self._err(_describe_end(end))
        elif (since := self._vain_wait.find_since(begun)) is not None:
            self._err(_describe_end(end), since)

    def _look_for_explanation(self) -> None:
        """Reads the failure left by a worker that died before it began."""
        if self.error is not None or self._is_over:
            return
        for rank in sorted(self._peers.failures.gone - self._asked - self.done):
            failure = self._peers.failures.find_explanation((rank,))
            # It comes before the goodbye, or never.
            self._asked.add(rank)
            if failure is not None:
                self._err(failure)

    def _err(self, failure: Failure, since: float | None = None) -> None:
        """Records a failure, and publishes it at once: all of them name the failure that comes first.

        `since` is when the training thread began to wait in vain, by the monotonic clock.
        """
        # What has ended here cannot fail any more, but for having ended too early for the others.
        if self.error is not None or (self._is_over and failure.rank != self._peers.rank):
            return
        if self._failure is None:
            # Without the store each worker names what it has found itself.
            with suppress(HoldfastError):
                failure = self._records.post_once(failure, "failure")
                self._confirm_failure_is_read()
                self._records.count(1, "news")
        self._aborter.erred_at = since or time.monotonic()
        self._failure, self.error = failure, self._peers.failures.make_error(failure)


def _note(error: BaseException, text: str) -> None:
    # An error of the user's may be of a kind that cannot be changed.
    with suppress(Exception):
        error.add_note(text)


def _describe_end(end: TrainingEnd, step: int | None = None) -> Failure:
    """Returns the failure of a worker that ended too early for another one, which is at `step` or in a collective."""
    what = "but another worker is still in a collective with it"
    if step is not None:
        what = f"but another worker is at step {step}"
    text = f"its training ended after step {end.step}, {what}"
    return replace(Failure.of(end.rank, "AbsentError", text, _EARLY_HINT), step=end.step)
