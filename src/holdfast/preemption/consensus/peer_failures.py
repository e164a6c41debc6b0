"""That a worker has failed, has vanished, or has ended its training before the others: what one learns of another."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from holdfast.cluster.peers import Failure, Peers, make_sendable
from holdfast.deadlines import LEAST_SECONDS
from holdfast.errors import AbsentError, ClusterError, HoldfastError, PeerError, SaveFailedError
from holdfast.gate import Gate
from holdfast.preemption.consensus.collectives import count_begun
from holdfast.preemption.consensus.consequences import find_missing, is_of_collective, may_follow, tells_of_collective
from holdfast.preemption.consensus.herald import Herald
from holdfast.preemption.consensus.records import Board, EndRecord
from holdfast.save.progress import Place, find_library_call

_TELL_SECONDS: Final = 3.0
"""How long to wait until what ends this worker is written down and, if it may host the store, read by the others."""

_HOLD_SHARE: Final = 1.5
_HOLD_LOOKS: Final = 150
"""What a collective has raised is held back for so much longer than it takes until a dead worker is missed. Looks are
counted, and not the time: where this process stands still, it does not miss anybody either."""

_VAIN_SECONDS: Final = 2.0
"""How long a worker waits in a collective which one that has ended its training never began."""

_TRACEBACK_CHARACTERS: Final = 16_000

_STORE_HINT: Final = "Look whether the process that hosts the job's store still runs, and can be reached from here."
_EARLY_HINT: Final = "All workers have to take the same steps; a `break` counts the step that it leaves as taken."


class Mishaps:
    """**Thread-safe**, but for `certain`, which belongs to the training thread.

    Attributes:
        certain: How many steps the training thread has begun for certain.
        step: How many steps are complete here.
        error: That another worker has failed, or that none can be reached any more; None if all is well.
        failure: What has failed there; None as long as nothing has, or where none can be reached.
        erred_at: When that was heard, by the monotonic clock; or since when the training thread waits in vain for it.
        is_raised: Whether an error has come out of the training loop, or comes out of it now.
    """

    def __init__(self, peers: Peers, board: Board) -> None:
        """Knows of none yet.

        Args:
            peers: The workers.
            board: Where they write.
        """
        self.certain = self.step = 0
        self.error: ClusterError | None = None
        self.failure: Failure | None = None
        self.erred_at = 0.0
        self.is_raised = False
        self._peers = peers
        self._board = board
        self._is_over = False
        self._is_holding = False
        # Known to the thread that speaks with the others.
        self._done: set[int] = set()
        self._asked: set[int] = set()
        self._end: EndRecord | None = None
        self._failure: Failure | None = None
        # How many collectives were begun, and in which call of the library the training thread is; and since when.
        self._thread = threading.get_ident()
        self._call: tuple[int, list[Place]] | None = None
        self._waits_since: float | None = None

    def look(self, *, is_new: bool, is_settling: bool) -> bool:
        """Looks whether there is something to be heard; in the thread that speaks with the others.

        Args:
            is_new: Whether something was written since the last look.
            is_settling: Whether it is being settled where to stop, which takes note of the lost in its own way.

        Returns:
            Whether there is an error that was not there before.
        """
        before = self.error
        if is_new:
            self._look_for_failure()
        if is_new and self._end is None:
            self._end = self._board.read(EndRecord, "end")
        if self._end is not None and self._end.step < self.certain:
            self._err(_fail_early(self._end, self.certain))
        elif self._end is not None:
            self._look_for_vain_wait(self._end)
        self._look_for_explanation()
        if self.error is None and (self._is_holding or not is_settling):
            for rank in sorted(self._peers.lost - self._done):
                if not self.is_done(rank):
                    self._err(self._peers.describe_loss(rank))
        return self.error is not before

    def note_silence(self, seconds: float, what: str) -> None:
        """The store of the job does not answer; in the thread that speaks with the others.

        Whether it is the machine of the store that is gone or the way to it, nobody can be heard any more. So it
        counts as the loss of a worker does, and after the same time.
        """
        if self._peers.farewell is not None:
            # The store has gone with the leader.
            self._err(self._peers.farewell)
        if self.error is None and not self._is_over and seconds >= self._peers.liveness_seconds:
            self.erred_at = time.monotonic()
            self.error = ClusterError(f"for {seconds:.0f} s no other worker could be reached: {what}", hint=_STORE_HINT)

    def is_done(self, rank: int) -> bool:
        """**Blocks.** Whether another worker's training has ended for good."""
        return self.try_find_end(rank) is not None

    def try_find_end(self, rank: int) -> EndRecord | None:
        """**Blocks.** Where another worker's training has ended for good, if it has."""
        end = self._board.read(EndRecord, "done", rank)
        if end is not None:
            self._done.add(rank)
        return end

    @property
    def done(self) -> tuple[int, ...]:
        """The workers that are known to have ended for good."""
        return tuple(sorted(self._done))

    def finish(self, step: int, herald: Herald) -> PeerError | None:
        """**Blocks** for a moment. Training has ended here for good, as it should.

        Returns:
            An error if another worker's training has ended at another step.
        """
        self._is_over = True
        end = EndRecord(self._peers.rank, step, count_begun())
        found: list[EndRecord] = []

        def write() -> None:
            self._board.settle(end, "done", end.rank)
            found.append(self._board.settle(end, "end"))
            self._board.rouse()

        herald.send(write)
        herald.wait(lambda: bool(found), time.monotonic() + _TELL_SECONDS)
        first = next(iter(found), end)
        return None if first.step == step else self._peers.make_error(_fail_early(first, step))

    def name(self, mistake: str) -> str:
        """What went wrong here, as the others are told of it; empty if nothing did."""
        return self._peers.make_error(Failure.of(self._peers.rank, *mistake.split(": ", 1))).message if mistake else ""

    def tell(self, error: BaseException, herald: Herald, left_seconds: float | None = None) -> ClusterError | None:
        """**Blocks** for a moment. This worker's training is ended by an error; the others are told.

        What a collective raises says only that some worker is not there. So it is held back until it is known which
        one, and that is told in its stead.

        Args:
            error: The error.
            herald: Who tells them.
            left_seconds: The time that is left; None if that is not known.

        Returns:
            The error of another worker of which this one comes, as far as that can be known.
        """
        self.is_raised = True
        cause: ClusterError | None = find_missing(error)
        if cause is None and is_of_collective(error):
            cause = self._await_cause()
        if self.failure is not None and (cause or error) is self.error and not self._peers.is_leader:
            # That was written down when it was heard, and the store may be gone with the worker that it is about.
            return cause
        begun_at = time.monotonic()
        failure = replace(describe(cause or error, self._peers), step=self.step)
        found: list[Failure] = []

        def write() -> None:
            found.append(self._board.settle(failure, "failure"))
            self._board.rouse()

        herald.send(write)
        herald.wait(lambda: bool(found), begun_at + _TELL_SECONDS)
        if found and self._peers.is_leader:
            # The store may lie in this process.
            others = set(range(1, self._peers.world_size)) - self._done
            most_seconds = _TELL_SECONDS if left_seconds is None else min(left_seconds, _TELL_SECONDS)
            least_at = time.monotonic() + LEAST_SECONDS
            self.wait_heard("failure-heard", others, herald, max(begun_at + most_seconds, least_at))
        if not found and cause is None and error is not self.error:
            _note(error, f"The other workers could not be told: {herald.trouble or 'the store of the job is slow'}")
        # The others may have found this worker gone from the loop before it came to its end.
        if not found or found[0] == failure or (found[0].rank == self._peers.rank and not self._is_over):
            return cause
        first = self._peers.make_error(found[0])
        if may_follow(error, first.kind):
            return first
        _note(error, f"Another worker has failed, too: {first.message}")
        return None

    def find_cause(self, herald: Herald) -> ClusterError | None:
        """**Blocks** for a moment. The error that another worker has told of, whether or not it was heard before."""
        looked: list[bool] = []

        def look() -> None:
            self._look_for_failure()
            looked.append(True)

        herald.send(look)
        herald.wait(lambda: bool(looked), time.monotonic() + _TELL_SECONDS)
        error = self.error
        return error if error is not None and is_cause(error) else None

    def wait_heard(self, name: str, ranks: Collection[int], herald: Herald, end_at: float) -> None:
        """**Blocks.** Waits until as many have counted up there as live of these, or the time is over."""
        count = 0

        def ask() -> None:
            nonlocal count
            count = self._board.count(name)

        while count < len(set(ranks) - self._peers.dead) and time.monotonic() < end_at and not herald.trouble:
            herald.send(ask)
            herald.changed.wait(_TELL_SECONDS / 100)

    def _await_cause(self) -> ClusterError | None:
        """**Blocks** until another worker has failed or is missed; None if all live on, for longer than that takes.

        No longer than the job has time, if it is to leave.
        """
        begun_at = time.monotonic()
        self._is_holding = True
        for _ in range(_HOLD_LOOKS):
            if self.error is not None:
                break
            left_seconds = self._peers.may_wait_seconds()
            if left_seconds is not None and left_seconds <= 0 and time.monotonic() - begun_at >= LEAST_SECONDS:
                break
            Gate().wait(_HOLD_SHARE * self._peers.liveness_seconds / _HOLD_LOOKS)
        self._is_holding = False
        return self.error

    def _look_for_failure(self) -> None:
        """In the thread that speaks with the others."""
        if self._failure is None:
            self._failure = self._board.read(Failure, "failure")
            if self._failure is not None:
                self._note_heard()
                self._err(self._failure)

    def _note_heard(self) -> None:
        """The leader waits for the others before it takes the store along."""
        if not self._peers.is_leader:
            self._board.count("failure-heard", 1)

    def _look_for_vain_wait(self, end: EndRecord) -> None:
        """Whether this worker is in a collective of the step amid which another one has left its loop.

        The counts alone do not say so: where workers send to each other, those in the middle count more.
        """
        begun = None if self.error is not None or self._is_over or end.collectives is None else count_begun()
        if begun is None or end.collectives is None or begun <= end.collectives:
            return
        if self._is_holding:
            # A collective has raised here, and that worker was not in it.
            self._err(_fail_absent(end))
            return
        places = find_library_call(self._thread)
        if places is None or (begun, places) != self._call:
            self._call, self._waits_since = (begun, places or []), None
            return
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since >= _VAIN_SECONDS:
            self._err(_fail_absent(end), self._waits_since)

    def _look_for_explanation(self) -> None:
        """Whoever could not even begin has told of it where it said goodbye; in the thread that speaks with others."""
        if self.error is not None or self._is_over:
            return
        for rank in sorted(self._peers.gone - self._asked - self._done):
            failure = self._peers.find_explanation((rank,))
            # It comes before the goodbye, or never.
            self._asked.add(rank)
            if failure is not None:
                self._err(failure)

    def _err(self, failure: Failure, since: float | None = None) -> None:
        """Takes note of a failure, and tells the others at once: all of them name the failure that comes first.

        Args:
            failure: What has failed.
            since: Since when the training thread has been waiting in vain, by the monotonic clock; None if it has not.
        """
        # What has ended here cannot fail any more, but for having ended too early for the others.
        if self.error is not None or (self._is_over and failure.rank != self._peers.rank):
            return
        if self._failure is None:
            # Without the store each worker names what it has found itself.
            with suppress(HoldfastError):
                failure = self._failure = self._board.settle(failure, "failure")
                self._note_heard()
                self._board.rouse()
        error = self._peers.make_error(failure)
        self.erred_at = since or time.monotonic()
        self.failure, self.error = failure, error


