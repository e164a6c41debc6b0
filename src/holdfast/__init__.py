"""holdfast keeps training jobs alive: it saves a running job without stopping it, and brings it back exactly."""

from typing import TYPE_CHECKING, Any

from holdfast import errors, events, preemption
from holdfast.checkpoint import Checkpoint
from holdfast.manager import CheckpointManager
from holdfast.policies import All, Auto, Best, EveryN, Latest, Newer, Seconds, Steps
from holdfast.preemption.handler import PreemptionCheckpointHandler
from holdfast.preemption.termination import TerminationConfig
from holdfast.restore.driver import Restoration
from holdfast.resumable import Run, resumable
from holdfast.save.handle import SaveHandle
from holdfast.state import RNG, PerWorker, ResumableSampler, Shard, register_codec, register_type

if TYPE_CHECKING:
    from holdfast.integrations.torch.loader import ResumableDataLoader

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "All",
    "Auto",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "EveryN",
    "Latest",
    "Newer",
    "PerWorker",
    "PreemptionCheckpointHandler",
    "Restoration",
    "ResumableDataLoader",
    "ResumableSampler",
    "Run",
    "SaveHandle",
    "Seconds",
    "Shard",
    "Steps",
    "TerminationConfig",
    "__version__",
    "errors",
    "events",
    "preemption",
    "register_codec",
    "register_type",
    "resumable",
]


def __getattr__(name: str) -> Any:
    """What needs a framework is imported when it is asked for."""
    if name == "ResumableDataLoader":
        from holdfast.integrations.torch.loader import ResumableDataLoader

        return ResumableDataLoader
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
