"""The Trainer's state apart from modules, optimizers and schedulers: progress, callbacks, precision, the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

_OWN_KEYS: Final = frozenset(
    {"epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "optimizer_states", "lr_schedulers"}
)
"""The entries that Lightning itself puts into a checkpoint, except `state_dict`, which callbacks may replace."""


def read_trainer(trainer: Any, *, is_in_epoch: bool) -> dict[str, Any]:
    """Returns the state that all workers share. Collective, if a callback's hooks are."""
    progress = _read_progress(trainer)
    checkpoint = _make_checkpoint(trainer, progress, call._call_callbacks_state_dict(trainer))
    model_state = checkpoint["state_dict"]
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    datamodule = trainer.datamodule
    extra = {key: value for key, value in checkpoint.items() if key not in _OWN_KEYS}
    return {
        "is_in_epoch": is_in_epoch,
        "progress": progress,
        "callbacks": checkpoint["callbacks"],
        "saved_at": {each.state_key: each._last_global_step_saved for each in _list_checkpoints(trainer)},
        "precision": trainer.precision_plugin.state_dict(),
        "datamodule": {} if datamodule is None else call._call_lightning_datamodule_hook(trainer, "state_dict"),
        "should_stop": trainer.should_stop,
        # The model itself is kept anyway: what is the very same tensors is not kept again.
        "same": sorted(key for key, value in extra.items() if _is_same(value, model_state)),
        "extra": {key: value for key, value in extra.items() if not _is_same(value, model_state)},
    }


def load_trainer(trainer: Any, state: dict[str, Any]) -> None:
    """Restores what `read_trainer` returned, except the progress; model and optimizers are restored already."""
    checkpoint = _make_checkpoint(trainer, state["progress"], state["callbacks"])
    model_state = checkpoint.pop("state_dict")
    checkpoint.update(state["extra"])
    checkpoint.update(dict.fromkeys(state["same"], model_state))
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    if state["datamodule"] and trainer.datamodule is not None:
        call._call_lightning_datamodule_hook(trainer, "load_state_dict", state["datamodule"])
    call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
    load_callbacks(trainer, state)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(state["precision"])
    trainer.should_stop = state["should_stop"]


def load_callbacks(trainer: Any, state: dict[str, Any]) -> None:
    """Restores the callbacks' own state."""
    call._call_callbacks_load_state_dict(trainer, state)
    for callback in _list_checkpoints(trainer):
        # These it does not take back by itself: it would save twice in one step.
        if callback.state_key in state["saved_at"]:
            callback._last_global_step_saved = state["saved_at"][callback.state_key]
            callback.current_score = state["callbacks"][callback.state_key]["current_score"]


def load_progress(trainer: Any, progress: dict[str, Any]) -> None:
    """Restores the progress of all loops of a fit."""
    trainer.fit_loop.load_state_dict(progress)


def end_restart(loop: Any) -> None:
    """Lets a loop and its inner loops skip what Lightning repeats at a restart: that was done before the save."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for part in vars(loop).values():
        if isinstance(part, pl.loops._Loop):
            end_restart(part)


def read_gradients(module: Any) -> dict[str, torch.Tensor]:
    """Returns the current gradients of a module's parameters."""
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def load_gradients(module: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Restores what `read_gradients` returned."""
    for name, parameter in module.named_parameters():
        found = gradients.get(name)
        parameter.grad = None if found is None else found.to(parameter.device)


def _list_checkpoints(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]


def _read_progress(trainer: Any) -> dict[str, Any]:
    progress: dict[str, Any] = trainer.fit_loop.state_dict()
    progress["state_dict"].pop("combined_loader", None)  # The places of all loaders are kept with each worker.
    return progress


def _make_checkpoint(trainer: Any, progress: dict[str, Any], callbacks: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint as callbacks and modules expect it in their hooks; its tensors are the live ones."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": trainer.lightning_module.state_dict(),
        "loops": {"fit_loop": progress},
        "callbacks": callbacks,
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def _is_same(value: Any, model_state: Mapping[str, Any]) -> bool:
    return value is model_state or (
        isinstance(value, Mapping)
        and value.keys() == model_state.keys()
        and all(value[key] is model_state[key] for key in value)
    )
