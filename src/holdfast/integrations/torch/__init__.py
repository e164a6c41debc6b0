"""Integration of torch: tensors, modules, optimizers, random generators, and values that only torch has.

Importing this registers them; it is imported when the first torch object is found.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from holdfast.format.codecs import name_of, register_codec, register_type_source
from holdfast.integrations.torch import loader as loader  # Its adapter registers itself.
from holdfast.integrations.torch.modules import ModuleAdapter
from holdfast.integrations.torch.optimizers import OptimizerAdapter
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.state.adapters import StateAdapter, StateDictAdapter, void
from holdfast.state.registry import register_adapter, register_backend
from holdfast.state.rng import RandomSource, register_random_source

_VECTOR_FUNCTIONS: Final = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2"),
    *("sin", "sqrt", "tan", "tanh", "trunc"),
)
"""The functions that torch computes on the processor by the vector functions of oneMKL."""


def _settle_vector_functions() -> None:
    """Calls each vector function of oneMKL once, in this thread alone: so a restart computes the same.

    At its first call a function chooses its code. Where several threads call it first, one may compute its whole part
    with a relative error of 3e-4 (issue 188792 of PyTorch); so did the first step of AdamW in one process of fifteen.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _VECTOR_FUNCTIONS:
            getattr(torch, name)(value)


def _read_cuda() -> list[Any] | None:
    # A process that has drawn nothing on a device has not started CUDA; asking would start it.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def _write_cuda(states: list[Any]) -> None:
    if torch.cuda.is_available():
        for device, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), device)


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


def _find_declared_safe(name: str) -> type | None:
    """Returns the types that the program, or a library that it uses, has declared as safe to load from a file."""
    declared: list[Any] = torch.serialization.get_safe_globals()
    classes = (one[0] if isinstance(one, tuple) else one for one in declared)
    return next((cls for cls in classes if isinstance(cls, type) and name_of(cls) == name), None)


register_type_source(_find_declared_safe)
register_backend(torch.Tensor, TorchBackend())
register_adapter(torch.nn.Module, ModuleAdapter())
register_adapter(torch.optim.Optimizer, OptimizerAdapter())
register_adapter(torch.optim.lr_scheduler.LRScheduler, StateDictAdapter(may_change=False))
register_adapter(
    torch.Generator,
    StateAdapter(
        "torch.generator", lambda obj: obj.get_state(), lambda obj, state: void(obj.set_state(state.cpu())), last=True
    ),
)
register_random_source(
    "torch", RandomSource(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)
)
register_random_source("torch.cuda", RandomSource(_read_cuda, _write_cuda, torch.cuda.manual_seed_all))
register_codec(torch.dtype, tag="torch.dtype", encode=str, decode=_DTYPES.__getitem__)
register_codec(torch.memory_format, tag="torch.memory_format", encode=str, decode=_MEMORY_FORMATS.__getitem__)
register_codec(torch.device, tag="torch.device", encode=str, decode=torch.device)
register_codec(torch.Size, tag="torch.Size", encode=list, decode=torch.Size)
_settle_vector_functions()
