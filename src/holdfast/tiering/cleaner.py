"""Removes from a farther tier what its policy does not keep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from holdfast.catalog import Catalog, StoredRun
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Failed, Sink
from holdfast.format.names import StepName
from holdfast.policies import KeptCandidate, RetentionPolicy
from holdfast.policies.retention import Key
from holdfast.save.retention import Retention


class _WithComing:
    """A policy that chooses as if the steps that are to come were there.

    Attributes:
        coming: These.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self.coming: Sequence[KeptCandidate[StepName]] = ()

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** See `RetentionPolicy`."""
        joined: list[KeptCandidate[Key]] = sorted([*committed, *self.coming], key=lambda one: one.step)  # type: ignore[list-item]
        return self._policy.choose_kept(joined, now_seconds)


class TierCleaner:
    """The retention of a farther tier. Not thread-safe.

    Attributes:
        generation: The newest generation that this job has opened, or the leader of it. It removes nothing before it
            has one, and once there is a newer one: another job has gone on, perhaps with another policy.
    """

    def __init__(
        self,
        source: StoredRun,
        goal: StoredRun,
        policy: RetentionPolicy,
        find_pending: Callable[[], Collection[StepName]],
        emit: Sink,
        *,
        has_peers: bool,
    ) -> None:
        """`goal` is the run in that tier, to which `source` is copied; `find_pending` returns what is to be copied.

        Other workers may copy parts of steps that are not pending here, if it `has_peers`.
        """
        self._source, self._goal, self._find_pending, self._emit = source, goal, find_pending, emit
        self._has_peers = has_peers
        self.generation = 0
        self._policy = _WithComing(policy)
        self._retention: tuple[int, Retention] | None = None
        # For which there was no room.
        self._lacking: list[StepName] = []

    def clean(self) -> Collection[StepName]:
        """**Blocks.** Removes what is not kept in the tier; returns the steps that have gone.

        A failure is only reported: it is tried after each copy.
        """
        catalog = self._goal.look()
        newest = catalog.newest
        if newest is None or newest.generation != catalog.generation or catalog.generation > self.generation:
            return ()  # What an older generation has left goes once this one has a step there.
        return self._clean(catalog, newest, {newest: "just copied"}, self._find_busy)

    def make_room(self, coming: Sequence[KeptCandidate[StepName]]) -> Collection[StepName]:
        """**Blocks.** Called if the tier is full: removes what would not be kept there beside those that are to come.

        The newest step there stays, and so does that from which the job goes on. Nothing goes twice for the same steps.
        """
        catalog, names = self._goal.look(), [one.key for one in coming]

        def find_busy() -> Collection[StepName]:
            # What is half there, and no worker will complete. What others copy now may be newer.
            return {one for one in self._find_busy() if one in names or one > max(names, default=one)}

        if catalog.newest is None or names == self._lacking or catalog.generation > self.generation:
            return ()
        self._policy.coming, self._lacking = coming, names
        try:
            bases = self._source.look().bases
            begun = [base.name for base in bases.values() if base.generation >= catalog.generation]
            protected = dict.fromkeys(filter(None, begun), "the run resumed from it")
            return self._clean(catalog, catalog.newest, {**protected, catalog.newest: "the newest there"}, find_busy)
        finally:
            self._policy.coming = ()

    def _clean(
        self,
        catalog: Catalog,
        newest: StepName,
        protected: Mapping[StepName, str],
        find_busy: Callable[[], Collection[StepName]],
    ) -> Collection[StepName]:
        generation = catalog.generation
        removed: tuple[StepName, ...] = ()
        try:
            if self._retention is None or self._retention[0] != generation:
                token = self._goal.opening(generation).token
                retention = Retention(self._goal, self._policy, token, incremental=False, reuse_space=False)
                retention.begin(generation)
                self._retention = generation, retention
            base = catalog.bases.get(generation)
            if base is not None and base.name is not None:
                protected = {base.name: "the run resumed from it", **protected}
            acting = StepName(newest.step, generation, newest.attempt)
            cleaning = self._retention[1].clean(acting, protected, find_busy=find_busy)
            removed, problem = cleaning.removed, next(iter(cleaning.problems), None)
        except FencedError:
            return removed
        except HoldfastError as error:
            problem = error
        if problem is not None:
            text = f"{self._goal.url}: {problem.message}"
            self._emit(Failed(stage="retain", error=text, step=newest.step))
        return removed

    def _find_busy(self) -> set[StepName]:
        """Returns the steps that any worker may be copying."""
        catalog = self._goal.look()
        own = (name for name in catalog.unfinished if name.generation == catalog.generation)
        unfinished = {name for name in own if self._has_peers or catalog.newest is None or name > catalog.newest}
        return unfinished.union(self._find_pending()).difference(catalog.committed)