def describe(error: BaseException, peers: Peers) -> Failure:
    """What to tell the others of an error, whatever it is."""
    if isinstance(error, PeerError):
        return peers.describe(error)
    text = _try(lambda: error.message if isinstance(error, HoldfastError) else str(error), "")
    hint = error.hint if isinstance(error, HoldfastError) else ""
    trace = _try(lambda: "".join(traceback.format_exception(error)), "")
    failure = Failure.of(peers.rank, type(error).__name__, text, hint)
    return replace(failure, traceback=make_sendable(trace)[-_TRACEBACK_CHARACTERS:])


def _try(make: Callable[[], str], instead: str) -> str:
    """An error of the user's may be of a kind that cannot even say what it is."""
    try:
        return str(make())
    except Exception:  # noqa: BLE001  See above.
        return instead


def _note(error: BaseException, text: str) -> None:
    # An error of the user's may be of a kind that cannot be changed.
    with suppress(Exception):
        error.add_note(text)


def _fail_early(end: EndRecord, step: int) -> Failure:
    text = f"its training has ended after step {end.step}, that of another worker has come to step {step}"
    return replace(Failure.of(end.rank, "AbsentError", text, _EARLY_HINT), step=end.step)


def _fail_absent(end: EndRecord) -> Failure:
    text = f"its training has ended after step {end.step}, without a collective in which another worker is"
    return replace(Failure.of(end.rank, "AbsentError", text, _EARLY_HINT), step=end.step)


def is_cause(error: ClusterError) -> bool:
    """**Pure.** Whether it says why that worker has failed: more than that one is missing, or that a save was."""
    if not isinstance(error, PeerError) or error.kind == AbsentError.__name__:
        return False
    return not is_of_save(error) and not tells_of_collective(error)


def is_of_save(error: ClusterError) -> bool:
    """**Pure.** Whether it is a failed save, which every worker learns of by itself."""
    return isinstance(error, PeerError) and error.kind == SaveFailedError.__name__


def find_loss(error: BaseException) -> str:
    """**Pure.** What the error says, if that is no more than that somebody is missing or a save has failed; else empty.

    Who is missing is not known where there was no time left to find out: then it is what a collective has raised.
    """
    if isinstance(error, ClusterError):
        return "" if is_cause(error) else error.message
    return str(error) if is_of_collective(error) else ""
