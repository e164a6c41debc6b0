"""The state of Lightning's Trainer apart from modules, optimizers and schedulers, and the trees that it is saved in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric, MetricCollection

from holdfast.state.adapters import Replication, StateAdapter
from holdfast.state.registry import register_adapter

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


def end_restart(loop: Any) -> None:
    """Lets a loop and its inner loops skip what Lightning repeats at a restart: that was done before the save."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for part in vars(loop).values():
        if isinstance(part, pl.loops._Loop):
            end_restart(part)


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


# Metrics that accumulate over an epoch: what `self.log` has gathered, and the torchmetrics of a module.


def read_logged(trainer: Any) -> dict[str, Any]:
    """Returns what `self.log` has gathered in this epoch, and the newest metrics by name."""
    results, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    return {
        "gathered": [_read_result(key, result) for key, result in results.items()],
        "batch_size": results.batch_size,
        "first": connector._first_loop_iter,
        "hook": connector._current_fx,
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
    }


def load_logged(trainer: Any, state: dict[str, Any]) -> None:
    """Restores what `read_logged` returned."""
    results, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    device = trainer.strategy.root_device
    results.clear()
    for stored in state["gathered"]:
        result = _make_result(trainer, stored)
        if result is not None:
            results[stored["key"]] = result.to(device)
    results.batch_size = state["batch_size"]
    connector._first_loop_iter, connector._current_fx = state["first"], state["hook"]
    for name in ("callback", "logged", "progress_bar"):
        live = getattr(connector, f"_{name}_metrics")
        live.clear()
        live.update({key: _to(value, device) for key, value in state[name].items()})


def _read_result(key: str, result: Any) -> dict[str, Any]:
    meta = {field.name: getattr(result.meta, field.name) for field in fields(_Metadata)}
    sync = meta.pop("_sync")
    meta["reduce_fx"] = result.meta.reduce_fx.__name__
    state = {"key": key, "meta": meta, "should_sync": sync.should, "rank_zero_only": sync.rank_zero_only}
    names = ["_update_count", "has_reset", "is_tensor", "_forward_cache", "_computed"]
    names += ["value", "cumulated_batch_size"] if result.is_tensor else []
    return state | {name: getattr(result, name) for name in names if hasattr(result, name)}


def _make_result(trainer: Any, stored: dict[str, Any]) -> Any:
    meta = _Metadata(**stored["meta"])
    meta.sync = _Sync(
        _should=stored["should_sync"], fn=trainer.strategy.reduce, rank_zero_only=stored["rank_zero_only"]
    )
    result = _ResultMetric(meta, stored["is_tensor"])
    for name in ("_update_count", "has_reset", "_forward_cache", "_computed", "cumulated_batch_size"):
        if name in stored:
            setattr(result, name, stored[name])
    if stored["is_tensor"]:
        result.value = stored["value"]
        return result
    found = dict(trainer.lightning_module.named_modules()).get(meta.metric_attribute or "")
    if not isinstance(found, Metric):
        return None  # It is logged again at the next batch.
    result.value = found
    return result


def read_metrics(module: Any) -> dict[str, Any]:
    """Returns the states of all torchmetrics in a module that have been updated."""
    for part in module.modules():
        if isinstance(part, MetricCollection) and getattr(part, "_groups_checked", False):
            part._compute_groups_create_state_ref()
    return {
        name: {"states": {key: getattr(metric, key) for key in metric._defaults}, "updates": metric._update_count}
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and metric._update_count
    }


def load_metrics(module: Any, states: dict[str, Any]) -> None:
    """Restores what `read_metrics` returned; metrics that had not been updated are reset."""
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        if name not in states:
            if metric._update_count:
                metric.reset()
            continue
        for key, value in states[name]["states"].items():
            setattr(metric, key, _to(value, metric.device))
        metric._update_count = states[name]["updates"]
        metric._computed = None


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        # Metrics of one collection may share a tensor, and change it in place as soon as they are updated.
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_to(part, device) for part in value]
    return value


# Trees of values that are given back as stored.


class KeptTree:
    """A tree that is read when it is saved. A restore puts the stored tree into `loaded`, and applies nothing.

    Attributes:
        read: Returns the tree. Its arrays may be live: they are copied at once.
        loaded: The restored tree; None before a restore, or if it had none.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.loaded: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class OwnTree(KeptTree):
    """A tree of which each worker has its own."""


def _put(tree: KeptTree, loaded: Any) -> None:
    tree.loaded = loaded


class _TreeAdapter(StateAdapter):
    """Workers may have different values, such as metrics that each logs for itself. Those of rank 0 are saved."""

    def replication_of(self, obj: Any) -> Replication:
        return Replication(trained=())


class _OwnTreeAdapter(StateAdapter):
    is_per_worker = True


register_adapter(KeptTree, _TreeAdapter("lightning.tree", lambda tree: tree.read(), _put, compare=False))
register_adapter(OwnTree, _OwnTreeAdapter("lightning.own_tree", lambda tree: tree.read(), _put, compare=False))
