"""Copies the steps of a run into one farther tier, in a thread of its own.

It remembers nothing on the disk: what is committed in which tier says what is left to copy. A crash at any point leaves
whole steps, and at most one without a manifest, which the next copy completes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from holdfast.catalog import StoredRun
from holdfast.errors import (
    DamageError,
    DeadlineError,
    FencedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from holdfast.events import Copied, Failed, Sink
from holdfast.format.names import StepName
from holdfast.policies import KeptCandidate, RetentionPolicy, plan_retention
from holdfast.restore.copying import RunCopier
from holdfast.storage.tiers import Tier, Tiers
from holdfast.tiering.cleaner import TierCleaner
from holdfast.tiering.workers import Nearby

_LOOK_SECONDS: Final = 0.2
"""How often to look whether other workers have added their parts of a step."""

_REST_SECONDS: Final = 1.0
"""How often to look whether a tier may be asked again that could not be reached."""

Candidate = KeptCandidate[StepName]


class _StoppedError(Exception):
    """The copy ends here; the next one goes on with what is there."""


class Progress:
    """**Thread-safe.** The steps that have come to a tier, or are to come.

    Attributes:
        changed: Guards the others, and is notified of each change.
        is_awake: True if there may be something to copy.
        is_stopped: True once nothing more is to be copied.
        is_behind: True as long as the newest step is not there.
        there: The steps that are there, as a policy sees them.
        given_up: Those that will never be there, each with the reason.
        again: Those that have got metrics since they came there.
        asked: Those that are waited for. They are copied even if the policy would not keep them.
        copying: The step that was begun last, until it is there.
        last_try_at: When the last try begins of a copy that has failed, as the training is over; None before that.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_awake = self.is_stopped = self.is_behind = False
        self.there: dict[StepName, Candidate | None] = {}
        self.given_up: dict[StepName, str] = {}
        self.asked: set[StepName] = set()
        self.copying: StepName | None = None
        self.last_try_at: float | None = None
        self.again: set[StepName] = set()

    def choose(self, candidates: Sequence[Candidate], tier: Tier, policy: RetentionPolicy) -> list[StepName]:
        """Returns which of some steps are to be copied, in order of step: those that would be kept there."""
        with self.changed:
            mine = [one for one in candidates if one.key not in self.there and one.key not in self.given_up]
            if (every := tier.every) is not None:
                taken = {name.step // every for name in self.there}
                firsts = {one.step // every: one.key for one in sorted(mine, key=lambda one: one.key, reverse=True)}
                wanted = {key for part, key in firsts.items() if part not in taken} | self.asked
                mine = [one for one in mine if one.key in wanted]
            there = [one for one in self.there.values() if one is not None]
            protected = {one.key: "waited for" for one in mine if one.key in self.asked}
        steps = sorted([*there, *mine], key=lambda one: one.key)
        kept = plan_retention(policy, steps, protected, time.time()).keep
        return [one.key for one in mine if one.key in kept]

    def note(self, name: StepName, candidate: Candidate | None = None, *, problem: str = "") -> None:
        """Called when a step is there, or will not be."""
        with self.changed:
            if problem:
                self.there.pop(name, None)
                self.given_up[name] = problem
            else:
                self.there[name] = candidate
            if self.copying == name:
                self.copying = None
            self.changed.notify_all()

    def note_more(self) -> None:
        """Called when there may be something to copy."""
        with self.changed:
            self.is_awake = self.is_behind = True
            self.last_try_at = None
            self.changed.notify_all()

    def check_going(self) -> None:
        """Ends a copy that is to stop."""
        if self.is_stopped:
            raise _StoppedError


class Hop:
    """**Thread-safe.** The copies into one farther tier of a run.

    Attributes:
        url: The URL of the tier.
        progress: The steps that have come there, or are to come.
        seconds: How long the newest copy took; None before one.
        fenced: The error if another job was found to have gone on in this tier.
        owner: The newest generation that this job has opened, or the leader of it, and its token; None before that.
        cleaner: What removes there what is not kept.
    """

    def __init__(self, tiers: Tiers, number: int, keep: RetentionPolicy, nearby: Nearby, emit: Sink) -> None:
        """Starts nothing yet. `number` is that of the tier; `keep` is for one without a policy of its own.

        Of several workers, each copies the files of a step that `nearby` says, and the leader removes what is not kept.
        """
        self._tiers, self._number, self._nearby, self._emit = tiers, number, nearby, emit
        self._policy, self.url = tiers.tiers[number].policy or keep, tiers.tiers[number].url
        self._source = StoredRun(tiers.nearest if number == 1 else Tiers(*tiers.tiers[:number]))
        self._goal = StoredRun(tiers.tiers[number].storage)
        self.progress = Progress()
        self.seconds: float | None = None
        self.fenced: FencedError | None = None
        self.owner: tuple[int, str] | None = None
        self._thread: threading.Thread | None = None
        # Steps of which this worker has copied its part, or does so.
        self._begun: dict[StepName, _Pace] = {}
        has_peers = not nearby.is_common or len(nearby.group) > 1
        self.cleaner = TierCleaner(
            self._source, self._goal, self._policy, self._list_pending, emit, has_peers=has_peers
        )

    def wake(self) -> None:
        """Called when there may be something to copy; the first call starts the thread."""
        progress = self.progress
        with progress.changed:
            progress.note_more()
            if self._thread is None and not progress.is_stopped:
                self._thread = threading.Thread(target=self._serve, name=f"holdfast-tier-{self._number}", daemon=True)
                self._thread.start()

    def begin(self) -> None:
        """Like `wake`, if that was never called."""
        if self._thread is None:
            self.wake()

    def choose(self, candidates: Sequence[Candidate]) -> list[StepName]:
        """Returns which of the nearer tier's steps are still to be copied from there."""
        return self.progress.choose(candidates, self._tiers.tiers[self._number], self._policy)

    def find_needed(self, candidates: Sequence[Candidate]) -> dict[StepName, str]:
        """Returns the steps that the nearer tier must keep for this one, each with the reason."""
        needed = dict.fromkeys(self.choose(candidates), f"not in {self.url} yet")
        if (copying := self.progress.copying) is not None:
            # Even if its policy prefers a newer one by now: where saves are quicker than copies, none would ever end.
            needed |= {copying: f"being copied to {self.url}"}
        return needed

    def wait(self, name: StepName, timeout_seconds: float) -> None:
        """**Blocks.** Waits until a step is committed in this tier.

        Raises:
            DeadlineError: If it takes longer; the copy continues.
            StorageError: If it will not be copied.
        """
        progress = self.progress
        with progress.changed:
            progress.asked.add(name)
        self.wake()
        with progress.changed:
            done = progress.changed.wait_for(
                lambda: name in progress.there or name in progress.given_up or progress.is_stopped,
                min(timeout_seconds, threading.TIMEOUT_MAX),
            )
            if name in progress.there:
                return
            reason = progress.given_up.get(name, "the manager was closed")
        if done:
            raise StorageError(f"step {name.step} was not copied into {self.url}: {reason}", path=name.directory)
        raise DeadlineError(
            f"step {name.step} did not come to {self.url} in time; it is committed in {self._tiers.url}",
            hint="The copy continues. Wait again, or find out why the storage is slow.",
        )

    def wait_idle(self, timeout_seconds: float) -> bool:
        """**Blocks.** Waits until the newest step is there, or did not come there in one more try; False if that takes
        longer."""
        with self.progress.changed:
            return self.progress.changed.wait_for(self._is_idle, min(timeout_seconds, threading.TIMEOUT_MAX))

    def _is_idle(self) -> bool:
        progress, tiers = self.progress, self._tiers
        if not progress.is_behind or progress.is_stopped:
            return True
        if tiers.takes(self._number):
            return False
        if progress.last_try_at is None:
            progress.last_try_at = tiers.hasten(self._number)
        return tiers.rests_until(self._number) != progress.last_try_at

    def stop(self) -> None:
        """Ends the thread as soon as a piece is done."""
        with self.progress.changed:
            self.progress.is_stopped = True
            self.progress.changed.notify_all()

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the thread to end, after `stop`."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        progress, rest_seconds = self.progress, 0.0
        while True:
            with progress.changed:
                if not progress.is_awake:
                    progress.changed.notify_all()
                    progress.changed.wait_for(lambda: progress.is_awake or progress.is_stopped, rest_seconds or None)
                if progress.is_stopped:
                    return
                progress.is_awake = False
            rest_seconds = self.serve_once()

    def serve_once(self) -> float:
        """**Blocks.** Copies what is to be copied; returns in how many seconds to look again, 0 for when this wakes."""
        try:
            return _LOOK_SECONDS if self._copy_where_room() else 0.0
        except _StoppedError:
            return 0.0
        except FencedError as error:
            self.fenced = error  # The next save raises it.
            self.stop()
            return 0.0
        except NotFoundError:
            return _LOOK_SECONDS  # It was removed meanwhile.
        except HoldfastError as error:
            if isinstance(error.__cause__, FencedError):
                # A generation was opened during the copy, by this job perhaps, in a rollback: the tier is there.
                return _LOOK_SECONDS
            rest_seconds = _LOOK_SECONDS if self._tiers.takes(self._number) else _REST_SECONDS
            self._tiers.note_down(self._number, error)
            return rest_seconds

    def _copy_where_room(self) -> bool:
        """**Blocks.** Copies as `_copy_all` does; if the tier is full, its retention is applied, and it goes on."""
        while True:
            try:
                return self._copy_all()
            except StorageFullError:
                if not self._make_room():
                    raise
                self._tiers.note_up(self._number)

    def _copy_all(self) -> bool:
        """**Blocks.** Copies what is to be copied; returns True if other workers have to add to it."""
        progress = self.progress
        if not self._tiers.align(begins=not self.cleaner.generation):
            progress.is_behind = False  # There is nothing to copy from; the next save says so.
            return False
        if not self._tiers.takes(self._number):
            if self._tiers.is_full(self._number):
                raise StorageFullError(f"{self.url} is full")
            raise StorageError(f"{self.url} cannot be reached")
        if self.owner is not None:
            # A job that was passed would write what the newer one removes there.
            self._goal.check_unpassed(*self.owner)
        self._look_once()
        while progress.again:
            if (name := progress.again.pop()) in progress.there:
                self._open_copier(name).copy(name)
        while True:
            progress.check_going()
            pending = self._list_pending()
            if left := [name for name in pending if name not in self._begun]:
                self._copy(left[0])
                continue
            if not any(self._try_complete(name) for name in pending):
                newest = self._source.look().newest
                with progress.changed:
                    progress.is_behind = progress.is_awake or pending[:1] == [newest]
                return bool(pending)

    def _look_once(self) -> None:
        """**Blocks.** Looks what is there. Later this knows what comes: nothing that it has not taken part in."""
        if not self.progress.there:
            catalog = self._goal.look(closely=True)
            known = {one.key: one for one in self._goal.history.candidates(catalog.living)}
            self.progress.there = {name: known.get(name) for name in catalog.committed}

    def _list_pending(self) -> list[StepName]:
        """Returns what is to be copied: the newest step, after those that it refers to, then the others, in order."""
        run = self._source
        chosen = self.choose(run.history.candidates(run.look().living))
        pending: dict[StepName, None] = {}
        for name in (*chosen[-1:], *chosen[:-1]):
            needed = sorted(one for one in run.history.kept_with(name) if one not in self.progress.there)
            pending |= dict.fromkeys([*needed, name])
        return [*pending]

    def _try_complete(self, name: StepName) -> bool:
        """**Blocks.** Looks whether other workers have added their parts of a step."""
        with self._noting_removal(name):
            if not self._open_copier(name).try_commit(name):
                return False
            self._note_copied(name)
        return True

    @contextmanager
    def _noting_removal(self, name: StepName) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            if self._source.step(name).is_committed():
                raise
            self.progress.note(name, problem="it was removed before it could be copied")

    def _open_copier(self, name: StepName) -> RunCopier:
        copier = RunCopier(self._source, self._goal.storage, self._nearby.takes, self.owner)
        copier.open([name.generation])
        return copier

    def _copy(self, name: StepName) -> None:
        """**Blocks.** Copies what this worker has of a step."""
        pace = _Pace(self._tiers.tiers[self._number].most_bytes_per_second, self.progress.check_going)
        self.progress.copying = name
        try:
            with self._noting_removal(name):
                size_bytes = self._open_copier(name).copy(name, progress=pace.advance)
                self._tiers.note_up(self._number)
                self._begun[name] = pace
                if size_bytes != 0:
                    self._note_copied(name)
        except DamageError as error:
            self.progress.note(name, problem=error.message)
            text = f"it is not copied into {self.url}: {error.message}"
            self._emit(Failed(stage="copy", error=text, step=name.step, generation=name.generation))

    def _note_copied(self, name: StepName) -> None:
        """**Blocks.** Called when a step is committed in the tier."""
        pace = self._begun.pop(name)
        self.seconds = time.monotonic() - pace.begun_at
        self.progress.note(name, next(iter(self._source.history.candidates([name])), None))
        self._emit(
            Copied(
                step=name.step,
                generation=name.generation,
                tier=self.url,
                background_seconds=self.seconds,
                size_bytes=pace.passed_bytes,
            )
        )
        if self._nearby.rank == 0:
            self._give_up(self.cleaner.clean())

    def _make_room(self) -> bool:
        """**Blocks.** Called if the tier is full: True if its policy gives up something there for what is to come."""
        self._look_once()
        coming = self._source.history.candidates(self._list_pending())
        return self._give_up(self.cleaner.make_room(coming))

    def _give_up(self, names: Collection[StepName]) -> bool:
        for name in names:
            self.progress.note(name, problem="its policy has given it up")
        return bool(names)


class _Pace:
    """**Thread-safe.** Counts bytes that were copied, and holds up those that come too fast.

    Attributes:
        passed_bytes: How many there were.
        begun_at: When this was made, by the monotonic clock.
    """

    def __init__(self, most_bytes_per_second: int | None, check_going: Callable[[], None]) -> None:
        self._limit, self._check_going = most_bytes_per_second, check_going
        self.passed_bytes = 0
        # Guards the two: when the next piece may come.
        self._lock = threading.Lock()
        self.begun_at = self._free_at = time.monotonic()

    def advance(self, size_bytes: int) -> None:
        """**Blocks** as long as the limit demands; raises if the copy is to end."""
        with self._lock:
            self.passed_bytes += size_bytes
            if self._limit:
                self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self._limit
            free_at = self._free_at
        self._check_going()
        while self._limit and (left_seconds := free_at - time.monotonic()) > 0:
            time.sleep(min(left_seconds, _LOOK_SECONDS))
            self._check_going()
