"""Lists the parts of modules as torch does, in a fraction of the time.

torch's own walks are nested generators, one per level of modules, and so is its `state_dict`. These go through the same
dicts in one loop. A module whose class overrides these methods is walked by torch.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from holdfast.advice.strays import list_values
from holdfast.errors import UsageError

_WALKS: Final = ("modules", "named_modules", "parameters", "named_parameters", "_named_members")
_READS: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT: Final = ("_parameters", "_buffers", "_modules")
_MOST_COMPARED: Final = 4096
_MOST_VALUES: Final = 64

# What wraps a module under a name of its own, by the class. Names are kept without these parts, so that a wrapped
# module and a bare one have the same state. (Classes by name: importing that of a compiled module is slow.)
_WRAPPERS: Final = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod.",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module.",
    "torch.nn.parallel.data_parallel.DataParallel": "module.",
}


def list_modules(root: nn.Module) -> list[nn.Module]:
    """Returns all of `root.modules()`, in that order."""
    found: dict[int, nn.Module] = {}
    ahead = [root]
    is_plain = True
    while ahead:
        module = ahead.pop()
        if id(module) not in found:
            found[id(module)] = module
            # Programs put another method into a single module as well.
            own = module.__dict__
            is_plain = is_plain and "named_modules" not in own and "modules" not in own
            inner = module._modules
            if inner:
                ahead += [child for child in reversed(list(inner.values())) if child is not None]
    modules = list(found.values())
    return modules if is_plain and _are_torchs(modules, _WALKS) else list(root.modules())


def list_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Returns all of `root.parameters()`, in that order, given all modules of a root."""
    if not _are_torchs(modules, _WALKS):
        return list(modules[0].parameters())
    found = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
    return list(found.values())


def find_owners(parameters: Sequence[Any]) -> list[nn.Module]:
    """Returns the outermost of the program's modules that have some of these parameters, in the parameters' order."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found: dict[int, tuple[int, nn.Module]] = {}
    for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
        first = min((numbers[id(one)] for one in module.parameters() if id(one) in numbers), default=None)
        if first is not None:
            found[id(module)] = first, module
    inner = {id(child) for _, module in found.values() for child in module.modules() if child is not module}
    return [module for key, (_, module) in sorted(found.items(), key=lambda item: item[1][0]) if key not in inner]


class KeptGradients:
    """The gradients of parameters that a framework steps, but may never set to zero."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        """Returns those that exist, by the number of the parameter."""
        return {str(number): one.grad for number, one in enumerate(self._parameters) if one.grad is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces all of them."""
        for number, one in enumerate(self._parameters):
            gradient = state.get(str(number))
            one.grad = None if gradient is None else gradient.to(one.device)


def find_trained_beside(optimizers: Iterable[Any], objects: Iterable[object]) -> dict[str, Any]:
    """Returns, by name, the modules with parameters that optimizers train and that no module among the objects has."""
    held = {id(one) for root in objects if isinstance(root, nn.Module) for one in root.parameters()}
    trained = [one for root in optimizers for group in root.param_groups for one in group["params"]]
    strays = [one for one in trained if one.requires_grad and id(one) not in held]
    found: dict[str, Any] = {f"trained_{n}": module for n, module in enumerate(find_owners(strays) if strays else ())}
    return found | {"trained_gradients": KeptGradients(strays)} if found else {}


class Moving:
    """Saves a module once its parameters have changed: a frozen one would only make checkpoints larger."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._sums, self._has_moved = module, sum_up(module), False

    def state_dict(self) -> dict[str, Any]:
        """Returns the module's state; nothing while it is as the program made it."""
        self._has_moved = self._has_moved or sum_up(self._module) != self._sums
        return read_own_state(self._module) if self._has_moved else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the module's state."""
        if state:
            self._has_moved = True
            self._module.load_state_dict(state)


def find_moving(owners: Iterable[Any], objects: Iterable[object]) -> dict[str, Moving]:
    """Returns, by name, the modules that are attributes of the owners and share nothing with the objects."""
    held = {id(one) for root in objects if isinstance(root, nn.Module) for one in root.parameters()}
    found: dict[str, Moving] = {}
    for name, module in [each for owner in owners for each in vars(owner).items() if isinstance(each[1], nn.Module)]:
        own = list(module.parameters())
        if own and not any(one.is_meta or id(one) in held for one in own):
            held.update(map(id, own))
            found[f"moved_{name.strip('_')}" + (f"_{len(found)}" if f"moved_{name}" in found else "")] = Moving(module)
    return found


