"""Whether a checkpoint is whole: first its records, then, where that is asked for, every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.errors import DamageError, FormatError, NotFoundError
from holdfast.format.digests import digest
from holdfast.format.index import MAX_INDEX_BYTES, Index, decode_index
from holdfast.format.manifest import MAX_MANIFEST_BYTES, Manifest, WorkerRecord, decode_manifest
from holdfast.format.names import MANIFEST_NAME, StepName, index_name
from holdfast.restore.handoffs import OpenedStep, Parts, Piece, join
from holdfast.restore.plan import plan_pieces
from holdfast.restore.read import ScratchParts, find_damages, read_pieces
from holdfast.storage.protocol import FileReader, Storage


def open_step(storage: Storage, directory: str, expected: StepName | None) -> OpenedStep:
    """**Blocks.** Reads a step's manifest and indexes, and checks them.

    Args:
        storage: Where it lies.
        directory: The path of the step's directory; empty if the storage's root is that directory.
        expected: The checkpoint that it should be; None where its directory may have another name.

    Raises:
        DamageError: If a record is missing or damaged.
        StorageError: If the place fails.
    """
    step = expected.step if expected else None
    path = join(directory, MANIFEST_NAME)
    try:
        manifest = decode_manifest(storage.read(path, MAX_MANIFEST_BYTES), path=path, expected=expected)
        if manifest.world_size != 1:
            raise FormatError(
                f"{path}: the state of {manifest.world_size} workers is not known to this holdfast",
                path=path,
                step=step,
                hint="Read it with the version of holdfast that wrote it, or a newer one.",
            )
        indexes = tuple(
            _open_index(storage, directory, manifest, rank, worker) for rank, worker in enumerate(manifest.workers)
        )
    except NotFoundError as error:
        raise DamageError(f"{error.path} is missing", step=step, path=error.path) from error
    return OpenedStep(directory, manifest, indexes)


def _open_index(storage: Storage, directory: str, manifest: Manifest, rank: int, worker: WorkerRecord) -> Index:
    path = join(directory, index_name(rank, manifest.world_size))
    step = manifest.step
    if worker.index_bytes > MAX_INDEX_BYTES:
        raise DamageError(f"{path} is said to have {worker.index_bytes} bytes", step=step, path=path)
    data = storage.read(path, worker.index_bytes)
    if len(data) != worker.index_bytes or digest(data) != worker.index_digest:
        raise DamageError(f"{path} is not the index that the manifest vouches for", step=step, path=path)
    index = decode_index(data, path=path, step=step)
    stands_for = (index.step, index.generation, index.attempt, index.rank, index.world_size, index.data_bytes)
    if stands_for != (
        manifest.step,
        manifest.generation,
        manifest.attempt,
        rank,
        manifest.world_size,
        worker.data_bytes,
    ):
        raise DamageError(f"{path} belongs to another checkpoint or worker", step=step, path=path)
    return index


def open_data(storage: Storage, opened: OpenedStep, rank: int) -> FileReader:
    """**Blocks.** Opens a worker's data file and checks its size.

    Raises:
        DamageError: If it is missing, or shorter or longer than was written.
        StorageError: If the place fails.
    """
    path = opened.data_path(rank)
    step = opened.manifest.step
    try:
        reader = storage.open_reader(path)
    except NotFoundError as error:
        raise DamageError(f"{path} is missing", step=step, path=path) from error
    expected_bytes = opened.indexes[rank].data_bytes
    if reader.size_bytes != expected_bytes:
        reader.close()
        raise DamageError(f"{path} has {reader.size_bytes} bytes, {expected_bytes} were written", step=step, path=path)
    return reader


def verify_data(
    storage: Storage,
    opened: OpenedStep,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[DamageError]:
    """**Blocks.** Reads every byte of a step's data files and compares it with its digest.

    Args:
        storage: Where the step lies.
        opened: The step.
        threads: How many threads read.
        progress: Called with the number of bytes that were just read; from any thread.

    Returns:
        What is damaged, in the order of the files; empty if the step is whole.

    Raises:
        StorageError: If the place fails.
    """
    damages: list[DamageError] = []
    for rank in range(len(opened.indexes)):
        try:
            damages += _verify_file(storage, opened, rank, threads, progress)
        except DamageError as damage:
            damages.append(damage)
    return damages


def _verify_file(
    storage: Storage, opened: OpenedStep, rank: int, threads: int, progress: Callable[[int], None]
) -> Sequence[DamageError]:
    index = opened.indexes[rank]
    path = opened.data_path(rank)
    damages: list[DamageError] = []
    reader = open_data(storage, opened, rank)
    try:
        header = bytearray(index.header_bytes)
        reader.read_into(0, memoryview(header))
        progress(len(header))
        if digest(header) != index.header_digest:
            damages.append(
                DamageError(
                    f"{path}: the header does not match its digest; restoring does not need it, other readers do",
                    step=index.step,
                    path=path,
                    offset_bytes=0,
                )
            )

        def check(piece: Piece, parts: Parts) -> None:
            # Lists are appended to from several threads, which is safe, and put in order at the end.
            damages.extend(find_damages(index, path, piece, parts))
            progress(piece.size_bytes)

        read_pieces(reader, plan_pieces(index, None), ScratchParts().of, check, threads=threads)
    finally:
        reader.close()
    return sorted(damages, key=lambda damage: damage.offset_bytes or 0)
