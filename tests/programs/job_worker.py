"""A worker of the canonical job; the tests start several, as torchrun does, or with a directory as their store."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import holdfast as hf
from epoch_jobs import make_job
from file_engine import join_in_directory
from holdfast.jobs import TorchrunSession, Workspace
from holdfast.storage import LocalStorage
from holdfast.storage.local.streams import LocalWriter

LIVENESS_SECONDS = 4.0


def say(**record: Any) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def open_session() -> TorchrunSession:
    """The session of the workers that torchrun has started; or of those that meet in the directory JOB_STORE."""
    store = os.environ.get("JOB_STORE")
    if store is None:
        return TorchrunSession()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cluster = join_in_directory(Path(store), rank, world_size, timeout_seconds=60)
    return TorchrunSession(cluster=cluster, liveness_seconds=LIVENESS_SECONDS)


class Place(LocalStorage):
    """A directory in which worker 1 dies when it writes its part of epoch 3, if that is wanted."""

    def __init__(self, root: str, befalls: str) -> None:
        super().__init__(root)
        self._befalls = befalls

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        if self._befalls == "dies" and path.startswith("step-000000003.") and "data-00001" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(path, size_bytes)


def keep(session: TorchrunSession, directory: str, befalls: str = "") -> None:
    """The job with its state kept."""
    # Whoever is started again by torchrun has had what befalls.
    befalls = "" if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else befalls
    job = make_job(None)
    total = job.exit_group.add(lambda workspace: float(workspace["total"][0]))
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(Place(directory, befalls)))
    try:
        last = runner.train(session)
    finally:
        say(resumed=runner.result.resumed_from)
    say(last=last, totals=dict(total.results()))


def fail(session: TorchrunSession) -> None:
    """A task fails on one worker, while the others would go on for long; one of these has Ctrl-C ignored."""
    if session.node == "worker_2":
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def work(workspace: Workspace) -> None:
        if workspace.node == "worker_1":
            raise ZeroDivisionError("no more")
        say(working=True)
        time.sleep(600)  # Work that would last: what ends it is the other worker's failure.

    job = hf.Job()
    job.epoch_group.add(work)
    hf.epoch_limiter(job, 1)
    try:
        hf.JobRunner(job).train(session)
    except hf.errors.TaskFailedError as error:
        say(group=error.group, task=error.task, node=error.node, text=error.message)
        raise


def end(session: TorchrunSession, directory: str, number: str) -> None:
    """A worker gets a signal in the middle of a task."""

    def work(workspace: Workspace) -> None:
        if workspace.epoch == 5:
            if workspace.node == "worker_1":
                os.kill(os.getpid(), int(number))
            time.sleep(600)  # As above: the other worker's end ends it.

    job = hf.Job()
    job.epoch_group.add(work)
    hf.epoch_limiter(job, 5)
    try:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(directory)).train(session)
    except hf.errors.AbsentError as error:
        say(ranks=error.ranks, message=error.message)
        raise


def main(program: str, *arguments: str) -> None:
    programs: dict[str, Any] = {"keep": keep, "fail": fail, "end": end}
    with open_session() as session:
        programs[program](session, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
