"""Jobs whose run is in tiers: a disk of each machine, and a bucket that all machines share.

Machines are lost with their disks, power fails, the network is cut; jobs go on elsewhere, and come back. Each tier is
judged as a storage alone is. Besides, a restore takes the newest step of the line that is whole in any tier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Final
from unittest.mock import patch

import holdfast.storage.tier_records
import holdfast.storage.tiers
import holdfast.tiering.copier
from holdfast.catalog import StoredRun
from holdfast.errors import NoCheckpointError, NoWholeCheckpointError, StorageError
from holdfast.events import Copied, Event
from holdfast.format.digests import unseal
from holdfast.format.names import StepName, generation_path
from holdfast.format.records import MAX_GENERATION_BYTES, Opening, choose_living
from holdfast.policies import Latest
from holdfast.restore.engine import restore_objects
from holdfast.restore.records import Restoration
from holdfast.storage import Storage
from holdfast.storage.tiers import Tier, Tiers
from holdfast.tiering.copier import TierCopier
from holdfast.tiering.hop import Hop
from holdfast.tiering.workers import Nearby
from simulation.disk import Directory, Disk
from simulation.judge import Judge, Place
from simulation.scheduler import Process, Scheduler, Task
from simulation.world import Job, Outcome, World, make_arrays

_SECONDS: Final = 0.05
"""So long a call takes, by the clock of the program."""

_PATIENCE: Final = 200
"""So often a job that meets faults looks at its end whether all is copied."""


@dataclass(eq=False)
class TierJudge(Judge):
    """Judges one tier.

    Attributes:
        tokens: Who has opened each generation of which there is a record.
        windows: Told of each change.
    """

    tokens: dict[int, str] = field(default_factory=dict)
    windows: list[RestoreWindow] = field(default_factory=list)

    @property
    def whole(self) -> set[StepName]:
        """The steps that are there, and whole."""
        return {name for name, one in self._committed.items() if one.is_whole}

    @property
    def bases(self) -> dict[int, Any]:
        """The bases that are recorded there."""
        return self._bases

    def note_copied(self, process: Process, step: int, generation: int) -> None:
        """A copy was called done."""
        found = [name for name in self.whole if (name.step, name.generation) == (step, generation)]
        if not found:
            if not any((name.step, name.generation) == (step, generation) for name in self._withdrawn):
                self.wrong(f"{process.name} calls step {step} of generation {generation} copied, and it is not there")
            return
        self.acknowledged |= {*found}
        if any(name in self._living() for name in found):
            self._set_floor(max(self.floor, step))

    def part(self, generation: int) -> None:
        """Another job has gone on elsewhere: what was saved here from a generation on does not count."""
        left = choose_living((name for name in self.whole if name.generation < generation), self._bases)
        self._set_floor(min(self.floor, max((name.step for name in left), default=-1)))
        # They go in any order: the line is hidden.
        for name in [one for one in self._committed if one.generation >= generation]:
            self._committed[name].is_whole = False
            self.acknowledged.discard(name)

    def lose(self) -> None:
        """All is gone."""
        self.acknowledged.clear()
        self.owners.clear()
        self._set_floor(-1)
        for known in (self.tokens, self._opened, self._bases, self._committed, self._withdrawn):
            known.clear()
        self.tell()

    def recount(self) -> None:
        super().recount()
        self.tokens = {one: token for one, token in self.tokens.items() if one in self._opened}
        self.tell()

    def tell(self) -> None:
        """Tells of a change."""
        for window in self.windows:
            window.look()

    def _note(self, path: str, is_made: bool) -> None:
        super()._note(path, is_made)
        self.tell()

    def _check_floor(self) -> None:
        base = self._bases[max(self._bases)] if self._bases else None
        if base is not None and base.name is not None and base.name not in self.whole:
            # A job has gone on from a step that another tier has.
            self._set_floor(min(self.floor, max((name.step for name in self._living()), default=-1)))
        super()._check_floor()

    def _note_record(self, path: str, is_made: bool) -> None:
        super()._note_record(path, is_made)
        for generation in self._opened.keys() - self.tokens.keys():
            data = self._quiet.read(generation_path(generation), MAX_GENERATION_BYTES)
            self.tokens[generation] = unseal(Opening, data, path=path).token
        for generation in self.tokens.keys() - self._opened.keys():
            del self.tokens[generation]


@dataclass(eq=False)
class RestoreWindow:
    """What a restore on one machine may take, during a stretch of time.

    Attributes:
        near: The disk of the machine.
        far: The bucket.
        least: The least of the newest steps that there were in both together; -1 for none.
        living: Each step that was on the line in that time.
        least_near: Likewise of the disk alone.
        living_near: Likewise of the disk alone.
    """

    near: TierJudge
    far: TierJudge
    least: int = 1 << 60
    living: set[StepName] = field(default_factory=set)
    least_near: int = 1 << 60
    living_near: set[StepName] = field(default_factory=set)

    def look(self) -> None:
        """Looks at what there is now."""
        both, alone = choose_from_both(self.near, self.far), choose_living(self.near.whole, self.near.bases)
        self.living |= {*both}
        self.living_near |= {*alone}
        self.least = min(self.least, both[-1].step if both else -1)
        self.least_near = min(self.least_near, alone[-1].step if alone else -1)


def find_parted(near: TierJudge, far: TierJudge) -> int | None:
    """The first generation of a disk that is not in the line, because a job has gone on from the bucket elsewhere."""
    same = [one for one, token in near.tokens.items() if far.tokens.get(one) == token]
    agreed = max((one for one in same if one in far.bases or one not in near.bases), default=0)
    newer = [one for one in near.tokens if one > agreed]
    return min(newer) if newer and max(far.bases, default=0) > agreed else None


def choose_from_both(near: TierJudge, far: TierJudge) -> tuple[StepName, ...]:
    """The steps of the line that are whole in one tier or the other."""
    parted = find_parted(near, far)
    here = {name for name in near.whole if parted is None or name.generation < parted}
    bases = {one: base for one, base in near.bases.items() if parted is None or one < parted}
    return choose_living(here | far.whole, {**bases, **far.bases})


@dataclass(eq=False)
class Machine:
    """A machine: its disk, and what judges that."""

    name: str
    disk: Disk
    judge: TierJudge


class NothingError(StorageError):
    """There is nothing to restore, and it is known that there was something: it was lost with a machine."""


class TurnLock:
    """A lock that gives others their turn while it waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_held = scheduler, False

    def __enter__(self) -> None:
        while self._is_held:
            self._scheduler.rest(1)
        self._is_held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_held = False


