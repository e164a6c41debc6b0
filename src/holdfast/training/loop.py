"""A training loop: counts its steps, saves them when a save is due, and lets the job exit between two of them.

`Run`, `PreemptionCheckpointHandler` and `WorkerTrainingState` use this loop, each with its own arguments and messages.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.advice.watch import TakenBatches, TrainingWatch, count_taken
from holdfast.errors import HoldfastError, SaveFailedError, StepExistsError, UsageError
from holdfast.events import Warned
from holdfast.policies import find_modes
from holdfast.preemption.guard import Guard
from holdfast.preemption.sources.protocol import Demand
from holdfast.process.exit import EXIT_SAVE_FAILED, LeavingExit, end_interrupted, end_process
from holdfast.process.pulse import PULSE, evaluating
from holdfast.process.terminal import say
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark
from holdfast.state.data.position import step_break
from holdfast.supervise.board import BETWEEN
from holdfast.tracebacks import find_inside, short_traceback
from holdfast.training.step_count import StepCount

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager
    from holdfast.restore.records import Restoration


def no_turn() -> None:
    """Returns None: no step runs now."""


def _stay(*_: object) -> None:
    """Does nothing: the program is in no block."""


class _EpochEnd(NamedTuple):
    """The state after the last step of an epoch.

    Attributes:
        step: How many steps were complete.
        batches: How many batches were taken in this process.
        mark: The state.
    """

    step: int
    batches: int
    mark: Mark


class TrainingLoop:
    """The work between two steps. It belongs to the training thread.

    Attributes:
        manager: Saves the steps.
        count: How many steps are complete.
        guard: Handles notices, and exits.
        taken: The batches that are taken from the saved samplers.
        watch: Detects training that is not counted.
        metrics: Metrics for the next save.
        metadata: Other data to store with it.
        is_stopped: True if a loop of `steps` ends before all of them are done.
        is_in_step: True inside a step of a loop of `steps` that does not count yet.
        turn: Returns what runs a step now, such as a loop of `steps`; None if nothing does, or it was dropped.
        thread: The training thread.
    """

    def __init__(
        self, manager: CheckpointManager, make_guard: Callable[[Callable[[int], SaveHandle | None]], Guard]
    ) -> None:
        """Prepares; `make_guard` is passed what begins the save of a step, for the guard."""
        self.manager = manager
        self.count = StepCount()
        self.guard = make_guard(self._save_once)
        self.taken = TakenBatches({})
        self.watch = TrainingWatch({}, self.taken, self.warn, "", self.warn)
        self.metrics: dict[str, Any] = {}
        self.metadata: Mapping[str, Any] | None = None
        self.is_stopped = self.is_in_step = self._is_in_block = False
        self.turn: Callable[[], object] = no_turn
        self.thread = threading.get_ident()
        # Leaves the block of the program, as its `__exit__` does.
        self._leave: Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], object] = _stay
        self._saved_notes: tuple[Mapping[str, Any], Mapping[str, Any] | None] = ({}, None)
        self._epoch_end: _EpochEnd | None = None

    # The beginning and the end of a training.

    def begin(
        self,
        advice: str,
        warn: Callable[..., object],
        leave: Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], object],
    ) -> None:
        """Called when everything is restored: from here on batches are counted, and what is forgotten is found.

        Args:
            advice: What the program is to call, and when, if it counts no step.
            warn: Called with a warning that no step is counted.
            leave: Leaves the block of the program, if the program ends within it.
        """
        objects = self.manager.checkpoint.objects
        self.thread = threading.get_ident()
        self.watch.end()
        self.taken = TakenBatches(objects, self.taken.data)
        self.taken.data.warn = self.warn
        self.watch = TrainingWatch(objects, self.taken, warn, advice, self.warn)
        self._leave = leave
        atexit.register(self._leave_at_exit)

    def begin_witness(
        self, restored: Restoration | None, say: Callable[[str], object], *, keeps_current: bool, strict: bool
    ) -> None:
        """Called after a restore, or without one: begins to compare repeated steps.

        Args:
            restored: The restore; None if there was none.
            say: Reports the result.
            keeps_current: True if the restore has kept values of the script.
            strict: True to make a difference an error.
        """
        is_same = restored is None or not (restored.differences or keeps_current)
        base = None if restored is None else self.count.done
        objects = self.manager.checkpoint.objects
        saved_at = 0.0 if restored is None else restored.manifest.committed_at_unix_seconds
        self.manager.witness.begin(objects, base, say, saved_at=saved_at, same_loss=is_same, strict=strict)

    def fail(self, error: BaseException) -> None:
        """**Blocks** for a moment. Called when an error ends training; raises the one from which it results, if any."""
        cause = self.guard.fail(error)
        if cause is not None:
            raise cause from error

    def end(self) -> None:
        """Called when the block is left: watches no more, and waits for no save that a person has given up."""
        atexit.unregister(self._leave_at_exit)
        self._leave = _stay
        self.watch.end()
        self.taken.data.close()
        self.is_in_step = False
        if self.guard.inbox.gave_up:
            # A second Ctrl-C exits at once, also out of the waits before.
            self.manager.abandon()
        self.guard.close()

    def _leave_at_exit(self) -> None:
        """**Blocks.** Leaves the block when the program ends within it; called by the interpreter, after all else.

        A generator that was not closed may still be in it, for example. If another thread is in the block, nothing is
        saved: it may be in the midst of a step.
        """
        if self.thread != threading.get_ident() and self.thread in sys._current_frames():
            return self.warn_of_loss("while another thread trained")
        error: BaseException | None = getattr(sys, "last_value", None)
        try:
            self._leave(None if error is None else type(error), error, None)
        except KeyboardInterrupt:
            end_interrupted(f"step {self.count.done} may not be saved")
        except SystemExit as leaving:
            end_process(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
        except HoldfastError as failure:
            say(f"holdfast: {type(failure).__name__}: {failure}")
            end_process(EXIT_SAVE_FAILED)

    def warn(self, text: str, *, is_error: bool = False) -> None:
        """Sends a warning to the log and the sinks."""
        self.manager.emit(Warned(text=text, step=self.count.done, is_error=is_error))

    def rewind(self, step: int) -> None:
        """Called when training has gone back to a step, which was restored."""
        self.count.done, self.metrics, self.metadata = step, {}, None
        self.count.drawn = {one: taken for one, taken in self.count.drawn.items() if one <= step}
        self.count.measured.clear()
        self.count.join(self.manager)
        self.is_in_step, self._epoch_end, self._saved_notes = False, None, ({}, None)

    # Counts steps.

    def count_with_open_step(self) -> int:
        """Returns how many steps are complete if the one in progress in a loop of `steps` counts."""
        return self.count.done + (self.is_in_step and not self.taken.is_step_empty())

    def finish_step(self) -> None:
        """Counts the step in progress as complete."""
        done = self.count_with_open_step()
        self.is_in_step = False
        self.count_to(done)

    def count_to(self, done: int) -> None:
        """Sets the number of complete steps.

        Raises:
            ResumeDiffersError: If a step differs from what it repeats, and `strict_resume` makes that an error.
        """
        if done > self.count.done:
            PULSE.enter(BETWEEN, done, completed=done - self.count.done)
            self.count.done = done
            self.taken.data.note_step()
            self.manager.witness.note_step(done)

    def count_own_step(self, *arguments: Any, **options: Any) -> None:
        """Counts a step of the program's own loop; the arguments are those of `pass_boundary`."""
        self.finish_step()  # A loop of `steps` may have been left in the middle of one, by `break` say.
        step_break.end()
        self.watch.note_own_step()
        self.taken.data.note_own_step()
        self.count_to(self.count.done + 1)
        self.guard.is_tentative = True
        self.pass_boundary(*arguments, **options)
        self._mark_epoch_end()

    def begin_steps(self) -> None:
        """Called when the loop continues after a pause."""
        saved = self.guard.begin_steps()
        if saved is not None and saved is not self.count.saved:
            self.count.note(saved.step, saved)

    def pass_boundary(self, *arguments: Any, **options: Any) -> None:
        """Saves and exits if it is time to; the arguments are for `save_fn`.

        Raises:
            SystemExit: When the job exits.
            SaveFailedError: If saves by policy have failed, and no last save is to come.
            PeerError: If another worker has failed.
            ClusterError: If the workers must agree on a step to save at, and the others cannot be reached.
        """
        self.begin_steps()
        self.guard.pass_boundary(self.count.done, *arguments, **options)
        self.save_if_due()

    def find_exit(self, error: BaseException | None, trace: TracebackType | None) -> str | None:
        """Returns None if a block ends as by `return`; else how an exit came, or an empty string for other errors.

        An exit of the program's own code ends the block as `return` does, unless its code says that the program has
        failed, and so does the end of a generator.
        """
        if error is None:
            return None
        if self.guard.has_left or isinstance(error, LeavingExit):
            return ""
        if type(error).__name__ == "CancelledError":  # At any `await`, which may be in the midst of a step.
            return "as its task was canceled"
        if not isinstance(error, SystemExit | GeneratorExit):
            return ""
        return find_inside(error, trace, self.guard.config.exit_code) or None

    def warn_of_loss(self, place: str | None) -> None:
        """Says which steps are lost by an exit; nothing if that was not raised by the program, or no step is lost."""
        with suppress(HoldfastError):
            newest = (place and self.manager.latest_step()) or 0
            if place and (steps := self.count.done - newest) > 0:
                lost = f"the {steps} steps since step {newest} are" if steps > 1 else f"step {self.count.done} is"
                self.warn(
                    f"the program exited {place}, and nothing was saved: {lost} lost, and a restart trains from step "
                    f"{newest}",
                    is_error=True,
                )

    @contextmanager
    def checkpointable(self, step: int) -> Iterator[None]:
        """A block in which the process may be saved and exit at any moment, because it changes no saved object.

        Args:
            step: How many steps are complete.
        """
        if self._is_in_block:
            # Within another block that one's promise holds, for all that comes until its end.
            yield
            return
        self.pause(step)
        self._is_in_block = True
        try:
            with evaluating():
                yield
        finally:
            self._is_in_block = False
            self.begin_steps()

    def pause(self, step: int) -> None:
        """Pauses the loop, so that another thread may save that many complete steps from a mark."""
        self.taken.data.keeps_epoch = True  # What follows is done again after a restart.
        try:
            mark = None if self.is_safe(step) else self._find_mark(step) or self.manager.mark(self.metrics)
        finally:
            self.taken.data.keeps_epoch = False
        self.guard.pause(step, mark=mark, saved=self.count.find(step))

    def _mark_epoch_end(self) -> None:
        """Marks the state if the step was the last of an epoch.

        A block of `checkpointable` after the epoch saves this state. So a restart does all again that follows the step,
        as it does if the step itself was saved. The state of the block would begin with the next epoch.
        """
        self._epoch_end = None
        batches = self.taken.find_epoch_end()
        if batches is not None and not self.is_safe(self.count.done):
            with suppress(HoldfastError):  # A save raises it.
                self._epoch_end = _EpochEnd(self.count.done, batches, self.manager.mark(self.metrics))

    def _find_mark(self, step: int) -> Mark | None:
        """Returns the state at the end of the epoch, unless training goes on, or an array was changed since."""
        end = self._epoch_end
        if end is None or end.step != step or self.taken.count()[0] != end.batches or end.mark.changed:
            return None
        return end.mark

    # Saves them.

    def is_safe(self, step: int) -> bool:
        """Returns True if the step is committed or in progress as a whole, or nothing was trained."""
        # A save that was made in a pause in the midst of a step does not hold all of it.
        is_whole = self.count.saved is None or step != self.guard.provisional
        return step == 0 or (self.count.is_begun(step) and is_whole)

    def save_if_due(self) -> None:
        """Saves by the manager's policy. After a notice, failures are only events: the last save decides.

        Raises:
            SaveFailedError: If saves have failed, and no last save is to come.
        """
        step, metrics, metadata = self.count.done, self.metrics, self.metadata
        self.count.store_metrics()
        try:
            self._note_begun(
                step, self.manager.save_if_due(step, metrics=metrics, metadata=metadata), metrics, metadata
            )
        except SaveFailedError as failure:
            # The save that reports an earlier failure continues nevertheless, and counts.
            self._note_begun(step, failure.next_save, metrics, metadata)
            if not self._awaits_last_save():
                raise

    def _awaits_last_save(self) -> bool:
        """Returns True if a notice asks to exit, now or by a known time: a last save is to come then."""
        return any(each.notice.demand is not Demand.SAVE for each in self.guard.inbox.pending)

    def save_last(self) -> None:
        """Saves what is not saved yet, waiting for the previous save even if the save would otherwise be skipped."""
        self._epoch_end = None
        step = self.count.done
        if self.is_safe(step):
            return
        try:
            self.manager.wait()
        except SaveFailedError:
            if not self._awaits_last_save():
                raise
        try:
            self.save(step)
        except StepExistsError:
            self.count.note(step, None)  # The program has saved it by the manager, and it is committed.

    def save(
        self, step: int, *, metadata: Mapping[str, Any] | None = None, number: int | None = None, replace: bool = False
    ) -> SaveHandle:
        """Saves a step now, under another number if one is given; raises as the manager's `save` does."""
        metrics = self.metrics
        if step != self.count.saved_step:
            self.count.store_metrics()
        else:
            saved_metrics, saved_metadata = self._notes_of_saved()
            metrics = {**saved_metrics, **self.metrics, **self.count.late_metrics}
            metadata = metadata or self.metadata or saved_metadata
            saved = self.count.saved
            is_stale = self.must_save_metrics() if saved is None else saved.must_be_replaced
            replace = number is None and (replace or is_stale)
        metadata = metadata or self.metadata
        try:
            handle = self.manager.save(
                step if number is None else number, metrics=metrics, metadata=metadata, replace=replace
            )
        except SaveFailedError as failure:
            self._note_begun(step, failure.next_save, metrics, metadata)
            raise
        self._note_begun(step, handle, metrics, metadata)
        return handle

    def _notes_of_saved(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Returns the metrics and metadata of the step that was saved last."""
        restored = self._restored_step()
        if restored is None:
            return self._saved_notes
        return restored.manifest.metrics, restored.manifest.metadata

    def must_save_metrics(self) -> bool:
        """Returns True if metrics were reported after the last save, whose step can be saved again to store them.

        With several workers it cannot: all of them would have to save again, and the others may know of no metric. A
        checkpoint that the program saved by the manager stays as it is. So does a restored one that has these metrics.
        """
        metrics = {**self.metrics, **self.count.late_metrics}
        if not metrics or self.manager.participant is not None or not self.count.is_begun(self.count.done):
            return False
        if self.count.saved is not None:
            return True
        restored = self._restored_step()
        return restored is not None and any(
            name not in restored.manifest.metrics and math.isfinite(float(value)) for name, value in metrics.items()
        )

    def _restored_step(self) -> Restoration | None:
        """Returns the restore of the step that was saved last; None if that step was saved by this process."""
        restored = self.manager.restored
        is_last = restored is not None and self.count.saved is None and restored.step == self.count.saved_step
        return restored if is_last else None

    def _save_once(self, step: int) -> SaveHandle | None:
        """Begins the save of a step for the guard, which checks the result, unless it is saved or in progress."""
        if self.is_safe(step):
            return self.count.find(step)
        try:
            return self.save(step)
        except StepExistsError:
            self.count.note(step, None)  # As in `save_last`.
            return None
        except SaveFailedError as failure:
            if failure.next_save is None:
                raise
            saved: SaveHandle = failure.next_save
            return saved
        except UsageError:
            newest = self.manager.latest_step()
            if newest is None or newest < step:
                raise
            # The program saves under larger numbers. A number chosen here must not lose the state.
            return self.save(step, number=newest + 1)

    def _note_begun(
        self, step: int, saved: SaveHandle | None, metrics: Mapping[str, Any], metadata: Mapping[str, Any] | None
    ) -> None:
        """Records that a save of the step was begun, unless there is none, or it was skipped."""
        if saved is not None and not saved.skipped:
            self.count.note(step, saved)
            self.watch.note_saved()
            for text in self.taken.data.take_caveats():
                self.warn(text)
            self._check_best(step, metrics)
            self.metrics, self._saved_notes = {}, (metrics, metadata)
            self.guard.provisional = None

    def _check_best(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warns, once for each metric, if `Best` is to judge a step by what was measured at an earlier one."""
        for name in find_modes(self.manager.options.keep).keys() & metrics.keys():
            at = self.count.measured.get(name, step)
            # A metric that is reported within a step is measured before that step counts.
            if at < step - 1:
                self.count.measured[name] = sys.maxsize
                self.warn(
                    f"{name} was reported at step {at} and is stored with step {step}, whose weights are later, so "
                    f"Best({name!r}) may keep weights that were not measured. Save where you validate: with "
                    'save_every="1 epoch", or by run.save() after run.report()'
                )


class StepNumbers(Iterator[int]):
    """The numbers of the remaining steps, for one loop; `len` is how many remain."""

    def __init__(
        self,
        name: str,
        loop: TrainingLoop,
        total: int,
        begin_turn: Callable[[StepNumbers], object],
        end: Callable[[], object],
    ) -> None:
        """Creates the steps of a loop that begins at once: between this and the first step, no batch is taken.

        Args:
            name: The program's call, such as "run.steps(n)".
            loop: Counts and saves the steps.
            total: How many there are in total.
            begin_turn: Called at each turn, before the step in progress counts as complete.
            end: Called when all are complete.
        """
        self._name, self._loop, self._total = name, loop, total
        self._begin_turn, self._end = begin_turn, end
        self._taken: dict[str, int] | None = count_taken(loop.manager.checkpoint.objects)
        self._followed = loop.taken.data.note_taken()

    @short_traceback
    def __next__(self) -> int:
        if self._taken is not None:
            self._check_begin(self._taken)
            self._taken = None
        loop = self._loop
        self._begin_turn(self)
        loop.turn, loop.taken.data.is_between = no_turn, True
        loop.finish_step()
        if loop.is_stopped or loop.count.done >= self._total:
            loop.begin_steps()
            loop.guard.pass_last(loop.count.done)
        if not loop.is_stopped and loop.count.done < self._total:  # Also if training has gone back from its last step.
            loop.pass_boundary()
            step_break.end()
            loop.watch.note_counted()
            loop.taken.begin_step()
            loop.is_in_step, loop.turn = True, weakref.ref(self)
            return loop.count.done
        self._end()
        raise StopIteration

    def __repr__(self) -> str:
        return f"<{self._name}: {len(self)} left>"

    def __len__(self) -> int:
        """Returns how many steps remain."""
        return max(self._total - self._loop.count_with_open_step(), 0)

    def _check_begin(self, taken: dict[str, int]) -> None:
        self._loop.taken.data.find_lead(self._followed)
        for path, number in count_taken(self._loop.manager.checkpoint.objects).items():
            if number > taken.get(path, number):
                raise UsageError(
                    f"a batch was taken from {path} before the step that trains it began (zip(loader, "
                    f"{self._name}) does that): the saved position would be one batch ahead, and a restart would "
                    "skip a batch",
                    hint=f"Write batches = loader.stream(), then for step in {self._name}: batch = next(batches).",
                )
