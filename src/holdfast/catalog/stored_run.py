"""A run on its storage: its generations, its steps, and who may add to it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final, Literal

import msgspec

from holdfast.catalog.history import NEWEST, History, read_opening
from holdfast.catalog.openers import identify, make_gone_error
from holdfast.catalog.stored_step import StoredStep
from holdfast.errors import (
    DamageError,
    FencedError,
    FormatError,
    HoldfastError,
    NoCheckpointError,
    NotFoundError,
    NoWholeCheckpointError,
    StorageError,
)
from holdfast.events.kinds import AnyEvent, Committed, Retained
from holdfast.events.sinks import JOURNAL_NAMES, decode_event
from holdfast.format.digests import seal
from holdfast.format.names import (
    COMMITTED_NAME,
    EVENTS_DIRECTORY,
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    MAX_GENERATION,
    SPARE_NAME,
    TRASH_PREFIX,
    StepName,
    base_path,
    generation_path,
    is_part,
    parse_generation_file,
    parse_step_directory,
)
from holdfast.format.records import Base, Opening, choose_living
from holdfast.storage.protocol import Entry, Storage

_NAMED_STEPS: Final = 5


class Catalog(msgspec.Struct, frozen=True):
    """The contents of a run's root at one moment.

    Attributes:
        committed: All steps with a manifest, in the current lineage or not, in order of step.
        living: Those in the current lineage, in order of step.
        unfinished: Directories of steps that were never committed: being written, or abandoned.
        lost: Steps that were committed and whose manifest is gone, in the current lineage or not, in order of step.
            Their data is kept.
        trash: Names in the root that were set aside to be removed.
        generation: The newest generation that was opened, or 0.
        faults: Records of generations that could not be read.
        spare_bytes: The size of the spare file that a job reuses for its next save; None if there is none.
        bases: The bases of the generations that recorded one.
        without_copy: The committed steps that have no copy of their manifest; None where a listing does not show it.
    """

    committed: tuple[StepName, ...]
    living: tuple[StepName, ...]
    unfinished: tuple[StepName, ...]
    lost: tuple[StepName, ...]
    trash: tuple[str, ...]
    generation: int
    faults: tuple[DamageError, ...]
    spare_bytes: int | None
    bases: Mapping[int, Base] = msgspec.field(default_factory=dict)
    without_copy: tuple[StepName, ...] | None = None

    @property
    def newest(self) -> StepName | None:
        """The newest step of the current lineage, or None."""
        return self.living[-1] if self.living else None

    @property
    def start_from(self) -> int | None:
        """The step that the program last went back to on request, in the current lineage; None if it never did."""
        return self.bases[max(self.bases)].start_from if self.bases else None

    def find(self, step: int, url: str = "") -> StepName:
        """Returns the checkpoint of a step: that of the current lineage, else the newest other one.

        Raises:
            NoCheckpointError: If there is none; the error names those that exist.
            NoWholeCheckpointError: If it was committed, but has lost its manifest.
        """
        for name in self.living:
            if name.step == step:
                return name
        off_line = [name for name in self.committed if name.step == step]
        if off_line:
            return max(off_line)
        if lost := [name for name in self.lost if name.step == step]:
            raise make_lost_error(lost)
        known = ", ".join(str(existing) for existing in sorted({name.step for name in self.committed}))
        where = f" in {url}" if url else ""
        raise NoCheckpointError(
            f"there is no checkpoint of step {step}{where}", hint=f"Steps that exist: {known or 'none'}."
        )


def make_lost_error(lost: Sequence[StepName], url: str = "") -> NoWholeCheckpointError:
    """**Pure.** Returns the error for committed steps that have lost their manifests."""
    missing = [DamageError("the manifest is gone", step=name.step, path=name.manifest_path) for name in lost]
    return NoWholeCheckpointError(
        f"{url}: {describe_lost(lost)}" if url else describe_lost(lost),
        damages=tuple(missing),
        hint=f"Restore the manifests: `{lost[-1].committed_path}` is a copy of `{lost[-1].manifest_path}`, unless it "
        "is empty or missing. Or start from the beginning on purpose: begin_anew=True, or another directory.",
    )


def describe_lost(lost: Sequence[StepName]) -> str:
    """**Pure.** Describes them in words."""
    many, few = len(lost) > 1, lost[-_NAMED_STEPS:]
    steps = ", ".join(str(name.step) for name in few)
    before = f"{len(lost)} steps, the last of them " if len(lost) > len(few) else "steps " if many else "step "
    what = "their manifests are" if many else "its manifest is"
    return f"{before}{steps} {'were' if many else 'was'} committed, and {what} gone; the data files are still there"


def describe_steps(steps: Sequence[int]) -> str:
    """**Pure.** Names steps, at least one, in words: of many, how many there are, the first and the last."""
    if len(steps) > _NAMED_STEPS:
        return f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


_MOST_LOOKS: Final = 30
_MOST_JOURNAL_BYTES: Final = 64 << 20
_FENCED_HINT: Final = "Only one job may save to a run. Stop this job, or give it its own directory."


class StoredRun:
    """A run on one storage. Not thread-safe: it remembers what it has read, as far as that never changes.

    Each method that blocks raises `StorageError` if the storage fails.

    Attributes:
        storage: The storage.
        history: What this object knows of the run from earlier looks.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.history = History(storage)
        # The generation whose record was found to be this job's own, its token, and the version of that record.
        self._checked: tuple[int, str, str] = (0, "", "")

    @property
    def url(self) -> str:
        """The location, as a person would write it."""
        return self.storage.url

    def step(self, name: StepName) -> StoredStep:
        """**Pure.** Returns a step, which need not exist."""
        return StoredStep(self.storage, name.directory, name)

    def opening(self, generation: int) -> Opening:
        """**Blocks.** Returns the record of the process that opened a generation; see `read_opening`."""
        return read_opening(self.storage, generation)

    def try_opening(self, generation: int) -> Opening | None:
        """**Blocks.** Returns the record of the process that opened a generation; None if it cannot be read."""
        try:
            return self.opening(generation)
        except HoldfastError:
            return None

    def look(self, *, closely: bool = False) -> Catalog:
        """**Blocks.** Reads the run's root.

        A step is committed if its directory contains a manifest; whether it is whole is for a reader to verify. To
        avoid looking into thousands of directories, the newest generation's summary is trusted about old steps. Reading
        such a step shows whether its manifest still exists.

        If the storage lists deep, one listing says of every directory what is in it, and no summary is trusted of that.

        A running job may commit a step that is not in the list of directories yet, and then remove one that is, before
        that one is looked into. Or a new job may begin from a step that is not in the list yet. So if a directory has
        no manifest, or a base is not there, and others have come since, all are looked at again.

        Args:
            closely: True to look into each directory, regardless of a summary.

        Raises:
            StorageError: If the storage cannot be read.
        """
        history, known, bases = self.history, frozenset[StepName](), dict[int, Base]()
        for looks in range(_MOST_LOOKS):
            entries, files = self._list_deep() if self.storage.traits.lists_deep else (self.storage.list(""), None)
            directories = [entry.name for entry in entries if entry.is_directory]
            names = list(filter(None, map(parse_step_directory, directories)))
            if not looks or any(name.generation not in bases for name in names if name not in known):
                # After the steps: a step that has been seen is of a generation that is seen, and so is its base.
                records = None if files is None else _find_records(names, files)
                bases, faults = history.look(closely=closely, names=records)
            elif known.issuperset(names):
                break
            committed, lost, unfinished = self._sort_steps(names, files)
            newest = max(map(attrgetter("generation"), names), default=0)
            begun = {base.name for generation, base in bases.items() if generation > newest}
            if not (lost or unfinished or begun.difference((None, *committed))):
                break
            known = frozenset(names)
        living = choose_living(committed, bases)
        without_copy: tuple[StepName, ...] | None = None
        if files is not None:
            history.trusted = frozenset()  # The listing has looked into each of them.
            # One that the last listing lacks was removed since it was found.
            without_copy = tuple(name for name in committed if COMMITTED_NAME not in files.get(name.directory, ()))
        if living and living[-1] in history.trusted and not self.step(living[-1]).is_committed():
            # No summary vouches for the newest step when it is written, so that others have been removed since.
            return self.look(closely=True)
        if files is None and (summary := history.summary) is not None:
            # Older steps of the generation that wrote the summary: only it removes them, or a person, and then all
            # summaries go first. A step of an older one may be about to be removed by a job that is not fenced yet.
            own = (name for name in committed if name.generation == summary.generation)
            history.trusted = history.believed.union(own).difference(living[-NEWEST:])
        numbers = [*history.opened, *map(attrgetter("generation"), (*committed, *lost, *unfinished))]
        return Catalog(
            committed=tuple(committed),
            living=living,
            unfinished=tuple(unfinished),
            lost=tuple(lost),
            trash=tuple(directory for directory in directories if directory.startswith(TRASH_PREFIX)),
            generation=max(numbers, default=0),
            faults=tuple(faults),
            spare_bytes=next(
                (one.size_bytes for one in entries if one.name == SPARE_NAME and not one.is_directory), None
            ),
            bases=bases,
            without_copy=without_copy,
        )

    def list_generations(self) -> list[int]:
        """**Blocks.** Returns the numbers of all opened generations, in order."""
        return sorted(self._list_openings())

    def _list_openings(self) -> dict[int, str]:
        """**Blocks.** Returns the versions of the records of all opened generations, by number."""
        return {
            generation: one.version
            for one in self.storage.list(GENERATIONS_DIRECTORY)
            if (generation := parse_generation_file(one.name)) is not None
        }

    def open_generation(
        self,
        token: str = "",
        *,
        seen_generation: int | None = None,
        best: Mapping[str, Literal["min", "max"]] | None = None,
        least: int = 0,
    ) -> int:
        """**Blocks.** Opens the next generation of the run and returns its number; from now on older ones are fenced.

        A crash after this leaves a generation without a base, which saved nothing and does not change the lineage.

        Args:
            token: Random text that identifies the opener; empty for one made here.
            seen_generation: The newest generation when this job chose where to resume from: no other job may have
                opened a newer one since. None to open one regardless.
            best: By metric, which value is the best one, for those who ask for it later.
            least: The least number that it may have.

        Raises:
            FencedError: If another job has opened a newer one since. Then this job opens none, and fences no other.
            StorageError: If the storage fails, or the run is gone.
        """
        names = filter(
            None, (parse_step_directory(entry.name) for entry in self.storage.list("") if entry.is_directory)
        )
        numbers = [*self.list_generations(), *(name.generation for name in names)]
        generation = max(1, least, *(number + 1 for number in numbers))
        if seen_generation is not None and generation <= seen_generation:
            raise make_gone_error(self.url, seen_generation)
        self.storage.make_directory(GENERATIONS_DIRECTORY)
        for _ in range(1000):
            # Looked at after the number was chosen: a job that opens one later than this look takes the same number,
            # and then only one of the two gets it. So a job that slept here for hours cannot pass one that began
            # meanwhile.
            if seen_generation is not None:
                self.check_unpassed(seen_generation, token)
            if generation > MAX_GENERATION:
                raise StorageError(
                    f"{self.url}: no generation can follow {MAX_GENERATION}",
                    path=GENERATIONS_DIRECTORY,
                    hint="A file or directory there has a number that no job gave it; remove it.",
                )
            opening = Opening(
                generation=generation,
                token=token or os.urandom(16).hex(),
                opened_at_unix_seconds=time.time(),
                best=dict(best or {}),
                **identify(os.getpid()),
            )
            path, record = generation_path(generation), seal(opening)
            if self.storage.publish(path, record):
                # A file system cannot link over a name. Some services of buckets ignore the condition of a put.
                if not self.storage.traits.has_directories and self.storage.publish(path, record):
                    raise StorageError(
                        f"{self.url}: the service replaced an object that was to be created only if there is none, so "
                        "two jobs could overwrite each other's checkpoints",
                        path=path,
                        hint="Use a service that honors If-None-Match: S3, Google Cloud Storage, Azure, Ceph or MinIO.",
                    )
                if (least or self.storage.traits.has_tiers) and seen_generation is not None:
                    # One that was opened where not all tiers could be reached has another number. Of two that are
                    # opened at the same time at least one sees the other.
                    self.check_unpassed(seen_generation, token)
                return generation
            generation += 1  # Another job took the number in the same moment.
        raise StorageError(
            f"{self.url}: other jobs took a thousand generations while this job tried to open one",
            path=GENERATIONS_DIRECTORY,
            hint="Many jobs write to this directory; give each run its own directory.",
        )

    def record_base(self, base: Base) -> None:
        """**Blocks.** Records the checkpoint that a generation begins from.

        Raises:
            StorageError: If the storage fails, or the base of this generation was recorded before.
        """
        path = base_path(base.generation)
        if base.name is not None:
            # Its saver may have died before it did so: a power cut must not leave the base of a step that is not there.
            with suppress(NotFoundError):
                self.storage.sync_directory(base.name.directory)
        if not self.storage.publish(path, seal(base)):
            raise StorageError(
                f"{self.url}: generation {base.generation} already has a base",
                path=path,
                hint="The directory was changed by hand, or two jobs act as the same job.",
            )

    def check_fence(self, generation: int, opened: Sequence[int] | None = None) -> None:
        """**Blocks.** Checks that no newer generation has been opened; `opened` are all of them, if they were just
        listed.

        Raises:
            FencedError: If one has; the error names its opener.
        """
        newest = max(self.list_generations() if opened is None else opened, default=0)
        if newest > generation:
            by = name_opener(self.try_opening(newest))
            raise FencedError(
                f"{self.url}: generation {newest} was opened{by}; this job has generation {generation} and "
                "can no longer save",
                hint=_FENCED_HINT,
            )

    def check_owned(self, generation: int, token: str) -> None:
        """**Blocks.** Checks that no newer generation has been opened, and that the run is where this job has opened
        its own, by the record of that.

        A run that was moved, removed or unmounted is never made again: what is saved in its place would be found by no
        one.

        Raises:
            StorageError: If the record is gone.
            FencedError: If another job has opened a newer generation, or has begun a new run where this one was.
        """
        openings = self._list_openings()
        self.check_fence(generation, [*openings])
        own = (generation, token, openings.get(generation, ""))
        if own == self._checked and own[2]:
            return
        try:
            opening = read_opening(self.storage, generation)
        except NotFoundError as error:
            raise make_gone_error(self.url, generation) from error
        except DamageError:
            return  # Of this job's or not: the numbers decide.
        if opening.token != token:
            raise FencedError(
                f"{self.url}: generation {generation} of this job was replaced by one that was opened"
                f"{name_opener(opening)}",
                hint=_FENCED_HINT,
            )
        self._checked = own

    def check_unpassed(self, seen_generation: int, token: str) -> None:
        """**Blocks.** Checks that no other job has begun to save since this manager chose where to resume from.

        Args:
            seen_generation: The newest generation at that time.
            token: The token of this manager's own generations, which do not count.

        Raises:
            FencedError: If one has; the error names it.
        """
        for newer in sorted(self.list_generations(), reverse=True):
            if newer <= seen_generation:
                return
            opening = self.try_opening(newer)
            if opening is None or opening.token != token:
                raise FencedError(
                    f"{self.url}: generation {newer} was opened{name_opener(opening)} after this job chose the "
                    "step to continue from; the steps saved there would be lost",
                    hint=_FENCED_HINT,
                )

    def check_base(self, base: StepName | None) -> None:
        """**Blocks.** Checks that the step from which a job continues was not removed by one that goes on.

        A generation that begins from a step that is gone would leave nothing in the lineage until its first commit.

        Raises:
            FencedError: If the step is gone, and a newer one is there.
        """
        if base is None or self.step(base).is_committed():
            return
        newest = self.look(closely=True).newest
        if newest is not None and newest > base:
            raise FencedError(
                f"{self.url}: step {base.step}, from which this job continues, was removed since, and there is step "
                f"{newest.step}: another job has gone on",
                hint=_FENCED_HINT,
            )

    def find_lost(self, catalog: Catalog) -> tuple[StepName, ...]:
        """**Blocks.** Returns the committed steps of the current lineage that have lost their manifests, in order of
        step.

        The file `committed` in a step's directory proves that it was committed. Older runs have no such file. There, a
        step newer than all others with a manifest was committed if a generation began from it, or if the run's journal
        of events says so: retention never removes the newest one.

        Raises:
            StorageError: If the storage cannot be read.
        """
        if not (catalog.lost or catalog.unfinished):
            return ()
        lost = set(choose_living((*catalog.committed, *catalog.lost), catalog.bases)) & set(catalog.lost)
        newest_step = -1 if catalog.newest is None else catalog.newest.step
        line = choose_living((*catalog.committed, *catalog.unfinished), catalog.bases)
        newer = [name for name in line if name.step > newest_step and name in catalog.unfinished]
        if newer:
            known = {base.name for base in catalog.bases.values()}
            journal = self._find_journaled()
            lost.update(
                name
                for name in newer
                if (name in known or (name.step, name.generation) in journal)
                and self.step(name).has_data()
                and not self.step(name).is_committed()
            )
        return tuple(sorted(lost))

    def find_journaled(self, catalog: Catalog) -> tuple[StepName, ...]:
        """**Blocks.** Returns unfinished steps that the run's journal of events lists as committed, in order of step.

        Most have lost their manifest and the file `committed` by hand. An interrupted removal leaves the same, so jobs
        remove such steps, and the listing shows a person what they are.

        Raises:
            StorageError: If the storage cannot be read.
        """
        there = {(name.step, name.generation) for name in (*catalog.committed, *catalog.lost)}
        unfinished = [name for name in catalog.unfinished if (name.step, name.generation) not in there]
        journal = self._find_journaled() if unfinished else ()
        return tuple(
            name
            for name in sorted(unfinished)
            if (name.step, name.generation) in journal and self.step(name).has_data()
        )

    def check_nothing_lost(self) -> None:
        """**Blocks.** Checks that a run without any checkpoint to resume from has none because none was saved.

        Raises:
            NoWholeCheckpointError: If checkpoints were committed, but have lost their manifests.
            StorageError: If the storage cannot be read.
        """
        catalog = self.look()
        lost = () if catalog.living else self.find_lost(catalog)
        if lost:
            raise make_lost_error(lost, self.url)

    def read_journal(self, *kinds: type[AnyEvent]) -> Iterator[AnyEvent]:
        """**Blocks.** Yields the events of these kinds in the run's journal, oldest first; of all kinds without any.

        Unreadable parts of it are ignored.
        """
        marks = [f'"{kind.__struct_config__.tag}"'.encode() for kind in kinds]
        starts = (f"{EVENTS_DIRECTORY}/{entry.name}" for entry in self.storage.list(EVENTS_DIRECTORY))
        for name in (*JOURNAL_NAMES, *sorted(starts, key=lambda path: (len(path), path))):
            with suppress(NotFoundError, DamageError):
                for line in self.storage.read(name, _MOST_JOURNAL_BYTES).splitlines():
                    if marks and not any(mark in line for mark in marks):
                        continue  # To decode them all would take long.
                    with suppress(FormatError):
                        event = decode_event(line)
                        if not kinds or isinstance(event, kinds):
                            yield event

    def _find_journaled(self) -> set[tuple[int, int]]:
        """Returns the steps and generations in the run's journal, without those that were removed later."""
        found: set[tuple[int, int]] = set()
        for event in self.read_journal(Committed, Retained):
            if isinstance(event, Committed):
                found.add((event.step, event.generation))
            elif isinstance(event, Retained):
                found = {one for one in found if one[0] not in event.removed}
        return found

    def _list_deep(self) -> tuple[list[Entry], dict[str, set[str]]]:
        """Returns the entries of the root, and the names of the files in each directory."""
        files: dict[str, set[str]] = {}
        entries: list[Entry] = []
        for entry in self.storage.list("", deep=True):
            directory, slash, name = entry.name.partition("/")
            if slash:
                files.setdefault(directory, set()).add(name)
            else:
                entries.append(entry)
        return [*entries, *(Entry(directory, True, 0) for directory in files)], files

    def _sort_steps(
        self, names: Sequence[StepName], files: Mapping[str, set[str]] | None
    ) -> tuple[list[StepName], list[StepName], list[StepName]]:
        """Returns the steps of a run, in order: with a manifest, with a lost one, and those that never had one."""
        trusted = self.history.trusted if files is None else frozenset()
        committed = [name for name in names if name in trusted]
        lost: list[StepName] = []
        unfinished: list[StepName] = []
        # Older ones first: where one of two is removed once the other is committed, the other is seen.
        for name in sorted(set(names) - trusted):
            step = self.step(name)
            there = None if files is None else files[name.directory]
            if step.is_committed() if there is None else MANIFEST_NAME in there:
                committed.append(name)
            elif not (step.has(COMMITTED_NAME) if there is None else COMMITTED_NAME in there):
                unfinished.append(name)
            elif step.is_committed():  # Since the first look.
                committed.append(name)
            else:
                # A removal takes this file before the manifest. So if it is still there, the step is not being removed.
                found = step.list_names()
                (lost if COMMITTED_NAME in found and any(map(is_part, found)) else unfinished).append(name)
        return sorted(committed), lost, unfinished


def _find_records(names: Sequence[StepName], files: Mapping[str, set[str]]) -> Collection[str] | None:
    """**Pure.** Returns the names of the files of generations in a deep listing, unless that may have missed some.

    A listing takes a while, and comes to the generations before it comes to the steps.
    """
    records = files.get(GENERATIONS_DIRECTORY, ())
    opened = set(map(parse_generation_file, records))
    return records if opened.issuperset(name.generation for name in names) else None


def name_opener(opening: Opening | None) -> str:
    """**Pure.** Names the opener of a generation, to follow "opened"; empty if it is not known."""
    return "" if opening is None else f" by process {opening.process} on {opening.host}"
