"""The live state of one worker of several: a module of FSDP2 or DDP and its optimizer."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from benchmarks.several_workers import SIDE, Setup
from benchmarks.states.model import Model
from benchmarks.states.torch_state import State
from benchmarks.states.workloads import ModelSize

_GROUP: Final = 8
"""So many small layers are one part of FSDP2."""

_WHOLE: Final = 1 << 22
"""Whole numbers up to here stay exact in float32 when the number of a row is added."""


class WorkersState(State):
    """The state of one worker. Values depend on the version, the tensor and the row, not on the worker."""

    def parts(self) -> list[torch.Tensor]:
        """This worker's part of each tensor."""
        return [_local(tensor) for tensor in self.tensors().values()]

    def change(self, version: int) -> None:
        """Gives all tensors the values of a version."""
        for number, (name, tensor) in enumerate(self._walk()):
            _local(tensor).copy_(_values(name, tensor, number, version))

    def wipe(self) -> None:
        """Sets all to zero, so that what a restore leaves out shows."""
        for part in self.parts():
            part.zero_()

    def differing(self, version: int) -> list[str]:
        """The names of those tensors that do not have the values of a version."""
        return [
            name
            for number, (name, tensor) in enumerate(self._walk())
            if not torch.equal(_local(tensor), _values(name, tensor, number, version).expand_as(_local(tensor)))
        ]

    def touch(self) -> None:
        """Reads each tensor."""
        for part in self.parts():
            part.sum()

    def come_home(self) -> None:
        """Nothing to do: what was restored is where it was."""
        return


def make_workers_state(setup: Setup) -> WorkersState:
    """**Collective.** The state that a setup saves, in a job of any number of workers."""
    if setup.model is not None:
        module, optimizer = make_module(setup.model, is_replicated=setup.is_replicated)
    else:
        module, optimizer = _wrap(_make_small(setup.leaves), is_replicated=setup.is_replicated)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return WorkersState({"model": module, "optimizer": optimizer})


def make_module(size: ModelSize, *, is_replicated: bool) -> tuple[Any, torch.optim.Optimizer]:
    """**Collective.** A model with random weights, divided over all workers or replicated, and its optimizer."""
    with torch.device("meta"):
        model = Model(size)
    return _wrap(model, is_replicated=is_replicated)


def _wrap(module: Any, *, is_replicated: bool) -> tuple[Any, torch.optim.Optimizer]:
    if not is_replicated:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in module.blocks if isinstance(module, Model) else module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                _local(parameter).normal_(0.0, 0.02)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True) if is_replicated else module
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4)


def _make_small(leaves: int) -> nn.Module:
    # Each parameter comes with two moments and a count of its steps.
    with torch.device("meta"):
        layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(max(leaves // 4, 1))]
        return nn.Sequential(*(nn.Sequential(*layers[n : n + _GROUP]) for n in range(0, len(layers), _GROUP)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _values(name: str, tensor: torch.Tensor, number: int, version: int) -> torch.Tensor:
    """One number for each row that this worker holds: the first, and from there on one more a row."""
    first = (number * 7919 + version * 104_729) % _WHOLE
    if tensor.dim() == 0:
        return torch.tensor(float(first))
    begin, rows = 0, tensor.shape[0]
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        begin, rows = offset[0], shape[0]
    column = torch.arange(first + begin, first + begin + rows, dtype=torch.float32)
    return column.view(-1, *([1] * (tensor.dim() - 1)))
