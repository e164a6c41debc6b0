"""Performs a restore: tries checkpoints from the best to the worst until one is whole."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from holdfast.advice.hyperparameters import Keeping
from holdfast.catalog import Catalog, StoredRun, StoredStep, describe_steps
from holdfast.errors import (
    AbsentError,
    ApplyError,
    ClusterError,
    DamageError,
    MismatchError,
    NoCheckpointError,
    NoWholeCheckpointError,
    StorageError,
    UsageError,
)
from holdfast.events import PassedOver, Resized, Restored, Sink, Warned
from holdfast.format.names import IMPORTED_FROM, StepName, is_own
from holdfast.format.records import ALONE, Worker
from holdfast.process.latch import gc_paused
from holdfast.process.progress import LongRead
from holdfast.restore.agreement import Agreement
from holdfast.restore.aliasing import find_clashes
from holdfast.restore.candidates import Selection, choose_candidates
from holdfast.restore.plan import ReadPlan, plan_reads
from holdfast.restore.read import open_pool, read_orders
from holdfast.restore.records import OpenedStep, Restoration
from holdfast.restore.verify import open_step, read_rank
from holdfast.state import Differences, Matching, list_shared, match_objects
from holdfast.state.data.position import PositionRecord, find_apart, list_positions
from holdfast.state.leaves import ArraySpec, Skeleton, Target, spec_of
from holdfast.storage import Storage
from holdfast.storage.protocol import FileReader

if TYPE_CHECKING:
    from holdfast.cluster.peers import Peers
    from holdfast.restore.passing import Passing

_MOST_LOOKS: Final = 30
"""How often a run is read again, because a running job has removed the chosen step."""


@gc_paused()
def restore_objects(
    storage: Storage,
    objects: Mapping[str, object],
    *,
    step: int | None,
    select: Selection | None,
    strict: bool,
    threads: int,
    emit: Sink,
    worker: Worker = ALONE,
    named: Collection[str] = frozenset(),
    agreement: Agreement | None = None,
    begins_anew: bool = False,
    start_from: int | None = None,
    on_resize: Literal["allow", "refuse"] = "allow",
    keeping: Keeping | None = None,
    made_anew: Collection[str] = (),
    shows_progress: bool = False,
    call: str = "manager.restore(...)",
) -> Restoration | None:
    """**Blocks.** Restores the live objects from a checkpoint.

    No live object is changed before the checkpoint's records are checked and found to fit. Arrays are then read in
    place; a damaged span found there restarts the whole restore with the next older checkpoint, which overwrites what
    was read. Python state and counters are set last, after every byte has been checked.

    If a checkpoint disappears while it is being read, it was not damaged: a running job has removed it, and committed a
    newer one before. Then the run is read again.

    `named` has the objects of all workers: this one may lack an object that another one has. If the lineage
    `begins_anew`, nothing is restored unless a step is requested. The step of `start_from` is restored, unless the
    lineage has gone back there already. Entries of `keeping` stay as the script set them, and
    so do objects in `made_anew`, from which new ones are created. With `shows_progress` a person sees how far a long
    read is. `call` is what the program has called, for hints.

    Returns:
        The result, or None if there is no checkpoint at all.

    Raises:
        MismatchError: If the checkpoint does not fit, or was saved by a refused number of workers; nothing was changed.
        ApplyError: If an object rejects its state, or live arrays that share memory cannot hold the stored values.
        PeerError: If another worker has failed, does not come, or dies.
        NoCheckpointError: If the requested step does not exist.
        NoWholeCheckpointError: If there are checkpoints, but all are damaged or have lost their manifests.
    """
    begun_at = time.monotonic()
    agreement = agreement or Agreement()
    request = _Request(
        storage,
        objects,
        step,
        start_from,
        select,
        strict,
        threads,
        worker,
        named,
        on_resize,
        keeping,
        made_anew,
        shows_progress,
        call,
    )
    candidates = _Candidates(request, agreement, emit)
    if not candidates.find(begins_anew=begins_anew):
        return None
    trial = _restore_first_whole(request, candidates, agreement)
    name, manifest = trial.name, trial.opened.manifest
    if manifest.world_size != worker.world_size:
        _report_resize(storage, trial, worker, emit)
    seconds = time.monotonic() - begun_at
    if replaced := trial.matching.differences.replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        text = (
            f"restored in their stored shapes: {', '.join(replaced[:3])}{more}. If the program lets them grow, ignore "
            "this. If the model has changed, start a new run, or name the tree in keep_current"
        )
        emit(Warned(step=name.step, text=text, by_each=True))
    if trial.passing is not None:
        for text in trial.passing.problems:
            emit(Warned(step=name.step, text=text))
    tiered: Any = storage
    tiers = tiered.take_sources() if storage.traits.has_tiers else ()
    emit(
        Restored(
            step=name.step,
            generation=name.generation,
            blocked_seconds=seconds,
            size_bytes=trial.size_bytes,
            tiers=tiers,
        )
    )
    return Restoration(
        step=name.step,
        name=name,
        seen_generation=candidates.seen_generation,
        manifest=manifest,
        differences=trial.matching.differences,
        replaced=trial.replaced,
        passed_over=tuple(candidates.damages.values()),
        hyperparameters={} if select or keeping is None else keeping.list_changes(),
        path=f"{storage.url.rstrip('/')}/{name.directory}",
        size_bytes=trial.size_bytes,
        seconds=seconds,
        tiers=tiers,
    )


def make_agreement(peers: Peers | None, url: str) -> Agreement:
    """Returns how this worker coordinates with the others, if there are any; `url` is its URL of the run."""
    if peers is None:
        return Agreement()
    # Most programs have one worker, and do without what several need.
    from holdfast.restore.joint_agreement import JointAgreement

    return JointAgreement(peers, url)


class _Request(NamedTuple):
    """The request of a restore; see `restore_objects`."""

    storage: Storage
    objects: Mapping[str, object]
    step: int | None
    start_from: int | None
    select: Selection | None
    strict: bool
    threads: int
    worker: Worker
    named: Collection[str]
    on_resize: Literal["allow", "refuse"]
    keeping: Keeping | None
    made_anew: Collection[str]
    shows_progress: bool
    call: str


class _Candidates:
    """The checkpoints that are still to be tried, the best first.

    Attributes:
        damages: The damage of each that was skipped.
        step: The only step to try, or None.
        seen_generation: The newest generation of the run at the first look.
    """

    def __init__(self, request: _Request, agreement: Agreement, emit: Sink) -> None:
        self._storage = request.storage
        self._asked, self._start_from, self.step = request.step, request.start_from, request.step
        # A reader that only looks at a part, before the restore, does not say it as well.
        self._says_start = request.start_from is not None and request.select is None
        self._agreement = agreement
        self._emit = emit
        self._left: list[StepName] = []
        self._looks = 1
        self.damages: dict[StepName, DamageError] = {}
        self.seen_generation = 0

    def find(self, *, begins_anew: bool) -> bool:
        """**Blocks.** Returns True if there are any; warns if there are only those of an earlier lineage."""
        catalogs: list[Catalog] = []

        def find() -> tuple[StepName, ...]:
            # The look is in here, since errors in here reach the others.
            catalogs.append(catalog := StoredRun(self._storage).look())
            for fault in catalog.faults:
                text = f"the record of a generation is damaged, so steps are compared by number only: {fault.message}"
                self._emit(Warned(text=text, by_each=True))
            return () if begins_anew and self._asked is None else self._choose(catalog)

        self._left = list(self._agreement.choose(self._asked, find))
        (catalog,) = catalogs
        if self._start_from is not None and self._says_start:
            text = _describe_start(catalog, self._start_from, self.step, self._storage.url)
            self._emit(Warned(text=text, by_each=True))
        self.seen_generation = catalog.generation
        if not self._left and catalog.committed:
            steps = ", ".join(str(name.step) for name in catalog.committed)
            anew = "nothing was restored: the run was started over (begin_anew)"
            self._emit(Warned(text=f"{anew}; steps {steps} belong to an earlier lineage", by_each=True))
        return bool(self._left)

    def take(self) -> StepName | None:
        return self._left.pop(0) if self._left else None

    def put_back(self, name: StepName, damage: DamageError) -> None:
        """Tries the same again, which has the damaged file in another tier."""
        self._left.insert(0, name)
        self._emit(Warned(step=name.step, text=f"{damage.message}; it is read from another tier", by_each=True))

    def pass_over(self, name: StepName, damage: DamageError) -> None:
        """**Blocks.** Goes on to the next; or, if the checkpoint no longer exists, to those that exist now."""
        found = self._look_again(name) if self._looks <= _MOST_LOOKS else ()
        if found:
            self._looks += 1
            self._left = [other for other in found if other not in self.damages]
            text = f"{name.directory} was removed while it was being restored; trying the steps that are there now"
            self._emit(Warned(text=text, by_each=True))
            return
        self.damages[name] = damage
        self._emit(
            PassedOver(
                step=name.step,
                generation=name.generation,
                file=damage.path,
                error=damage.message,
                offset_bytes=damage.offset_bytes,
                tensor=damage.tensor,
            )
        )

    def _look_again(self, name: StepName) -> tuple[StepName, ...]:
        if not self._agreement.is_gone(self._storage, name):
            return ()
        found = self._agreement.choose(self._asked, lambda: self._choose(StoredRun(self._storage).look(closely=True)))
        return () if name in found else found

    def _choose(self, catalog: Catalog) -> tuple[StepName, ...]:
        if self._start_from is not None:
            self.step = None if catalog.start_from == self._start_from else self._start_from
        return choose_candidates(catalog, StoredRun(self._storage).find_lost(catalog), self.step, self._storage.url)


def _describe_start(catalog: Catalog, start_from: int, step: int | None, url: str) -> str:
    """**Pure.** Describes what came of `start_from`; `step` is None if the lineage had gone back there before."""
    again = f"`holdfast rollback {url}@"
    if step is None:
        return f"start_from={start_from} was done before, so the newest step counts. To repeat it: {again}{start_from}`"
    beyond = [name.step for name in catalog.living if name.step > start_from]
    if not beyond:
        return f"start_from={start_from}: no step of the current lineage is newer"
    text = (
        f"going back to step {start_from} (start_from); the next save takes {describe_steps(beyond)} out of the lineage"
    )
    return f"{text}, until {again}{beyond[-1]}`"


def _restore_first_whole(request: _Request, candidates: _Candidates, agreement: Agreement) -> _RestoreTrial:
    touched = False
    while (name := candidates.take()) is not None:
        trial = _RestoreTrial(request, name, touched)
        try:
            damage = trial.go(agreement)
            if damage is None:
                return trial
            if not _try_elsewhere(request.storage, damage, agreement):
                candidates.pass_over(name, damage)
            else:
                candidates.put_back(name, damage)
        except (StorageError, ApplyError, ClusterError, AbsentError, NoCheckpointError) as error:
            if trial.touched:
                error.add_note("Some live arrays hold partly restored values: restore again before you train on.")
            raise
        touched = trial.touched
    raise _no_whole(request.storage, candidates.step, tuple(candidates.damages.values()), touched)


def _try_elsewhere(storage: Any, damage: DamageError, agreement: Agreement) -> bool:
    """**Blocks.** Returns True if the file that is damaged will be read from another tier, by one worker or more."""
    return storage.traits.has_tiers and agreement.any(storage.avoid(damage.path))


class _RestoreTrial:
    """One attempt with one checkpoint.

    Attributes:
        name: Its name.
        touched: True if live arrays have been read into, now or before.
        opened: Its records, once they have been read and checked.
        matching: How they fit the live objects.
        size_bytes: The size of what was read.
        replaced: New values of named objects that could not be changed in place.
        passing: How the workers pass on to each other what several of them need; None if each reads by itself.
    """

    opened: OpenedStep
    matching: Matching
    _specs: dict[str, ArraySpec]
    _plan: ReadPlan

    def __init__(self, request: _Request, name: StepName, touched: bool) -> None:
        self._request = request
        self._left_out = frozenset() if request.keeping is None else request.keeping.whole
        self.name = name
        self._files = ExitStack()
        # The files of the indexes that are open, by their paths.
        self._readers: dict[str, FileReader] = {}
        self.touched = touched
        self.size_bytes = 0
        self.replaced: Mapping[str, Any] = {}
        self.passing: Passing | None = None

    def go(self, agreement: Agreement) -> DamageError | None:
        agreement.see(self._request.storage, self.name)
        with self._files:
            self.passing = agreement.open_passing(self._request.storage)
            if self.passing is not None:
                self._files.enter_context(closing(self.passing))
            return agreement.run(self._prepare) or agreement.run(self._fill) or agreement.run(self._apply)

    def _prepare(self) -> None:
        """Checks whether the checkpoint exists and fits; changes no live object."""
        storage = self._request.storage
        self.opened = opened = open_step(storage, self.name.directory, self.name, self._request.worker)
        workers, stored_workers = self._request.worker.world_size, opened.manifest.world_size
        if self._request.on_resize == "refuse" and stored_workers != workers:
            savers = "1 worker" if stored_workers == 1 else f"{stored_workers} workers"
            raise MismatchError(
                f"step {self.name.step} was saved by {savers}, but this job has {workers}, and on_resize is 'refuse'",
                differences=Differences(),
                hint="Start the job with the same number of workers. on_resize='allow' resumes with any number, but "
                "what each worker has of its own starts over, such as the position in the data in a framework's loop.",
            )
        # The files are opened first: memory is allocated by their actual size, not by what an index claims.
        for part in opened.list_parts():
            self._readers[part.path] = self._files.enter_context(closing(part.open(storage, storage)))
        stored = self._find_objects()
        with _enough_memory(opened):
            self.matching = self._match(stored)
            # Before anything live is touched, it is known that all is there.
            self._plan = self._plan_reads(self.matching.targets)
        if self.passing is not None:
            self.passing.offer(self._plan.orders)

    def _plan_reads(self, targets: Sequence[Target]) -> ReadPlan:
        opened = self.opened
        read_index = partial(read_rank, self._request.storage, opened.directory, opened.manifest)
        return plan_reads(opened, targets, self._specs, read_index)

    def _find_objects(self) -> dict[str, Skeleton]:
        """Returns the stored state of each object: those of the worker of this rank, and those of the others.

        Pipeline stages have different objects. This worker may have another stage than the one of its rank had.
        """
        request, own = self._request, self.opened.indexes[0]
        stored = {
            name: state for name, state in own.objects.items() if name in request.objects or name not in request.named
        }
        # All workers have holdfast's own objects, or none has.
        missing = {name for name in list_shared(request.objects) if name not in stored and not is_own(name)}
        missing -= self._left_out
        if request.select is not None:
            missing = set(filter(request.select.concerns, missing))
        manifest = self.opened.manifest
        # Stages are mostly in the order of the ranks.
        guess = self._request.worker.rank * manifest.world_size // self._request.worker.world_size
        for rank in sorted(range(manifest.world_size), key=lambda rank: abs(rank - guess)):
            if not missing:
                break
            if rank != own.rank:
                index = read_rank(self._request.storage, self.name.directory, manifest, rank)
                if found := missing & index.objects.keys():
                    stored |= {name: index.objects[name] for name in found}
                    missing -= found
                    self.opened = replace(self.opened, indexes=(*self.opened.indexes, index))
        return stored

    def _match(self, stored: Mapping[str, Skeleton]) -> Matching:
        request, step = self._request, self.name.step
        select = request.select
        self._specs = _list_specs(self.opened)
        matching = match_objects(
            request.objects,
            stored,
            self._specs,
            select=select,
            worker=request.worker,
            stored_workers=self.opened.manifest.world_size,
            left_out=self._left_out,
            made_anew=request.made_anew,
            lacks_tuples=IMPORTED_FROM in self.opened.manifest.metadata,
        )
        if select is not None and select.unmatched:
            names = ", ".join(repr(name) for name in stored if not is_own(name))
            raise UsageError(
                f"step {step} has no object or leaf named {', '.join(map(repr, select.unmatched))}",
                hint=f"Its objects are {names}; a leaf has a name like 'model/head.weight'.",
            )
        if request.strict and matching.differences:
            arrays = "arrays hold values read from a newer, damaged checkpoint"
            state = arrays if self.touched else "nothing was changed"
            has_other_names = any(path.partition("/")[0] not in stored for path in matching.differences.missing)
            names = (
                f" The checkpoint has {', '.join(name for name in stored if not is_own(name))}."
                if has_other_names
                else ""
            )
            raise MismatchError(
                f"step {step} does not fit the live objects ({state}):\n{matching.differences}",
                differences=matching.differences,
                hint=f"Fix the objects.{names} strict=False, in {request.call}, takes what fits and "
                f"reports the rest{_describe_loss(matching.differences)}.",
            )
        return matching

    def _fill(self) -> None:
        self.touched = True
        request, manifest = self._request, self.opened.manifest
        size_bytes = manifest.data_bytes + manifest.referred_bytes
        shown = LongRead(f"restoring step {self.name.step}", self._plan.measure_bytes)
        advance = shown.advance if request.shows_progress else None
        with _enough_memory(self.opened), open_pool(request.storage, request.threads, size_bytes) as pool, shown:

            def read(plan: ReadPlan) -> int:
                return read_orders(request.storage, plan.orders, self._readers, pool, request.storage, advance)

            if self.passing is None:
                self.size_bytes = read(self._plan)
            else:
                self.size_bytes = self.passing.fill(request.storage, self._plan.orders, self._readers, pool, advance)
            overlapping = self._plan.overlapping
            clashes = find_clashes(overlapping, lambda targets: read(self._plan_reads(targets))) if overlapping else []
        self.matching.differences.wrong_kind.extend(clashes)
        if clashes and self._request.strict:
            raise ApplyError(
                "live arrays that share memory cannot hold what is stored for each:\n  " + "\n  ".join(clashes[:20]),
                hint="Let them share memory as they did when they were saved, or give each its own memory; "
                "strict=False leaves them unchanged.",
            )

    def _apply(self) -> None:
        """Sets everything else, after all workers have checked every byte."""
        self.replaced = self.matching.apply()
        if self._request.keeping is not None:
            self._request.keeping.put_back()


def _describe_loss(differences: Differences) -> str:
    """**Pure.** Returns what strict=False would lose, and the way to keep it, if parts of objects differ."""
    has_parts = any("/" in name for name in differences.missing) and any("/" in name for name in differences.extra)
    if not (differences.wrong_dtype or differences.wrong_shape or has_parts):
        return ""
    return (
        ", which then starts from scratch: to keep it in another precision, size or under other names, see the guide "
        "on restoring, Change the precision, the sizes or the names"
    )


def _list_specs(opened: OpenedStep) -> dict[str, ArraySpec]:
    """Returns each leaf's dtype and shape; raises `DamageError` if all files together are too small for them."""
    index, *others = opened.indexes
    specs: dict[str, ArraySpec] = {}
    for one in (*reversed(others), index):
        specs |= {name: spec_of(*leaf) for name, leaf in one.list_leaves().items()}
    if index.is_shared or others:
        manifest = opened.manifest
        # Wanted leaves may be in files that are not open yet, and memory is allocated for them before they are.
        if sum(spec.size_bytes for spec in specs.values()) > manifest.data_bytes + manifest.referred_bytes:
            path, step = opened.data_path(index.rank), manifest.step
            raise DamageError(
                f"{path}: its leaves are larger than all files of the step together", step=step, path=path
            )
    for one in (*reversed(others), index):
        for record in one.strides:
            specs[record.leaf] = replace(specs[record.leaf], strides=record.strides)
        for quantized in one.quantizers:
            specs[quantized.leaf] = replace(specs[quantized.leaf], quantizer=quantized.quantizer)
    return specs


