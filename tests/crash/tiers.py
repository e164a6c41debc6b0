"""Kills jobs that save in tiers, loses their machines, and looks at what comes back.

`python -m crash.tiers`. In each round a job of a few forked processes, each with a first tier of its own or one that
some of them share, and one farther tier for all, goes on from the newest checkpoint, trains and saves. At a random
moment one worker is killed with SIGKILL, or all are. Then some of the first tiers are deleted, as if their machines
were lost. Then it must be that

* another job, of as many workers or of another number, restores the state of one step, exactly, on all workers,
* that step is the newest of the current lineage that is whole in what is left: committed in one tier, with each file in
  some tier,
* if nothing was deleted, it is the newest that any worker was promised, or a later one,
* that job saves, and waits until the farthest tier has it; everything that is committed there is whole.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from crash.bucket import in_child
from crash.command import WrongStateError, check_whole, run_command, show_progress
from crash.forked import ForkedJob
from crash.joint import Join, open_file_store
from crash.toy_worker import PATIENCE_SECONDS, ToyWorker
from holdfast.catalog import StoredRun
from holdfast.errors import HoldfastError
from holdfast.format.names import StepName
from holdfast.format.records import Manifest, choose_living
from holdfast.storage import Storage, open_storage
from holdfast.storage.tiers import Tiers

_ROUNDS_OF_STORE = 5


class Tally(msgspec.Struct):
    """What happened over all rounds.

    Attributes:
        rounds: How many there were.
        promised: How many promises were made.
        deleted: How many first tiers were deleted.
        kept: In how many rounds none was.
        assembled: In how many the newest step was committed in no farther tier.
        fallen_back: In how many a promised step was lost with its machine.
        resized: In how many the next job had another number of workers.
    """

    rounds: int = 0
    promised: int = 0
    deleted: int = 0
    kept: int = 0
    assembled: int = 0
    fallen_back: int = 0
    resized: int = 0


class Machines(msgspec.Struct, frozen=True):
    """Where the workers of a job have their tiers.

    Attributes:
        directory: Everything is below it.
        far: The location of the tier that all share.
        per_machine: How many workers share a first tier.
    """

    directory: Path
    far: str
    per_machine: int

    def near(self, rank: int) -> Path:
        """The first tier of a worker."""
        return self.directory / f"near-{rank // self.per_machine}"

    def open(self, rank: int) -> Tiers:
        """The tiers of a worker."""
        return Tiers(self.near(rank), self.far)

    def list_near(self, world_size: int) -> list[Path]:
        """The first tiers of a job, in order."""
        return sorted({self.near(rank) for rank in range(world_size)})


def train_until_killed(
    machines: Machines, join: Join, world_size: int, seed: int, rank: int, tell: Callable[[str], None]
) -> int:
    """What a worker does: saves each step, until it is killed or another one is."""
    dice = random.Random(seed)  # All workers throw the same.
    toy = ToyWorker(rank)
    try:
        cluster = join(rank, world_size)
        tell("joined")
        manager = toy.manager(machines.open(rank), cluster, incremental=dice.random() < 0.3)
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        tell(f"restored {step}")
        while True:
            step += dice.choice((1, 1, 5))
            toy.train(step)
            handle = manager.save(step)
            toy.train(step + 10_000_000)
            handle.wait_committed()
            tell(f"promise {step}")
            if dice.random() < 0.2:
                handle.wait_committed(tier=-1)
                tell(f"copied {step}")
    except HoldfastError as error:
        tell(f"failed {error!r}")
        return 3


def restore_and_save(machines: Machines, join: Join, world_size: int, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker of the next job does."""
    os.environ["HOLDFAST_TAKE_OVER"] = "1"
    toy = ToyWorker(rank)
    cluster = join(rank, world_size)
    with toy.manager(machines.open(rank), cluster, incremental=False) as manager:
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        if restored is not None:
            toy.check(step, has_own=restored.manifest.world_size == world_size)
        tell(f"restored {step}")
        toy.train(step + 1)
        manager.save(step + 1).wait_committed(tier=-1)
    cluster.close()
    tell(f"saved {step + 1}")
    return 0


def look(near: list[str], far: str) -> tuple[int, bool]:
    """Returns the newest step that is whole anywhere, 0 for none, and whether it is committed in the farthest tier."""
    newest = find_newest_whole([*map(open_storage, near), open_storage(far)])
    committed = StoredRun(open_storage(far)).look(closely=True).committed
    return (0, True) if newest is None else (newest.step, newest in committed)


def check_far(location: str, step: int) -> None:
    """Makes sure that a step is the newest in the farthest tier, and that all that is there is whole."""
    far = open_storage(location)
    catalog = StoredRun(far).look(closely=True)
    if catalog.newest is None or catalog.newest.step != step:
        raise WrongStateError(f"step {step} was promised in the farthest tier, the newest is {catalog.newest}")
    check_whole(far, catalog)


