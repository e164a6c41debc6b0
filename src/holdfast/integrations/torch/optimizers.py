"""Optimizers: state by the name of its parameter.

torch names an optimizer's state by the parameter's number, which changes with the order and the grouping of the
parameters. Here each parameter has a name: the one in the optimizer itself (`param_names` of its groups); otherwise its
name in the modules of the same checkpoint, as `model.layer.weight` (object, module, parameter), or in its dicts and
lists, as `params.w`; otherwise its position, as `group0.3`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from holdfast.format.decoding import Decoder, malformed
from holdfast.format.encoding import escape
from holdfast.integrations.torch.module_walks import (
    find_owners,
    find_renaming,
    holders_of,
    list_named_parameters,
    refuse_localized,
    settle,
)
from holdfast.integrations.torch.steps import BEFORE_STEPS, CAPTURED, WaitingGradients, follow_one
from holdfast.integrations.torch.tensors import is_capturing
from holdfast.state.adapters import (
    FSDP1,
    REPLACED,
    Adapter,
    CaptureContext,
    Loading,
    Oversights,
    Replication,
    make_refusal,
)
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import list_arrays


@dataclass(frozen=True, slots=True)
class _Layout:
    """The parameters of an optimizer: their names, in the order of torch's numbers, and those of each group."""

    parameters: list[torch.Tensor]
    names: list[str]
    groups: list[list[str]]


