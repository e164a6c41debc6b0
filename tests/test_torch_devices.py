"""Copies of tensors of any form in one go, as far as the processor can stand in for a device."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.torch.tensors import TorchDevices, _sources

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