class SimulatedHop(Hop):
    """Copies in a task, not in a thread of its own."""

    scheduler: Scheduler
    process: Process
    task: Task | None = None

    def wake(self) -> None:
        self.progress.note_more()
        if (self.task is None or self.task.is_done) and not self.progress.is_stopped:
            self.task = self.scheduler.start(self.process, "copy", self._run)

    def _run(self) -> None:
        progress = self.progress
        while not progress.is_stopped:
            progress.is_awake = False
            rest_seconds = self.serve_once()
            if rest_seconds and not progress.is_awake:
                self.scheduler.rest(int(rest_seconds / _SECONDS))
            elif not progress.is_awake:
                return


class TierJob(Job):
    """A job whose run is in tiers."""

    def __init__(self, world: TiersWorld, process: Process, tiers: Tiers, copier: TierCopier) -> None:
        super().__init__(world, process, tiers, copier)
        self._hops: list[Any] = copier._hops
        self._scheduler = world.scheduler
        self._waits = process.is_calm or world.dice.random() < 0.7

    def run(self, saves: int) -> None:
        try:
            super().run(saves)
        except NoWholeCheckpointError as error:
            raise NothingError(error.message) from error
        finally:
            for hop in self._hops:
                hop.progress.is_stopped = True

    def _end(self) -> None:
        super()._end()
        for _ in count() if self._process.is_calm else range(_PATIENCE):
            if not (self._waits and any(hop.progress.is_behind and not hop.progress.is_stopped for hop in self._hops)):
                break
            self._scheduler.rest(10)
        for hop in self._hops:
            hop.progress.is_stopped = True
            if hop.task is not None:
                self._scheduler.join(hop.task)


