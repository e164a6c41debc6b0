"""An epoch job on the nodes of a Ray cluster: `python ray_job.py`, or `ray job submit -- python ray_job.py`.

Each trainer is an actor with a process of its own, on whatever node has room for it. This process drives them.
"""

from __future__ import annotations

import time

import numpy as np

import holdfast
from holdfast.events import Committed, Event
from holdfast.jobs import Task, Workspace

DIRECTORY = "runs/example"  # On storage that all nodes see.
TRAINERS = ["trainer_0", "trainer_1"]
EPOCHS = 20


def describe() -> tuple[holdfast.Job, Task]:
    """What is to be done, where, and how often; nothing runs yet."""
    with holdfast.Job() as job:

        @job.init_group
        def begin(workspace: Workspace) -> None:
            workspace["line"] = np.zeros(2)

        @job.epoch_group
        def train(workspace: Workspace) -> None:
            generator = np.random.default_rng(workspace.epoch)
            for _ in range(100):
                x = generator.uniform(-1, 1, 50)
                error = workspace["line"][0] * x + workspace["line"][1] - (3 * x + 1)
                workspace["line"] -= 0.01 * np.array([(error * x).mean(), error.mean()])
            time.sleep(0.2)  # In place of the rest of an epoch.

        @job.exit_group
        def result(workspace: Workspace) -> list[float]:
            return [float(value) for value in workspace["line"]]

    holdfast.epoch_limiter(job, EPOCHS)
    return job, result


def show(event: Event) -> None:
    """Prints which epochs are saved."""
    if isinstance(event, Committed):
        print(f"epoch {event.step} is saved", flush=True)


def main() -> None:
    """Runs the job to its end, from the last epoch that all nodes have saved."""
    job, result = describe()
    manager = holdfast.MultiNodeCheckpointManager(DIRECTORY, keep=holdfast.Latest(2), sinks=[show])
    with holdfast.RaySession(TRAINERS, actor_options={"num_cpus": 1}, replacements_allowed=10) as session:
        runner = holdfast.JobRunner(job, manager)
        last_epoch = runner.train(session)
    print(f"began with epoch {runner.result.resumed_from}, replaced nodes {runner.result.replacements} times")
    print(f"epoch {last_epoch}: {result.results()}")


if __name__ == "__main__":
    main()
