"""The processes of a simulation: jobs that save and die, readers, a person who prunes, and what they are to find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from holdfast.catalog import StoredRun
from holdfast.catalog.step_copier import StepCopier
from holdfast.catalog.survey import Wishes, carry_out, check_unchanged, plan_removals, survey_run
from holdfast.errors import (
    FencedError,
    NoCheckpointError,
    StorageError,
    UsageError,
)
from holdfast.events import Event
from holdfast.format.names import StepName
from holdfast.format.records import Manifest
from holdfast.policies import Latest
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.engine import restore_objects
from holdfast.restore.records import Restoration
from holdfast.restore.verify import judge_step
from holdfast.save.handle import Origin, SaveRequest
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.retention import Tidier
from holdfast.save.run_writer import RunWriter, StepAttempt
from holdfast.state import capture_objects
from holdfast.storage import Storage
from simulation.bucket import Bucket, Weather
from simulation.disk import Disk
from simulation.judge import Judge, Place
from simulation.scheduler import Process, Scheduler, Task, chance_from

_LENGTH: Final = 24
_MOST_CALLS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one simulation.

    Attributes:
        seed: Its seed.
        trace: Each call, as the name of its task and what it is.
        failure: What must not be, or None.
        acknowledged: How many saves were acknowledged.
        restored: How many restores succeeded.
        fenced: How many saves were refused because a newer job had begun.
        deaths: How many processes were killed.
    """

    seed: int
    trace: list[tuple[str, str]]
    failure: BaseException | None
    acknowledged: int
    restored: int
    fenced: int
    deaths: int


class _Tidier(Tidier):
    """Cleans up after commits in a task of its own."""

    def __init__(self, scheduler: Scheduler, process: Process, writer: RunWriter) -> None:
        unused: Any = None
        super().__init__(writer, writer.recycler, unused, _ignore, unused)
        self._scheduler, self._process = scheduler, process
        self._task: Task | None = None

    def begin(self, name: StepName, origin: Origin, manifest: Manifest | None) -> None:
        """Cleans up after a commit."""
        self._task = self._scheduler.start(self._process, "clean", lambda: self.retain(name, origin, manifest))

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def wait(self) -> bool:
        task, self._task = self._task, None
        if task is not None:
            self._scheduler.join(task)
        return task is not None


