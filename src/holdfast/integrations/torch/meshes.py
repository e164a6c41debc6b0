"""Tensors that are sharded over a mesh of workers: their local boxes, found without communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import UnsupportedValueError
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, row_major
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.state.leaves import ArraySpec, LocalBox, Pieces, Sharding, part_of, spec_like
from holdfast.state.registry import register_sharder

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Positions along one dimension: where each run of them begins and ends, in local order."""

_BACKEND: Final = TorchBackend()
_local = attrgetter("_local_tensor")
_spec = attrgetter("_spec")
_mesh = attrgetter("mesh")
_placements = attrgetter("placements")
_shape = attrgetter("shape")


class MeshSharder:
    """Inspects DTensors: those of FSDP2 and of tensor parallelism, on meshes of any number of dimensions."""

    def look(self, arrays: Sequence[Any], path_of: Callable[[int], str], worker: Worker) -> list[Sharding]:
        """Returns what this worker holds of tensors, from meshes and placements alone."""
        locals_ = list(map(_local, arrays))
        facts = _BACKEND.describe(locals_)
        found = []
        for row, (array, local) in enumerate(zip(arrays, locals_, strict=True)):
            if row in facts.problems:
                facts.check(row, path_of(row))
            own, shape, placements = facts.specs[row], tuple(array.shape), tuple(array.placements)
            coordinate = array.device_mesh.get_coordinate()
            at = None if coordinate is None else tuple(coordinate)
            part = _find_part(array.device_mesh, at, placements, shape, worker)
            if part.problem or (part.local_shape != own.shape and part.boxes and local.numel()):
                _refuse(part, own, path_of(row))
            is_one = len(part.boxes) == 1
            boxes = tuple(
                LocalBox(box, local, part.holders)
                if is_one
                else LocalBox(box, part_of(local, place), part.holders, place)
                for box, place in part.boxes
            )
            memory, key = (facts.memory(row), shape, placements, array.device_mesh), facts.keys[row]
            spec, is_fillable = spec_like(own, shape), row not in facts.unfillable
            found.append(Sharding(spec, _BACKEND, boxes, memory, key, part.workers, is_fillable=is_fillable))
        return found

    def take_apart(self, arrays: Sequence[Any]) -> Pieces:
        """Returns the local tensors; the marks are meshes, placements and shapes."""
        specs = list(map(_spec, arrays))
        marks = list(map(_mesh, specs)), list(map(_placements, specs)), list(map(_shape, arrays))
        return Pieces(_BACKEND, list(map(_local, arrays)), marks)

    def new(self, like: Any, spec: ArraySpec) -> Any:
        """Returns a tensor on the same mesh, with the same placements."""
        own = like._local_tensor
        local = _BACKEND.new(spec_like(spec, tuple(own.shape)), own)
        shape = tuple(like.shape)
        stride = spec_like(spec, shape).strides or row_major(shape)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
        )


