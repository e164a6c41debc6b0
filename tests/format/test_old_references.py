"""A run whose steps refer to each other, as the first holdfast wrote it that could: it is restored, for ever.

`tests/data/v1-references` was made by `make_run`, and is never made again; see `test_old_formats.py`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from places import DATA
from plain_reader import digests, open_record

RUN = DATA / "v1-references"


def make_arrays(step: int) -> dict[str, np.ndarray]:
    """What the run keeps at a step: an array that never changes, one that does at every other step, one at each."""
    return {
        "frozen": np.array([0.5, -1.0, 2.0]) if step else np.zeros(3),
        "seldom": np.arange(4, dtype=np.int16) * (step // 2),
        "often": np.full((2, 2), step, np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }


def make_run(directory: Path) -> None:
    """Makes steps 1 to 3, and step 4 of a second generation."""
    for steps in ((1, 2, 3), (4,)):
        arrays = make_arrays(0)
        with hf.CheckpointManager(directory, hf.Checkpoint(arrays=arrays), incremental=True) as manager:
            manager.restore()
            for step in steps:
                for name, values in make_arrays(step).items():
                    arrays[name][...] = values
                manager.save(step)
    (directory / "events.jsonl").unlink()  # No part of the format.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_step_comes_back(run: Path, step: int) -> None:
    arrays = make_arrays(0)
    with hf.CheckpointManager(run, hf.Checkpoint(arrays=arrays)) as manager:
        restored = manager.restore(step)
    assert restored is not None
    assert bool(restored.manifest.references) is (step > 1)
    for name, values in make_arrays(step).items():
        assert arrays[name].dtype == values.dtype
        assert arrays[name].tolist() == values.tolist()


def test_a_new_save_refers_to_it(run: Path) -> None:
    arrays = make_arrays(0)
    with hf.CheckpointManager(run, hf.Checkpoint(arrays=arrays), keep=hf.Latest(1), incremental=True) as manager:
        manager.restore()
        arrays["often"][...] = 5
        manager.save(5)
        manager.wait()
        assert manager.steps() == (1, 4, 5), "4 is the base, and holds what changed last; 1 holds what never did"


@pytest.mark.parametrize("step", [2, 3, 4])
def test_the_law_of_the_format_is_enough_to_read_it(run: Path, step: int) -> None:
    """A reader that is made from `docs/reference/format.md` alone, and shares no code with holdfast."""
    (directory,) = run.glob(f"step-{step:09d}.g*")
    manifest = open_record(directory / "manifest.json", "manifest")
    assert manifest["features"] == ["references"]
    index = open_record(directory / "index-00000-of-00001.json", "index")
    span_bytes = index["span_bytes"]
    assert len(index["leaves"]) + len(index["referred"]) == 4

    arrays = {}
    own = (directory / "data-00000-of-00001.safetensors").read_bytes()
    for name, dtype, shape, begin, end, spans in index["leaves"]:
        arrays[name] = (dtype, shape, own[begin:end])
        assert spans == digests(own[begin:end], span_bytes)
    counts: dict[tuple[int, int, int], list[int]] = {}
    places: list[tuple[int, int, int]] = []
    for name, dtype, shape, begin, end, spans, number in index["referred"]:
        source = index["sources"][number]
        key = (source["step"], source["generation"], source["attempt"])
        assert key < (index["step"], index["generation"], index["attempt"])
        suffix = "" if source["attempt"] == 1 else f".a{source['attempt']}"
        path = run / f"step-{source['step']:09d}.g{source['generation']:04d}{suffix}"
        data = (path / f"data-{source['rank']:05d}-of-{source['world_size']:05d}.safetensors").read_bytes()
        assert len(data) == source["data_bytes"]
        assert spans == digests(data[begin:end], span_bytes)
        arrays[name] = (dtype, shape, data[begin:end])
        counts.setdefault(key, []).append(end - begin)
        places.append((number, begin, end))
    assert places == sorted(places)
    assert manifest["references"] == [
        {"step": key[0], "generation": key[1], "attempt": key[2], "leaves": len(sizes), "size_bytes": sum(sizes)}
        for key, sizes in sorted(counts.items())
    ]

    types = {"F64": "<f8", "F32": "<f4", "I16": "<i2"}
    for name, values in make_arrays(step).items():
        dtype, shape, content = arrays[f"arrays/{name}"]
        assert np.frombuffer(content, types[dtype]).reshape(shape).tolist() == values.tolist()


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
