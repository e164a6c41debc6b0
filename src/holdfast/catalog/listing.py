"""Lists the steps under a run's root: which are committed, and which belong to the current lineage."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.catalog.late_metrics import add_late_metrics
from holdfast.catalog.openers import describe_process, make_gone_error
from holdfast.errors import (
    DamageError,
    FencedError,
    HoldfastError,
    NoCheckpointError,
    NotFoundError,
    NoWholeCheckpointError,
    StorageError,
)
from holdfast.format.digests import digest, seal, unseal
from holdfast.format.index import MAX_INDEX_BYTES, Index
from holdfast.format.index_checks import decode_index
from holdfast.format.names import (
    COMMITTED_NAME,
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    MAX_GENERATION,
    SPARE_NAME,
    TRASH_PREFIX,
    StepName,
    base_path,
    generation_path,
    index_name,
    is_part,
    join,
    parse_generation_file,
    parse_step_directory,
    parse_summary_file,
    summary_path,
)
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SUMMARY_BYTES,
    Base,
    Manifest,
    Opening,
    StepFacts,
    Summary,
    choose_living,
    decode_base,
    decode_manifest,
    decode_summary,
)
from holdfast.policies import Referrer
from holdfast.storage.protocol import Entry, Storage

_MOST_LOOKS: Final = 30
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

    @property
    def newest(self) -> StepName | None:
        """The newest step of the current lineage, or None."""
        return self.living[-1] if self.living else None

    @property
    def start_from(self) -> int | None:
        """The step that the program last went back to on request, in the current lineage; None if it never did."""
        return self.bases[max(self.bases)].start_from if self.bases else None

    def find(self, step: int) -> StepName:
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
        raise NoCheckpointError(f"there is no checkpoint of step {step}", hint=f"Steps that exist: {known or 'none'}.")


def read_catalog(storage: Storage, history: History | None = None, *, closely: bool = False) -> Catalog:
    """**Blocks.** Reads the run's root.

    A step is committed if its directory contains a manifest; whether it is whole is for a reader to verify. To avoid
    looking into thousands of directories, the newest generation's summary is trusted about old steps. Reading such a
    step shows whether its manifest still exists.

    A running job may commit a step that is not in the list of directories yet, and then remove one that is, before that
    one is looked into. So if a directory has no manifest, and others have come since, all are looked at again.

    Args:
        storage: The storage of the run.
        history: What this process knows of the run from earlier looks; new facts are added to it.
        closely: True to look into each directory, regardless of a summary.

    Raises:
        StorageError: If the storage cannot be read.
    """
    history = history or History(storage)
    entries = storage.list("")
    bases, faults = history.look(closely=closely)
    for _ in range(_MOST_LOOKS):
        committed, lost, unfinished = _sort_steps(storage, entries, history.believed)
        if not (lost or unfinished):
            break
        known, entries = {entry.name for entry in entries}, storage.list("")
        if not any(entry.name not in known and parse_step_directory(entry.name) for entry in entries):
            break
    trash: list[str] = []
    spare_bytes = None
    for entry in entries:
        if not entry.is_directory:
            if entry.name == SPARE_NAME:
                spare_bytes = entry.size_bytes
            continue
        if entry.name.startswith(TRASH_PREFIX):
            trash.append(entry.name)
    living = choose_living(committed, bases)
    if living and living[-1] in history.believed and not is_committed(storage, living[-1]):
        # No summary vouches for the newest step when it is written, so that others have been removed since.
        return read_catalog(storage, history, closely=True)
    return Catalog(
        committed=tuple(committed),
        living=living,
        unfinished=tuple(unfinished),
        lost=tuple(lost),
        trash=tuple(trash),
        generation=max([*history.opened, *[name.generation for name in (*committed, *lost, *unfinished)]], default=0),
        faults=tuple(faults),
        spare_bytes=spare_bytes,
        bases=bases,
    )


def _sort_steps(
    storage: Storage, entries: Iterable[Entry], believed: Collection[StepName]
) -> tuple[list[StepName], list[StepName], list[StepName]]:
    """Returns the steps of a run, in order: with a manifest, with a lost one, and those that never had one."""
    committed: list[StepName] = []
    lost: list[StepName] = []
    unfinished: list[StepName] = []
    # Older ones first: where one of two is removed once the other is committed, the other is seen.
    for name in sorted(name for entry in entries if entry.is_directory and (name := parse_step_directory(entry.name))):
        if name in believed or is_committed(storage, name):
            committed.append(name)
        elif not exists(storage, name.committed_path):
            unfinished.append(name)
        elif is_committed(storage, name):  # Since the first look.
            committed.append(name)
        else:
            # A removal takes this file before the manifest. So if it is still there, the step is not being removed.
            names = list_names(storage, name)
            (lost if COMMITTED_NAME in names and any(map(is_part, names)) else unfinished).append(name)
    return committed, lost, unfinished


def list_names(storage: Storage, name: StepName) -> set[str]:
    """**Blocks.** Returns the names in a step's directory."""
    return {entry.name for entry in storage.list(name.directory)}


