"""Element types that safetensors lacks: raw bytes in a data file, and themselves again when they are restored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast as hf
import old_versions
from holdfast.errors import FormatError, UnsupportedValueError, UsageError
from holdfast.format.digests import seal
from holdfast.format.dtypes import Quantizer, QuantizerRecord, names_in
from holdfast.format.index import Index
from holdfast.format.index_checks import decode_index
from holdfast.format.records import ALONE, RAW, SHARDS, Worker
from holdfast.storage import MemoryStorage
from simulated_job import restore_part, save_job

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.ao", "ignore:.*quantiz")


def per_tensor(*shape: int, dtype: torch.dtype = torch.quint8, zero_point: int = 3) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(shape), 0.1, zero_point, dtype)


def per_channel(*shape: int, axis: int = 0, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    scales, zero_points = torch.rand(shape[axis]) + 0.1, torch.arange(shape[axis])
    return torch.quantize_per_channel(torch.randn(shape), scales, zero_points, axis, dtype)


def make_state() -> dict[str, Any]:
    image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    state = {
        "complex128": torch.randn(3, 2, dtype=torch.complex128).T,
        "complex32": torch.randn(3, dtype=torch.complex64).to(torch.complex32),
        "numpy": np.array([1j, complex("nan"), complex(-0.0, float("inf"))]),
        "quint8": per_tensor(4, 3),
        "qint8": per_channel(4, 3),
        "qint32": per_tensor(5, dtype=torch.qint32),
        "column": per_tensor(4, 3).t(),
        "gaps": per_tensor(4, 6)[:, ::2],
        "inner": per_channel(4, 3, axis=1, dtype=torch.quint8),
        "image": torch.quantize_per_channel(image, torch.rand(4) + 0.1, torch.zeros(4).long(), 0, torch.qint8),
        "scalar": torch.quantize_per_tensor(torch.tensor(1.0), 0.5, 1, torch.qint8),
        "empty": per_tensor(0, 3),
    }
    for dtype in old_versions.dtypes("float4_e2m1fn_x2"):
        state["float4"] = torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(dtype)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    # To clone a quantized tensor does not keep its layout.
    layout = torch.empty_strided(one.shape, one.stride()).clone().stride()
    if (one.dtype, one.shape, layout) != (other.dtype, other.shape, other.stride()):
        return False
    if one.is_quantized:
        if one.qscheme() != other.qscheme() or not torch.equal(one.int_repr(), other.int_repr()):
            return False
        return bool(torch.equal(one.dequantize(), other.dequantize()))
    return bytes(one.contiguous().view(torch.uint8).numpy()) == bytes(other.contiguous().view(torch.uint8).numpy())


def test_every_type_comes_back_and_the_file_is_one_of_safetensors(tmp_path: Path) -> None:
    state = make_state()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(state=state)) as manager:
        handle = manager.save(1)
        handle.wait_committed()
    stored = load_file(f"{handle.path}/data-00000-of-00001.safetensors")
    assert {(one.dtype, one.shape[-1]) for one in stored.values()} == {
        *((torch.uint8, size) for size in (1, 4, 16)),
    }
    assert bytes(stored["state/numpy"].numpy()) == state["numpy"].tobytes()
    empty: dict[str, Any] = {"state": dict.fromkeys(state)}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**empty)) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.manifest.features == (RAW,)
    assert [key for key, value in state.items() if not same(value, empty["state"][key])] == []


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_they_are_divided_among_workers_and_put_together(workers: int) -> None:
    state = make_state()
    storage = MemoryStorage()
    manifest = save_job(storage, [{"state": state} for _ in range(2)])
    assert manifest.features == (RAW, SHARDS)
    for rank in range(workers):
        objects: dict[str, Any] = {"state": dict.fromkeys(state)}
        restore_part(storage, objects, Worker(rank, workers) if workers > 1 else ALONE)
        assert [key for key, value in state.items() if not same(value, objects["state"][key])] == []


def test_a_complex_shard_goes_into_any_other_division() -> None:
    whole = np.arange(12).reshape(4, 3) * (1 + 2j)
    storage = MemoryStorage()
    save_job(storage, [{"x": hf.Shard(whole[2 * rank :][:2], (4, 3), (2 * rank, 0))} for rank in range(2)])
    for rank in range(3):
        part = hf.Shard(np.zeros((4, 1), np.complex128), (4, 3), (0, rank))
        restore_part(storage, {"x": part}, Worker(rank, 3))
        assert np.array_equal(part.tensor, whole[:, rank : rank + 1])


class Buffered(nn.Module):
    def __init__(self, weight: torch.Tensor, fixed: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("fixed", fixed)
        self.linear: Any = torch.ao.nn.quantized.Linear(3, 2)
        self.linear.set_weight_bias(per_channel(2, 3), torch.randn(2))


def test_modules_that_are_quantized_compute_the_same(tmp_path: Path) -> None:
    source, live = Buffered(per_tensor(4, 3), per_channel(4, 3)), Buffered(per_tensor(4, 3), per_channel(4, 3))
    kept = live.fixed
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=source)) as manager:
        manager.save(1).wait_committed()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=live)) as manager:
        manager.restore()
    assert live.fixed is kept
    assert same(source.fixed, live.fixed)
    assert same(source.weight.data, live.weight.data)
    inputs = per_tensor(5, 3)
    assert same(source.linear(inputs), live.linear(inputs))


def test_a_live_quantizer_gives_way_to_the_stored_one(tmp_path: Path) -> None:
    state: dict[str, Any] = {"q": per_tensor(40), "many": [per_tensor(2) for _ in range(40)]}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**state), incremental=True) as manager:
        manager.save(1).wait_committed()
        integers = state["many"][7].int_repr()
        state["many"][7] = torch._make_per_tensor_quantized_tensor(integers, 7.0, 1)
        manager.save(2).wait_committed()
    for step, scale in ((1, 0.1), (2, 7.0)):
        live = hf.Checkpoint(q=per_tensor(40, zero_point=9), many=[per_tensor(2, zero_point=9) for _ in range(40)])
        with hf.CheckpointManager(tmp_path, live) as manager:
            manager.restore(step)
        assert same(state["q"], live.q)
        assert torch.equal(live.many[7].int_repr(), integers)
        assert live.many[7].q_scale() == scale
        assert all(same(one, other) for one, other in zip(state["many"][8:], live.many[8:], strict=True))


def test_a_part_of_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="x: a part of a quantized tensor"):
        save_job(MemoryStorage(), [{"x": hf.Shard(per_tensor(2, 3), (4, 3), (2 * rank, 0))} for rank in range(2)])


def quantized_index() -> Index:
    storage = MemoryStorage()
    save_job(storage, [{"q": per_tensor(4, 3), "c": per_channel(4, 3), "plain": torch.zeros(2)}])
    data = storage.read("step-000000001.g0001/index-00000-of-00001.json", 1 << 20)
    return decode_index(data, path="")


Q = QuantizerRecord("q", Quantizer(None, (0.1,), (3,)))
C = QuantizerRecord("c", Quantizer(0, (0.5,) * 4, (0,) * 4))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Q],
        [Q, C, C],
        [Q, C, QuantizerRecord("plain", Q.quantizer)],
        [Q, C, QuantizerRecord("x", Q.quantizer)],
        [Q, QuantizerRecord("c", Quantizer(2, (0.5,) * 4, (0,) * 4))],
        [Q, QuantizerRecord("c", Quantizer(-1, (0.5,) * 3, (0,) * 3))],
        [Q, QuantizerRecord("c", Quantizer(0, (0.5,) * 3, (0,) * 3))],
        [Q, QuantizerRecord("c", Quantizer(0, (0.5,) * 4, (0,) * 3))],
        [Q, QuantizerRecord("c", Quantizer(0, (0.5,) * 4, (128,) * 4))],
        [C, QuantizerRecord("q", Quantizer(None, (0.1,), (-1,)))],
        [C, QuantizerRecord("q", Quantizer(None, (), ()))],
        [C, QuantizerRecord("q", Quantizer(None, (0.1, 0.2), (1, 1)))],
        [C, QuantizerRecord("q", Quantizer(None, (float("inf"),), (1,)))],
    ],
)
def test_quantizers_that_cannot_be_are_refused(records: list[QuantizerRecord]) -> None:
    forged = msgspec.structs.replace(quantized_index(), quantizers=tuple(records))
    with pytest.raises(FormatError):
        decode_index(seal(forged), path="index.json")


def test_exports_hold_odd_dtypes_or_report_what_they_leave_out(tmp_path: Path) -> None:
    state = {key: value for key, value in make_state().items() if key in ("complex128", "complex32", "float4")}
    state["image"] = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(state=state, q=per_tensor(3))) as manager:
        manager.save(1).wait_committed()
    hf.export_checkpoint(tmp_path / "run", tmp_path / "out.pt", to="torch", only="state")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert [key for key, value in state.items() if not same(value, loaded[key])] == []
    hf.import_checkpoint(tmp_path / "out.pt", tmp_path / "back", name="state")
    empty = hf.Checkpoint(state=dict.fromkeys(state))
    with hf.CheckpointManager(tmp_path / "back", empty) as manager:
        manager.restore()
    assert [key for key, value in state.items() if not same(value, empty.state[key])] == []
    for to, only, kind in (("safetensors", "state", "complex128"), ("torch", "q", "quint8"), ("dcp", "q", "quint8")):
        with pytest.raises(UsageError, match=f"has dtype {kind}, which a {to} file cannot contain"):
            hf.export_checkpoint(tmp_path / "run", tmp_path / "no", to=to, only=only)  # type: ignore[arg-type]


ML_NAMES = [name for name in names_in("numpy") if name in dir(ml_dtypes)]


def test_numpy_has_the_types_of_ml_dtypes(tmp_path: Path) -> None:
    assert {"bfloat16", "float8_e4m3fn", "int4", "float4_e2m1fn"} <= set(ML_NAMES)
    state = {name: np.array([[0, 1, 1], [1, 0, 1]], getattr(ml_dtypes, name), order="F") for name in ML_NAMES}
    # One piece of memory, seen as two types, is two arrays.
    state |= {name: state["float8_e5m2"].view(name) for name in ("float8_e4m3fn", "float8_e4m3")}
    torchs = torch.tensor([1.5, -2.5], dtype=torch.bfloat16)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(state=state, torchs=torchs)) as manager:
        manager.save(1)
    empty = hf.Checkpoint(state=dict.fromkeys(state), torchs=np.zeros(2, ml_dtypes.bfloat16))
    live = {name: np.zeros_like(value) for name, value in state.items()}
    arrays = hf.Checkpoint(state=live, torchs=torch.zeros(2, dtype=torch.bfloat16))
    for checkpoint in (empty, arrays):
        with hf.CheckpointManager(tmp_path, checkpoint) as manager:
            manager.restore()
        for name, value in state.items():
            found = checkpoint.state[name]
            assert (found.dtype, found.strides, found.tobytes()) == (value.dtype, value.strides, value.tobytes())
        assert checkpoint.torchs.tolist() == [1.5, -2.5]
    assert arrays.state["bfloat16"] is live["bfloat16"]


def test_ml_dtypes_is_imported_where_it_is_needed(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(x=np.ones(2, ml_dtypes.bfloat16))) as manager:
        manager.save(1)
    code = f"""
import sys
import holdfast as hf
from holdfast.errors import MissingPackageError

checkpoint = hf.Checkpoint(x=None)
with hf.CheckpointManager({str(tmp_path)!r}, checkpoint) as manager:
    assert "ml_dtypes" not in sys.modules
    sys.modules["ml_dtypes"] = None
    try:
        manager.restore()
    except MissingPackageError as error:
        assert "ml_dtypes" in error.hint, error
    else:
        raise AssertionError("it was restored")
    del sys.modules["ml_dtypes"]
    manager.restore()
assert checkpoint.x.dtype.name == "bfloat16" and checkpoint.x.tolist() == [1, 1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