class OptimizerAdapter(Adapter):
    """State is a tree `{"state": {name: {...}}, "groups": [{..., "params": [names]}], "loose": {}, "rest": {}}`.

    State that belongs to no parameter is in `loose`, any other entry of the optimizer's `state_dict` in `rest`. The
    parameters and their groups are part of the program and must agree. State comes and goes: an optimizer that has not
    stepped takes what is stored, and one that has stepped is filled in place. An optimizer whose `state_dict` is not of
    torch's form is stored unchanged, under `whole`.

    There are also `class`, the optimizer's, and `shapes`, those of its parameters by name. State goes only to an
    optimizer of the same class, and only to a parameter of the same shape. Checkpoints may lack the two.
    """

    kind = "torch.optimizer"

    def check(self, obj: Any, path: str) -> None:
        """Checks the parameters too: those of FSDP1 have a mark."""
        super().check(obj, path)
        parameters = (parameter for group in obj.param_groups for parameter in group["params"])
        if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
            raise make_refusal(FSDP1, "the optimizer of a FullyShardedDataParallel", path)

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns state by name."""
        raw = obj.state_dict()
        if not _is_of_torchs_form(raw, obj):
            return {"whole": raw, "class": _class_of(obj)}
        layout = _layout_of(obj, context)
        groups = zip(raw["param_groups"], layout.groups, strict=True)
        return {
            "state": {layout.names[key]: value for key, value in raw["state"].items() if type(key) is int},
            "groups": [_hyperparameters(group) | {"params": names} for group, names in groups],
            "loose": _loose(raw),
            "rest": _rest(raw),
            "class": _class_of(obj),
            "shapes": _shapes_of(layout),
        }

    def list_trained(self, obj: Any) -> Iterable[str]:
        """See `Adapter`."""
        return ("state", "loose", "whole")

    def replication_of(self, obj: Any) -> Replication:
        """Held by the workers of the mesh of the parameters: only their steps are counted there."""
        parameters = [parameter for group in obj.param_groups for parameter in group["params"]]
        return Replication(holders_of(parameters), is_trained=True)

    def before_step(
        self, obj: Any, call: Callable[[object], None], *, is_own: bool = False
    ) -> Callable[[], None] | None:
        """Uses a hook of all torch optimizers, because another one may step the same parameters.

        Fused ones raise no version counter, so the change would not be detected. It runs before the hooks of single
        optimizers.
        """
        if is_own:
            return follow_one(obj, call)
        if getattr(obj, "register_step_pre_hook", None) is None:
            return None  # A wrapper, say, that passes on little of what it wraps.

        def note_and_call(stepping: object) -> None:
            if is_capturing():
                CAPTURED.add(stepping)
            call(stepping)

        remove = BEFORE_STEPS.add(note_and_call)
        weakref.finalize(obj, remove).atexit = False
        return remove

    def oversights_of(self, obj: Any) -> Oversights:
        """See `Adapter`: gradients that wait for a step are not saved."""
        parameters = [one for group in obj.param_groups for one in group["params"] if one.requires_grad]
        return Oversights(find_loss=WaitingGradients(obj).find_loss, trains=parameters, find_owners=find_owners)

    def stepped_arrays(self, obj: Any) -> list[Any]:
        """Returns the parameters, and the tensors in their state.

        Empty if a CUDA graph may take the steps: its replays call no hook, raise no version, and may change the
        parameters of any optimizer. `capturable` marks an optimizer that is made for that.
        """
        if CAPTURED or any(group.get("capturable") for group in obj.param_groups):
            return []
        parameters = [parameter for group in obj.param_groups for parameter in group["params"]]
        values = [value for state in obj.state.values() if isinstance(state, dict) for value in state.values()]
        return [tensor for tensor in (*parameters, *values) if isinstance(tensor, torch.Tensor)]

    def awaited_bytes(self, obj: Any) -> int:
        """Returns two moments for each parameter without state, as Adam has; three or one if the options say so."""
        total_bytes = 0
        for group in obj.param_groups:
            moments = 1 if "momentum" in group and "betas" not in group else 2 + bool(group.get("amsgrad"))
            waiting = [one for one in group["params"] if one.requires_grad and not obj.state.get(one)]
            total_bytes += moments * sum(one.nbytes for one in waiting if not is_lazy(one))
        return total_bytes

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Compares parameters and groups."""
        raw = obj.state_dict()
        tree = dict(loading.children(stored))
        if not _same_class(tree.pop("class", None), obj, tree, loading):
            return lambda: None
        shapes = _stored_shapes(tree.pop("shapes", {}), loading)
        if tree.keys() == {"whole"}:
            whole = loading.value(tree["whole"], raw, "whole")
            return lambda: obj.load_state_dict(loading.complete(whole))
        is_torchs = _is_of_torchs_form(raw, obj)
        # As another program has stored it.
        is_state_dict = tree.keys() >= {"state", "param_groups"}
        if is_state_dict and is_torchs:
            named = _name_stored_parameters(tree, _layout_of(obj, loading.context).groups, loading)
            if named is None:
                return lambda: None
            tree, shapes = named
        elif is_state_dict:
            whole = loading.value(tree, raw)
            return lambda: obj.load_state_dict(loading.complete(whole))
        if tree.keys() != {"state", "groups", "loose", "rest"}:
            raise malformed(loading.name(), "the state of an optimizer is malformed")
        if not is_torchs:
            if _wanted(tree, loading):
                loading.differences.wrong_kind.append(
                    f"{loading.name()}: stored by parameter, live in its own form ({type(obj).__qualname__})"
                )
            return lambda: None
        layout = _layout_of(obj, loading.context, _list_names(tree["groups"]))
        matched, known = _match_groups(tree["groups"], layout, loading)
        for group, (number, node) in zip(raw["param_groups"], matched, strict=True):
            if node is not None:
                values = loading.value(node, _hyperparameters(group), "groups", str(number), rules=REPLACED)
                group.update({key: value for key, value in values.items() if key != "params"})
        rest = loading.value(tree["rest"], _rest(raw), "rest")
        loose = loading.value(tree["loose"], _loose(raw), "loose", rules=REPLACED)
        nodes = loading.children(tree["state"], "state")
        # What LBFGS keeps under its first parameter is about all of them.
        together = isinstance(obj, torch.optim.LBFGS) and bool(nodes)
        stays = _misfits(layout.names if together else nodes, nodes, shapes, layout, loading)
        if together and (stays or known != set(layout.names)):
            stays = set(layout.names)
        state = _match_state(nodes, raw["state"], layout, known, stays, loading)
        ready = {**rest, "state": {**loose, **state}, "param_groups": raw["param_groups"]}
        return lambda: _load(obj, loading.complete(ready), layout)