def exists(storage: Storage, path: str) -> bool:
    """**Blocks.** Returns True if a file exists, whole or damaged.

    Raises:
        StorageError: If the storage cannot be read.
    """
    try:
        storage.open_reader(path).close()
    except NotFoundError:
        return False
    except DamageError:
        return True
    return True


def is_committed(storage: Storage, name: StepName) -> bool:
    """**Blocks.** Returns True if a step has a manifest. Listing its directory would look at each file of each worker.

    Raises:
        StorageError: If the storage cannot be read.
    """
    try:
        storage.open_reader(name.manifest_path).close()
    except NotFoundError:
        return False
    except (DamageError, StorageError):  # A manifest exists; its reader reports any damage.
        return any(one.name == MANIFEST_NAME and not one.is_directory for one in storage.list(name.directory))
    return True


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


def read_generations(storage: Storage) -> list[int]:
    """**Blocks.** Returns the numbers of all opened generations, in order."""
    parsed = (parse_generation_file(entry.name) for entry in storage.list(GENERATIONS_DIRECTORY))
    return sorted(generation for generation in parsed if generation is not None)


def read_opening(storage: Storage, generation: int) -> Opening:
    """**Blocks.** Returns the record of the process that opened a generation.

    Raises:
        NotFoundError: If no process did.
        DamageError: If the record is damaged.
    """
    path = generation_path(generation)
    return unseal(Opening, storage.read(path, MAX_GENERATION_BYTES), path=path)


def read_manifest(storage: Storage, name: StepName) -> Manifest:
    """**Blocks.** Returns a committed step's manifest.

    Raises:
        NotFoundError: If the step is not committed.
        DamageError: If it is damaged or another step's.
    """
    path = name.manifest_path
    manifest = decode_manifest(storage.read(path, MAX_MANIFEST_BYTES), path=path, expected=name)
    return add_late_metrics(storage, name.directory, manifest)


def read_references(storage: Storage, name: StepName) -> tuple[StepName, ...]:
    """**Blocks.** Returns the steps that a committed step needs besides its own; also of one that a newer holdfast
    wrote.

    If the manifest is gone, the copy of it is used.

    Raises:
        NotFoundError: If the step is not committed.
        DamageError: If its manifest is damaged or another step's.
    """
    path = name.manifest_path
    if not exists(storage, path):
        path = name.committed_path
    manifest = decode_manifest(storage.read(path, MAX_MANIFEST_BYTES), path=path, expected=name, is_read=False)
    return tuple(reference.name for reference in manifest.references)


def read_index(storage: Storage, directory: str, manifest: Manifest, rank: int) -> Index:
    """**Blocks.** Returns the index of one worker, checked against the manifest.

    Args:
        storage: The storage of the step.
        directory: The path of the step's directory; empty if the storage's root is that directory.
        manifest: The step's manifest.
        rank: The worker.

    Raises:
        NotFoundError: If it is missing.
        DamageError: If it is not the index that was written.
    """
    worker = manifest.workers[rank]
    path = join(directory, index_name(rank, manifest.world_size))
    step = manifest.step
    if worker.index_bytes > MAX_INDEX_BYTES:
        raise DamageError(f"{path} should have {worker.index_bytes} bytes", step=step, path=path)
    data = storage.read(path, worker.index_bytes)
    if len(data) != worker.index_bytes or digest(data) != worker.index_digest:
        raise DamageError(f"{path} does not match the digest in the manifest", step=step, path=path)
    index = decode_index(data, path=path, step=step)
    stands_for = (index.name, index.rank, index.world_size, index.data_bytes)
    if stands_for != (manifest.name, rank, manifest.world_size, worker.data_bytes):
        raise DamageError(f"{path} belongs to another checkpoint or worker", step=step, path=path)
    return index


