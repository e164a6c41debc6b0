from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import fractions
import io
import json
import math
import pathlib
import struct
import sys
import types
import typing
import uuid
import zoneinfo
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import FormatError, UnsupportedValueError, UsageError
from holdfast.format.codecs import register_codec, register_type
from holdfast.format.decoding import REBUILDERS, UNFILLED, Decoder
from holdfast.format.encoding import MAX_DEPTH, Encoder
from holdfast.format.scalars import DECODERS
from repetitions import repeated


def encode_value(value: Any, path: str = "value") -> Any:
    return Encoder().encode(value, path)


def decode_value(node: Any, live: Any = UNFILLED) -> Any:
    return Decoder().decode(node, live)


def through_json(value: Any, live: Any = None) -> Any:
    text = json.dumps(encode_value(value), allow_nan=False)
    node = json.loads(text)
    return decode_value(node) if live is None else decode_value(node, live)


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same exact type throughout, nan bits and order of keys included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, np.generic):
        return bool(left.tobytes() == right.tobytes() and left.dtype == right.dtype)
    if isinstance(left, Decimal):
        return str(left) == str(right)
    if isinstance(left, collections.defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, collections.deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True) if len(left) == len(right) else [((0, 0), (1, 1))]
        return all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (set, frozenset)):
        rest = list(right)
        for element in left:
            for index, other in enumerate(rest):
                if same(element, other):
                    del rest[index]
                    break
            else:
                return False
        return not rest
    if isinstance(left, slice):
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, (datetime.datetime, datetime.time)):
        return (left, left.fold, repr(left.tzinfo)) == (right, right.fold, repr(right.tzinfo))
    return bool(left == right)


zones = (
    st.none()
    | st.just(datetime.UTC)
    | st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.text(),
    )
    | st.sampled_from([zoneinfo.ZoneInfo("Europe/Berlin"), zoneinfo.ZoneInfo("UTC")])
)
numpy_scalars = (
    st.sampled_from([np.bool_(True), np.longlong(3), np.str_("x"), np.bytes_(b"\0a"), np.datetime64("NaT")])
    | st.floats(width=32).map(np.float32)
    | st.floats().map(np.float64)
    | st.floats(width=16).map(np.float16)
    | st.integers(-128, 127).map(np.int8)
    | st.integers(0, 2**64 - 1).map(np.uint64)
    | st.complex_numbers().map(np.complex128)
    | st.integers(-(10**9), 10**9).map(lambda n: np.datetime64(n, "us"))
    | st.integers(-(10**9), 10**9).map(lambda n: np.timedelta64(n, ("s", 7)))
)
text = st.text(st.characters())
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | text
    | st.binary()
    | st.binary().map(bytearray)
    | st.complex_numbers()
    | st.builds(range, st.integers(), st.integers(), st.integers().filter(bool))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers())
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times(timezones=zones)
    | st.timedeltas()
    | zones
    | st.decimals()
    | st.fractions()
    | st.uuids()
    | text.filter(lambda s: "\0" not in s).map(pathlib.Path)
    | st.just(pathlib.PurePosixPath("a/b"))
    | st.just(pathlib.PureWindowsPath("c:\\b"))
    | numpy_scalars
)
hashable_scalars = scalars.filter(
    lambda v: not isinstance(v, (bytearray, slice)) and not (isinstance(v, Decimal) and v.is_snan())
)
keys = st.recursive(
    hashable_scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(text | keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda d: collections.defaultdict(list, d))
        | dicts.map(lambda d: collections.defaultdict(None, d))
        | st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
        | st.builds(collections.deque, lists, st.none() | st.integers(4, 9))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    )


values = st.recursive(scalars, containers, max_leaves=20)


@given(values)
@settings(max_examples=repeated(200, in_gate=50), deadline=None)
def test_any_tree_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    assert same(through_json(value), value)


@given(values)
@settings(max_examples=50, deadline=None)
def test_the_same_value_is_always_written_the_same_way(value: Any) -> None:
    again = through_json(value)
    assert json.dumps(encode_value(again), sort_keys=True) == json.dumps(encode_value(value), sort_keys=True)


