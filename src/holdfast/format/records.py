"""The records of a run: its generations, and its committed steps. Pure.

Every start of a job that saves opens a generation, the next number. Its base is the checkpoint that it began from. The
current lineage is what the newest generation saved, then what its base's generation saved up to that base, and so on
back. The appearance of a manifest commits a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import Digest, SealedRecord, unseal
from holdfast.format.dtypes import RAW_TYPES
from holdfast.format.index import MAX_SOURCES, Index
from holdfast.format.names import (
    MAX_ATTEMPT,
    MAX_STEP,
    MAX_WORKERS,
    AttemptNumber,
    GenerationNumber,
    Size,
    StepName,
    StepNumber,
    find_order_problem,
    parse_step_directory,
)

MAX_MANIFEST_BYTES: Final = 256 << 20

REFERENCES: Final = "references"
"""The feature of a step with arrays in data files of earlier steps."""

SHARDS: Final = "shards"
"""The feature of a step whose leaves consist of boxes, which several workers may have written."""

RAW: Final = "raw_types"
"""The feature of a step with arrays of element types that safetensors lacks."""

KNOWN_FEATURES: Final = frozenset({REFERENCES, SHARDS, RAW})


def list_features(index: Index) -> tuple[str, ...]:
    """**Pure.** Returns the features that a step needs because of the leaves in one of its indexes."""
    is_shared = bool(index.boxes or index.elsewhere)
    is_raw = not RAW_TYPES.isdisjoint({leaf.dtype for leaf in (*index.leaves, *index.referred)})
    return (*((SHARDS,) if is_shared else ()), *((RAW,) if is_raw else ()))


class WorkerRecord(msgspec.Struct, frozen=True):
    """The manifest's record of what one worker wrote.

    Attributes:
        index_bytes: The size of its index.
        index_digest: The digest of its whole index file.
        data_bytes: The size of its data file.
    """

    index_bytes: Size
    index_digest: Digest
    data_bytes: Size


class Reference(msgspec.Struct, frozen=True):
    """An earlier step whose directory a step needs besides its own.

    Attributes:
        step: That step.
        generation: The generation that saved it.
        attempt: The number of the attempt in that generation.
        leaves: How many arrays are referred to there.
        size_bytes: How many bytes of them are there.
    """

    step: StepNumber
    generation: GenerationNumber
    attempt: AttemptNumber
    leaves: Annotated[int, msgspec.Meta(ge=1)]
    size_bytes: Size

    @property
    def name(self) -> StepName:
        """The checkpoint that it refers to."""
        return StepName(self.step, self.generation, self.attempt)


NAMED_NONFINITE: Final = 8
"""So many leaves that are not finite a manifest names."""

MAX_EXEMPT: Final = 1000
"""So many leaves are exempt at most."""


class Nonfinite(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters and optimizer states of a checkpoint that are not finite.

    Attributes:
        leaves: How many leaves have nan or an infinity.
        names: The first of them.
        exempt: Those that are not counted, as they were so in the run's first checkpoint; see `choose_exempt`.
    """

    leaves: Annotated[int, msgspec.Meta(ge=0)] = 0
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMED_NONFINITE)] = ()
    exempt: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_EXEMPT)] = ()

    @classmethod
    def of(cls, found: Iterable[str], count: int, exempt: Collection[str]) -> Nonfinite:
        """**Pure.** Returns the record of a checkpoint in which these leaves are not finite, at least `count` of them
        beyond those that are `exempt`."""
        bad = sorted(set(found).difference(exempt))
        return cls(max(len(bad), count) if bad else 0, tuple(bad[:NAMED_NONFINITE]), tuple(sorted(exempt)[:MAX_EXEMPT]))


def choose_exempt(found: Mapping[str, bool], step: int) -> frozenset[str]:
    """**Pure.** Returns the leaves that a run doesn't count, of those that are not finite in its first checkpoint.

    Nothing is trained yet at step 0. Later training may have done it, and then there is nan: a leaf that has it (True
    in `found`) counts.
    """
    return frozenset(leaf for leaf, has_nan in found.items() if step == 0 or not has_nan)


