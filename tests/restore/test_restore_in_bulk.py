"""The quick ways of the restore, each held against the slow one that it stands for."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import DamageError, HoldfastError
from holdfast.format.decoding import Decoder
from holdfast.format.digests import DIGEST_CHARACTERS, digest
from holdfast.format.dtypes import ITEM_BYTES, MAX_ARRAY_BYTES
from holdfast.format.index import Index, LeafRecord
from holdfast.format.index_checks import find_leaf_problem
from holdfast.format.shapes import Box
from holdfast.integrations.torch.tensors import TorchBackend
from holdfast.restore.aliasing import find_overlapping
from holdfast.restore.read import (
    PIECE_BYTES,
    Destinations,
    Order,
    Piece,
    Share,
    open_pool,
    plan_pieces,
    read_orders,
)
from holdfast.restore.records import Part
from holdfast.state.adapters import HANDED_OVER, OWNED, REPLACED, Rules
from holdfast.state.leaves import ArrayBackend, Target, spec_of
from holdfast.state.match.compare import Comparison, ObjectLoading
from holdfast.state.match.targets import At
from holdfast.state.numpy_arrays import NumpyBackend
from holdfast.storage import MemoryStorage, Storage
from holdfast.storage.buffers import memory_between
from holdfast.storage.local import LocalStorage
from repetitions import repeated
from state_trip import Stored, store

HEADER_BYTES = 4096


def make_index(sizes: Sequence[int], span_bytes: int, content: bytes = b"") -> Index:
    """An index of arrays of bytes, with the digests of the content if there is one."""
    leaves = []
    begin = HEADER_BYTES
    for number, size_bytes in enumerate(sizes):
        spans = [
            digest(content[at : min(at + span_bytes, begin + size_bytes)]) if content else f"{number + at:032x}"
            for at in range(begin, begin + size_bytes, span_bytes)
        ]
        leaves.append(LeafRecord(f"leaf{number}", "U8", (size_bytes,), begin, begin + size_bytes, "".join(spans)))
        begin += size_bytes
    return Index(
        step=1,
        generation=1,
        attempt=1,
        rank=0,
        world_size=1,
        data_bytes=begin,
        header_bytes=HEADER_BYTES,
        header_digest="0" * 32,
        span_bytes=span_bytes,
        leaves=tuple(leaves),
        objects={},
    )


# The records of very many leaves.

ODD = st.sampled_from([-1, 0, 1, 4095, 4096, 4097, 1 << 20, 1 << 40, 1 << 62])
CHANGES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"begin": ODD}),
    st.fixed_dictionaries({"end": ODD}),
    st.fixed_dictionaries({"shape": st.lists(ODD, max_size=3).map(tuple) | st.just((1,) * 65)}),
    st.fixed_dictionaries({"dtype": st.sampled_from(["F64", "U8", "I8", "BOOL", "?", ""])}),
    st.fixed_dictionaries({"name": st.sampled_from(["leaf0", "leaf1", "", "new"])}),
    st.fixed_dictionaries({"spans": st.sampled_from(["", "0" * 31 + "g", "0" * 32, "0" * 64, "A" * 32, "é" * 32])}),
)


def are_sound(index: Index) -> bool:
    """The rules for leaves, one leaf and one rule at a time."""
    offset = index.header_bytes
    for leaf in index.leaves:
        if len(leaf.shape) > 64 or leaf.dtype not in ITEM_BYTES or any(length < 0 for length in leaf.shape):
            return False
        size_bytes = math.prod(leaf.shape, start=ITEM_BYTES[leaf.dtype])
        spans = math.ceil(size_bytes / index.span_bytes) if size_bytes <= MAX_ARRAY_BYTES else -1
        if len(leaf.spans) != 32 * spans or not set(leaf.spans) <= set("0123456789abcdef"):
            return False
        if (leaf.begin, leaf.end) != (offset, offset + size_bytes):
            return False
        offset = leaf.end
    return offset == index.data_bytes and len({leaf.name for leaf in index.leaves}) == len(index.leaves)


@given(
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(1, 2000),
    st.lists(st.tuples(st.integers(0, 5), CHANGES), max_size=2),
    st.sampled_from([0, 0, 0, 1, -1]),
)
@settings(max_examples=repeated(400, in_gate=80), deadline=None)
def test_leaves_are_accepted_only_if_each_is_sound(
    sizes: list[int], span_bytes: int, changes: list[tuple[int, dict[str, Any]]], over_bytes: int
) -> None:
    index = make_index(sizes, span_bytes)
    leaves = list(index.leaves)
    for number, change in changes:
        if number < len(leaves):
            leaves[number] = msgspec.structs.replace(leaves[number], **change)
    index = msgspec.structs.replace(index, leaves=tuple(leaves), data_bytes=index.data_bytes + over_bytes)
    assert (find_leaf_problem(index) == "") == are_sound(index)


# Which bytes are read.


@given(
    st.lists(st.sampled_from([0, 1, 100, 4096, 1 << 20, (1 << 20) + 5, 3 << 20, 9 << 20, 30 << 20]), max_size=12),
    st.sampled_from([4096, 1 << 20, 3 << 20, 64 << 20]),
    st.none() | st.sets(st.integers(0, 11).map(lambda number: f"leaf{number}")),
)
@settings(max_examples=repeated(200, in_gate=40), deadline=None)
def test_pieces_are_just_what_is_wanted(sizes: list[int], span_bytes: int, wanted: set[str] | None) -> None:
    index = make_index(sizes, span_bytes)
    spans = [
        (number, begin, min(begin + span_bytes, leaf.end), leaf.spans[DIGEST_CHARACTERS * place :][:DIGEST_CHARACTERS])
        for number, leaf in enumerate(index.leaves)
        if wanted is None or leaf.name in wanted
        for place, begin in enumerate(range(leaf.begin, leaf.end, span_bytes))
    ]
    numbers = (number for number, leaf in enumerate(index.leaves) if wanted is None or leaf.name in wanted)
    pieces = list(plan_pieces(index, numbers, {}))
    assert spans == [
        span for piece in pieces for span in zip(piece.leaves, piece.begins, piece.ends, piece.digests, strict=True)
    ]
    for piece in pieces:
        assert piece.ends[:-1] == piece.begins[1:], "there is a gap"
        assert piece.size_bytes <= PIECE_BYTES or len(piece.leaves) == 1
    for piece, following in itertools.pairwise(pieces):
        room_bytes = PIECE_BYTES - piece.size_bytes
        assert following.begin > piece.end or following.ends[0] - following.begin > room_bytes, "one read too many"


def test_spans_of_a_byte_take_no_memory_to_speak_of() -> None:
    index = make_index([3 << 17], 1)
    counts = [len(piece.leaves) for piece in plan_pieces(index, [0], {})]
    assert sum(counts) == 3 << 17
    assert max(counts) <= 1 << 12


# Live arrays, held against what is stored.

MEMORY = 24
NUMPY_DTYPES = ["f4", "i8", "u1", "?", "c8", ">f4", ">i2", "f2"]
TORCH_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]

ViewOf = Callable[[Any], Any]
VIEWS: dict[str, ViewOf] = {
    "whole": lambda memory: memory,
    "front": lambda memory: memory[:6],
    "rows": lambda memory: memory.reshape(4, 6),
    "columns": lambda memory: memory.reshape(4, 6).T,
    "steps": lambda memory: memory[::2],
    "middle": lambda memory: memory.reshape(4, 6)[1:3],
    "scalar": lambda memory: memory[3],
    "point": lambda memory: memory[3:4].reshape(()),
    "nothing": lambda memory: memory[:0],
    "no rows": lambda memory: memory[:0].reshape(0, 3),
    "row of one": lambda memory: memory[2:3].reshape(1, 1),
}


def make_numpy(dtype: str, view: str, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    if dtype == "?":
        memory: Any = generator.random(MEMORY) < 0.5
    else:
        memory = np.frombuffer(generator.bytes(MEMORY * np.dtype(dtype).itemsize), dtype).copy()
    array = VIEWS[view](memory)
    return array if isinstance(array, np.ndarray) else np.array(array)


def make_torch(dtype: torch.dtype, view: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 2 if dtype is torch.bool else 100, (MEMORY,), generator=generator).to(dtype)
    return VIEWS[view](memory)  # type: ignore[no-any-return]


@st.composite
def arrays(draw: st.DrawFn, seed: int) -> Any:
    view = draw(st.sampled_from(list(VIEWS)))
    if draw(st.booleans()):
        return make_numpy(draw(st.sampled_from(NUMPY_DTYPES)), view, seed)
    tensor = make_torch(draw(st.sampled_from(TORCH_DTYPES)), view, seed)
    kind = draw(st.sampled_from(["plain", "plain", "parameter", "conj", "neg", "inference"]))
    if kind == "parameter" and (tensor.is_floating_point() or tensor.is_complex()):
        return torch.nn.Parameter(tensor)
    if kind == "conj" and tensor.is_complex():
        return tensor.conj()
    if kind == "neg" and tensor.is_complex():
        return tensor.conj().imag
    if kind == "inference":
        with torch.inference_mode():
            return tensor.clone()
    return tensor


def raw(array: Any) -> bytes:
    """The bytes that are stored for an array."""
    if isinstance(array, torch.Tensor):
        plain = array.detach().clone().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


@st.composite
def containers(draw: st.DrawFn) -> tuple[Any, Any]:
    """A container of many arrays as it is stored, and a live one that is more or less like it."""
    count = draw(st.integers(16, 24))
    odd = draw(st.sets(st.integers(0, count - 1), max_size=3))
    stored: list[Any] = [make_torch(torch.float32, "whole", number) for number in range(count)]
    live: list[Any] = [torch.zeros(MEMORY) for _ in range(count)]
    if draw(st.booleans()):
        stored = [make_numpy("f4", "rows", number) for number in range(count)]
        live = [np.zeros((4, 6), np.float32) for _ in range(count)]
    for number in odd:
        what = draw(
            st.sampled_from(["another", "same", "shared", "value", "gone", "tree", "live another", "read-only"])
        )
        array = draw(arrays(number))
        if what == "another":
            stored[number] = array
        elif what == "same":
            stored[number], live[number] = array, draw(arrays(number))
        elif what == "other live":
            live[number] = array
        elif what == "shared":
            stored[number] = stored[0]
            live[number] = live[draw(st.sampled_from([0, number]))]
        elif what == "value":
            stored[number] = draw(st.sampled_from([None, 1, "text"]))
        elif what == "gone":
            live[number] = None
        elif what == "tree":
            stored[number] = {"a": array}
            live[number] = draw(st.sampled_from([None, {}, {"a": array}]))
        elif isinstance(live[number], np.ndarray):
            live[number].flags.writeable = False
    if draw(st.booleans()):
        return stored, live
    keys = [f"key{number}" for number in range(count)]
    others = [*keys[: draw(st.integers(count - 2, count))], "more"][:count]
    return dict(zip(keys, stored, strict=True)), dict(zip(others, live, strict=False))


class Singly(Comparison):
    """Takes each array by itself."""

    def parts(self, nodes: Any, lives: Any, path_of: Any, depth: int) -> Iterable[Any]:
        return Decoder.parts(self, nodes, lives, path_of, depth)


class Jointly(Comparison):
    """Fails where it would take an array by itself."""

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        raise AssertionError(path)


Decode = Callable[[Comparison, Stored, Any], Any]


def decode_all(comparison: Comparison, stored: Stored, live: Any) -> Any:
    """As a tree of values is matched."""
    return comparison.decode(stored.objects["all"], live, "all")


def compare(
    cls: type[Comparison], stored: Stored, live: Any, rules: Rules, decode: Decode = decode_all
) -> tuple[object, ...]:
    """All that comes of a comparison: arrays by their places in the live container, new ones by their form."""
    comparison = cls({"all": live}, stored.specs, None)
    comparison.at = At(rules)
    parts = list(live.values() if isinstance(live, dict) else live)
    parts += [inner for part in parts if isinstance(part, dict) for inner in part.values()]
    places = {id(part): place for place, part in enumerate(parts)}

    def known(value: Any) -> object:
        if isinstance(value, (np.ndarray, torch.Tensor)):
            return places.get(id(value), (type(value), value.shape))
        return {key: known(part) for key, part in value.items()} if isinstance(value, dict) else value

    try:
        value = decode(comparison, stored, live)
    except HoldfastError as error:
        return type(error), error.message
    targets = comparison.claims.targets()
    receivers = {}
    for target in targets:
        assert target.address == target.backend.address(target.array)
        # All of them get the bytes; which of them is filled from the file, and which from that one, is no matter.
        receivers[target.leaf] = sorted(
            str(known(array)) for array in (target.array, *(copy for _, copy in target.copies))
        )
    return (
        sorted(str(comparison.differences).splitlines()),
        [(key, known(part)) for key, part in (value.items() if isinstance(value, dict) else enumerate(value))],
        {target.leaf: (target.spec, target.backend.name, receivers[target.leaf]) for target in targets},
    )


@given(containers(), st.sampled_from([OWNED, HANDED_OVER, REPLACED]))
@settings(max_examples=repeated(300, in_gate=60), deadline=None)
def test_many_arrays_are_matched_as_each_is(pair: tuple[Any, Any], rules: Rules) -> None:
    stored, live = store(all=pair[0]), pair[1]
    assert compare(Comparison, stored, live, rules) == compare(Singly, stored, live, rules)


@st.composite
def states(draw: st.DrawFn) -> tuple[Any, Any]:
    """State as optimizers have it: for each parameter a dict of a few arrays, or one."""
    size = draw(st.integers(1, 3))

    def grouped(parts: list[Any]) -> dict[str, Any]:
        groups = [parts[at : at + size] for at in range(0, len(parts), size)]
        names = ["step", "mean", "square"]
        return {
            f"weight{number}": group[0] if number == lone else dict(zip(names, group, strict=False))
            for number, group in enumerate(groups)
        }

    lone = draw(st.sampled_from([None, 0, 2]))
    stored, live = draw(containers().filter(lambda pair: isinstance(pair[0], list)))
    present = grouped(live)
    for name in draw(st.sets(st.sampled_from(list(present)), max_size=1)):
        del present[name]
    return grouped(stored), present


def values_of_each(comparison: Comparison, stored: Stored, live: Any) -> Any:
    loading, rules = ObjectLoading(comparison, "all", 1), comparison.at.rules
    return {
        name: loading.value(node, live.get(name), name, rules=rules) for name, node in stored.objects["all"].items()
    }


def values_of_all(comparison: Comparison, stored: Stored, live: Any) -> Any:
    return ObjectLoading(comparison, "all", 1).values(stored.objects["all"], live, rules=comparison.at.rules)


@given(states(), st.sampled_from([OWNED, HANDED_OVER, REPLACED]))
@settings(max_examples=repeated(300, in_gate=60), deadline=None)
def test_the_parts_of_an_object_are_matched_as_each_is(pair: tuple[Any, Any], rules: Rules) -> None:
    stored, live = store(all=pair[0]), pair[1]
    together = compare(Comparison, stored, live, rules, values_of_all)
    assert together == compare(Singly, stored, live, rules, values_of_each)


def test_the_state_of_an_optimizer_is_found_together() -> None:
    state = {f"weight{number}": {"step": torch.zeros(()), "mean": torch.zeros(3)} for number in range(10)}
    stored = store(all=state)
    comparison = Jointly({"all": state}, stored.specs, None)
    values = ObjectLoading(comparison, "all", 1).values(stored.objects["all"], state, rules=REPLACED)
    assert all(values[name][key] is tensor for name, part in state.items() for key, tensor in part.items())
    assert values["weight0"] is not state["weight0"]


def test_many_plain_arrays_are_found_together() -> None:
    kinds: list[list[Any]] = [[torch.zeros(3) for _ in range(20)], [np.zeros(3) for _ in range(20)]]
    for live in kinds:
        live.append(live[0])  # Tied parameters are one array under two names.
        stored = store(all=live)
        comparison = Jointly({"all": live}, stored.specs, None)
        assert all(map(is_, comparison.decode(stored.objects["all"], live), live))
        assert len(comparison.claims.targets()) == 20


def each_described(array: Any) -> dict[str, Any]:
    """What an array is, said by its library."""
    is_torch = isinstance(array, torch.Tensor)
    if is_torch:
        is_contiguous, begin, size_bytes = array.is_contiguous(), array.data_ptr(), array.nbytes
        is_stored = is_contiguous and not array.is_conj() and not array.is_neg()
        values = array.detach().resolve_conj().resolve_neg()
        overlaps = any(one == 0 and length > 1 for one, length in zip(array.stride(), array.shape, strict=True))
        is_fillable, dtype = not overlaps, str(values.dtype)
    else:
        is_contiguous, begin, size_bytes = array.flags.c_contiguous, array.ctypes.data, array.nbytes
        is_stored = is_contiguous and array.dtype.newbyteorder("<") == array.dtype
        is_fillable, dtype = array.flags.writeable, array.dtype.name
    return {
        "shape": tuple(array.shape),
        "dtype": dtype,
        "address": begin if is_stored and size_bytes else 0,
        "fillable": is_fillable,
        "extent": (begin, begin + size_bytes) if size_bytes and is_contiguous else None,
    }


@given(st.lists(st.integers(0, 1000).flatmap(arrays), min_size=1, max_size=4))
@settings(max_examples=repeated(300, in_gate=60), deadline=None)
def test_arrays_are_described_together_as_each_is(mixed: list[Any]) -> None:
    for backend, cls in ((NumpyBackend(), np.ndarray), (TorchBackend(), torch.Tensor)):
        own = [array for array in mixed if isinstance(array, cls)]
        together = backend.describe(own)
        for row, array in enumerate(own):
            alone, expected = backend.describe([array]), each_described(array)
            assert (together.specs[row], together.addresses[row]) == (alone.specs[0], alone.addresses[0])
            assert together.memory(row) == alone.memory(0)
            assert together.extent(row) == alone.extent(0)
            assert (row in together.unfillable) == (0 in alone.unfillable)
            assert together.specs[row].shape == expected["shape"]
            assert together.addresses[row] == expected["address"]
            assert (row not in together.unfillable) == expected["fillable"]
            if expected["extent"] is not None:
                assert together.extent(row) == expected["extent"]
        memories = [together.memory(row) for row in range(len(own))]
        for first, second in itertools.combinations(range(len(own)), 2):
            if own[first] is own[second]:
                assert memories[first] == memories[second]


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2)]),
        torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        torch.zeros(()).expand(3),
        torch.nn.UninitializedParameter(),
    ],
    ids=["sparse", "meta", "nested", "bits8", "quantized", "expanded", "lazy"],
)
def test_tensor_that_cannot_be_stored_or_filled_is_found(odd: torch.Tensor) -> None:
    facts = TorchBackend().describe([torch.zeros(2), odd])
    assert facts.unfillable == {1}
    if odd.layout is not torch.strided or odd.is_meta or odd.is_nested or odd.dtype is torch.bits8:
        assert facts.problems.keys() == {1}


# Bytes on their way into arrays.


def write_file(storage: Storage, content: bytes) -> None:
    writer = storage.create("data", len(content))
    writer.write_at(0, memoryview(content))
    writer.finish()


def read_all(storage: Storage, index: Index, targets: dict[str, Target], threads: int) -> int:
    part = Part("data", index, index.data_bytes, None, "")
    order = Order({number: targets[leaf.name] for number, leaf in enumerate(index.leaves) if leaf.name in targets})
    with open_pool(storage, threads, threads * PIECE_BYTES) as pool:
        return read_orders(storage, [(part, order)], {}, pool, None)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    st.sampled_from([1, 100, 1 << 20]),
    st.data(),
)
@settings(max_examples=repeated(60, in_gate=20), deadline=None)
def test_arrays_of_any_form_are_read_and_all_is_checked(sizes: list[int], span_bytes: int, data: st.DataObject) -> None:
    content = bytes(HEADER_BYTES) + np.random.default_rng(0).bytes(sum(sizes))
    index = make_index(sizes, span_bytes, content)
    storage = MemoryStorage()
    write_file(storage, content)
    arrays_by_leaf: dict[str, Any] = {}
    for leaf in index.leaves:
        (size_bytes,) = leaf.shape
        kind = data.draw(st.sampled_from(["torch", "numpy", "torch steps", "numpy steps", "unwanted"]))
        steps = 2 if "steps" in kind else 1
        if kind.startswith("torch"):
            arrays_by_leaf[leaf.name] = torch.zeros(size_bytes * steps, dtype=torch.uint8)[::steps]
        elif kind.startswith("numpy"):
            arrays_by_leaf[leaf.name] = np.zeros(size_bytes * steps, np.uint8)[::steps]
    targets = {}
    for name, array in arrays_by_leaf.items():
        backend = BACKENDS[type(array)]
        targets[name] = Target(name, spec_of("U8", tuple(array.shape)), array, backend, (), backend.address(array))
    damaged = data.draw(st.none() | st.integers(HEADER_BYTES, max(HEADER_BYTES, len(content) - 1)))
    wanted = {leaf.name: leaf for leaf in index.leaves if leaf.name in targets}
    if damaged is not None and any(leaf.begin <= damaged < leaf.end for leaf in wanted.values()):
        broken = bytearray(content)
        broken[damaged] ^= 1
        other = MemoryStorage()
        write_file(other, bytes(broken))
        with pytest.raises(DamageError) as caught:
            read_all(other, index, targets, 2)
        leaf = wanted[caught.value.tensor]
        begin = caught.value.offset_bytes or 0
        assert leaf.begin <= begin <= damaged < min(begin + span_bytes, leaf.end)
        assert caught.value.path == "data"
    size_bytes = read_all(storage, index, targets, 3)
    assert size_bytes == sum(leaf.end - leaf.begin for leaf in wanted.values())
    for name, array in arrays_by_leaf.items():
        assert raw(array) == content[wanted[name].begin : wanted[name].end]


@pytest.mark.parametrize("in_place", [True, False])
def test_one_read_fills_a_whole_array_and_shares_of_it(in_place: bool) -> None:
    content = bytes(HEADER_BYTES) + np.random.default_rng(0).bytes(1000)
    index = make_index([1000], 70, content)
    storage = MemoryStorage()
    write_file(storage, content)
    arrays = [np.zeros(size, np.uint8) for size in (1000, 300)]
    whole, share = (
        Target("leaf0", spec_of("U8", array.shape), array, NumpyBackend(), (), array.ctypes.data if in_place else None)
        for array in arrays
    )
    order = Order({0: whole}, {0: [Share(share, Box((450,), (300,)), Box((0,), (300,)))]})
    with open_pool(storage, 1, 0) as pool:
        part = Part("data", index, index.data_bytes, None, "")
        assert read_orders(storage, [(part, order)], {}, pool, None) == 1000
    assert arrays[0].tobytes() == content[HEADER_BYTES:]
    assert arrays[1].tobytes() == content[HEADER_BYTES + 450 :][:300]


BACKENDS: dict[type, ArrayBackend] = {torch.Tensor: TorchBackend(), np.ndarray: NumpyBackend()}


@pytest.mark.parametrize("direct", [True, False])
def test_large_and_small_arrays_of_every_form_come_back(tmp_path: Path, direct: bool) -> None:
    """More than one piece, read with and without the page cache, into place and round about."""
    sizes = [5 << 20, 3, 70_000, 1 << 20, (1 << 20) + 1, 9 << 20, *[17_000] * 300]
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{number}": torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
        for number, size in enumerate(sizes)
    }
    values["floats"] = torch.rand(1000, 3000, generator=generator)
    with hf.CheckpointManager(LocalStorage(tmp_path, direct=direct), hf.Checkpoint(all=values)) as manager:
        manager.save(1)
    for path in tmp_path.rglob("data-*"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for form in ("plain", "steps", "mixed"):
        live: dict[str, Any] = {}
        for number, (key, value) in enumerate(values.items()):
            if form == "plain" or (form == "mixed" and number % 3 == 0):
                live[key] = torch.zeros_like(value)
            elif form == "mixed" and number % 3 == 1:
                live[key] = np.zeros(tuple(value.shape), value.numpy().dtype)
            else:
                live[key] = torch.zeros((*value.shape, 2), dtype=value.dtype)[..., 0]
        storage = LocalStorage(tmp_path, direct=direct)
        restored = hf.CheckpointManager(storage, hf.Checkpoint(all=live)).restore()
        assert restored is not None
        assert restored.size_bytes == sum(value.nbytes for value in values.values())
        for key, value in values.items():
            assert raw(live[key]) == raw(value), key


def test_a_part_of_many_leaves_is_restored_and_the_rest_is_left(tmp_path: Path) -> None:
    values = {f"{kind}{number}": torch.full((50,), float(number)) for number in range(40) for kind in "ab"}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(all=values, more=[torch.ones(2)] * 30)) as manager:
        manager.save(1)
    live = {name: torch.full((50,), -1.0) for name in values}
    live["a7"] = torch.zeros(3)
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(all=live, more=[torch.zeros(2) for _ in range(30)]))
    restored = manager.restore(only="all/b*")
    assert restored is not None
    assert not restored.differences
    for name, tensor in live.items():
        assert name == "a7" or torch.equal(tensor, values[name] if name[0] == "b" else torch.full((50,), -1.0))
    restored = manager.restore()
    assert restored is not None
    # A dict of the program takes what is stored.
    assert restored.differences.replaced == ["all/a7 [50] (your script begins with [3])"]
    assert all(torch.equal(tensor, values[name]) for name, tensor in live.items())
    assert all((tensor == 1).all() for tensor in manager.checkpoint["more"])


def test_overlapping_arrays_are_not_reported_as_damage(tmp_path: Path) -> None:
    """They cannot all get what is stored for them, which is said, but nothing is said to be damaged for that."""
    values = [torch.full((1 << 18,), float(number)) for number in range(20)]
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(all=values)) as manager:
        manager.save(1)
    memory = torch.zeros(21 << 17)
    live = [memory[number << 17 : (number + 2) << 17] for number in range(20)]
    restored = hf.CheckpointManager(tmp_path, hf.Checkpoint(all=live)).restore(strict=False)
    assert restored is not None
    assert restored.passed_over == ()
    assert len(restored.differences.wrong_kind) >= 10
    for number in range(21):
        own = memory[number << 17 : (number + 1) << 17].unique().tolist()
        assert set(own) <= {float(number), float(number - 1)}


RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=12)


@given(RANGES)
@settings(max_examples=repeated(300, in_gate=60), deadline=None)
def test_overlapping_ranges_are_found(ranges: list[tuple[int, int]]) -> None:
    begins = [begin for begin, _ in ranges]
    ends = [begin + length for begin, length in ranges]
    expected = {
        place
        for place in range(len(ranges))
        if any(begins[place] < ends[i] and begins[i] < ends[place] for i in range(len(ranges)) if i != place)
    }
    assert find_overlapping(begins, ends) == expected


def test_filled_tensors_count_a_change(tmp_path: Path) -> None:
    live: list[torch.Tensor] = [torch.zeros(4) for _ in range(20)]
    with torch.inference_mode():
        live.append(torch.zeros(4))
    live.append(torch.nn.Parameter(torch.zeros(4)))
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(all=live)) as manager:
        manager.save(1)
    before = [tensor._version for tensor in live if not tensor.is_inference()]
    hf.CheckpointManager(tmp_path, hf.Checkpoint(all=live)).restore()
    after = [tensor._version for tensor in live if not tensor.is_inference()]
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_a_target_of_another_form_is_never_written() -> None:
    index = make_index([100], 50)
    array = torch.zeros(10, dtype=torch.uint8)
    target = Target("leaf0", spec_of("U8", (10,)), array, TorchBackend(), (), array.data_ptr())
    with pytest.raises(ValueError, match="does not have the stored dtype"):
        Destinations(index, Order({0: target}))


def test_an_array_smaller_than_what_is_stored_is_refused_and_not_written() -> None:
    index = make_index([100], 50)
    beside = torch.zeros(200, dtype=torch.uint8)
    array = beside[:60]
    target = Target("leaf0", spec_of("U8", (100,)), array, TorchBackend(), (), array.data_ptr())
    destinations = Destinations(index, Order({0: target}))
    first, second = (Piece([0], [index.leaves[0].begin + at], [""], index.leaves[0].begin + at + 50) for at in (0, 50))
    (part,) = destinations.parts_of(first)
    part[:] = bytes(range(50))
    with pytest.raises(ValueError, match="the array is at"):
        destinations.parts_of(second)
    share = Share(target, Box((0,), (100,)), Box((0,), (100,)))
    with pytest.raises(ValueError, match="the array is at"):
        Destinations(index, Order(shares={0: [share]})).memory_of(target)
    assert beside.tolist() == [*range(50), *[0] * 150]


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
@example(100, 200)
@example(100, 101)
@example(199, 200)
@example(99, 200)
@example(100, 201)
@example(150, 149)
@example(-1, 100)
def test_memory_outside_of_an_extent_is_refused(begin: int, end: int) -> None:
    array = torch.arange(100, dtype=torch.uint8)
    ((first, last),) = TorchBackend().lend_memory([array])
    begin, end = begin + first - 100, end + first - 100
    if first <= begin <= end <= last:
        assert memory_between(begin, end, (first, last)) == array.numpy()[begin - first : end - first].data
        return
    with pytest.raises(ValueError, match="the array is at"):
        memory_between(begin, end, (first, last))