tags = st.sampled_from([*DECODERS, "numpy", *REBUILDERS, "other"])
json_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
hints = st.sampled_from(["-ff", "7ff0000000000000", "AAAA", "1E+999999999999", "float64", "datetime64[ns]", "list"])
garbage = st.recursive(
    json_scalars | hints,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.fixed_dictionaries({"$": tags | json_scalars, "v": inner}, optional={"k": inner})
        | st.fixed_dictionaries({"$": tags}, optional={"v": inner, "k": inner, "z": inner})
    ),
    max_leaves=20,
)


@given(garbage)
@settings(max_examples=repeated(500, in_gate=100), deadline=None)
def test_any_json_is_decoded_or_refused_cleanly(node: Any) -> None:
    with suppress(FormatError, UnsupportedValueError):
        decode_value(node)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "other", "v": 1},
        {"$": "int", "v": "f" * 10**6},
        {"$": "int", "v": "1_0"},
        {"$": "int", "v": "zz"},
        {"$": "bytes", "v": "not base64!"},
        {"$": "bytes", "v": "é"},
        {"$": "decimal", "v": "1E+99999999999999999999"},
        {"$": "decimal", "v": "1" * 10**6},
        {"$": "fraction", "v": [1, 0]},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0, True, 1]},
        {"$": "range", "v": [0, 1]},
        {"$": "slice", "v": [0, 1]},
        {"$": "deque", "k": 1, "v": [1, 2]},
        {"$": "deque", "k": {"$": "int", "v": "f" * 40}, "v": []},
        {"$": "set", "v": [1, 1]},
        {"$": "set", "v": [[1]]},
        {"$": "dict", "v": [[1, 2], [1, 3]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "dict", "v": [[1]]},
        {"$": "defaultdict", "k": "system", "v": []},
        {"$": "numpy", "k": "object_", "v": "AAAA"},
        {"$": "numpy", "k": "load", "v": "AAAA"},
        {"$": "numpy", "k": "float64", "v": "AAAA"},
        {"$": "datetime", "v": [0, 0, 0, 0, 0, 0, 0, 0, None]},
        {"$": "float", "v": "ff"},
        {"$": "tuple", "k": 1, "v": []},
        {"$": "array", "k": "numpy", "v": "a"},
        {"$": "object", "k": "rng", "v": {}},
        {"$x": 1},
        {"$": "str", "v": "/w=="},
        {"$": {}, "v": 1},
        {"$": "int", "v": 1, "z": 1},
    ],
)
def test_what_no_encoder_writes_is_refused(node: Any) -> None:
    with pytest.raises(FormatError):
        decode_value(node)


@pytest.mark.parametrize(
    "key", ["", "Nowhere/Town", "../zoneinfo/UTC", "/usr/share/zoneinfo/UTC", "Europe", "os.path", "UTC\0", "é"]
)
def test_only_time_zones_of_this_machine_are_looked_for(key: str) -> None:
    modules = set(sys.modules)
    moment = encode_value(datetime.datetime(2024, 2, 29, tzinfo=zoneinfo.ZoneInfo("UTC")))
    for node in ({"$": "zoneinfo", "v": key}, {**moment, "v": [*moment["v"][:-1], key]}):
        with pytest.raises(UnsupportedValueError) as caught:
            decode_value(node)
        assert f"the time zone {key!r}, which this machine does not have, cannot be restored" in str(caught.value)
        assert "tzdata" in caught.value.hint
    assert not [name for name in set(sys.modules) - modules if name.startswith(("tzdata.", "os."))]


def test_time_zone_that_cannot_be_rebuilt_is_refused_with_a_hint() -> None:
    file = next(path for directory in zoneinfo.TZPATH if (path := pathlib.Path(directory, "UTC")).is_file())
    without_key, of_its_own = (
        zoneinfo.ZoneInfo.from_file(io.BytesIO(file.read_bytes()), key=key) for key in (None, "My/Own")
    )
    for zone, hint in ((without_key, "ZoneInfo(key)"), (of_its_own, "tzdata")):
        for value in (zone, datetime.time(tzinfo=zone)):
            with pytest.raises(UnsupportedValueError) as caught:
                encode_value(value)
            assert hint in caught.value.hint
    with pytest.raises(UnsupportedValueError) as caught:
        encode_value(datetime.time(tzinfo=typing.cast(Any, type("Zone", (datetime.tzinfo,), {}))()))
    assert "in UTC" in caught.value.hint


