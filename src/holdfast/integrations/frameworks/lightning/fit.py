"""One `trainer.fit` that is saved: when it restores, where a step ends, and which Lightning methods it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map, tree_map_only

from holdfast.errors import UsageError
from holdfast.integrations.frameworks.evaluation import Evaluation
from holdfast.integrations.frameworks.fit import Fit, ImportedStart, Settings, find_import
from holdfast.integrations.frameworks.lightning.data import OF_DATA, FitData, read_epoch
from holdfast.integrations.frameworks.lightning.state import (
    KeptTree,
    OwnTree,
    end_restart,
    load_callbacks,
    load_logged,
    load_metrics,
    load_trainer,
    read_logged,
    read_metrics,
    read_trainer,
)
from holdfast.process.pulse import evaluating
from holdfast.state import RNG

# Older versions average no weights.
_AVERAGING: Final[Any] = getattr(lightning_callbacks, "WeightAveraging", ())

_OF_STEPS: Final = ("optim_progress", "optim_step_progress", "scheduler_progress", "epoch_loop.state_dict")
"""The ends of the names of what Lightning counts by optimizer steps; the rest counts batches and epochs."""


class _RestoredFit(msgspec.Struct):
    """Restored values that are not applied yet.

    Attributes:
        shared: What all workers have: progress and callbacks.
        own: What this worker has of its own; None if it has nothing.
        random: The random generators.
    """

    shared: dict[str, Any]
    own: dict[str, Any] | None
    random: dict[str, Any]


class LightningFit(Fit):
    """Follows one fit from its setup to its end.

    Lightning's hooks come too late for the data and the random generators, and before the end of a step. So some
    methods of this Trainer's loops and connectors are replaced until the fit ends.

    Attributes:
        has_validated: True if validation has logged metrics that no save has stored yet.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        """Replaces the methods."""
        super().__init__()
        self.has_validated = False
        self._trainer, self._settings = trainer, settings
        self._is_in_epoch = False
        self._data = FitData(trainer, self._warn)
        self._trained = KeptTree(self._read_shared)
        self._own = OwnTree(self._read_own)
        self._restored: _RestoredFit | None = None
        # Over how many batches gradients are accumulated, as the program says; a callback may change it.
        self._given_accumulated = trainer.accumulate_grad_batches
        # While a validation runs: what there was before it, which is saved if the job leaves; whether that counted the
        # step, here or in the process before.
        self._evaluation: Evaluation | None = None
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None
        # If the fit ends within an epoch: what there was then.
        self._cut: tuple[dict[str, Any], dict[str, Any], Evaluation] | None = None
        self._is_counted = self._is_trial_restored = False
        self.replaced.method(trainer._checkpoint_connector, "restore", self._restore_trial)
        self.replaced.method(trainer._checkpoint_connector, "restore_training_state", self._restore)
        self.replaced.method(trainer._signal_connector, "register_signal_handlers", lambda _: None)

    def _follow_loops(self) -> None:
        """Replaces methods when the fit begins, after what trains for a trial (`LearningRateFinder`, say)."""
        loop, replace = self._trainer.fit_loop, self.replaced.method
        validation = loop.epoch_loop.val_loop
        loop._combined_loader = validation._combined_loader = None  # A trial leaves loaders, begun.
        replace(loop, "_load_combined_loader_states", self._follow_loaders)
        replace(loop, "run", self._run_fit)
        replace(loop, "on_run_start", self._begin_fit)
        replace(loop, "on_run_end", self._end_fit)
        replace(loop.epoch_loop, "reset", self._reset_epoch)
        replace(loop.epoch_loop, "on_run_start", self._begin_epoch)
        replace(loop.epoch_loop, "on_advance_end", self._end_batch)
        replace(validation, "run", self._validate)
        self._data.follow_program(replace)

    def end(self, error: BaseException | None = None) -> None:
        """See `Fit`; also ends the loaders' persistent workers."""
        self.replaced.undo()
        self._data.close()
        self.leave(error)

    # The restore, when model, optimizers and schedulers are there, and no data is.

    def _restore_trial(self, original: Callable[..., None], *args: Any) -> None:
        """Something that trains for a trial before the fit begins, and then puts back what was there before."""
        self._is_trial_restored = True
        try:
            original(*args)
        finally:
            self._is_trial_restored = False

    def _restore(self, original: Callable[[], None]) -> None:
        original()  # With `ckpt_path`, a new run begins from there.
        if self._is_trial_restored:
            return
        self._follow_loops()
        trainer = self._trainer
        _check_statistics(trainer)
        objects: dict[str, Any] = {"model": trainer.lightning_module}
        objects |= _name_all("optimizer", trainer.optimizers)
        objects |= _name_all("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        objects |= {"trainer": self._trained, "worker": self._own, "rng": RNG()}
        if (imported := find_import(self._settings, "lightning")) is not None:
            self._begin_imported(imported, objects)
            return
        run = self.enter(self._settings, objects)
        run.manager.witness.follow("the training loader", self._data.follow_batches, self._data.describe)
        shared, self._trained.loaded = self._trained.loaded, None
        if shared is None:
            if trainer.global_step and trainer.lightning_module.automatic_optimization:
                run.begin_at(trainer.global_step)
            return
        load_trainer(trainer, shared)
        trainer.fit_loop.load_state_dict(shared["progress"])
        self._is_in_epoch = shared["is_in_epoch"]
        self._restored = _RestoredFit(shared, self._own.loaded, RNG().state_dict())
        self._own.loaded = None
        if self._restored.own is not None:
            self._data.restore(self._restored.own["made_with"])

    def count_restored_epochs(self) -> int:
        """See `Fit`."""
        if (shared := self._trained.loaded) is None:
            return 0
        progress = shared["progress"]
        is_last = shared["is_in_epoch"] and progress["epoch_loop.batch_progress"]["is_last_batch"]
        return int(progress["epoch_progress"]["current"]["processed"] + is_last)

    def _begin_imported(self, imported: ImportedStart, objects: dict[str, Any]) -> None:
        """Begins from a `.ckpt` file that was imported, as Lightning does with `ckpt_path`."""
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and "scaler" in imported.objects:
            objects = {**objects, "scaler": scaler}
        run = self.enter(self._settings, objects, imported)
        if "scaler" in run.checkpoint:
            del run.checkpoint["scaler"]  # It is part of the trainer's state.
        if imported.progress:
            connector._loaded_checkpoint = {**imported.progress, "state_dict": {}}
            connector.restore_loops()
            connector._loaded_checkpoint = {}

    # The data, as soon as there are loaders.

    def _follow_loaders(self, original: Callable[[], None]) -> None:
        original()
        own = None if self._restored is None else self._restored.own
        taken = self._data.follow_loaders(None if own is None else own["loaders"], is_in_epoch=self._is_in_epoch)
        if taken is not None:
            # Counts what is trained of the epoch in batches of the present size.
            batches = self._trainer.fit_loop.epoch_loop.batch_progress.current
            counts = dict.fromkeys(("ready", "started", "processed", "completed"), taken)
            batches.load_state_dict({**batches.state_dict(), **counts})
            if self._restored is not None:
                self._restored.shared["progress"]["epoch_loop.batch_progress"]["current"] = batches.state_dict()

    # The beginning: Lightning's own restart is played, so that no hook is called twice, and corrected afterwards.

    def _run_fit(self, original: Callable[[], None]) -> None:
        loop = self._trainer.fit_loop
        loop.setup_data()
        if self.run is not None:
            self.run.manager.follow_epochs(self._count_epochs)
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise UsageError(
                "Resumable does not support training_step(self, dataloader_iter)",
                hint="Take the batch as the argument: training_step(self, batch, batch_idx).",
            )
        restored = self._restored
        if restored is None or not loop.done:
            original()
            return
        # The last step is complete, and what comes after it is not: Lightning would take the fit for done.
        if (ended := restored.shared.get("ended")) is not None:
            load_callbacks(self._trainer, ended)
            restored.shared["progress"], self._is_in_epoch = ended["progress"], False
        loop.reset()
        loop.on_run_start()
        if self._is_in_epoch:
            try:
                loop.on_advance_start()
                loop.advance()
                loop.on_advance_end()
            finally:
                loop.on_iteration_done()
        loop.on_run_end()

    def _begin_fit(self, original: Callable[[], None]) -> None:
        restored, is_between = self._restored, not self._is_in_epoch
        original()
        if restored is not None and restored.own is not None:
            self._trainer.fit_loop._last_train_dl_reload_epoch = read_epoch(restored.own["reloaded_at"])
        if restored is not None and is_between:
            self._settle(restored)

    def _reset_epoch(self, original: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            # Of a loader that is not resumable: it is, here.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            original()

    def _begin_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        restored = self._restored
        if restored is not None:
            if restored.own is not None and restored.own["ahead"]:
                fetcher.batches = [*restored.own["ahead"], *fetcher.batches]
            self._settle(restored)
        self._is_in_epoch = True
        if restored is not None and restored.shared.get("is_validating", False):
            # The process before has left in the validation that ends this step, and has counted it.
            self._is_counted = True
            loop = self._trainer.fit_loop.epoch_loop
            self.replaced.method(loop, "_should_check_val_fx", lambda _, __: True)
            try:
                loop.on_advance_end(fetcher)
            finally:
                self.replaced.undo_last()

    def _settle(self, restored: _RestoredFit) -> None:
        """Restores what hooks, loaders and Lightning's own restart may have changed; the generators last."""
        trainer, own = self._trainer, restored.own
        trainer.fit_loop.load_state_dict(restored.shared["progress"])
        if restored.shared["accumulated"] is not None:
            trainer.accumulate_grad_batches = restored.shared["accumulated"]
        end_restart(trainer.fit_loop)
        if own is not None:
            if not self._is_in_epoch:
                self._data.begin_epochs_again(own["loaders"])
            load_logged(trainer, own["logged"])
            load_metrics(trainer.lightning_module, own["metrics"])
            for name, parameter in trainer.lightning_module.named_parameters():
                gradient = own["gradients"].get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            self._data.load_validation(own)
        RNG().load_state_dict(restored.random)
        self._restored = None

    # The end of a step, and of the fit.

    def see_loss(self, outputs: Any) -> None:
        """Called with what a training step has returned."""
        if self.run is not None and isinstance(outputs, Mapping):
            self.run.manager.witness.note_loss(outputs.get("loss"))

    def _count_epochs(self) -> int:
        loop = self._trainer.fit_loop.epoch_loop
        return int(self._trainer.current_epoch + (self._is_in_epoch and loop.batch_progress.is_last_batch))

    def _end_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        trainer, run = self._trainer, self.run
        if run is None:
            return
        if trainer.lightning_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate():
            return
        if self._is_counted:
            self._is_counted = False
            return
        if self.has_validated:
            self.has_validated = False
            run.report(**{name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1})
        run.finish_step()
        loop = trainer.fit_loop.epoch_loop
        if loop.done and not loop.batch_progress.is_last_batch:
            # The fit ends here, within its epoch: a longer one goes on with the rest of it.
            run.save_last()
            self._cut = (*self._note_state(), Evaluation(run, trainer.lightning_module, trainer.strategy.root_device))

    def hold_place(self) -> Callable[[], object]:
        """See `Fit`."""
        shared, own = self._note_state()

        def hold() -> None:
            stored, mine = self._trained.loaded, self._own.loaded or own
            place = {name: shared[name] for name in ("is_in_epoch", "should_stop", "datamodule", "accumulated")}
            progress = {
                name: stored["progress"][name] if name.endswith(_OF_STEPS) else there
                for name, there in shared["progress"].items()
            }
            kept = {name: value for name, value in stored.items() if name not in ("ended", "is_validating")}
            self._before = {**kept, **place, "progress": progress}, {**mine, **{name: own[name] for name in OF_DATA}}

        return hold

    def _note_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, own = self._read_shared(), self._read_own()
        # Callbacks hand out what they go on with, and metrics may be those of the validation, too.
        shared["callbacks"] = tree_map(lambda value: value, shared["callbacks"])
        own["metrics"] = tree_map_only(torch.Tensor, torch.clone, own["metrics"])
        return shared, own

    def _validate(self, original: Callable[[], Any]) -> Any:
        with evaluating():
            return self._validate_saved(original)

    def _validate_saved(self, original: Callable[[], Any]) -> Any:
        trainer, run, loop = self._trainer, self.run, self._trainer.fit_loop.epoch_loop
        is_within_step = trainer.lightning_module.automatic_optimization and loop._should_accumulate()
        if run is None or trainer.sanity_checking or self._is_counted or is_within_step:
            return original()
        loop.val_loop.setup_data()
        shared, own = self._note_state()
        self._before = {**shared, "is_validating": True}, own
        batches = sum(loop.val_loop.max_batches) if loop.val_loop._combined_loader is not None else 0
        self._evaluation = Evaluation(run, trainer.lightning_module, trainer.strategy.root_device, batches)
        try:
            return original()
        finally:
            self._evaluation = self._before = None

    def begin_validation_batch(self) -> None:
        """Exits from within the validation if the job was asked to stop: a restart validates again.

        Raises:
            SystemExit: When the job exits.
        """
        if self._evaluation is not None and self._evaluation.leave_if_asked(self._exchanged()):
            self._is_counted = True

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        """In the block, callbacks that average the weights have put back those of training."""
        averages = [callback for callback in self._trainer.callbacks if isinstance(callback, _AVERAGING)]
        self._exchange(averages, "end")
        yield
        self._exchange(averages, "start")  # The job stays.

    def _exchange(self, averages: list[Any], moment: str) -> None:
        for callback in averages:
            getattr(callback, f"on_validation_epoch_{moment}")(self._trainer, self._trainer.lightning_module)

    def _end_fit(self, original: Callable[[], None]) -> None:
        has_ended_epoch = self._is_in_epoch and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._is_in_epoch = False
        if (run := self.run) is not None:
            # What callbacks do at the end, such as averaging the weights, is not part of the training.
            if self._cut is not None and not has_ended_epoch and self._cut[2].has_own_weights():
                # A longer fit goes on within the epoch. One that is as long calls the epoch's hooks no more.
                shared, own, evaluation = self._cut
                self._before = {**shared, "ended": self._read_shared()}, own
                evaluation.step_back(partial(run.save_last, again=True))
                self._before = None
            # A save that was made before the epoch ended would have the next start end it once more.
            run.save_last(again=has_ended_epoch)
        original()
        self.leave()

    # What is kept beside model, optimizers, schedulers and generators.

    def _read_shared(self) -> dict[str, Any]:
        if self._before is not None:
            return self._before[0]
        state = read_trainer(self._trainer, is_in_epoch=self._is_in_epoch)
        accumulated = self._trainer.accumulate_grad_batches
        return {**state, "accumulated": None if accumulated == self._given_accumulated else accumulated}

    def _read_own(self) -> dict[str, Any]:
        if self._before is not None:
            return self._before[1]
        trainer, module = self._trainer, self._trainer.lightning_module
        # Of manual optimization, which may gather gradients over any number of steps.
        parameters = () if module.automatic_optimization else module.named_parameters()
        return {
            **self._data.read(is_in_epoch=self._is_in_epoch),
            "logged": read_logged(trainer),
            "metrics": read_metrics(module),
            "gradients": {name: each.grad for name, each in parameters if each.grad is not None},
        }

    def _warn(self, text: str) -> None:
        if self.run is not None:
            self.run.warn(text)


def _check_statistics(trainer: Any) -> None:
    """Checks that no worker has statistics of its own within the model.

    Raises:
        UsageError: If one has.
    """
    if not isinstance(trainer.strategy, ModelParallelStrategy) or trainer.world_size == 1:
        return
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm) and module.track_running_stats:
            raise UsageError(
                f"{name} is a {type(module).__name__}: with ModelParallelStrategy its statistics differ between "
                "workers, so they cannot be saved as one",
                hint="Use LayerNorm, GroupNorm or torch.nn.SyncBatchNorm; or DDP.",
            )


def _name_all(name: str, objects: list[Any]) -> dict[str, Any]:
    """Returns the objects by name; after the first, names get a number."""
    return {f"{name}_{number}" if number else name: obj for number, obj in enumerate(objects)}