def parameter_names(context: CaptureContext) -> dict[int, str]:
    """Returns for each parameter of the modules, by its id, its first name."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for path, member in context.members:
        if isinstance(member, nn.Module):
            modules = settle(member)
            rename = find_renaming(modules)
            for name, parameter in list_named_parameters(modules):
                full = f"{path}.{rename(name)}"
                if id(parameter) not in names and full not in taken:
                    names[id(parameter)] = full
                    taken.add(full)
    return names


def _names_in_trees(context: CaptureContext) -> dict[int, str]:
    """Returns for each array in the named dicts and lists, by its id, its name."""
    found = [one for name, root in context.objects.items() for one in list_arrays(root, escape(name))]
    count = Counter(path.replace("/", ".") for path, _ in found)
    return {id(array): name for path, array in found if count[name := path.replace("/", ".")] == 1}


def _layout_of(
    optimizer: torch.optim.Optimizer, context: CaptureContext, known: Collection[str] | None = None
) -> _Layout:
    """Returns the parameters with their names.

    Args:
        optimizer: The optimizer.
        context: The objects that it is saved with.
        known: The stored names, if there are any: those in dicts and lists count only if they are among them, because
            old checkpoints have the positions.
    """
    names_of = context.once("torch.parameter_names", lambda: parameter_names(context))
    if any(id(parameter) not in names_of for group in optimizer.param_groups for parameter in group["params"]):
        in_trees = context.once("torch.names_in_trees", lambda: _names_in_trees(context))
        taken = set(names_of.values())
        new = {key: name for key, name in in_trees.items() if name not in taken and (known is None or name in known)}
        names_of = {**new, **names_of}
    given = [_given_names(group) for group in optimizer.param_groups]
    flat = [name for names in given if names is not None for name in names]
    # Two modules may have parameters of the same name; then none of the names says enough.
    use_given = None not in given and len(set(flat)) == len(flat)
    layout = _Layout([], [], [])
    for number, group in enumerate(optimizer.param_groups):
        names = given[number] if use_given else None
        layout.groups.append([])
        refuse_localized(group["params"])
        for place, parameter in enumerate(group["params"]):
            name = names[place] if names else names_of.get(id(parameter), f"group{number}.{place}")
            layout.groups[-1].append(name)
            layout.parameters.append(parameter)
            layout.names.append(name)
    return layout


def _given_names(group: dict[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    if names is None or len(names) != len(group["params"]):
        return None
    parts = [str(name).replace("_orig_mod.", "") for name in names]
    if parts and all(name.startswith("module.") for name in parts):
        parts = [name.removeprefix("module.") for name in parts]
    return parts


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}:{type(optimizer).__qualname__}"


def _same_class(stored: Skeleton, optimizer: torch.optim.Optimizer, tree: Skeleton, loading: Loading) -> bool:
    """Returns True if state was stored from a class of the same name, in any module; otherwise notes the difference."""
    if stored is None:
        return True
    if type(stored) is not str:
        raise malformed(loading.name("class"), "the name of a class is expected")
    if stored.rpartition(":")[2] == type(optimizer).__qualname__:
        return True
    if _wanted(tree, loading):
        then, now = stored.replace(":", "."), _class_of(optimizer).replace(":", ".")
        loading.differences.wrong_kind.append(f"{loading.name()}: stored from {then}, live {now}")
    return False


def _wanted(node: Skeleton, loading: Loading, *at: str) -> bool:
    """Returns True if a stored part, or something at most three steps below the optimizer, is restored."""
    if loading.wants(*at):
        return True
    parts: list[tuple[str, Skeleton]] = []
    if type(node) is dict and "$" not in node:
        parts = list(node.items())
    elif type(node) is list:
        parts = [(str(number), part) for number, part in enumerate(node)]
    return len(at) < 3 and any(_wanted(part, loading, *at, name) for name, part in parts)


def _shapes_of(layout: _Layout) -> dict[str, list[int]]:
    """Returns the shape of each parameter that has one yet."""
    parameters = zip(layout.names, layout.parameters, strict=True)
    lazy = (UninitializedParameter, UninitializedBuffer)
    if any(issubclass(cls, lazy) for cls in set(map(type, layout.parameters))):
        return {name: list(parameter.shape) for name, parameter in parameters if not is_lazy(parameter)}
    return {name: list(parameter.shape) for name, parameter in parameters}


def _stored_shapes(stored: Skeleton, loading: Loading) -> dict[str, list[int]]:
    shapes: Any = Decoder().decode(stored, path=loading.name("shapes"))
    lists = list(shapes.values()) if type(shapes) is dict else [None]
    are_shapes = all(type(shape) is list and {int}.issuperset(map(type, shape)) for shape in lists)
    if not are_shapes or not all(type(name) is str for name in shapes):
        raise malformed(loading.name("shapes"), "the shapes of parameters are expected")
    return dict(shapes)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _loose(raw: dict[str, Any]) -> dict[Any, Any]:
    return {key: value for key, value in raw["state"].items() if type(key) is not int}


def _rest(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in ("state", "param_groups")}


def _is_of_torchs_form(raw: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    groups, state = raw.get("param_groups"), raw.get("state")
    if type(groups) is not list or not isinstance(state, dict) or len(groups) != len(optimizer.param_groups):
        return False
    numbers = [number for group in groups for number in group["params"]]
    counts_agree = all(
        len(group["params"]) == len(own["params"]) for group, own in zip(groups, optimizer.param_groups, strict=True)
    )
    known = all(0 <= key < len(numbers) for key in state if type(key) is int)
    return counts_agree and known and numbers == list(range(len(numbers)))


def _list_names(groups: Skeleton) -> set[str]:
    """Returns the stored names of parameters, as far as they are well-formed."""
    nodes = [node.get("params") for node in (groups if type(groups) is list else []) if type(node) is dict]
    return {name for names in nodes if type(names) is list for name in names if type(name) is str}


def _match_groups(stored: Skeleton, layout: _Layout, loading: Loading) -> tuple[list[tuple[int, Skeleton]], set[str]]:
    """Returns for each live group the number and the node of the stored one with the same parameters; None for no node.

    Returns the names of all stored parameters as well.
    """
    if type(stored) is not list:
        raise malformed(loading.name("groups"), "a list is expected")
    groups: dict[frozenset[str], list[tuple[int, Skeleton]]] = {}
    for number, node in enumerate(stored):
        names = loading.children(node, "groups", str(number)).get("params")
        if type(names) is not list or not all(type(name) is str for name in names):
            raise malformed(loading.name("groups", str(number)), "the names of parameters are expected")
        groups.setdefault(frozenset(names), []).append((number, node))
    live, known = set(layout.names), set().union(*groups)
    differences = loading.differences
    for names, differing in ((live - known, differences.missing), (known - live, differences.extra)):
        differing += [loading.name("state", name) for name in sorted(names) if loading.wants("state", name)]
    found: list[tuple[int, Skeleton]] = []
    for number, names in enumerate(layout.groups):
        same = groups.get(frozenset(names))
        if not same and live == known and loading.wants("groups", str(number)):
            differences.wrong_kind.append(
                f"{loading.name('groups', str(number))}: no stored group has exactly the parameters of this one"
            )
        found.append(same.pop(0) if same else (number, None))
    return found, known


def _misfits(
    names: Collection[str],
    nodes: Mapping[str, Skeleton],
    shapes: Mapping[str, list[int]],
    layout: _Layout,
    loading: Loading,
) -> set[str]:
    """Returns those of the named parameters whose shape has changed since the save, and notes them."""
    found = set()
    for name, shape in _shapes_of(layout).items():
        if name in names and shapes.get(name, shape) != shape:
            found.add(name)
            if _wanted(nodes.get(name), loading, "state", name):
                loading.differences.wrong_shape.append(
                    f"{loading.name('state', name)}: stored for a parameter of {shapes[name]}, live {shape}"
                )
    return found


def _match_state(
    nodes: dict[str, Skeleton],
    present: dict[Any, Any],
    layout: _Layout,
    known: set[str],
    stays: set[str],
    loading: Loading,
) -> dict[int, Any]:
    """Returns the state to load, by torch's numbers. A known parameter without stored state had none yet."""
    numbers = {name: number for number, name in enumerate(layout.names)}
    live = {name: present[number] for name, number in numbers.items() if number in present}
    # Where there is no state yet, what is stored comes as it is, and torch moves it to the device; or it comes as the
    # parameter is divided, if it is.
    like = dict(zip(layout.names, layout.parameters, strict=True))
    taken = {name: nodes[name] for name in layout.names if name in nodes and name not in stays}
    values = loading.values(taken, live, "state", rules=REPLACED, like=like)
    for name in layout.names:
        # Asked of all, since a part that was asked for by name is looked for in that way.
        goes = name not in stays and (name in nodes or (name in known and loading.wants("state", name)))
        if not goes and name in live:
            values[name] = live[name]
    return {numbers[name]: value for name, value in values.items() if value is not None}