def test_hostile_nesting_is_refused() -> None:
    node: Any = 1
    for _ in range(100_000):
        node = [node]
    with pytest.raises(FormatError, match="nested more than"):
        decode_value(node)


def test_a_huge_range_takes_no_memory() -> None:
    assert decode_value({"$": "range", "v": [0, 2**62, 1]}) == range(2**62)


def test_the_deepest_tree_comes_back_and_a_deeper_one_is_refused() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH + 1):
        value = {1: value}
    assert through_json(value) == value
    with pytest.raises(UnsupportedValueError, match="nested more than"):
        encode_value([value])


def test_cycles_are_refused() -> None:
    value: list[Any] = []
    value.append({"again": (value,)})
    with pytest.raises(UnsupportedValueError, match="contains itself") as caught:
        encode_value(value, "root")
    assert caught.value.path == "root/0/again/0"


def test_part_that_is_contained_twice_is_not_a_cycle() -> None:
    part = [1]
    assert through_json([part, part]) == [[1], [1]]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [object()]}, "v/a/0"),
        ({"a/b": {1: print}}, "v/a~1b/1"),
        (collections.defaultdict(lambda: 1), "v"),
        ({(1, 2): type}, "v/(1, 2)"),
        ([2 ** (5 * 65536)], "v/0"),
        (np.longdouble(1), "v"),
        (datetime.time(tzinfo=typing.cast(Any, type("Zone", (datetime.tzinfo,), {}))()), "v"),
    ],
)
def test_what_has_no_codec_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode_value(value, "v")
    assert caught.value.path == path
    assert caught.value.hint


def test_subclasses_are_not_taken_for_their_ancestors() -> None:
    class Name(str):
        pass

    class Settings(dict[str, int]):
        pass

    for value in (Name("x"), Settings(a=1)):
        with pytest.raises(UnsupportedValueError):
            encode_value(value)


@dataclasses.dataclass
class Point:
    x: float
    label: str = ""
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Point
    size: tuple[int, ...] = ()


class Pair(typing.NamedTuple):
    left: Any
    right: Any


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


def test_a_live_value_says_what_type_is_meant() -> None:
    value = [
        Point(math.inf, "é", ["a"]),
        Frozen(Point(1.0), (1, 2)),
        Pair(Color.RED, Level.HIGH),
        Rights.READ | Rights.WRITE,
    ]
    live = [Point(0.0), Frozen(Point(0.0)), Pair(Color.GREEN, Level.LOW), Rights.READ]
    back = through_json(value, live)
    assert back == value
    assert [type(part) for part in back] == [type(part) for part in value]
    assert type(back[2].right) is Level
    assert live[0] == Point(0.0)


def test_without_a_live_value_a_type_is_not_found_by_its_name() -> None:
    for value in (Point(1.0), Pair(1, 2), Color.RED, Rights.READ):
        with pytest.raises(UnsupportedValueError, match="not known in this process") as caught:
            through_json(value)
        cls = type(value)
        assert f"holdfast.register_type({cls.__qualname__}) before" in caught.value.hint
        assert f"the module {cls.__module__}" in caught.value.hint


def test_a_live_value_of_another_type_does_not_do() -> None:
    with pytest.raises(UnsupportedValueError, match="not known in this process"):
        through_json(Color.RED, Level.LOW)
    with pytest.raises(UnsupportedValueError, match="not known in this process"):
        decode_value({"$": "dataclass", "k": "os:system", "v": {}}, Point(1.0))