def mesh_ranks(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the ranks of all workers in the largest mesh of some tensors; None if none has a mesh."""
    meshes = {id(mesh): mesh for mesh in (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))}
    if not meshes:
        return None
    return _all_ranks(max(meshes.values(), key=lambda mesh: int(mesh.mesh.numel())))


class _MeshPart(NamedTuple):
    """The part that one worker holds of all tensors of one shape with the same placements on one mesh.

    Attributes:
        workers: How many workers the mesh has.
        holders: The ranks of those that hold the same boxes as this one.
        boxes: The result of `find_boxes`; empty if this worker has no part in the mesh.
        local_shape: The shape of the local tensor.
        problem: Why such a tensor cannot be stored, and what to do about it; empty if it can.
    """

    workers: int
    holders: tuple[int, ...] = ()
    boxes: Sequence[tuple[Box, Box]] = ()
    local_shape: tuple[int, ...] = ()
    problem: tuple[str, str] | tuple[()] = ()


@lru_cache(maxsize=1 << 12)
def _find_part(
    mesh: Any, coordinate: tuple[int, ...] | None, placements: tuple[Any, ...], shape: tuple[int, ...], worker: Worker
) -> _MeshPart:
    ranks = _all_ranks(mesh)
    workers = len(ranks)
    if coordinate is None:  # This worker has no part in the mesh.
        return _MeshPart(workers)
    if any(placement.is_partial() for placement in placements):
        what = f"a tensor with values that are still to be summed over the mesh ({placements}) cannot be stored"
        hint = "Redistribute it first: tensor.redistribute(placements=[Replicate(), ...])."
        return _MeshPart(workers, problem=(what, hint))
    holders = _find_holders(mesh, coordinate, placements)
    rank = int(mesh.mesh[coordinate])
    if rank != worker.rank or ranks[-1] >= worker.world_size:
        who = "a job of one worker" if worker.is_alone else f"worker {worker.rank} of {worker.world_size}"
        what = f"a tensor of rank {rank} of {workers} on its mesh cannot be stored by {who}"
        hint = "Pass the cluster of the job, which numbers workers as torch.distributed does."
        return _MeshPart(workers, problem=(what, hint))
    boxes = find_boxes(shape, tuple(mesh.shape), coordinate, placements)
    local_shape = tuple(max(place.ends[dimension] for _, place in boxes) for dimension in range(len(shape)))
    return _MeshPart(workers, holders, boxes, local_shape)


def _refuse(part: _MeshPart, own: ArraySpec, path: str) -> NoReturn:
    what, hint = part.problem or (
        f"a tensor that should have shape {list(part.local_shape)} on this worker, but has {list(own.shape)}, "
        "cannot be stored",
        "It may have been created by DTensor.from_local without its shape.",
    )
    raise UnsupportedValueError(f"{path}: {what}", path=path, hint=hint)


@lru_cache(maxsize=1 << 12)
def find_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[Box, Box]]:
    """**Pure.** Returns the boxes of a tensor at one place of a mesh: each in the tensor, and in the local tensor.

    The dimensions of the mesh divide the tensor one after the other. A strided placement is a division that comes
    before others, which are to the right of it: it takes several runs, and so several boxes.
    """
    runs: list[Runs] = [((0, length),) for length in shape]
    for parts, number, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            dimension = placement.dim % len(shape)
            runs[dimension] = _divide(runs[dimension], getattr(placement, "split_factor", 1), parts, number)
    if any(not own for own in runs):
        lengths = tuple(sum(end - begin for begin, end in own) for own in runs)
        offsets = tuple(own[0][0] if own else length for own, length in zip(runs, shape, strict=True))
        empty = Box(offsets, tuple(0 if not own else length for own, length in zip(runs, lengths, strict=True)))
        return [(empty, Box((0,) * len(shape), empty.shape))]
    sides = [list(zip(own, itertools.accumulate((e - b for b, e in own), initial=0), strict=False)) for own in runs]
    return [
        (
            Box(tuple(begin for (begin, _), _ in side), tuple(end - begin for (begin, end), _ in side)),
            Box(tuple(place for _, place in side), tuple(end - begin for (begin, end), _ in side)),
        )
        for side in itertools.product(*sides)
    ]


def _divide(runs: Runs, pieces: int, parts: int, number: int) -> Runs:
    """Returns what the part of that number gets of each piece, if runs are split into pieces, and each of these into
    parts."""
    taken: list[tuple[int, int]] = []
    for piece in range(pieces):
        for begin, end in _chunk(_chunk(runs, pieces, piece), parts, number):
            if taken and taken[-1][1] == begin:
                begin = taken.pop()[0]
            taken.append((begin, end))
    return tuple(taken)


def _chunk(runs: Runs, parts: int, number: int) -> Runs:
    """Returns one of the parts into which `torch.chunk` would split runs: all of one length, except the last ones."""
    total = sum(end - begin for begin, end in runs)
    length = -(-total // parts)
    first, last = number * length, min((number + 1) * length, total)
    found = []
    place = 0
    for begin, end in runs:
        low, high = max(first - place, 0), min(last - place, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        place += end - begin
    return tuple(found)


@lru_cache(maxsize=1 << 8)
def _all_ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


@lru_cache(maxsize=1 << 8)
def _find_holders(mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the ranks that differ from one place of the mesh only along dimensions over which the tensor is
    replicated."""
    place = tuple(
        slice(None) if placement.is_replicate() else number
        for number, placement in zip(coordinate, placements, strict=True)
    )
    return tuple(sorted(torch.as_tensor(mesh.mesh[place]).flatten().tolist()))


register_sharder(DTensor, MeshSharder())
