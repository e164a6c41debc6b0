"""Notice, agree, save, exit: a job that is preempted stops at one step, saves, and exits in time.

Sources report that it is about to be preempted: signals, schedulers, clouds, a file, a function. They are small classes
that are combined in a list.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.preemption.sources.local import FileAppears, Slurm, Watcher
    from holdfast.preemption.sources.metadata import AWS, GCP, Azure
    from holdfast.preemption.sources.protocol import Demand, Hear, Notice, NoticeSource, PolledSource
    from holdfast.preemption.sources.signals import Kubernetes, Signals

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

_SOURCES: Final = {
    "local": ("FileAppears", "Slurm", "Watcher"),
    "metadata": ("AWS", "GCP", "Azure"),
    "protocol": ("Demand", "Hear", "Notice", "NoticeSource", "PolledSource"),
    "signals": ("Kubernetes", "Signals"),
}
"""Imported on demand: most programs need none of them, or few."""


def __getattr__(name: str) -> Any:
    for module, names in _SOURCES.items():
        if name in names:
            return getattr(import_module(f"holdfast.preemption.sources.{module}"), name)
    raise AttributeError(f"module 'holdfast.preemption' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