def find_newest_whole(places: list[Storage]) -> StepName | None:
    """Returns the newest step of the current lineage that is whole in some places together; found in another way.

    The last of the places is the farthest tier, whose generations count.
    """
    far = StoredRun(places[-1]).look(closely=True)
    files: dict[str, set[tuple[str, int]]] = {}
    manifests: dict[StepName, Manifest] = {}
    for place in places:
        run = StoredRun(place)
        catalog = run.look(closely=True)
        for name in (*catalog.committed, *catalog.unfinished, *catalog.lost):
            files.setdefault(name.directory, set()).update(
                (entry.name, entry.size_bytes) for entry in place.list(name.directory)
            )
        manifests |= {name: run.step(name).manifest() for name in catalog.committed}

    def is_whole(name: StepName) -> bool:
        manifest, there = manifests.get(name), files.get(name.directory, set())
        if manifest is None:
            return False
        size = manifest.world_size
        own = all(
            (f"data-{rank:05d}-of-{size:05d}.safetensors", worker.data_bytes) in there
            and (f"index-{rank:05d}-of-{size:05d}.json", worker.index_bytes) in there
            for rank, worker in enumerate(manifest.workers)
        )
        return own and all(is_whole(reference.name) for reference in manifest.references)

    whole = [name for name in manifests if is_whole(name)]
    return max(choose_living(whole, far.bases), default=None)


def play_round(machines: Machines, join: Join, newest: int, dice: random.Random, span: float, tally: Tally) -> int:
    """One round; returns the newest committed step.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    world_size = dice.choice((2, 3))
    machines = msgspec.structs.replace(machines, per_machine=dice.choice((1, 1, 2, 3)))
    seed = dice.randrange(1 << 30)
    job = ForkedJob(world_size, lambda rank, tell: train_until_killed(machines, join, world_size, seed, rank, tell))
    try:
        job.kill_in_training(dice, span)
    finally:
        job.close()
    promised = max([newest, *job.numbers("promise")])
    tally.promised += len(job.numbers("promise"))
    next_size = dice.choice((1, 2, 3, world_size, world_size))
    tally.resized += next_size != world_size
    near = machines.list_near(world_size)
    lost = [place for place in near if dice.random() < 0.3] if dice.random() < 0.6 else []
    for place in lost:
        shutil.rmtree(place, ignore_errors=True)
    tally.deleted += len(lost)
    tally.kept += not lost
    reachable = [place for place in machines.list_near(next_size) if place.exists()]
    # This process never uses a bucket itself, for it forks.
    expected, is_far = in_child(look, [*map(str, reachable)], machines.far)
    tally.assembled += not is_far
    step = _check_next_job(machines, join, next_size, expected)
    if not lost and set(near) <= set(reachable) and step < promised:
        raise WrongStateError(f"step {promised} was promised and nothing was lost, but step {step} came back")
    tally.fallen_back += step < promised
    tally.rounds += 1
    return step + 1


def _check_next_job(machines: Machines, join: Join, world_size: int, expected: int) -> int:
    job = ForkedJob(world_size, lambda rank, tell: restore_and_save(machines, join, world_size, rank, tell))
    try:
        job.wait(set(range(world_size)), PATIENCE_SECONDS, "the next job")
    finally:
        job.close()
    steps = set(job.numbers("restored"))
    if set(job.codes.values()) != {0} or len(steps) != 1:
        raise WrongStateError(f"the next job did not go on: {job.codes}, {job.tails()}")
    step = steps.pop()
    if step != expected:
        raise WrongStateError(f"step {step} came back, though step {expected} is whole")
    in_child(check_far, machines.far, step + 1)
    return step + 1


def run(directory: Path, rounds: int, seed: int, span: float = 1.0, far: str = "") -> Tally:
    """Plays so many rounds, one after the other, with a farther tier at a location, or in the directory.

    Raises:
        WrongStateError: At the first round in which something is not as it must be.
    """
    dice = random.Random(seed)
    tally = Tally()
    newest = 0
    machines = Machines(directory, far or str(directory / "far"), 1)
    while tally.rounds < rounds:
        with open_file_store(directory / f"store-{tally.rounds}") as join:
            for _ in range(min(_ROUNDS_OF_STORE, rounds - tally.rounds)):
                newest = play_round(machines, join, newest, dice, span, tally)
                show_progress(tally.rounds, rounds, "rounds")
    return tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        tally = run(directory, options.rounds, options.seed, options.span, options.far)
        return (
            f"{tally.rounds} rounds in SECONDS: what was whole anywhere came back. {tally.promised} promises; "
            f"{tally.deleted} first tiers were deleted, and none in {tally.kept} rounds. In {tally.assembled} the "
            f"newest step was in no farther tier; in {tally.fallen_back} a promised one was lost with its machine. "
            f"{tally.resized} next jobs had another number of workers."
        )

    run_command(
        "tiers",
        __doc__,
        {
            "--rounds": {"type": int, "default": 100},
            "--span": {"type": float, "default": 1.0, "help": "seconds within which a worker is killed"},
            "--far": {"default": "", "help": "the farther tier: an empty place in a bucket; by default a directory"},
        },
        play,
    )


if __name__ == "__main__":
    main()
