"""Fills live arrays from the files of several workers, reading no more of them than is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from holdfast.errors import DamageError
from holdfast.format.index import Index
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.restore.files import Part, list_parts, open_part
from holdfast.restore.read import read_targets
from holdfast.restore.records import OpenedStep
from holdfast.restore.reshard_plan import Assignment, Order
from holdfast.restore.shares import Patchwork, read_shares
from holdfast.restore.verify import read_rank
from holdfast.state.leaves import ArraySpec, Target
from holdfast.storage.protocol import FileReader, Storage


def assign_parts(
    storage: Storage, opened: OpenedStep, targets: Sequence[Target], leaves: Mapping[str, ArraySpec]
) -> list[tuple[Part, Order]]:
    """**Blocks.** Finds out what is to be read of which file, before anything is.

    The index that was read already comes first: with the workers as they were, it has all that they alone held. Then
    come those that it names, and only if something is missing still, the others, the likeliest first.

    Args:
        storage: Where the step lies.
        opened: The step, with the index that says what state this worker has.
        targets: Where bytes are wanted.
        leaves: What each stored leaf is.

    Raises:
        DamageError: If an index is damaged, or the step does not have all that is wanted.
        StorageError: If the place fails.
    """
    manifest = opened.manifest
    assignment = Assignment(targets, leaves, step=manifest.step)
    orders: list[tuple[Part, Order]] = []

    def take(index: Index) -> None:
        own = OpenedStep(opened.directory, manifest, (index,))
        for part in list_parts(own):
            order = assignment.offer(part.index, part.path)
            if order:
                orders.append((part, order))

    for index in opened.indexes:
        take(index)
    known = {index.rank for index in opened.indexes}
    for rank in _list_ranks(opened.indexes, assignment, manifest.world_size):
        if assignment.is_complete:
            break
        if rank not in known:
            known.add(rank)
            take(read_rank(storage, opened.directory, manifest, rank))
    try:
        assignment.check_complete()
    except DamageError as damage:
        path = join(opened.directory, MANIFEST_NAME)
        raise DamageError(
            f"{opened.directory or storage.url}: {damage.message}", step=manifest.step, path=path, tensor=damage.tensor
        ) from damage
    return orders


def _list_ranks(indexes: Sequence[Index], assignment: Assignment, world_size: int) -> Iterator[int]:
    """The workers whose indexes to look into, the likeliest first.

    They are those that are named, and then those around the place at which something is missing: were all read from the
    first on, a job of many workers would read more of indexes than of its state.
    """
    missing = assignment.list_missing()
    hinted = {rank for index in indexes for leaf in index.elsewhere if leaf.name in missing for rank in leaf.ranks}
    yield from sorted(hinted)
    guess = int(assignment.guess_place() * world_size)
    yield from sorted(range(world_size), key=lambda rank: abs(rank - guess))


def read_orders(
    storage: Storage,
    orders: Sequence[tuple[Part, Order]],
    readers: Mapping[str, FileReader],
    *,
    threads: int,
) -> int:
    """**Blocks.** Fills all targets; every byte is checked.

    Args:
        storage: Where the step lies, and the steps that it refers to.
        orders: What to read of which file.
        readers: By path, files that are open already.
        threads: How many threads read.

    Returns:
        How many bytes were read.

    Raises:
        DamageError: If a file is missing or damaged; targets may have been filled by then, some with bad bytes.
        StorageError: If the place fails.
    """
    size_bytes = 0
    for part, order in orders:
        reader = readers.get(part.path)
        if reader is not None:
            size_bytes += _read_order(reader, part, order, threads)
        else:
            with closing(open_part(storage, part, storage)) as opened:
                size_bytes += _read_order(opened, part, order, threads)
    return size_bytes


def _read_order(reader: FileReader, part: Part, order: Order, threads: int) -> int:
    size_bytes = 0
    try:
        if order.whole:
            size_bytes += read_targets(reader, part.index, part.path, order.whole, threads=threads)
        if order.shares:
            patchwork = Patchwork()
            patchwork.expect(order.shares)
            size_bytes += read_shares(reader, part.index, part.path, order.shares, patchwork, threads=threads)
    except DamageError as damage:
        raise part.explain(damage) from damage
    return size_bytes
