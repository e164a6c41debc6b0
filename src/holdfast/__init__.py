"""holdfast keeps training jobs alive: it saves a running job without stopping it, and brings it back exactly."""

from typing import TYPE_CHECKING, Any

from holdfast import errors, events, jobs
from holdfast.checkpoint import Checkpoint
from holdfast.jobs import (
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    TorchrunSession,
    UploadTaskGroupBuilder,
    epoch_limiter,
)
from holdfast.manager import CheckpointManager
from holdfast.policies import All, Auto, Best, EveryN, Latest, Newer, Seconds, Steps
from holdfast.restore.driver import Restoration
from holdfast.resumable import Run, resumable
from holdfast.save.handle import SaveHandle
from holdfast.state import RNG, PerWorker, ResumableSampler, Shard, register_codec, register_type
from holdfast.worker_state import Backup, WorkerTrainingState

if TYPE_CHECKING:
    from holdfast.integrations.ray.session import RaySession
    from holdfast.integrations.torch.loader import ResumableDataLoader

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "All",
    "Auto",
    "Backup",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "EveryN",
    "Job",
    "JobRunner",
    "Latest",
    "LocalSession",
    "MultiNodeCheckpointManager",
    "Newer",
    "PerWorker",
    "RaySession",
    "Restoration",
    "ResumableDataLoader",
    "ResumableSampler",
    "Run",
    "SaveHandle",
    "Seconds",
    "Shard",
    "Steps",
    "TorchrunSession",
    "UploadTaskGroupBuilder",
    "WorkerTrainingState",
    "__version__",
    "epoch_limiter",
    "errors",
    "events",
    "jobs",
    "register_codec",
    "register_type",
    "resumable",
]


def __getattr__(name: str) -> Any:
    """What needs a framework is imported when it is asked for."""
    if name == "RaySession":
        from holdfast.integrations.ray.session import RaySession

        return RaySession
    if name == "ResumableDataLoader":
        from holdfast.integrations.torch.loader import ResumableDataLoader

        return ResumableDataLoader
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
