"""The arrays of a state that must be finite: parameters, and the state of optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from holdfast.format.digests import SPAN_BYTES, span_count
from holdfast.format.index import BoxRecord, Layout
from holdfast.state.leaves import ArrayBackend
from holdfast.state.registry import list_members
from holdfast.storage.digesting import FLOAT_MARKS, NONFINITE, has_nan

_SUFFIX: Final = re.compile(r"(?:~(?:[wb]\d+|[2-9]\d*))+$")
"""The end of a leaf's name that a capture adds to its path: for a second one of that path, one of a worker's own, or a
further box."""

_WHOLLY_TRAINED: Final = frozenset({"jax"})
"""Libraries whose arrays are in plain trees, so that nothing tells parameters from the rest."""


def list_trained(objects: Mapping[str, object]) -> frozenset[str]:
    """Returns the paths below which all that a state holds is computed by training."""
    return frozenset(
        f"{path}/{part}" if part else path
        for path, obj, adapter in list_members(objects)
        for part in adapter.list_trained(obj)
    )


class FloatTable:
    """The floating-point numbers of a data file that training computes. It is made when it is first asked for."""

    def __init__(
        self, layout: Layout, trained: frozenset[str], libraries: Mapping[str, ArrayBackend], boxes: Sequence[BoxRecord]
    ) -> None:
        self._layout, self._trained, self._libraries = layout, trained, libraries
        self._leaves = {box.name: box.leaf for box in boxes if box.leaf}

    @cached_property
    def marks(self) -> bytes:
        """For each span of the file, in order, that of `FLOAT_MARKS`; 0 for those that need not be finite."""
        marks = bytearray()
        for place in self._layout.places:
            mark = FLOAT_MARKS.get(place.dtype, 0) if self._is_trained(place.name) else 0
            marks.extend(bytes((mark,)) * span_count(place.end - place.begin, SPAN_BYTES))
        return bytes(marks)

    def find_nonfinite(self, marks: bytearray, image: memoryview) -> dict[str, bool]:
        """Returns the leaves that are not finite, from the mark that each span has got; True for one that has nan."""
        found, first = dict[str, bool](), 0
        for place in self._layout.places:
            last = first + span_count(place.end - place.begin, SPAN_BYTES)
            leaf = self._leaves.get(place.name, place.name)
            for span in range(first, last):
                if marks[span] == NONFINITE and not found.get(leaf):
                    begin = place.begin + (span - first) * SPAN_BYTES
                    found[leaf] = has_nan(self.marks[span], image[begin : min(begin + SPAN_BYTES, place.end)])
            first = last
        return found

    def _is_trained(self, name: str) -> bool:
        library = self._libraries.get(name)
        if library is not None and library.name in _WHOLLY_TRAINED:
            return True
        return not self._trained.isdisjoint(_list_ancestors(_SUFFIX.sub("", self._leaves.get(name, name))))


def _list_ancestors(path: str) -> Iterator[str]:
    """Yields a path, and the paths above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]
