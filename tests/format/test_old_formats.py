"""Checkpoints of every version of the format are restored, for ever; and the law of the format is enough to read one.

`tests/data/v1` was made by `make_run`, with the first holdfast that wrote version 1. It is never made again. When
the format gets a version 2, run `python tests/format/test_old_formats.py tests/data/v2` once, with the code that writes
it and `tests/support` in `PYTHONPATH`, and add the directory to `RUNS`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import random
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.format.codecs import FACTORIES
from holdfast.format.decoding import REBUILDERS
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.scalars import DECODERS
from holdfast.storage import LocalStorage
from places import DATA
from plain_reader import digest, open_record

LAW = DATA.parent.parent / "docs" / "reference" / "format.md"
RUNS = [DATA / "v1"]
STEP = "step-000000003.g0002"

LATER_TAGS = ["live", "pytree", "tensor_subclass", "zoneinfo"]
"""Tags that came after the first checkpoints of version 1."""

# Types of the program: their stored names do not depend on where this file lies.


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Setting:
    name: str
    weights: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Word:
    """A type with a codec of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Word({self.text!r})"


for of_program in (Point, Setting, Color, Rights):
    of_program.__module__ = "program"
    hf.register_type(of_program)
hf.register_codec(Word, tag="program.Word", encode=lambda word: word.text, decode=Word)


class Counter:
    """An object with state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


VALUES: dict[str, Any] = {
    "plain": [None, True, False, 0, -(1 << 63), (1 << 63) - 1, 1.0, -0.0, 1e300, 5e-324, 0.1, "", "text", "Füße 足"],
    "dict": {"a": 1, "~/": {"b": []}, "": {}},
    "int": [1 << 63, -(1 << 70), 1 << 200],
    "float": [float("nan"), float("inf"), float("-inf")],
    "str": "half a pair: \ud800",
    "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
    "complex": [1.5 - 2j, complex("nan"), complex(-0.0, float("inf"))],
    "range": range(3, -(1 << 65), -2),
    "slice": [slice(None), slice(1, 1 << 64, None), slice("a", (1,), 2.5)],
    "date": datetime.date(2024, 2, 29),
    "time": datetime.time(1, 2, 3, 4, datetime.UTC, fold=1),
    "datetime": [
        datetime.datetime(1, 1, 1),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, datetime.timezone(datetime.timedelta(hours=-2), "X")),
    ],
    "timedelta": datetime.timedelta(-1, 2, 3),
    "timezone": [datetime.UTC, datetime.timezone(datetime.timedelta(minutes=90))],
    "decimal": [decimal.Decimal("1.10"), decimal.Decimal("-Infinity"), decimal.Decimal("1E+5")],
    "fraction": fractions.Fraction(-3, 1 << 65),
    "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:/a"), pathlib.Path("runs/gpt")],
    "numpy": [
        *(np.dtype(name).type(1) for name in ("bool", "int8", "int16", "int32", "int64")),
        *(np.dtype(name).type(200) for name in ("uint8", "uint16", "uint32", "uint64")),
        *(np.dtype(name).type(0.5) for name in ("float16", "float32", "float64", "complex64", "complex128")),
        np.longlong(-5),
        np.ulonglong(5),
        np.float32("nan"),
        np.str_("text"),
        np.bytes_(b"bytes"),
        np.datetime64("2024-02-29T01:02:03", "s"),
        np.timedelta64(7, "D"),
    ],
    "tuple": ((), (1, (2.5, ["3"]))),
    "keys": {1: "int", "1": "str", (2, None): "tuple", None: "none", 2.5: "float", "$": "dollar", b"k": "bytes"},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": collections.Counter({"x": 3, "y": -1}),
    "defaultdict": [
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(collections.Counter),
    ],
    "deque": [collections.deque([1, 2], maxlen=3), collections.deque()],
    "set": [{1}, set(), frozenset({(1, 2)})],
    "namedtuple": Point(1, 2.0),
    "dataclass": Setting("s", [1, 2]),
    "enum": Color.BLUE,
    "flag": [Rights.READ | Rights.WRITE, Rights(0)],
    "codec": Word("hold"),
}
"""At least one value for each tag of the format that stands for a plain value."""

ARRAYS: dict[str, list[Any]] = {
    "bool": [True, False, True],
    "uint8": [0, 1, 255],
    "int8": [-128, 0, 127],
    "int16": [-32768, 0, 32767],
    "uint16": [0, 1, 65535],
    "float16": [-1.5, 0.0, 65504.0],
    "int32": [-(1 << 31), 0, (1 << 31) - 1],
    "uint32": [0, 1, (1 << 32) - 1],
    "float32": [-1.5, float("inf"), 3.25],
    "float64": [-1.5, 0.1, 5e-324],
    "int64": [-(1 << 63), 0, (1 << 63) - 1],
    "uint64": [0, 1, (1 << 64) - 1],
    "complex64": [1j, -1.5, 0.25 + 2j],
}
"""The values of an array of each of NumPy's types that can be stored."""


