"""Kills jobs whose saves are kept in memory, and looks at what comes back.

`python -m crash.memory`. In each round a job of a few forked processes, on one machine or two, goes on from the newest
checkpoint, trains, and saves each step. At a random moment one worker is killed with SIGKILL, or all are. A machine is
a directory for sockets of its own: so each has a process of its own that keeps the memory. Sometimes one is killed as
well, as if the machine were lost. Then it must be that

* another job, of as many workers or of another number, restores the state of one step, exactly, on all workers,
* that step is the newest that is committed, or that is whole in the memory of all machines together,
* that job saves, and everything that is committed is whole.

With `--flips` a process dies with a save that is in memory only, and one that is on the disk too. Again and again one
bit is flipped, in an image or its record. A start must refuse what has it, and go on from the disk, exactly.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Final

import msgspec

from crash.bucket import in_child
from crash.command import WrongStateError, check_whole, run_command, show_progress
from crash.forked import ForkedJob
from crash.joint import Join, open_file_store
from crash.toy_worker import PATIENCE_SECONDS, ToyWorker
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.manager import CheckpointManager
from holdfast.storage import LocalStorage, open_storage
from holdfast.storage.kept_images import KeptImage
from holdfast.storage.kept_memory import HostMemory, KeptMemory
from holdfast.storage.tiers import Tiers

_ROUNDS_OF_STORE = 5


class Tally(msgspec.Struct):
    """What happened over all rounds.

    Attributes:
        rounds: How many there were.
        promised: How many promises were made.
        from_memory: In how many rounds the newest step was in memory only.
        lost: How many machines were lost.
        resized: In how many the next job had another number of workers.
    """

    rounds: int = 0
    promised: int = 0
    from_memory: int = 0
    lost: int = 0
    resized: int = 0


class Machines(msgspec.Struct, frozen=True):
    """Where the workers of a job are.

    Attributes:
        directory: Everything is below it.
        per_machine: How many workers share a machine.
    """

    directory: Path
    per_machine: int

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.directory / "run"

    def enter(self, rank: int) -> Tiers:
        """Puts this process on the machine of a worker, and returns its tiers."""
        place = self.directory / f"m{rank // self.per_machine}"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["XDG_RUNTIME_DIR"] = str(place)
        return Tiers(HostMemory(keep_seconds=120), self.run)


def train_until_killed(
    machines: Machines, join: Join, world_size: int, seed: int, rank: int, tell: Callable[[str], None]
) -> int:
    """What a worker does: saves each step, until it is killed or another one is."""
    dice = random.Random(seed)  # All workers throw the same.
    toy = ToyWorker(rank)
    tiers = machines.enter(rank)
    try:
        manager = toy.manager(tiers, join(rank, world_size), incremental=False)
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        tell(f"restored {step}")
        while True:
            step += dice.choice((1, 1, 5))
            toy.train(step)
            handle = manager.save(step)
            toy.train(step + 10_000_000)
            if dice.random() < 0.5:
                handle.wait_committed()
                tell(f"promise {step}")
    except HoldfastError as error:
        tell(f"failed {error!r}")
        return 3


def restore_and_save(machines: Machines, join: Join, world_size: int, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker of the next job does."""
    os.environ["HOLDFAST_TAKE_OVER"] = "1"
    toy = ToyWorker(rank)
    tiers = machines.enter(rank)
    cluster = join(rank, world_size)
    with toy.manager(tiers, cluster, incremental=False) as manager:
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        if restored is not None:
            toy.check(step, has_own=restored.manifest.world_size == world_size)
        tell(f"restored {step}")
        toy.train(step + 1)
        manager.save(step + 1).wait_committed()
    cluster.close()
    tell(f"saved {step + 1}")
    return 0


def read_memory(run: str, world_size: int, per_machine: int) -> list[list[int]]:
    """Returns each whole image on the machines of a job: its generation, step, attempt, rank, and number of workers."""
    machines, found = Machines(Path(run).parent, per_machine), []
    for rank in range(0, world_size, machines.per_machine):
        machines.enter(rank)
        memory = KeptMemory(HostMemory(keep_seconds=120), open_storage(machines.run).url)
        memory.open(1000 + rank, "a look")
        if memory.problem:
            raise WrongStateError(f"memory cannot be looked at: {memory.problem}")
        records = memory.images.list_records()
        found += [[one.generation, one.step, one.attempt, one.rank, one.world_size] for one in records]
        memory.close(is_done=False)
    return found