def open_generation(storage: Storage, token: str = "", *, seen_generation: int | None = None) -> int:
    """**Blocks.** Opens the next generation of the run and returns its number; from now on older ones are fenced.

    A crash after this leaves a generation without a base, which saved nothing and does not change the lineage.

    Args:
        storage: The storage of the run.
        token: Random text that identifies the opener; empty for one made here.
        seen_generation: The newest generation when this job chose where to resume from: no other job may have opened a
            newer one since. None to open one regardless.

    Raises:
        FencedError: If another job has opened a newer one since. Then this job opens none, and fences no other.
        StorageError: If the storage fails, or the run is gone.
    """
    names = filter(None, (parse_step_directory(entry.name) for entry in storage.list("") if entry.is_directory))
    generation = max([*read_generations(storage), *(name.generation for name in names)], default=0) + 1
    if seen_generation is not None and generation <= seen_generation:
        raise make_gone_error(storage.url, seen_generation)
    storage.make_directory(GENERATIONS_DIRECTORY)
    for _ in range(1000):
        # Looked at after the number was chosen: a job that opens one later than this look takes the same number, and
        # then only one of the two gets it. So a job that slept here for hours cannot pass one that began meanwhile.
        if seen_generation is not None:
            check_unpassed(storage, seen_generation, token)
        if generation > MAX_GENERATION:
            raise StorageError(
                f"{storage.url}: no generation can follow {MAX_GENERATION}",
                path=GENERATIONS_DIRECTORY,
                hint="A file or directory there has a number that no job gave it; remove it.",
            )
        opening = Opening(generation=generation, **describe_process(token or os.urandom(16).hex()))
        if storage.publish(generation_path(generation), seal(opening)):
            return generation
        generation += 1  # Another job took the number in the same moment.
    raise StorageError(
        f"{storage.url}: other jobs took a thousand generations while this job tried to open one",
        path=GENERATIONS_DIRECTORY,
        hint="Many jobs write to this directory; give each run its own directory.",
    )


def record_base(storage: Storage, base: Base) -> None:
    """**Blocks.** Records the checkpoint that a generation begins from.

    Raises:
        StorageError: If the storage fails, or the base of this generation was recorded before.
    """
    path = base_path(base.generation)
    if not storage.publish(path, seal(base)):
        raise StorageError(
            f"{storage.url}: generation {base.generation} already has a base",
            path=path,
            hint="The directory was changed by hand, or two jobs act as the same job.",
        )


def check_fence(storage: Storage, generation: int, opened: Sequence[int] | None = None) -> None:
    """**Blocks.** Checks that no newer generation has been opened; `opened` are all of them, if they were just listed.

    Raises:
        FencedError: If one has; the error names its opener.
    """
    newest = max(read_generations(storage) if opened is None else opened, default=0)
    if newest > generation:
        by = name_opener(try_opening(storage, newest))
        raise FencedError(
            f"{storage.url}: generation {newest} was opened{by}; this job has generation {generation} and "
            "can no longer save",
            hint=_FENCED_HINT,
        )


def check_in_place(storage: Storage, generation: int, token: str) -> None:
    """**Blocks.** Checks that the run is where this job has opened a generation of it, by the record of that.

    A run that was moved, removed or unmounted is never made again: what is saved in its place would be found by no one.

    Raises:
        StorageError: If the record is gone.
        FencedError: If another job has begun a new run in its place.
    """
    try:
        opening = read_opening(storage, generation)
    except NotFoundError as error:
        raise make_gone_error(storage.url, generation) from error
    except DamageError:
        return  # Of this job's or not: `check_fence` decides by the numbers.
    if opening.token != token:
        raise FencedError(
            f"{storage.url}: generation {generation} of this job was replaced by one that was opened"
            f"{name_opener(opening)}",
            hint=_FENCED_HINT,
        )


def check_unpassed(storage: Storage, seen_generation: int, token: str) -> None:
    """**Blocks.** Checks that no other job has begun to save since this manager chose where to resume from.

    Args:
        storage: The storage of the run.
        seen_generation: The newest generation at that time.
        token: The token of this manager's own generations, which do not count.

    Raises:
        FencedError: If one has; the error names it.
    """
    for newer in sorted(read_generations(storage), reverse=True):
        if newer <= seen_generation:
            return
        opening = try_opening(storage, newer)
        if opening is None or opening.token != token:
            raise FencedError(
                f"{storage.url}: generation {newer} was opened{name_opener(opening)} after this job chose the "
                "step to continue from; the steps saved there would be lost",
                hint=_FENCED_HINT,
            )


def try_opening(storage: Storage, generation: int) -> Opening | None:
    """**Blocks.** Returns the record that opened a generation; None if it cannot be read."""
    try:
        return read_opening(storage, generation)
    except HoldfastError:
        return None


def name_opener(opening: Opening | None) -> str:
    """**Pure.** Names the opener of a generation, to follow "opened"; empty if it is not known."""
    return "" if opening is None else f" by process {opening.process} on {opening.host}"


_FENCED_HINT: Final = "Only one job may save to a run. Stop this job, or give it its own directory."