def test_registered_types_are_constructed_again() -> None:
    @register_type
    @dataclasses.dataclass
    class Registered:
        a: int
        b: Any = dataclasses.field(default=None, init=False)

    value = Registered(3)
    value.b = {"x": (1, 2)}
    back = through_json([value, value])
    assert back == [value, value]
    with pytest.raises(UsageError):
        register_type(int)


def test_a_renamed_type_is_found_under_its_old_name() -> None:
    node = encode_value(Point(1.0))
    node["k"] = "old.module:Place"
    register_type(Point, name="old.module:Place")
    assert decode_value(node) == Point(1.0)


def test_fields_that_changed_are_refused() -> None:
    node = encode_value(Point(1.0))
    node["v"]["gone"] = node["v"].pop("label")
    with pytest.raises(UnsupportedValueError, match="fields of the class have changed"):
        decode_value(node, Point(0.0))


class Version:
    def __init__(self, *parts: int) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


def test_a_codec_serves_its_type() -> None:
    node = encode_value({"none": None})
    with pytest.raises(UnsupportedValueError, match="register_codec"):
        encode_value(Version(1))
    register_codec(Version, tag="tests.Version", encode=lambda v: v.parts, decode=lambda parts: Version(*parts))
    value = {Version(1, 2): [Version(3)], "s": {Version(4)}}
    assert through_json(value) == value
    assert decode_value(node) == {"none": None}


@pytest.mark.parametrize("cls", [argparse.Namespace, types.SimpleNamespace])
def test_namespaces_have_codecs(cls: Any) -> None:
    value = {"args": cls(lr=0.1, path=pathlib.Path("a/b"), deep=[cls(x=(1, None))], when=datetime.date(2024, 2, 29))}
    assert through_json(value) == value
    # It may be called what `__init__` calls its own argument, or nothing at all.
    odd = cls()
    vars(odd).update({"self": 1, "": 2})
    assert through_json(odd) == odd


def test_live_keys_and_elements_say_what_types_are_meant() -> None:
    value = {"by": {Color.RED: 1, Level.HIGH: [2], ("x", 1): 3}, "seen": {Color.GREEN, Level.LOW}}
    live = {"by": {Color.GREEN: 0, Level.HIGH: 0}, "seen": {Color.RED, Level.HIGH}}
    back = through_json(value, live)
    assert back == value
    assert type(next(iter(back["by"]))) is Color
    with pytest.raises(UnsupportedValueError, match="not known in this process"):
        through_json(value, {"by": {Color.GREEN: 0}, "seen": live["seen"]})


def test_codecs_are_checked_when_they_are_registered() -> None:
    class Other:
        pass

    register_codec(Version, tag="tests.Version", encode=lambda v: v.parts, decode=lambda parts: Version(*parts))
    with pytest.raises(UsageError, match="belongs to"):
        register_codec(Other, tag="tests.Version", encode=id, decode=lambda _: Other())
    with pytest.raises(UsageError, match="as they are"):
        register_codec(int, tag="tests.int", encode=str, decode=int)
    with pytest.raises(UsageError, match="needs a tag"):
        register_codec(Other, tag="", encode=id, decode=lambda _: Other())


def test_a_codec_that_is_missing_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match="no codec with the tag 'theirs'"):
        decode_value({"$": "codec", "k": "theirs", "v": 1})


def test_a_codec_that_refuses_is_a_format_error() -> None:
    register_codec(Version, tag="tests.Version", encode=lambda v: v.parts, decode=lambda parts: Version(*parts))
    with pytest.raises(FormatError, match="rejected"):
        decode_value({"$": "codec", "k": "tests.Version", "v": 3})


def test_plain_values_are_plain_json() -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": {}}
    assert encode_value(value) == value


def test_what_is_encoded_is_taken_at_once() -> None:
    value: dict[str, Any] = {"a": [1], "b": bytearray(b"x")}
    node = encode_value(value)
    value["a"].append(2)
    value["b"][:] = b"y"
    assert decode_value(node) == {"a": [1], "b": bytearray(b"x")}


def test_uuid_and_fraction_examples() -> None:
    value = [uuid.UUID(int=5), fractions.Fraction(-3, 7), Decimal("sNaN123"), -0.0]
    assert same(through_json(value), value)
