"""A worker of the canonical job; the tests start several, as torchrun does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import holdfast as hf
from epoch_jobs import make_job
from holdfast.errors import StorageFullError
from holdfast.jobs import TorchrunSession, Workspace
from holdfast.storage import LocalStorage
from holdfast.storage.local_writer import LocalWriter


def say(**record: Any) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def train(session: TorchrunSession) -> None:
    """The job from end to end, without anything being kept."""
    job = make_job(None)
    total = job.exit_group.add(lambda workspace: float(workspace["total"][0]))
    array = job.exit_group.add(lambda workspace: workspace["total"])
    last = hf.JobRunner(job).train(session)
    others = [node for node in session.nodes if node != session.node]
    say(last=last, totals=dict(total.results()), own=array.output_on(session.node).fetch().sum())
    say(remote=repr(array.output_on(others[0]).fetch()), nodes=session.nodes)


class Place(LocalStorage):
    """A directory that something befalls while epoch 3 is saved, on worker 1."""

    def __init__(self, root: str, befalls: str) -> None:
        super().__init__(root)
        self._befalls = befalls

    def open_writer(self, path: str, size_bytes: int) -> LocalWriter:
        if path.startswith("step-000000003.") and "data-00001" in path:
            if self._befalls == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._befalls == "full":
                raise StorageFullError("no room", path=path)
        return super().open_writer(path, size_bytes)


def keep(session: TorchrunSession, directory: str, epochs: str = "-", befalls: str = "", nodes: str = "") -> None:
    """The job with its state kept, from one epoch after the other; `-` is wherever it stands."""
    own = nodes.split(",") if nodes else None
    for epoch in epochs.split(","):
        job = make_job(own)
        total = job.exit_group.add(lambda workspace: float(workspace["total"][0]), on=own)
        manager = hf.MultiNodeCheckpointManager(Place(directory, befalls), keep=hf.All())
        runner = hf.JobRunner(job, manager, None if epoch == "-" else int(epoch))
        last = runner.train(session)
        result = runner.result
        reports = getattr(manager.metadata_handler, "reports", {})
        timed = {action: [dict(one.node_seconds) for one in stats] for action, stats in reports.items()}
        loaded = runner.load_blobs_from_checkpoints("total", 2, session)
        value = float(session.workspace().get("total", [0.0])[0])
        say(last=last, totals=dict(total.results()), resumed=result.resumed_from, failed=result.failed_epochs)
        say(timed=timed, loaded=loaded, value=value)


def fail(session: TorchrunSession) -> None:
    """A task fails on one worker, while the others would go on for long."""

    def work(workspace: Workspace) -> None:
        if workspace.node == "worker_1":
            raise ZeroDivisionError("no more")
        say(working=True)
        time.sleep(600)

    job = hf.Job()
    job.epoch_group.add(work)
    hf.epoch_limiter(job, 1)
    try:
        hf.JobRunner(job).train(session)
    except hf.errors.TaskFailedError as error:
        say(group=error.group, task=error.task, node=error.node, text=error.message)
        raise


def die(session: TorchrunSession) -> None:
    """A worker dies amid a task."""

    def work(workspace: Workspace) -> None:
        if workspace.epoch == 5:
            if workspace.node == "worker_1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    job = hf.Job()
    job.epoch_group.add(work)
    hf.epoch_limiter(job, 5)
    try:
        hf.JobRunner(job).train(session)
    except hf.errors.AbsentError as error:
        say(ranks=error.ranks)
        raise


if __name__ == "__main__":
    with TorchrunSession() as the_session:
        programs: dict[str, Any] = {"train": train, "keep": keep, "fail": fail, "die": die}
        programs[sys.argv[1]](the_session, *sys.argv[2:])
