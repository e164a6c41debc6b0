"""Modules: parameters and buffers by name, filled in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.errors import UnsupportedValueError
from holdfast.format.encoding import escape
from holdfast.integrations.torch.loader import follow_plain
from holdfast.integrations.torch.module_walks import (
    find_renaming,
    has_plain_state,
    holders_of,
    list_modules,
    list_named_parameters,
    list_parameters,
    read_own_state,
    read_state,
    settle,
    watch_tensors,
)
from holdfast.integrations.torch.steps import AFTER_STEPS
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.state.adapters import (
    MADE_ANEW,
    OWNED,
    Adapter,
    CaptureContext,
    Loading,
    LoadNeeds,
    Oversights,
    Readable,
    Replication,
    refuse_type,
)
from holdfast.state.leaves import ArraySpec, Skeleton
from holdfast.state.registry import is_made_of_tensors

# These override loading for the sake of files from old versions alone.
_PLAIN_LOADERS: Final = frozenset(
    {
        nn.Module._load_from_state_dict,
        nn.modules.batchnorm._NormBase._load_from_state_dict,
        nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
    }
)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.training and module.dropout > 0


class ModuleAdapter(Adapter):
    """The state of a module is the result of `state_dict`, with names that are independent of wrappers.

    Parameters and buffers are filled in place: they keep their identity, `requires_grad`, `grad` and storage. One that
    is expanded or overlaps itself cannot be filled; it keeps its identity and gets memory of its own. A module that
    loads in its own way (hooks, extra state, overridden methods, values that are not its parameters and buffers) gets
    its state through `load_state_dict` as well. The same holds for a lazy module without its shapes, and for one that
    gives its tensors other shapes while it loads, or creates some that it lacks.
    """

    kind = "torch.module"
    follow_optimizers = AFTER_STEPS.add
    follow_loaders = staticmethod(follow_plain)

    def check(self, obj: Any, path: str) -> None:
        """Checks its submodules too."""
        try:
            for cls in set(map(type, list_modules(obj))):
                refuse_type(cls, path)
        except UnsupportedValueError:
            for name, module in obj.named_modules():
                refuse_type(type(module), f"{path}/{name}" if name else path)

    def prepare(self, obj: Any) -> None:
        """Calls `prepare_for_checkpoint` of the module and of its submodules."""
        modules = list_modules(obj)
        if any(hasattr(cls, "prepare_for_checkpoint") for cls in set(map(type, modules))):
            for module in modules:
                if hasattr(type(module), "prepare_for_checkpoint"):
                    cast(Any, module).prepare_for_checkpoint()

    def readable(self, obj: Any) -> Readable:
        """See `Adapter`. A lazy module gets its shapes, and one on the meta device its memory, before it is used."""
        tensors = (*obj.parameters(), *obj.buffers())
        is_prepared = any(hasattr(type(module), "prepare_for_checkpoint") for module in obj.modules())
        is_unfinished = is_prepared or any(is_lazy(tensor) or tensor.is_meta for tensor in tensors)
        return Readable.LATER if is_unfinished else Readable.ALWAYS

    def oversights_of(self, obj: Any) -> Oversights:
        """See `Adapter`. A torch module without parameters, such as a loss, has nothing to save."""
        draws = "dropout" if any(map(_drops, obj.modules())) else ""
        is_own = type(obj).__module__.startswith("torch.nn.")
        if is_own or any(True for _ in obj.parameters()) or any(True for _ in obj.buffers()) or obj.state_dict():
            watch = partial(watch_tensors, obj)
            return Oversights(draws=draws, holds=list(obj.parameters()), watch_unsaved=watch)
        lack = (
            "its state_dict() is empty, so nothing of it is saved. Modules in a plain list or dict are not "
            "registered: use nn.ModuleList or nn.ModuleDict"
        )
        return Oversights(lack, draws)

    def replication_of(self, obj: Any) -> Replication:
        """Held by the workers of the mesh of the module's parameters: others may have other modules.

        The parameters are kept equal. Each worker may have buffers of its own, such as the statistics of batch norm.
        """
        modules = settle(obj)
        parameters = list_parameters(modules)
        return Replication(holders_of(parameters), parameters, is_trained=True, renewed=_renewed_buffers(modules))

    def list_trained(self, obj: Any) -> Iterable[str]:
        """See `Adapter`: the parameters, and no buffers."""
        modules = list_modules(obj)
        rename = find_renaming(modules)
        return [escape(rename(name)) for name, _ in list_named_parameters(modules)]

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns values by name."""
        return _read(obj)

    def layout_of(self, obj: Any) -> LoadNeeds | None:
        """See `Adapter`. None if the module's classes or hooks decide what is saved."""
        modules = list_modules(obj)
        if not has_plain_state(modules):
            return None
        rename = find_renaming(modules)
        shapes = {rename(name): tuple(value.shape) for name, value in read_state(modules).items() if not is_lazy(value)}
        return LoadNeeds(shapes, ("",) if _loads_itself(obj) else _special_prefixes(obj))

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Compares names, shapes and types."""
        live = _read(obj)
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in live.values()):
            raise UnsupportedValueError(
                f"{loading.name()}: a module on the meta device has no memory to restore into",
                path=loading.name(),
                hint="Call its to_empty(device=...) before the restore, and initialize what is in no state_dict, such "
                "as non-persistent buffers.",
            )
        nodes = _without_wrapper(loading.children(stored), live)
        differences = loading.differences
        # Tied tensors are one under several names, of which a program without holdfast may have stored only one.
        tied = {id(value) for key, value in live.items() if key in nodes}
        lacking = (key for key, value in live.items() if key not in nodes and id(value) not in tied)
        differences.missing += [loading.name(key) for key in lacking if loading.wants(key)]
        extra = [key for key in nodes if key not in live and loading.wants(key)]
        own = {id(tensor) for tensor in (*obj.parameters(), *obj.buffers())}
        special = _special_prefixes(obj)
        direct = {key for key, value in live.items() if id(value) in own and not key.startswith(special)}
        custom = _loads_itself(obj) or bool(special) or len(direct) < len(live)
        if _loads_itself(obj):
            special = ("",)
            specs = {key: loading.spec_of(nodes[key]) for key in direct if key in nodes}
            direct -= {key for key, spec in specs.items() if spec is not None and _has_other_shape(live[key], spec)}
        values = dict(live)
        wanted = [key for key in live if key in nodes and loading.wants(key)]
        values |= loading.values({key: nodes[key] for key in wanted if key in direct}, live, rules=OWNED)
        handed_over = {key: nodes[key] for key in wanted if key not in direct}
        tried = {**handed_over, **{key: nodes[key] for key in extra if key.startswith(special)}}
        shaped, made = _changed_by_loading(obj, live, {key: loading.spec_of(node) for key, node in tried.items()})
        differences.extra += [loading.name(key) for key in extra if key not in made]
        handed_over |= {key: nodes[key] for key in made}
        present = {key: value for key, value in live.items() if key not in shaped}
        tensors = {key for key in handed_over if isinstance(live.get(key), torch.Tensor)}
        values |= loading.values({key: handed_over[key] for key in tensors}, present, rules=MADE_ANEW)
        values |= loading.values({key: node for key, node in handed_over.items() if key not in tensors}, present)
        changed = [key for key in live if values[key] is not live[key] and id(live[key]) in own and key not in shaped]
        unfillable = _BACKEND.describe([live[key] for key in changed]).unfillable
        # Those that could not be filled in place.
        new_memory = [
            (live[key], values[key])
            for row, key in enumerate(changed)
            if (key in direct if is_made_of_tensors(type(live[key])) else row in unfillable)
        ]
        return lambda: _finish(obj, loading.complete(values) if custom else None, made, new_memory)


_BACKEND: Final = TorchBackend()


def _without_wrapper(nodes: Mapping[str, Any], live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes what `torch.compile` and DDP add to the names of an imported file, unless the live module has it too."""
    if any("_orig_mod." in key for key in nodes):
        nodes = {key.replace("_orig_mod.", ""): node for key, node in nodes.items()}
    while nodes and nodes.keys().isdisjoint(live) and all(key.startswith("module.") for key in nodes):
        nodes = {key.removeprefix("module."): node for key, node in nodes.items()}
    return nodes


