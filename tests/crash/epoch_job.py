"""Kills the workers of an epoch job, again and again, and looks at what becomes of its epochs and of its total.

`python -m crash.epoch_job`. A job of three forked processes reads ten rows, three an epoch, and sums them
up from 100: after its four epochs the total is 145. It keeps two epochs. At random moments all of its processes are
killed with SIGKILL; or one of them, and then the others, soon or when they have ended by themselves. The job is started
again, until it ends; then the next one begins in a new directory. It must be that

* each start goes on from the newest epoch that was said to be saved, or a later one, the same on all workers,
* all epochs that are there are whole: the two newest, the one that the last start went on from, and no more than one
  that was just committed,
* who survives another one ends by itself, within the limit,
* the job ends with 145 on each worker, with two epochs and nothing else.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from crash.command import WrongStateError, check_whole, run_command, show_progress
from crash.forked import ForkedJob
from crash.joint import LIMIT_SECONDS
from file_engine import join_in_directory
from holdfast.catalog import StoredRun
from holdfast.errors import HoldfastError
from holdfast.jobs import (
    Job,
    JobRunner,
    LocalSession,
    ManifestMetadataHandler,
    MultiNodeCheckpointManager,
    TorchrunSession,
    Workspace,
)
from holdfast.policies import Latest
from holdfast.storage import LocalStorage, MemoryStorage

WORKERS: Final = 3
EPOCHS: Final = 4
TOTAL: Final = 145
KEPT: Final = 2
LIVENESS_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 60.0

_LENGTH: Final = 100_000
_SHARE_ALONE: Final = 0.1
"""Of the kills after which the others are left to themselves: that takes as long as they have to wait for a sign."""


class Tally(msgspec.Struct):
    """What happened over all kills.

    Attributes:
        kills: How many there were.
        jobs: How many jobs have ended.
        survived: How often others had to notice a death by themselves.
        in_save: How often an unfinished save was left behind.
    """

    kills: int = 0
    jobs: int = 0
    survived: int = 0
    in_save: int = 0


class _Rows:
    """Reads the numbers 0 to 9, some at a time."""

    def __init__(self) -> None:
        self.at = 0

    def read(self, count: int) -> range:
        rows = range(10)[self.at : self.at + count]
        self.at += len(rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class _Handler(ManifestMetadataHandler):
    """Tells of each epoch that is saved."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def write(self, epoch: int) -> None:
        super().write(epoch)
        self._tell(f"saved {epoch}")


def make_job(tell: Callable[[str], None]) -> Job:
    """The job, on all nodes; it tells of each epoch that is trained and about to be saved."""
    import numpy as np

    with Job() as job:
        job.add_object("rows", _Rows)

        @job.init_group
        def begin(workspace: Workspace) -> None:
            workspace["total"] = np.full(_LENGTH, 100)

        @job.epoch_group
        def add(workspace: Workspace) -> bool:
            workspace["total"] += sum(workspace["rows"].read(3))
            tell(f"trained {workspace.epoch}")
            return bool(workspace["rows"].at == 10)

    job.add_stop_condition(add.output)
    return job


