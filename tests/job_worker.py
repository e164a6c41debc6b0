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
from holdfast.jobs import TorchrunSession, Workspace


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
        {"train": train, "fail": fail, "die": die}[sys.argv[1]](the_session)
