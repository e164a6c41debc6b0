from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.checkpoint import Checkpoint
from holdfast.errors import ApplyError, FormatError, UnsupportedValueError, UsageError
from holdfast.format.codecs import register_type
from holdfast.format.encoding import MAX_VALUES
from holdfast.format.shapes import may_share_elements
from holdfast.state.adapters import StateAdapter
from holdfast.state.capture import capture_objects
from holdfast.state.leaves import ArraySpec
from holdfast.state.match.matching import match_objects
from holdfast.state.registry import register_adapter
from holdfast.state.rng import RNG, undisturbed
from holdfast.state.sharding import PerWorker
from repetitions import repeated
from state_trip import bring_back, match, store

DTYPES = ["?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "f8", "i8", "u8", "c8", ">f4", ">i8"]


class Counter:
    """A plain object with state."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.state = state


@given(
    hnp.arrays(st.sampled_from(DTYPES).map(np.dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
@settings(max_examples=100, deadline=None)
def test_any_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    live = np.empty_like(array)
    bring_back(store(a=array), {"a": live})
    assert live.tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_come_back_in_place() -> None:
    source = np.arange(24).reshape(4, 6)
    memory = np.zeros((6, 8), dtype=source.dtype)
    live = memory[::2, ::2].T
    bring_back(store(a=source[:, ::2].copy().T.T), {"a": live})
    assert (live == source[:, ::2]).all()
    assert memory.sum() == source[:, ::2].sum()
    stored = store(a=source[::-1, ::3])
    assert stored.data["a"] == source[::-1, ::3].tobytes()


def test_scalars_and_empty_arrays_come_back() -> None:
    objects = {"scalar": np.array(0.0), "empty": np.zeros((0, 3)), "many": [np.zeros((2, 0)), np.zeros((2, 0))]}
    stored = store(scalar=np.array(2.5), empty=np.ones((0, 3)), many=[np.zeros((2, 0)), np.zeros((2, 0))])
    assert len(stored.specs) == 4
    bring_back(stored, objects)
    assert objects["scalar"] == 2.5


def test_nested_trees_come_back_with_their_containers() -> None:
    @dataclasses.dataclass
    class Setup:
        rate: float
        table: np.ndarray[Any, Any]
        notes: dict[str, Any]

    def tree(n: int) -> dict[Any, Any]:
        return {
            "list": [np.full(2, n), (n, "x" * n), {"deep": np.full((1, 2), n)}],
            "setup": Setup(n / 2, np.full(3, n), {"k": [n]}),
            ("odd", 1): np.full(1, n),
            "queue": collections.deque([n], maxlen=3),
            "bytes": bytearray([n]),
            "set": {n},
        }

    live = tree(1)
    inner = [live["list"], live["list"][2], live["setup"], live["setup"].table, live["setup"].notes, live["queue"]]
    inner += [live["bytes"], live["set"], live["list"][0]]
    bring_back(store(tree=tree(7)), {"tree": live})
    expected = tree(7)
    assert [list(map(str, live["list"])), str(live["setup"])] == [
        list(map(str, expected["list"])),
        str(expected["setup"]),
    ]
    assert live[("odd", 1)] == 7
    now = [live["list"], live["list"][2], live["setup"], live["setup"].table, live["setup"].notes, live["queue"]]
    now += [live["bytes"], live["set"], live["list"][0]]
    assert all(left is right for left, right in zip(inner, now, strict=True))
    assert (live["queue"], live["bytes"], live["set"]) == (collections.deque([7]), bytearray([7]), {7})


def test_what_cannot_be_changed_comes_back_as_a_new_value() -> None:
    objects: dict[str, Any] = {"epoch": 0, "name": "", "pair": (1, [2]), "raw": b"", "none": 3, "frozen": np.zeros(2)}
    objects["frozen"].flags.writeable = False
    before = objects["pair"][1]
    bring_back(store(epoch=3, name="x", pair=(4, [5]), raw=b"ab", none=None, frozen=np.ones(2)), objects)
    assert objects["epoch"] == 3
    assert objects["pair"] == (4, [5])
    assert objects["pair"][1] is before
    assert (objects["name"], objects["raw"], objects["none"]) == ("x", b"ab", None)
    assert (objects["frozen"] == 1).all()


def test_a_container_in_two_places_gets_two_where_the_values_differ() -> None:
    @dataclasses.dataclass
    class Point:
        x: float

    array = np.zeros(1)
    pairs: list[tuple[Any, Any, Any]] = [
        ([0], [1], [2]),
        ({"n": [0]}, {"n": [1]}, {"n": [2]}),
        ({"a": 0, "b": 0}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({0}, {1}, {True}),
        (collections.deque([0]), collections.deque([1]), collections.deque([2])),
        (bytearray(b"0"), bytearray(b"1"), bytearray(b"2")),
        (Point(0), Point(0.0), Point(-0.0)),
        ([array], [array, 1], [array, 2]),
    ]
    for live, first, second in pairs:
        tree: dict[str, Any] = {"a": live, "b": (live,)}
        named: dict[str, Any] = {"a": copy.copy(live), "tree": tree}
        named["b"] = named["a"]
        bring_back(store(a=first, b=second, tree={"a": first, "b": (second,)}), named)
        assert tree["a"] is live
        for left, right in ((tree["a"], tree["b"][0]), (named["a"], named["b"])):
            assert left is not right
            assert (repr(left), repr(right)) == (repr(first), repr(second))


def test_a_container_in_two_places_stays_one_where_the_values_agree() -> None:
    @dataclasses.dataclass
    class Point:
        x: Any

    array = np.zeros(2)
    part = [{"n": (float("nan"), {1, "x"}, b"raw")}, Point(array), 10**5000, collections.deque([1], 3)]
    live: list[Any] = [{}, Point(array), 0, collections.deque(maxlen=3)]
    tree = {"a": live, "b": [live], "c": (live[0], live)}
    bring_back(store(tree={"a": part, "b": [part], "c": (part[0], part)}), {"tree": tree})
    assert tree["a"] is live
    assert tree["b"][0] is live
    assert tree["c"][0] is live[0]
    assert live[2] == 10**5000


def test_a_live_container_that_contains_itself_gets_what_is_stored() -> None:
    live: dict[str, Any] = {}
    live["self"] = live
    bring_back(store(x={"self": {"self": 3}}), {"x": live})
    assert live == {"self": {"self": 3}}


def test_values_are_those_of_the_moment() -> None:
    log = [1]
    captured = capture_objects({"log": log, "c": Counter(log=log)})
    log.append(2)
    assert captured.objects["log"] == [1]
    assert captured.objects["c"]["v"] == {"log": [1]}


def test_objects_are_prepared_before_any_state_is_read() -> None:
    calls: list[str] = []

    class Server(Counter):
        def prepare_for_checkpoint(self) -> None:
            calls.append("prepare")

        def state_dict(self) -> dict[str, Any]:
            calls.append("state")
            return {}

    class Bare:
        def prepare_for_checkpoint(self) -> None:
            calls.append("bare")

    @dataclasses.dataclass
    class Holder:
        server: Server

    bare = Bare()
    with pytest.raises(UnsupportedValueError) as caught:
        store(a=Server(), b=[{"x": (Holder(Server()),)}], c={"bare": bare})
    assert calls == ["prepare", "prepare", "bare", "state", "state"]
    assert caught.value.path == "c/bare"


def test_stateful_objects_within_trees_are_loaded() -> None:
    live = {"a": [Counter(n=0)], "b": (Counter(n=1),)}
    objects: dict[str, Any] = {"all": live}
    bring_back(store(all={"a": [Counter(n=5)], "b": (Counter(n=6),)}), objects)
    assert objects["all"] is live
    assert live["a"][0].state == {"n": 5}
    assert live["b"][0].state == {"n": 6}


def test_shared_arrays_are_stored_once_and_shared_again() -> None:
    array = np.arange(3.0)
    stored = store(a=array, b={"x": array, "y": array[:]}, c=array[:2])
    assert sorted(stored.specs) == ["a", "c"]
    live = np.zeros(3)
    objects: dict[str, Any] = {"a": live, "b": {"x": live, "y": live}, "c": np.zeros(2)}
    matching = match(stored, objects)
    assert [target.copies for target in matching.targets] == [(), ()]
    bring_back(stored, objects)
    assert live.tolist() == [0, 1, 2]
    fresh: dict[str, Any] = {"a": None, "b": {}, "c": None}
    bring_back(stored, fresh)
    assert fresh["b"]["x"] is fresh["b"]["y"]
    assert fresh["a"] is fresh["b"]["x"]


def test_arrays_that_were_shared_fill_live_ones_that_are_not() -> None:
    array = np.arange(3.0)
    objects: dict[str, Any] = {"a": np.zeros(3), "b": [np.zeros(3)], "c": Counter(x=np.zeros(3))}
    bring_back(store(a=array, b=[array], c=Counter(x=array)), objects)
    assert objects["a"].tolist() == objects["b"][0].tolist() == objects["c"].state["x"].tolist() == [0, 1, 2]


def test_arrays_that_were_apart_do_not_fit_live_ones_that_are_shared() -> None:
    live = np.zeros(3)
    matching = match(store(a=np.ones(3), b=np.ones(3)), {"a": live, "b": live})
    assert matching.differences.wrong_kind == ["b: stored separately from a, but the live arrays share memory"]


def test_an_object_with_state_gets_arrays_of_its_own() -> None:
    shared = np.zeros(3)
    objects: dict[str, Any] = {"a": shared, "c": Counter(best=shared)}
    bring_back(store(a=np.ones(3), c=Counter(best=np.full(3, 2.0))), objects)
    assert shared.tolist() == [1, 1, 1]
    assert objects["c"].state["best"].tolist() == [2, 2, 2]


def test_differences_are_collected_and_nothing_is_changed() -> None:
    @dataclasses.dataclass
    class Then:
        a: int = 1
        gone: int = 2

    @dataclasses.dataclass
    class Now:
        a: int = 1
        new: int = 2

    class Mode(enum.Enum):
        FAST = 1

    Then.__qualname__ = Now.__qualname__ = "Same"
    Mode.__qualname__ = "Mode"
    stored = store(
        w=np.ones((4, 2)),
        b=np.ones(4),
        tree={"h": np.ones(2)},
        gone=Counter(),
        kind=Counter(),
        record=Then(),
        number=3.0,
        mode=Mode.FAST,
    )
    live: dict[str, Any] = {
        "w": np.zeros((4, 3)),
        "b": np.zeros(4, np.float32),
        "tree": {"h": np.zeros(2)},
        "added": 2,
        "kind": 5,
        "record": Now(),
        "number": np.zeros(1),
        "mode": "fast",
    }
    before = copy.deepcopy(live)
    differences = match(stored, live).differences
    assert sorted(differences.missing) == ["added", "record/new"]
    assert sorted(differences.extra) == ["gone", "record/gone"]
    assert differences.wrong_shape == ["w: stored [4, 2], live [4, 3]"]
    assert differences.wrong_dtype == ["b: stored F64, live F32"]
    assert sorted(differences.wrong_kind) == [
        "kind: stored the state of an object (state_dict), live a int",
        "mode: stored a Mode, live a str (holdfast.register_type(Mode) accepts the stored type)",
        "number: stored a plain value, live a ndarray",
    ]
    assert str(live) == str(before)

    # What fits is restored all the same; the rest stays.
    bring_back(stored, live, strict=False)
    assert live["tree"]["h"].tolist() == [1, 1]
    assert live["w"].shape == (4, 3)
    assert live["kind"] == 5


def test_plain_values_in_trees_are_data() -> None:
    live: dict[str, Any] = {"log": [1, 2, 3], "best": float("inf"), "gone": 1, "none": None}
    bring_back(store(d={"log": ["a"], "best": np.array(0.5), "more": {"x": 1}, "none": np.ones(2)}), {"d": live})
    assert live["log"] == ["a"]
    assert live["best"] == 0.5
    assert live["more"] == {"x": 1}
    assert "gone" not in live
    assert live["none"].tolist() == [1, 1]


def test_empty_containers_accept_arrays() -> None:
    live: dict[str, Any] = {}
    bring_back(store(d={"a": np.ones(2), "b": [np.zeros(1)]}), {"d": live})
    assert live["a"].tolist() == [1, 1]
    counter = Counter(seen=[], best=None)
    bring_back(store(c=Counter(seen=[np.ones(1)] * 2, best=np.ones(3))), {"c": counter})
    assert len(counter.state["seen"]) == 2
    # And back to what had not been filled yet.
    bring_back(store(c=Counter(seen=[], best=None)), {"c": counter})
    assert counter.state == {"seen": [], "best": None}


def test_one_object_alone_is_restored() -> None:
    stored = store(a=Counter(n=1), b=Counter(n=2), c=3)
    objects: dict[str, Any] = {"a": Counter(n=0), "b": Counter(n=0), "new": 1}
    bring_back(stored, objects, lambda path: path == "b")
    assert objects["a"].loads == 0
    assert objects["b"].state == {"n": 2}


def test_a_part_of_a_tree_alone_is_restored() -> None:
    stored = store(d={"a": np.ones(2), "b": np.ones(2), "n": 5, "deep": {"x": 1, "y": 2}, "only": 1})
    live: dict[str, Any] = {"a": np.zeros(2), "b": np.zeros(2), "n": 0, "deep": {"x": 0, "y": 0, "z": 0}, "own": 1}
    bring_back(stored, {"d": live}, lambda path: path in ("d/a", "d/deep/y"))
    assert live["a"].tolist() == [1, 1]
    assert live["b"].tolist() == [0, 0]
    assert live["deep"] == {"x": 0, "y": 2, "z": 0}
    assert (live["n"], live["own"], "only" in live) == (0, 1, False)


def test_a_part_of_an_object_is_merged_into_its_state() -> None:
    stored = store(c=Counter(a=np.ones(2), b={"x": 1, "y": 2}), other=Counter(a=1))
    live, other = Counter(a=np.zeros(2), b={"x": 0, "y": 0}), Counter(a=0)
    bring_back(stored, {"c": live, "other": other}, lambda path: path == "c/b/x")
    assert live.state["b"] == {"x": 1, "y": 0}
    assert live.state["a"].tolist() == [0, 0]
    assert (live.loads, other.loads) == (1, 0)


def test_a_part_that_is_missing_is_a_difference() -> None:
    stored = store(d={"a": np.ones(2)})
    live: dict[str, Any] = {"a": np.ones(3), "b": np.zeros(2), "c": np.zeros(2)}
    differences = match(stored, {"d": live}, lambda path: path == "d/b").differences
    assert (differences.missing, differences.wrong_shape) == (["d/b"], [])


def test_to_select_nothing_changes_nothing() -> None:
    matching = match(store(a=1, b={"w": np.ones(2)}), {"a": 2, "b": {"w": np.zeros(2)}}, lambda path: path == "c")
    assert not matching.differences
    assert matching.targets == ()
    assert matching.apply() == {}


def test_values_that_contain_themselves_are_refused_at_once() -> None:
    nodes: list[dict[str, Any]] = [{"v": i} for i in range(100)]
    for left, right in itertools.pairwise(nodes):
        left["next"], right["previous"] = right, left
    with pytest.raises(UnsupportedValueError, match="contains itself") as caught:
        capture_objects({"nodes": nodes})
    assert caught.value.path == "nodes/0/next/previous"


@pytest.mark.parametrize("join", [list, tuple, dict, Counter], ids=lambda join: join.__name__)
def test_parts_that_are_shared_too_often_are_refused_at_once(join: Callable[..., Any]) -> None:
    make: dict[Any, Callable[[Any], Any]] = {
        dict: lambda part: {"left": part, 1: part},
        Counter: lambda part: Counter(left=part, right=part),
    }
    value: Any = 0
    for _ in range(30):
        value = make.get(join, lambda part: join([part, part]))(value)
    with pytest.raises(UnsupportedValueError, match="share less"):
        capture_objects({"x": value})


def test_parts_that_are_shared_come_back() -> None:
    part = {"numbers": [1, (2, 3)], "array": np.ones(2)}
    tree = {"a": [part, part], "b": part, "deep": [[[part]]]}
    live: dict[str, Any] = {"x": None}
    bring_back(store(x=tree), live)
    assert str(live["x"]) == str(tree)


def test_reused_container_gives_each_object_its_own_state() -> None:
    template: dict[str, Any] = {"inner": {}}

    class Frugal(Counter):
        def state_dict(self) -> dict[str, Any]:
            template["inner"].update(self.state)
            return template

    captured = capture_objects({"a": [Frugal(n=1), Frugal(n=2)]})
    assert [node["v"]["inner"]["n"] for node in captured.objects["a"]] == [1, 2]


def test_more_values_than_can_be_written_are_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="Store arrays") as caught:
        capture_objects({"few": [1], "x": {"many": [0] * MAX_VALUES}})
    assert caught.value.path == "x/many"


def test_live_values_that_contain_themselves_are_looked_through_once() -> None:
    first: dict[str, Any] = {"array": np.zeros(1)}
    nodes = [first]
    for _ in range(5000):
        nodes.append({"previous": nodes[-1]})
        nodes[-2]["next"] = nodes[-1]
    shared: Any = [np.zeros(1)]
    for _ in range(40):
        shared = [shared, shared]
    stored = store(x={"nodes": 1, "plain": 2})
    objects = {"x": {"nodes": nodes, "plain": 0, "shared": shared, "more": first}}
    bring_back(stored, objects)
    assert objects == {"x": {"nodes": 1, "plain": 2}}
    first["object"] = Counter()
    differences = match(stored, {"x": {"nodes": nodes, "plain": 0, "shared": shared, "more": first}}).differences
    assert differences.wrong_kind == ["x/nodes: stored a plain value, live a list"]
    assert differences.missing == ["x/more/object"]
    plain: dict[str, Any] = {}
    plain["self"] = [plain]
    objects = {"x": plain}
    bring_back(store(x={"self": 3}), objects)
    assert objects == {"x": {"self": 3}}


def _repeated() -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))


def _rolling() -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(5), (2, 4), (8, 8))


@pytest.mark.parametrize("make", [_repeated, _rolling])
def test_arrays_whose_elements_share_memory_are_replaced(make: Callable[[], Any]) -> None:
    live = make()
    values = np.arange(live.size, dtype=float).reshape(live.shape)
    objects: dict[str, Any] = {"named": live, "tree": {"a": live, "b": (live,)}, "c": Counter(a=live)}
    bring_back(store(named=values, tree={"a": values + 1, "b": (values + 2,)}, c=Counter(a=values + 3)), objects)
    tree = objects["tree"]
    found = [objects["named"], tree["a"], tree["b"][0], objects["c"].state["a"]]
    assert [array.tolist() for array in found] == [(values + n).tolist() for n in range(4)]
    assert not live.any()


@given(hnp.array_shapes(max_dims=4, max_side=4), st.data())
@settings(max_examples=repeated(200, in_gate=50), deadline=None)
def test_views_are_known_to_have_elements_of_their_own(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = np.zeros(shape)
    view = array.transpose(data.draw(st.permutations(range(array.ndim))))
    steps = [slice(None, None, data.draw(st.sampled_from([1, 2, 3, -1, -2]))) for _ in shape]
    view = view[tuple(steps)]
    assert not may_share_elements(view.shape, view.strides)
    strides = tuple(data.draw(st.lists(st.integers(-6, 6), min_size=len(shape), max_size=len(shape))))
    places = {
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    }
    assert may_share_elements(shape, strides) or len(places) == array.size


def test_keys_with_the_same_path_have_leaves_of_their_own() -> None:
    tree = {1: np.full(1, 1.0), "1": np.full(1, 2.0), "a/b": np.full(1, 3.0), "a": {"b": np.full(1, 4.0)}}
    stored = store(t=tree, **{"x~y": np.full(1, 5.0)})
    assert sorted(stored.specs) == ["t/1", "t/1~2", "t/a/b", "t/a~1b", "x~0y"]
    live: dict[Any, Any] = {}
    objects: dict[str, Any] = {"t": live, "x~y": np.zeros(1)}
    bring_back(stored, objects)
    assert [float(live[1][0]), float(live["1"][0]), float(live["a/b"][0]), float(live["a"]["b"][0])] == [1, 2, 3, 4]
    assert objects["x~y"] == 5


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["a"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1, 2], [True, False]),
    ],
)
def test_arrays_that_cannot_be_stored_are_refused(array: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        store(x={"y": array})
    assert caught.value.path == "x/y"
    assert caught.value.hint


def test_state_that_cannot_be_read_or_taken_is_named() -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state")

    class Stubborn(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no thanks")

    with pytest.raises(UnsupportedValueError, match="no state"):
        store(x=[Broken()])
    with pytest.raises(UsageError, match="no state"):
        match(store(x=Counter(n=np.ones(1))), {"x": Broken()})
    with pytest.raises(ApplyError, match="no thanks"):
        bring_back(store(x=Counter(a=1)), {"x": Stubborn()})


def test_state_that_holds_its_own_object_is_refused() -> None:
    counter = Counter()
    counter.state["me"] = [counter]
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        store(c=counter)


def test_hostile_skeletons_are_refused() -> None:
    spec = {"a": ArraySpec("F32", (2,))}
    for skeleton in (
        {"$": "array", "k": "numpy", "v": "b"},
        {"$": "array", "v": "a"},
        {"$": "object", "v": {}},
        {"$": "tuple", "v": {}},
        {"x": {"$": "dict", "v": [[{"$": "array", "k": "numpy", "v": "a"}, 1]]}},
        {"x": {"$": "set", "v": [{"$": "object", "k": "rng", "v": {}}]}},
    ):
        with pytest.raises(FormatError):
            match_objects({"x": {}}, {"x": skeleton}, spec)
    with pytest.raises(UsageError, match="not imported"):
        match_objects({"x": {}}, {"x": [{"$": "array", "k": "os", "v": "a"}]}, spec)


def test_an_adapter_of_two_functions_is_enough() -> None:
    class Thing:
        value = 0

    def write(thing: Thing, state: int) -> None:
        thing.value = state

    register_adapter(Thing, StateAdapter("tests.thing", lambda thing: thing.value, write))
    source, live = Thing(), Thing()
    source.value = 4
    bring_back(store(x=source), {"x": live})
    assert live.value == 4
    assert match(store(x=source), {"x": Counter()}).differences.wrong_kind


class Transition(NamedTuple):
    state: Any
    action: int
    following: Any


def of_rows(number: int) -> dict[str, Any]:
    """What programs keep in a replay buffer, each kind by name."""
    state = np.full(3, number, np.float32)
    return {
        "tuples": (state, number, 0.5 * number, number % 2 == 0),
        "named": Transition(state.copy(), number, None if number % 3 == 0 else np.arange(number % 5)),
        "dicts": {"s": state[::2], "a": np.int64(number), "r": float("nan") if number == 7 else -0.0, "text": "é"},
        "lists": [state.astype(">f4"), 1 << (number * 2), b"x"],
        "nested": ((state,), [number, None], {"a": state[:0]}),
        "unlike": (number,) * (number % 2 + 1),
        "scalars": number - 20.5,
        "arrays": state,
        "odd keys": {number % 2: state, "$": 1},
    }


@pytest.mark.parametrize("kind", of_rows(0))
@pytest.mark.parametrize("container", [collections.deque, list, tuple])
def test_long_sequences_are_stored_like_short_ones(kind: str, container: Any) -> None:
    register_type(Transition)
    rows = [of_rows(number)[kind] for number in range(40)]
    stored = store(x=container(rows))
    nodes = stored.objects["x"] if container is list else stored.objects["x"]["v"]
    for number, (row, node) in enumerate(zip(rows, nodes, strict=True)):
        alone = json.dumps(store(x=[row]).objects["x"][0]).replace('"x/0', f'"x/{number}')
        assert json.dumps(node) == alone
    live: dict[str, Any] = {"x": container()}
    bring_back(stored, live)
    assert type(live["x"]) is container
    for row, restored in zip(rows, live["x"], strict=True):
        assert repr(restored) == repr(row).replace("dtype='>f4'", "dtype=float32")


def test_arrays_of_long_sequences_stay_one_where_they_are_one() -> None:
    states = [np.full(2, float(number)) for number in range(41)]
    buffer = collections.deque((states[number], number, states[number + 1]) for number in range(40))
    stored = store(first=[states[3]], buffer=buffer, last={"state": states[40]}, own=PerWorker(collections.deque()))
    assert len(stored.specs) == 41
    live: dict[str, Any] = {"first": [], "buffer": collections.deque(), "last": {}}
    live["own"] = PerWorker(collections.deque())
    bring_back(stored, live)
    assert all(one[2] is two[0] for one, two in itertools.pairwise(live["buffer"]))
    assert live["buffer"][3][0] is live["first"][0]
    assert live["buffer"][39][2] is live["last"]["state"]


def test_random_generators_come_back() -> None:
    def draw(generators: dict[str, Any]) -> list[Any]:
        return [
            random.random(),
            np.random.standard_normal(3).tolist(),
            generators["own"].gauss(0, 1),
            *(generators[name].standard_normal(3).tolist() for name in ("pcg", "mt", "philox", "legacy")),
        ]

    def generators() -> dict[str, Any]:
        return {
            "rng": RNG(),
            "own": random.Random(1),
            "pcg": np.random.default_rng(1),
            "mt": np.random.Generator(np.random.MT19937(1)),
            "philox": np.random.Generator(np.random.Philox(1)),
            "legacy": np.random.RandomState(1),
        }

    first = generators()
    np.random.standard_normal(1)
    draw(first)
    stored = store(**first)
    expected = draw(first)
    second = generators()
    objects = dict(second)
    bring_back(stored, objects)
    assert draw(second) == expected
    assert all(objects[name] is second[name] for name in second)


def test_generators_are_put_back_after_everything_else() -> None:
    class Shuffler(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            random.random()

    stored = store(rng=RNG(), shuffler=[Shuffler()])
    expected = random.random()
    bring_back(stored, {"rng": RNG(), "shuffler": [Shuffler()]})
    assert random.random() == expected


@pytest.mark.parametrize("wrap", [lambda objects: objects, lambda objects: {"all": objects, "own": PerWorker(objects)}])
def test_generators_are_read_after_everything_else(wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    class Drawing(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"drawn": random.random(), "normal": generator.standard_normal()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    generator = np.random.default_rng(1)
    stored = store(**wrap({"rng": RNG(), "own": generator, "zz": Drawing()}))
    expected = random.random(), generator.standard_normal()
    assert list(stored.objects) == list(wrap({"rng": 0, "own": 0, "zz": 0}))
    objects = wrap({"rng": RNG(), "own": generator, "zz": Drawing()})
    bring_back(stored, objects)
    assert (random.random(), generator.standard_normal()) == expected


def test_undisturbed_puts_generators_back() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = (random.random(), np.random.random())
    random.seed(3)
    np.random.seed(3)

    def draw_and_fail() -> None:
        with undisturbed():
            random.seed(9)
            np.random.random()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert (random.random(), np.random.random()) == expected


def test_a_damaged_generator_state_is_refused() -> None:
    for state in ([3, [1], None], {"a": 1}, 5):
        skeleton = {"$": "object", "k": "python.random", "v": state}
        matching = match_objects({"g": random.Random()}, {"g": skeleton}, {})
        with pytest.raises(ApplyError, match="g rejected"):
            matching.apply()


def test_a_generator_of_another_kind_is_a_difference() -> None:
    stored = store(g=np.random.Generator(np.random.MT19937(1)))
    assert match(stored, {"g": np.random.default_rng(1)}).differences


def test_two_threads_may_meet_the_first_array_of_a_library_at_once() -> None:
    program = """
import sys, threading
from importlib.machinery import PathFinder
import numpy as np
from holdfast.state.registry import backend_of

found = []
other = threading.Thread(target=lambda: found.append(backend_of(np.ones(1))))

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == "holdfast.state.numpy_arrays":
            execute = spec.loader.exec_module
            def exec_module(module):
                other.start()
                other.join(0.2)  # Amid the import, which the other thread has to wait for.
                execute(module)
            spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
found.append(backend_of(np.ones(1)))
other.join()
assert None not in found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_frameworks_are_not_imported() -> None:
    program = """
import sys
import holdfast.checkpoint, holdfast.state.match.matching, holdfast.state.capture, holdfast.state.rng
from holdfast.state.capture import capture_objects
captured = capture_objects({"a": [1, {"b": (2.5, "x")}], "rng": holdfast.state.rng.RNG()})
assert not captured.arrays
assert "numpy" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_fill_that_never_comes_changes_nothing() -> None:
    live: dict[str, Any] = {"a": np.zeros(2), "c": Counter(x=1)}
    matching = match(store(a=np.ones(2), c=Counter(x=2)), live)
    assert live["a"].tolist() == [0, 0]
    assert live["c"].loads == 0
    assert matching.targets[0].array is live["a"]


def test_a_checkpoint_names_objects() -> None:
    checkpoint = Checkpoint(model=1, objects=2, self=3, epoch=0)
    checkpoint.epoch += 1
    checkpoint["late"] = 4
    assert dict(checkpoint.objects) == {"model": 1, "objects": 2, "self": 3, "epoch": 1, "late": 4}
    assert (checkpoint.model, checkpoint["objects"], checkpoint.late) == (1, 2, 4)
    assert "late" in checkpoint
    assert list(checkpoint) == ["model", "objects", "self", "epoch", "late"]
    del checkpoint.late
    del checkpoint["self"]
    assert len(checkpoint) == 3
    assert "model=1" in repr(checkpoint)
    assert copy.copy(checkpoint).model == 1
    with pytest.raises(AttributeError, match="is an attribute of Checkpoint"):
        checkpoint.objects = 1  # type: ignore[misc, assignment]
    with pytest.raises(AttributeError, match="no object 'gone'"):
        _ = checkpoint.gone
    with pytest.raises(AttributeError):
        del checkpoint.gone
    with pytest.raises(KeyError, match="the names are: model"):
        checkpoint["gone"]


@pytest.mark.parametrize("name", ["", "a/b", "$a", "__metadata__", "a\nb", "\ud800", 3])
def test_names_that_cannot_be_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        Checkpoint()[name] = 1