@contextmanager
def _enough_memory(opened: OpenedStep) -> Iterator[None]:
    """Raises holdfast's own error if there is not enough memory for the arrays of a step."""
    try:
        yield
    except MemoryError as error:
        needed_bytes = opened.manifest.data_bytes + opened.manifest.referred_bytes
        raise ApplyError(
            f"step {opened.name.step} needs {needed_bytes} bytes of memory, which are not available",
            hint="Restore it on a machine with more memory, or restore a part of it with `only`.",
        ) from error


def _report_resize(storage: Storage, trial: _RestoreTrial, worker: Worker, emit: Sink) -> None:
    """**Blocks.** Reports what another number of workers means.

    Warns if the workers that saved were at different positions of shared data. Each worker reads some of them besides
    the first; together they read all. Without stored positions nothing is read.
    """
    opened = trial.opened
    emit(
        Resized(
            step=trial.name.step,
            generation=trial.name.generation,
            stored_workers=opened.manifest.world_size,
            workers=worker.world_size,
            reseeded=trial.matching.reseeded,
            left=trial.matching.left,
        )
    )
    manifest = opened.manifest
    known = {index.rank: list_positions(index.objects) for index in opened.indexes}
    if not any(known.values()):
        return
    positions: list[list[PositionRecord]] = [[] for _ in range(manifest.world_size)]
    try:
        for rank in {0, *range(worker.rank, manifest.world_size, worker.world_size)}:
            stored = known.get(rank)
            if stored is None:
                stored = list_positions(StoredStep(storage, opened.directory).index(manifest, rank).objects)
            positions[rank] = stored
    except (DamageError, StorageError) as error:
        # Nothing else of it was needed here, and what was is restored.
        text = f"cannot check whether all workers saved at the same position in the data: {error.message}"
        emit(Warned(step=manifest.step, text=text))
        return
    text = find_apart(positions)
    if text:
        emit(Warned(step=manifest.step, text=text))


def _no_whole(
    storage: Storage, step: int | None, damages: tuple[DamageError, ...], touched: bool
) -> NoWholeCheckpointError:
    what = f"step {step} is damaged" if step is not None else f"all checkpoints ({len(damages)}) are damaged"
    listed = "\n".join(f"  {damage.message}" for damage in damages)
    mixed = "\n  Some live arrays hold values read from them: do not train on." if touched else ""
    return NoWholeCheckpointError(
        f"{storage.url}: {what}:\n{listed}{mixed}",
        damages=damages,
        hint="`holdfast verify` shows the extent; restore another copy of the run, or start over: begin_anew=True, or "
        "another directory.",
    )
