"""What old versions of other packages lack, so that the tests run with the oldest supported ones too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def alone(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns what keeps `dcp.save` and `dcp.load` from asking other workers. Old ones need no argument for it."""
    return {"no_dist": True} if "no_dist" in inspect.signature(function).parameters else {}


def dtypes(*names: str) -> list[Any]:
    """Returns those of torch's types that this version has."""
    import torch

    return [getattr(torch, name) for name in names if hasattr(torch, name)]


def skip_if_it_holds_a_function(scheduler: Any) -> None:
    """Skips a test if the state of `SWALR` has a function in this torch, which is refused."""
    if any(map(callable, scheduler.state_dict().values())):
        pytest.skip("in this torch SWALR has a function in its state, which is refused")


def skip_without_fsdp_on_cpu() -> None:
    """Skips a test if this torch cannot run FSDP2 without a GPU, as 2.6 cannot."""
    import torch

    if torch.torch_version.TorchVersion(torch.__version__) < "2.7":
        pytest.skip(f"torch {torch.__version__} cannot run FSDP2 on the CPU")