class Manifest(SealedRecord, frozen=True, omit_defaults=True):
    """One committed step.

    Attributes:
        step: The step: how many were complete.
        generation: The generation that saved it.
        attempt: The number of the attempt in that generation.
        token: Random text that identifies this publication.
        committed_at_unix_seconds: The writer's clock; for people and for retention by age, never for order.
        workers: What each worker wrote, in order of rank.
        metrics: The metrics of the save, such as `val_loss`; nan and the infinities are left out.
        metadata: The metadata of the save: any JSON.
        versions: The software that wrote it.
        features: The features beyond version 1 that a reader must know to read the step correctly.
        references: The earlier steps whose directories it needs, in order; left out if there are none.
        nonfinite: The parameters and optimizer states that are not finite; None if that is not known.
    """

    kind: ClassVar[str] = "manifest"

    step: StepNumber
    generation: GenerationNumber
    attempt: AttemptNumber
    token: str
    committed_at_unix_seconds: float
    workers: Annotated[tuple[WorkerRecord, ...], msgspec.Meta(min_length=1, max_length=MAX_WORKERS)]
    metrics: dict[str, float]
    metadata: dict[str, Any]
    versions: dict[str, str]
    # A factory's value is written also where it is empty: every manifest has this field.
    features: tuple[str, ...] = msgspec.field(default_factory=lambda: ())
    references: tuple[Reference, ...] = ()
    nonfinite: Nonfinite | None = None

    @property
    def exempt(self) -> frozenset[str] | None:
        """The leaves that were not finite in the run's first checkpoint; None if that is not known."""
        return None if self.nonfinite is None else frozenset(self.nonfinite.exempt)

    @property
    def name(self) -> StepName:
        """The name of this checkpoint."""
        return StepName(self.step, self.generation, self.attempt)

    @property
    def world_size(self) -> int:
        """How many workers saved it."""
        return len(self.workers)

    @property
    def data_bytes(self) -> int:
        """The sizes of all data files together."""
        return sum(worker.data_bytes for worker in self.workers)

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint: that of its data files and indexes."""
        return self.facts.size_bytes

    @property
    def referred_bytes(self) -> int:
        """The bytes of arrays in the data files of earlier steps."""
        return sum(reference.size_bytes for reference in self.references)

    @property
    def facts(self) -> StepFacts:
        """The part of it by which retention judges."""
        size_bytes = sum(worker.data_bytes + worker.index_bytes for worker in self.workers)
        references = tuple((one.step, one.generation, one.attempt) for one in self.references)
        is_finite = self.nonfinite is None or not self.nonfinite.leaves
        return StepFacts(self.committed_at_unix_seconds, size_bytes, self.metrics, references, is_finite)


MAX_LATE_METRICS: Final = 100
"""So many records of late metrics a step has at most."""


class LateMetrics(SealedRecord, frozen=True):
    """Metrics of a committed step that were reported after its save had begun.

    Attributes:
        token: The token of the step's manifest.
        metrics: The metrics; a later record replaces those of the same name.
    """

    kind: ClassVar[str] = "metrics"

    token: str
    metrics: dict[str, float]


def decode_manifest(data: bytes, *, path: str, expected: StepName | None, is_read: bool = True) -> Manifest:
    """**Pure.** Returns the manifest in the bytes, after checks.

    Args:
        data: The bytes of the file.
        path: The file, for errors.
        expected: The checkpoint in the directory's name; None if the directory was renamed by hand.
        is_read: True if the step is to be read. Otherwise it may need features that are not known here.

    Raises:
        FormatError: If it is damaged, needs a newer reader, or is another step's.
    """
    step = expected.step if expected else None
    manifest = unseal(Manifest, data, path=path, step=step)
    unknown = [feature for feature in manifest.features if feature not in KNOWN_FEATURES]
    if unknown and is_read:
        raise FormatError(
            f"{path}: needs a reader that supports {', '.join(map(repr, unknown))}",
            path=path,
            step=step,
            hint="Read it with the version of holdfast that wrote it, or a newer one.",
        )
    problem = _find_problem(manifest, expected)
    if is_read and len(manifest.workers) > 1 and SHARDS not in manifest.features:
        problem = (
            problem
            or f"the state of {len(manifest.workers)} workers can be read as one only with the feature {SHARDS!r}"
        )
    if problem:
        raise FormatError(f"{path}: {problem}", path=path, step=step)
    return manifest


def _find_problem(manifest: Manifest, expected: StepName | None) -> str:
    if expected is not None and manifest.name != expected:
        return f"belongs to {manifest.name.directory}, not to this directory"
    if manifest.references and REFERENCES not in manifest.features:
        return f"refers to other steps without the feature {REFERENCES!r}"
    if len(manifest.references) > MAX_SOURCES * len(manifest.workers):
        return f"has {len(manifest.references)} references, more than allowed"
    before: StepName | None = None
    for reference in manifest.references:
        problem = find_order_problem(reference.name, manifest.name)
        if problem:
            return problem
        if before is not None and before >= reference.name:
            return f"lists {reference.name.directory} twice among the references, or out of order"
        before = reference.name
    return ""


class Worker(msgspec.Struct, frozen=True):
    """One process of a job.

    Attributes:
        rank: Its number, from 0.
        world_size: The number of workers.
    """

    rank: int
    world_size: int

    @property
    def is_leader(self) -> bool:
        """True for the worker that decides."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """True if the job has no other worker."""
        return self.world_size == 1


ALONE: Final = Worker(0, 1)
"""The worker of a job of one process."""


MAX_GENERATION_BYTES: Final = 1 << 20


class Opener(SealedRecord, frozen=True):
    """A process that saves to a run.

    Attributes:
        token: Random text that identifies the opener: one manager of one process.
        host: The machine's name.
        process: The process's number there.
        opened_at_unix_seconds: The opener's clock; for people only.
        boot_id: Random text of the machine's kernel, new at each start of the machine; empty if it is not known.
        pid_namespace: The process numbers that `process` is one of, such as those of a container; empty likewise.
        started_at_ticks: When the process began, in the kernel's ticks since the machine started; 0 likewise.
    """

    token: str
    host: str
    process: int
    opened_at_unix_seconds: float
    boot_id: str = ""
    pid_namespace: str = ""
    started_at_ticks: int = 0


class Opening(Opener, frozen=True, kw_only=True):
    """The record that opens a generation.

    Attributes:
        generation: Its number.
        best: By metric, `min` or `max`: which value is the best one for the job's retention policy.
    """

    kind: ClassVar[str] = "generation"

    generation: GenerationNumber
    best: dict[str, Literal["min", "max"]] = msgspec.field(default_factory=dict)


class Base(SealedRecord, frozen=True, omit_defaults=True):
    """The record of the checkpoint that a generation began from.

    Attributes:
        generation: The generation that began.
        step: The step of that checkpoint, or None if it started from the beginning.
        base_generation: That checkpoint's generation, or None.
        base_attempt: That checkpoint's attempt, or None.
        start_from: The step that the program last went back to on request, here or earlier in the lineage; None if it
            never did. It is not done again.
    """

    kind: ClassVar[str] = "base"

    generation: GenerationNumber
    step: StepNumber | None
    base_generation: GenerationNumber | None
    base_attempt: AttemptNumber | None
    start_from: StepNumber | None = None

    @property
    def name(self) -> StepName | None:
        """The checkpoint that it began from, or None if it started from the beginning."""
        if self.step is None or self.base_generation is None or self.base_attempt is None:
            return None
        return StepName(self.step, self.base_generation, self.base_attempt)


def make_base(generation: int, name: StepName | None, start_from: int | None = None) -> Base:
    """**Pure.** Returns the base record of a generation that began from `name`, or from the beginning."""
    if name is None:
        return Base(generation, None, None, None)
    return Base(generation, name.step, name.generation, name.attempt, start_from)


def decode_base(data: bytes, *, path: str, generation: int) -> Base:
    """**Pure.** Returns the base in the bytes.

    Raises:
        FormatError: If it is damaged, another generation's, or not older than its generation.
    """
    return _check_base(unseal(Base, data, path=path), path, generation)


def _check_base(base: Base, path: str, generation: int) -> Base:
    parts = (base.step, base.base_generation, base.base_attempt)
    if base.generation != generation or (None in parts and any(part is not None for part in parts)):
        raise FormatError(f"{path}: is not a well-formed base of generation {generation}", path=path)
    name = base.name
    if name is not None and name.generation >= generation:
        raise FormatError(f"{path}: {name} cannot be the base of generation {generation}", path=path)
    return base


def choose_living(steps: Iterable[StepName], bases: Mapping[int, Base]) -> tuple[StepName, ...]:
    """**Pure.** Returns the steps of the current lineage, oldest first; of one step, the attempt that counts.

    Args:
        steps: The committed steps, in any order.
        bases: The base of each generation that recorded one. A generation without a base saved nothing; if it has steps
            nevertheless (its record was lost), they are taken to follow the steps before them.
    """
    by_generation: dict[int, list[StepName]] = {}
    for name in steps:
        by_generation.setdefault(name.generation, []).append(name)
    living: dict[int, StepName] = {}
    # An earlier generation counts up to the step and attempt from which a later one began, inclusive: later ones were
    # saved, or replaced, when the later one had begun.
    last = (MAX_STEP, MAX_ATTEMPT)
    # Those of which nothing is known are stepped over: there may be many.
    known = sorted({*bases, *by_generation})
    while known:
        generation = known.pop()
        own = sorted(by_generation.get(generation, ()))
        if own and (own[-1].step, own[-1].attempt) > last:
            own = [name for name in own if (name.step, name.attempt) <= last]
        # Of one step, what a later generation has counts; and in a generation the last attempt.
        living = {name.step: name for name in own} | living
        base = bases.get(generation)
        if base is None:
            if own:
                last = min(last, (own[0].step - 1, MAX_ATTEMPT))
        elif (left := base.name) is not None:
            del known[bisect_right(known, left.generation) :]
            last = min(last, (left.step, left.attempt))
        else:
            break
    return tuple(map(living.__getitem__, sorted(living)))


MAX_SUMMARY_BYTES: Final = 256 << 20


class StepFacts(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a committed step that retention needs.

    Attributes:
        committed_at_unix_seconds: The writer's clock.
        size_bytes: The size of its data files and indexes.
        metrics: The metrics of that step.
        references: The step, generation and attempt of each step that it needs besides its own.
        is_finite: False if parameters or optimizer states have nan or an infinity.
    """

    committed_at_unix_seconds: float
    size_bytes: Size
    metrics: dict[str, float]
    references: tuple[tuple[StepNumber, GenerationNumber, AttemptNumber], ...] = ()
    is_finite: bool = True

    @property
    def refers_to(self) -> tuple[StepName, ...]:
        """The steps that it needs besides its own."""
        return tuple(StepName(*parts) for parts in self.references)


