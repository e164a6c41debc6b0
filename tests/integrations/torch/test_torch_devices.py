"""Copies of tensors of any form in one go, as far as the processor can stand in for a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.integrations.torch.tensors import TorchDevices, _sources
from holdfast.storage import MemoryStorage

_LARGE_SIDE = 200
_VIEWS = {
    "plain": lambda: torch.arange(12.0).reshape(3, 4),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "column": lambda: torch.arange(12.0).reshape(3, 4)[:, 1],
    "one of a column": lambda: torch.arange(12.0).reshape(3, 4)[:1, 3],
    "scalar": lambda: torch.tensor(7.0)[()],
    "empty": lambda: torch.empty(0, 3),
    "spread": lambda: torch.tensor([1.5, 2.5])[:1].expand(5),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "half": lambda: torch.arange(3).to(torch.bfloat16),
    "truth": lambda: torch.tensor([True, False, True]),
    "truth transposed": lambda: torch.tensor([[True, False, True], [False, False, True]]).t(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.qint32),
    "trained": lambda: torch.arange(3.0, requires_grad=True),
    "large": lambda: torch.arange(float(_LARGE_SIDE**2)).reshape(_LARGE_SIDE, -1),
    "large conjugate": lambda: torch.full((_LARGE_SIDE, _LARGE_SIDE), 1 + 2j).conj(),
    "large transposed": lambda: torch.arange(float(_LARGE_SIDE**2)).reshape(_LARGE_SIDE, -1).t(),
}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = tensor.int_repr() if tensor.is_quantized else tensor.detach().resolve_conj().resolve_neg()
    values = values.contiguous().clone(memory_format=torch.contiguous_format)
    return values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""


@given(st.lists(st.tuples(st.sampled_from(sorted(_VIEWS)), st.sampled_from([0, 0, 0, 64])), max_size=8))
def test_tensors_of_any_form_bring_their_bytes_to_their_places(drawn: list[tuple[str, int]]) -> None:
    tensors, offsets, end, expected = [], [], 0, bytearray(4 << 20)
    for name, gap_bytes in drawn:
        tensor = _VIEWS[name]()
        # As an image has it: each begins at a multiple of eight bytes.
        begin = -(-(end + gap_bytes) // 8) * 8
        if not tensor.numel():
            continue  # It takes no copy.
        tensors.append(tensor)
        offsets.append(begin)
        end = begin + tensor.nbytes
        expected[begin:end] = _bytes_of(tensor)
    devices, found = TorchDevices(), bytearray(len(expected))
    targets = devices.targets(tensors, memoryview(found), offsets)
    for _ in range(2):  # What was planned once is filled again.
        found[:] = bytes(len(found))
        assert devices.start(tensors, targets, devices.moment(tensors)) is None
        assert np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8))
    for source, target in zip(_sources(tensors), targets, strict=True):
        # torch resolves these on the host, where the transfer to it may still be under way.
        assert not source.is_conj()
        assert not source.is_neg()
        # Otherwise it would convert values there.
        assert (source.dtype, source.shape) == (target.dtype, target.shape)


FORMS: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "transposed": lambda values: values.t().contiguous().t(),
    "contiguous": lambda values: values,
    "every second": lambda values: torch.stack([values, -values], dim=-1)[..., 0],
    "negative": lambda values: torch.complex(values, -values).conj().imag,
    "of NumPy": lambda values: np.asfortranarray(values.numpy()),
    "of JAX": lambda values: importlib.import_module("jax.numpy").asarray(values.numpy()),
}


@pytest.mark.parametrize("evaluates_first", [False, True])
@given(forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=2, max_size=5))
@settings(deadline=None, max_examples=20)
def test_what_was_planned_for_one_save_is_right_for_the_next(evaluates_first: bool, forms: list[str]) -> None:
    """The same name, type and shape each time; other values, from another library or in another form of memory."""
    state: dict[str, Any] = {}
    expected: dict[int, torch.Tensor] = {}
    storage = MemoryStorage()
    with hf.CheckpointManager(storage, hf.Checkpoint(state=state)) as manager:
        for step, form in enumerate(forms, start=1):
            with torch.inference_mode(evaluates_first and step == 1):
                expected[step] = torch.rand(30, 40)
                state["values"] = FORMS[form](expected[step].clone())
                state["truth"] = (expected[step] > 0.5).t()
                manager.save(step).wait_committed()
    for step, values in expected.items():
        again = {"values": torch.zeros(30, 40), "truth": torch.zeros(40, 30, dtype=torch.bool)}
        with hf.CheckpointManager(storage, hf.Checkpoint(state=again)) as manager:
            manager.restore(step)
        assert torch.equal(torch.as_tensor(again["values"]), values)
        assert torch.equal(again["truth"], (values > 0.5).t())
