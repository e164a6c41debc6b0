"""`Run`: a training run from its restore to its last save."""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, SupportsFloat, TypeVar

from holdfast.advice.watch import count_taken
from holdfast.checkpoint import objects_of
from holdfast.errors import ClosedError, HoldfastError, UsageError
from holdfast.format.names import FOLLOWED_DATA
from holdfast.format.records import Manifest
from holdfast.numbers import check_whole
from holdfast.options import check_metrics, check_step
from holdfast.preemption.grace import StopOrder
from holdfast.process.exit import EXIT_SAVE_FAILED
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import say
from holdfast.restore.records import Restoration
from holdfast.save.handle import SaveHandle
from holdfast.state.data.followed import CALL, FollowedData, LoaderBatches
from holdfast.supervise.board import LEAVING
from holdfast.tracebacks import short_traceback
from holdfast.training.announcements import Announcements, warn_never_entered
from holdfast.training.loop import StepNumbers, TrainingLoop
from holdfast.training.rollback import Rollbacks
from holdfast.training.watchdog import Watchdog

Batch = TypeVar("Batch")

_ON_NONFINITE: Final = ("warn", "raise")
_ADVICE: Final = "call run.finish_step() at the end of each step, or loop over run.steps(n)"


class Resumption(NamedTuple):
    """The options of a restore at the beginning of a run, and of what is not finite; see `resumable`."""

    strict: bool
    keep_current: list[str]
    strict_resume: bool
    on_nonfinite: str


class _Phase(enum.IntEnum):
    """The phases of a run, in order: a run can be entered once."""

    NEW = 0
    ENTERING = 1
    ENTERED = 2
    ENDED = 3