REST_OF_EPOCH = [[6, 9, 4], [0, 8, 2], [7]]
"""What the sampler gives after its first batch."""


def make_objects(step: int) -> dict[str, Any]:
    """All that the run keeps, as it is at a step; at step 0 it is what a program has before it restores."""
    live = step == 0
    arrays: dict[str, Any] = {name: np.array(values, name) for name, values in ARRAYS.items()}
    arrays["scalar"] = np.array(step, np.int32)
    arrays["empty"] = np.empty((0, 3), np.float32)
    arrays["turned"] = np.arange(6, dtype=np.int16).reshape(2, 3).T
    arrays["same"] = arrays["float64"]
    if live:
        for array in arrays.values():
            array[...] = 0
    sampler = hf.ResumableSampler(10, batch_size=3, seed=11)
    generators: dict[str, Any] = {
        "python": random.Random(0 if live else 1),
        "numpy": np.random.default_rng(0 if live else 2),
        "legacy": np.random.RandomState(0 if live else 3),
    }
    counter = Counter()
    if not live:
        counter.count = step
        batches = sampler.batches(sampler)
        next(batches)
        for draw in (generators["python"].random, generators["numpy"].random, generators["legacy"].random_sample):
            draw()
    return {
        "arrays": arrays,
        "values": None if live else VALUES,
        "setting": Setting("", np.zeros(2)) if live else Setting("live", np.array([step, 0.5])),
        "sampler": sampler,
        "generators": generators,
        "counter": counter,
        "step": step,
    }


def make_run(directory: Path) -> None:
    """Makes a run with two generations, a replaced step, and a step that is not in the current lineage."""
    with hf.CheckpointManager(directory, hf.Checkpoint(**make_objects(1))) as manager:
        manager.save(1, metrics={"val_loss": 0.75}, metadata={"note": ["first", 1]})
        manager.save(2)
        manager.save(2, replace=True)
    checkpoint = hf.Checkpoint(**make_objects(0))
    with hf.CheckpointManager(directory, checkpoint) as manager:
        manager.restore(1)
        for name, obj in make_objects(3).items():
            checkpoint[name] = obj
        manager.save(3, metrics={"val_loss": 0.5})
    (directory / "events.jsonl").unlink()  # No part of the format.


@pytest.fixture(params=RUNS, ids=[run.name for run in RUNS])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an old run."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def test_the_living_line(run: Path) -> None:
    catalog = StoredRun(LocalStorage(run)).look()
    assert [name.directory for name in catalog.living] == ["step-000000001.g0001", STEP]
    assert [name.directory for name in catalog.committed if name not in catalog.living] == ["step-000000002.g0001.a2"]
    assert catalog.generation == 2
    assert (catalog.unfinished, catalog.trash, catalog.faults) == ((), (), ())


