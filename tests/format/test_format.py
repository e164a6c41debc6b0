"""The format: layouts that other readers open, records that cannot lie, and lines of generations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.format.digests import SPAN_BYTES, digest, seal, span_count
from holdfast.format.dtypes import ITEM_BYTES, MAX_ARRAY_BYTES, array_bytes, stored_form
from holdfast.format.index import ALIGNMENT_BYTES, Index, LeafRecord, plan_layout, round_up
from holdfast.format.index_checks import decode_index
from holdfast.format.names import (
    StepName,
    is_own_file,
    parse_generation_file,
    parse_step_directory,
)
from holdfast.format.records import Base, Manifest, WorkerRecord, choose_living, decode_base, decode_manifest, make_base

ARRAYS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda n: n != "__metadata__"),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda array: array[0],
)


@given(ARRAYS)
def test_any_layout_is_a_safetensors_file(arrays: list[tuple[str, str, tuple[int, ...]]]) -> None:
    layout = plan_layout(arrays, {"step": "3"})
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    for number, place in enumerate(layout.places):
        image[place.begin : place.end] = bytes([number + 1]) * (place.end - place.begin)
    read = dict(safetensors.deserialize(bytes(image)))
    assert set(read) == {name for name, _, _ in arrays}
    for number, place in enumerate(layout.places):
        dtype, shape = stored_form(place.dtype, place.shape)
        assert (read[place.name]["dtype"], read[place.name]["shape"]) == (dtype, list(shape))
        assert bytes(read[place.name]["data"]) == bytes([number + 1]) * (place.end - place.begin)


@given(ARRAYS)
def test_arrays_begin_on_a_block_and_each_is_aligned_to_its_elements(
    arrays: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    layout = plan_layout(arrays, {})
    assert len(layout.header) % ALIGNMENT_BYTES == 0
    assert round_up(layout.size_bytes) % ALIGNMENT_BYTES == 0
    assert 0 <= round_up(layout.size_bytes) - layout.size_bytes < ALIGNMENT_BYTES
    for place in layout.places:
        assert place.begin % ITEM_BYTES[place.dtype] == 0


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F32", (-1,)), ("F99", (1,)), ("F64", (MAX_ARRAY_BYTES,)), ("U8", (1 << 40, 1 << 40)), ("U8", (-1, 0))],
)
def test_impossible_arrays_have_no_size(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape|type"):
        array_bytes(dtype, shape)


def test_array_with_a_side_of_zero_has_no_bytes() -> None:
    assert array_bytes("F64", (1 << 60, 0)) == 0


@given(st.integers(0, 10**15), st.integers(1, 10**9), st.integers(1, 10**6))
def test_step_directories_are_parsed_back(step: int, generation: int, attempt: int) -> None:
    name = StepName(step, generation, attempt)
    assert parse_step_directory(name.directory) == name


@pytest.mark.parametrize(
    "name",
    [
        "step-5.g0001",
        "step-000000005.g1",
        "step-0000000005.g0001",
        "step-000000005.g0000",
        "step-000000005.g0001.a1",
        "step-000000005.g0001.a0",
        "step-000000005.g0001.a02",
        "step-00000000٥.g0001",
        "step-000000005.g0001\n",
        "step-000000005.g0001.bak",
        "xstep-000000005.g0001",
        "",
        "..",
    ],
)
def test_other_spellings_are_not_steps(name: str) -> None:
    assert parse_step_directory(name) is None


def test_only_own_files_are_own() -> None:
    own = (
        "manifest.json",
        "data-00000-of-00004.safetensors",
        "index-00003-of-00004.json",
        ".manifest.json.abc.tmp",
    )
    assert all(map(is_own_file, own))
    foreign = ("notes.txt", "manifest.json.bak", "data-0-of-4.safetensors", "../manifest.json", "events.jsonl", "")
    assert not any(map(is_own_file, foreign))
    assert parse_generation_file("0007.json") == 7
    assert parse_generation_file("0007.base.json") is None
    assert parse_generation_file("00007.json") is None


def make_index(**changes: Any) -> Index:
    index = Index(
        step=5,
        generation=1,
        attempt=1,
        rank=0,
        world_size=1,
        data_bytes=4096 + 24,
        header_bytes=4096,
        header_digest="0" * 32,
        span_bytes=SPAN_BYTES,
        leaves=(
            LeafRecord("a", "F64", (2,), 4096, 4112, "a" * 32),
            LeafRecord("b", "F32", (2, 1), 4112, 4120, "b" * 32),
        ),
        objects={"model": {"x": 1}},
    )
    return msgspec.structs.replace(index, **changes)


def test_an_index_comes_back() -> None:
    assert decode_index(seal(make_index()), path="i") == make_index()


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"span_bytes": 0},
        {"span_bytes": -1},
        {"header_bytes": 0},
        {"header_bytes": 1 << 40},
        {"header_digest": "zz"},
        {"data_bytes": 4096},
        {"data_bytes": 1 << 60},
        {"leaves": (LeafRecord("a", "F64", (2,), 4096, 4112, "a" * 32),) * 2, "data_bytes": 4128},
        {"leaves": (LeafRecord("a", "F64", (3,), 4096, 4112, "a" * 32),), "data_bytes": 4112},
        {"leaves": (LeafRecord("a", "F64", (2,), 0, 16, "a" * 32),), "data_bytes": 4112},
        {"leaves": (LeafRecord("a", "F64", (2,), -16, 0, "a" * 32),), "data_bytes": 4112},
        {"leaves": (LeafRecord("a", "F64", (-2,), 4096, 4080, "a" * 32),), "data_bytes": 4080},
        {"leaves": (LeafRecord("a", "F64", (2,), 4096, 4112, "a" * 31),), "data_bytes": 4112},
        {"leaves": (LeafRecord("a", "F64", (2,), 4096, 4112, "G" * 32),), "data_bytes": 4112},
        {"leaves": (LeafRecord("a", "F64", (1,) * 1000, 4096, 4104, "a" * 32),), "data_bytes": 4104},
        {"leaves": (LeafRecord("a", "U8", (1 << 62, 1 << 62), 4096, 4104, "a" * 32),), "data_bytes": 4104},
        {"leaves": (LeafRecord("a", "pickle", (2,), 4096, 4112, "a" * 32),), "data_bytes": 4112},
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        decode_index(seal(make_index(**changes)), path="i")


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        step=5,
        generation=1,
        attempt=1,
        token="t",
        committed_at_unix_seconds=1.5,
        workers=(WorkerRecord(10, "0" * 32, 20),),
        metrics={"loss": 0.25},
        metadata={"note": [1, None]},
        versions={"holdfast": "0"},
    )
    return msgspec.structs.replace(manifest, **changes)


def test_a_manifest_comes_back() -> None:
    data = seal(make_manifest())
    assert decode_manifest(data, path="m", expected=StepName(5, 1)) == make_manifest()
    assert decode_manifest(data, path="m", expected=None) == make_manifest()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 6},
        {"generation": 2},
        {"attempt": 2},
        {"workers": ()},
        {"workers": (WorkerRecord(-1, "0" * 32, 20),)},
        {"workers": (WorkerRecord(10, "../../etc/passwd", 20),)},
        {"features": ("time-travel",)},
    ],
)
def test_a_manifest_that_is_not_this_steps_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        decode_manifest(seal(make_manifest(**changes)), path="m", expected=StepName(5, 1))


@given(st.data())
def test_a_changed_byte_of_a_record_is_found(data: st.DataObject) -> None:
    sealed = bytearray(seal(make_manifest()))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_manifest(bytes(sealed), path="m", expected=None)
    except FormatError:
        return
    assert decoded == make_manifest(), "only a change that means the same may pass"


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_refused_cleanly(data: bytes) -> None:
    for decode in (decode_index, lambda data, path: decode_manifest(data, path=path, expected=None)):
        with pytest.raises(FormatError):
            decode(data, path="x")


@pytest.mark.parametrize("depth", [1000, 200_000])
def test_deep_nesting_is_refused_cleanly(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    envelope = b'{"holdfast":"index","version":1,"digest":"' + digest(nested).encode() + b'","body":' + nested + b"}"
    for data in (nested, envelope):
        with pytest.raises(FormatError):
            decode_index(data, path="x")


def test_a_record_of_another_kind_or_version_is_refused() -> None:
    with pytest.raises(FormatError, match="kind"):
        decode_index(seal(make_manifest()), path="x")
    newer = seal(make_manifest()).replace(b'"version":1', b'"version":2')
    with pytest.raises(FormatError, match="version 2"):
        decode_manifest(newer, path="x", expected=None)
    with pytest.raises(FormatError):
        decode_index(seal(make_manifest()).replace(b'"manifest"', b'"index"', 1), path="x")


@given(st.integers(0, 1 << 40))
def test_spans_cover_an_array_exactly(size_bytes: int) -> None:
    count = span_count(size_bytes, SPAN_BYTES)
    assert (count - 1) * SPAN_BYTES < size_bytes <= count * SPAN_BYTES or (count, size_bytes) == (0, 0)


def bases_of(*pairs: tuple[int, StepName | None]) -> dict[int, Base]:
    return {generation: make_base(generation, name) for generation, name in pairs}


def test_the_line_follows_the_bases_back() -> None:
    steps = [StepName(100, 1), StepName(200, 1), StepName(300, 1), StepName(400, 2), StepName(300, 3)]
    bases = bases_of((1, None), (2, StepName(300, 1)), (3, StepName(200, 1)))
    assert choose_living(steps, bases) == (StepName(100, 1), StepName(200, 1), StepName(300, 3))


def test_a_zombie_beyond_the_base_is_not_on_the_line() -> None:
    steps = [StepName(100, 1), StepName(500, 1), StepName(110, 2)]
    assert choose_living(steps, bases_of((1, None), (2, StepName(100, 1)))) == (StepName(100, 1), StepName(110, 2))


def test_zombie_that_replaces_the_base_does_not_change_the_lineage() -> None:
    steps = [StepName(100, 1), StepName(100, 1, 2)]
    assert choose_living(steps, bases_of((1, None), (2, StepName(100, 1)))) == (StepName(100, 1),)
    assert choose_living(steps, bases_of((1, None))) == (StepName(100, 1, 2),)


def test_generation_without_a_base_has_its_own_lineage() -> None:
    steps = [StepName(100, 1), StepName(10, 2)]
    assert choose_living(steps, bases_of((1, None), (2, None))) == (StepName(10, 2),)
    assert choose_living(steps[:1], bases_of((1, None), (2, None))) == ()
    # Going back to the first line on purpose makes it the living one.
    assert choose_living(steps, bases_of((1, None), (2, None), (3, StepName(100, 1)))) == (StepName(100, 1),)


def test_a_generation_without_a_record_of_its_base_loses_nothing() -> None:
    steps = [StepName(100, 1), StepName(200, 1), StepName(150, 3)]
    assert choose_living(steps, bases_of((1, None))) == (StepName(100, 1), StepName(150, 3))
    assert choose_living(steps[:2], bases_of((1, None))) == tuple(steps[:2])
    assert choose_living([StepName(7, 9)], {}) == (StepName(7, 9),)


def test_bases_round_trip_and_must_precede_their_generation() -> None:
    for name in (None, StepName(5, 2, 3)):
        base = make_base(4, name)
        assert decode_base(seal(base), path="b", generation=4) == base
        assert base.name == name
    for wrong in (
        make_base(4, StepName(5, 4)),
        make_base(5, None),
        Base(4, 5, None, None),
        make_base(4, StepName(-1, 1)),
    ):
        with pytest.raises(FormatError):
            decode_base(seal(wrong), path="b", generation=4)


@given(
    st.lists(st.builds(StepName, st.integers(0, 9), st.integers(1, 5), st.integers(1, 2)), unique=True),
    st.dictionaries(
        st.integers(1, 6), st.none() | st.builds(StepName, st.integers(0, 9), st.integers(1, 5), st.integers(1, 2))
    ),
)
def test_any_line_has_one_checkpoint_a_step_in_order(steps: list[StepName], pairs: dict[int, StepName | None]) -> None:
    bases = {
        generation: make_base(generation, name if name is None or name.generation < generation else None)
        for generation, name in pairs.items()
    }
    # What a generation saves lies beyond its base.
    steps = [
        name
        for name in steps
        if (base := bases.get(name.generation)) is None or base.step is None or name.step > base.step
    ]
    living = choose_living(steps, bases)
    assert set(living) <= set(steps)
    numbers = [name.step for name in living]
    assert numbers == sorted(set(numbers))
    # Along the line generations never go back: a later step is never of an older generation.
    assert [name.generation for name in living] == sorted(name.generation for name in living)


def test_after_a_lost_base_the_newest_attempt_of_an_earlier_step_counts() -> None:
    steps = [StepName(100, 1), StepName(100, 1, 2), StepName(200, 2)]
    bases = bases_of((1, None), (3, StepName(200, 2)))
    assert choose_living(steps, bases) == (StepName(100, 1, 2), StepName(200, 2))
