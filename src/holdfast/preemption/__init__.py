"""Notice, agree, save, exit: a job that is to be taken away stops at one step, saves, and leaves in time.

Sources say that it is to be taken away: signals, schedulers, clouds, a file, a function. They are small classes, and
combined in a list.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.preemption.aws import AWS
    from holdfast.preemption.azure import Azure
    from holdfast.preemption.gcp import GCP
    from holdfast.preemption.kubernetes import Kubernetes
    from holdfast.preemption.notices import Demand, Hear, Notice, NoticeSource, PolledSource
    from holdfast.preemption.signals import Signals
    from holdfast.preemption.slurm import Slurm
    from holdfast.preemption.watching import FileAppears, Watcher

__all__ = [
    "AWS",
    "GCP",
    "Azure",
    "Demand",
    "FileAppears",
    "Hear",
    "Kubernetes",
    "Notice",
    "NoticeSource",
    "PolledSource",
    "Signals",
    "Slurm",
    "Watcher",
]

_HOMES: Final = {
    "AWS": "aws",
    "Azure": "azure",
    "Demand": "notices",
    "FileAppears": "watching",
    "GCP": "gcp",
    "Hear": "notices",
    "Kubernetes": "kubernetes",
    "Notice": "notices",
    "NoticeSource": "notices",
    "PolledSource": "notices",
    "Signals": "signals",
    "Slurm": "slurm",
    "Watcher": "watching",
}
"""Imported when asked for: most programs need none of them, or few."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"holdfast.preemption.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'holdfast.preemption' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
