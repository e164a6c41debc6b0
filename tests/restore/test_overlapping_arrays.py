"""Restores into live arrays that share memory in a form of their own: a view, a transposed one, a slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import ApplyError
from holdfast.restore.aliasing import find_overlapping_targets
from holdfast.state.leaves import Target, spec_of
from holdfast.state.registry import backend_of
from holdfast.storage import MemoryStorage
from memory_engine import run_workers


def of_views(base: Any) -> dict[str, Any]:
    return {"a": base, "b": base.reshape(2, 5)}


def of_slices(base: Any) -> dict[str, Any]:
    return {"a": base[:6], "b": base[4:]}


def transposed(base: Any) -> dict[str, Any]:
    return {"a": base.reshape(2, 5), "b": base.reshape(2, 5).T}


def of_columns(base: Any) -> dict[str, Any]:
    return {"a": base.reshape(2, 5)[:, :3], "b": base.reshape(2, 5)[:, 2:]}


def reversed_too(base: Any) -> dict[str, Any]:
    return {"a": base[::2], "b": base[::-1][1:4]}


SHARING = pytest.mark.parametrize("make", [of_views, of_slices, transposed, of_columns, reversed_too])


def apart(objects: dict[str, Any]) -> dict[str, Any]:
    """Arrays of the same form, each with memory and values of its own."""
    return {name: np.ascontiguousarray(array) + 10 * number for number, (name, array) in enumerate(objects.items())}


def save(place: Any, objects: dict[str, Any], **options: Any) -> None:
    with hf.CheckpointManager(place, hf.Checkpoint(**objects), **options) as manager:
        manager.save(1)


def restore(place: Any, objects: dict[str, Any], **options: Any) -> hf.Restoration:
    with hf.CheckpointManager(place, hf.Checkpoint(**objects)) as manager:
        restored = manager.restore(**options)
    assert restored is not None
    return restored


@SHARING
def test_different_values_for_shared_memory_are_refused(make: Callable[[Any], dict[str, Any]]) -> None:
    storage = MemoryStorage()
    save(storage, apart(make(np.arange(10.0))))
    with pytest.raises(ApplyError, match="share memory") as caught:
        restore(storage, make(np.zeros(10)))
    assert "a: stored separately from b" in str(caught.value) or "b: stored separately from a" in str(caught.value)
    assert caught.value.__notes__
    restored = restore(storage, make(np.zeros(10)), strict=False)
    assert restored.differences.wrong_kind
    assert restore(storage, make(np.zeros(10)), only="a").differences.wrong_kind == []


@SHARING
def test_values_that_agree_come_back(make: Callable[[Any], dict[str, Any]]) -> None:
    storage = MemoryStorage()
    save(storage, make(np.arange(10.0)))
    live = make(np.zeros(10))
    assert not restore(storage, live).differences
    for name, array in make(np.arange(10.0)).items():
        np.testing.assert_array_equal(live[name], array)


def test_arrays_that_interleave_hold_what_they_should() -> None:
    storage = MemoryStorage()
    base = np.zeros((40, 50))
    live = {"even": base[:, ::2], "odd": base[:, 1::2], "rows": np.zeros((3, 4))[::2]}
    stored = apart(live)
    save(storage, stored)
    assert not restore(storage, live).differences
    for name, array in stored.items():
        np.testing.assert_array_equal(live[name], array)


def test_overlapping_arrays_in_files_of_several_steps_are_refused() -> None:
    storage = MemoryStorage()
    objects = apart(of_views(np.arange(10.0)))
    with hf.CheckpointManager(storage, hf.Checkpoint(**objects), incremental=True) as manager:
        manager.save(1)
        objects["b"] += 1
        manager.save(2)
    with pytest.raises(ApplyError, match="share memory"):
        restore(storage, of_views(np.zeros(10)))


def test_a_copy_of_what_was_one_array() -> None:
    storage = MemoryStorage()
    tied = np.arange(6.0)
    save(storage, {"a": tied, "b": tied})
    base = np.zeros(10)
    with pytest.raises(ApplyError, match="share memory"):
        restore(storage, of_slices(base))
    live = {"a": np.zeros(6), "b": np.zeros(6)}
    restore(storage, live)
    assert live["b"].tolist() == tied.tolist()


def test_arrays_that_several_workers_have_written(tmp_path: Path) -> None:
    run_workers(2, lambda cluster: save(tmp_path, apart(of_slices(np.arange(10.0))), cluster=cluster))
    with pytest.raises(ApplyError, match="share memory"):
        restore(tmp_path, of_slices(np.zeros(10)))
    interleaved = np.zeros(10)
    halves = {"a": interleaved[::2][:5], "b": interleaved[1::2]}
    run_workers(2, lambda cluster: save(tmp_path / "other", apart(halves), cluster=cluster))
    restore(tmp_path / "other", halves)
    assert halves["b"].tolist() == [10] * 5


def test_boxes_of_one_leaf_are_not_read_again() -> None:
    array, other = np.zeros((4, 6)), np.zeros(3)
    backend = backend_of(array)
    assert backend is not None
    boxes = [Target("a", spec_of("F64", (4, 3)), array[:, at : at + 3], backend, offsets=(0, at)) for at in (0, 3)]
    alone = Target("b", spec_of("F64", (3,)), other, backend, address=backend.address(other))
    assert find_overlapping_targets([*boxes, alone]) == []
    within = Target("c", spec_of("F64", (6,)), array[1], backend, address=backend.address(array[1]))
    assert len(find_overlapping_targets([*boxes, alone, within])) == 3


def test_tensors_and_arrays_of_one_memory() -> None:
    torch = pytest.importorskip("torch")
    storage = MemoryStorage()
    save(storage, {"array": np.arange(6.0), "tensor": torch.ones(2, 3, dtype=torch.float64)})
    array = np.zeros(6)
    with pytest.raises(ApplyError, match="share memory"):
        restore(storage, {"array": array, "tensor": torch.from_numpy(array).view(2, 3)})
    with pytest.raises(ApplyError, match="share memory"):
        restore(storage, {"array": array, "tensor": torch.from_numpy(array).view(3, 2).t()})
