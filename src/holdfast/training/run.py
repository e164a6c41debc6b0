"""`resumable`: a training loop that continues where the last process stopped."""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, SupportsFloat, TypeVar

from msgspec.structs import asdict

from holdfast.advice.hyperparameters import check_kept
from holdfast.advice.watch import count_taken
from holdfast.checkpoint import Checkpoint, find_given, objects_of
from holdfast.cluster import Cluster
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import ClosedError, HoldfastError, UsageError
from holdfast.events import Sink
from holdfast.format.names import FOLLOWED_DATA
from holdfast.manager import CheckpointManager
from holdfast.numbers import check_whole
from holdfast.options import SaveOptions, check_kept_objects, check_metrics, check_names, check_switches
from holdfast.policies import Auto, Latest, RetentionPolicy, SavePolicy
from holdfast.preemption.config import TerminationConfig, make_termination
from holdfast.preemption.guard import make_guard
from holdfast.preemption.inbox import EarlyNotices
from holdfast.process.exit import EXIT_SAVE_FAILED
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import say
from holdfast.restore.records import Restoration
from holdfast.save.handle import SaveHandle
from holdfast.save.joint.setup import explaining
from holdfast.state.data.followed import CALL, FollowedData, LoaderBatches
from holdfast.storage import Storage
from holdfast.supervise.board import LEAVING
from holdfast.tracebacks import short_traceback
from holdfast.training.announcements import Announcements, warn_never_entered
from holdfast.training.ledger import Ledger
from holdfast.training.loop import StepNumbers, TrainingLoop
from holdfast.training.watchdog import Watchdog

Batch = TypeVar("Batch")

_ADVICE: Final = "call run.finish_step() at the end of each step, or loop over run.steps(n)"


@short_traceback
def resumable(
    directory: str | os.PathLike[str] | Storage,
    *checkpoint: Checkpoint,
    save_every: SavePolicy | int | str | None = None,
    keep: RetentionPolicy | int | str | None = None,
    strict: bool = True,
    begin_anew: bool = False,
    start_from: int | None = None,
    incremental: bool = False,
    reuse_space: bool = True,
    failures_allowed: int = 0,
    when_busy: Literal["wait", "skip"] = "wait",
    sinks: Iterable[Sink] = (),
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    threads: int = 6,
    overlap_copy: bool = False,
    reserve_bytes: int | Literal["auto"] | None = None,
    cluster: Cluster | Literal["auto", "alone"] = "auto",
    liveness_seconds: float = LIVENESS_SECONDS,
    check_replicas: bool | Literal["first"] = "first",
    on_resize: Literal["allow", "refuse"] = "allow",
    preemption: Literal["auto", "off"] | TerminationConfig = "auto",
    grace: float | str | None = None,
    keep_current: str | Iterable[str] = (),
    strict_resume: bool = False,
    watchdog: str = "report",
    quiet: bool = False,
    **objects: object,
) -> Run:
    """Creates a run to enter with `with`: it restores, saves by policy, saves at the end, and waits for its saves.

    Example:
        ```python
        with holdfast.resumable("runs/gpt", model=model, optimizer=optimizer, loader=loader, rng=holdfast.RNG(),
                          save_every=holdfast.Steps(500), keep=holdfast.Latest(3)) as run:
            for step in run.steps(10_000):
                loss = train_step(next(batches))
                run.report(loss=loss)
        ```

    Args:
        directory: The run's directory, a `file://` URL, or an open storage.
        checkpoint: A `Checkpoint` with the objects, instead of `objects`: it allows any names.
        save_every: When to save: a policy, a number of steps such as 500, or text such as "10min" or "1 epoch"; None
            for `Auto()`, which measures the cost of a save.
        keep: Which checkpoints to keep: a policy, or how many of the newest; None for `Latest(3)`.
        strict: False to restore what fits, if objects have changed since the save; a warning names the rest.
        begin_anew: True to start from the beginning even if there are checkpoints.
        start_from: A step to go back to, once: the run resumes there, and newer steps no longer count. The next start
            continues from what was saved since, so the option may stay in the script.
        incremental: True to write only arrays that have changed, and refer to earlier steps for the others.
        reuse_space: False to never write a save over the data file of a removed checkpoint; see `CheckpointManager`.
        failures_allowed: How many saves in a row may fail without an error; one more ends the loop.
        when_busy: What to do with a save if the previous one is still in progress: wait for it, or skip this one.
        sinks: Functions that are called with each event.
        timeout_seconds: The deadline of each wait.
        threads: The number of threads that write, and read during a restore. They mostly wait for the disk.
        overlap_copy: True to copy parameters and optimizer state while training continues; see `CheckpointManager`.
        reserve_bytes: Host memory for the first save: None to make it ready slowly during the first steps; a number or
            "auto" to allocate it at once, 0 to leave it to the first save; see `CheckpointManager`.
        cluster: The workers of the job: "auto" to find them, "alone" for a worker that saves on its own, or a cluster.
        liveness_seconds: A worker that gives no sign of life for this long is taken for dead.
        check_replicas: At which saves to compare replicated state between workers; see `CheckpointManager`.
        on_resize: "refuse" to resume only with the number of workers that saved; "allow" for any number.
        preemption: How to notice a preemption, and how to exit: "auto" for signals and the sources that fit the
            machine, "off" for Ctrl-C only, or a `TerminationConfig`. Several workers stop at the same step.
        grace: How long to train on after a notice such as SIGTERM: seconds, or text such as "30s". The state is saved
            at once, and again before that time is over. None to stop at once, unless the notice says how much time
            remains.
        keep_current: What the restore leaves as the script set it, as in `CheckpointManager.restore`: hyperparameters
            such as `"optimizer.lr"`, or names of whole objects.
        strict_resume: True to make it an error if a step is repeated with other data, or another loss, than before the
            restart; it is a warning otherwise.
        watchdog: What happens if training makes no progress for much longer than usual: "report" writes the stacks of
            all threads into the run's directory and says so; "restart", under `holdfast run`, also starts the program
            again; "off" does nothing. Limits may follow: "report step=2min unmarked=30min first=1h".
        quiet: True to omit the lines that say where the run begins and ends; warnings and errors stay.
        **objects: The objects to save, by name. An object with the name of an option needs a `Checkpoint`:
            `resumable(directory, Checkpoint(threads=..., model=model))`.

    Raises:
        UsageError: If an argument is wrong, or no objects are given.
        UnnamedError: If an object is given without a name.
        UnsupportedValueError: If an object is a wrapper that cannot be saved, such as one of FSDP1.
        StorageError: If the directory cannot be read, or differs from that of the other workers.
        AbsentError: If other workers of the job do not join.
        ClusterError: If the job's store does not respond.
    """
    given = locals()
    named = {name: given[name] for name in resumable.__kwdefaults__ or ()}
    check_names(objects, named)
    kept = find_given(directory, checkpoint, objects)
    check_kept_objects(kept.objects)
    termination = make_termination(preemption, objects, grace=grace)
    if not isinstance(strict, bool):
        raise UsageError(f"strict must be True or False, got {strict!r}")
    check_switches(quiet=quiet, strict_resume=strict_resume)
    options = SaveOptions.pick(given, save_every=Auto(), keep=Latest(3))
    with EarlyNotices(termination) as early:
        names = check_kept(keep_current, kept.objects)
        ledger = Ledger()
        manager = CheckpointManager(directory, kept, **asdict(options) | {"sinks": (*options.sinks, ledger)})
        with explaining(manager.participant):
            loop = TrainingLoop(manager, partial(make_guard, manager, termination))
            watched = Watchdog(watchdog, manager.url, manager.worker)
            run = Run(loop, _Resumption(strict, [*names], strict_resume), watched, ledger, quiet=quiet)
            early.hand_over(loop.guard.inbox.receive)
    return run


