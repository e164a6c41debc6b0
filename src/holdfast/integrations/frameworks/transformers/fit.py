"""One `train()` of the Hugging Face Trainer that is saved: where it begins, where a step ends, and what is replaced."""

from __future__ import annotations

import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from transformers import TrainerCallback
from transformers import trainer as trainer_module

from holdfast.advice.hyperparameters import list_kept
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.integrations.frameworks.accelerate.loop import follow, unwrap
from holdfast.integrations.frameworks.evaluation import Evaluation
from holdfast.integrations.frameworks.fit import Fit, ImportedStart, Settings, check_untaken, find_import
from holdfast.integrations.frameworks.transformers.progress import Begin, TrainerProgress, TrainerWorker
from holdfast.integrations.torch.draws import has_state
from holdfast.integrations.torch.module_walks import find_moving, find_trained_beside
from holdfast.integrations.torch.places import DataPlace
from holdfast.manager import CheckpointManager
from holdfast.process.pulse import evaluating
from holdfast.state import RNG, PerWorker
from holdfast.storage import open_storage

_OF_OBJECTS: Final = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler")
"""The methods by which the Trainer loads the objects in its own checkpoints. They do nothing if holdfast restores."""

_OF_A_READER: Final = ("start_from", "cluster", "liveness_seconds", "timeout_seconds", "threads")
"""The options that are also needed to read the newest checkpoint."""

_OF_SPEED: Final = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")
"""The ends of the names of metrics that describe the speed of the Trainer, and not the model."""

_BEYOND_ANY: Final = 10**40
"""A step beyond every epoch, also where the Trainer plans `sys.maxsize` of them, as it does for a stream: it trains no
more, and ends as it does after the last step."""


class BeginAgain(Exception):  # noqa: N818 - no error
    """The Trainer's loop began at another step than the restored one, and is started again there."""

    def __init__(self, step: int, *, is_finished: bool, is_stopped: bool = False) -> None:
        super().__init__(step)
        self.step, self.is_finished, self.is_stopped = step, is_finished, is_stopped


class Start(NamedTuple):
    """Where a training begins.

    Attributes:
        imported: The imported checkpoint from which it begins, if it does from one.
        progress: The progress of the newest whole checkpoint; None if there is none, or it was imported.
        names: The names of that checkpoint's objects.
        is_finished: True if nothing is left to train.
        is_stopped: True if the evaluation of the last step has ended the training early.
    """

    imported: ImportedStart | None
    progress: TrainerProgress | None
    names: Collection[str]
    is_finished: bool
    is_stopped: bool


def find_start(trainer: Any, settings: Settings, again: BeginAgain | None) -> Start:
    """**Blocks.** Reads where the training begins; for a second attempt, what the first one has found out counts."""
    imported, options = find_import(settings, "transformers"), settings.options
    progress: TrainerProgress | None = None
    names: Collection[str] = ()
    if imported is None and not options.get("begin_anew"):
        progress = TrainerProgress()
        given = {name: options[name] for name in _OF_A_READER if name in options}
        with CheckpointManager(settings.directory, Checkpoint(trainer=progress), **given) as manager:
            if (found := manager.restore(None if again is None else again.step, only="trainer")) is None:
                progress = None
            else:
                step = StoredRun(open_storage(settings.directory)).step(found.name)
                names = step.index(found.manifest, 0).objects.keys()
    if again is not None:
        return Start(imported, progress, names, again.is_finished, again.is_stopped)
    is_finished = progress is not None and progress.is_finished(progress.guess_steps(trainer.args))
    return Start(imported, progress, names, is_finished, is_stopped=False)