@pytest.mark.parametrize("step", [1, 3])
def test_everything_comes_back(run: Path, step: int) -> None:
    checkpoint = hf.Checkpoint(**make_objects(0))
    live = dict(checkpoint.objects)
    with hf.CheckpointManager(run, checkpoint) as manager:
        restored = manager.restore(step)
    assert restored is not None
    assert restored.step == checkpoint.step == step
    assert restored.manifest.metrics == {1: {"val_loss": 0.75}, 3: {"val_loss": 0.5}}[step]
    assert restored.manifest.metadata == {1: {"note": ["first", 1]}, 3: {}}[step]

    arrays = checkpoint.arrays
    assert arrays is live["arrays"]
    for name, values in ARRAYS.items():
        assert arrays[name].dtype == np.dtype(name)
        assert arrays[name].tolist() == np.array(values, name).tolist()
    assert arrays["scalar"].shape == ()
    assert arrays["scalar"] == step
    assert arrays["empty"].shape == (0, 3)
    assert arrays["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert arrays["same"] is arrays["float64"]

    values = checkpoint["values"]
    assert list(values) == list(VALUES)
    for name, value in VALUES.items():
        assert repr(values[name]) == repr(value), name
        assert type(values[name]) is type(value), name

    assert checkpoint.setting.name == "live"
    assert checkpoint.setting.weights.tolist() == [step, 0.5]
    assert checkpoint.counter.count == step
    assert checkpoint.generators["python"].random() == 0.8474337369372327
    assert checkpoint.generators["numpy"].random() == 0.2984911434141233
    assert checkpoint.generators["legacy"].random_sample() == 0.7081478226181048
    sampler = checkpoint.sampler
    assert (sampler.epoch, sampler.position_samples) == (0, 3)
    assert list(sampler) == REST_OF_EPOCH


def test_every_tag_and_type_is_in_it_and_in_the_law(run: Path) -> None:
    text = (run / STEP / "index-00000-of-00001.json").read_text()
    law = LAW.read_text()
    tags = {*DECODERS, *REBUILDERS, "numpy"}
    assert sorted(tag for tag in tags if f'"$":"{tag}"' not in text) == LATER_TAGS
    assert sorted(tag for tag in tags if f"`{tag}`" not in law) == []
    assert sorted(dtype for dtype in ITEM_BYTES if f"`{dtype}`" not in law) == []
    assert sorted(name for name in FACTORIES if f"`{name}`" not in law) == []


def test_a_new_save_goes_on_from_it(run: Path) -> None:
    checkpoint = hf.Checkpoint(**make_objects(0))
    with hf.CheckpointManager(run, checkpoint, keep=hf.Latest(2)) as manager:
        manager.restore()
        manager.save(4)
        manager.wait()
        assert manager.steps() == (3, 4)


def test_the_law_of_the_format_is_enough_to_read_it(run: Path) -> None:
    """A reader that is made from `docs/reference/format.md` alone, and shares no code with holdfast."""
    manifest = open_record(run / STEP / "manifest.json", "manifest")
    assert (manifest["step"], manifest["generation"], manifest["attempt"]) == (3, 2, 1)
    assert manifest["features"] == []
    (worker,) = manifest["workers"]
    index_path = run / STEP / "index-00000-of-00001.json"
    assert index_path.stat().st_size == worker["index_bytes"]
    assert digest(index_path.read_bytes()) == worker["index_digest"]
    index = open_record(index_path, "index")
    data = (run / STEP / "data-00000-of-00001.safetensors").read_bytes()
    assert len(data) == worker["data_bytes"] == index["data_bytes"]
    assert digest(data[: index["header_bytes"]]) == index["header_digest"]
    assert index["header_bytes"] % 4096 == 0
    header = json.loads(data[8 : index["header_bytes"]])
    assert header.pop("__metadata__") == {"format": "holdfast", "step": "3"}

    arrays = {}
    offset = index["header_bytes"]
    for name, dtype, shape, begin, end, spans in index["leaves"]:
        assert begin == offset
        offset = end
        assert spans == "".join(
            digest(data[at : min(at + index["span_bytes"], end)]) for at in range(begin, end, index["span_bytes"])
        )
        places = [begin - index["header_bytes"], end - index["header_bytes"]]
        assert header.pop(name) == {"dtype": dtype, "shape": shape, "data_offsets": places}
        arrays[name] = (dtype, shape, data[begin:end])
    assert offset == len(data)
    assert header == {}

    objects = index["objects"]
    assert list(objects) == list(make_objects(0))
    assert objects["step"] == 3
    assert objects["arrays"]["same"] == {"$": "array", "k": "numpy", "v": "arrays/float64"}
    assert arrays["arrays/float64"][:2] == ("F64", [3])
    assert np.frombuffer(arrays["arrays/float64"][2], "<f8").tolist() == ARRAYS["float64"]
    assert objects["values"]["int"][0] == {"$": "int", "v": "8000000000000000"}
    assert objects["values"]["enum"] == {"$": "enum", "k": "program:Color", "v": "BLUE"}
    assert objects["counter"] == {"$": "object", "k": "state_dict", "v": {"count": 3}}

    base = open_record(run / "generations" / "0002.base.json", "base")
    assert base == {"generation": 2, "step": 1, "base_generation": 1, "base_attempt": 1}
    assert open_record(run / "generations" / "0001.json", "generation")["generation"] == 1


def test_the_law_of_the_format_is_enough_to_find_the_place_in_the_data(run: Path) -> None:
    index = open_record(run / STEP / "index-00000-of-00001.json", "index")
    position = index["objects"]["sampler"]
    assert (position["$"], position["k"]) == ("object", "data_position")
    state = position["v"]
    assert state == {"version": 1, "epoch": 0, "position_samples": 3, "seed": 11, "length": 10, "shuffle": True}
    left = range(state["position_samples"], state["length"])
    order = [sample_at(place, state["length"], derive(state["seed"], state["epoch"])) for place in left]
    assert order == [sample for batch in REST_OF_EPOCH for sample in batch]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def derive(*arguments: int) -> int:
    h = 0
    for argument in arguments:
        h = mix((h + argument + 0x9E3779B97F4A7C15) % 2**64)
    return h


def sample_at(place: int, length: int, key: int) -> int:
    bits = max((length - 1).bit_length(), 6)
    low_bits, high_bits = bits // 2, bits - bits // 2
    while True:
        low, high = place % 2**low_bits, place >> low_bits
        for r in range(12):
            k = derive(key, r)
            if r % 2 == 0:
                high ^= mix((low + k) % 2**64) >> 64 - high_bits
            else:
                low ^= mix((high + k) % 2**64) >> 64 - low_bits
        place = high << low_bits | low
        if place < length:
            return place


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