class World:
    """One simulation."""

    def __init__(self, seed: int) -> None:
        self.seed, kind = seed, kind_of(seed)
        self.scheduler = Scheduler(seed)
        self.dice: random.Random = self.scheduler.dice
        self.judge = self.make_judge()
        self.place: Place = self._make_place(kind)
        self.judge.watch(self.place)
        self.scheduler.happen = self._happen
        self.processes: list[Process] = []
        self.restored = self.fenced = self.deaths = 0
        self._marks = 0
        self._deadly = self.dice.choice((0.0, 0.001, 0.003, 0.01))
        self._cuts = kind == "disk" and self.dice.random() < 0.6

    def make_judge(self) -> Judge:
        """Returns what judges the place."""
        return Judge(self.scheduler)

    def _make_place(self, kind: str) -> Place:
        dice = self.dice
        wrong = dice.choice((0.0, 0.0, 0.1))
        if kind == "disk":
            return Disk(self.scheduler, dice.choice((0.0, 0.0, 0.005, 0.02)), wrong)
        # Each kind of weather is absent in most runs, so that the others have their time.
        lost, unanswered, conflict, refused = (dice.choice((0.0, 0.0, 0.01, 0.05)) for _ in range(4))
        late = dice.choice((0.0, 0.02, 0.1))
        weather = Weather(lost, unanswered, late, conflict, refused, wrong)
        return Bucket(self.scheduler, weather, dice.choice((2, 5, 1000)), dice.random() < 0.5)

    def run(self) -> Outcome:
        """Runs it to its end."""
        with chance_from(self.scheduler):
            tasks = [self.scheduler.start(self._new("reader"), "reads", self._read_on)]
            tasks += [self._start_slot(number) for number in range(self.dice.choice((1, 2, 2, 3)))]
            if self.dice.random() < 0.3:
                tasks.append(self.scheduler.start(self._new("person"), "prunes", self._prune))
            self._drain()
            if not (self.scheduler.failure or self.judge.slept_over):
                self.scheduler.happen = lambda: None
                self._finish()
        return Outcome(
            self.seed,
            self.scheduler.trace,
            self.scheduler.failure,
            len(self.judge.acknowledged),
            self.restored,
            self.fenced,
            self.deaths,
        )

    def _finish(self) -> None:
        self._start_alone("last", lambda process: self._live(process, saves=2))
        self._start_alone("check", self._check_end)

    def _start_alone(self, name: str, body: Callable[[Process], object]) -> None:
        process = self._new(name, can_die=False, is_calm=True)
        self.scheduler.start(process, "alone", lambda: body(process))
        self._drain()

    def _drain(self) -> None:
        self.scheduler.drain()

    def _new(self, name: str, *, can_die: bool = True, is_calm: bool = False) -> Process:
        process = Process(name, can_die=can_die, is_calm=is_calm)
        self.processes.append(process)
        return process

    def _happen(self) -> None:
        self.place.happen()
        scheduler = self.scheduler
        if scheduler.now > _MOST_CALLS:
            scheduler.fail(AssertionError("it does not come to an end"))
        if self._deadly and self.dice.random() < self._deadly:
            alive = [one for one in self.processes if one.can_die and not one.is_dead]
            if self._cuts and self.dice.random() < 0.4:
                for process in alive:
                    self._kill(process)
                self.place.crash()
                self.judge.recount()
            elif alive:
                self._kill(self.dice.choice(alive))

    def _kill(self, process: Process) -> None:
        self.deaths += 1
        self.scheduler.kill(process)

    def _start_slot(self, number: int) -> Task:
        """A place where a job is started again and again, as a cluster does."""
        slot = Process(f"slot{number}", can_die=False, is_calm=True)
        lives = self.dice.randrange(1, 4)

        def start_lives() -> None:
            for life in range(lives):
                process = self._new(f"job{number}-{life}")
                saves = self.dice.randrange(1, 5)
                self.scheduler.join(
                    self.scheduler.start(process, "main", lambda: self._live(process, saves=saves))  # noqa: B023
                )
                process.can_die = False

        return self.scheduler.start(slot, "slot", start_lives)

    def _live(self, process: Process, *, saves: int) -> None:
        """The life of a job: it restores, trains, saves, and cleans up."""
        try:
            self.make_job(process).run(saves)
        except FencedError:
            self.fenced += 1
        except StorageError as error:
            self.scheduler.note(f"{process.name} ends: {error}")
            if process.is_calm:
                raise

    def open(self, process: Process) -> Storage:
        """Returns the storage of a process."""
        storage: Storage = self.place.open(process)
        return storage

    def make_job(self, process: Process) -> Job:
        """Returns the job of a process."""
        return Job(self, process, self.open(process))

    def note_generation(self, process: Process, generation: int, seen: int) -> None:
        """A process has opened a generation; see `Judge`."""
        self.judge.note_generation(process, generation, seen)

    def note_saving(self, process: Process, name: StepName, arrays: dict[str, bytes]) -> None:
        """A process is about to commit a step of these bytes."""
        self.judge.saved[name] = arrays

    def acknowledge(self, process: Process, name: StepName) -> None:
        """A process calls a step committed."""
        self.judge.acknowledge(process, name)

    def restore(self, process: Process, storage: Storage, arrays: dict[str, Any]) -> Restoration | None:
        """**Blocks.** Restores, and checks what comes."""
        with self.judge.window() as window:
            try:
                restoration = restore_objects(
                    storage, {"model": arrays}, step=None, select=None, strict=True, threads=1, emit=_ignore
                )
            except NoCheckpointError as error:
                if window.least >= 0 and not process.has_read_wrong_bytes:
                    self.judge.wrong(f"{process.name} could not restore: {error}")
                raise StorageError(str(error)) from error
            found = {name: array.tobytes() for name, array in arrays.items()}
            self.judge.check_restored(process, window, restoration, found)
        self.restored += restoration is not None
        return restoration

    def train(self, arrays: dict[str, Any]) -> None:
        """Changes the state: never the same twice; a part of it seldom."""
        self._marks += 1
        arrays["fast"][:] = np.arange(_LENGTH) + 1000 * self._marks
        if self.dice.random() < 0.4:
            arrays["slow"][:] = np.arange(_LENGTH) - 1000 * self._marks

    def _read_on(self) -> None:
        process = self.scheduler.task.process
        storage = self.open(process)
        for _ in range(self.dice.randrange(1, 4)):
            try:
                restoration = self.restore(process, storage, make_arrays())
                if restoration is not None and self.dice.random() < 0.3:
                    judge_step(storage, restoration.name.directory, restoration.name)
            except StorageError:
                continue
            finally:
                process.has_read_wrong_bytes = False

    def _prune(self) -> None:
        storage = self.place.open(self.scheduler.task.process)
        wishes = Wishes(
            off_line=self.dice.random() < 0.5,
            unfinished=self.dice.random() < 0.7,
            lost=self.dice.random() < 0.3,
            policy=Latest(1) if self.dice.random() < 0.5 else None,
        )
        for _ in range(self.dice.randrange(1, 4)):
            try:
                survey = survey_run(storage)
                plan = plan_removals(survey, wishes, 0.0)
                if plan.remove:
                    check_unchanged(storage, plan, survey.catalog)
                    carry_out(storage, plan, survey.catalog)
            except (StorageError, UsageError):
                continue

    def _check_end(self, process: Process) -> None:
        """When all is over the run is tidy, and what was acknowledged last comes back."""
        storage = self.place.open(process)
        run = StoredRun(storage)
        catalog = run.look(closely=True)
        needed = {name for referrer in run.history.referrers(catalog.committed) for name in referrer.refers_to}
        left = [*catalog.trash, *(name.directory for name in catalog.unfinished if name not in needed)]
        assert not catalog.faults, f"damaged: {catalog.faults}"
        assert not left, f"left behind: {left}"
        assert self.restore(process, storage, make_arrays()) is not None