class _Resumption(NamedTuple):
    """The options of a restore at the beginning of a run; see `resumable`."""

    strict: bool
    keep_current: list[str]
    strict_resume: bool


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

    def __init__(
        self, loop: TrainingLoop, resumption: _Resumption, watchdog: Watchdog, ledger: Ledger, *, quiet: bool
    ) -> None:
        self.manager = manager = loop.manager
        self.checkpoint = manager.checkpoint
        self._loop, self._guard = loop, loop.guard
        self._restored: Restoration | None = None
        self._resumption, self._watchdog, self._ledger = resumption, watchdog, ledger
        self._announcements = Announcements(manager.url, manager.worker, quiet=quiet)
        self.completes_step: Callable[[], bool] = lambda: True
        self._total = 0  # How many steps the last loop of `steps` was to have.
        self._phase = _Phase.NEW
        self._counts_own = False
        self._process = os.getpid()
        manager.lineage.restored_by = "holdfast.resumable(...)"
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

    def warn(self, text: str, *, is_error: bool = False) -> None:
        """Sends a warning to the log and the sinks, with the number of the step."""
        self._loop.warn(text, is_error=is_error)

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
        self._watchdog.begin(step, is_restored=self._restored is not None)
        self._loop.count.join(self.manager)
        self._guard.pause(step)
        self._loop.begin(_ADVICE, self._warn_uncounted, self.__exit__)
        keeps_current, strict = bool(self._resumption.keep_current), self._resumption.strict_resume
        self._loop.begin_witness(self._restored, self._announcements.say, keeps_current=keeps_current, strict=strict)
        self._announcements.begin(self.manager, self._restored, step)
        self._phase, self.manager.lineage.find_steps = _Phase.ENTERED, lambda: (step, self._loop.count.done)
        self._ledger.begin(self.manager)
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
            self._guard.pass_end(step)
            self._ledger.end()
            self.manager.__exit__(None, None, None)
            self._announcements.end(self.manager, step, self._total)
        except Exception as error:
            self._end_badly(error)
            raise

    def _store_metrics(self) -> bool:
        """Stores all that was reported with the step that was saved last; returns True if something was."""
        self._loop.count.late_metrics |= self._loop.metrics
        self._loop.metrics = {}
        return self._loop.count.store_metrics()

    def _end_badly(self, error: BaseException) -> None:
        """Ends the run after an error: the failed step may have changed some state, so only earlier saves count."""
        cause = self._guard.fail(error)
        self._ledger.end()
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
