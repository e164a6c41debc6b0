"""An epoch job that can be killed at any moment: `python examples/epoch_job.py runs/job`, and the same again.

Two trainers each fit a line to a noisy share of the data, and the job averages what they have learned.
"""

from __future__ import annotations

import sys

import numpy as np

import holdfast
from holdfast.jobs import Workspace

TRAINERS = ["trainer_0", "trainer_1"]
EPOCHS = 8


def samples_of(node: str) -> np.ndarray:
    """A trainer's share of the data: points near the line y = 3 x + 1."""
    generator = np.random.default_rng(TRAINERS.index(node))
    x = generator.uniform(-1, 1, 1000)
    return np.stack([x, 3 * x + 1 + generator.normal(0, 0.1, 1000)], axis=1)


def describe() -> tuple[holdfast.Job, holdfast.jobs.Task]:
    """What is to be done, where, and how often; nothing runs yet."""
    with holdfast.Job() as job:
        # An object with state: made on each node, also when the job goes on from a checkpoint.
        job.add_object("reader", lambda: holdfast.ResumableSampler(1000, batch_size=50, seed=7))

        @job.init_group
        def begin(workspace: Workspace) -> None:
            workspace["line"] = np.zeros(2)

        @job.epoch_group
        def train(workspace: Workspace) -> float:
            samples, line, reader = samples_of(workspace.node), workspace["line"], workspace["reader"]
            loss = 0.0
            for batch in reader.batches(reader):
                x, y = samples[batch].T
                error = line[0] * x + line[1] - y
                line -= 0.1 * np.array([(error * x).mean(), error.mean()])
                loss = float(np.square(error).mean())
            workspace["loss"] = loss
            # In one piece: the trainers run at the same time, and `print` writes the end of the line by itself.
            sys.stdout.write(f"epoch {workspace.epoch}, {workspace.node}: loss {loss!r}\n")
            sys.stdout.flush()
            return loss

        @job.exit_group
        def result(workspace: Workspace) -> list[float]:
            return [float(value) for value in workspace["line"]]

    # It ends when the last batches of both are good, and after so many epochs in any case.
    for node in TRAINERS:
        job.add_stop_condition(lambda workspace: workspace["loss"] < 1e-9, on=node)
    holdfast.epoch_limiter(job, EPOCHS)
    return job, result


def main(directory: str) -> None:
    """Runs the job to its end, from wherever the last process stopped."""
    job, result = describe()
    runner = holdfast.JobRunner(job, holdfast.MultiNodeCheckpointManager(directory, keep=holdfast.Latest(2)))
    with holdfast.LocalSession(TRAINERS) as session:
        last_epoch = runner.train(session)
        print(f"began with epoch {runner.result.resumed_from}, ended with epoch {last_epoch}")
        slope, offset = np.mean([result.output_on(node).fetch() for node in TRAINERS], axis=0)
        print(f"y = {float(slope)!r} x + {float(offset)!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/epoch-job")