class TrainerFit(TrainerCallback, Fit):  # type: ignore[misc, unused-ignore]
    """One call of `train()`: what is replaced in the Trainer meanwhile, and the run.

    It is the first of the Trainer's callbacks meanwhile, so that it restores before the others look at the state.
    """

    def __init__(self, trainer: Any, settings: Settings, start: Start) -> None:
        """Prepares; `prepare` replaces methods, and `on_train_begin` restores."""
        Fit.__init__(self)
        self._trainer, self._settings = trainer, settings
        self._start = start
        self._place: DataPlace | None = None
        self._is_place_kept = False
        self._begin: Begin | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._counted = 0
        self._worker, self._live = TrainerWorker(trainer), TrainerProgress(trainer)
        # Of the step that ends: gives by name with what the Trainer ends it, and its evaluation.
        self._bind: Callable[[], dict[str, Any]] = dict
        self._evaluation: Evaluation | None = None
        self._generators: dict[str, Any] | None = None
        self._is_epoch_over = self._is_over = False

    def __enter__(self) -> Self:
        self._trainer.callback_handler.callbacks.insert(0, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._trainer.callback_handler.callbacks.remove(self)
        try:
            self.end(error)
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    def prepare(self, given: str | None) -> str | None:
        """Replaces the methods. Returns the folder from which the Trainer reads its state, if any."""
        trainer, progress, imported = self._trainer, self._start.progress, self._start.imported
        self.replaced.method(trainer, "get_train_dataloader", self._get_loader)
        self.replaced.method(trainer, "_maybe_log_save_evaluate", self._end_step)
        self.replaced.method(trainer, "_evaluate", self._evaluate)
        self.replaced.method(trainer, "training_step", self._train_batch)
        if progress is None:
            has_own = imported is not None and imported.progress
            return self._write_state(imported.progress, _OF_OBJECTS) if imported is not None and has_own else given
        if given is not None:
            trainer_module.logger.warning(
                f"holdfast: resuming from its own checkpoint of step {progress.global_step}, not from {given}"
            )
        self.replaced.method(trainer, "_load_rng_state", lambda *_, **__: self._put_generators_back())
        self.replaced.method(trainer_module, "skip_first_batches", self._skip_batches)
        # It would begin the epoch's data again. To leave it out saves nothing here: no batch is loaded to be skipped.
        self.replaced.value(trainer.args, "ignore_data_skip", False)
        # If the process before has left in an evaluation, this one begins with it.
        self.replaced.value(trainer.args, "eval_on_start", progress.unfinished is not None)
        self.replaced.method(trainer, "set_initial_training_values", self._plan)
        if hasattr(trainer, "_run_epoch"):  # Not in version 4.
            self.replaced.method(trainer, "_run_epoch", self._run_epoch)
        return self._write_state(progress.fields, (*_OF_OBJECTS, "_load_callback_state"))

    def _write_state(self, fields: Mapping[str, Any], replaced: Iterable[str]) -> str:
        """Returns a folder from which the Trainer reads its state; the methods that load the rest of it do nothing."""
        for name in replaced:
            self.replaced.method(self._trainer, name, lambda *_, **__: None)
        self._folder = tempfile.TemporaryDirectory()
        self._write_fields(fields)
        return self._folder.name

    def _write_fields(self, fields: Mapping[str, Any]) -> None:
        assert self._folder is not None  # Its caller has made it.
        (Path(self._folder.name) / trainer_module.TRAINER_STATE_NAME).write_text(json.dumps(fields))

    def _plan(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Called when the Trainer has its loader, and before it reads its state."""
        *values, max_steps = original(*positional, **named)
        progress, args = self._start.progress, self._trainer.args
        assert progress is not None  # Else this is not called.
        assert self._place is not None
        begin = self._begin = progress.plan_begin(self._place, args, values[1], max_steps)
        step = _BEYOND_ANY if self._start.is_finished else begin.step
        self._write_fields({**progress.fields, "global_step": step})
        return (*values, begin.max_steps)

    def _run_epoch(self, original: Callable[..., Any], **named: Any) -> Any:
        """Runs an epoch. The first one ends with its data, which may be other batches than those of a whole one."""
        begin, self._begin = self._begin, None
        if begin is not None and begin.taken is not None and not self._start.is_finished:
            size = self._trainer.args.gradient_accumulation_steps
            named["steps_trained_in_current_epoch"] = begin.taken
            named["steps_in_epoch"] = begin.taken + begin.left
            named["num_update_steps_per_epoch"] = begin.taken // size + math.ceil(begin.left / size)
        return original(**named)

    def count_restored_epochs(self) -> int:
        """See `Fit`."""
        return self._live.count_restored_epochs()

    def hold_place(self) -> Callable[[], object]:
        """See `Fit`."""
        shared, own = self._live.state_dict(), self._worker.state_dict()

        def hold() -> None:
            self._live.hold_place(shared)
            self._worker.hold_place(own)

        return hold

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restores, once everything to restore exists; the Trainer is about to begin its first epoch."""
        trainer, progress, imported = self._trainer, self._live, self._start.imported
        place = self._place
        run = self.enter(*self._list_objects(progress), imported)
        run.manager.follow_epochs(lambda: progress.epochs)
        self._counted = state.global_step
        if place is not None:
            if place.caveat:
                run.warn(place.caveat)
            facts = lambda: (trainer.args.gradient_accumulation_steps, place.describe())  # noqa: E731
            run.manager.witness.follow("the training loader", place.follow_batches, facts)
        if imported is not None:
            return
        if run.restored is None:
            if state.global_step:
                run.begin_at(state.global_step)
            return
        is_finished = self._start.is_stopped or progress.is_finished(state.max_steps)
        begun_at = None if self._start.progress is None else self._start.progress.global_step
        if progress.global_step != begun_at or is_finished != self._start.is_finished:
            self.leave()
            raise BeginAgain(run.restored.step, is_finished=is_finished)
        self._generators = RNG().state_dict()
        if place is not None and place.remark:
            run.warn(place.remark)
        self._is_over = self._start.is_finished
        progress.apply(trainer)
        run.manager.follow_epochs(lambda: progress.epochs)
        self._worker.apply()
        if progress.unfinished is None and is_finished:
            self._worker.end_loss()
        state.compute_steps(trainer.args, state.max_steps)
        self._counted = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when the Trainer has begun an epoch; its loader begins soon."""
        self._is_epoch_over = False
        if self._place is not None:
            # The Trainer says by `skip_first_batches` whether it goes on in the middle of an epoch.
            # It does not, if all batches of the present size are left of the epoch.
            is_whole = self._begin is not None and self._begin.taken == 0
            self._is_place_kept, self._place.resumes = self._place.resumes, self._place.resumes and is_whole

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when the Trainer ends an epoch, or all of the training within one."""
        self._is_epoch_over = True
        if self._has_epoch_ended() or control.should_epoch_stop:
            self._live.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Records metrics for the next save, but for those of the Trainer's own speed."""
        if self.run is not None and not self._is_over:
            figures = {
                name: value
                for name, value in (logs or {}).items()
                if isinstance(name, str) and type(value) in (int, float) and name.isidentifier()
                if not name.endswith(_OF_SPEED)
            }
            self.run.report(**figures)

    def _list_objects(self, progress: TrainerProgress) -> tuple[Settings, dict[str, Any]]:
        """Returns all objects by name, and the settings of the run that saves them."""
        trainer, settings = self._trainer, self._settings
        objects = {
            "model": trainer.model,
            "optimizer": unwrap(trainer.optimizer),
            "scheduler": unwrap(trainer.lr_scheduler),
            "trainer": progress,
            "worker": PerWorker(self._worker),
            "rng": RNG(),
        }
        if getattr(trainer.accelerator, "scaler", None) is not None:
            objects["scaler"] = trainer.accelerator.scaler
        callbacks = trainer.callback_handler.callbacks
        objects |= {f"callback_{number}": each for number, each in enumerate(filter(has_state, callbacks))}
        check_untaken(settings.others, objects)
        objects |= settings.others
        # Such as a loss with parameters, which a subclass of the Trainer has.
        further: dict[str, Any] = find_trained_beside([objects["optimizer"]], objects.values())
        owners = [trainer, *(each for each in callbacks if not has_state(each))]
        further |= find_moving(owners, [*objects.values(), *further.values()])
        objects |= further
        if not (lacking := [name for name in further if self._start.names and name not in self._start.names]):
            return settings, objects
        # The names in the optimizer's state follow from the modules that are saved: those of then.
        for name in [name for name in lacking if not name.startswith("moved_")]:
            del objects[name]
        kept = [name for name in lacking if name in objects]
        text = "each begins as the program made it, and those that are trained are not saved in this run either"
        trainer_module.logger.warning(f"holdfast: the checkpoint lacks {', '.join(lacking)}: {text}")
        keep_current = [*list_kept(settings.options.get("keep_current", ())), *kept]
        return settings._replace(options={**settings.options, "keep_current": keep_current}), objects

    def _get_loader(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        loader = original(*positional, **named)
        self._place = self._worker.place = self._live.place = follow(loader)
        return loader

    def _skip_batches(self, original: Callable[..., Any], loader: Any, number: int = 0) -> Any:
        if self._place is None or loader is not self._place.source or not self._is_place_kept:
            return original(loader, number)
        self._place.resumes = True
        return loader

    def _put_generators_back(self) -> None:
        if self._generators is not None:
            RNG().load_state_dict(self._generators)
            self._generators = None

    def _train_batch(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        loss = original(*positional, **named)
        if self.run is not None:
            self.run.manager.witness.note_loss(loss)
        return self._worker.add_loss(loss)

    def _end_step(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Called after each step, and once more at the end of an epoch: logs and evaluates, then counts and saves.

        The last step of an epoch counts after the epoch has ended, so that its end belongs to it.
        """
        self._bind = lambda: dict(inspect.signature(original).bind(*positional, **named).arguments)
        self._worker.see_loss(named["tr_loss"] if "tr_loss" in named else positional[0])
        result = original(*positional, **named)
        trainer, run = self._trainer, self.run
        if run is None or trainer.state.global_step <= self._counted:
            return result
        control = trainer.control
        is_stopping = control.should_epoch_stop or control.should_training_stop
        if (is_stopping or self._has_epoch_ended()) and not self._is_epoch_over:
            return result
        self._counted = trainer.state.global_step
        run.finish_step()
        if control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps:
            # What comes now, such as loading the best model, is not part of the training; nor are metrics of it, for
            # which the step would be saved again.
            self._is_over = True
            run.save_last()
        return result

    def _evaluate(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        trainer, run = self._trainer, self.run
        if self._live.unfinished is not None and self._generators is not None:
            return self._end_restored_step(*positional)
        if run is None or trainer.state.global_step <= self._counted:
            return original(*positional, **named)
        ending = self._bind()
        norm = ending["grad_norm"]
        self._live.begin_evaluation(
            {
                "ends_epoch": not self._is_epoch_over and self._has_epoch_ended(),
                "epoch": ending["epoch"],
                "grad_norm": None if norm is None else float(norm),
                "learning_rate": ending.get("learning_rate"),
            }
        )
        self._worker.begin_evaluation()
        self._evaluation = Evaluation(run, trainer.model, trainer.args.device)
        try:
            with evaluating():
                return original(*positional, **named)
        finally:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        self._evaluation = None
        self._live.end_evaluation()
        self._worker.end_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exits from within an evaluation if the job was asked to stop, with the step as it was before: a restart
        evaluates again.

        Raises:
            SystemExit: When the job exits.
        """
        if self._evaluation is not None and self._evaluation.leave_if_asked():
            self._counted = self._trainer.state.global_step
            self._end_evaluation()  # The job stays.

    def _end_restored_step(self, trial: Any, ignored: Any) -> None:
        """Ends the restored step: evaluates, and ends its epoch if it was the last one."""
        trainer, ending = self._trainer, self._live.unfinished
        assert ending is not None  # Asked by the caller.
        ends_epoch = ending.pop("ends_epoch")
        RNG().load_state_dict(self._generators or {})
        self._generators = None
        self._live.apply_control(trainer)
        loss = getattr(trainer, "_tr_loss", self._worker.loss)
        ending |= {"model": trainer.model_wrapped, "trial": trial, "ignore_keys_for_eval": ignored}
        self._live.end_evaluation()
        trainer._maybe_log_save_evaluate(loss, start_time=time.time(), **ending)
        if ends_epoch:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            trainer._maybe_log_save_evaluate(loss, start_time=time.time(), **ending)
        if self._start.is_finished:
            self._worker.end_loss()
        self._generators = RNG().state_dict()
        if trainer.control.should_training_stop and not self._start.is_finished:
            # The Trainer would take a step before it looks.
            self.leave()
            raise BeginAgain(trainer.state.global_step, is_finished=True, is_stopped=True)

    def _has_epoch_ended(self) -> bool:
        if self._place is None:
            return False
        ended = getattr(self._place.source, "end_of_dataloader", None)
        return ended if isinstance(ended, bool) else self._place.has_ended