def _load(optimizer: torch.optim.Optimizer, ready: dict[str, Any], layout: _Layout) -> None:
    optimizer.load_state_dict(ready)
    for number, parameter in enumerate(layout.parameters):
        if number in ready["state"]:
            loaded = optimizer.state[parameter]
            for key, value in ready["state"][number].items():
                if key in loaded:
                    loaded[key] = _standing(key, value, loaded[key])
    for group, values in zip(optimizer.param_groups, ready["param_groups"], strict=True):
        # torch loads copies; a learning rate that is a tensor stays the tensor that it was.
        group.update({key: value for key, value in values.items() if isinstance(value, torch.Tensor)})


def _standing(key: str, value: Any, loaded: Any) -> Any:
    """Returns what to keep of a stored value and torch's conversion of it.

    torch gives state the type of its parameter, although state of another type (float32 for a parameter in bfloat16)
    was kept so on purpose, and it cannot load text. `step` is a special case: its device depends on the optimizer.
    """
    if isinstance(value, torch.Tensor):
        if key == "step" or not isinstance(loaded, torch.Tensor) or value.dtype == loaded.dtype:
            return loaded
        return value.to(loaded.device)
    if isinstance(value, dict) and isinstance(loaded, dict):
        return {part: _standing(part, value[part], loaded.get(part)) for part in value}
    if type(value) in (list, tuple) and type(loaded) is type(value) and len(value) == len(loaded):
        return type(value)(_standing("", part, other) for part, other in zip(value, loaded, strict=True))
    return value


_SHAPED_AS_PARAMETERS: Final = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("sum", "acc_delta", "exp_inf", "ax", "prev"),
    }
)
"""State of torch's own optimizers that has the shape of its parameter."""


def _name_stored_parameters(
    tree: dict[str, Skeleton], groups: list[list[str]], loading: Loading
) -> tuple[dict[str, Skeleton], dict[str, list[int]]] | None:
    """Returns the result of `optimizer.state_dict()`, as another program has stored it, under the live names.

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
        names = _match_names(keys, live) if len(keys) == len(live) and len(stored) == len(groups) else None
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


def _match_names(keys: list[Any], live: list[str]) -> list[str] | None:
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
