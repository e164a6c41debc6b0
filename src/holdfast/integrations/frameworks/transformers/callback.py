"""`Resumable`: makes the Hugging Face Trainer continue where the last process stopped."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module

import holdfast.training.run
from holdfast.advice.hyperparameters import list_kept
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.events import Warned
from holdfast.integrations.frameworks.accelerate.loop import check_strategy, follow, unwrap
from holdfast.integrations.frameworks.evaluation import Evaluation
from holdfast.integrations.frameworks.imported import ImportedStart, find_import
from holdfast.integrations.frameworks.places import DataPlace
from holdfast.integrations.frameworks.transformers.progress import Begin, TrainerProgress, TrainerWorker
from holdfast.integrations.torch.draws import has_state
from holdfast.integrations.torch.module_walks import find_moving, find_trained_beside
from holdfast.manager import CheckpointManager
from holdfast.options import SaveOptions, check_names
from holdfast.policies import RetentionPolicy, SavePolicy
from holdfast.state import RNG, PerWorker
from holdfast.storage import Storage
from holdfast.training.run import Run

_OF_OBJECTS: Final = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler")
"""The methods by which the Trainer loads the objects in its own checkpoints. They do nothing if holdfast restores."""

_OF_A_READER: Final = ("start_from", "cluster", "liveness_seconds", "timeout_seconds", "threads")
"""The options that are also needed to read the newest checkpoint."""

_BEYOND_ANY: Final = 10**40
"""A step beyond every epoch, also where the Trainer plans `sys.maxsize` of them, as it does for a stream: it trains no
more, and ends as it does after the last step."""


class Resumable(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves a `Trainer` in the background, and makes `trainer.train()` continue where the last process stopped.

    Example:
        ```python
        trainer = Trainer(
            model,
            TrainingArguments("out", save_strategy="no"),
            train_dataset=dataset,
            callbacks=[hf.transformers.Resumable("runs/a", save_every=hf.Steps(500), keep=hf.Latest(3))],
        )
        trainer.train()
        ```

    A step is one of the Trainer's: `state.global_step`. Metrics that `trainer.log` reports are stored with the
    checkpoint, for `hf.Best("eval_loss")`. Your own objects are saved by name, as in `hf.resumable`:
    `Resumable("runs/a", average=average)`; and so are callbacks that have `state_dict` and `load_state_dict`, and
    modules with parameters that the optimizer trains beside the model's, as `trained_0`. Other modules that the
    Trainer or a callback has as attributes are saved once they change, as `moved_ref_model`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        save_every: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        **options: Any,
    ) -> None:
        """Stores the settings; nothing is read before `trainer.train()`.

        Args:
            directory: The run's directory, a URL, or an open storage.
            save_every: When to save; None for `hf.Auto()`, which measures the cost of a save.
            keep: Which checkpoints to keep; None for `hf.Latest(3)`.
            **options: Other options of `hf.resumable`, and further objects to save. `on_resize` is "refuse" here.

        Raises:
            UsageError: If an argument is wrong.
        """
        known = holdfast.training.run.resumable.__kwdefaults__ or {}
        options = {"save_every": save_every, "keep": keep, "on_resize": "refuse", **options}
        self._objects = {name: value for name, value in options.items() if name not in known}
        self._options = {name: value for name, value in options.items() if name in known}
        check_names(self._objects, {**known, **self._options})
        SaveOptions.pick({**known, **self._options}, save_every=None, keep=None)
        self._directory = directory
        self._trainer: Any = None
        self._stored: Collection[str] = ()  # The names of the objects in the checkpoint.
        self._session: _Session | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finds the Trainer that is being created.

        Raises:
            UnsupportedValueError: If it trains in a way that cannot be saved.
            UsageError: If its arguments contradict this callback.
        """
        trainer = self._trainer = _find_trainer(self)
        _check_trainer(trainer)
        # This is to restore before the others look at the state.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        begin = trainer._inner_training_loop
        is_used = False

        def train(*positional: Any, **named: Any) -> Any:
            nonlocal is_used
            if is_used:
                trainer_module.logger.warning(
                    "holdfast: this is the second train() in this process; holdfast does not save it"
                )
                return begin(*positional, **named)
            result = self._train(begin, *positional, **named)
            is_used = True
            return result

        trainer._inner_training_loop = train

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restores.

        Raises:
            UsageError: If the callback was added to a Trainer that already existed.
        """
        if self._trainer is None:
            raise UsageError(
                "hf.transformers.Resumable was added after the Trainer was created",
                hint="Write Trainer(..., callbacks=[hf.transformers.Resumable(...)]).",
            )
        if self._session is not None:
            self._session.enter()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the epoch."""
        if self._session is not None:
            self._session.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the epoch's end."""
        if self._session is not None:
            self._session.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Records metrics for the next save."""
        if self._session is not None:
            self._session.report(logs or {})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exits from within an evaluation if the job was asked to stop: a restart evaluates again.

        Raises:
            SystemExit: When the job exits.
        """
        if self._session is not None:
            self._session.end_evaluation_batch()

    def _train(self, begin: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        step: int | None = None
        is_finished: bool | None = None
        is_stopped = False
        given = named.pop("resume_from_checkpoint", None)
        while True:
            imported = find_import(self._directory, self._options, "transformers")
            progress = None if imported is not None else self._peek(step)
            with ExitStack() as stack:
                session = _Session(self._trainer, self._open_run, stack, progress, is_finished, is_stopped=is_stopped)
                session.imported = imported
                self._session = session
                stack.callback(self._leave)
                try:
                    return begin(*positional, resume_from_checkpoint=session.prepare(given), **named)
                except _BeginAgain as found:
                    step, is_finished, is_stopped = found.step, found.is_finished, found.is_stopped

    def _leave(self) -> None:
        self._session = None

    def _peek(self, step: int | None) -> TrainerProgress | None:
        """Returns the progress of the newest whole checkpoint; None if there is none."""
        if self._options.get("begin_anew"):
            return None
        progress = TrainerProgress()
        given = {name: self._options[name] for name in _OF_A_READER if name in self._options}
        with CheckpointManager(self._directory, Checkpoint(trainer=progress), **given) as manager:
            if (found := manager.restore(step, only="trainer")) is None:
                return None
            self._stored = StoredRun(manager._storage).step(found.name).index(found.manifest, 0).objects.keys()
            return progress

    def _open_run(self, objects: dict[str, Any], imported: ImportedStart | None = None) -> Run:
        for name in self._objects:
            if name in objects:
                raise UsageError(f"{name} is an object of the Trainer, and is saved already")
        objects.update(self._objects)
        # Such as a loss with parameters, which a subclass of the Trainer has.
        beside: dict[str, Any] = find_trained_beside([objects["optimizer"]], objects.values())
        owners = [self._trainer, *(one for one in self._trainer.callback_handler.callbacks if not has_state(one))]
        beside |= find_moving(owners, [*objects.values(), *beside.values()])
        objects |= beside
        options = self._options
        if lacking := [name for name in beside if self._stored and name not in self._stored]:
            # The names in the optimizer's state follow from the modules that are saved: those of then.
            for name in [name for name in lacking if not name.startswith("moved_")]:
                del objects[name]
            kept = [name for name in lacking if name in objects]
            options = {**options, "keep_current": [*list_kept(options.get("keep_current", ())), *kept]}
            text = "each begins as the program made it, and those that are trained are not saved in this run either"
            trainer_module.logger.warning(f"holdfast: the checkpoint lacks {', '.join(lacking)}: {text}")
        if imported is None:
            return holdfast.training.run.resumable(self._directory, Checkpoint(**objects), **options)
        options = {**self._options, "on_resize": "allow"}  # An import has been written by one process.
        return holdfast.training.run.resumable(self._directory, Checkpoint(**imported.pick(objects)), **options)


class _BeginAgain(Exception):  # noqa: N818 - no error
    """The Trainer's loop began at another step than the restored one, and is started again there."""

    def __init__(self, step: int, *, is_finished: bool, is_stopped: bool = False) -> None:
        super().__init__(step)
        self.step, self.is_finished, self.is_stopped = step, is_finished, is_stopped


class _Session:
    """One call of `train()`: the methods that are replaced in the Trainer meanwhile, and the run."""

    def __init__(
        self,
        trainer: Any,
        open_run: Callable[..., Run],
        stack: ExitStack,
        progress: TrainerProgress | None,
        is_finished: bool | None,
        *,
        is_stopped: bool,
    ) -> None:
        self._trainer, self._open_run, self._stack, self._progress = trainer, open_run, stack, progress
        self._is_finished, self._is_stopped = is_finished, is_stopped
        if is_finished is None:
            self._is_finished = progress is not None and progress.is_finished(progress.guess_steps(trainer.args))
        self._run: Run | None = None
        self.imported: ImportedStart | None = None
        self._place: DataPlace | None = None
        self._loader: Any = None
        self._is_place_kept = False
        self._begin: Begin | None = None
        self._state_file = Path()
        self._counted = 0
        self._worker, self._live = TrainerWorker(trainer), TrainerProgress(trainer)
        # Of the step that ends: gives by name with what the Trainer ends it, and its evaluation.
        self._bind: Callable[[], dict[str, Any]] = dict
        self._evaluation: Evaluation | None = None
        self._run_stack = ExitStack()
        self._generators: dict[str, Any] | None = None
        self._is_epoch_over = self._is_over = False

    def prepare(self, given: str | None) -> str | None:
        """Replaces the methods. Returns the folder from which the Trainer reads its state, if any."""
        trainer, stack, progress = self._trainer, self._stack, self._progress
        stack.enter_context(_replaced(trainer, "get_train_dataloader", self._get_loader))
        stack.enter_context(_replaced(trainer, "_maybe_log_save_evaluate", self._end_step))
        stack.enter_context(_replaced(trainer, "_evaluate", self._evaluate))
        stack.enter_context(_replaced(trainer, "training_step", self._train_batch))
        if progress is None and self.imported is not None and self.imported.progress:
            return self._write_state(self.imported.progress, _OF_OBJECTS)
        if progress is None:
            return given
        if given is not None:
            trainer_module.logger.warning(
                f"holdfast: resuming from its own checkpoint of step {progress.global_step}, not from {given}"
            )
        stack.enter_context(_replaced(trainer, "_load_rng_state", lambda *_, **__: self._put_generators_back()))
        stack.enter_context(_replaced(trainer_module, "skip_first_batches", self._skip_batches))
        # It would begin the epoch's data again. To leave it out saves nothing here: no batch is loaded to be skipped.
        stack.callback(setattr, trainer.args, "ignore_data_skip", trainer.args.ignore_data_skip)
        trainer.args.ignore_data_skip = False
        # If the process before has left in an evaluation, this one begins with it.
        stack.callback(setattr, trainer.args, "eval_on_start", trainer.args.eval_on_start)
        trainer.args.eval_on_start = progress.unfinished is not None
        stack.enter_context(_replaced(trainer, "set_initial_training_values", self._plan))
        if hasattr(trainer, "_run_epoch"):  # Not in version 4.
            stack.enter_context(_replaced(trainer, "_run_epoch", self._run_epoch))
        folder = self._write_state(progress.fields, (*_OF_OBJECTS, "_load_callback_state"))
        self._state_file = Path(folder) / trainer_module.TRAINER_STATE_NAME
        return folder

    def _write_state(self, fields: Mapping[str, Any], replaced: Iterable[str]) -> str:
        """Returns a folder from which the Trainer reads its state; the methods that load the rest of it do nothing."""
        for name in replaced:
            self._stack.enter_context(_replaced(self._trainer, name, lambda *_, **__: None))
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        (Path(folder) / trainer_module.TRAINER_STATE_NAME).write_text(json.dumps(fields))
        return folder

    def _plan(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Called when the Trainer has its loader, and before it reads its state."""
        *values, max_steps = original(*positional, **named)
        progress, args = self._progress, self._trainer.args
        assert progress is not None  # Else this is not called.
        assert self._place is not None
        begin = self._begin = progress.plan_begin(self._place, args, values[1], max_steps)
        step = _BEYOND_ANY if self._is_finished else begin.step
        self._state_file.write_text(json.dumps({**progress.fields, "global_step": step}))
        return (*values, begin.max_steps)

    def _run_epoch(self, original: Callable[..., Any], **named: Any) -> Any:
        """Runs an epoch. The first one ends with its data, which may be other batches than those of a whole one."""
        begin, self._begin = self._begin, None
        if begin is not None and begin.taken is not None and not self._is_finished:
            size = self._trainer.args.gradient_accumulation_steps
            named["steps_trained_in_current_epoch"] = begin.taken
            named["steps_in_epoch"] = begin.taken + begin.left
            named["num_update_steps_per_epoch"] = begin.taken // size + math.ceil(begin.left / size)
        return original(**named)

    def enter(self) -> None:
        """Restores, once everything to restore exists; the Trainer is about to begin its first epoch."""
        trainer, progress = self._trainer, self._live
        imported, objects = self.imported, self._list_objects(progress)
        run = self._run = self._open_run(objects, imported)
        if self._place is not None and self._place.caveat:
            run.manager.emit(Warned(text=self._place.caveat))
        self._stack.push(self._run_stack)
        self._run_stack.enter_context(run)
        if (place := self._place) is not None:
            facts = lambda: (trainer.args.gradient_accumulation_steps, place.describe())  # noqa: E731
            run.manager.witness.follow("the training loader", place.follow_batches, facts)
        if imported is not None:
            imported.add_rest(run, objects)
            self._counted = trainer.state.global_step
            return
        if run.restored is None:
            if trainer.state.global_step:
                run.begin_at(trainer.state.global_step)
            self._counted = trainer.state.global_step
            return
        state, args = trainer.state, trainer.args
        is_finished = self._is_stopped or progress.is_finished(state.max_steps)
        begun_at = None if self._progress is None else self._progress.global_step
        if progress.global_step != begun_at or is_finished != self._is_finished:
            self._run_stack.close()
            raise _BeginAgain(run.restored.step, is_finished=is_finished)
        self._generators = RNG().state_dict()
        if self._place is not None and self._place.remark:
            run.manager.emit(Warned(text=self._place.remark))
        self._is_over = bool(self._is_finished)
        progress.apply(trainer)
        self._worker.apply()
        if progress.unfinished is None:
            self._worker.apply_loss(is_finished=is_finished)
        state.compute_steps(args, state.max_steps)
        self._counted = state.global_step

    def begin_epoch(self) -> None:
        """Called when the Trainer has begun an epoch; its loader begins soon."""
        self._is_epoch_over = False
        if self._place is not None:
            # The Trainer says by `skip_first_batches` whether it goes on in the middle of an epoch.
            # It does not, if all batches of the present size are left of the epoch.
            is_whole = self._begin is not None and self._begin.taken == 0
            self._is_place_kept, self._place.resumes = self._place.resumes, self._place.resumes and is_whole

    def end_epoch(self) -> None:
        """Called when the Trainer ends an epoch, or all of the training within one."""
        self._is_epoch_over = True
        if self._has_epoch_ended() or self._trainer.control.should_epoch_stop:
            self._live.end_epoch()

    def report(self, logs: Mapping[str, Any]) -> None:
        """Records metrics for the next save."""
        if self._run is not None and not self._is_over:
            figures = {
                name: value
                for name, value in logs.items()
                if isinstance(name, str) and type(value) in (int, float) and name.isidentifier()
            }
            self._run.report(**figures)

    def _list_objects(self, progress: TrainerProgress) -> dict[str, Any]:
        trainer = self._trainer
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
        own = [each for each in trainer.callback_handler.callbacks if has_state(each)]
        for number, callback in enumerate(own):
            objects[f"callback_{number}"] = callback
        return objects

    def _get_loader(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        self._loader = loader = original(*positional, **named)
        self._place = self._worker.place = self._live.place = follow(loader)
        return loader

    def _skip_batches(self, original: Callable[..., Any], loader: Any, number: int = 0) -> Any:
        if self._place is None or loader is not self._loader or not self._is_place_kept:
            return original(loader, number)
        self._place.resumes = True
        return loader

    def _put_generators_back(self) -> None:
        if self._generators is not None:
            RNG().load_state_dict(self._generators)
            self._generators = None

    def _train_batch(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        loss = original(*positional, **named)
        if self._run is not None:
            self._run.manager.witness.note_loss(loss)
        return loss

    def _end_step(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Called after each step, and once more at the end of an epoch: logs and evaluates, then counts and saves.

        The last step of an epoch counts after the epoch has ended, so that its end belongs to it.
        """
        self._bind = lambda: dict(inspect.signature(original).bind(*positional, **named).arguments)
        self._worker.see_loss(named["tr_loss"] if "tr_loss" in named else positional[0])
        result = original(*positional, **named)
        trainer, run = self._trainer, self._run
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
            run._loop.save_last()
        return result

    def _evaluate(self, original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        trainer, run = self._trainer, self._run
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
            return original(*positional, **named)
        finally:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        self._evaluation = None
        self._live.end_evaluation()
        self._worker.end_evaluation()

    def end_evaluation_batch(self) -> None:
        """Exits if the job was asked to stop, with the step as it was before its evaluation.

        Raises:
            SystemExit: When the job exits.
        """
        evaluation, run = self._evaluation, self._run
        if evaluation is None or run is None or not evaluation.is_to_leave():
            return
        self._evaluation = None
        if not evaluation.has_own_weights():
            run._loop.warn(
                "the job was asked to stop, but waits until the evaluation ends, which has changed the weights"
            )
            return
        self._counted = self._trainer.state.global_step
        with evaluation.stepped_back():
            run.finish_step()
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
        self._worker.apply_loss(is_finished=bool(self._is_finished))
        self._generators = RNG().state_dict()
        if trainer.control.should_training_stop and not self._is_finished:
            # The Trainer would take a step before it looks.
            self._run_stack.close()
            raise _BeginAgain(trainer.state.global_step, is_finished=True, is_stopped=True)

    def _has_epoch_ended(self) -> bool:
        ended = getattr(self._loader, "end_of_dataloader", None)
        return bool(ended) if isinstance(ended, bool) else self._place is not None and self._place.has_ended


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of that one object by `replacement`, which gets the original first."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, lambda *positional, **named: replacement(original, *positional, **named))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _find_trainer(callback: TrainerCallback) -> Any:
    """Returns the Trainer that is calling its callbacks. It is not passed to them, so the callers' frames have it."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "hf.transformers.Resumable cannot find its Trainer", hint="Write Trainer(..., callbacks=[Resumable(...)])."
    )


def _check_trainer(trainer: Any) -> None:
    """Checks that the Trainer trains in a way that can be saved."""
    args = trainer.args
    if sum(isinstance(each, Resumable) for each in trainer.callback_handler.callbacks) > 1:
        raise UsageError(
            "a Trainer takes one Resumable", hint="Remove the others: each would resume the same training."
        )
    check_strategy(trainer.accelerator)
    if getattr(trainer, "is_fsdp_xla_enabled", False) or args.parallel_mode.value in (
        "tpu",
        "sagemaker_model_parallel",
    ):
        raise UnsupportedValueError(
            f"training with parallel mode {args.parallel_mode.value} cannot be saved",
            path="trainer",
            hint="Use one process, or DDP.",
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=True restarts the training with another batch size, so step numbers have no meaning",
            hint="Find the batch size once, and set it.",
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise UsageError(
            "enable_jit_checkpoint=True also handles SIGTERM, and saves in its own way",
            hint="Remove it: Resumable handles SIGTERM, saves and exits.",
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.load_best_model_at_end:
        trainer_module.logger.warning(
            f"holdfast: the Trainer saves as well, to {args.output_dir}, and blocks training meanwhile "
            f'(save_strategy="{getattr(args.save_strategy, "value", args.save_strategy)}"). Set '
            'save_strategy="no" to save with Resumable alone'
        )