def _changed_by_loading(
    module: nn.Module, live: dict[str, Any], specs: dict[str, ArraySpec | None]
) -> tuple[set[str], dict[str, str]]:
    """Returns which values the modules' own loading accepts although they have another shape, or are missing.

    A lazy module gets its shapes this way, and one that observes values: fake quantization has scales for each channel
    only once it has seen some. Others create a buffer that is None until then. A copy of the module shows what it
    accepts.

    Args:
        module: The module.
        live: Its tensors by name.
        specs: The stored tensors of those that the modules load themselves, and of names that the module lacks; None
            for other values.

    Returns:
        The names of tensors to which loading gives the stored shape; and by the name of each tensor that loading
        creates, the module's own name for it.
    """
    shaped = {key for key, spec in specs.items() if spec is not None and key in live and is_lazy(live[key])}
    made: dict[str, str] = {}
    differing = {
        key
        for key, spec in specs.items()
        if key not in shaped and spec is not None and (key not in live or _has_other_shape(live[key], spec))
    }
    if not differing:
        return shaped, made
    rename = find_renaming(list_modules(module))
    paths = {f"{path}." if path else "": child for path, child in module.named_modules(remove_duplicate=False)}
    # A wrapper has the same name as what it wraps, which comes later and has the tensors.
    owners = {rename(path): (path, child) for path, child in paths.items()}
    parts: dict[str, dict[str, ArraySpec | None]] = {}
    for key, spec in specs.items():
        parts.setdefault(_find_prefix(key, owners), {})[key] = spec
    for prefix, own in parts.items():
        if differing.isdisjoint(own):
            continue
        path, child = owners[prefix]
        names = {key: key[len(prefix) :] for key in own}
        refused = _refused(child, {names[key]: (live.get(key), spec) for key, spec in own.items()})
        taken = {key for key in differing.intersection(own) if names[key] not in refused}
        shaped |= taken & live.keys()
        made |= {key: path + names[key] for key in taken - live.keys()}
    if (left := differing - shaped - made.keys()) and (
        _loads_itself(module) or any(child._load_state_dict_pre_hooks for child in paths.values())
    ):
        origins = {key: owners[prefix][0] + key[len(prefix) :] for prefix, own in parts.items() for key in own}
        taken = _taken_by(module, rename, origins, specs, left)
        shaped |= taken & live.keys()
        made |= {key: origins[key] for key in taken - live.keys()}
    return shaped, made


