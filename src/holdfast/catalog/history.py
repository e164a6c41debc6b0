"""The memory that one process has of the past of a run: generations, summaries, and the facts of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from holdfast.catalog.stored_step import StoredStep
from holdfast.errors import DamageError, HoldfastError, NotFoundError
from holdfast.format.digests import unseal
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    StepName,
    base_path,
    generation_path,
    parse_generation_file,
    parse_step_directory,
    parse_summary_file,
    summary_path,
)
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_SUMMARY_BYTES,
    Base,
    Opening,
    StepFacts,
    Summary,
    decode_base,
    decode_summary,
)
from holdfast.policies import KeptCandidate, Referrer
from holdfast.storage.protocol import Storage

NEWEST: Final = 4
"""The manifests of this many of the newest steps are looked for each time, regardless of a summary."""


class History:
    """Caches what one process knows of a run's past, so that it need not read it each time. Not thread-safe.

    A record that cannot be read for now, because it is damaged or gone, is read again the next time. Each method raises
    `StorageError` if the storage fails.

    Attributes:
        opened: The generations that were opened, in order, if their records still exist.
        summaries: The generation and number of each existing summary.
        summary: The one that counts, or None.
        believed: The steps that it lists as committed; their directories have not been looked into.
        known: The known facts of committed steps; see `note`.
        trusted: These, and steps that this process has found committed since then: they are not looked into again.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.opened: list[int] = []
        self.summaries: list[tuple[int, int]] = []
        self.summary: Summary | None = None
        self.believed: frozenset[StepName] = frozenset()
        self.trusted: frozenset[StepName] = frozenset()
        self.known: dict[StepName, StepFacts] = {}
        # The known steps that refer to others; and all as retention sees them.
        self._referring: set[StepName] = set()
        self._candidates: dict[StepName, KeptCandidate[StepName]] = {}
        # The records of generations that were read. They never change.
        self._bases: dict[int, Base] = {}
        self._references: dict[StepName, tuple[StepName, ...]] = {}

    def look(
        self, *, closely: bool = False, names: Collection[str] | None = None
    ) -> tuple[dict[int, Base], list[DamageError]]:
        """**Blocks.** Finds the generations, and reads the summary that counts, unless it is known.

        That is the last summary of the newest generation. One of an older generation does not count: a newer job may
        have removed steps since, and need not know of summaries.

        Args:
            closely: True to trust none.
            names: The names of the files of generations, if they were just listed.

        Returns:
            The bases of the generations that were opened, and the problems of those that are damaged.
        """
        if names is None:
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
        self.believed = self.trusted = frozenset(name for name in names if name is not None)
        self._bases.update({base.generation: base for base in summary.bases} if summary is not None else {})

    def drop_summaries(self) -> None:
        """**Blocks.** Removes all summaries for good, so that each directory is looked into until there is a new one.

        Raises:
            StorageError: If one may still exist.
        """
        # The last one goes last, and is the only one by then: an older one may vouch for what has been removed since.
        files = [entry.name for entry in self._storage.list(GENERATIONS_DIRECTORY) if not entry.is_directory]
        for summary in sorted(filter(None, map(parse_summary_file, files))):
            self._storage.delete([summary_path(*summary)])
            self._storage.sync_directory(GENERATIONS_DIRECTORY)
        self.believe(None)

    def note(self, name: StepName, facts: StepFacts) -> None:
        """Remembers the facts of a committed step."""
        self.known[name] = facts
        self._candidates[name] = KeptCandidate(
            name, name.step, facts.committed_at_unix_seconds, facts.metrics, facts.is_finite
        )
        if facts.references:
            self._referring.add(name)

    def facts(self, name: StepName) -> StepFacts | None:
        """**Blocks.** Returns the facts that retention needs of a step; None if its manifest is damaged, or too new."""
        if name not in self.known and name in self.believed and self.summary is not None:
            # Of all at once: each is asked for in the end.
            try:
                for other, facts in self.summary.decode_facts().items():
                    if other not in self.known:
                        self.note(other, facts)
            except DamageError:
                self.believe(None)
        if name not in self.known:
            try:
                self.note(name, StoredStep(self._storage, name.directory, name).manifest().facts)
            except (DamageError, NotFoundError):
                return None
        return self.known[name]

    def candidates(self, names: Sequence[StepName]) -> list[KeptCandidate[StepName]]:
        """**Blocks.** Returns steps as retention sees them. Those with a damaged manifest are left out: they stay, and
        a restore or `verify` reports the damage."""
        for name in sorted(set(names).difference(self._candidates)):
            self.facts(name)
        return [known for name in names if (known := self._candidates.get(name)) is not None]

    def references(self, name: StepName) -> tuple[StepName, ...]:
        """**Blocks.** Returns the steps that a step refers to, as far as that can be read."""
        facts = self.facts(name)
        if facts is not None:
            return facts.refers_to if facts.references else ()
        if name not in self._references:
            try:
                self._references[name] = StoredStep(self._storage, name.directory, name).references()
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
            ahead += sorted(new)
        return frozenset(kept)

    def referrers(self, names: Iterable[StepName]) -> list[Referrer[StepName]]:
        """**Blocks.** Returns those of some steps that refer to others."""
        # Of a long history most are known, and refer to none.
        asked = set(names).difference(self.known.keys() - self._referring)
        found = ((name, self.references(name)) for name in sorted(asked))
        return [Referrer(name, name.step, references) for name, references in found if references]

    def forget_all_but(self, names: Collection[StepName]) -> None:
        """Forgets what is known of other steps."""
        for name in {*self.known, *self._references}.difference(names):
            self._referring.discard(name)
            for known in (self.known, self._candidates, self._references):
                known.pop(name, None)


def read_opening(storage: Storage, generation: int) -> Opening:
    """**Blocks.** Returns the record of the process that opened a generation.

    Raises:
        NotFoundError: If no process did.
        DamageError: If the record is damaged.
    """
    path = generation_path(generation)
    return unseal(Opening, storage.read(path, MAX_GENERATION_BYTES), path=path)


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
