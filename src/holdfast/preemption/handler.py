"""`PreemptionCheckpointHandler`: a training loop of one's own that saves and leaves when its machine is taken away."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from holdfast.checkpoint import own_objects
from holdfast.errors import ClosedError, SaveFailedError, StepExistsError, UsageError
from holdfast.events import Warned
from holdfast.format.names import RUN_CALLS
from holdfast.numbers import check_whole
from holdfast.preemption.announcements import Announcements
from holdfast.preemption.checkpointable import Checkpointable
from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.final_save import Tolerance
from holdfast.preemption.guard import make_guard
from holdfast.preemption.run_calls import Manager, PlaceWatch, StepNumbers, check_loaders, restore_calls
from holdfast.save.arguments import check_metrics, check_notes, check_switches
from holdfast.save.drain import end_interrupted, end_process
from holdfast.save.handle import SaveHandle
from holdfast.state.data.position import step_break
from holdfast.state.hyperparameters import check_kept
from holdfast.state.oversights import TrainingWatch, describe_resumption
from holdfast.tracebacks import short_traceback

P = ParamSpec("P")
R = TypeVar("R")

_ADVICE: Final = (
    "train in `for step in handler.steps(n)`, or by handler.run(train_step), or call "
    "handler.save_checkpoint_if_preempted() at the end of each step"
)


@short_traceback
class PreemptionCheckpointHandler:
    """Runs steps; when the job is to be taken away it finishes the one in progress, saves, and leaves.

        manager = hf.CheckpointManager("runs/gpt", hf.Checkpoint(model=model, optimizer=optimizer))
        with manager, hf.PreemptionCheckpointHandler(manager) as handler:
            while handler.total_run_calls < 10_000:
                loss = handler.run(train_step, next(batches))

    Making it restores the newest checkpoint, unless the manager begins anew, or what it keeps is live already: it has
    restored or saved in this process, or another handler of it has run steps. An error that leaves a handler's block
    may leave half a step: the next handler restores.

    A notice is acted on before the next step is run, or when the block is left, so that what the loop does after a step
    belongs to that step. With a `save_every` of the manager's, steps are saved by that policy as well. `hf.resumable`
    has all of this built in.

    Use it from one thread.

    Attributes:
        restored: What was restored, or None if the job began from nothing.
    """

    def __init__(
        self,
        manager: Manager,
        termination_config: TerminationConfig | None = None,
        *,
        strict: bool = True,
        keep_current: str | Iterable[str] = (),
        quiet: bool = False,
    ) -> None:
        """**Blocks** while it restores, and listens for notices from then on.

        Args:
            manager: The manager that saves and restores.
            termination_config: How to hear a notice, and how to leave.
            strict: False to take from the checkpoint what fits, if objects have changed since.
            keep_current: What the restore leaves as the script has it, as `CheckpointManager.restore` says:
                hyperparameters such as `"optimizer.lr"`, or names of whole objects.
            quiet: True to leave out the lines that say where training begins and ends; warnings and errors stay.

        Raises:
            UsageError: If an argument is wrong, or a source of notices cannot be used here.
            MismatchError: If checkpoint and objects differ.
            NoWholeCheckpointError: If checkpoints are there but none is whole.
            UnsupportedValueError: If an object has state that cannot be stored.
            StorageError: If the place fails, or the directory cannot be made or written.
        """
        self._manager = manager
        self._process = os.getpid()
        self._closed = False
        self._save_options: dict[str, Any] = {}
        self._watch: PlaceWatch | None = None
        self._has_failed = False  # The last step of `run` has raised, so that the state may be that of half a step.
        check_switches(quiet=quiet)
        termination = TerminationConfig() if termination_config is None else termination_config
        self._guard = make_guard(manager, termination, self._keep)
        kept = check_kept(keep_current, manager.checkpoint.objects)
        self._has_save_fn = termination.save_fn is not None
        self._tolerance = Tolerance(self._guard.inbox)
        self._announcements = Announcements(manager.url, manager.worker, quiet=quiet)
        if RUN_CALLS not in own_objects(manager.checkpoint):
            # Where there is a count already, something may have been trained that is not saved.
            self._guard.pause(None)
        self._guard.open()
        try:
            earlier = manager.restored
            self._calls, self.restored = restore_calls(manager, strict, kept)
            manager.check_ready()
            self._calls.is_torn = False
            self._calls.join(manager)
            if not self._guard.is_beside_training:
                self._rest()
            if self.restored is not earlier or not self._calls.count:
                self._announcements.begin(manager, self.restored, self._calls.count)
        except BaseException as error:
            try:
                self._guard.fail(error)
            finally:
                self._guard.close()
            raise
        self._first_count, self._first_asked = self._calls.count, manager.newest_asked
        self._training = TrainingWatch(manager.checkpoint.objects, self._warn_uncounted, _ADVICE, self._warn)
        if self._calls.count and self.restored is not earlier:
            self._training.resumption = describe_resumption(
                self._calls.count, "handler.total_run_calls", "handler.steps(n)"
            )
        atexit.register(self._close_at_exit)
        manager.closing.append(self._save_last)

    @property
    def total_run_calls(self) -> int:
        """How many steps are complete, those of earlier processes included; the step number of the next save."""
        self._training.resumption = ""
        return self._calls.count

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step, and counts it when it returns.

        Before it, saves the last complete step if that is due, and saves and leaves if the job is to be taken away. A
        batch of holdfast's own loaders that is taken between two steps, as an argument, counts for the next one.

        Returns:
            What `fn` returned.

        Raises:
            SystemExit: When the job leaves; its code says whether everything is saved.
            ClosedError: If the handler is closed.
            UnsupportedValueError: If a loader that is kept does not keep its place, before the first step.
            UsageError: If this is within a step of `run` or of the loop of `steps`; or if another loader that is kept
                gave a batch between the first two steps, which a restart would leave out.
            SaveFailedError: If saves by policy have failed.
            PeerError: If another worker has failed: what ends `fn` on one of them, ends all;
                `StopIteration` does so where it leaves the block.
            ClusterError: If it has to be agreed on a step to save at, and the others cannot be reached.
        """
        self._check_between_steps("run")
        self._finish_step()
        if self._watch is None:
            check_loaders(self._manager.checkpoint)
        else:
            self._watch.begin_step()
        self._pass_boundary()
        step_break.end()
        self._training.note_own_step()
        self._calls.in_step, self._has_failed = True, False
        try:
            result = fn(*args, **kwargs)
        except StopIteration:
            # The end of the loop, where that catches it; the block that it leaves is ended by it as by any error.
            raise
        except BaseException as error:
            self._has_failed = True
            # Of several workers the others hear of it at once, also where it is caught further up.
            cause = self._guard.fail(error)
            if cause is not None:
                raise cause from error
            raise
        finally:
            self._calls.in_step = False
        self._calls.count += 1
        step_break.begin()
        if self._watch is None:
            self._watch = PlaceWatch(self._manager.checkpoint, self._warn)
        else:
            self._watch.end_step()
        return result

    def steps(self, total: int) -> StepNumbers:
        """The numbers of the steps that are still to be run, from `total_run_calls` to `total`, exclusive.

        At each turn of the loop the step before counts as complete. Leaving with `break` counts the current one as
        complete when the block of the handler is left, and so does an error that is caught inside the block but outside
        the loop; let errors leave the block. A last save is up to the caller. What is done in the loop is the step:
        `run` would count it once more. A turn that takes no batch, and finds the end of an epoch of a
        `ResumableDataLoader` that is kept, does not count: the last turn of `zip(handler.steps(n), loader)` is one.

        Args:
            total: How many steps the job has in all, those of earlier processes included.

        Returns:
            An iterator whose `len` is how many are left.

        Raises:
            SystemExit: When the job leaves.
            UsageError: If this is within a step of `run` or of another loop; or if a batch was taken since this call
                from a loader that is kept, as in `zip(loader, handler.steps(n))`.
            SaveFailedError: If saves by policy have failed.
        """
        whole = check_whole("total", total)
        numbers = self._steps(whole)
        count_left = lambda: max(whole - self._count_done(), 0)  # noqa: E731
        return StepNumbers("handler.steps(n)", self._manager.checkpoint, lambda _: next(numbers), count_left)

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts one step as complete, and saves and leaves if it is time to: for a loop without `run` and `steps`.

        Call it as the last act of each step.

        Args:
            args: For `save_fn`.
            kwargs: For `save_fn`; without one, `metrics` and `metadata` for the manager's `save`.

        Raises:
            SystemExit: When the job leaves.
            ClosedError: If the handler is closed.
            UsageError: If this is within a step of `run` or of the loop of `steps`, or metrics or metadata cannot be
                saved.
            SaveFailedError: If saves by policy have failed.
        """
        self._check_between_steps("save_checkpoint_if_preempted")
        if not self._has_save_fn:
            # Mostly they are not saved. When they are, it is too late to say that they cannot be.
            check_metrics(kwargs.get("metrics"))
            check_notes(None, kwargs.get("metadata"))
        self._finish_step()
        step_break.end()
        self._training.note_own_step()
        self._calls.count += 1
        self._guard.is_tentative = True
        self._save_options = kwargs
        self._pass_boundary(*args, **kwargs)

    def should_stop(self) -> bool:
        """Whether the job is to leave as soon as this step ends: for long work of one's own, to end it early."""
        return self._guard.should_stop()

    def checkpointable(self, *, step_done: bool = True) -> Checkpointable:
        """**Blocks** as long as a look at all arrays takes. For `with`, around what takes long and changes no state.

        Such is evaluation between two steps, or a wait for data. If the job is to leave while the block runs, the
        state with which it was entered is saved, and the process ends in the middle of the block. Nothing of it is
        unwound: a restart goes on behind that step, and what would have come after the block is not done. Within the
        block nothing is saved by hand.

        Args:
            step_done: Whether the step in progress in a loop of `steps` counts as complete, as in evaluation at its
                end; False if nothing of it has been done yet, as while data is awaited.

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
        """
        if step_done:
            self._finish_step()
        step = self._calls.count
        mark = None if self._guard.in_block or self._is_safe(step) else self._manager.mark()
        return Checkpointable(self._guard, step, mark=mark, saved=self._calls.last.find(step), note=self._note_behind)

    def close(self) -> None:
        """**Blocks** until the save in flight has ended, and the one that is due after the last step of `run`.

        Acts on a notice that came by then; harmless twice. Close it before the manager.

        Raises:
            SystemExit: When the job leaves.
            SaveFailedError: If that save has failed.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._note_end()
        try:
            self._finish_step()
            self._begin_steps()
            if not self._guard.leaving:
                self._save_last()
                self._save_anew()
                # What comes while the last save is written is heard here still; afterwards a signal would kill.
                self._guard.wait_saved()
                # Amid a step of another handler's loop the state is that of no step; that one hears of it too.
                if not self._calls.mid_step:
                    self._guard.pass_last(self._calls.count, is_over=True)
                    self._announcements.end(self._manager, self._calls.count)
        finally:
            self._end()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<PreemptionCheckpointHandler: {self._calls.count} steps run{state}, {self._manager!r}>"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif os.getpid() == self._process:
            self._end_badly(error)

    def _end_badly(self, error: BaseException) -> None:
        """The step that failed may have changed half of the state: only what was saved before counts."""
        self._closed = self._calls.is_torn = True
        if not isinstance(error, Exception):
            self._note_end()
        try:
            cause = self._guard.fail(error)
        finally:
            self._end()
        if cause is not None:
            raise cause from error

    def _steps(self, total: int) -> Iterator[int]:
        self._check_between_steps("steps")
        while True:
            self._finish_step()
            if self._calls.count >= total:
                self._begin_steps()
                self._guard.pass_last(self._calls.count)
                self._save_if_due()
                self._save_anew()
                return
            self._pass_boundary()
            step_break.end()
            self._training.begin_step()
            self._calls.mid_step.add(self)
            self._calls.in_step = True
            try:
                yield self._calls.count
            finally:
                self._calls.in_step = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the handler is closed: a step would be run, and no notice heard", hint="Make a new one.")

    def _check_between_steps(self, name: str) -> None:
        self._check_open()
        if self._calls.in_step:
            hint = (
                "A turn of `for step in handler.steps(...)` is one step, and so is a function that handler.run calls."
            )
            raise UsageError(f"{name} would count a step in the midst of another one", hint=hint)

    def _finish_step(self) -> None:
        self._calls.count = self._count_done()
        self._calls.mid_step.discard(self)

    def _count_done(self) -> int:
        """How many steps are complete if the one in progress in a loop of `steps` counts."""
        return self._calls.count + (self in self._calls.mid_step and not self._training.is_step_empty())

    def _rest(self) -> None:
        """No step has been begun yet."""
        step = self._calls.count
        mark = None if self._is_safe(step) else self._manager.mark()
        self._guard.pause(step, mark=mark, saved=self._calls.last.find(step))

    def _begin_steps(self) -> None:
        saved = self._guard.begin_steps()
        if saved is not None:
            self._note_behind(saved)

    def _pass_boundary(self, *args: Any, **kwargs: Any) -> None:
        self._check_open()
        self._begin_steps()
        self._guard.pass_boundary(self._calls.count, *args, **kwargs)
        self._save_if_due()

    def _save_if_due(self) -> None:
        with self._tolerance:
            try:
                handle = self._manager.save_if_due(self._calls.count)
            except SaveFailedError as failure:
                if failure.next_save is not None:
                    self._note_saved(failure.next_save)
                raise
            if handle is not None:
                self._note_saved(handle)

    def _save_last(self) -> None:
        """What was due after the last step of `run`: no further call of `run` saves it.

        The manager asks for it when it is closed before the handler.
        """
        if not self._calls.mid_step and not self._calls.in_step and not self._has_failed:
            with suppress(ClosedError):  # The manager was closed before, by an error.
                self._save_if_due()

    def _keep(self, step: int) -> SaveHandle | None:
        """Begins the save of a step, unless it is saved or under way, for the guard; it looks at what comes of it."""
        if self._is_safe(step):
            return self._calls.last.find(step)
        is_there = self._calls.last.is_there(step)
        known = {name: self._save_options[name] for name in ("metrics", "metadata") if name in self._save_options}
        try:
            handle = self._manager.save(step, replace=is_there, **known)
        except StepExistsError:
            return None  # The user has saved it, and it is committed.
        except SaveFailedError as failure:
            if failure.next_save is None:
                raise
            handle = failure.next_save
        except UsageError:
            newest = self._manager.latest_step()
            if newest is None or newest < step:
                raise
            # Somebody saves under larger numbers. A number of ours is no reason to lose the state.
            handle = self._manager.save(newest + 1, **known)
        self._note_saved(handle, step)
        return handle

    def _save_anew(self) -> None:
        """What was saved in the midst of the last step does not hold what came after that."""
        if self._guard.provisional == self._calls.count and not self._calls.mid_step:
            with self._tolerance:
                self._keep(self._calls.count)

    def _is_safe(self, step: int) -> bool:
        return self._calls.is_safe(step, self._guard.provisional)

    def _note_behind(self, saved: SaveHandle) -> None:
        self._calls.last.note(saved.step, saved)

    def _note_saved(self, saved: SaveHandle, step: int | None = None) -> None:
        """A save was begun between steps; of which step, if another number than that was free for it."""
        if not saved.skipped:
            self._calls.last.note(saved.step if step is None else step, saved)
            self._guard.provisional = None

    def _warn(self, text: str) -> None:
        self._manager.emit(Warned(text=text, step=self._calls.count))

    def _warn_uncounted(self, text: str, *, is_error: bool = False) -> None:
        if self._calls.count == self._first_count:  # Another handler may count.
            self._manager.emit(Warned(text=text, step=self._calls.count, is_error=is_error))

    def _note_end(self) -> None:
        """Says what was trained and not counted, or counted and not trained."""
        self._training.warn_if_idle()
        is_lost = self._manager.newest_asked == self._first_asked
        consequence = f"no notice was acted on{', and nothing of it is saved' if is_lost else ''}"
        if text := self._training.describe(consequence):
            self._warn_uncounted(text, is_error=is_lost)

    def _end(self) -> None:
        if self._save_last in self._manager.closing:
            self._manager.closing.remove(self._save_last)
        self._training.end()
        if self._watch is not None:
            step_break.close()
        self._calls.mid_step.discard(self)
        if self._guard.inbox.gave_up:
            self._manager.abandon()  # A second Ctrl-C leaves at once: nobody waits for the save in flight any more.
        self._guard.close()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """For a handler that was not closed: a notice after its last step must not be lost."""
        # What the interpreter has printed as the program's end, before it called this.
        error = getattr(sys, "last_value", None)
        try:
            if error is not None and not self._closed and os.getpid() == self._process:
                self._end_badly(error)
            else:
                self.close()
        except KeyboardInterrupt:
            end_interrupted(f"step {self._calls.count} may not be saved")
        except SystemExit as leaving:
            end_process(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