def _loads_itself(module: nn.Module) -> bool:
    return type(module).load_state_dict is not nn.Module.load_state_dict


def _taken_by(
    module: nn.Module,
    rename: Callable[[str], str],
    origins: dict[str, str],
    specs: dict[str, ArraySpec | None],
    differing: set[str],
) -> set[str]:
    """Returns the differing names whose stored shapes a module has after its own loading; it is not changed.

    A load without an error proves nothing: some modules drop what does not fit.
    """
    try:
        trial = copy.deepcopy(module)
        state = trial.state_dict()
        for key, spec in specs.items():
            if spec is not None:
                state[origins[key]] = _BACKEND.new(spec, state.get(origins[key])).zero_()
        trial.load_state_dict(state)
        loaded = {rename(name): value for name, value in trial.state_dict().items()}
    except Exception:  # noqa: BLE001  As in `_refused`.
        return set()
    shapes = {key: spec.shape for key in differing if (spec := specs[key]) is not None}
    return {key for key, shape in shapes.items() if tuple(getattr(loaded.get(key), "shape", ())) == shape}


def _has_other_shape(value: Any, spec: ArraySpec) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) != spec.shape


def _find_prefix(key: str, prefixes: Container[str]) -> str:
    """Returns the longest of the prefixes that a name has; the empty one is among them."""
    prefix = key
    while prefix not in prefixes:
        prefix = prefix.rstrip(".").rpartition(".")[0]
        prefix += "." if prefix else ""
    return prefix