class Summary(SealedRecord, frozen=True):
    """A generation's record of older steps and records, so that they need not be opened one by one.

    Attributes:
        generation: The generation that wrote it.
        number: Its number among the summaries of its generation.
        token: The token of the generation's opening.
        directories: The directories of committed steps, in order.
        facts: `StepFacts` of each, in the same order. Only retention needs them.
        bases: The bases of generations.
    """

    kind: ClassVar[str] = "summary"

    generation: GenerationNumber
    number: Annotated[int, msgspec.Meta(ge=1)]
    token: str
    directories: tuple[str, ...]
    facts: msgspec.Raw
    bases: tuple[Base, ...]

    def decode_facts(self) -> dict[StepName, StepFacts]:
        """**Pure.** Returns the facts by step; `FormatError` if they do not fit the directories."""
        try:
            facts = msgspec.json.decode(self.facts, type=tuple[StepFacts, ...])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FormatError(
                f"the summary of generation {self.generation} has no valid facts of steps ({error})"
            ) from error
        names = [parse_step_directory(directory) for directory in self.directories]
        if len(facts) != len(names):
            raise FormatError(f"the summary of generation {self.generation} has facts of other steps")
        return {name: fact for name, fact in zip(names, facts, strict=True) if name is not None}


def decode_summary(data: bytes, *, path: str, generation: int, number: int) -> Summary:
    """**Pure.** Returns the summary in the bytes.

    Raises:
        FormatError: If it is damaged, another generation's, or has another number.
    """
    summary = unseal(Summary, data, path=path)
    if (summary.generation, summary.number) != (generation, number):
        raise FormatError(f"{path}: is summary {summary.number} of generation {summary.generation}", path=path)
    for base in summary.bases:
        _check_base(base, path, base.generation)
    return summary
