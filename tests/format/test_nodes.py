"""Trees of nodes: their values as text, and the paths of their parts."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.encoding import Encoder
from holdfast.format.nodes import count_values, describe, find_nodes, list_values
from holdfast.state.data.attributes import read_python


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (2.5, "2.5"),
        (float("nan"), "nan"),
        ("it's", '"it\'s"'),
        (1 << 80, "0x100000000000000000000"),
        (b"ab", "b'ab'"),
        ((1,), "(1,)"),
        ((1, (2.0, "x")), "(1, (2.0, 'x'))"),
        ([], "[]"),
        (list(range(10)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 2 more]"),
        ({"a": 1, "b": [2]}, "{'a': 1, 'b': [2]}"),
        ({1: "x", None: 2}, "{1: 'x', None: 2}"),
        (collections.OrderedDict(a=1), "OrderedDict({'a': 1})"),
        (collections.Counter("aab"), "Counter({'a': 2, 'b': 1})"),
        (collections.deque([1], 3), "deque([1])"),
        ({3}, "{3}"),
        (frozenset({3}), "frozenset({3})"),
        (slice(1, None), "slice(1, None, None)"),
        (1 + 2j, "(1+2j)"),
        (range(3), "range(0, 3)"),
        (datetime.date(2031, 4, 5), "datetime.date(2031, 4, 5)"),
        (Color.RED, f"{__name__}.Color.RED"),
        (Pair(1, "x"), f"{__name__}.Pair(left=1, right='x')"),
        (Settings(0.5, ["a"]), f"{__name__}.Settings(rate=0.5, names=['a'])"),
    ],
)
def test_a_value_reads_as_python_writes_it(value: Any, text: str) -> None:
    assert describe(Encoder().encode(value, "v")) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (random.Random(1).getstate(), "<state of a random generator of Python>"),
        (read_python(random.Random(1)), "<state of a random generator of Python>"),
        (["MT19937", b"x" * 2496, 1, 0, 0.0], "<state of a random generator of NumPy>"),
        (np.random.default_rng(1).bit_generator.state, "<state of a random generator of NumPy>"),
        (torch.Generator().get_state().numpy().tobytes(), "<state of a random generator of torch>"),
        (b"x" * 40, "<40 bytes>"),
        (b"\xff", "<1 bytes>"),
    ],
)
def test_unreadable_values_are_named(value: Any, text: str) -> None:
    assert describe(Encoder().encode(value, "v")) == text


def test_long_values_are_cut() -> None:
    assert len(describe("x" * 10_000)) < 300
    assert len(describe(Encoder().encode(b"x" * 10_000, "v"))) < 300
    assert len(describe(Encoder().encode(1 << 100_000, "v"))) < 300


def test_values_are_found_by_path() -> None:
    objects = {"o": Encoder().encode({"a/b": {1: [10, {"deep": (2, 3)}]}, "n": None}, "o")}
    assert dict(find_nodes(objects, lambda path: path == "o/a~1b/1/0")) == {"o/a~1b/1/0": 10}
    assert dict(find_nodes(objects, None)) == objects
    assert list(list_values("o", objects["o"])) == [
        ("o/a~1b/1/0", "10"),
        ("o/a~1b/1/1/deep", "(2, 3)"),
        ("o/n", "None"),
    ]
    assert count_values(objects["o"]) == 4


_ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_TAGS = st.sampled_from(
    (
        *("tuple", "dict", "OrderedDict", "object", "codec", "array", "numpy", "int", "bytes", "decimal", "fraction"),
        *("enum", "flag", "namedtuple", "dataclass", "set", "slice", "deque", "range", "datetime", "unknown"),
    )
)
_NODES = st.recursive(
    _ATOMS,
    lambda nodes: (
        st.lists(nodes, max_size=10)
        | st.dictionaries(st.text(), nodes, max_size=5)
        | st.fixed_dictionaries({"$": _TAGS | nodes, "v": nodes}, optional={"k": nodes})
    ),
    max_leaves=40,
)


@given(_NODES)
def test_any_stored_node_can_be_shown(node: Any) -> None:
    assert isinstance(describe(node), str)
    count_values(node)
    for path, text in list_values("root", node):
        assert path.startswith("root")
        assert text
    assert len(list(find_nodes({"root": node}, lambda path: path.endswith("1")))) >= 0