def _refused(module: nn.Module, tensors: dict[str, tuple[Any, ArraySpec | None]]) -> Container[str]:
    """Returns the names that a module would not load, given the stored tensors; it is not changed."""
    errors: list[str] = []
    unexpected: list[str] = []
    try:
        state = {
            name: _BACKEND.new(spec).zero_()
            if own is None
            else torch.zeros(spec.shape, dtype=own.dtype, device=own.device)
            for name, (own, spec) in tensors.items()
            if spec is not None
        }
        version = {"version": module._version}
        copy.deepcopy(module)._load_from_state_dict(state, "", version, True, [], unexpected, errors)
    except Exception:  # noqa: BLE001  It comes out of the module's own code: then it does not take them.
        return tensors
    return tensors if errors else unexpected


def _finish(
    module: nn.Module, values: dict[str, Any] | None, made: dict[str, str], new_memory: list[tuple[Any, Any]]
) -> None:
    """Completes the load after the module's own tensors have been filled."""
    for tensor, filled in new_memory:
        if is_made_of_tensors(type(tensor)):
            for name in tensor.__tensor_flatten__()[0]:
                setattr(tensor, name, getattr(filled, name))
        else:
            tensor.data = filled
    if values is not None:
        _load(module, values, made)


def _renewed_buffers(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Returns the buffers that are expected to differ between workers: DDP broadcasts those of the first one at every
    step.

    If the module itself is named and not its wrapper, these are the statistics of batch norm, unless DDP in it was
    configured to leave buffers alone.
    """
    wrappers = [one for one in modules if type(one).__name__ == "DistributedDataParallel"]
    if wrappers:
        return [buffer for one in wrappers if getattr(one, "broadcast_buffers", False) for buffer in one.buffers()]
    norms = (one for one in modules if isinstance(one, nn.modules.batchnorm._BatchNorm))
    return [buffer for one in norms for buffer in one.buffers(recurse=False)]


def _read(module: nn.Module) -> dict[str, Any]:
    modules = settle(module)
    rename = find_renaming(modules)
    state = read_state(modules)
    return state if rename is str else {rename(name): value for name, value in state.items()}


def _load(module: nn.Module, values: dict[str, Any], made: dict[str, str]) -> None:
    # The live state has the module's own names, in its order, and the versions that loading hooks look at.
    state = read_own_state(module)
    rename = find_renaming(list_modules(module))
    devices = {name.rpartition(".")[0]: one.device for name, one in state.items() if isinstance(one, torch.Tensor)}
    elsewhere = next(iter(devices.values()), None)
    for name in state:
        state[name] = values[rename(name)]
    for key, name in made.items():
        # A module may keep the very tensor that it is given, which then must be on the device of its others.
        state[name] = values[key].to(devices.get(name.rpartition(".")[0], elsewhere))
    module.load_state_dict(state)


_FSDP_HOOKS: Final = frozenset(
    {
        "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
        "FSDPParam.__init__.<locals>.<lambda>",
    }
)


def _special_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Returns the prefixes of modules that change what they load."""
    rename = find_renaming(list_modules(module))
    return tuple(
        rename(f"{path}." if path else "")
        for path, child in module.named_modules(remove_duplicate=False)
        if any(map(_changes_values, child._load_state_dict_pre_hooks.values()))
        or any(map(_changes_values, child._load_state_dict_post_hooks.values()))
        or type(child)._load_from_state_dict not in _PLAIN_LOADERS
    )


def _changes_values(hook: Any) -> bool:
    """Returns True if a hook may change loaded values; those of FSDP2 do not.

    One of them frees the parameters that it had gathered. The other handles parameters whose memory was replaced, and
    filling in place replaces none.
    """
    return getattr(getattr(hook, "hook", hook), "__qualname__", "") not in _FSDP_HOOKS
