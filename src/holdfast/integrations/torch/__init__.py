"""torch: tensors, modules, optimizers, random generators, and the values that only torch has.

Importing this registers them; it happens by itself when the first object of torch is met.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.format.codecs import name_of, register_codec, register_type_source
from holdfast.integrations.torch.generators import CPU_SOURCE, CUDA_SOURCE, GENERATOR
from holdfast.integrations.torch.modules import ModuleAdapter
from holdfast.integrations.torch.optimizers import OptimizerAdapter
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.state.registry import StateDictAdapter, register_adapter, register_backend
from holdfast.state.rng import register_random_source

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


def _find_declared_safe(name: str) -> type | None:
    """What the program, or a library that it uses, has declared as safe to be made from a file."""
    declared: list[Any] = torch.serialization.get_safe_globals()
    classes = (one[0] if isinstance(one, tuple) else one for one in declared)
    return next((cls for cls in classes if isinstance(cls, type) and name_of(cls) == name), None)


register_type_source(_find_declared_safe)
register_backend(torch.Tensor, TorchBackend())
register_adapter(torch.nn.Module, ModuleAdapter())
register_adapter(torch.optim.Optimizer, OptimizerAdapter())
register_adapter(torch.optim.lr_scheduler.LRScheduler, StateDictAdapter(may_change=False))
register_adapter(torch.Generator, GENERATOR)
register_random_source("torch", CPU_SOURCE)
register_random_source("torch.cuda", CUDA_SOURCE)
register_codec(torch.dtype, tag="torch.dtype", encode=str, decode=_DTYPES.__getitem__)
register_codec(torch.memory_format, tag="torch.memory_format", encode=str, decode=_MEMORY_FORMATS.__getitem__)
register_codec(torch.device, tag="torch.device", encode=str, decode=torch.device)
register_codec(torch.Size, tag="torch.Size", encode=list, decode=torch.Size)

# The data loader's adapter registers itself.
from holdfast.integrations.torch import loader as loader  # noqa: E402