def find_newest(machines: Machines, images: list[list[int]]) -> tuple[int, bool]:
    """Returns the newest step that is committed, or whole in memory; and whether it is in memory only."""
    catalog = StoredRun(open_storage(machines.run)).look(closely=True)
    committed = catalog.newest.step if catalog.newest is not None else 0
    ranks: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    sizes: dict[tuple[int, int, int], int] = {}
    for generation, step, attempt, rank, world_size in images:
        if generation == catalog.generation:
            ranks[generation, step, attempt].add(rank)
            sizes[generation, step, attempt] = world_size
    whole = [key[1] for key, those in ranks.items() if len(those) == sizes[key]]
    newest = max([committed, *whole])
    return newest, newest > committed


def check_all(machines: Machines, step: int) -> None:
    """Makes sure that a step is the newest, and that all that is committed is whole."""
    storage = open_storage(machines.run)
    catalog = StoredRun(storage).look(closely=True)
    if catalog.newest is None or catalog.newest.step != step:
        raise WrongStateError(f"step {step} was promised, the newest is {catalog.newest}")
    check_whole(storage, catalog)


def play_round(machines: Machines, join: Join, dice: random.Random, span: float, tally: Tally) -> None:
    """One round.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    world_size = dice.choice((1, 2, 3))
    machines = msgspec.structs.replace(machines, per_machine=dice.choice((1, 2, 3)))
    seed = dice.randrange(1 << 30)
    job = ForkedJob(world_size, lambda rank, tell: train_until_killed(machines, join, world_size, seed, rank, tell))
    try:
        job.kill_in_training(dice, span)
    finally:
        job.close()
    promised = max([0, *job.numbers("promise")])
    tally.promised += len(job.numbers("promise"))
    images = in_child(read_memory, str(machines.run), world_size, machines.per_machine)
    if dice.random() < 0.2:
        lost = dice.randrange(world_size) // machines.per_machine
        _lose(machines, lost)
        images = [image for image in images if image[3] // machines.per_machine != lost]
        tally.lost += 1
    # A machine that the next job does not use is as good as lost.
    next_size = dice.choice((1, 2, 3, world_size, world_size))
    tally.resized += next_size != world_size
    used = {rank // machines.per_machine for rank in range(next_size)}
    images = [image for image in images if image[3] // machines.per_machine in used]
    expected, is_in_memory = find_newest(machines, images)
    if expected < promised:
        raise WrongStateError(f"step {promised} was promised, and {expected} is the newest")
    tally.from_memory += is_in_memory
    _check_next_job(machines, join, next_size, expected)
    for place in machines.directory.glob("m?"):
        _lose(machines, int(place.name[1:]))
    tally.rounds += 1


def _lose(machines: Machines, number: int) -> None:
    """Kills what keeps the memory of a machine."""
    place = str(machines.directory / f"m{number}").encode() + b"/"
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and place in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    end_at = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end_at and any(_is_there(entry, place) for entry in Path("/proc").iterdir()):
        time.sleep(0.01)


def _is_there(entry: Path, place: bytes) -> bool:
    try:
        return entry.name.isdigit() and place in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def _check_next_job(machines: Machines, join: Join, world_size: int, expected: int) -> None:
    job = ForkedJob(world_size, lambda rank, tell: restore_and_save(machines, join, world_size, rank, tell))
    try:
        job.wait(set(range(world_size)), PATIENCE_SECONDS, "the next job")
    finally:
        job.close()
    steps = set(job.numbers("restored"))
    if set(job.codes.values()) != {0} or len(steps) != 1:
        raise WrongStateError(f"the next job did not go on: {job.codes}, {job.tails()}")
    if (step := steps.pop()) != expected:
        raise WrongStateError(f"step {step} came back, though step {expected} is whole")
    check_all(machines, step + 1)


def run(directory: Path, rounds: int, seed: int, span: float = 1.0) -> Tally:
    """Plays so many rounds, one after the other.

    Raises:
        WrongStateError: At the first round in which something is not as it must be.
    """
    dice = random.Random(seed)
    tally = Tally()
    machines = Machines(directory, 1)
    while tally.rounds < rounds:
        with open_file_store(directory / f"store-{tally.rounds}") as join:
            for _ in range(min(_ROUNDS_OF_STORE, rounds - tally.rounds)):
                play_round(machines, join, dice, span, tally)
                show_progress(tally.rounds, rounds, "rounds")
    return tally


WRITTEN: Final = 2
"""The step that is on the disk and in memory; the next one is in memory only."""


def make_state(step: int) -> dict[str, Any]:
    """Returns the state of a step, of which each value is another in each step."""
    import numpy as np

    return {"w": np.arange(3000.0) * step, "ints": np.full(50, step), "text": f"step {step}"}


class _Dying(LocalStorage):
    def create(self, path: str, size_bytes: int) -> Any:
        if path.startswith(f"step-{WRITTEN + 1:09d}."):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(path, size_bytes)


def leave_images(machines: Machines) -> dict[int, KeptImage]:
    """Lets a process die once it has copied a step, and returns the images of it and the one before, by step."""
    pid = os.fork()
    if pid == 0:
        machines.enter(0)
        state = make_state(1)
        with CheckpointManager(
            Tiers(HostMemory(keep_seconds=600), _Dying(machines.run)), Checkpoint(state=state)
        ) as manager:
            for step in range(1, WRITTEN + 2):
                state.update(make_state(step))
                manager.save(step).wait_committed()
    os.waitpid(pid, 0)
    memory = KeptMemory(HostMemory(keep_seconds=600), open_storage(machines.run).url)
    memory.open(0, "a look")
    images = [KeptImage(*map(os.dup, image)) for image in memory._own.values()]
    memory.close(is_done=False)
    return {record.step: image for image in images if (record := image.read()) is not None}


def start_again(machines: Machines) -> tuple[int, tuple[str, ...]]:
    """Does what a start does; returns the step that it goes on from, and where that was read.

    Raises:
        WrongStateError: If it is not that step's state.
    """
    state: dict[str, Any] = make_state(0)
    with CheckpointManager(machines.enter(0), Checkpoint(state=state)) as manager:
        restored = manager.restore()
        if restored is None:
            raise WrongStateError("nothing was restored")
        for name, value in make_state(restored.step).items():
            if not (state[name] == value if isinstance(value, str) else state[name].tobytes() == value.tobytes()):
                raise WrongStateError(f"{name} is not that of step {restored.step}")
        return restored.step, restored.tiers


@contextmanager
def flipped(descriptor: int, dice: random.Random, begin: int, end: int) -> Iterator[str]:
    """Flips a bit of some bytes for the block; yields which."""
    place, bit = dice.randrange(begin, end), 1 << dice.randrange(8)
    before = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([before[0] ^ bit]), place)
    try:
        yield f"bit {bit:#04x} of byte {place}"
    finally:
        os.pwrite(descriptor, before, place)


def flip_bits(directory: Path, flips: int, seed: int) -> int:
    """Flips so many bits, one at a time; returns how many of them were in records.

    Raises:
        WrongStateError: At the first that is not refused.
    """
    dice, machines = random.Random(seed), Machines(directory, 1)
    machines.enter(0)
    images = leave_images(machines)
    records = {step: os.pread(image.record, os.fstat(image.record).st_size, 0) for step, image in images.items()}
    in_records = 0
    with redirect_stderr(Path(os.devnull).open("w")):
        for number in range(flips + 1):
            step = WRITTEN + dice.randrange(2) if number else WRITTEN + 1
            for one, record in records.items():
                os.ftruncate(images[one].record, 0)
                if one <= step:
                    os.pwrite(images[one].record, record, 0)
            found = images[step].read()
            assert found is not None
            if not number:  # Without a flip it comes back, from memory.
                if start_again(machines) != (step, ("memory",)):
                    raise WrongStateError("memory is not restored from")
                StoredRun(open_storage(machines.run)).step(found.name).discard()
                continue
            is_record = dice.random() < 0.3
            in_records += is_record
            image, begin, end = images[step].data, 0, found.data_bytes
            if is_record:
                image, end = images[step].record, len(records[step])
            elif step == WRITTEN:
                # A restore does not need the header, whose length is in the first bytes. A copy does.
                begin = 8 + int.from_bytes(os.pread(image, 8, 0), "little")
            with flipped(image, dice, begin, end) as what:
                restored, tiers = start_again(machines)
            if restored != WRITTEN or (step == WRITTEN and machines.run.as_posix() not in tiers):
                text = f"{what} of the {'record' if is_record else 'image'} of step {step} is not noticed"
                raise WrongStateError(f"{text}: step {restored} was restored from {tiers}")
            if (machines.run / found.name.directory).exists() != (step == WRITTEN):
                raise WrongStateError(f"{what}: something is left of step {step}")
            show_progress(number, flips, "flips")
    return in_records


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        if options.flips:
            try:
                in_records = flip_bits(directory, options.flips, options.seed)
            finally:
                _lose(Machines(directory, 1), 0)
            return f"{options.flips} flipped bits in SECONDS, {in_records} of them in records: all were refused."
        tally = run(directory, options.rounds, options.seed, options.span)
        return (
            f"{tally.rounds} rounds in SECONDS: what was committed or whole in memory came back. {tally.promised} "
            f"promises; in {tally.from_memory} rounds the newest step was in memory only. {tally.lost} machines were "
            f"lost. {tally.resized} next jobs had another number of workers."
        )

    run_command(
        "memory",
        __doc__,
        {
            "--rounds": {"type": int, "default": 100},
            "--flips": {"type": int, "default": 0, "help": "instead, flip so many bits in what a process has left"},
            "--span": {"type": float, "default": 1.0, "help": "seconds within which a worker is killed"},
        },
        play,
    )


if __name__ == "__main__":
    main()
