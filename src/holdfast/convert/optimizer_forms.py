"""The state of optimizers as torch's own programs know it: parameters by number, or by name. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

_FORM: Final = frozenset({"state", "groups", "loose", "rest"})


def number_parameters(stored: Any) -> Any:
    """**Pure.** What `optimizer.state_dict()` would give: parameters by their numbers, in the order of the groups.

    Args:
        stored: The state as holdfast keeps it; what is in a form of its own is given as it is.
    """
    names = _names_of(stored)
    if names is None:
        return _own_form(stored)
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: value for name, value in stored["state"].items() if name in numbers}
    groups = [{**_options(group), "params": [numbers[name] for name in group["params"]]} for group in stored["groups"]]
    return {**stored["rest"], "state": {**stored["loose"], **state}, "param_groups": groups}


def name_parameters(stored: Any, modules: Collection[str]) -> Any:
    """**Pure.** What `get_optimizer_state_dict(model, optimizer)` would give: parameters by their names in the model.

    Args:
        stored: As for `number_parameters`.
        modules: The names of the checkpoint's modules, which a parameter's name begins with.
    """
    names = _names_of(stored)
    if names is None:
        return _own_form(stored)
    prefix = next((f"{one}." for one in modules if names and all(name.startswith(f"{one}.") for name in names)), "")
    state = {name.removeprefix(prefix): value for name, value in stored["state"].items()}
    groups = [
        {**_options(group), "params": [name.removeprefix(prefix) for name in group["params"]]}
        for group in stored["groups"]
    ]
    return {**stored["rest"], "state": {**stored["loose"], **state}, "param_groups": groups}


def _names_of(stored: Any) -> list[str] | None:
    """The names of all parameters in order; None if the state is not of holdfast's form, or only a part of it."""
    if not isinstance(stored, dict) or not stored.keys() >= _FORM or type(stored["groups"]) is not list:
        return None
    if not all(isinstance(stored[key], dict) for key in ("state", "loose", "rest")):
        return None
    names: list[str] = []
    for group in stored["groups"]:
        if not isinstance(group, dict) or type(group.get("params")) is not list:
            return None
        names += group["params"]
    return names if all(type(name) is str for name in names) and len(set(names)) == len(names) else None


def _own_form(stored: Any) -> Any:
    if isinstance(stored, dict) and "whole" in stored:
        return stored["whole"]
    return stored


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
