"""holdfast keeps training jobs alive: it saves a running job without stopping it, and brings it back exactly."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast import errors, events, jobs, preemption
    from holdfast.asking import ask
    from holdfast.catalog.holds import pin, unpin
    from holdfast.catalog.requests import Reply
    from holdfast.checkpoint import Checkpoint
    from holdfast.convert.exporter import export_checkpoint
    from holdfast.convert.importer import import_checkpoint
    from holdfast.following import Followed, follow
    from holdfast.integrations import dcp
    from holdfast.integrations.frameworks import accelerate, keras, lightning, transformers
    from holdfast.integrations.ray.session import RaySession
    from holdfast.integrations.torch.cluster import init_process_group
    from holdfast.integrations.torch.loader import ResumableDataLoader
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
    from holdfast.policies import All, Auto, Best, Epochs, EveryHours, EveryN, LastGood, Latest, Newer, Seconds, Steps
    from holdfast.preemption.config import TerminationConfig
    from holdfast.restore.records import Restoration
    from holdfast.save.handle import SaveHandle
    from holdfast.state import RNG, PerWorker, ResumableSampler, Shard, register_codec, register_type
    from holdfast.storage.kept_memory import HostMemory
    from holdfast.storage.open import open_storage
    from holdfast.storage.tiers import Tier, Tiers
    from holdfast.training.backup import Backup
    from holdfast.training.handler import PreemptionCheckpointHandler
    from holdfast.training.resumable import resumable
    from holdfast.training.run import Run
    from holdfast.training.worker_state import WorkerTrainingState
    from holdfast.tree import load, save

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "All",
    "Auto",
    "Backup",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "Epochs",
    "EveryHours",
    "EveryN",
    "Followed",
    "HostMemory",
    "Job",
    "JobRunner",
    "LastGood",
    "Latest",
    "LocalSession",
    "MultiNodeCheckpointManager",
    "Newer",
    "PerWorker",
    "PreemptionCheckpointHandler",
    "RaySession",
    "Reply",
    "Restoration",
    "ResumableDataLoader",
    "ResumableSampler",
    "Run",
    "SaveHandle",
    "Seconds",
    "Shard",
    "Steps",
    "TerminationConfig",
    "Tier",
    "Tiers",
    "TorchrunSession",
    "UploadTaskGroupBuilder",
    "WorkerTrainingState",
    "__version__",
    "accelerate",
    "ask",
    "dcp",
    "epoch_limiter",
    "errors",
    "events",
    "export_checkpoint",
    "follow",
    "import_checkpoint",
    "init_process_group",
    "jobs",
    "keras",
    "lightning",
    "load",
    "open_storage",
    "pin",
    "preemption",
    "register_codec",
    "register_type",
    "resumable",
    "save",
    "transformers",
    "unpin",
]


_HOMES: Final = {
    **dict.fromkeys(
        ("All", "Auto", "Best", "Epochs", "EveryHours", "EveryN", "LastGood", "Latest", "Newer", "Seconds", "Steps"),
        "holdfast.policies",
    ),
    "RNG": "holdfast.state",
    "Backup": "holdfast.training.backup",
    "Checkpoint": "holdfast.checkpoint",
    "CheckpointManager": "holdfast.manager",
    "HostMemory": "holdfast.storage.kept_memory",
    "Job": "holdfast.jobs",
    "JobRunner": "holdfast.jobs",
    "LocalSession": "holdfast.jobs",
    "MultiNodeCheckpointManager": "holdfast.jobs",
    "PerWorker": "holdfast.state",
    "PreemptionCheckpointHandler": "holdfast.training.handler",
    "RaySession": "holdfast.integrations.ray.session",
    "Reply": "holdfast.catalog.requests",
    "Restoration": "holdfast.restore.records",
    "ResumableDataLoader": "holdfast.integrations.torch.loader",
    "ResumableSampler": "holdfast.state",
    "Run": "holdfast.training.run",
    "SaveHandle": "holdfast.save.handle",
    "Shard": "holdfast.state",
    "TerminationConfig": "holdfast.preemption.config",
    "Tier": "holdfast.storage.tiers",
    "Tiers": "holdfast.storage.tiers",
    "TorchrunSession": "holdfast.jobs",
    "UploadTaskGroupBuilder": "holdfast.jobs",
    "WorkerTrainingState": "holdfast.training.worker_state",
    "ask": "holdfast.asking",
    "epoch_limiter": "holdfast.jobs",
    "follow": "holdfast.following",
    "pin": "holdfast.catalog.holds",
    "unpin": "holdfast.catalog.holds",
    "Followed": "holdfast.following",
    "export_checkpoint": "holdfast.convert.exporter",
    "import_checkpoint": "holdfast.convert.importer",
    "init_process_group": "holdfast.integrations.torch.cluster",
    "load": "holdfast.tree",
    "open_storage": "holdfast.storage.open",
    "register_codec": "holdfast.state",
    "register_type": "holdfast.state",
    "resumable": "holdfast.training.resumable",
    "save": "holdfast.tree",
}
"""By public name, the module that is imported when it is first used: `import holdfast` itself loads nothing."""

_EXTRAS: Final = {"ray": "ray", "torch": "torch"}
"""By module, the extra of holdfast that installs it."""


_MODULES: Final = {
    "accelerate": "holdfast.integrations.frameworks.accelerate",
    "dcp": "holdfast.integrations.dcp",
    "jobs": "holdfast.jobs",
    "keras": "holdfast.integrations.frameworks.keras",
    "lightning": "holdfast.integrations.frameworks.lightning",
    "transformers": "holdfast.integrations.frameworks.transformers",
}
"""Modules that are imported on demand; those for frameworks are `Door`s (`holdfast.extras`)."""


_PARTS: Final = frozenset({"errors", "events", "preemption"})
"""Modules of that name that are imported on demand."""


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _PARTS:
        return import_module(_MODULES.get(name, f"holdfast.{name}"))
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            from holdfast.extras import stand_in

            return stand_in(name, f"{error.name}, which is not installed", _EXTRAS[error.name])
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Doors(MetaPathFinder, Loader):
    """Finds `_MODULES` for those who import one by its short name: `from holdfast.lightning import Resumable`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        return ModuleSpec(name, self) if package == __name__ and module in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = __getattr__(module.__name__.rpartition(".")[2])


sys.meta_path.append(_Doors())


class _Package(ModuleType):
    """The package itself. Its `save` is the function; importing `holdfast.save`, a package, would replace it."""

    @property
    def save(self) -> Any:
        return __getattr__("save")

    @save.setter
    def save(self, package: ModuleType) -> None:
        """Leaves the function in place; an import finds `holdfast.save` by its name."""


sys.modules[__name__].__class__ = _Package
