"""Small tensors that are put together on their device, as far as the processor can stand in for one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.torch.tensors import GATHERED_BYTES, _gathered

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
    "large": lambda: torch.arange(float(_LARGE_SIDE**2)).reshape(_LARGE_SIDE, -1),
    "large conjugate": lambda: torch.full((_LARGE_SIDE, _LARGE_SIDE), 1 + 2j).conj(),
    "large transposed": lambda: torch.arange(float(_LARGE_SIDE**2)).reshape(_LARGE_SIDE, -1).t(),
}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = tensor.resolve_conj().resolve_neg().contiguous().clone(memory_format=torch.contiguous_format)
    return values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""


@given(st.lists(st.tuples(st.sampled_from(sorted(_VIEWS)), st.sampled_from([0, 0, 0, 64])), max_size=8))
def test_gathered_tensors_bring_the_same_bytes_to_the_same_places(drawn: list[tuple[str, int]]) -> None:
    items, end, expected = [], 0, bytearray(4 << 20)
    for name, gap_bytes in drawn:
        tensor, begin = _VIEWS[name](), end + gap_bytes
        items.append((tensor, begin))
        end = begin + tensor.nbytes
        expected[begin:end] = _bytes_of(tensor)
    found = bytearray(len(expected))
    for tensor, begin in _gathered(items):
        # torch resolves these on the host, where the transfer to it may still be under way.
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        found[begin : begin + tensor.nbytes] = _bytes_of(tensor)
    assert np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8))


def test_small_neighbours_come_as_one_and_large_ones_by_themselves() -> None:
    small, large = torch.ones(10), torch.ones(GATHERED_BYTES // 4 + 1)
    items = [(small, 0), (small, 40), (large, 80), (small, 80 + large.nbytes), (small, 200 + large.nbytes)]
    assert [begin for _, begin in _gathered(items)] == [0, 80, 80 + large.nbytes, 200 + large.nbytes]
