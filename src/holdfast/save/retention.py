"""After a commit, removes what the policy gives up and the remains of earlier saves, in a thread of its own."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from holdfast.catalog import Catalog, StoredRun, describe_lost
from holdfast.catalog.deletion import FileRecycler, sweep
from holdfast.catalog.holds import HoldWatch
from holdfast.catalog.summary import FEW, Summarizer
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Failed, NotFinite, Retained, Sink, Warned
from holdfast.format.digests import seal
from holdfast.format.names import StepName
from holdfast.format.records import NAMED_NONFINITE, Manifest, Nonfinite
from holdfast.numbers import size_text
from holdfast.policies import KeptCandidate, RetentionPolicy, absent_metrics, count_kept, plan_retention
from holdfast.policies.retention import RetentionPlan
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.handle import Origin, PendingFailures, SaveHandle
from holdfast.save.lineage import CallGuard

if TYPE_CHECKING:
    from holdfast.save.run_writer import CheckpointWriter

NeededFinder: TypeAlias = Callable[[Sequence[KeptCandidate[StepName]]], Mapping[StepName, str]]
"""Returns which of some steps must stay, because a farther tier has still to get them, each with the reason."""

_MOST_NAMED: Final = 100
"""So many kept steps are named in the event of retention."""


_FINE: Final = (None, Nonfinite())


class Cleaning(msgspec.Struct, frozen=True):
    """The outcome of the cleanup after a commit.

    Attributes:
        kept: For each step that was kept, the reason.
        removed: The committed steps that were removed.
        problems: The files that could not be removed, and why.
        absent: Metrics that the policy needs and none of several checkpoints has.
        reported: The metrics that the checkpoints have.
        lost: Committed steps that have lost their manifests. Their data is kept.
        hindrance: What makes saves slower than they could be; see `Traits`.
        kept_bytes: The size of the kept steps.
        shortage: A warning that the disk has no room for all that is to be kept, or empty.
    """

    kept: dict[StepName, str]
    removed: tuple[StepName, ...]
    problems: tuple[HoldfastError, ...]
    absent: tuple[str, ...]
    reported: tuple[str, ...]
    lost: tuple[StepName, ...] = ()
    hindrance: str = ""
    kept_bytes: int = 0
    shortage: str = ""


class Retention:
    """Removes steps of one run, as its policy says. Not thread-safe.

    Attributes:
        recycler: Recycles the data file of a removed checkpoint; the owner of this closes it.
        spared: The steps that stayed at the last clean-up only because they are being read, and then those that a
            farther tier needs; oldest first, and whether they are needed.
    """

    def __init__(
        self,
        run: StoredRun,
        keep: RetentionPolicy,
        token: str,
        *,
        incremental: bool,
        reuse_space: bool,
        find_needed: NeededFinder | None = None,
    ) -> None:
        """`token` identifies the generations that are opened here; `find_needed` finds what farther tiers need."""
        self._run, self._keep = run, keep
        self._find_needed = find_needed
        self.spared: dict[StepName, bool] = {}
        self._summarizer = Summarizer(run, token)
        self._holds = HoldWatch(run.storage)
        # Whether what older generations had left has been removed, as far as it was there when this one began.
        self._has_swept = False
        # How many saves are to come before their size is known, and with it what all that is kept will take.
        self._until_measured = 2 if incremental else 1
        self.recycler = FileRecycler(run.storage, reuse=reuse_space)

    def begin(self, generation: int) -> None:
        """**Blocks.** Called when a generation was opened here."""
        self._has_swept = False
        if self._run.history.summary is not None:
            self._summarizer.carry_over(generation)
        self.recycler.begin(generation)

    def make_room(self, generation: int, busy: Collection[StepName]) -> None:
        """**Blocks.** Removes the remains of unfinished saves of older generations, as a generation begins. They are
        fenced, so no job can commit them any more; `busy` ones stay.

        A failure here does not fail the save: the sweep after its commit tries again, and reports it.
        """
        with suppress(HoldfastError):
            # Looked at again: an older job may have committed a step while this generation was opened.
            catalog = self._run.look()
            referrers = self._run.history.referrers((*catalog.committed, *catalog.lost))
            referred = {name for referrer in referrers for name in referrer.refers_to}
            self._sweep(catalog, referred.union(busy), generation)

    def clean(
        self,
        newest: StepName,
        protected: Mapping[StepName, str],
        manifest: Manifest | None = None,
        find_busy: Callable[[], Collection[StepName]] = tuple,
    ) -> Cleaning:
        """**Blocks.** Removes what the retention policy gives up, and the remains of earlier saves.

        Only the current lineage is considered; other steps stay until a person prunes them. A step to which a kept step
        refers stays too, in the lineage or not. A generation that was fenced removes nothing, and raises `FencedError`.
        `find_busy` returns the steps that this worker or others may be writing to.
        """
        # It may have been given metrics since; those are known.
        if manifest is not None and newest not in self._run.history.known:
            self._run.history.note(newest, manifest.facts)
        catalog = self._run.look()
        self._run.check_fence(newest.generation, self._run.history.opened)
        # Looked at after that: an attempt is named before it has a directory.
        in_use = set(find_busy())
        # A step that is being published may be seen before it survives a power cut: it replaces none yet.
        known = self._run.history.candidates(catalog.living)
        candidates = [one for one in known if one.key == newest or one.key not in in_use]
        problems: list[HoldfastError] = []
        absent = absent_metrics(self._keep, candidates) if len(candidates) > 1 else ()
        reported = tuple(sorted({metric for each in candidates for metric in each.metrics})) if absent else ()
        referrers = self._run.history.referrers((*catalog.committed, *catalog.lost))
        replaced: list[StepName] = []
        if others := set(catalog.committed).difference(catalog.living, protected):
            own = {name.step for name in catalog.living if name.generation == newest.generation}
            replaced = sorted(name for name in others if name.generation == newest.generation and name.step in own)
        needed = {} if self._find_needed is None else self._find_needed(candidates)
        plan_with = partial(
            plan_retention, self._keep, candidates, now_seconds=time.time(), referrers=referrers, replaced=replaced
        )
        if self._holds.held:
            with suppress(HoldfastError):  # They stay as they were.
                self._holds.look(time.monotonic())
        plan = plan_with(protected={**needed, **self._holds.held, **protected})
        newest_bytes = max(worker.data_bytes for worker in manifest.workers) if manifest else 0
        if manifest is not None:
            # A copy says that the step was committed if the manifest is lost. A crash before this leaves a step that
            # counts as any other; only that loss is not noticed then.
            try:
                self._run.storage.write(newest.committed_path, seal(manifest))
            except HoldfastError:
                self._has_swept = False  # It is tried again below, when something is removed, and after each save.
        is_long = self._run.history.summary is not None
        is_long = is_long or len(catalog.committed) > FEW or len(self._run.history.opened) > FEW
        removed: list[StepName] = []
        going = given_up = plan.remove
        try:
            if is_long and going:
                going = self._summarizer.release(going, catalog, newest.generation)
            if going or self._holds.held:
                plan = self._heed_holds(plan, going, plan_with, {**needed, **protected})
                going = plan.remove
            if needed or self.spared or self._holds.leases:
                kept = plan_with(protected={**self._holds.pins, **protected}).keep
                only = [name for name in plan.keep if name not in kept and name in {**needed, **self._holds.leases}]
                self.spared = {name: name in needed for name in sorted(only, key=lambda name: (name in needed, name))}
            if going:
                removed = self._remove(going, newest, newest_bytes, problems)
        except FencedError:
            raise
        except HoldfastError as error:
            problems.append(error)
        referred = {name for referrer in referrers if referrer.key not in removed for name in referrer.refers_to}
        if catalog.spare_bytes is not None:
            try:
                self.recycler.sweep(newest_bytes)
            except HoldfastError as error:
                problems.append(error)
        if catalog.unfinished or catalog.trash or not self._has_swept:
            left = self._sweep(catalog, referred | in_use, newest.generation)
            if not self._has_swept:
                # Those of a summary are not looked into: there may be thousands.
                stay = set(catalog.committed if catalog.without_copy is None else catalog.without_copy)
                for name in sorted(stay.difference(removed, self._run.history.believed, in_use - {newest})):
                    try:
                        self._run.step(name).renew_copy()
                    except HoldfastError as error:
                        left.append(error)
            problems += left
            self._has_swept = not left
        if is_long:
            # Whether or not they are gone: some may be half removed.
            self._summarizer.update(catalog, given_up, newest.generation)
        self._run.history.forget_all_but(set(catalog.committed) - set(removed))
        known_facts = self._run.history.known
        kept_bytes = sum(known_facts[name].size_bytes for name in plan.keep if name in known_facts)
        shortage = ""
        if manifest is not None:
            self._until_measured -= 1
            if not self._until_measured:
                present = len(plan.keep) + (catalog.spare_bytes is not None)
                shortage = self._find_shortage(
                    manifest.facts.size_bytes, present, len({*needed, *protected} - {newest})
                )
        return Cleaning(
            dict(plan.keep),
            tuple(removed),
            tuple(problems),
            absent,
            reported,
            catalog.lost,
            self._run.storage.traits.hindrance,
            kept_bytes,
            shortage,
        )

    def _heed_holds(
        self,
        plan: RetentionPlan[StepName],
        going: Collection[StepName],
        plan_with: Callable[..., RetentionPlan[StepName]],
        protected: Mapping[StepName, str],
    ) -> RetentionPlan[StepName]:
        """**Blocks.** Plans again, without what is pinned or being read; removes only steps that are `going`.

        `holds.py` explains the order of the calls. A crash in between leaves steps without a copy of the manifest: the
        next generation writes it again.
        """
        self._run.storage.delete([name.committed_path for name in going])
        before = self._holds.held
        self._holds.look(time.monotonic())
        heeded = plan if self._holds.held == before else plan_with(protected={**self._holds.held, **protected})
        for name in set(going).difference(heeded.remove):
            with suppress(HoldfastError):
                self._run.step(name).renew_copy()
        # One whose lease has ended in this moment was not announced to readers: it goes after the next commit.
        return RetentionPlan(heeded.keep, tuple(name for name in heeded.remove if name in going))

    def remove_spared(self) -> tuple[StepName, bool] | None:
        """**Blocks.** Removes the first spared step; returns it, and whether a farther tier needs it, or None.

        The newest never is one, nor a step to which another one refers.
        """
        catalog, history = self._run.look(), self._run.history
        referrers = history.referrers((*catalog.committed, *catalog.lost))
        referred = {name for referrer in referrers for name in referrer.refers_to}
        for name, is_needed in list(self.spared.items()):
            if name not in catalog.committed or name in referred or catalog.newest in (None, name):
                continue
            del self.spared[name]
            self._holds.forget([name])
            generation = max(history.opened, default=0)
            if history.summary is not None and not self._summarizer.release((name,), catalog, generation):
                continue
            if self._remove([name], StepName(name.step, generation), 0, []):
                return name, is_needed
        return None

    def _find_shortage(self, size_bytes: int, present: int, protected: int) -> str:
        """Returns how many checkpoints of that size the disk has room for, if these are too few; empty otherwise.

        Besides those of the policy, `protected` ones are there, and one more while it is written.
        """
        location, count = self._run.storage.location, max(count_kept(self._keep), 1) + protected + 1
        with suppress(OSError):
            if location is not None and size_bytes:
                fitting = present + shutil.disk_usage(location).free // size_bytes
                base = ", the one that the run resumed from" if protected else ""
                if fitting < count:
                    return (
                        f"the disk has room for {fitting} of {count} checkpoints of {size_text(size_bytes)}: those of "
                        f"keep={self._keep!r}{base} and the one being written. Free space, or keep fewer"
                    )
        return ""

    def find_wanted(self, name: StepName, metrics: Mapping[str, float]) -> Collection[StepName]:
        """Returns the steps that the policy will keep for their own sake when a save is committed."""
        now_seconds = time.time()
        known = self._run.history.candidates(self._run.look().living)
        before = [one for one in known if one.step < name.step]
        try:
            return self._keep.choose_kept([*before, KeptCandidate(name, name.step, now_seconds, metrics)], now_seconds)
        except Exception:  # noqa: BLE001  A policy of the user's own may fail; that is reported after the commit.
            return ()

    def _remove(
        self, names: Collection[StepName], newest: StepName, newest_bytes: int, problems: list[HoldfastError]
    ) -> list[StepName]:
        """Removes committed steps: first all their manifests, then, if this generation still counts, their data."""
        withdrawn: list[StepName] = []
        needed: set[StepName] = set()
        # Newest first: what refers to others goes before them. If it cannot be removed, neither can they.
        for name in sorted(set(names), reverse=True):
            if name not in needed:
                try:
                    self._run.step(name).withdraw()
                    withdrawn.append(name)
                except HoldfastError as error:
                    problems.append(error)
                    needed |= self._run.history.kept_with(name)
        if withdrawn:
            # A newer job may have begun since, and refer to them: it sees that they are gone, or is seen here.
            self._run.check_fence(newest.generation)
        removed: list[StepName] = []
        for name in reversed(withdrawn):
            try:
                self.recycler.discard_withdrawn(name.directory, newest_bytes)
                removed.append(name)
            except HoldfastError as error:
                problems.append(error)
        return removed

    def _sweep(self, catalog: Catalog, kept: Collection[StepName], newest: int) -> list[HoldfastError]:
        """Removes unfinished steps of this and older generations, except those that are needed; returns problems."""
        unfinished = [name for name in catalog.unfinished if name.generation <= newest and name not in kept]
        return sweep(self._run, unfinished, catalog.trash, newest)[1]


class Tidier:
    """Cleans up after each commit, in a thread of its own, while the engine may make the next save.

    At most one save is cleaned up after at a time. The engine's thread calls `follow` and `wait`; the training thread
    the others, while no save is in progress.

    Attributes:
        recycler: Keeps the file of a removed checkpoint for the next save.
        on_nonfinite: Called with the manifest of a step that is not finite; returns True if an error will say so.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        recycler: FileRecycler,
        failures: PendingFailures,
        emit: Sink,
        calls: CallGuard,
    ) -> None:
        """`recycler` may keep a file of a removed checkpoint until `join`."""
        self.recycler, self.copier = recycler, writer.copier
        self._writer, self._failures, self._emit, self._calls = writer, failures, emit, calls
        self._thread = WorkerPool(1, "holdfast-tidier")
        # The save before, while it may still be cleaned up after.
        self._before: SaveHandle | None = None
        self.on_nonfinite: Callable[[Manifest], bool] = lambda _: False
        # The warnings so far: retention meets with the same again after each save.
        self._warned: set[str] = set()

    def follow(self, handle: SaveHandle, manifest: Manifest) -> None:
        """Cleans up after a commit, and ends the save; **blocks** only if no thread can be started."""
        self._before = handle
        self._do(partial(self._tidy, handle, manifest))

    @property
    def is_busy(self) -> bool:
        """True if the save before may still be cleaned up after."""
        return self._before is not None

    def wait(self) -> bool:
        """**Blocks** until the save before has been cleaned up after; returns False if that had ended before."""
        before, self._before = self._before, None
        return before is not None and before.request.ended.wait(threading.TIMEOUT_MAX)

    def add_metrics(
        self, checkpoint: StepName | SaveHandle, metrics: Mapping[str, float], seen_generation: int
    ) -> None:
        """Stores metrics with a committed checkpoint, or that of a save once it is, in the background."""

        def add() -> None:
            name = checkpoint if isinstance(checkpoint, StepName) else None
            if isinstance(checkpoint, SaveHandle):
                checkpoint.request.settled.wait(threading.TIMEOUT_MAX)
                name = checkpoint.request.name if checkpoint.request.is_committed else None
            if name is not None:
                try:
                    self._writer.add_metrics(name, metrics, seen_generation)
                except FencedError:
                    pass  # As in `retain`.
                except BaseException as error:  # noqa: BLE001  The checkpoint is committed.
                    self._report(error, name)

        self._do(add)

    def end(self) -> None:
        """Ends the thread, after its work."""
        self._thread.end()

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the thread to end, and frees the disk."""
        self._thread.join(timeout_seconds)
        if self.copier is not None:
            self.copier.close(timeout_seconds)
        try:
            self.recycler.close()
        except HoldfastError as error:
            self._emit(Warned(text=f"a recycled file that was kept for the next save is still on the disk: {error}"))

    def abandon(self) -> None:
        """Leaves the disk as it is, as a crash does, and waits for nothing."""
        self.recycler.abandon()
        self.leave_copies()

    def wait_copied(self, timeout_seconds: float, is_asked: Callable[[], bool]) -> bool:
        """**Blocks.** See `StepCopier`; True at once for a run without tiers."""
        return self.copier is None or self.copier.wait_copied(timeout_seconds, is_asked)

    def leave_copies(self) -> None:
        """Copies nothing more into farther tiers: the next start goes on with it."""
        if self.copier is not None:
            self.copier.abandon()

    def _do(self, work: Callable[[], object]) -> None:
        if self._thread.start():
            self._thread.put(work)
        else:
            work()

    def _tidy(self, handle: SaveHandle, manifest: Manifest) -> None:
        handle.request.server = threading.get_ident()
        self._calls.serving.add(handle.request.server)
        try:
            if manifest.nonfinite not in _FINE:
                self._note_nonfinite(manifest)
            self.retain(manifest.name, handle.request.origin, manifest)
        finally:
            self._calls.serving.discard(threading.get_ident())
            self._failures.note_ended(handle)

    def _note_nonfinite(self, manifest: Manifest) -> None:
        found = manifest.nonfinite
        assert found is not None, "it was looked at"
        is_exempt, names = not found.leaves, found.names or found.exempt[:NAMED_NONFINITE]
        if is_exempt and repr(found.exempt) in self._warned:
            return  # That was said at the first of them.
        self._warned.add(repr(found.exempt))
        is_raised = not is_exempt and self.on_nonfinite(manifest)
        self._emit(
            NotFinite(
                step=manifest.step,
                generation=manifest.generation,
                leaves=found.leaves or len(found.exempt),
                names=names,
                is_exempt=is_exempt,
                is_raised=is_raised,
            )
        )

    def retain(self, name: StepName, origin: Origin, manifest: Manifest | None) -> None:
        """**Blocks.** Removes checkpoints that are not kept after a commit. A failure is only reported.

        Without the manifest of the commit, the run has succeeded, and the step that it resumed from is no longer
        protected.
        """
        begun_at = time.monotonic()
        protected = dict.fromkeys(origin.sources, "this program restored from it")
        if origin.base is not None and manifest is not None:
            protected[origin.base] = "the run resumed from it"
        protected[name] = "just committed"
        try:
            cleaning = self._writer.clean(name, protected, manifest)
        except FencedError:
            return  # The newer job cleans; the next save here says that this one is fenced.
        except BaseException as error:  # noqa: BLE001  The checkpoint is committed, even if something fails afterwards.
            self._report(error, name)
            return
        if cleaning is None:
            return
        # A job that validates for the first time after some saves has done nothing wrong.
        warnings = [
            f"Best({metric!r}) keeps nothing: no checkpoint has that metric. "
            f"Reported so far: {', '.join(cleaning.reported)}."
            for metric in cleaning.absent
            if cleaning.reported
        ]
        if cleaning.lost:
            warnings.append(f"{describe_lost(cleaning.lost)}, and are kept until `holdfast prune --lost`")
        warnings += [text for text in (cleaning.hindrance, cleaning.shortage) if text]
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                self._emit(Warned(text=text))
        # Of thousands, the journal would hold nothing else.
        named = sorted(cleaning.kept)[-_MOST_NAMED:]
        self._emit(
            Retained(
                kept={kept.step: cleaning.kept[kept] for kept in named},
                removed=tuple(removed.step for removed in cleaning.removed),
                background_seconds=time.monotonic() - begun_at,
                more_kept=len(cleaning.kept) - len(named),
                kept_bytes=cleaning.kept_bytes,
            )
        )
        if cleaning.problems:
            self._report(cleaning.problems[0], name)

    def _report(self, problem: BaseException, name: StepName) -> None:
        reason = getattr(problem, "message", repr(problem))
        # It is tried again after each save, and no step is lost: a warning, once for each reason.
        if reason not in self._warned:
            self._warned.add(reason)
            self._emit(Failed(stage="retain", error=reason, step=name.step, generation=name.generation))