@short_traceback
class Run:
    """A training run from its restore to its last save. Use it from one thread, with `with`.

    Attributes:
        manager: The manager that saves and restores.
        checkpoint: The objects by name. Objects that cannot be changed in place, such as JAX arrays, are replaced here.
        completes_step: Returns False while gradients are being accumulated; `finish_step` does nothing then.
    """

    def __init__(self, loop: TrainingLoop, resumption: Resumption, watchdog: Watchdog, *, quiet: bool) -> None:
        self.manager = manager = loop.manager
        self.checkpoint = manager.checkpoint
        self._loop, self._guard = loop, loop.guard
        self._restored: Restoration | None = None
        self._resumption, self._watchdog = resumption, watchdog
        self._announcements = Announcements(manager.url, manager.worker, quiet=quiet)
        self.completes_step: Callable[[], bool] = lambda: True
        self._rollbacks = Rollbacks(manager, loop, self._announcements)
        self._total = 0  # How many steps the last loop of `steps` was to have.
        self._phase = _Phase.NEW
        self._counts_own = False
        self._process = os.getpid()
        manager.lineage.restored_by = "holdfast.resumable(...)"
        manager.follow_nonfinite(self._note_nonfinite)
        self._guard.orders.obey = self._obey
        self._unentered = weakref.finalize(self, warn_never_entered, self._announcements.place, self._process)

    @property
    def step(self) -> int:
        """The number of complete steps, including those of earlier processes: where your own loop begins."""
        return self._loop.count.done

    @property
    def restored(self) -> Restoration | None:
        """The restore that took place when the run was entered, or None if the run starts from the beginning."""
        return self._restored

    def steps(self, total: int) -> StepNumbers:
        """Returns an iterator over the numbers of the remaining steps, up to `total`, exclusive.

        Each turn of the loop completes the step before it, and saves it if a save is due; the end of the loop always
        saves. Leaving with `break` also completes the current step, and so does an error that is caught inside the
        block but outside the loop, so let errors leave the block. A turn does not count if it takes no batch and a
        saved `ResumableDataLoader` ends its epoch there: the last turn of `zip(run.steps(n), loader)` is such a turn.

        Args:
            total: How many steps the run has in total, including those of earlier processes.

        Returns:
            An iterator whose `len` is the number of remaining steps.

        Raises:
            UsageError: At the first turn, if a saved loader gave a batch since, as in `zip(loader, run.steps(n))`.
            SaveFailedError: If more than `failures_allowed` saves in a row have failed.
            SystemExit: When the job was asked to stop, once the step before is complete and saved.
            PeerError: If another worker of the job has failed.
        """
        self._check_entered()
        whole = check_whole("total", total)
        return StepNumbers("run.steps(n)", self._loop, whole, partial(self._begin_turn, whole), self._end_steps)

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs, up to `total`, exclusive; take their batches from `batches`.

            for epoch in run.epochs(10):
                for batch in run.batches(loader):
                    train_step(batch)
                    run.finish_step()

        A restart in the middle of an epoch yields that epoch again, and `batches` gives the rest of it. After a save in
        the last step of an epoch, or in a `checkpointable` block after it, that rest has no batch. After a later save,
        such as that of `save` at the end of an epoch, the next epoch is yielded.

        Args:
            total: How many epochs the run has in total, including those of earlier processes.

        Raises:
            UsageError: If a saved loader counts epochs of its own; or if the number of workers has changed in an epoch.
        """
        self._check_entered()
        whole = check_whole("total", total)
        if own := [*count_taken(self.checkpoint.objects)]:
            raise UsageError(
                f"{own[0]} is saved by its name and counts its own epochs, which run.epochs does not know",
                hint=f"Write `for epoch in {own[0]}.epochs({whole})` and iterate the loader; or do not pass it to "
                "resumable, and write `for batch in run.batches(loader)`.",
            )
        return self._follow_data().epochs(whole)

    def batches(self, loader: Iterable[Batch] | Callable[[], Iterable[Batch]]) -> LoaderBatches[Batch]:
        """Returns the batches of a loader, and saves how far training is in it: it needs not be passed to `resumable`.

        Inside of `epochs`, this is one pass through the loader; a pass that is left by `break` is over. Outside, it is
        one pass after the other without end, for `zip(run.steps(n), run.batches(loader))`. Each pass begins with
        `set_epoch` of the loader, its samplers and its dataset, where they have it. It counts no step.

        After a restart a torch `DataLoader` draws the order of the epoch again, and loads no sample that was trained.
        Other data continues by its `state_dict`, or else is begun again and read up to its place. A loader that only
        evaluates may be passed as well.

        Args:
            loader: A `DataLoader` or any other iterable that gives the same batches when it is begun the same; or a
                function that returns one. Create it once, before the loop.

        Raises:
            UsageError: If the loader is an iterator, or saved by its name; or as in `epochs`.
        """
        self._check_entered()
        data = self._follow_data()
        data.check_unnamed(loader, self.checkpoint.objects)
        return data.batches(loader)

    def _follow_data(self) -> FollowedData:
        """Returns what keeps the places in loaders; it is saved from the first use on."""
        data = self._loop.taken.data
        if not data.has_loaders:
            objects_of(self.checkpoint).own[FOLLOWED_DATA] = data
            self.manager.witness.follow(CALL, data.count.follow_batches, data.describe)
            self.manager.follow_epochs(data.count_complete)
        return data

    def finish_step(self) -> None:
        """Counts one step as complete and saves it if a save is due: for your own loop, for example over epochs.

        Call it last in each step, when the model, the loader and everything else are where the next step begins.
        Leaving the block saves the rest.

        Raises:
            UsageError: If this is inside a turn of `steps`, which counts the step itself.
            SaveFailedError: If more than `failures_allowed` saves in a row have failed.
            SystemExit: When the job was asked to stop; the step is saved by then.
        """
        self._check_entered()
        if self._loop.turn() is not None:
            raise UsageError(
                "finish_step would count a step of run.steps a second time",
                hint=(
                    "Remove the call: each turn of `for step in run.steps(n)` is one step and is counted automatically."
                ),
            )
        if self.completes_step():
            self._counts_own = True
            self._loop.count_own_step()

    def begin_at(self, step: int) -> None:
        """Sets the step to count from, taken from another program's checkpoint; before the first step of a new run.

        Raises:
            UsageError: If the run already has steps of its own.
        """
        self._check_entered()
        if self._restored is not None or self._loop.count_with_open_step():
            raise UsageError(f"the run is at step {self._loop.count.done} and cannot begin at another")
        self._loop.count.done = check_whole("step", step)
        self._guard.pause(self._loop.count.done)

    def report(self, *unnamed: object, **metrics: SupportsFloat) -> None:
        """Records metrics of the current step; of the last step, if that is saved and the next one has not begun.

        In your own loop a batch that is taken from a saved loader begins the next step. Without such a loader, metrics
        go to the next save, unless `save` or the end of the block comes first. Of several workers, rank 0 reports.

        Args:
            *unnamed: Not allowed: every metric needs a name.
            **metrics: Numbers, or arrays with one element, which are read when they are saved. Only finite values are
                stored.

        Raises:
            UsageError: If a metric is not a number or has no name.
        """
        if unnamed:
            raise UsageError(
                "metrics must be reported by name",
                hint="Write run.report(loss=loss), or run.report(**metrics) for a dict.",
            )
        count, figures = self._loop.count, check_metrics(metrics)
        is_late = not self._loop.is_in_step and count.is_begun(count.done)
        if is_late and self._counts_own:
            # A batch begins the next step. Where no saved loader counts them, `save` says so.
            is_late = bool(count.taken) and count.taken == count_taken(objects_of(self.checkpoint).all())
        (count.late_metrics if is_late else self._loop.metrics).update(figures)
        count.note_measured(figures)
        if "loss" in figures:
            self.manager.witness.note_loss(figures["loss"])

    def stop(self) -> None:
        """Ends the loop after the current step."""
        self._loop.is_stopped = True

    def rollback(self, step: int | None = None, *, skip_batches: int | None = None) -> None:
        """Goes back to an earlier step, at the end of the step in progress, and trains on with other batches.

        Everything that is saved is restored. The place in the data is that of the step, and `skip_batches` later, so
        that what made training go wrong is left out. Then the step is saved again, and newer steps no longer count.
        Loops over `steps`, `epochs`, `batches` and a saved `ResumableDataLoader` go on there, also in an earlier epoch.
        Random numbers are those of a run that never saw the batches. It is enough if one of several workers calls this.

        Args:
            step: The step; None for the newest one whose parameters and optimizer states are finite, and whose metrics
                are as each `LastGood` of `keep` wants them.
            skip_batches: How many batches to leave out, counted from that step; None for all that were drawn since.

        Raises:
            UsageError: If batches come from an iterator of the program's own.
            NotFiniteError: At the end of the step, if no checkpoint is finite, or this is the third time for one step.
            NoCheckpointError: At the end of the step, if there is no such step.
            RolledBackError: In a framework, at the end of the step: a new process goes on from the step.
        """
        self._check_entered()
        wanted = None if step is None else check_step(step)
        skipped = None if skip_batches is None else check_whole("skip_batches", skip_batches)
        self._rollbacks.check_data(skipped)
        self._guard.order(StopOrder("run.rollback() was called", step=wanted, skipped_batches=skipped))

    def should_stop(self) -> bool:
        """Returns True if the job should exit after this step, so that long work inside a step can end early."""
        return self._guard.should_stop()

    def checkpointable(self, *, step_done: bool = True) -> AbstractContextManager[None]:
        """**Blocks** while it checks all arrays. Use it with `with`, around long work that changes no state.

        If the job is asked to stop while the block runs, the state at its beginning is saved, and the process exits in
        the middle of the block. Nothing is unwound: a restart resumes after that step, and the rest of the block and
        anything after it are not executed. Inside the block, `save` cannot be called.

        If the step was the last of an epoch of a saved `ResumableDataLoader`, and no array was changed since
        `finish_step`, the state after that call is saved instead: a restart does all again that follows the step.

        Args:
            step_done: True if the step in progress counts as complete (evaluation at its end, for example); False if
                none of it has been done yet (while waiting for data, for example).

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
        """
        self._check_entered()
        return self._loop.checkpointable(self._loop.count_with_open_step() if step_done else self._loop.count.done)

    def save(self, *, metadata: Mapping[str, Any] | None = None) -> SaveHandle | None:
        """Saves now, regardless of the policy: between steps, or last in a step, which then counts as complete.

        If this step was saved already and `report` was called since, it is saved again; with several workers, only the
        metrics are stored.

        Returns:
            The save, or None if this step was saved already and there is nothing new to store.

        Raises:
            SaveFailedError: If an earlier save failed and the failure has not been raised yet.
            UsageError: If this is inside a block of `checkpointable`.
        """
        if self._guard.is_paused:
            raise UsageError(
                "save() cannot be called inside a checkpointable() block, where the state may be saved in the "
                "background"
            )
        step = self._loop.count_with_open_step()
        # Of several workers, some may have saved it by hand before they came to where others have saved it in a block.
        is_saved = self._loop.count.is_begun(step) and (
            self._loop.is_safe(step) or self.manager.participant is not None
        )
        if is_saved and not (step == self._loop.count.done and self._loop.must_save_metrics()):
            if not (step == self._loop.count.done and self._store_metrics()):
                self._loop.watch.warn_once(f"run.save() saved nothing: step {step} is saved already")
            return None
        return self._loop.save(step, metadata=metadata)

    # For the doors of frameworks: they know where a training ends, and what comes between its last step and that.

    def save_last(self, *, again: bool = False) -> None:
        """Saves the last step of a training, waiting for the save before it, unless that step is saved.

        Args:
            again: True to replace a save of the step that was made before its epoch or its evaluation had ended.
        """
        loop, step = self._loop, self._loop.count.done
        if again and step and loop.is_safe(step):
            loop.begin_steps()
            loop.save(step, replace=True)
        loop.save_last()

    def pass_boundary(self) -> None:
        """Saves and exits if it is time to, between a step that was counted before and the next one."""
        self._loop.pass_boundary()

    def go_on_by_restart(self, hold_place: Callable[[], Callable[[], object]]) -> None:
        """Lets training go back by a new process, as the framework counts steps in places that do not go back.

        Args:
            hold_place: Notes the place in the framework's data; what it returns is called after the restore, and has
                the next save store that place, with all else as it was restored.
        """
        self._rollbacks.hold_place = hold_place

    def warn(self, text: str, *, is_error: bool = False) -> None:
        """Sends a warning to the log and the sinks, with the number of the step."""
        self._loop.warn(text, is_error=is_error)

    def _repr_html_(self) -> str | None:
        """**Blocks.** Returns the page of `holdfast report`, for a notebook; None if the run cannot be read."""
        from holdfast.report.facts import read_facts
        from holdfast.report.page import render_frame

        try:
            return render_frame(read_facts(self.manager.storage, self._announcements.place))
        except HoldfastError:
            return None

    def __repr__(self) -> str:
        state = f"at step {self._loop.count.done}" if self._phase >= _Phase.ENTERED else "not entered"
        return f"<Run {state}, {self.manager!r}>"

    def __enter__(self) -> Self:
        """**Blocks.** Restores, and checks that the objects and the directory can be saved.

        Raises:
            UsageError: If another process of this machine saves to the run, and does not end soon.
            MismatchError: If checkpoint and objects differ.
            NoWholeCheckpointError: If there are checkpoints, but all are damaged.
            UnsupportedValueError: If an object has state that cannot be stored.
            StorageError: If the storage fails, or the directory cannot be created or written.
            PeerError: If one of these happened on another worker.
        """
        if self._phase is not _Phase.NEW:
            raise ClosedError(
                "this run was entered before; a run can be entered once",
                hint="Create a new one, `with resumable(...) as run:`. It resumes from the newest checkpoint.",
            )
        self._phase = _Phase.ENTERING
        self._unentered.detach()
        try:
            self._guard.pause(None)
            self._guard.open()
            self._watchdog.open()
            self.manager.wait_until_free()
            self._restored = self._restore()
            self.manager.check_ready()
        except BaseException as error:
            try:
                self._end_badly(error)
            finally:
                self._guard.close()
                self._watchdog.close()
            raise
        step = self._loop.count.done = 0 if self._restored is None else self._restored.step
        if self._restored is not None:
            self._note_nonfinite(self._restored.manifest)
        self._watchdog.begin(step, is_restored=self._restored is not None)
        self._loop.count.join(self.manager)
        self._guard.pause(step)
        self._loop.begin(_ADVICE, self._warn_uncounted, self.__exit__)
        keeps_current, strict = bool(self._resumption.keep_current), self._resumption.strict_resume
        self._loop.begin_witness(self._restored, self._announcements.say, keeps_current=keeps_current, strict=strict)
        self._announcements.begin(self.manager, self._restored, step)
        self._phase, self.manager.lineage.find_steps = _Phase.ENTERED, lambda: (step, self._loop.count.done)
        self._watchdog.ledger.begin(self.manager)
        return self

    def _restore(self) -> Restoration | None:
        data, own = self._loop.taken.data, objects_of(self.checkpoint).own
        own[FOLLOWED_DATA] = data
        try:
            if self.manager.begin_anew:
                return None
            return self.manager.restore(strict=self._resumption.strict, keep_current=self._resumption.keep_current)
        finally:
            if not data.is_used:
                del own[FOLLOWED_DATA]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process or self._phase is _Phase.ENDED:
            return  # A forked child that leaves the block: the run is its parent's. Or the program's end has ended it.
        self._phase, place = _Phase.ENDED, self._loop.find_exit(error, trace)
        PULSE.enter(LEAVING)
        is_exit, error = isinstance(error, SystemExit), None if place is None else error
        inbox, watch = self._guard.inbox, self._loop.watch
        inbox.patient = True
        if error is None:
            watch.warn_if_idle()
        has_trained = self._restored or self._loop.count_with_open_step() or self._total
        if not isinstance(error, Exception) and (text := watch.describe("nothing was saved")):
            self._warn_uncounted(text, is_error=True)
        elif error is None and not has_trained and self.manager.lineage.newest_asked < 0:
            self._loop.warn(f"no step was counted, so nothing was saved: {_ADVICE}")
        try:
            if error is None:
                self._end_well()
            else:
                self._end_badly(error)
                self._loop.warn_of_loss(place)
        except HoldfastError as failure:
            if not is_exit:
                raise
            # Of an exit only the code is seen.
            say(f"holdfast: {type(failure).__name__}: {failure}")
            raise SystemExit(EXIT_SAVE_FAILED) from failure
        finally:
            try:
                if self._guard.leaving and not inbox.gave_up:
                    # The exit code says already what became of the state, and every failure was an event.
                    with suppress(HoldfastError):
                        self.manager.close()
            finally:
                self._loop.end()
                self._watchdog.close()

    def _end_well(self) -> None:
        try:
            self._loop.begin_steps()
            self._loop.finish_step()
            step = self._loop.count.done
            self._guard.pass_last(step, is_over=True)
            self._loop.save_last()
            self._store_metrics()
            if self.manager.participant is not None:
                # Others may wait in a collective, and come to no save, since this worker has left its loop too early.
                self._guard.wait_saved()
            if (last := self._loop.count.find(step)) is not None:
                last.wait_ended(at_exit=True)
            self.manager.wait()
            if (order := self._guard.orders.pending) is not None:
                raise self._rollbacks.make_error(order.cause, step)  # No step comes at which it would be carried out.
            self._guard.pass_end(step, last)
            self._watchdog.ledger.end()
            if not self.manager.wait_copied(self._guard.is_asked_to_leave):
                self._guard.pass_end(step, last)
            self.manager.__exit__(None, None, None)
            self._announcements.end(self.manager, step, self._total)
        except Exception as error:
            self._end_badly(error)
            raise

    def _note_nonfinite(self, manifest: Manifest) -> bool:
        """Called, in any thread, when the step of a manifest is not finite; returns True if an error will say so."""
        found, how = manifest.nonfinite, self._resumption.on_nonfinite
        if found is None or not found.leaves or how == "warn":
            return False
        more = f" and {found.leaves - 1} more" if found.leaves > 1 else ""
        self._guard.order(
            StopOrder(
                f"step {manifest.step} is not finite: nan or infinity in {found.names[0]}{more}", raises=how == "raise"
            )
        )
        return True

    def _obey(self, order: StopOrder, step: int) -> int:
        """**Collective.** Carries out an order between two steps; returns the step from which training goes on."""
        if order.raises:
            raise self._rollbacks.make_error_together(order.cause, step)
        self._restored = self._rollbacks.go_back(order, step)
        step, resumption = self._restored.step, self._resumption
        self._loop.begin_witness(
            self._restored, self._announcements.say, keeps_current=False, strict=resumption.strict_resume
        )
        return step

    def _store_metrics(self) -> bool:
        """Stores all that was reported with the step that was saved last; returns True if something was."""
        self._loop.count.late_metrics |= self._loop.metrics
        self._loop.metrics = {}
        return self._loop.count.store_metrics()

    def _end_badly(self, error: BaseException) -> None:
        """Ends the run after an error: the failed step may have changed some state, so only earlier saves count."""
        cause = self._guard.fail(error)
        self._watchdog.ledger.end(error)
        if not self._guard.leaving and not self._guard.inbox.gave_up:
            self.manager.__exit__(type(error), error, error.__traceback__)
        if cause is not None:
            raise cause from error

    def _begin_turn(self, total: int, _: StepNumbers) -> None:
        self._total = total

    def _end_steps(self) -> None:
        self._loop.watch.may_predict = True
        self._loop.save_last()
        self._guard.inbox.patient = False
        self._guard.pause(self._loop.count.done, saved=self._loop.count.find(self._loop.count.done))

    def _warn_uncounted(self, text: str, *, is_error: bool = False) -> None:
        # Otherwise the program saves by the manager, and counts by itself.
        if self.manager.lineage.newest_asked <= self._loop.count.done:
            self._loop.warn(text, is_error=is_error)

    def _check_entered(self) -> None:
        if self._phase < _Phase.ENTERED:
            raise UsageError(
                "the run has not been entered: nothing is restored yet", hint="Write: with resumable(...) as run:"
            )
