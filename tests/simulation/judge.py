"""Knows what was promised, sees each change of the storage, and says when something is there that must never be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.errors import DamageError
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    StepName,
    base_path,
    generation_path,
    is_part,
    parse_generation_file,
    parse_step_directory,
)
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_MANIFEST_BYTES,
    Base,
    choose_living,
    decode_base,
    decode_manifest,
)
from holdfast.restore.records import Restoration
from holdfast.restore.verify import CheckOutcome, judge_step
from holdfast.storage import Storage
from simulation.scheduler import Killed, Process, Scheduler, ViolationError


class Place(Protocol):
    """What is simulated: a bucket or a disk."""

    def open(self, process: Process | None = None) -> Any:
        """Returns the storage of a process, or one that meets no faults."""

    def crash(self) -> None:
        """The power fails."""

    def happen(self) -> None:
        """Called at each call."""


@dataclass(eq=False)
class Committed:
    """A step whose manifest is there.

    Attributes:
        at: When it appeared.
        needs: The steps that hold bytes of it.
        is_whole: True as long as no byte of it is gone.
    """

    at: int
    needs: frozenset[str]
    is_whole: bool


@dataclass(eq=False)
class Window:
    """A stretch of time.

    Attributes:
        least: The least step that could be relied on at some moment of it; -1 for none.
        bases: The bases that were known when it began.
    """

    least: int
    bases: Mapping[int, Base]


@dataclass(eq=False)
class Judge:
    """Raises `Killed` in the task that does what must not be, and ends the simulation with a `ViolationError`.

    Attributes:
        scheduler: The clock.
        saved: The bytes of each array, by the step that was to be saved.
        owners: The process that acknowledged a step of each generation.
        acknowledged: The steps that their savers called committed.
        floor: The step that a restore may rely on: the newest acknowledged one, or the one that the run was taken back
            to since. -1 for none.
        slept_over: Steps that were removed by a job or a person between a look at the generations and the removal of
            what a policy gives up: the docs name this gap. One may be that from which a new job has begun meanwhile.
    """

    scheduler: Scheduler
    saved: dict[StepName, Mapping[str, bytes]] = field(default_factory=dict)
    owners: dict[int, Process] = field(default_factory=dict)
    acknowledged: set[StepName] = field(default_factory=set)
    floor: int = -1
    slept_over: set[StepName] = field(default_factory=set)
    _storage: Storage | None = None
    _place: Place | None = None
    _opened: dict[int, int] = field(default_factory=dict)
    _bases: dict[int, Base] = field(default_factory=dict)
    _committed: dict[StepName, Committed] = field(default_factory=dict)
    _withdrawn: dict[StepName, tuple[int, Process]] = field(default_factory=dict)
    _windows: list[Window] = field(default_factory=list)

    def watch(self, place: Place) -> None:
        """Looks at each change from now on."""
        self._storage, self._place = place.open(), place
        place.changed = self._note  # type: ignore[attr-defined]

    def wrong(self, text: str) -> None:
        """Ends the simulation."""
        self.scheduler.fail(ViolationError(text))
        raise Killed

    def note_generation(self, process: Process, generation: int, seen: int) -> None:
        """A process has opened a generation, and had seen others when it chose its step."""
        process.generation = generation
        passed = [
            one for one in self._opened if seen < one < generation and self.owners.get(one) not in (None, process)
        ]
        if passed:
            self.wrong(f"generation {generation} was opened past {passed}, which saved since its opener had looked")

    def acknowledge(self, process: Process, name: StepName) -> None:
        """A process calls a step committed."""
        found = self._committed.get(name)
        if found is None and name in self._withdrawn and max(self._opened, default=0) > name.generation:
            return  # It was committed, and since its saver had looked for newer generations, one has removed it.
        if found is None or not found.is_whole:
            self.wrong(f"{name} is acknowledged and {'absent' if found is None else 'not whole'}")
            return
        if newer := [one for one, at in self._opened.items() if one > name.generation and at < found.at]:
            self.wrong(f"{name} is acknowledged, though generation {newer} was opened before it was published")
        if self.owners.setdefault(name.generation, process) is not process:
            self.wrong(f"{process.name} and {self.owners[name.generation].name} both saved in one line: {name}")
        self.acknowledged.add(name)
        if name in self._living():
            self._set_floor(max(self.floor, name.step))

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Notes what could be relied on during the block."""
        window = Window(self.floor, dict(self._bases))
        self._windows.append(window)
        try:
            yield window
        finally:
            self._windows.remove(window)

    def check_restored(
        self, process: Process, window: Window, restoration: Restoration | None, arrays: Mapping[str, bytes]
    ) -> None:
        """A process has restored, in a window of time."""
        if restoration is None:
            if window.least >= 0:
                self.wrong(f"{process.name} found nothing to restore, though step {window.least} was acknowledged")
            return
        name = restoration.name
        if self.saved.get(name) != arrays:
            self.wrong(f"{process.name} restored wrong bytes of {name}")
        if not any(name in choose_living([name], bases) for bases in (window.bases, self._bases)):
            self.wrong(f"{process.name} restored {name}, which is not in the lineage")
        if not process.has_read_wrong_bytes:
            if name.step < window.least:
                self.wrong(f"{process.name} restored {name}, though step {window.least} was acknowledged")
            if hollow := [damage for damage in restoration.passed_over if self._is_clear(damage.path)]:
                self.wrong(f"{process.name} was offered what is not whole: {hollow[0]}")

    def recount(self) -> None:
        """The power has failed: what is there now is all there is."""
        there = [parse_step_directory(entry.name) for entry in self._quiet.list("")]
        generations = [entry.name for entry in self._quiet.list(GENERATIONS_DIRECTORY)]
        opened = filter(None, map(parse_generation_file, generations))
        self._opened = {one: self._opened.get(one, self.scheduler.now) for one in opened}
        self._bases = {one: self._bases[one] for one in self._bases if base_path(one).rpartition("/")[2] in generations}
        before, self._committed = self._committed, {}
        for name in sorted(filter(None, there)):
            if any(entry.name == MANIFEST_NAME for entry in self._quiet.list(name.directory)):
                self._note_manifest(name, before[name].at if name in before else self.scheduler.now)
        lost = self.acknowledged - self._committed.keys() - self._withdrawn.keys()
        if lost:
            self.wrong(f"{min(lost)} was acknowledged, and a power cut lost it")
        self._check_floor()

    @property
    def _quiet(self) -> Storage:
        assert self._storage is not None
        return self._storage

    def _living(self) -> tuple[StepName, ...]:
        return choose_living((name for name, one in self._committed.items() if one.is_whole), self._bases)

    def _is_promised(self, name: StepName) -> bool:
        return name in self.acknowledged and name not in self._withdrawn

    def _is_clear(self, path: str) -> bool:
        """Returns True if a step was acknowledged, and not removed since."""
        name = parse_step_directory(path.partition("/")[0])
        return name is not None and self._is_promised(name)

    def _set_floor(self, floor: int) -> None:
        self.floor = floor
        for window in self._windows:
            window.least = min(window.least, floor)

    def _check_floor(self) -> None:
        newest = max((name.step for name in self._living()), default=-1)
        if newest < self.floor <= max((name.step for name in self.slept_over), default=-1):
            self._set_floor(newest)
        if newest < self.floor:
            self.wrong(f"step {self.floor} was acknowledged, and the newest that is left in the lineage is {newest}")

    def _note(self, path: str, is_made: bool) -> None:
        directory, _, name = path.partition("/")
        if directory == GENERATIONS_DIRECTORY:
            self._note_record(path, is_made)
            return
        step = parse_step_directory(directory)
        if step is None:
            return
        if name == MANIFEST_NAME:
            if is_made:
                self._note_manifest(step, self.scheduler.now)
            elif step in self._committed:
                self._note_withdrawal(step)
        elif is_part(name) and not is_made:
            self._note_removal(step, path)

    def _note_record(self, path: str, is_made: bool) -> None:
        name = path.partition("/")[2]
        number = parse_generation_file(name) or parse_generation_file(name.replace(".base.json", ".json"))
        if number is None:
            return
        if not is_made:
            # One whose name could not be made to last was taken back.
            (self._opened if path == generation_path(number) else self._bases).pop(number, None)
        elif path == generation_path(number):
            self._opened[number] = self.scheduler.now
        elif path == base_path(number):
            data = self._quiet.read(path, MAX_GENERATION_BYTES)
            try:
                base = self._bases[number] = decode_base(data, path=path, generation=number)
            except DamageError as error:
                self.wrong(f"a record is there in part: {error}")
                return
            self._set_floor(min(self.floor, -1 if base.step is None else base.step))
            self._check_floor()

    def _note_manifest(self, name: StepName, at: int) -> None:
        path = name.manifest_path
        manifest = None
        outcome = judge_step(self._quiet, name.directory, name).outcome
        if outcome is CheckOutcome.WHOLE:
            manifest = decode_manifest(self._quiet.read(path, MAX_MANIFEST_BYTES), path=path, expected=name)
        elif self._is_promised(name) or not (self._refers(name) or self._is_hidden(name)):
            self.wrong(f"{name} has a manifest and is {outcome.value}")
        needs = {one.name.directory for one in manifest.references} if manifest else set()
        self._committed[name] = Committed(at, frozenset({name.directory, *needs}), manifest is not None)

    def _refers(self, name: StepName) -> bool:
        data = self._quiet.read(name.manifest_path, MAX_MANIFEST_BYTES)
        try:
            return bool(decode_manifest(data, path=name.manifest_path, expected=name).references)
        except Exception:
            return False

    def _is_hidden(self, name: StepName) -> bool:
        """Returns True if no restore takes a step by itself: a writer that was thought dead may leave one in part."""
        newest = max(self._living(), default=None)
        return name not in choose_living([name], self._bases) or (newest is not None and name < newest)

    def _note_withdrawal(self, name: StepName) -> None:
        task, is_late, was_promised = self.scheduler.task, self.scheduler.is_late, self._is_promised(name)
        looked_at = task.looked_at.get(self._place, -1)
        del self._committed[name]
        self._withdrawn[name] = self.scheduler.now, task.process
        newer = [] if is_late else self._list_newer(task.process)
        if task.name.startswith("person"):
            # A person has no generation: newer ones are those that were opened since the last look.
            newer = [one for one, opened_at in self._opened.items() if opened_at > looked_at]
        if was_promised and newer and min(self._opened[one] for one in newer) < looked_at:
            self.wrong(f"{task.name} removes {name}, though it has seen generation {newer}")
        if newer or is_late:
            self.slept_over.add(name)
        self._check_floor()

    def _note_removal(self, name: StepName, path: str) -> None:
        task = self.scheduler.task
        for other, one in self._committed.items():
            if one.is_whole and name.directory in one.needs:
                one.is_whole = False
                may_lack = len(one.needs) > 1 or self._is_hidden(other)
                if self._is_promised(other) or not may_lack:
                    self.wrong(f"{task.name} removes {path}, though {other} needs it")
        withdrawn_at, by = self._withdrawn.get(name, (0, None))
        if by is task.process and name in self.acknowledged and not self.scheduler.is_late:
            newer = [one for one in self._list_newer(task.process) if self._opened[one] < withdrawn_at]
            if newer:
                self.wrong(f"{task.name} goes on with the removal of {name}, though there is generation {newer}")
        self._check_floor()

    def _list_newer(self, process: Process) -> list[int]:
        return [one for one in self._opened if 0 < process.generation < one]
