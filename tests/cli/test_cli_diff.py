"""`holdfast diff`: what changed from one checkpoint to another, in arrays, values and metrics."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
import old_versions
from command_line import DATA, NEWEST, PROGRAM, call, call_json, complaint, flip_bit, lines_of, show_on_terminal
from holdfast.cli.exit_codes import ExitCode
from holdfast.format.dtypes import ITEM_BYTES, is_numeric, to_numbers
from holdfast.state.data.attributes import read_python
from holdfast.storage import LocalStorage
from simulated_job import save_job


def save_tree(directory: Path, tree: dict[str, Any]) -> Path:
    """A run with one step."""
    with hf.CheckpointManager(directory, hf.Checkpoint(**tree)) as manager:
        manager.save(1, metrics={"loss": float(len(tree))})
    return directory


def arrays_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in document["arrays"]}


def test_diff_finds_what_changed_and_how_much(tmp_path: Path) -> None:
    before = {"still": np.ones(1000), "moved": np.array([3.0, 4.0, 0.0], np.float32), "gone": np.ones(2)}
    after = {"still": np.ones(1000), "moved": np.array([3.0, 4.0, 2.0], np.float32), "came": np.full(4, 2.0)}
    a = save_tree(tmp_path / "a", {"model": before, "lr": 0.1, "note": {"tags": ["x", "y"]}})
    b = save_tree(tmp_path / "b", {"model": after, "lr": 0.2, "note": {"tags": ["x", "z"]}})
    document = call_json("diff", a, b)
    assert document["is_same"] is False
    assert document["same_arrays"] == 1
    found = arrays_of(document)
    assert {name: one["change"] for name, one in found.items()} == {
        "model/moved": "changed",
        "model/gone": "removed",
        "model/came": "added",
    }
    moved = found["model/moved"]
    assert (moved["changed_elements"], moved["norm_a"], moved["norm_difference"]) == (1, 5.0, 2.0)
    assert moved["norm_b"] == pytest.approx(math.sqrt(29))
    assert moved["relative_difference"] == 0.4
    assert (found["model/came"]["a"], found["model/came"]["norm_b"]) == (None, 4.0)
    assert [(one["path"], one["a"], one["b"]) for one in document["values"]] == [
        ("lr", "0.1", "0.2"),
        ("note/tags", "['x', 'y']", "['x', 'z']"),
    ]
    assert document["metrics"] == {"loss": {"a": 3.0, "b": 3.0, "change": 0.0}}


def test_diff_of_the_same_is_nothing_and_reads_no_array(run: Path, tmp_path: Path) -> None:
    # Not one byte of the data is looked at: a bit that flipped would be damage.
    flip_bit(run / NEWEST / DATA, 5000)
    result = call("diff", run, run, "--exit-code")
    assert result.exit_code == 0
    assert re.search(r"the same: \d+ arrays, and all other values", result.stdout)


def test_exit_code_says_whether_they_differ(run: Path) -> None:
    assert call("diff", f"{run}@100", f"{run}@250", "--exit-code").exit_code == 0, "its metrics alone differ"
    assert call_json("diff", f"{run}@100", f"{run}@250")["metrics"]["val_loss"]["change"] == pytest.approx(-0.625)
    moved = save_tree(run.parent / "other", {"model": np.ones(3)})
    assert call("diff", run, moved).exit_code == 0
    assert call("diff", run, moved, "--exit-code").exit_code == ExitCode.DIFFERENT
    assert call("diff", run, moved, "--exit-code", "--json").exit_code == ExitCode.DIFFERENT


def test_quick_compares_digests_alone(tmp_path: Path) -> None:
    a, b = (save_tree(tmp_path / name, {"model": np.full(9, value)}) for name, value in (("a", 1.0), ("b", 2.0)))
    (path,) = b.glob(f"step-*/{DATA}")
    flip_bit(path, 4100)
    (change,) = call_json("diff", a, b, "--quick")["arrays"]
    assert (change["name"], change["norm_a"], change["changed_elements"]) == ("model", None, None)
    code, said = complaint("diff", a, b)
    assert code == ExitCode.DAMAGED
    assert "do not match their digest" in said


def test_types_and_shapes_that_differ_are_named(tmp_path: Path) -> None:
    values = np.arange(6.0)
    a = save_tree(tmp_path / "a", {"x": values, "y": values.copy()})
    b = save_tree(tmp_path / "b", {"x": values.astype(np.float32), "y": values.reshape(2, 3)})
    found = arrays_of(call_json("diff", a, b))
    assert (found["x"]["change"], found["x"]["norm_difference"], found["x"]["changed_elements"]) == ("dtype", 0.0, None)
    assert (found["y"]["change"], found["y"]["norm_difference"]) == ("shape", None)
    assert found["y"]["norm_a"] == found["y"]["norm_b"] == pytest.approx(math.sqrt(55))
    text = call("diff", a, b).stdout
    assert "F64->F32" in text
    assert "[6]->[2,3]" in text


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_same_values_on_other_workers_are_not_a_difference(workers: int, tmp_path: Path) -> None:
    whole = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)

    def part(rank: int, count: int, values: np.ndarray[Any, Any]) -> dict[str, object]:
        rows = 8 // count
        return {"x": hf.Shard(values[rank * rows :][:rows].copy(), values.shape, (rank * rows, 0))}

    save_job(LocalStorage(tmp_path / "a"), [{"x": whole}])
    save_job(LocalStorage(tmp_path / "b"), [part(rank, workers, whole) for rank in range(workers)])
    moved = whole.copy()
    moved[7, 3] += 1
    save_job(LocalStorage(tmp_path / "c"), [part(rank, workers, moved) for rank in range(workers)])
    assert call_json("diff", tmp_path / "a", tmp_path / "b")["is_same"] is True
    (change,) = call_json("diff", tmp_path / "a", tmp_path / "c")["arrays"]
    assert (change["changed_elements"], change["norm_difference"]) == (1, 1.0)


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    a = save_tree(tmp_path / "a", {"x": np.array([3.0, 4.0, 0.0])})
    b = save_tree(tmp_path / "b", {"x": np.array([3.0, 4.0, np.nan])})
    (change,) = call_json("diff", a, b)["arrays"]
    assert (change["nonfinite_a"], change["nonfinite_b"], change["norm_b"]) == (0, 1, 5.0)
    assert "not finite: x has 0 in A, 1 in B" in call("diff", a, b).stdout


def test_names_limit_what_is_compared(tmp_path: Path) -> None:
    a, b = (
        save_tree(tmp_path / name, {"model": {"w": np.full(2, value), "b": np.full(2, value)}, "epoch": int(value)})
        for name, value in (("a", 1.0), ("b", 2.0))
    )
    assert arrays_of(call_json("diff", a, b, "model/w")).keys() == {"model/w"}
    assert call_json("diff", a, b, "epoch")["values"] == [{"path": "epoch", "a": "1", "b": "2"}]
    code, said = complaint("diff", a, b, "modle")
    assert code == ExitCode.USAGE
    assert "'modle'" in said
    assert "The objects are model, epoch." in said


def test_diff_names_the_states_of_random_generators(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for place, seed in ((a, 1), (b, 2)):
        tree = {
            "begin": {
                "python": read_python(random.Random(seed)),
                "torch": torch.Generator().manual_seed(seed).get_state().numpy().tobytes(),
            },
            "rng": torch.Generator().manual_seed(seed).get_state(),
            "packed": bytes([seed]) * 100,
            "long": "x" * 300 + str(seed),
        }
        save_tree(place, tree)
    document = call_json("diff", a, b)
    texts = {one["path"]: (one["a"], one["b"]) for one in document["values"]}
    assert texts.pop("long")[1] == "differs"
    assert texts == {
        "begin/python": ("<state of a random generator of Python>", "differs"),
        "begin/torch": ("<state of a random generator of torch>", "differs"),
        "packed": ("<100 bytes>", "differs"),
    }
    (array,) = document["arrays"]
    assert (array["name"], array["norm_a"], array["relative_difference"]) == ("rng", None, None)


def test_a_terminal_shows_the_largest_changes(tmp_path: Path) -> None:
    a, b = (
        save_tree(tmp_path / name, {"model": {f"l{place:02}": np.full(3, value) for place in range(30)}})
        for name, value in (("a", 1.0), ("b", 2.0))
    )
    shown = show_on_terminal("diff", a, b, columns=120)
    assert shown.exit_code == 0
    assert "30 arrays and 0 other values changed" in shown.text
    assert "and 10 more (--all shows them)" in shown.text
    assert "more (--all" not in show_on_terminal("diff", a, b, "--all", columns=120).text
    piped = lines_of(call("diff", a, b).stdout)
    assert sum(row[:1] == ["changed"] for row in piped) == 30


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEM_BYTES if is_numeric(dtype)])
def test_numbers_of_each_type_are_those_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from holdfast.format.dtypes import names_in

    names = {stored: name for name, stored in names_in("torch").items()}
    if not old_versions.dtypes(names[dtype]):
        pytest.skip(f"this torch has no {names[dtype]}")
    data = np.random.default_rng(0).integers(0, 256, 256 * 16, np.uint8)
    if ITEM_BYTES[dtype] == 1 and dtype != "BOOL":
        data = np.arange(256, dtype=np.uint8)
    data = data & 1 if dtype == "BOOL" else data
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, names[dtype]))
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    np.testing.assert_array_equal(to_numbers(data.astype(np.uint8), dtype), wide)


def test_diff_takes_the_same_memory_however_large(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_tree(tmp_path / name, {"model": np.full(40 << 20, value, np.float32)})  # 168 MB
    peaks = []
    for arguments in (["list", str(tmp_path / "a")], ["diff", str(tmp_path / "a"), str(tmp_path / "b")]):
        program = (
            "import resource, subprocess, sys\n"
            "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
            "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(PROGRAM), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        code, peak_kilobytes = done.stdout.split()
        assert code == "0", done.stderr
        peaks.append(int(peak_kilobytes) << 10)
    assert peaks[1] - peaks[0] < 150 << 20, "two arrays of 168 MB were compared"