class History:
    """Caches what one process knows of a run's past, so that it need not read it each time. Not thread-safe.

    A record that cannot be read for now, because it is damaged or gone, is read again the next time. Each method raises
    `StorageError` if the storage fails.

    Attributes:
        opened: The generations that were opened, in order, if their records still exist.
        summaries: The generation and number of each existing summary.
        summary: The one that counts, or None.
        believed: The steps that it lists as committed; their directories have not been looked into.
        known: The known facts of committed steps.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.opened: list[int] = []
        self.summaries: list[tuple[int, int]] = []
        self.summary: Summary | None = None
        self.believed: frozenset[StepName] = frozenset()
        self.known: dict[StepName, StepFacts] = {}
        # The records of generations that were read. They never change.
        self._bases: dict[int, Base] = {}
        self._references: dict[StepName, tuple[StepName, ...]] = {}

    def look(self, *, closely: bool = False) -> tuple[dict[int, Base], list[DamageError]]:
        """**Blocks.** Finds the generations, and reads the summary that counts, unless it is known.

        That is the last summary of the newest generation. One of an older generation does not count: a newer job may
        have removed steps since, and need not know of summaries.

        Args:
            closely: True to trust none.

        Returns:
            The bases of the generations that were opened, and the problems of those that are damaged.
        """
        names = [entry.name for entry in self._storage.list(GENERATIONS_DIRECTORY) if not entry.is_directory]
        self.opened = sorted(filter(None, map(parse_generation_file, names)))
        newest = max(self.opened, default=0)
        self.summaries = sorted(filter(None, (parse_summary_file(name) for name in names if ".summary-" in name)))
        last = max((number for generation, number in self.summaries if generation == newest), default=0)
        if closely or not last:
            if self.summary is not None:
                self.believe(None)
        elif self.summary is None or (self.summary.generation, self.summary.number) != (newest, last):
            self.believe(try_summary(self._storage, newest, last))
        faults: list[DamageError] = []
        for generation in self.opened:
            if generation in self._bases:
                continue
            path = base_path(generation)
            try:
                data = self._storage.read(path, MAX_GENERATION_BYTES)
                self._bases[generation] = decode_base(data, path=path, generation=generation)
            except NotFoundError:
                continue  # It was opened and died before it saved, or is about to record its base.
            except DamageError as fault:  # Also if it cannot be read at all, or something else is in its place.
                faults.append(fault)
        return {generation: self._bases[generation] for generation in self.opened if generation in self._bases}, faults

    def believe(self, summary: Summary | None) -> None:
        """Trusts a summary from now on; None for none."""
        self.summary = summary
        names = map(parse_step_directory, () if summary is None else summary.directories)
        self.believed = frozenset(name for name in names if name is not None)
        self._bases.update({base.generation: base for base in summary.bases} if summary is not None else {})

    def facts(self, name: StepName) -> StepFacts | None:
        """**Blocks.** Returns the facts that retention needs of a step; None if its manifest is damaged, or too new."""
        if name not in self.known:
            if name in self.believed and self.summary is not None:
                # Of all at once: each is asked for in the end.
                try:
                    self.known = self.summary.decode_facts() | self.known
                except DamageError:
                    self.believe(None)
            if name not in self.known:
                try:
                    self.known[name] = read_manifest(self._storage, name).facts
                except (DamageError, NotFoundError):
                    return None
        return self.known[name]

    def references(self, name: StepName) -> tuple[StepName, ...]:
        """**Blocks.** Returns the steps that a step refers to, as far as that can be read."""
        facts = self.facts(name)
        if facts is not None:
            return facts.refers_to if facts.references else ()
        if name not in self._references:
            try:
                self._references[name] = read_references(self._storage, name)
            except (DamageError, NotFoundError):
                return ()  # It cannot be restored, so what it needs does not count.
        return self._references[name]

    def kept_with(self, name: StepName) -> frozenset[StepName]:
        """**Blocks.** Returns all steps that must stay as long as a step does: those it refers to, those that these
        refer to, and so on."""
        kept: set[StepName] = set()
        ahead = [name]
        while ahead:
            new = set(self.references(ahead.pop())) - kept
            kept |= new
            ahead += new
        return frozenset(kept)

    def referrers(self, names: Iterable[StepName]) -> list[Referrer[StepName]]:
        """**Blocks.** Returns those of some steps that refer to others."""
        referring = (name for name in names if (known := self.known.get(name)) is None or known.references)
        found = ((name, self.references(name)) for name in referring)
        return [Referrer(name, name.step, references) for name, references in found if references]

    def forget_all_but(self, names: Collection[StepName]) -> None:
        """Forgets what is known of other steps."""
        if len(self.known) > len(names):
            self.known = {name: known for name, known in self.known.items() if name in names}
            self._references = {name: known for name, known in self._references.items() if name in names}


def try_summary(storage: Storage, generation: int, number: int) -> Summary | None:
    """**Blocks.** Returns a generation's summary if it is whole and belongs to that generation, else None."""
    path = summary_path(generation, number)
    try:
        data = storage.read(path, MAX_SUMMARY_BYTES)
        summary = decode_summary(data, path=path, generation=generation, number=number)
        # One that was copied from another run has another token.
        return summary if read_opening(storage, generation).token == summary.token else None
    except HoldfastError:
        return None
