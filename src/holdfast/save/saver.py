"""The training thread's part of a save: captures the state, has it copied, and confirms. Also measures the steps."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from holdfast.advice.rules import Advisor
from holdfast.errors import HoldfastError, OutOfMemoryError, UsageError
from holdfast.events import Sink, Warned
from holdfast.format.records import ALONE
from holdfast.options import SaveOptions
from holdfast.policies import SaveMoment
from holdfast.save.engine import Engine
from holdfast.save.failures import PendingFailures
from holdfast.save.handle import SaveRequest
from holdfast.save.image import GENTLE, HostBuffer, Readying, Stager, Staging
from holdfast.save.joint.setup import make_writer
from holdfast.save.prepare import count_awaited_bytes, estimate_bytes, measure_bytes
from holdfast.state import CaptureCache, Captured, capture_objects, check_capture
from holdfast.state.registry import list_members
from holdfast.storage import Storage
from holdfast.storage.digesting import find_native

if TYPE_CHECKING:
    from holdfast.save.joint.participant import JointParticipant

_MOST_LOOKS: Final = 8
_LEAST_BYTES: Final = 16 << 20
"""A smaller state has its memory in milliseconds, and needs no thread for that."""


class Saver:
    """Makes saves, one at a time. All of it belongs to the training thread; the engine's threads do the rest.

    Attributes:
        engine: The engine.
        barrier: Holds up the steps of optimizers, or None.
        caller: The thread that is in the call that makes a save, if one is.
        lock: Marks the run as open.
        advisor: Finds what the program may have forgotten.
    """

    def __init__(
        self,
        storage: Storage,
        options: SaveOptions,
        emit: Sink,
        failures: PendingFailures,
        objects: Mapping[str, object],
        take_unread: Callable[[bool], Sequence[str]],
        participant: JointParticipant | None = None,
    ) -> None:
        self._writer, self._recycler = make_writer(storage, options, participant, emit)
        self.lock = self._recycler.lock
        self._worker = ALONE if participant is None else participant.worker
        self._url = storage.url
        self.caller: int | None = None
        self._request: SaveRequest | None = None
        self.engine = Engine(self._writer, self._worker, storage.url, options, failures, emit, self.check_reentry)
        self.barrier = self.engine.barrier
        self._holders: Mapping[str, Sequence[int]] = {} if participant is None else participant.holders
        self._emit = emit
        self._buffer = HostBuffer()
        # The memory of the first save, made ready before it; and how often to look yet whether its size is known.
        self._readying: Readying | None = None
        self._looks_left = _MOST_LOOKS if options.reserve_bytes is None else 0
        self._has_begun = False
        self._ends: list[Callable[[], None]] = []
        self._stager = Stager(self._buffer)
        self._captures = CaptureCache()
        self._objects = objects
        self.advisor = Advisor(objects, take_unread)
        # Now, since saves take no more memory than they say, and may be made when nothing can be imported any more.
        find_native()

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """The cost of the newest committed save: seconds of blocked training, and seconds until it was durable."""
        return self.engine.blocked_seconds, self.engine.durable_seconds

    def prepare(self, size_bytes: int | Literal["auto"] | None) -> None:
        """Allocates memory for a state of that size in the background, unless it is 0, or warns that it cannot.

        Then the first save allocates the memory. The objects need not be ready to be saved yet, such as a lazy module.
        If it is None, the steps of the saved optimizers show when the time for that has come.
        """
        try:
            if size_bytes is None:
                self._follow_steps()
            elif size_bytes == "auto":
                self._begin_readying(estimate_bytes(self._objects), is_estimate=True)
            elif wanted_bytes := operator.index(size_bytes):
                self._begin_readying(wanted_bytes, is_estimate=False)
        except Exception as error:  # noqa: BLE001  It comes out of the objects' own code, and again if a save fails by it.
            reason = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
            self._emit(Warned(text=f"memory could not be allocated in advance: {reason}"))

    def look_ahead(self, objects: Mapping[str, object]) -> None:
        """Called between two steps: makes the memory of the first save ready, once its size is known.

        An optimizer has most of its state from its first step on, so that step is awaited; but not for ever, as a
        frozen parameter never gets any. An estimate that is wrong costs time at the first save, and nothing else.
        """
        if not self._looks_left:
            return
        self._looks_left -= 1
        try:
            if self._looks_left and count_awaited_bytes(objects):
                return
            # Not the captures of the saves: the handler of a signal may save while this looks.
            size_bytes = measure_bytes(check_capture(objects, CaptureCache(), self._worker, self._holders))
            self._looks_left = 0
            if size_bytes >= _LEAST_BYTES:
                self._begin_readying(size_bytes, is_estimate=True, rest_share=GENTLE)
        except HoldfastError:
            pass  # It comes again if a save fails by it, which then says so.

    def _follow_steps(self) -> None:
        """Looks ahead before each step of a saved optimizer: the program may make no call before it saves."""
        me = weakref.ref(self)

        def look(_: object) -> None:
            saver = me()
            if saver is not None and saver._looks_left:
                with suppress(Exception):  # It comes again if a save fails by it.
                    saver.look_ahead(saver._objects)

        for _, obj, adapter in list_members(self._objects):
            if (end := adapter.before_step(obj, look, is_own=True)) is not None:
                self._ends.append(end)

    def _begin_readying(self, size_bytes: int, *, is_estimate: bool, rest_share: float = 0.0) -> None:
        self._readying = readying = Readying(self._buffer, rest_share)
        # A save that begins in between, in the handler of a signal, ends that, or is seen here.
        if not self._has_begun:
            if is_estimate:
                self._buffer.reserve(size_bytes)
            else:
                self._buffer.take(size_bytes)
            readying.begin()

    def note_call(self) -> None:
        """Called when the program calls the manager: then training changes nothing."""
        if self.barrier is not None:
            self.barrier.note_call()

    def check_reentry(self) -> None:
        """Raises `UsageError` if this thread is in the call that makes a save, as a signal handler may be.

        A save that was neither confirmed nor dropped, because a second exception cut that off, is dropped here.
        """
        if self.caller == threading.get_ident():
            # Two saves would share one memory, a restore would change what is being captured, a wait would hold up what
            # it waits for, and a manager that is closed does not hold up the step for a copy.
            raise UsageError(
                f"a save into {self._url} has just begun, and this call was made from inside it",
                hint="In a signal handler, only set a flag, and do the rest after the step.",
            )
        if threading.get_ident() in self.engine.serving:
            raise UsageError(
                f"an event sink called the manager of {self._url}, whose save waits for the sink",
                hint="In a sink, only record the event; do the rest in the training thread.",
            )
        if self._request is not None:
            self._request.drop_if_left()

    def capture(self, objects: Mapping[str, object]) -> Captured:
        """Captures the state of the live objects, without the arrays' values; see `capture_objects`."""
        barrier = self.barrier
        hold = None if barrier is None or barrier.gives_up else barrier.try_hold
        return capture_objects(objects, self._captures, hold, self._worker, self._writer.compares, self._holders)

    def check_capture(self, objects: Mapping[str, object]) -> None:
        """Raises `UnsupportedValueError` unless the state of the live objects can be captured; changes nothing."""
        check_capture(objects, self._captures, self._worker, self._holders)

    def save(self, request: SaveRequest, captured: Captured) -> None:
        """**Blocks** while the state is copied, except for overlapped copies. The previous save must have ended.

        If it raises (the copy's error, or Ctrl-C), it may not have confirmed yet: then the request is to be dropped.
        """
        self._request = request
        for text in self.advisor.find_at_save(request.step):
            self.engine.emit_soon(Warned(text=text, by_each=True))
        self._has_begun, self._looks_left = True, 0
        if self._readying is not None and not self._readying.has_ended:
            self._readying.end()
        staging: Staging | None = None
        try:
            # Laid out here, where the streams of a device and the device in use are those of training.
            request.staging = staging = self._stager.stage(captured, request.step)
            request.copied = staging.snapshot.copied
        except OutOfMemoryError as error:
            request.staging = error
        self.engine.submit(request)
        request.copied.copy_ended.wait(threading.TIMEOUT_MAX)
        if request.copied.error is not None:
            raise request.copied.error
        request.confirm()
        if staging is not None and not captured.held:
            # All is copied. Memory that is held JAX gives to no other array, so that a step which donates its arguments
            # would have to take new memory.
            staging.forget()

    def start_from(self, step: int) -> None:
        """Counts training time from now on, because earlier training cannot be lost (after a restore, for example)."""
        self.engine.protected_since_at = time.monotonic()
        self.advisor.enter(step)

    def begin_generation(self) -> None:
        """Makes the next save open a generation of its own, because the live objects now have another state."""
        self._writer.leave_generation()

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Ends all threads, and frees buffer and disk; no save is in progress."""
        while self._ends:
            self._ends.pop()()
        if self._readying is not None:
            self._readying.end()
            self._readying.join(timeout_seconds)
        self.engine.close(timeout_seconds)
        try:
            self._recycler.close()
        except HoldfastError as error:
            self._emit(Warned(text=f"a recycled file that was kept for the next save is still on the disk: {error}"))
        self._stager.forget()
        self._buffer.release()

    def abandon(self) -> None:
        """Skips what would be done at the end."""
        self._recycler.abandon()


_WEIGHT: Final = 0.1
"""The weight of a new measurement against all before: recent steps predict the next better than old ones."""

_STALLS: Final = 5
"""How many saves predict the cost of the next: one slow save among them changes little."""


class StepTimer:
    """Measures steps and the time since the last save. Not thread-safe: it belongs to the training thread."""

    def __init__(self) -> None:
        self._first_step = 0
        self._saved_step: int | None = None
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step: int | None = None
        self._step_seconds: float | None = None
        self._stalls_seconds: tuple[float, ...] = ()
        self._usual_stall_seconds: float | None = None

    def begin(self, step: int) -> None:
        """Called when training begins, or begins again, at a step that need not be saved."""
        self._first_step = step
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._seen_step = None

    def note_begun_save(self, step: int) -> None:
        """Called when a save of this step has begun; the time that it blocked training does not count as a step's."""
        self._saved_step = step
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step = step

    def moment(self, step: int, blocked_seconds: float | None, durable_seconds: float | None) -> SaveMoment:
        """Returns the facts for a policy after a step; the costs are those of the newest durable save, if any."""
        now = time.monotonic()
        if self._seen_step is not None and step > self._seen_step:
            measured = (now - self._seen_at) / (step - self._seen_step)
            known = self._step_seconds
            self._step_seconds = measured if known is None else known + _WEIGHT * (measured - known)
        self._seen_step, self._seen_at = step, now
        return SaveMoment(
            step=step,
            last_saved_step=self._saved_step,
            first_step=self._first_step,
            seconds_since_last_save=now - self._saved_at,
            step_seconds=self._step_seconds,
            save_blocked_seconds=self._note_stall(blocked_seconds),
            save_durable_seconds=durable_seconds,
        )

    def _note_stall(self, newest_seconds: float | None) -> float | None:
        """Adds the cost of the newest save, if it is new, and returns the usual one."""
        known = self._stalls_seconds
        # The same save is reported after every step until the next one is durable.
        if newest_seconds is not None and (not known or newest_seconds != known[-1]):
            # The first one stays at its place, so that it is known from the others.
            self._stalls_seconds = (*known[:1], *known[1:][1 - _STALLS :], newest_seconds)
            self._usual_stall_seconds = usual_stall_seconds(self._stalls_seconds)
        return self._usual_stall_seconds


def usual_stall_seconds(stalls_seconds: Sequence[float]) -> float:
    """**Pure.** Returns how long a save usually blocks training: the median of the last few (the lower one).

    The first save touches fresh memory, which no later one does, and counts only until two others are known: one is not
    enough, because that may be the slow one.
    """
    later = stalls_seconds[1:]
    counted = sorted(later[-_STALLS:] if len(later) > 1 else stalls_seconds)
    return counted[(len(counted) - 1) // 2]
