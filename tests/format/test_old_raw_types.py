"""A step with element types that safetensors lacks and with memory layouts, as the first holdfast wrote it that could.

`tests/data/v1-raw-types` was made by `make_run`, and is never made again; see `test_old_formats.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf
from places import DATA

RUN = DATA / "v1-raw-types"
NUMBERS = [1.5 - 2j, complex(-0.0, float("inf"))]


def make_state() -> dict[str, Any]:
    integers = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    zero_points = torch.tensor([1, -1])
    return {
        "numbers": np.array(NUMBERS),
        "fortran": np.arange(6, dtype=np.int16).reshape(2, 3, order="F"),
        "half": torch.tensor([1 - 2j], dtype=torch.complex64).to(torch.complex32),
        "image": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "tensor": torch._make_per_tensor_quantized_tensor(integers.view(torch.uint8), 0.25, 3),
        "channels": torch._make_per_channel_quantized_tensor(integers, torch.tensor([0.5, 2.0]), zero_points, 0),
    }


def make_run(directory: Path) -> None:
    """Makes step 1."""
    with hf.CheckpointManager(directory, hf.Checkpoint(state=make_state())) as manager:
        manager.save(1)
    (directory / "events.jsonl").unlink()  # No part of the format.


def test_everything_comes_back() -> None:
    state = make_state()
    empty = hf.Checkpoint(state=dict.fromkeys(state))
    with hf.CheckpointManager(RUN, empty) as manager:
        assert manager.restore() is not None
    found = empty.state
    assert found["numbers"].tobytes() == state["numbers"].tobytes()
    assert found["fortran"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert found["fortran"].flags.f_contiguous
    assert found["half"].dtype == torch.complex32
    assert found["half"].view(torch.float16).tolist() == [1, -2]
    assert torch.equal(found["image"], state["image"])
    assert found["image"].stride() == (24, 1, 8, 2)
    assert found["tensor"].dequantize().tolist() == [[-0.75, -0.5, -0.25], [0.0, 0.25, 0.5]]
    assert found["channels"].dequantize().tolist() == [[-0.5, 0.0, 0.5], [8.0, 10.0, 12.0]]


def test_the_law_of_the_format_is_enough_to_read_it() -> None:
    (step,) = RUN.glob("step-*")
    assert json.loads((step / "manifest.json").read_bytes())["body"]["features"] == ["raw_types"]
    index = json.loads((step / "index-00000-of-00001.json").read_bytes())["body"]
    data = (step / "data-00000-of-00001.safetensors").read_bytes()
    header = json.loads(data[8 : index["header_bytes"]])
    leaves = {leaf[0]: leaf for leaf in index["leaves"]}
    _, dtype, shape, begin, end, _ = leaves["state/numbers"]
    assert (dtype, shape) == ("complex128", [2])
    assert header["state/numbers"]["dtype"] == "U8"
    assert header["state/numbers"]["shape"] == [2, 16]
    parts = np.frombuffer(data[begin:end], "<f8").tolist()
    assert parts == [1.5, -2.0, -0.0, float("inf")]
    # In the file all is row-major; the strides say how it lay in memory.
    _, _, _, begin, end, _ = leaves["state/fortran"]
    assert np.frombuffer(data[begin:end], "<i2").tolist() == [0, 2, 4, 1, 3, 5]
    assert index["strides"] == [["state/fortran", [1, 2]], ["state/image", [24, 1, 8, 2]]]
    assert index["quantizers"] == [["state/tensor", [None, [0.25], [3]]], ["state/channels", [0, [0.5, 2.0], [1, -1]]]]
    assert leaves["state/channels"][1:3] == ["qint8", [2, 3]]


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
