"""holdfast keeps training jobs alive: it saves a running job without stopping it, and brings it back exactly."""

from holdfast.checkpoint import Checkpoint
from holdfast.manager import CheckpointManager
from holdfast.policies import All, Auto, Best, EveryN, Latest, Newer, Seconds, Steps
from holdfast.restore.restorer import Restoration
from holdfast.resumable import Run, resumable
from holdfast.save.handle import SaveHandle
from holdfast.state import RNG, ResumableSampler, register_codec, register_type

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
    "Restoration",
    "ResumableSampler",
    "Run",
    "SaveHandle",
    "Seconds",
    "Steps",
    "__version__",
    "register_codec",
    "register_type",
    "resumable",
]
