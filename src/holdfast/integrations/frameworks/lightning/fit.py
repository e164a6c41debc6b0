"""One `trainer.fit` that is saved: when it restores, where a step ends, and which Lightning methods it replaces."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader

from holdfast.errors import UsageError
from holdfast.integrations.frameworks.evaluation import Evaluation
from holdfast.integrations.frameworks.fit import Directory, Fit, ImportedStart, find_import
from holdfast.integrations.frameworks.lightning.metrics import load_logged, load_metrics, read_logged, read_metrics
from holdfast.integrations.frameworks.lightning.trainer_state import (
    end_restart,
    load_callbacks,
    load_gradients,
    load_progress,
    load_trainer,
    read_gradients,
    read_trainer,
)
from holdfast.integrations.frameworks.lightning.trees import KeptTree, OwnTree
from holdfast.integrations.frameworks.places import DataPlace
from holdfast.integrations.torch.draws import (
    has_state,
    note_parts,
    read_generators,
    read_parts,
    write_generators,
    write_parts,
)
from holdfast.integrations.torch.loader import describe_loader
from holdfast.state import RNG
from holdfast.state.data.sampler import ResumableSampler

# Older versions average no weights.
_AVERAGING: Final[Any] = getattr(lightning_callbacks, "WeightAveraging", ())


class LightningFit(Fit):
    """Follows one fit from its setup to its end.

    Lightning's hooks come too late for the data and the random generators, and before the end of a step. So some
    methods of this Trainer's loops and connectors are replaced until the fit ends.

    Attributes:
        has_validated: True if validation has logged metrics that no save has stored yet.
    """

    def __init__(self, trainer: Any, directory: Directory, options: dict[str, Any]) -> None:
        """Replaces the methods."""
        super().__init__()
        self.has_validated = False
        self._trainer, self._directory, self._options = trainer, directory, options
        self._is_in_epoch = False
        self._see: Callable[[Any], None] | None = None
        self._followed: list[DataPlace | None] = []
        # The generators before the program made its loaders: of those in use, and of those that it is to make again.
        self._made_with: dict[str, Any] = {}
        self._to_make_with: dict[str, Any] = {}
        self._trained = KeptTree(self._read_shared)
        self._own = OwnTree(self._read_own)
        # What was restored and is not applied yet.
        self._progress: dict[str, Any] | None = None
        self._places: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None
        # Over how many batches gradients are accumulated: as the program says, and what a callback has changed it to.
        self._given_accumulated = trainer.accumulate_grad_batches
        self._accumulated: int | None = None
        # While a validation runs: what there was before it, which is saved if the job leaves; whether it has been left,
        # or was by the process before.
        self._evaluation: Evaluation | None = None
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None
        # If the fit ends within an epoch: what there was then, and what the process before had after the hooks.
        self._cut: tuple[dict[str, Any], dict[str, Any], Evaluation] | None = None
        self._ended: dict[str, Any] | None = None
        self._is_counted = self._is_to_validate = False
        self._is_trial_restored = False
        self.replaced.method(trainer._checkpoint_connector, "restore", self._restore_trial)
        self.replaced.method(trainer._checkpoint_connector, "restore_training_state", self._restore)
        self.replaced.method(trainer._signal_connector, "register_signal_handlers", lambda _: None)

    def _follow_loops(self) -> None:
        """Replaces methods when the fit begins, after what trains for a trial (`LearningRateFinder`, say)."""
        loop, replace = self._trainer.fit_loop, self.replaced.method
        validation = loop.epoch_loop.val_loop
        loop._combined_loader = validation._combined_loader = None  # A trial leaves loaders, begun.
        replace(loop, "_load_combined_loader_states", self._watch_loaders)
        replace(loop, "run", self._run_fit)
        replace(loop, "on_run_start", self._begin_fit)
        replace(loop, "on_run_end", self._end_fit)
        replace(loop.epoch_loop, "reset", self._reset_epoch)
        replace(loop.epoch_loop, "on_run_start", self._begin_epoch)
        replace(loop.epoch_loop, "on_advance_end", self._end_batch)
        replace(validation, "run", self._validate)
        replace(self._trainer.precision_plugin, "convert_input", self._see_batch)
        replace(validation, "setup_data", self._note_validation)
        replace(loop._data_source, "dataloader", partial(self._make_loaders, "training"))
        replace(validation._data_source, "dataloader", partial(self._make_loaders, "validation"))

    def end(self, error: BaseException | None = None) -> None:
        """See `Fit`; also ends the loaders' persistent workers."""
        self.replaced.undo()
        self._close_loaders()
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
        if (imported := find_import(self._directory, self._options, "lightning")) is not None:
            self._begin_imported(imported, objects)
            return
        run = self.enter(self._directory, self._options, objects)
        run.manager.witness.follow("the training loader", self._follow_batches, self._describe_loaders)
        if self._trained.loaded is None:
            if trainer.global_step and trainer.lightning_module.automatic_optimization:
                run.begin_at(trainer.global_step)
            return
        state, self._trained.loaded = self._trained.loaded, None
        load_trainer(trainer, state)
        load_progress(trainer, state["progress"])
        self._is_in_epoch, self._is_to_validate = state["is_in_epoch"], state.get("is_validating", False)
        self._progress, self._random = state["progress"], RNG().state_dict()
        self._accumulated, self._ended = state["accumulated"], state.get("ended")
        _ = run.step  # The loops of the trainer begin there.
        self._places, self._own.loaded = self._own.loaded, None
        self._made_with = {} if self._places is None else dict(self._places["made_with"])
        self._to_make_with = dict(self._made_with)

    def _begin_imported(self, imported: ImportedStart, objects: dict[str, Any]) -> None:
        """Begins from a `.ckpt` file that was imported, as Lightning does with `ckpt_path`."""
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and "scaler" in imported.objects:
            objects = {**objects, "scaler": scaler}
        run = self.enter(self._directory, self._options, objects, imported)
        _ = run.step  # The loops of the trainer begin there.
        if "scaler" in run.checkpoint:
            del run.checkpoint["scaler"]  # It is part of the trainer's state.
        if imported.progress:
            connector._loaded_checkpoint = {**imported.progress, "state_dict": {}}
            connector.restore_loops()
            connector._loaded_checkpoint = {}

    # The data, as soon as there are loaders.

    def _make_loaders(self, kind: str, original: Callable[[], Any]) -> Any:
        """Lets the program create its loaders; for those that a resume continues, with the same random draws."""
        present, before = read_generators(), self._to_make_with.pop(kind, None)
        self._made_with[kind] = before or present
        if before is None:
            return original()
        write_generators(before)
        try:
            return original()
        finally:
            write_generators(present)

    def _watch_loaders(self, original: Callable[[], None]) -> None:
        original()
        loop = self._trainer.fit_loop
        combined = loop._combined_loader
        stored = [None] * len(combined.flattened) if self._places is None else self._places["loaders"]
        self._close_loaders()
        combined.flattened = [_copy_plain(loader) for loader in combined.flattened]
        if len(combined.flattened) > 1 and combined._mode == "max_size_cycle" and _has_no_length(combined):
            self._warn(
                "one of several loaders has no length, and Lightning restarts the shorter loaders until all have "
                "ended. After a restart within an epoch, that loader may give more batches than it would have. "
                "Give its dataset a __len__, or set limit_train_batches"
            )
        self._followed = [self._follow(loader, combined) for loader in combined.flattened]
        for loader, place, state in zip(combined.flattened, self._followed, stored, strict=False):
            if place is not None and state is not None:
                place.load_state_dict(state if self._is_in_epoch else {**state, "begin": None})
                if place.remark:
                    self._warn(place.remark)
                    self._count_batches(place.outline()["taken"])
            elif state is not None and has_state(loader):
                loader.load_state_dict(state)

    def _count_batches(self, taken: int) -> None:
        """Sets how many batches of the epoch are trained, in batches of the present size."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        counts = dict.fromkeys(("ready", "started", "processed", "completed"), taken)
        progress.load_state_dict({**progress.state_dict(), **counts})
        if self._progress is not None:
            self._progress["epoch_loop.batch_progress"]["current"] = progress.state_dict()

    def _follow(self, loader: Any, combined: Any) -> DataPlace | None:
        """Returns an object that saves the position of a loader; None if the loader does so itself, or cannot."""
        if has_state(loader):
            return None
        if not isinstance(loader, DataLoader):
            self._warn(
                f"{type(loader).__name__} has no state_dict and load_state_dict, so its position cannot be saved: "
                "after a restart within an epoch, its data starts from the beginning. Use a DataLoader"
            )
            return None
        # Lightning takes a batch ahead where it does not know how many there are. If a loader has a state of its own,
        # that batch is kept.
        is_ahead = _has_no_length(combined) and not any(map(has_state, combined.flattened))
        place = DataPlace(loader, combined, int(is_ahead))
        if place.caveat:
            self._warn(place.caveat)
        return place

    def _close_loaders(self) -> None:
        for place in self._followed:
            if place is not None:
                place.close()

    # The beginning: Lightning's own restart is played, so that no hook is called twice, and corrected afterwards.

    def _run_fit(self, original: Callable[[], None]) -> None:
        loop = self._trainer.fit_loop
        loop.setup_data()
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise UsageError(
                "Resumable does not support training_step(self, dataloader_iter)",
                hint="Take the batch as the argument: training_step(self, batch, batch_idx).",
            )
        if self._progress is None or not loop.done:
            original()
            return
        # The last step is complete, and what comes after it is not: Lightning would take the fit for done.
        if self._ended is not None:
            load_callbacks(self._trainer, self._ended)
            self._progress, self._is_in_epoch = self._ended["progress"], False
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
        loop = self._trainer.fit_loop
        is_restored_between = self._progress is not None and not self._is_in_epoch
        original()
        if self._places is not None and self._progress is not None:
            loop._last_train_dl_reload_epoch = _read_epoch(self._places["reloaded_at"])
        if is_restored_between:
            self._settle()

    def _reset_epoch(self, original: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            # Of a loader that is not resumable: it is, here.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            original()

    def _begin_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        if self._progress is not None:
            if self._places is not None and self._places["ahead"]:
                fetcher.batches = [*self._places["ahead"], *fetcher.batches]
            self._settle()
        self._is_in_epoch = True
        if self._is_to_validate:
            # The process before has left in the validation that ends this step, and has counted it.
            self._is_to_validate, self._is_counted = False, True
            loop = self._trainer.fit_loop.epoch_loop
            self.replaced.method(loop, "_should_check_val_fx", lambda _, __: True)
            try:
                loop.on_advance_end(fetcher)
            finally:
                self.replaced.undo_last()

    def _settle(self) -> None:
        """Restores what hooks, loaders and Lightning's own restart may have changed; the generators last."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        assert self._progress is not None
        load_progress(trainer, self._progress)
        if self._accumulated is not None:
            trainer.accumulate_grad_batches = self._accumulated
        end_restart(loop)
        own = self._places
        if own is not None:
            for place, state in zip(self._followed, own["loaders"], strict=False):
                if place is not None and state is not None and not self._is_in_epoch:
                    place.load_state_dict({**state, "begin": None})
            load_logged(trainer, own["logged"])
            load_metrics(trainer.lightning_module, own["metrics"])
            load_gradients(trainer.lightning_module, own["gradients"])
            self._load_validation(own)
        if self._random is not None:
            RNG().load_state_dict(self._random)
        self._progress = self._places = self._random = None

    # The witness sees each batch as training takes it, whichever loader it is from, and before it is on a device.

    def _follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object]:
        self._see = see
        return lambda: setattr(self, "_see", None)

    def _describe_loaders(self) -> object:
        combined = self._trainer.fit_loop._combined_loader
        return self._trainer.accumulate_grad_batches, [describe_loader(loader) for loader in combined.flattened]

    def _see_batch(self, original: Callable[[Any], Any], batch: Any) -> Any:
        if self._see is not None and self._trainer.training:
            self._see(batch)
        return original(batch)

    def see_loss(self, outputs: Any) -> None:
        """Called with what a training step has returned."""
        if self.run is not None and isinstance(outputs, Mapping):
            self.run.manager.witness.note_loss(outputs.get("loss"))

    # The end of a step, and of the fit.

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

    def _note_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, own = self._read_shared(), self._read_own()
        # Callbacks hand out what they go on with, and metrics may be those of the validation, too.
        shared["callbacks"] = tree_map(lambda value: value, shared["callbacks"])
        own["metrics"] = tree_map_only(torch.Tensor, torch.clone, own["metrics"])
        return shared, own

    def _validate(self, original: Callable[[], Any]) -> Any:
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
        trainer, loop = self._trainer, self._trainer.fit_loop
        module = trainer.lightning_module
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        loaders = [] if combined is None else combined.flattened
        places = [
            (place or loader).state_dict() if place or has_state(loader) else None
            for loader, place in zip(loaders, self._followed, strict=False)
        ]
        ahead = getattr(fetcher, "batches", ()) if self._is_in_epoch and None not in places else ()
        return {
            "loaders": places,
            "made_with": self._made_with,
            "ahead": list(ahead) if any(map(has_state, loaders)) else [],
            "reloaded_at": _write_epoch(loop._last_train_dl_reload_epoch),
            "validation_reloaded_at": _write_epoch(loop.epoch_loop.val_loop._last_val_dl_reload_epoch),
            "logged": read_logged(trainer),
            "metrics": read_metrics(module),
            "gradients": {} if module.automatic_optimization else read_gradients(module),
            "validation": [read_parts(loader) for loader in self._list_validation()],
        }

    def _list_validation(self) -> list[Any]:
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if combined is None else combined.flattened

    def _note_validation(self, original: Callable[[], None]) -> None:
        original()
        for loader in self._list_validation():
            note_parts(loader)

    def _load_validation(self, own: dict[str, Any]) -> None:
        """Creates the validation loaders if they existed, and restores their generators and their samplers' counts."""
        if "validation" not in own["made_with"]:
            return
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
        loop._last_val_dl_reload_epoch = _read_epoch(own["validation_reloaded_at"])
        for loader, states in zip(self._list_validation(), own["validation"], strict=False):
            write_parts(loader, states)

    def _warn(self, text: str) -> None:
        if self.run is not None:
            self.run.warn(text)


