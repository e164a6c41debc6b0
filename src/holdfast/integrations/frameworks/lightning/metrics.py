"""Metrics that accumulate over an epoch: what `self.log` has gathered, and the torchmetrics of a module."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric, MetricCollection


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
