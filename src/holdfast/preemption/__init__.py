"""Notice, agree, save, exit: a job that is to be taken away stops at one step, saves, and leaves in time.

Sources say that it is to be taken away: signals, schedulers, clouds, a file, a function. They are small classes, and
combined in a list.
"""

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
