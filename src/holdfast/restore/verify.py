"""Checks a checkpoint: first its records, then, on request, every byte."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast.catalog import StoredRun, StoredStep
from holdfast.errors import DamageError, FormatError, HoldfastError, NotFoundError, StorageError
from holdfast.format.digests import digest
from holdfast.format.index import Index, LeafRecord
from holdfast.format.index_checks import find_cover_problem, find_name_problem
from holdfast.format.names import MANIFEST_NAME, StepName, index_name, join
from holdfast.format.records import SHARDS, Manifest, Worker, list_features
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.read import Parts, Piece, ScratchParts, find_damages, list_reads, open_pool, plan_pieces
from holdfast.restore.records import OpenedStep, Part
from holdfast.storage.protocol import FileReader, Storage

_JUDGE_THREADS: Final = max(2, min(4, os.cpu_count() or 1))


def open_step(storage: Storage, directory: str, expected: StepName | None, worker: Worker | None = None) -> OpenedStep:
    """**Blocks.** Reads and checks a step's manifest and indexes; raises `DamageError` if one is not whole.

    `directory` is empty if the storage's root is the step's own, `expected` is None if it may have another name. With a
    `worker`, only the index of its rank is read, or the one that replaces it if there were fewer workers; with None all
    are, and must fit together.
    """
    step = expected.step if expected else None
    path = join(directory, MANIFEST_NAME)
    try:
        manifest = StoredStep(storage, directory, expected).manifest()
    except NotFoundError as error:
        text = f"{error.path} is missing; a step without its manifest is not restored"
        raise DamageError(text, step=step, path=error.path) from error
    if worker is not None and manifest.world_size > 1:
        rank = worker.rank % manifest.world_size
        return OpenedStep(directory, manifest, (read_rank(storage, directory, manifest, rank),))
    indexes = tuple(read_rank(storage, directory, manifest, rank) for rank in range(manifest.world_size))
    _check_references(manifest, indexes, path)
    problem = find_cover_problem(indexes) if SHARDS in manifest.features else ""
    if problem:
        raise FormatError(f"{path}: {problem}", path=path, step=step)
    if worker is None:
        # The restore of an object finds out when it comes to what is named there.
        _check_names(directory, manifest, indexes)
    return OpenedStep(directory, manifest, indexes)


def list_objects(storage: Storage, name: StepName) -> list[str]:
    """**Blocks.** Returns the names of a step's objects, and reads no more; raises `DamageError` if records are bad."""
    try:
        return StoredStep(storage, name.directory, name).object_names()
    except NotFoundError as error:
        raise DamageError(f"{error.path} is missing", step=name.step, path=error.path) from error


def read_rank(storage: Storage, directory: str, manifest: Manifest, rank: int) -> Index:
    """**Blocks.** Returns the index of one worker; raises `DamageError` if it is missing, damaged, or another."""
    try:
        index = StoredStep(storage, directory).index(manifest, rank)
    except NotFoundError as error:
        raise DamageError(f"{error.path} is missing", step=manifest.step, path=error.path) from error
    missing = set(list_features(index)).difference(manifest.features)
    if missing:
        path = join(directory, index_name(rank, manifest.world_size))
        text = f"{path}: it needs the feature {min(missing)!r}, which its manifest does not list"
        raise FormatError(text, path=path, step=manifest.step)
    if not {reference.name for reference in manifest.references}.issuperset(index.refers_to()):
        raise _other_references(manifest, join(directory, MANIFEST_NAME))
    return index


def _check_names(directory: str, manifest: Manifest, indexes: Sequence[Index]) -> None:
    for index in indexes:
        problem = find_name_problem(index)
        if problem:
            path = join(directory, index_name(index.rank, manifest.world_size))
            raise FormatError(f"{path}: {problem}", path=path, step=manifest.step)


def _check_references(manifest: Manifest, indexes: Sequence[Index], path: str) -> None:
    """Checks that the manifest names what the indexes refer to: anything else would not be kept."""
    counts: dict[StepName, tuple[int, int]] = {}
    for index in indexes:
        for name, (leaves, size_bytes) in index.refers_to().items():
            known_leaves, known_bytes = counts.get(name, (0, 0))
            counts[name] = (known_leaves + leaves, known_bytes + size_bytes)
    named = {reference.name: (reference.leaves, reference.size_bytes) for reference in manifest.references}
    if named != counts:
        raise _other_references(manifest, path)


def _other_references(manifest: Manifest, path: str) -> FormatError:
    text = f"{path}: its references differ from those of the indexes that it lists"
    return FormatError(text, path=path, step=manifest.step)


_Bytes: TypeAlias = tuple[str, int, int, int, str]


Checked: TypeAlias = dict[_Bytes, list[DamageError]]
"""The arrays that have been read, and the results: bytes that many steps refer to are read only once.

It is valid as long as no other process writes.
"""


def _bytes_of(part: Part, leaf: LeafRecord) -> _Bytes:
    return part.path, leaf.begin, leaf.end, part.index.span_bytes, leaf.spans


def verify_data(
    storage: Storage,
    opened: OpenedStep,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda size_bytes: None,
    beside: Storage | None = None,
    checked: Checked | None = None,
) -> list[DamageError]:
    """**Blocks.** Reads every byte of a step's data files, and of what it refers to, and compares it with its digest.

    The steps that it refers to are `beside`, or in `storage` too. What was `checked` of other steps is not read again,
    and what is read here is added. `progress` is called from any thread. Damage is returned in the order of the files.
    """
    if beside is None and opened.directory:
        beside = storage
    checked = {} if checked is None else checked
    damages: list[DamageError] = []
    with open_pool(storage, threads, opened.manifest.data_bytes + opened.manifest.referred_bytes) as pool:
        for part in opened.list_parts():
            try:
                with closing(part.open(storage, beside)) as reader:
                    damages += _verify_part(part, reader, pool, progress, checked)
            except DamageError as damage:
                damages.append(damage)
    return damages


