"""The live state of one process in torch, and its training loop."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from benchmarks.harness.timing import timed
from benchmarks.states.live import LiveState, view_arrays
from benchmarks.states.model import Adapted, Model
from benchmarks.states.training import WARM_UP_STEPS, Training, first_batch, nothing
from benchmarks.states.workloads import TRAINED, ModelSize, Workload, state_shapes
from torch import nn


class State(LiveState):
    """Live objects: a model and its optimizer, or a dict of loose tensors.

    Attributes:
        objects: What is saved, by name: `model` and `optimizer`, or `tensors`.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects = objects
        self.homes = {name: tensor.detach() for name, tensor in self.tensors().items()}

    def tree(self) -> dict[str, Any]:
        """The input of torch's own ways of saving: a `state_dict` for each object."""
        return {
            name: obj.state_dict() if hasattr(obj, "state_dict") else dict(obj) for name, obj in self.objects.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by one flat name each."""
        return dict(self._walk())

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Puts a tree that was read back into the objects, the way a user of torch does it."""
        for name, obj in self.objects.items():
            if hasattr(obj, "load_state_dict"):
                obj.load_state_dict(tree[name])
            else:
                fill(obj, tree[name])

    def touch(self) -> None:
        """Reads each tensor."""
        for tensor in self.homes.values():
            tensor.sum()

    def come_home(self) -> None:
        """Lays tensors that a restore has put in place of others back where they were, values and all."""
        for name, tensor in self._walk():
            home = self.homes[name]
            if tensor.data_ptr() != home.data_ptr():
                home.copy_(tensor.detach())
        optimizer = self.objects.get("optimizer")
        if optimizer is not None:
            for name, parameter in self.objects["model"].named_parameters():
                for kind in optimizer.state.get(parameter, ()):
                    optimizer.state[parameter][kind] = self.homes[f"{kind}/{name}"]
        gc.collect()

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        if "tensors" in self.objects:
            yield from self.objects["tensors"].items()
            return
        for name, parameter in self.objects["model"].named_parameters():
            yield name, parameter.detach()
            for kind, value in self.objects["optimizer"].state.get(parameter, {}).items():
                yield f"{kind}/{name}", value


def fill(live: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    """Copies values into live tensors of the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(read[name])


def make_state(workload: Workload, memory: mmap.mmap) -> State:
    """The live objects of a workload, all of whose tensors are in the given memory."""
    views = {name: torch.from_numpy(array) for name, array in view_arrays(workload, memory).items()}
    if workload.model is None:
        return State({"tensors": views})
    with torch.device("meta"):
        bare = Model(workload.model)
        model = Adapted(bare, workload.model, workload.adapter_rank) if workload.adapter_rank else bare
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if own != {name: shape for name, shape in state_shapes(workload) if "/" not in name}:
        raise AssertionError("the model does not have the parameters that its workload says")
    trained = [name for name in own if f"step/{name}" in views]
    for prefix, module in model.named_modules():
        for name in list(module._parameters):
            full = f"{prefix}.{name}" if prefix else name
            module._parameters[name] = nn.Parameter(views[full], requires_grad=full in trained)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    for name in trained:
        optimizer.state[model.get_parameter(name)] = {
            "step": views[f"step/{name}"],
            "exp_avg": views[f"exp_avg/{name}"],
            "exp_avg_sq": views[f"exp_avg_sq/{name}"],
        }
    return State({"model": model, "optimizer": optimizer})


OwnState = TypeVar("OwnState", bound=State)


class TorchTraining(Training[OwnState]):
    """Eager, with `torch.optim.AdamW`."""

    def __init__(
        self,
        size: ModelSize,
        module: Any,
        optimizer: torch.optim.Optimizer,
        make_state: Callable[[dict[str, Any]], OwnState],
    ) -> None:
        # As JAX and TensorFlow do by themselves: numbers too small to be held in full, of which the optimizer's state
        # is soon full, make a step take three times as long, now more and now less. Later threads have it too.
        torch.set_flush_denormal(True)
        self._module, self._optimizer = module, optimizer
        self._batch = torch.from_numpy(first_batch(size))
        for _ in range(WARM_UP_STEPS):
            self.step(nothing)
        self.state = make_state({"model": module, "optimizer": optimizer})

    def step(self, allow_update: Callable[[], object]) -> float:
        """Forward, backward and the optimizer's step."""
        self._optimizer.zero_grad()
        self._module(self._batch).backward()

        def update() -> None:
            allow_update()
            self._optimizer.step()

        return timed(update)


def make_training(scale: float) -> TorchTraining[State]:
    """A loop of one process."""
    torch.manual_seed(0)
    size = TRAINED.scaled(scale)
    model = Model(size)
    return TorchTraining(size, model, torch.optim.AdamW(model.parameters(), lr=1e-4), State)