class Job:
    """A job, from its start to its end: what a manager does, in the same order."""

    def __init__(self, world: World, process: Process, storage: Storage, copier: StepCopier | None = None) -> None:
        dice = world.dice
        self._world, self._process, self._storage = world, process, storage
        keep = Latest(dice.randrange(1, 4)) if copier is None else copier.keep
        self._writer = RunWriter(storage, keep, incremental=dice.random() < 0.5, copier=copier)
        self._tidier = _Tidier(world.scheduler, process, self._writer)
        self._stager, self._pool = Stager(HostBuffer()), WorkerPool(1, "save")
        self._arrays = make_arrays()
        self._step = 0

    def run(self, saves: int) -> None:
        """**Blocks.** Restores and saves; ends as soon as it is fenced."""
        dice, world = self._world.dice, self._world
        catalog = StoredRun(self._storage).look()
        self._origin = Origin(catalog.newest, catalog.generation, start_from=catalog.start_from)
        restoration = world.restore(self._process, self._storage, self._arrays)
        if restoration is None:
            StoredRun(self._storage).check_nothing_lost()
            self._step = 0 if catalog.newest is None else catalog.newest.step
        else:
            self._origin = Origin(restoration.name, restoration.seen_generation, (), catalog.start_from)
            self._step = restoration.step
        is_again = False
        for _ in range(saves):
            if not is_again:
                self._step += dice.randrange(1, 3)
            world.train(self._arrays)
            try:
                self._save()
                is_again = False
            except FencedError:
                raise
            except StorageError as error:
                world.scheduler.note(f"{self._process.name} failed to save: {error}")
                if self._process.is_calm:
                    raise
                is_again = dice.random() < 0.8
        self._tidier.wait()
        self._end()

    def _end(self) -> None:
        """**Blocks.** The end of a job that is not killed."""
        self._writer.recycler.close()

    def _save(self) -> None:
        """**Blocks.** What the engine does in a save."""
        world = self._world
        request = SaveRequest(self._step, {"loss": float(self._step)}, {}, self._origin, asked_at=0.0)
        staging = self._stager.stage(capture_objects({"model": self._arrays}), self._step)
        self._pool.run(staging.copies_now())
        attempt = StepAttempt(self._writer, request, self._tidier, _ignore)
        saved = {name: array.tobytes() for name, array in self._arrays.items()}
        generation = self._writer.generation
        try:
            try:
                receipts = attempt.write(staging, self._pool)
            finally:
                if (opened := self._writer.generation) not in (None, generation):
                    world.note_generation(self._process, opened, self._origin.seen_generation)
            name = request.name
            assert name is not None
            world.note_saving(self._process, name, saved)
            manifest = attempt.commit(receipts)
            assert manifest is not None
            world.acknowledge(self._process, name)
        except BaseException as error:
            attempt.give_up(error)
            raise
        self._tidier.wait()
        self._tidier.begin(name, self._origin, manifest)


def make_arrays() -> dict[str, Any]:
    """Returns the state of a job that begins."""
    return {"fast": np.zeros(_LENGTH), "slow": np.zeros(_LENGTH), "frozen": np.arange(float(_LENGTH))}


def _ignore(event: Event) -> None:
    """Takes an event."""


def kind_of(seed: int) -> str:
    """Returns what a seed simulates: a `bucket` or a `disk`."""
    return "disk" if seed % 2 else "bucket"


def simulate(seed: int) -> Outcome:
    """Runs one simulation."""
    return World(seed).run()
