"""`PreemptionCheckpointHandler`: lets your own training loop save and exit when its machine is preempted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from holdfast.advice.hyperparameters import check_kept
from holdfast.checkpoint import Checkpoint, objects_of
from holdfast.errors import ClosedError, UsageError
from holdfast.format.names import RUN_CALLS
from holdfast.manager import CheckpointManager
from holdfast.numbers import check_whole
from holdfast.options import check_metrics, check_notes, check_switches
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.guard import make_guard
from holdfast.restore.records import Restoration
from holdfast.state.adapters import Adapter
from holdfast.state.capture import capture_objects
from holdfast.state.data.position import step_break
from holdfast.state.registry import list_members
from holdfast.state.rng import RNG
from holdfast.tracebacks import short_traceback
from holdfast.training.announcements import Announcements
from holdfast.training.loop import StepNumbers, TrainingLoop, no_turn
from holdfast.training.step_count import StepCount

P = ParamSpec("P")
R = TypeVar("R")

_ADVICE: Final = (
    "train in `for step in handler.steps(n)`, or by handler.run(train_step), or call "
    "handler.save_checkpoint_if_preempted() at the end of each step"
)


@short_traceback
class PreemptionCheckpointHandler:
    """Runs steps; on a preemption notice it finishes the current step, saves, and exits.

        manager = holdfast.CheckpointManager("runs/gpt", holdfast.Checkpoint(model=model, optimizer=optimizer))
        with manager, holdfast.PreemptionCheckpointHandler(manager) as handler:
            while handler.total_run_calls < 10_000:
                loss = handler.run(train_step, next(batches))

    Creating it restores the newest checkpoint, unless the manager has `begin_anew`, or its objects are already live:
    the manager has restored or saved in this process, or another handler of it has run steps. An error that leaves a
    handler's block may have cut a step in half, so the next handler restores.

    A notice takes effect before the next step, or when the block is left, so anything that the loop does after a step
    belongs to that step. If the manager has `save_every`, steps are saved by that policy as well. `holdfast.resumable`
    includes this.

    Use it from one thread.

    Attributes:
        restored: The restore that took place, or None if the job starts from the beginning.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        termination_config: TerminationConfig | None = None,
        *,
        strict: bool = True,
        keep_current: str | Iterable[str] = (),
        strict_resume: bool = False,
        quiet: bool = False,
    ) -> None:
        """**Blocks** while it restores, and handles notices from then on.

        Args:
            manager: The manager that saves and restores.
            termination_config: How to notice a preemption, and how to exit.
            strict: False to restore everything that fits, if objects have changed since the save.
            keep_current: What the restore leaves as the script set it, as in `CheckpointManager.restore`:
                hyperparameters such as `"optimizer.lr"`, or names of whole objects.
            strict_resume: True to make it an error if a step is repeated with other data, or another loss, than before
                the restart; it is a warning otherwise.
            quiet: True to omit the lines that say where training begins and ends; warnings and errors stay.

        Raises:
            UsageError: If an argument is wrong, or a source of notices cannot be used here.
            MismatchError: If checkpoint and objects differ.
            NoWholeCheckpointError: If there are checkpoints, but all are damaged.
            UnsupportedValueError: If an object has state that cannot be stored.
            StorageError: If the storage fails, or the directory cannot be created or written.
        """
        self._manager = manager
        self._process = os.getpid()
        self._closed = False
        self._watch: PlaceWatch | None = None
        self._has_failed = False  # The last step of `run` has raised, so that the state may be that of half a step.
        check_switches(quiet=quiet, strict_resume=strict_resume)
        termination = TerminationConfig() if termination_config is None else termination_config
        self._loop = loop = TrainingLoop(manager, partial(make_guard, manager, termination))
        self._guard = loop.guard
        kept = check_kept(keep_current, manager.checkpoint.objects)
        self._has_save_fn = termination.save_fn is not None
        self._announcements = Announcements(manager.url, manager.worker, quiet=quiet)
        if RUN_CALLS not in objects_of(manager.checkpoint).own:
            # Where there is a count already, something may have been trained that is not saved.
            self._guard.pause(None)
        self._guard.open()
        try:
            earlier = manager.restored
            manager.wait_until_free()
            manager.lineage.restored_by = "PreemptionCheckpointHandler(...)"
            count, self.restored = _restore(manager, strict, kept)
            self._count = loop.count = count
            manager.check_ready()
            count.is_torn = False
            count.join(manager)
            loop.pause(count.done)
            if self.restored is not earlier or not manager.witness.process:
                say = self._announcements.say
                loop.begin_witness(self.restored, say, keeps_current=bool(kept), strict=strict_resume)
            if self.restored is not earlier or not count.done:
                self._announcements.begin(manager, self.restored, count.done)
        except BaseException as error:
            try:
                self._guard.fail(error)
            finally:
                self._guard.close()
            raise
        self._first_count, self._first_asked = count.done, manager.lineage.newest_asked
        loop.begin(_ADVICE, self._warn_uncounted, self.__exit__)
        manager.closing.append(self._save_last)

    @property
    def total_run_calls(self) -> int:
        """The number of complete steps, including those of earlier processes; the step number of the next save."""
        return self._count.done

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step, and counts it when it returns.

        Before the step, this saves the last complete step if a save is due, and saves and exits if the job was asked to
        stop. A batch that is taken from one of holdfast's own loaders between two steps, as an argument, is the next
        one's.

        Returns:
            The return value of `fn`.

        Raises:
            SystemExit: When the job exits; its code says whether everything is saved.
            ClosedError: If the handler is closed.
            UnsupportedValueError: Before the first step, if a saved loader does not keep its position.
            UsageError: If this is inside a step of `run` or of the loop of `steps`; or if another saved loader gave a
                batch between the first two steps, which a restart would skip.
            SaveFailedError: If saves by policy have failed.
            PeerError: If another worker failed: an exception that ends `fn` on one worker ends all of them;
                `StopIteration` does so when it leaves the block.
            ClusterError: If the workers must agree on a step to save at, and the others cannot be reached.
        """
        self._check_between_steps("run")
        self._loop.finish_step()
        if self._watch is None:
            # Before the first step: what gives batches has a place in the data that can be kept.
            for path, obj, adapter in list_members(self._manager.checkpoint.objects):
                adapter.gives_batches(obj, path)
        else:
            self._watch.begin_step()
        self._loop.pass_boundary()
        step_break.end()
        self._loop.watch.note_own_step()
        self._loop.turn, self._has_failed = lambda: self, False
        try:
            result = fn(*args, **kwargs)
        except StopIteration:
            # The end of the loop, where that catches it; the block that it leaves is ended by it as by any error.
            raise
        except BaseException as error:
            self._has_failed = True
            # The other workers learn of it at once, also where it is caught further up.
            self._loop.fail(error)
            raise
        finally:
            self._loop.turn = no_turn
        self._loop.count_to(self._count.done + 1)
        step_break.begin()
        if self._watch is None:
            self._watch = PlaceWatch(self._manager.checkpoint, self._loop.warn)
        else:
            self._watch.end_step()
        return result

    def steps(self, total: int) -> StepNumbers:
        """Returns an iterator over the numbers of the remaining steps, from `total_run_calls` up to `total`, exclusive.

        Each turn of the loop completes the step before it. Leaving with `break` completes the current step when the
        handler's block is left, and so does an error that is caught inside the block but outside the loop, so let
        errors leave the block. The caller makes the last save. The body of the loop is the step: `run` would count it a
        second time. A turn does not count if it takes no batch and a saved `ResumableDataLoader` ends its epoch there:
        the last turn of `zip(handler.steps(n), loader)` is such a turn.

        Args:
            total: How many steps the job has in total, including those of earlier processes.

        Returns:
            An iterator whose `len` is the number of remaining steps.

        Raises:
            SystemExit: When the job exits.
            UsageError: If this is inside a step of `run` or of another loop; or if a batch was taken from a saved
                loader since this call, as in `zip(loader, handler.steps(n))`.
            SaveFailedError: If saves by policy have failed.
        """
        whole = check_whole("total", total)
        begin_turn = partial(self._check_between_steps, "steps")
        return StepNumbers("handler.steps(n)", self._loop, whole, begin_turn, self._end_steps)

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts one step as complete, and saves and exits if asked to: for a loop without `run` and `steps`.

        Call it last in each step.

        Args:
            args: Passed to `save_fn`.
            kwargs: Passed to `save_fn`; without one, `metrics` and `metadata` are passed to the manager's `save`.

        Raises:
            SystemExit: When the job exits.
            ClosedError: If the handler is closed.
            UsageError: If this is inside a step of `run` or of the loop of `steps`, or metrics or metadata are invalid.
            SaveFailedError: If saves by policy have failed.
        """
        self._check_between_steps("save_checkpoint_if_preempted")
        if not self._has_save_fn:
            # Mostly they are not saved. When they are, it is too late to say that they cannot be.
            self._loop.metrics = check_metrics(kwargs.get("metrics"))
            if "loss" in self._loop.metrics:
                self._manager.witness.note_loss(self._loop.metrics["loss"])
            check_notes(None, metadata := kwargs.get("metadata"))
            self._loop.metadata = metadata
        self._loop.count_own_step(*args, **kwargs)

    def should_stop(self) -> bool:
        """Returns True if the job should exit after this step, so that long work inside a step can end early."""
        return self._guard.should_stop()

    def checkpointable(self, *, step_done: bool = True) -> AbstractContextManager[None]:
        """**Blocks** while it checks all arrays. Use it with `with`, around long work that changes no state.

        As in `Run.checkpointable`, the state may be saved, and the process may exit, in the middle of the block.

        Args:
            step_done: True if the step in progress in a loop of `steps` counts as complete; False if none of it has
                been done yet (while waiting for data, for example).

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
        """
        if step_done:
            self._loop.finish_step()
        return self._loop.checkpointable(self._count.done)

    def close(self) -> None:
        """**Blocks** until the save in progress has ended, and the save that is due after the last step of `run`.

        Acts on a notice that came by then; a second call does nothing. Close the handler before the manager.

        Raises:
            SystemExit: When the job exits.
            SaveFailedError: If that save failed.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._note_end()
        try:
            self._loop.finish_step()
            self._loop.begin_steps()
            if not self._guard.leaving:
                self._save_last()
                self._save_anew()
                # What comes while the last save is written is still received here; afterwards a signal would kill.
                self._guard.wait_saved()
                self._guard.pass_last(self._count.done, is_over=True)
                self._announcements.end(self._manager, self._count.done)
        finally:
            self._end()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<PreemptionCheckpointHandler: {self._count.done} steps run{state}, {self._manager!r}>"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._loop.find_exit(error, trace) is None:
            self.close()
        elif os.getpid() == self._process:
            self._end_badly(error)

    def _end_badly(self, error: BaseException) -> None:
        """Ends after an error: the failed step may have changed part of the state, so only earlier saves count."""
        self._closed = self._count.is_torn = True
        if not isinstance(error, Exception):
            self._note_end()
        try:
            self._loop.fail(error)
        finally:
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "the handler is closed, so it would not notice a preemption", hint="Create a new handler."
            )

    def _check_between_steps(self, name: str, numbers: StepNumbers | None = None) -> None:
        """Checks that no step is running, except for the turn of that loop."""
        self._check_open()
        if self._loop.turn() not in (None, numbers):
            hint = "Each turn of `for step in handler.steps(...)` is one step, and so is each call of handler.run."
            raise UsageError(f"{name} would count a step inside of another step", hint=hint)

    def _end_steps(self) -> None:
        self._loop.save_if_due()
        self._save_anew()

    def _save_last(self) -> None:
        """Makes the save that was due after the last step of `run`: no further call of `run` makes it.

        The manager asks for it if it is closed before the handler.
        """
        if not self._loop.is_in_step and self._loop.turn() is None and not self._has_failed:
            with suppress(ClosedError):  # The manager was closed before, by an error.
                self._loop.save_if_due()

    def _save_anew(self) -> None:
        """Saves again: a save made in the middle of the last step does not contain what came after it."""
        if self._guard.provisional == self._count.done and not self._loop.is_in_step:
            self._loop.save_last()

    def _warn_uncounted(self, text: str, *, is_error: bool = False) -> None:
        if self._count.done == self._first_count:  # Another handler may count.
            self._loop.warn(text, is_error=is_error)

    def _note_end(self) -> None:
        """Reports steps that were trained but not counted, or counted but not trained."""
        self._loop.watch.warn_if_idle()
        is_lost = self._manager.lineage.newest_asked == self._first_asked
        consequence = f"notices were ignored{', and nothing was saved' if is_lost else ''}"
        if text := self._loop.watch.describe(consequence):
            self._warn_uncounted(text, is_error=is_lost)

    def _end(self) -> None:
        if self._save_last in self._manager.closing:
            self._manager.closing.remove(self._save_last)
        if self._watch is not None:
            step_break.close()
        self._loop.end()


class RunCalls(StepCount):
    """The number of steps that were run, over all restarts; it is saved with everything else.

    Attributes:
        is_loaded: True if the last restore found a count.
        is_torn: True if an error ended a handler's block: the state may be that of half a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = self.is_torn = False

    def state_dict(self) -> dict[str, int]:
        """Returns the count."""
        return {"count": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the count of a checkpoint."""
        self.done = int(state["count"])
        self.is_loaded = True


def _restore(
    manager: CheckpointManager, strict: bool, keep_current: Iterable[str]
) -> tuple[RunCalls, Restoration | None]:
    """Adds the count to the saved objects, and restores unless the manager's objects are already live."""
    own, earlier = objects_of(manager.checkpoint).own, manager.restored
    known = own.get(RUN_CALLS)
    if known is not None and not known.is_torn and (earlier is not None or known.counts_for(manager)):
        # Another handler of the same checkpoint has seen to it.
        return known, earlier
    calls = own.setdefault(RUN_CALLS, RunCalls())
    calls.is_loaded = False
    if not calls.is_torn and (earlier is not None or manager.lineage.newest_asked >= 0):
        # What is live was trained or restored without a handler.
        step = manager.lineage.newest_asked
        if earlier is not None and step <= earlier.step:
            step = earlier.step
            manager.restore(step, only=RUN_CALLS, strict=False)
        if not calls.is_loaded:
            calls.done = calls.done or step
        return calls, earlier
    if manager.begin_anew:
        return calls, None
    if url := objects_of(manager.checkpoint).backup_url:
        raise UsageError(
            f"the WorkerTrainingState of {url} has already restored these objects; the handler would overwrite "
            f"them with the newest step of {manager.url}",
            hint="Create the PreemptionCheckpointHandler before you call restore() of the WorkerTrainingState.",
        )
    restoration = manager.restore(strict=strict, keep_current=keep_current)
    if restoration is not None and not calls.is_loaded:
        # The run was begun without a handler: its steps are what was counted.
        calls.done = restoration.step
    return calls, restoration


class PlaceWatch:
    """Finds loops that take batches, or draw random numbers, between the steps of `run`, where saves cannot see it.

    A step is saved before the next one begins, so batches that the arguments of the next step took by then count as
    trained. holdfast's own loaders know which of their batches were taken since a step ended; others do not, so those
    are watched until they move for the first time.
    """

    def __init__(self, checkpoint: Checkpoint, warn: Callable[[str], object]) -> None:
        """Starts watching after the first step."""
        members = list_members(checkpoint.objects)
        self._warn = warn
        self._loaders = {
            path: (obj, adapter)
            for path, obj, adapter in members
            if type(adapter).gives_batches is not Adapter.gives_batches
        }
        self._generators = [path for path, obj, _ in members if isinstance(obj, RNG)]
        self._drawn = self._read_generators()
        self._is_first = True
        self._ended = self._read_places()
        self._begun: dict[str, Any] = {}

    def begin_step(self) -> None:
        """Checks what has moved since the last step ended.

        Raises:
            UsageError: If a loader moved between the first two steps; later that is a warning.
        """
        self._begun = self._read_places()
        for path, place in self._ended.items():
            if self._begun.get(path, place) != place:
                self._say_moved(path)
        if self._is_first and self._read_generators() != self._drawn:
            self._warn(
                f"random numbers were drawn between two steps of handler.run, and {self._generators[0]} saves "
                "their generators. If the arguments of run draw them, as in handler.run(train_step, "
                "get_batch()), a restart skips a batch. Draw them inside the step: handler.run(lambda: "
                "train_step(get_batch()))"
            )
        self._is_first = False

    def end_step(self) -> None:
        """Notes the positions of the loaders; those that moved within the step are no longer watched."""
        places = self._read_places()
        for path, place in places.items():
            if self._begun.get(path) != place:
                del self._loaders[path]
        self._ended = {path: place for path, place in places.items() if path in self._loaders}

    def _say_moved(self, path: str) -> None:
        text = (
            f"{path} gave a batch between two steps of handler.run: a save of the step before would be one batch "
            "ahead, and a restart would skip that batch"
        )
        hint = (
            "Take the batch inside the step, handler.run(lambda: train_step(next(batches))), or call "
            "handler.save_checkpoint_if_preempted() at the end of each step instead of handler.run. A batch of "
            "holdfast.ResumableDataLoader may be taken anywhere."
        )
        if self._is_first:
            raise UsageError(text, hint=hint)
        # It may as well be a loader for evaluation: that does not end a job which has trained for long.
        self._warn(f"{text}. {hint}")
        del self._loaders[path]

    def _read_places(self) -> dict[str, Any]:
        return {
            path: capture_objects({"loader": obj}).objects
            for path, (obj, adapter) in self._loaders.items()
            if adapter.gives_batches(obj, path)
        }

    def _read_generators(self) -> Any:
        return capture_objects({"rng": RNG()}).objects if self._generators else None
