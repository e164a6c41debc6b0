"""Which arrays of a source were one, where its format cannot say so: tied weights, such as a head and an embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.convert.input_arrays import IncomingArray, read_spans
from holdfast.format.digests import SPAN_BYTES
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.index import LeafRecord
from holdfast.format.scalars import Node

KEPT_APART: Final = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})
"""State of an optimizer for one parameter has these: nothing in it is ever one with another thing."""


def tie_equal(
    groups: Iterable[Mapping[str, Node]], leaves: Mapping[str, LeafRecord], arrays: Mapping[str, IncomingArray]
) -> None:
    """**Blocks.** Lets the nodes of arrays that are equal refer to the first of them.

    Two parameters that were trained apart do not have the same values, unless all of one value, as zeros. A live module
    whose parameters are two gets the values in both; one in which they are one would refuse two stored arrays.

    Args:
        groups: The nodes of arrays that stand in one dict.
        leaves: What was written, with digests.
        arrays: Where it came from.

    Raises:
        StorageError: If the source cannot be read.
    """
    for group in groups:
        first: dict[tuple[Any, ...], str] = {}
        for node in group.values():
            leaf = leaves[node["v"]]
            same = first.setdefault((leaf.dtype, leaf.shape, leaf.spans), leaf.name)
            if same != leaf.name and leaf.spans and not _is_constant(arrays[leaf.name]):
                node["v"] = same


def _is_constant(array: IncomingArray) -> bool:
    """Whether all elements of an array are the same bytes."""
    import numpy as np

    kind = f"V{ITEM_BYTES[array.dtype]}"
    element = b""
    for span in read_spans(array, SPAN_BYTES):
        element = element or bytes(span[: ITEM_BYTES[array.dtype]])
        if (np.frombuffer(span, kind) != np.frombuffer(element, kind)).any():
            return False
    return True
