"""`Asked`: what people ask of a running job through the run's storage: to save, to stop, how it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.catalog import StoredRun, is_own
from holdfast.catalog.openers import identify
from holdfast.catalog.requests import Reply, RequestBox, RunRequest
from holdfast.errors import HoldfastError
from holdfast.format.records import Worker
from holdfast.preemption.sources.protocol import Demand, Notice, PolledSource
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import say
from holdfast.save.handle import SaveHandle
from holdfast.supervise.board import PHASES

if TYPE_CHECKING:
    from holdfast.save.lineage import Lineage

_LOCAL_SECONDS: Final = (0.25, 0.05)
_REMOTE_SECONDS: Final = (5.0, 1.0)
"""How often to look, at rest and while something is asked: in a bucket each look is a request that costs."""

_KEPT_SECONDS: Final = 60.0
"""The process that has asked takes the reply within this time, or is gone."""

_WORDS: Final = {"save": "asked to save now", "stop": "asked to save and stop"}


class Condition(msgspec.Struct, frozen=True):
    """The condition of a loop, as its guard knows it.

    Attributes:
        step: How many steps are complete.
        passed_at: The time at which they were, by the monotonic clock; None before the first.
        step_seconds: How long the longest of the last steps took; None before the first.
        state: What the training thread does.
        pending: The notices that are still to be handled.
    """

    step: int
    passed_at: float | None
    step_seconds: float | None
    state: str
    pending: Collection[Notice]


class _Heard(msgspec.Struct):
    """A request that was heard.

    Attributes:
        notice: The notice that it has become.
        step: How many steps were complete then.
        saved: The save that was made for it, once that is begun.
    """

    notice: Notice
    step: int
    saved: SaveHandle | None = None


class Asked(PolledSource):
    """Gives a notice for each request to the job of a run, and replies when it is carried out.

    A request that was there before this source first looked was meant for an earlier start, and is declined. It is
    owned by the thread that calls `look`; the others call `note_leaving` and `close`.
    """

    name = "ask"

    def __init__(self, lineage: Lineage, worker: Worker, find_condition: Callable[[], Condition]) -> None:
        """Stores its arguments; `find_condition` is called in the source's thread."""
        self._box, self._lineage, self._worker = RequestBox(lineage.storage), lineage, worker
        self._find_condition = find_condition
        self._has_looked = False
        self._tasks: dict[str, _Heard] = {}
        # When each request was replied to; and those that are another job's.
        self._replied: dict[str, float] = {}
        self._foreign: set[str] = set()

    @property
    def interval_seconds(self) -> float | None:
        """How long to wait between two looks."""
        seconds = _REMOTE_SECONDS if self._lineage.storage.location is None else _LOCAL_SECONDS
        return seconds[bool(self._tasks)]

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Returns the notices of new requests, and replies to older ones; ignores errors of the storage."""
        notices: list[Notice] = []
        try:
            there = self._box.list()
            # The older ones first: what is returned here is not received yet.
            for name, task in list(self._tasks.items()):
                self._follow(name, task)
            known = {*self._tasks, *self._replied, *self._foreign}
            notices += filter(None, map(self._hear, sorted(there.keys() - known)))
            self._has_looked = True
            now = time.monotonic()
            for name, at in list(self._replied.items()):
                if name not in there or now - at > _KEPT_SECONDS:
                    self._box.remove(name)
                    del self._replied[name]
        except HoldfastError:
            pass  # A save says what is wrong with the storage. Who has asked waits for a reply, and not for ever.
        return notices

    def note_leaving(self) -> None:
        """**Blocks.** Replies that the job has saved, and leaves."""
        for name in list(self._tasks):
            self._end(name, "done")

    def close(self) -> None:
        """**Blocks** for a moment. Replies to what is left, as the run ends."""
        for name, task in list(self._tasks.items()):
            newest = self._find_committed()
            is_done = newest is not None and newest >= max(task.step, self._find_step())
            problem = "" if is_done else "the run has ended, and its last step is not saved"
            try:
                self._end(name, "done" if is_done else "failed", problem)
            except HoldfastError:
                return  # The storage is gone.

    def _hear(self, name: str) -> Notice | None:
        """Replies that a request was heard, and returns what it asks for, if that is not done at once."""
        request = self._box.read(name)
        if request is None:
            if not self._has_looked:
                self._replied[name] = time.monotonic()  # What is left of one that was withdrawn.
            return None
        if problem := self._find_objection(request):
            self._end(name, "declined", problem)
        elif not self._is_meant(request):
            self._foreign.add(name)
        elif request.command == "status":
            self._end(name, "done")
        else:
            self._box.reply(name, "heard", self._describe("heard"))
            if self._box.read(name) is None:  # It was withdrawn before that reply could be seen.
                self._replied[name] = time.monotonic()
                return None
            text = f"{request.asked_by} {_WORDS[request.command]}"
            if request.command == "stop":
                say(f"holdfast: {text}: finishing this step, then saving and exiting.")
            demand = Demand.LEAVE if request.command == "stop" else Demand.SAVE
            notice = Notice(source=self.name, text=text, demand=demand, by_hand=True)
            self._tasks[name] = _Heard(notice, self._find_step())
            return notice
        return None

    def _find_objection(self, request: RunRequest) -> str:
        seen = self._lineage.origin.seen_generation
        if request.generation < seen:
            return f"it was meant for generation {request.generation}, and this job began after generation {seen}"
        if not self._has_looked and request.command != "status":
            return "it was asked before this start of the run, which does not act on it"
        return ""

    def _is_meant(self, request: RunRequest) -> bool:
        """Returns True if the request names a generation of this job, or the one before it has opened its own."""
        if request.generation == self._lineage.origin.seen_generation:
            return True
        opening = StoredRun(self._box.storage).try_opening(request.generation)
        return opening is not None and is_own(opening)

    def _follow(self, name: str, task: _Heard) -> None:
        """Replies once the save that was asked for is committed, or has failed."""
        if task.saved is None:
            if task.notice in self._find_condition().pending or task.notice.demand is not Demand.SAVE:
                return  # Of one that stops, `note_leaving` tells.
            task.saved = self._lineage.in_flight
        saved, newest = task.saved, self._find_committed()
        if saved is not None and not (saved.ended or saved.committed):
            return
        if (saved is None or saved.committed) and newest is not None and newest >= task.step:
            self._end(name, "done")
        elif not self._find_step():
            self._end(name, "failed", "no step is complete yet, so there is nothing to save")
        else:
            self._end(name, "failed", "the save failed; the job's log has the reason")

    def _find_step(self) -> int:
        find_steps = self._lineage.find_steps
        return self._find_condition().step if find_steps is None else find_steps()[1]

    def _find_committed(self) -> int | None:
        saved, newest = self._lineage.in_flight, self._lineage.newest
        if saved is not None and saved.committed:
            newest = max(newest, saved.step)
        return None if newest < 0 else newest

    def _end(self, name: str, outcome: Literal["done", "failed", "declined"], problem: str = "") -> None:
        self._box.reply(name, "reply", self._describe(outcome, problem))
        self._tasks.pop(name, None)
        self._replied[name] = time.monotonic()

    def _describe(self, outcome: Literal["heard", "done", "failed", "declined"], problem: str = "") -> Reply:
        condition, now = self._find_condition(), time.monotonic()
        doing, since = condition.state, condition.passed_at
        if (board := PULSE.board) is not None and (reading := board.read()).phase:
            doing, since = PHASES[reading.phase], reading.since
        return Reply(
            outcome=outcome,
            step=self._find_step(),
            committed_step=self._find_committed(),
            doing=doing,
            since_seconds=None if since is None else now - since,
            step_seconds=condition.step_seconds,
            workers=self._worker.world_size,
            problem=problem,
            **identify(os.getpid()),
        )
