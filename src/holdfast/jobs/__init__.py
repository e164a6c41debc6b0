"""The epoch job: groups of tasks on named nodes, with a checkpoint of all nodes after each epoch."""

from holdfast.jobs.checkpoints import (
    ManifestMetadataHandler,
    MetadataHandler,
    MultiNodeCheckpointManager,
    NodeCheckpointManager,
)
from holdfast.jobs.job import Job, Task, TaskGroup, TaskOutput, epoch_limiter
from holdfast.jobs.node_store import NodeDurations
from holdfast.jobs.runner import JobResult, JobRunner
from holdfast.jobs.session import LocalSession, Session
from holdfast.jobs.torchrun_session import RemoteOutput, TorchrunSession
from holdfast.jobs.upload import UploadTaskGroupBuilder, UploadTo
from holdfast.jobs.workspace import Counter, Workspace

__all__ = [
    "Counter",
    "Job",
    "JobResult",
    "JobRunner",
    "LocalSession",
    "ManifestMetadataHandler",
    "MetadataHandler",
    "MultiNodeCheckpointManager",
    "NodeCheckpointManager",
    "NodeDurations",
    "RemoteOutput",
    "Session",
    "Task",
    "TaskGroup",
    "TaskOutput",
    "TorchrunSession",
    "UploadTaskGroupBuilder",
    "UploadTo",
    "Workspace",
    "epoch_limiter",
]