def work(directory: Path, store: Path, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker does; returns its exit code."""
    try:
        cluster = join_in_directory(store, rank, WORKERS, timeout_seconds=PATIENCE_SECONDS)
        with TorchrunSession(cluster=cluster, liveness_seconds=LIVENESS_SECONDS) as session:
            tell("joined")
            runner = JobRunner(
                make_job(tell),
                MultiNodeCheckpointManager(directory, keep=Latest(KEPT), metadata_handler=_Handler(tell)),
            )
            epoch = runner.train(session)
            resumed_from, total = runner.result.resumed_from, session.workspace()["total"]
            tell(f"began {-1 if resumed_from is None else resumed_from}")
            tell(f"ended {epoch} {int(total.min())} {int(total.max())}")
    except HoldfastError as error:
        tell(f"failed {error!r}")
        return 3
    return 0


def play_start(
    directory: Path, store: Path, newest: int, dice: random.Random, span_seconds: float | None, tally: Tally
) -> tuple[int, bool]:
    """Starts the job, and kills it unless it ends before.

    Args:
        directory: Where its epochs are kept.
        store: Where its workers meet.
        newest: The newest epoch that was said to be saved before; -1 for none.
        dice: For the moment, and the victim.
        span_seconds: Within how many seconds to kill it, after an epoch that is thrown; None not to.
        tally: Takes note of what happens.

    Returns:
        The newest epoch that was said to be saved, and whether the job has ended.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    job = ForkedJob(WORKERS, lambda rank, tell: work(directory, store, rank, tell))
    try:
        job.wait_told("joined")
        if span_seconds is None:
            job.wait(set(range(WORKERS)), PATIENCE_SECONDS, "the job")
        else:
            _wait_trained(job, dice.choice((0, 1, 1, 2, 3)))
            job.look(dice.random() * span_seconds)
        ended = len(job.codes) == WORKERS
        if not ended:
            _kill(job, dice, tally)
    finally:
        job.close()
    saved = max([newest, *job.numbers("saved")])
    if any(line[0] == "wrong" for lines in job.told for line in lines) or (ended and any(job.codes.values())):
        raise WrongStateError(f"a worker failed by itself: {job.codes}, {job.tails()}")
    for began in set(job.numbers("began")):
        if began < newest:
            raise WrongStateError(f"a job went on from epoch {began}, and epoch {newest} was saved")
    for line in (line for lines in job.told for line in lines if line[0] == "ended"):
        if line[1:] != [str(EPOCHS), str(TOTAL), str(TOTAL)]:
            raise WrongStateError(f"a worker ended with {line}")
    _check_epochs(directory, saved, tally, ended=ended)
    tally.jobs += ended
    return saved, ended


def _wait_trained(job: ForkedJob, epochs: int) -> None:
    """Waits until each worker has trained so many epochs, or one has ended."""
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not job.codes and len(job.numbers("trained")) < WORKERS * epochs:
        job.look(0.001)
        if time.monotonic() >= end_at:
            raise WrongStateError(f"the job does not come on: {job.tails()}")


def _kill(job: ForkedJob, dice: random.Random, tally: Tally) -> None:
    """Kills one after the other, as a launcher does that ends all when one has died; or one alone."""
    tally.kills += 1
    living = [rank for rank in range(WORKERS) if rank not in job.codes]
    first, *others = dice.sample(living, len(living))
    job.send(first, signal.SIGKILL)
    if dice.random() < _SHARE_ALONE:
        tally.survived += 1
        job.wait(set(others), LIMIT_SECONDS, f"rank {first} was killed")
    job.look(dice.choice((0.0, 0.01)))


def _check_epochs(directory: Path, saved: int, tally: Tally, *, ended: bool) -> None:
    storage = LocalStorage(directory)
    catalog = StoredRun(storage).look()
    tally.in_save += bool(catalog.unfinished)
    epochs = [name.step for name in catalog.living]
    # While it runs there are the one that it has gone on from, and one that has just been committed.
    if len(epochs) > KEPT + 2 or max(epochs, default=-1) < saved:
        raise WrongStateError(f"epoch {saved} was saved, and there are {epochs}")
    check_whole(storage, catalog)
    steps = sorted(path.name for path in directory.glob("step-*"))
    if ended and (epochs != [EPOCHS - 1, EPOCHS] or len(steps) != KEPT or catalog.trash):
        raise WrongStateError(f"the job has ended, and there are {epochs}, in {steps}")


def run(directory: Path, kills: int, seed: int, span_seconds: float) -> Tally:
    """Plays until there were so many kills, and the last job has ended.

    Args:
        directory: A new directory for the runs, and for the stores where the workers meet.
        kills: How many.
        seed: What the random moments follow from, as far as the machine lets them.
        span_seconds: Within how many seconds after an epoch that is thrown the job is killed.

    Raises:
        WrongStateError: At the first start in which something is not as it must be.
    """
    # What this process has imported, those that it forks need not import each.
    with LocalSession() as session:
        JobRunner(make_job(lambda line: None), MultiNodeCheckpointManager(MemoryStorage())).train(session)
    dice = random.Random(seed)
    tally = Tally()
    newest, ended = -1, True
    while tally.kills < kills or not ended:
        place = directory / f"job-{tally.jobs}"
        span = span_seconds if tally.kills < kills else None
        newest, ended = play_start(place / "run", place / "store", newest, dice, span, tally)
        if ended:
            newest = -1
        show_progress(tally.kills, kills, "kills")
    return tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        tally = run(directory, options.kills, options.seed, options.span)
        return (
            f"{tally.kills} kills in SECONDS: nothing was lost. {tally.jobs} jobs have ended with {TOTAL}, and {KEPT} "
            f"epochs each. {tally.in_save} kills hit an unfinished save; {tally.survived} times the others had to "
            "notice."
        )

    span = {"type": float, "default": 0.1, "help": "seconds after an epoch within which to kill"}
    run_command("epoch_job", __doc__, {"--kills": {"type": int, "default": 100}, "--span": span}, play)


if __name__ == "__main__":
    main()