def _write_epoch(number: float) -> float | None:
    """Returns an epoch as it is stored: None for Lightning's infinity, which means none yet."""
    return None if number == float("-inf") else number


def _read_epoch(stored: float | None) -> float:
    """Returns an epoch in Lightning's form."""
    return float("-inf") if stored is None else stored


def _has_no_length(combined: Any) -> bool:
    """Returns True if the number of batches of an epoch is not known before its end."""
    return sized_len(_SUPPORTED_MODES[combined._mode]["iterator"](combined.flattened, combined.limits)) is None


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


def _copy_plain(loader: Any) -> Any:
    """Returns a copy of a plain loader, because following changes a loader; other loaders are returned unchanged.

    Raises:
        UsageError: If its sampler counts epochs itself.
    """
    if not isinstance(loader, DataLoader) or has_state(loader):
        return loader
    if isinstance(loader.batch_sampler, ResumableSampler):
        raise UsageError(
            "a DataLoader with a ResumableSampler counts its epochs itself, and so does Lightning's Trainer",
            hint="Pass a plain DataLoader, which Resumable makes resumable, or a ResumableDataLoader.",
        )
    return copy.copy(loader)


def _name_all(name: str, objects: list[Any]) -> dict[str, Any]:
    """Returns the objects by name; after the first, names get a number."""
    return {f"{name}_{number}" if number else name: obj for number, obj in enumerate(objects)}
