"""Tensors that are divided over a mesh of workers: which boxes of them lie here, found without asking anybody."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import UnsupportedValueError
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, row_major
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.state.leaves import ArraySpec, LocalBox, Sharding, part_of, spec_like
from holdfast.state.registry import register_sharder

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Places along one dimension: where each run of them begins and ends, in the order in which they lie locally."""

_BACKEND: Final = TorchBackend()


class MeshSharder:
    """Looks at DTensors: those of FSDP2 and of tensor parallelism, on meshes of any number of dimensions."""

    def look(self, array: Any, path: str, worker: Worker) -> Sharding:
        """What this worker holds of a tensor, from mesh and placements alone."""
        mesh, placements, shape = array.device_mesh, tuple(array.placements), tuple(array.shape)
        local = array._local_tensor
        own = _BACKEND.spec(local, path)
        spec = spec_like(own, shape)
        coordinate = mesh.get_coordinate()
        memory = (_BACKEND.alias_key(local), shape, placements, mesh)
        workers = len(_all_ranks(mesh))
        if coordinate is None:  # This worker has no part in the mesh.
            return Sharding(spec, _BACKEND, (), memory, workers)
        if any(placement.is_partial() for placement in placements):
            raise UnsupportedValueError(
                f"{path}: a tensor whose values are still to be added up over the mesh ({placements}) cannot be stored",
                path=path,
                hint="Redistribute it first: tensor.redistribute(placements=[Replicate(), ...]).",
            )
        holders = _find_holders(mesh, tuple(coordinate), placements)
        _check_ranks(mesh, tuple(coordinate), holders, worker, path)
        boxes = find_boxes(shape, tuple(mesh.shape), tuple(coordinate), placements)
        if own.shape != _local_shape(boxes, len(shape)) and local.numel():
            raise UnsupportedValueError(
                f"{path}: a tensor of {list(shape)}, placed as {placements}, should have {list(own.shape)} elsewhere",
                path=path,
                hint="It was made by DTensor.from_local, perhaps, without its shape.",
            )
        if len(boxes) == 1:
            return Sharding(spec, _BACKEND, (LocalBox(boxes[0][0], local, holders),), memory, workers)
        parts = (LocalBox(box, part_of(local, place), holders) for box, place in boxes)
        return Sharding(spec, _BACKEND, tuple(parts), memory, workers)

    def new(self, like: Any, spec: ArraySpec) -> Any:
        """A tensor on the same mesh, placed in the same way."""
        own = like._local_tensor
        local = _BACKEND.new(spec_like(spec, tuple(own.shape)), own)
        shape = tuple(like.shape)
        stride = spec_like(spec, shape).strides or row_major(shape)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
        )


def mesh_ranks(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    """The ranks of all workers in the largest mesh that some tensors lie on; None if none lies on a mesh."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if not meshes:
        return None
    return _all_ranks(max(meshes, key=lambda mesh: int(mesh.mesh.numel())))


@lru_cache(maxsize=1 << 12)
def find_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[Box, Box]]:
    """**Pure.** The boxes of a tensor that lie at one place of a mesh: each in the tensor, and in the local tensor.

    The dimensions of the mesh divide the tensor one after the other. A strided placement stands for a division that
    comes before others, which are to the right of it: what it takes are several runs, and so several boxes.
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
    """What the part of that number gets of each piece, if runs are cut into pieces, and each of these into parts."""
    taken: list[tuple[int, int]] = []
    for piece in range(pieces):
        for begin, end in _chunk(_chunk(runs, pieces, piece), parts, number):
            if taken and taken[-1][1] == begin:
                begin = taken.pop()[0]
            taken.append((begin, end))
    return tuple(taken)


def _chunk(runs: Runs, parts: int, number: int) -> Runs:
    """One of the parts into which `torch.chunk` would cut runs: all of one length, but for the last ones."""
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


def _local_shape(boxes: list[tuple[Box, Box]], dimensions: int) -> tuple[int, ...]:
    return tuple(max(place.ends[dimension] for _, place in boxes) for dimension in range(dimensions))


@lru_cache(maxsize=1 << 8)
def _all_ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


@lru_cache(maxsize=1 << 8)
def _find_holders(mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[int, ...]:
    """The ranks that differ from one place of the mesh only along dimensions over which the tensor is replicated."""
    place = tuple(
        slice(None) if placement.is_replicate() else number
        for number, placement in zip(coordinate, placements, strict=True)
    )
    return tuple(sorted(torch.as_tensor(mesh.mesh[place]).flatten().tolist()))


def _check_ranks(mesh: Any, coordinate: tuple[int, ...], holders: tuple[int, ...], worker: Worker, path: str) -> None:
    rank = int(mesh.mesh[coordinate])
    if rank != worker.rank or holders[-1] >= worker.world_size or max(_all_ranks(mesh)) >= worker.world_size:
        what = "a job of its own" if worker.is_alone else f"worker {worker.rank} of {worker.world_size}"
        raise UnsupportedValueError(
            f"{path}: a tensor of rank {rank} of {len(_all_ranks(mesh))} on its mesh cannot be stored by {what}",
            path=path,
            hint="Give the cluster of the job, which numbers workers as torch.distributed does.",
        )


register_sharder(DTensor, MeshSharder())