class CheckOutcome(enum.StrEnum):
    """Outcome of reading a checkpoint."""

    WHOLE = "whole"
    """Every byte is as it was written."""
    RESTORABLE = "restorable"
    """Headers of data files are damaged, which other programs need and a restore does not; all else is whole."""
    DAMAGED = "damaged"
    """Something is not as it was written."""
    UNREADABLE = "unreadable"
    """An I/O error ended the reading; the rest of the checkpoint was not checked."""
    REMOVED = "removed"
    """It was removed while it was being read."""


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Result of reading one checkpoint.

    Attributes:
        directory: The name of its directory; empty where that itself was named.
        name: The checkpoint; None if the directory may have any name and its manifest is damaged.
        outcome: The outcome.
        problems: The damage, in the order of the files, and any I/O error.
        read_bytes: Number of bytes that were read.
        seconds: Duration of the reading.
    """

    directory: str
    name: StepName | None
    outcome: CheckOutcome
    problems: tuple[HoldfastError, ...]
    read_bytes: int
    seconds: float


def judge_step(
    storage: Storage,
    directory: str,
    name: StepName | None,
    *,
    beside: Storage | None = None,
    checked: Checked | None = None,
    expect: Callable[[int], None] = lambda size_bytes: None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> CheckVerdict:
    """**Blocks.** Reads every byte of one checkpoint.

    `beside` holds the steps that it refers to; their data that are in `checked` are not read again. `expect` is called
    with the number of bytes to read, `progress` from any thread with those that were just read.

    Raises:
        StorageError: If the run's directory cannot be listed.
    """
    begun_at = time.monotonic()
    read_bytes = 0
    problems: list[HoldfastError] = []
    outcome = CheckOutcome.WHOLE
    checked = {} if checked is None else checked
    try:
        opened = open_step(storage, directory, name)
        name = opened.name
        read_bytes = opened.manifest.size_bytes - opened.manifest.data_bytes  # The indexes.
        expect(_count_unread(opened, checked))

        def count(just_read_bytes: int) -> None:
            # Called from several threads; should two of them collide, a figure for people is a little too small.
            nonlocal read_bytes
            read_bytes += just_read_bytes
            progress(just_read_bytes)

        problems += verify_data(storage, opened, threads=_JUDGE_THREADS, progress=count, beside=beside, checked=checked)
    except (DamageError, StorageError) as error:
        problems.append(error)
    if problems:
        outcome = CheckOutcome.DAMAGED
        if isinstance(problems[-1], StorageError):
            outcome = CheckOutcome.UNREADABLE
        elif all(map(_spares_restore, problems)):
            outcome = CheckOutcome.RESTORABLE
        # A job that runs removes old steps, manifest first: what is missing then was not damaged.
        if directory and name not in StoredRun(storage).look(closely=True).committed:
            outcome = CheckOutcome.REMOVED
    return CheckVerdict(directory, name, outcome, tuple(problems), read_bytes, time.monotonic() - begun_at)


def _count_unread(opened: OpenedStep, checked: Checked) -> int:
    """**Pure.** Returns how many bytes `verify_data` has to read of a step."""
    parts = opened.list_parts()
    headers_bytes = sum(part.index.header_bytes for part in parts if part.referrer is None)
    unread = (leaf for part in parts for leaf in part.index.leaves if _bytes_of(part, leaf) not in checked)
    return headers_bytes + sum(leaf.end - leaf.begin for leaf in unread)


def _spares_restore(damage: HoldfastError) -> bool:
    """A restore reads no header of a data file, and arrays begin after it: damage at the beginning is in the header."""
    return isinstance(damage, DamageError) and damage.offset_bytes == 0 and not damage.tensor


def _verify_part(
    part: Part, reader: FileReader, pool: WorkerPool, progress: Callable[[int], None], checked: Checked
) -> list[DamageError]:
    index = part.index
    damages = [] if part.referrer else _verify_header(part, reader, progress)
    found: dict[str, list[DamageError]] = {
        leaf.name: [] for leaf in index.leaves if _bytes_of(part, leaf) not in checked
    }

    def check(piece: Piece, _: Parts, digests: list[str]) -> None:
        # Lists are appended to from several threads, which is safe, and put in order at the end.
        for damage in find_damages(index, part.path, piece, digests):
            found[damage.tensor].append(damage)
        progress(piece.size_bytes)

    numbers = (number for number, leaf in enumerate(index.leaves) if leaf.name in found)
    pool.run(list_reads(part, reader, plan_pieces(index, numbers, {}), ScratchParts().of, check))
    for leaf in index.leaves:
        if leaf.name in found:
            checked[_bytes_of(part, leaf)] = found[leaf.name]
        damages += [part.explain(damage) for damage in checked[_bytes_of(part, leaf)]]
    return sorted(damages, key=lambda damage: damage.offset_bytes or 0)


def _verify_header(part: Part, reader: FileReader, progress: Callable[[int], None]) -> list[DamageError]:
    header = bytearray(part.index.header_bytes)
    reader.read_into(0, memoryview(header))
    progress(len(header))
    if digest(header) == part.index.header_digest:
        return []
    text = f"{part.path}: the header does not match its digest; a restore does not need it, but other readers do"
    return [DamageError(text, step=part.index.step, path=part.path, offset_bytes=0)]