class TiersWorld(World):
    """One simulation of a run in tiers."""

    judge: TierJudge

    def __init__(self, seed: int) -> None:
        self.machines: list[Machine] = []
        self._copiers: dict[Process, TierCopier] = {}
        self._owners: dict[int, Process] = {}
        self._is_over = False
        super().__init__(seed)
        self._cuts = False
        self._harm = self.dice.choice((0.0, 0.002, 0.005, 0.01))

    def make_judge(self) -> TierJudge:
        return TierJudge(self.scheduler)

    def _make_place(self, kind: str) -> Place:
        for number in range(self.dice.choice((1, 2, 2, 3))):
            disk = Disk(self.scheduler, self.dice.choice((0.0, 0.0, 0.005)), self.dice.choice((0.0, 0.0, 0.1)))
            machine = Machine(f"machine{number}", disk, TierJudge(self.scheduler, self.judge.saved))
            machine.judge.watch(disk)
            self.machines.append(machine)
        self._keeps = [Latest(self.dice.randrange(1, 4)) for _ in range(2)]
        return super()._make_place("bucket")

    def run(self) -> Outcome:
        seconds = lambda: self.scheduler.now * _SECONDS  # noqa: E731
        with patch.object(time, "monotonic", seconds), self._checking_parted():
            return super().run()

    @contextmanager
    def _checking_parted(self) -> Iterator[None]:
        def set_aside(storage: Any, parted: int) -> str:
            machine = next(one for one in self.machines if one.disk is storage._disk)
            if any(one >= parted for one in machine.judge.tokens):
                found = find_parted(machine.judge, self.judge)
                if found is None or found > parted:
                    self.judge.wrong(
                        f"generation {parted} of {machine.name} is set aside, and no other job has gone on"
                    )
            machine.judge.part(parted)
            return real(storage, parted)

        real = holdfast.storage.tier_records.set_aside
        with patch.object(holdfast.storage.tiers, "set_aside", set_aside):
            yield

    def _find_machine(self, process: Process) -> Machine:
        return next(machine for machine in self.machines if machine.name == process.machine)

    def _new(self, name: str, *, can_die: bool = True, is_calm: bool = False) -> Process:
        process = super()._new(name, can_die=can_die, is_calm=is_calm)
        process.machine = self.dice.choice(self.machines).name
        return process

    def open(self, process: Process) -> Tiers:
        near, far = self._find_machine(process).disk.open(process), self.place.open(process)
        tiers = Tiers(Tier(near, keep=self._keeps[0]), Tier(far, keep=self._keeps[1]))
        tiers.say = self.scheduler.note  # type: ignore[assignment]
        tiers._aligning = TurnLock(self.scheduler)  # type: ignore[assignment]
        return tiers

    def _live(self, process: Process, *, saves: int) -> None:
        try:
            super()._live(process, saves=saves)
        except NothingError:
            self._is_over = True  # A person would have to begin anew.

    def make_job(self, process: Process) -> Job:
        tiers = self.open(process)

        def make_hop(*arguments: Any) -> SimulatedHop:
            hop = SimulatedHop(*arguments)
            hop.scheduler, hop.process = self.scheduler, process
            return hop

        def emit(event: Event) -> None:
            if isinstance(event, Copied):
                self.judge.note_copied(process, event.step, event.generation)

        with patch.object(holdfast.tiering.copier, "Hop", make_hop):
            copier = self._copiers[process] = TierCopier(tiers, self._keeps[0], Nearby(), emit)
        return TierJob(self, process, tiers, copier)

    def note_generation(self, process: Process, generation: int, seen: int) -> None:
        self._find_machine(process).judge.note_generation(process, generation, seen)
        passed = [
            one for one in self.judge.tokens if seen < one < generation and self._owners.get(one) not in (None, process)
        ]
        if passed and generation in self.judge.tokens:
            self.judge.wrong(f"generation {generation} was opened past {passed}, which saved since its opener looked")

    def note_saving(self, process: Process, name: StepName, arrays: dict[str, bytes]) -> None:
        if self._owners.setdefault(name.generation, process) is not process:
            self.judge.wrong(f"{process.name} and {self._owners[name.generation].name} both save {name}")
        self.judge.saved[name] = arrays

    def acknowledge(self, process: Process, name: StepName) -> None:
        self._find_machine(process).judge.acknowledge(process, name)
        self._copiers[process].note_committed(name)

    def restore(self, process: Process, storage: Storage, arrays: dict[str, Any]) -> Restoration | None:
        near = self._find_machine(process).judge
        window = RestoreWindow(near, self.judge)
        window.look()
        for judge in (near, self.judge):
            judge.windows.append(window)
        try:
            restoration = restore_objects(
                storage, {"model": arrays}, step=None, select=None, strict=True, threads=1, emit=lambda event: None
            )
        except NoCheckpointError as error:
            if window.least >= 0 and not process.has_read_wrong_bytes:
                self.judge.wrong(f"{process.name} could not restore: {error}")
            raise NothingError(str(error)) from error
        finally:
            for judge in (near, self.judge):
                judge.windows.remove(window)
        self._check_restored(process, storage, window, restoration, arrays)
        self.restored += restoration is not None
        return restoration

    def _check_restored(
        self,
        process: Process,
        storage: Any,
        window: RestoreWindow,
        restoration: Restoration | None,
        arrays: dict[str, Any],
    ) -> None:
        wrong = self.judge.wrong
        if restoration is None:
            if window.least >= 0:
                wrong(f"{process.name} found nothing to restore, though there was step {window.least}")
            return
        name, least, living = restoration.name, window.least, window.living
        if storage.rests_until(1):
            # The bucket was out of reach.
            least, living = min(least, window.least_near), living | window.living_near
        if self.judge.saved.get(name) != {path: array.tobytes() for path, array in arrays.items()}:
            wrong(f"{process.name} restored wrong bytes of {name}")
        if name not in living:
            wrong(f"{process.name} restored {name}, which is not in the lineage")
        if name.step < least and not process.has_read_wrong_bytes:
            wrong(f"{process.name} restored {name}, though there was step {least}")

    def _happen(self) -> None:
        super()._happen()
        if not self._harm or self.dice.random() >= self._harm:
            return
        machine, what = self.dice.choice(self.machines), self.dice.randrange(6)
        if what < 3:
            self._cut_off(machine)
            return
        for process in self.processes:
            if process.machine == machine.name and not (process.is_calm or process.is_dead):
                self._kill(process)
        if what < 5:
            machine.disk.crash()
            machine.judge.recount()
        else:
            self.scheduler.note(f"{machine.name} is lost")
            machine.disk.root = Directory()
            machine.judge.lose()

    def _cut_off(self, machine: Machine) -> None:
        is_cut = machine.name in self.place.cut_off  # type: ignore[attr-defined]
        self.scheduler.note(f"{machine.name} is {'reached again' if is_cut else 'cut off'}")
        self.place.cut_off ^= {machine.name}  # type: ignore[attr-defined]

    def _finish(self) -> None:
        self.place.cut_off.clear()  # type: ignore[attr-defined]
        for number, _ in enumerate(self.machines):
            self._start_on(number, "last", lambda process: self._live(process, saves=2))
        self._start_on(len(self.machines) - 1, "check", self._check_end)

    def _start_on(self, number: int, name: str, body: Any) -> None:
        def begin(process: Process) -> None:
            process.machine = self.machines[number].name
            body(process)

        if not (self.scheduler.failure or self._is_over):
            self._start_alone(f"{name}{number}", begin)

    def _check_end(self, process: Process) -> None:
        """When all is over, both tiers have the newest step, and nothing is left behind."""
        near, far = self._find_machine(process).disk.open(process), self.place.open(process)
        newest = []
        for storage in (near, far):
            catalog = StoredRun(storage).look(closely=True)
            newest.append(catalog.newest)
            assert not catalog.faults, f"damaged: {catalog.faults}"
            needed = {name for one in StoredRun(storage).history.referrers(catalog.committed) for name in one.refers_to}
            left = [*catalog.trash, *(name.directory for name in catalog.unfinished if name not in needed)]
            assert not left, f"left behind in {storage.url}: {left}"
        assert newest[0] == newest[1], f"the newest steps differ: {newest}"
        restored = self.restore(process, self.open(process), make_arrays())
        assert restored is not None
        assert restored.name == newest[0]


def simulate_tiers(seed: int) -> Outcome:
    """Runs one simulation of a run in tiers."""
    return TiersWorld(seed).run()
