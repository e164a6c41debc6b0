"""Checks live arrays that share memory in different forms: whether all of them hold their stored values.

Identical arrays have one leaf. But a view of another shape, a transposed one or a slice may have been stored
separately, with values that differ: then at least one is wrong after both were filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from holdfast.format.digests import digest
from holdfast.state.leaves import ArrayBackend, Target
from holdfast.state.match.matching import fill_copies
from holdfast.storage.buffers import batches

_BATCH_BYTES: Final = 1 << 28
"""How much is read a second time at once."""


def separate(targets: Sequence[Target]) -> tuple[Sequence[Target], list[Target]]:
    """**Pure.** Prevents that a target is filled while another of the same memory is checked; finds possible clashes.

    Returns:
        The targets; those that share memory have no address, and so are gathered first.
        Those that must be checked once all are filled: boxes of one leaf do not count, because they may interleave,
        but have no element in common.
    """
    owners, begins, ends = _lay_out(targets)
    overlapping = sorted(find_overlapping(begins, ends), key=begins.__getitem__)
    if not overlapping:
        return targets, []
    clusters: list[list[Target]] = []
    reach = 0
    for number in overlapping:
        if not clusters or begins[number] >= reach:
            clusters.append([])
        clusters[-1].append(owners[number])
        reach = max(reach, ends[number])
    gathered = {id(owners[number]): msgspec.structs.replace(owners[number], address=None) for number in overlapping}
    clashing: dict[int, Target] = {}
    for cluster in clusters:
        if len({target.leaf for target in cluster}) > 1 or any(target.copies for target in cluster):
            clashing.update((id(target), gathered[id(target)]) for target in cluster)
    return [gathered.get(id(target), target) for target in targets], list(clashing.values())


def find_overlapping(begins: Sequence[int], ends: Sequence[int]) -> set[int]:
    """**Pure.** Returns the positions of ranges, none of them empty, that overlap with another one."""
    import numpy as np

    if not begins:
        return set()
    first = np.array(begins, np.int64)
    order = np.argsort(first)
    reach = np.maximum.accumulate(np.array(ends, np.int64)[order])
    if not (first[order][1:] < reach[:-1]).any():
        return set()
    overlapping: set[int] = set()
    widest = int(order[0])
    for place in map(int, order[1:]):
        if begins[place] < ends[widest]:
            overlapping |= {widest, place}
        if ends[place] > ends[widest]:
            widest = place
    return overlapping


def find_clashes(targets: Sequence[Target], read: Callable[[Sequence[Target]], object]) -> list[str]:
    """**Blocks.** Returns a sentence for each overlapping target, all filled, that does not hold its stored values.

    Arrays that interleave without a common element do, and so do those whose stored values agree. `read` fills targets.
    """
    for target in targets:
        if target.copies:
            fill_copies(target)
    clashes: list[str] = []
    for batch in batches(targets, lambda target: target.spec.size_bytes, _BATCH_BYTES):
        fresh = [_renew(target) for target in batch]
        read(fresh)
        for target, stored in zip(batch, fresh, strict=True):
            expected = _digest_of(stored.backend, stored.array, stored)
            receivers = ((target.backend, target.array), *target.copies)
            if any(_digest_of(backend, array, target) != expected for backend, array in receivers):
                clashes.append(
                    f"{target.leaf}: stored separately from {_name_partner(target, targets)} with other values, "
                    "but the live arrays share memory"
                )
    return clashes


def _lay_out(targets: Iterable[Target]) -> tuple[list[Target], list[int], list[int]]:
    """Returns the memory of targets and their copies, each with the target."""
    owners: list[Target] = []
    begins: list[int] = []
    ends: list[int] = []
    # There may be very many, most of them the same.
    sizes_bytes: dict[int, int] = {}
    for target in targets:
        address, spec = target.address, target.spec
        if address is not None and not target.copies:
            size_bytes = sizes_bytes.get(id(spec))
            if size_bytes is None:
                size_bytes = sizes_bytes[id(spec)] = spec.size_bytes
            owners.append(target)
            begins.append(address)
            ends.append(address + size_bytes)
            continue
        for backend, array in ((target.backend, target.array), *target.copies):
            extent = backend.extent(array)
            if extent is not None:
                owners.append(target)
                begins.append(extent[0])
                ends.append(extent[1])
    return owners, begins, ends


def _renew(target: Target) -> Target:
    """Returns a target for the same values, with memory of its own."""
    array = target.backend.new(target.spec)
    return msgspec.structs.replace(target, array=array, copies=(), address=target.backend.address(array))


def _digest_of(backend: ArrayBackend, array: Any, target: Target) -> str:
    data = memoryview(bytearray(target.spec.size_bytes))
    backend.copy_out([array], data, [0])
    return digest(data)


def _name_partner(target: Target, targets: Sequence[Target]) -> str:
    _, own_begins, own_ends = _lay_out([target])
    owners, begins, ends = _lay_out(other for other in targets if other is not target)
    for owner, begin, end in zip(owners, begins, ends, strict=True):
        if any(begin < own_end and own_begin < end for own_begin, own_end in zip(own_begins, own_ends, strict=True)):
            return owner.leaf
    return target.leaf
