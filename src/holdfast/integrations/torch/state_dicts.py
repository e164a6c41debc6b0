"""The result of `optimizer.state_dict()`, as another program has stored it: parameters by number, or by name."""

from __future__ import annotations

from typing import Any, Final

from holdfast.format.decoding import malformed
from holdfast.state.adapters import Loading
from holdfast.state.leaves import Skeleton

_SHAPED_AS_PARAMETERS: Final = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("sum", "acc_delta", "exp_inf", "ax", "prev"),
    }
)
"""State of torch's own optimizers that has the shape of its parameter."""


def is_state_dict(tree: dict[str, Skeleton]) -> bool:
    """**Pure.** Returns True if a stored tree is the result of an optimizer's `state_dict()`."""
    return tree.keys() >= {"state", "param_groups"}


def name_stored_parameters(
    tree: dict[str, Skeleton], groups: list[list[str]], loading: Loading
) -> tuple[dict[str, Skeleton], dict[str, list[int]]] | None:
    """Returns the same state under the names of the live parameters.

    Numbers go by position, as in torch itself: the first parameter of the first group is that of the live optimizer.
    Names go by name, with any prefix that the live one has.

    Args:
        tree: The stored tree.
        groups: The names of the live parameters, by group.
        loading: Where differences are noted.

    Returns:
        The state in holdfast's form, and the known shapes of parameters; None if the groups do not fit, which is noted.

    Raises:
        FormatError: If the tree is not such a state.
    """
    stored = tree["param_groups"]
    if type(stored) is not list:
        raise malformed(loading.name("param_groups"), "a list is expected")
    known: dict[Any, str] = {}
    named: list[Skeleton] = []
    for number, node in enumerate(stored):
        group = dict(loading.children(node, "param_groups", str(number)))
        keys = group.get("params")
        if type(keys) is not list or not all(type(key) in (int, str) for key in keys):
            raise malformed(loading.name("param_groups", str(number)), "the numbers of parameters are expected")
        live = groups[number] if number < len(groups) else []
        names = _match(keys, live) if len(keys) == len(live) and len(stored) == len(groups) else None
        if names is None:
            if loading.wants():
                theirs = [len(one.get("params") or ()) if type(one) is dict else 0 for one in stored]
                loading.differences.wrong_kind.append(
                    f"{loading.name()}: stored with groups of {theirs} parameters, live {list(map(len, groups))}"
                    " or under other names"
                )
            return None
        known.update(zip(keys, names, strict=True))
        named.append({key: value for key, value in group.items() if key != "param_names"} | {"params": names})
    state: dict[str, Skeleton] = {}
    loose: list[list[Any]] = []
    shapes: dict[str, list[int]] = {}
    for key, node in _items(tree["state"], loading):
        name = known.get(key) if type(key) in (int, str) else None
        if name is None:
            loose.append([key, node])
            continue
        state[name] = node
        shape = _shape(node, loading)
        if shape is not None:
            shapes[name] = shape
    rest = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    kept = {"$": "dict", "v": loose} if loose else {}
    return {"state": state, "groups": named, "loose": kept, "rest": rest}, shapes


def _match(keys: list[Any], live: list[str]) -> list[str] | None:
    """Returns for each stored parameter the live one; None if they do not match."""
    if not all(type(key) is str for key in keys):
        return live
    found: dict[str, str] = {}
    wanted = set(keys)
    for name in live:
        key = name
        while key not in wanted and "." in key:
            key = key.partition(".")[2]
        if key not in wanted or key in found:
            return None
        found[key] = name
    return [found[key] for key in keys]


def _items(node: Skeleton, loading: Loading) -> list[tuple[Any, Skeleton]]:
    """Returns the items of a stored dict, with keys of any kind."""
    if type(node) is dict and node.get("$") == "dict" and type(node.get("v")) is list:
        pairs = node["v"]
        if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            raise malformed(loading.name("state"), "a pair is expected")
        return [(pair[0], pair[1]) for pair in pairs]
    return list(loading.children(node, "state").items())


def _shape(node: Skeleton, loading: Loading) -> list[int] | None:
    """Returns the shape of a parameter, from its state."""
    if type(node) is not dict or "$" in node:
        return None
    for key, part in node.items():
        if key in _SHAPED_AS_PARAMETERS:
            spec = loading.spec_of(part)
            if spec is not None:
                return list(spec.shape)
    return None