def sum_up(module: torch.nn.Module) -> list[int]:
    """Returns checksums of all parameters of a model: they differ if parameters were exchanged.

    Buffers do not count: with DDP, rank 0 broadcasts its own in an evaluation as well.
    """
    torch.nn.Module.state_dict(module)  # In this way, parameters of FSDP are shards again.
    sums = []
    for parameter in module.parameters():
        value: Any = parameter.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        if type(value) is torch.Tensor and value.layout == torch.strided:
            real = torch.view_as_real(value) if value.is_complex() else value
            sums.append(real.view(_WORDS[real.element_size()]).sum(dtype=torch.int64))
    return [] if not sums else [int(each) for each in torch.stack([each.to(sums[0].device) for each in sums])]


def list_named_parameters(modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Returns all of `root.named_parameters()`, in that order, given all modules of a root."""
    if not _are_torchs(modules, _WALKS):
        return list(modules[0].named_parameters())
    found: dict[int, tuple[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for prefix, module in _with_prefixes(modules[0]):
        if id(module) not in seen:
            seen.add(id(module))
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in found:
                    found[id(parameter)] = prefix + name, parameter
    return list(found.values())


def read_state(modules: list[nn.Module]) -> dict[str, Any]:
    """Returns `root.state_dict(keep_vars=True)`, without its metadata, given all modules of a root."""
    if not has_plain_state(modules):
        return dict(read_own_state(modules[0]))
    state: dict[str, Any] = {}
    for prefix, module in _with_prefixes(modules[0]):
        for hook in module._state_dict_pre_hooks.values():
            hook(module, prefix, True)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                state[prefix + name] = parameter
        buffers = module._buffers
        if buffers:
            left_out = module._non_persistent_buffers_set
            for name, buffer in buffers.items():
                if buffer is not None and name not in left_out:
                    state[prefix + name] = buffer
    return state


def has_plain_state(modules: list[nn.Module]) -> bool:
    """Returns True if the state of a root with these modules is its parameters and persistent buffers."""
    is_plain = _are_torchs(modules, _READS)
    for module in modules:
        own = module.__dict__
        if "state_dict" in own or "_save_to_state_dict" in own or module._state_dict_hooks:
            is_plain = False
    return is_plain


def read_own_state(module: nn.Module) -> dict[str, Any]:
    """Returns the result of `state_dict`: with the module's own tensors, unless its method has no such option."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        return module.state_dict()
    return module.state_dict(keep_vars=True)


def _with_prefixes(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Returns all modules with the prefixes of their names: one that appears in two places comes twice."""
    ahead: list[tuple[str, nn.Module]] = [("", root)]
    while ahead:
        prefix, module = ahead.pop()
        yield prefix, module
        inner = module._modules
        if inner:
            ahead += [(f"{prefix}{name}.", child) for name, child in reversed(list(inner.items())) if child is not None]


def _are_torchs(modules: list[nn.Module], names: tuple[str, ...]) -> bool:
    """Returns True if the modules' methods of those names are those of torch's own class."""
    return all(
        getattr(cls, name, None) is getattr(nn.Module, name, None) for cls in set(map(type, modules)) for name in names
    )


def watch_tensors(root: nn.Module) -> Callable[[], list[tuple[str, Any]]]:
    """Begins to watch tensors, arrays and numbers that are in no state dict: attributes, buffers that are not
    persistent.

    Those that do not exist yet are left out, as a step leaves its results in attributes. So are torch's own modules,
    metrics, and modules that add to their state. The result lists the names and tensors that changed since its last
    call.
    """
    whole, watched = weakref.ref(root), list[tuple[str, weakref.ref[nn.Module], str]]()
    for prefix, module in _with_prefixes(root) if _are_torchs([root], _READS) and not root._state_dict_hooks else ():
        is_metric = any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)
        if not (is_metric or type(module).__module__.startswith("torch.")) and _are_torchs([module], _READS):
            names = [*module._non_persistent_buffers_set, *(name for name in vars(module) if name not in _KEPT)]
            watched += [(prefix + name, weakref.ref(module), name) for name in names if _list_unsaved(module, name)]
    seen: dict[tuple[str, int], Any] = {}

    def look() -> list[tuple[str, Any]]:
        nonlocal seen
        earlier, seen = seen, {}
        changed: dict[str, Any] = {}
        for path, ref, name in watched:
            for number, (value, one) in enumerate(_list_unsaved(ref(), name)):
                spec, is_small = (one.shape, one.dtype, one.device), value is not one or one.numel() <= _MOST_COMPARED
                # Copies, as bytes: then values that are not numbers are equal.
                flat = one.resolve_conj().resolve_neg().reshape(-1) if is_small else None
                now: Any = one._version if flat is None else flat.view(torch.uint8).clone()
                seen[path, number] = weakref.ref(one), spec, now
                before = earlier.get((path, number), (None, None, None))
                if before[1] != spec:
                    continue
                if not torch.equal(before[2], now) if is_small else before[0]() is one and before[2] != now:
                    changed[path] = value
        state = [*list_values(read_state(list_modules(module)))] if changed and (module := whole()) is not None else []
        tensors: list[Any] = [one for one in state if type(one) in (torch.Tensor, nn.Parameter)]
        held = {one.untyped_storage().data_ptr() for one in tensors}  # Such as that of a buffer with a view of it.
        return [(path, value) for path, value in changed.items() if _address(value) not in held]

    return look if watched else list


def _address(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    return value.__array_interface__["data"][0] if isinstance(value, np.ndarray) else None


def _list_unsaved(module: nn.Module | None, name: str) -> list[tuple[Any, torch.Tensor]]:
    """Returns the tensors without a gradient and the arrays in an attribute, and in containers there; of very many,
    some.

    Each comes with a tensor to compare. That of a number has it as its only element: it may be the place in a queue, or
    a weight that is lowered. That of a large array has some of its elements, as arrays have no version.
    """
    # torch derives a weight from the parameter weight_orig, say.
    if module is None or any(own.startswith(f"{name}_") for own in module._parameters):
        return []
    value: Any = vars(module).get(name, module._buffers.get(name))
    if type(value) in (int, float) and abs(value) < sys.maxsize:
        return [(value, torch.tensor(float(value), dtype=torch.float64))]
    found: list[tuple[Any, torch.Tensor]] = []
    for one in islice(list_values(value), _MOST_VALUES):
        if isinstance(one, np.ndarray | np.generic):
            if one.dtype.kind in "biufc" and one.dtype.isnative:
                part = np.ascontiguousarray(one.flat[:: 1 + one.size // _MOST_COMPARED])
                found.append((one, torch.from_numpy(part.view(np.uint8))))
        elif (
            type(one) is torch.Tensor
            and one.layout is torch.strided
            and not (one.requires_grad or one.is_meta or one.is_inference() or one.is_quantized)
        ):
            found.append((one, one))
    return found


def holders_of(tensors: Sequence[Any]) -> Sequence[int] | None:
    """Returns the ranks of the workers that hold tensors together, if these are sharded over a mesh."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from holdfast.integrations.torch.meshes import mesh_ranks

    return mesh_ranks(tensors)


def find_renaming(modules: list[nn.Module]) -> Callable[[str], str]:
    """Returns a function from a module's names to names without those of wrappers, given all modules of a root."""
    kinds = set(map(type, modules))
    if not any(f"{cls.__module__}.{cls.__qualname__}" in _WRAPPERS for kind in kinds for cls in kind.__mro__):
        return str
    cuts: list[tuple[str, str]] = []
    for path, child in modules[0].named_modules(remove_duplicate=False):
        for cls in type(child).__mro__:
            part = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
            if part is not None:
                cuts.append((f"{path}." if path else "", part))
    # Deep ones first: to cut one out leaves what comes before it as it is.
    cuts.sort(key=lambda cut: -len(cut[0]))

    def rename(name: str) -> str:
        for prefix, part in cuts:
            if name.startswith(prefix + part):
                name = prefix + name[len(prefix) + len(part) :]
        return name

    return rename


def settle(module: nn.Module) -> list[nn.Module]:
    """Converts a module's parameters to the form in which they are saved: those of its optimizer, sharded over its
    mesh.

    FSDP2 leaves some gathered after a forward pass without a backward pass, and those are other tensors.

    Returns:
        All modules in it, itself first.

    Raises:
        UsageError: If the module hides which tensors its parameters are.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    divided = getattr(fsdp, "FSDPModule", None)
    modules = list_modules(module)
    kinds = {kind for kind in set(map(type, modules)) if divided is not None and issubclass(kind, divided)}
    for child in modules:
        if type(child) in kinds:
            cast(Any, child).reshard()
        if child._forward_hooks and any(
            getattr(hook, "__name__", "") == "_localize_dtensor" for hook in child._forward_hooks.values()
        ):
            refuse_localized(child.parameters())
            if _hides_parameters(child):
                raise _localized()
    return modules


def refuse_localized(parameters: Iterable[Any]) -> None:
    """**Pure.** Detects parameters that are a worker's own parts without a description.

    DDP with a mesh replaces tensor-parallel parameters by such parts, and torch notes on them what they were.

    Raises:
        UsageError: If there are some.
    """
    if any(hasattr(one, "_st_info") for one in parameters):
        raise _localized()


def _localized() -> UsageError:
    return UsageError(
        "DistributedDataParallel(..., device_mesh=...) has replaced tensor-parallel parameters by this worker's "
        "parts, which do not show where they belong",
        hint="Shard the module over the same mesh with fully_shard(module, mesh=...) instead.",
    )


def _hides_parameters(module: nn.Module) -> bool:
    """Returns True if there are attributes as such parameters leave after a forward pass: whole again, and in no
    list."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return False
    return any(isinstance(one, tensors.DTensor) for child in module.modules() for one in vars(child).values())
