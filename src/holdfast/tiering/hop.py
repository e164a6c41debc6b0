"""Copies the steps of a run into one farther tier, in a thread of its own.

It remembers nothing on the disk: what is committed in which tier says what is left to copy. A crash at any point leaves
whole steps, and at most one without a manifest, which the next copy completes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError, DeadlineError, FencedError, HoldfastError, NotFoundError, StorageError
from holdfast.events import Copied, Failed, Sink
from holdfast.format.names import StepName
from holdfast.policies import KeptCandidate, RetentionPolicy, plan_retention
from holdfast.restore.copying import RunCopier
from holdfast.save.retention import Retention
from holdfast.storage import Storage
from holdfast.storage.tiers import Tiers

_LOOK_SECONDS: Final = 0.2
"""How often to look whether other workers have added their parts of a step."""

_REST_SECONDS: Final = 1.0
"""How often to look whether a tier may be asked again that could not be reached."""

Candidate = KeptCandidate[StepName]


class _StoppedError(Exception):
    """The copy ends here; the next one goes on with what is there."""


class Hop:
    """**Thread-safe.** What is copied into one farther tier of a run.

    Attributes:
        url: The URL of the tier.
        seconds: How long the newest copy took; None before one.
        fenced: The error if another job was found to have gone on in this tier.
    """

    def __init__(
        self,
        tiers: Tiers,
        number: int,
        policy: RetentionPolicy,
        takes: Callable[[int], bool],
        emit: Sink,
        *,
        cleans: bool,
    ) -> None:
        """Starts nothing yet.

        Args:
            tiers: The tiers of the run.
            number: That of this one.
            policy: What is kept there.
            takes: Which files of a step this worker copies, by the ranks that have written them.
            emit: Gets the events.
            cleans: True on the worker that removes what is not kept there.
        """
        self._tiers, self._number, self._tier = tiers, number, tiers.tiers[number]
        self._policy, self._takes, self._emit, self._cleans = policy, takes, emit, cleans
        self.url = self._tier.url
        self.seconds: float | None = None
        self.fenced: FencedError | None = None
        source: Storage = tiers.nearest if number == 1 else Tiers(*tiers.tiers[:number])
        self._source = StoredRun(source)
        # Of the tier as one that is written to; and what cleans up there, with the generation that it does so for.
        self._goal = StoredRun(self._tier.storage)
        self._retention: tuple[int, Retention] | None = None
        # Guards what follows; it is notified of each change.
        self._changed = threading.Condition()
        self._is_awake = self._is_stopped = self._is_behind = False
        # The steps there, as a policy sees them; those that will never be, and those that are waited for.
        self._there: dict[StepName, Candidate | None] = {}
        self._given_up: dict[StepName, str] = {}
        self._asked: set[StepName] = set()
        self._thread: threading.Thread | None = None
        # Steps of which this worker has copied its part, or does so; of the thread alone.
        self._begun: dict[StepName, _Pace] = {}

    def wake(self) -> None:
        """Called when there may be something to copy; the first call starts the thread."""
        with self._changed:
            self._is_awake = self._is_behind = True
            self._changed.notify_all()
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(target=self._serve, name=f"holdfast-tier-{self._number}", daemon=True)
                self._thread.start()

    def find_needed(self, candidates: Sequence[Candidate]) -> set[StepName]:
        """Returns those of the nearest tier's steps that are still to be copied from there."""
        with self._changed:
            return set(self._choose(candidates))

    def give_up(self, name: StepName, reason: str) -> None:
        """Copies a step no more; who waits for it gets the reason."""
        with self._changed:
            self._given_up[name] = reason
            self._changed.notify_all()

    def wait(self, name: StepName, timeout_seconds: float) -> None:
        """**Blocks.** Waits until a step is committed in this tier. It is copied even if its policy would not keep it.

        Raises:
            DeadlineError: If it takes longer; the copy continues.
            StorageError: If it will not be copied.
        """
        with self._changed:
            self._asked.add(name)
        self.wake()
        with self._changed:
            done = self._changed.wait_for(
                lambda: name in self._there or name in self._given_up or self._is_stopped,
                min(timeout_seconds, threading.TIMEOUT_MAX),
            )
            if name in self._there:
                return
            if done:
                reason = self._given_up.get(name, "the manager was closed")
                raise StorageError(f"step {name.step} was not copied into {self.url}: {reason}", path=name.directory)
        raise DeadlineError(
            f"step {name.step} did not come to {self.url} in time; it is committed in {self._tiers.url}",
            hint="The copy continues. Wait again, or find out why the storage is slow.",
        )

    def wait_idle(self, timeout_seconds: float) -> bool:
        """**Blocks.** Waits until nothing is left to copy; False if that takes longer, or cannot be done now."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._thread is None or not (self._is_behind and self._tiers.is_up(self._number)),
                timeout_seconds,
            )
            return self._thread is None or not self._is_behind

    def stop(self) -> None:
        """Ends the thread as soon as a piece is done."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the thread to end, after `stop`."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        rest_seconds = 0.0
        while True:
            with self._changed:
                if not self._is_awake:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_awake or self._is_stopped, rest_seconds or None)
                if self._is_stopped:
                    return
                self._is_awake = False
            try:
                rest_seconds = _LOOK_SECONDS if self._copy_next() else 0.0
            except _StoppedError:
                return
            except FencedError as error:
                self.fenced = error  # The next save raises it.
                self.stop()
                return
            except HoldfastError as error:
                if self._tiers.is_up(self._number):
                    self._tiers.note_down(self._number, error)
                rest_seconds = _LOOK_SECONDS if self._tiers.is_up(self._number) else _REST_SECONDS

    def _copy_next(self) -> bool:
        """**Blocks.** Copies what is to be copied; returns True if other workers have to add to it."""
        self._tiers.align()
        if not self._tiers.is_up(self._number):
            raise StorageError(f"{self.url} cannot be reached")
        if not self._there:
            # Later this knows what comes: nothing that it has not taken part in.
            catalog = self._goal.look(closely=True)
            known = {one.key: one for one in self._goal.history.candidates(catalog.living)}
            with self._changed:
                self._there = {name: known.get(name) for name in catalog.committed}
        while True:
            self._check_going()
            pending = self._list_pending()
            left = [name for name in pending if name not in self._begun]
            if left:
                self._copy(left[0])
                continue
            done = [name for name in pending if self._make_copier([name]).try_commit(name)]
            for name in done:
                self._note_copied(name)
            if not done:
                newest = self._source.look().newest
                with self._changed:
                    self._is_behind = self._is_awake or pending[:1] == [newest]
                return bool(pending)

    def _list_pending(self) -> list[StepName]:
        """Returns what is to be copied: the newest step, after those that it refers to, then the others, oldest first.

        One that was given up is not referred to in vain: it is copied if it is there.
        """
        run = self._source
        candidates = run.history.candidates(run.look().living)
        with self._changed:
            chosen = self._choose(candidates)
        pending: dict[StepName, None] = {}
        for name in (*chosen[-1:], *chosen[:-1]):
            needed = sorted(one for one in run.history.kept_with(name) if one not in self._there)
            pending |= dict.fromkeys([*needed, name])
        return [*pending]

    def _choose(self, candidates: Sequence[Candidate]) -> list[StepName]:
        """Returns which of some steps are to be copied, in order of step."""
        mine = [one for one in candidates if one.key not in self._there and one.key not in self._given_up]
        every = self._tier.every
        if every is not None:
            taken = {name.step // every for name in self._there}
            firsts: list[Candidate] = []
            for one in sorted(mine, key=lambda one: one.step):
                if one.key in self._asked or one.step // every not in taken:
                    taken.add(one.step // every)
                    firsts.append(one)
            mine = firsts
        there = [one for one in self._there.values() if one is not None]
        steps = sorted([*there, *mine], key=lambda one: one.key)
        protected = {one.key: "waited for" for one in mine if one.key in self._asked}
        kept = plan_retention(self._policy, steps, protected, time.time()).keep
        return [one.key for one in mine if one.key in kept]

    def _copy(self, name: StepName) -> None:
        """**Blocks.** Copies what this worker has of a step."""
        self._begun[name] = _Pace(self._tier.most_bytes_per_second, self._check_going)
        try:
            size_bytes = self._make_copier([name]).copy(name, progress=self._begun[name].advance)
        except NotFoundError:
            if self._source.step(name).is_committed():
                self._begun.pop(name)
                raise
            self.give_up(name, "it was removed before it could be copied")
        except DamageError as error:
            self.give_up(name, error.message)
            text = f"it is not copied into {self.url}: {error.message}"
            self._emit(Failed(stage="copy", error=text, step=name.step, generation=name.generation))
        except BaseException:
            self._begun.pop(name)
            raise
        else:
            self._tiers.note_up(self._number)
            if size_bytes != 0:
                self._note_copied(name)

    def _make_copier(self, names: Sequence[StepName]) -> RunCopier:
        copier = RunCopier(self._source, self._goal.storage, self._takes)
        copier.open([name.generation for name in names])
        return copier

    def _note_copied(self, name: StepName) -> None:
        """**Blocks.** Called when a step is committed in the tier."""
        pace = self._begun.pop(name)
        self.seconds = time.monotonic() - pace.begun_at
        facts = self._source.history.candidates([name])
        with self._changed:
            self._there[name] = facts[0] if facts else None
            self._changed.notify_all()
        self._emit(
            Copied(
                step=name.step,
                generation=name.generation,
                tier=self.url,
                background_seconds=self.seconds,
                size_bytes=pace.passed_bytes,
            )
        )
        if self._cleans:
            self._clean()

    def _clean(self) -> None:
        """**Blocks.** Removes what is not kept in the tier. A failure is only reported: it is tried after each copy."""
        catalog = self._goal.look()
        newest = catalog.newest
        if newest is None or newest.generation != catalog.generation:
            return  # What an older generation has left goes once this one has a step there.
        try:
            if self._retention is None or self._retention[0] != newest.generation:
                token = self._goal.opening(newest.generation).token
                retention = Retention(self._goal, self._policy, token, incremental=False, reuse_space=False)
                retention.begin(newest.generation)
                self._retention = newest.generation, retention
            base = catalog.bases.get(newest.generation)
            protected = {newest: "just copied"}
            if base is not None and base.name is not None:
                protected[base.name] = "the run resumed from it"
            cleaning = self._retention[1].clean(newest, protected, find_busy=lambda: self._list_busy(newest.generation))
            problems: Collection[HoldfastError] = cleaning.problems
            with self._changed:
                for name in cleaning.removed:
                    self._given_up[name] = "its policy has given it up"
                    self._there.pop(name, None)
        except FencedError:
            return
        except HoldfastError as error:
            problems = (error,)
        for problem in problems:
            self._emit(Failed(stage="retain", error=f"{self.url}: {problem.message}", step=newest.step))
            break

    def _list_busy(self, generation: int) -> set[StepName]:
        """Returns the steps that any worker may be copying."""
        catalog = self._goal.look()
        unfinished = {name for name in catalog.unfinished if name.generation == generation}
        return unfinished.union(self._source.look().living).difference(catalog.committed)

    def _check_going(self) -> None:
        if self._is_stopped:
            raise _StoppedError


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
