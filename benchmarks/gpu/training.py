"""A GPT in bfloat16 whose optimizer keeps its moments in float32, on the GPU, or on the processor for a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from benchmarks.states.model import Model
from benchmarks.states.torch_state import State
from benchmarks.states.workloads import ModelSize

VOCABULARY: Final = 8192
_BYTES_A_PARAMETER: Final = 2 + 4 + 4


def pick_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """**Blocks** until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for parameters in bfloat16, with moments in float32, which torch's own makes in the parameters' type."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """By the kernels that take many tensors at once."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in trained]
            first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
            beta1, beta2 = group["betas"]
            for state in states:
                state["step"] += 1
            count = float(states[0]["step"])
            gradients = [parameter.grad.float() for parameter in trained]
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            del gradients
            roots = torch._foreach_sqrt(second)
            torch._foreach_div_(roots, (1 - beta2**count) ** 0.5)
            torch._foreach_add_(roots, group["eps"])
            changes = torch._foreach_div(first, roots)
            del roots
            torch._foreach_mul_(changes, -group["lr"] / (1 - beta1**count))
            torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(trained, [change.to(torch.bfloat16) for change in changes])


class DeviceState(State):
    """Live objects whose tensors stay where they are."""

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Fills the tensors, by the way of `state_dict`, whose tensors are the live ones."""
        with torch.no_grad():
            for live, read in zip(_leaves(self.tree()), _leaves(tree), strict=True):
                if live.data_ptr() != read.data_ptr():
                    live.copy_(read)

    def checksums(self) -> dict[str, int]:
        """Sums over all bits."""
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return {
            name: int(tensor.detach().reshape(-1).view(kinds[tensor.itemsize]).sum(dtype=torch.int64))
            for name, tensor in self.tensors().items()
        }

    def lose_values(self) -> None:
        """Sets all to zero."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.zero_()


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for part in parts for leaf in _leaves(part)]


class GpuTraining:
    """A training whose state has about a given size."""

    def __init__(self, gigabytes: float) -> None:
        self.device = pick_device()
        torch.manual_seed(0)
        width = 2048 if gigabytes > 6 else 1024 if gigabytes > 1 else 256 if gigabytes > 0.05 else 128
        wanted = gigabytes * 1e9 / _BYTES_A_PARAMETER - VOCABULARY * width
        layers = max(1, round(wanted / (12 * width * width)))
        # About a tenth of a second a step on a fast GPU.
        batch, length = (8, 1024) if self.device.type == "cuda" else (1, 32)
        with self.device:
            self.model = Model(ModelSize(VOCABULARY, length, width, layers)).to(torch.bfloat16)
            self._batch = torch.randint(VOCABULARY, (batch, length))
        self.optimizer = MixedAdamW(self.model.parameters())
        self.state = DeviceState({"model": self.model, "optimizer": self.optimizer})

    def step(self, allow_update: Callable[[], object] = lambda: None) -> None:
        """Forward, backward and the optimizer's step; the device may still be at it when this returns."""
        self.optimizer.zero_grad()
        self.model(self._batch).backward()
        allow_update()
        self.optimizer.step()

    def run(
        self, steps: int, begin: Callable[[], object] = lambda: None, allow_update: Callable[[], object] = lambda: None
    ) -> float:
        """**Blocks.** Begins with something, takes so many steps, and gives the seconds.

        `allow_update` is called before the first update.
        """
        synchronize(self.device)
        begun_at = time.perf_counter()
        begin()
        for number in range(steps):
            self.step(allow_update if number == 0 else lambda: None)
        synchronize(self.device)
        return time.perf_counter() - begun_at
