"""`holdfast import`, `holdfast.import_checkpoint`: files of other programs become a checkpoint that a job resumes."""

from __future__ import annotations

import argparse
import copy
import datetime
import decimal
import enum
import fractions
import json
import os
import random
import shutil
import sys
import types
import uuid
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as save_arrays

import holdfast as hf
import old_versions
import preloaded
from command_line import call, call_json, complaint
from holdfast import errors
from holdfast.storage.memory import MemoryStorage

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp  # noqa: E402

from converted_model import Interrupting, build, equal_states, train  # noqa: E402
from places import PROGRAMS  # noqa: E402


def as_saved(objects: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": objects["model"].state_dict(),
        "optimizer": objects["optimizer"].state_dict(),
        "schedule": objects["schedule"].state_dict(),
        "epoch": objects["epoch"],
    }


def restore(run: Path, seed: int = 2) -> dict[str, Any]:
    """Fresh objects with the state of a run."""
    objects = {key: value for key, value in build(seed).items() if key not in ("rng", "own", "notes")}
    objects["epoch"] = 0
    checkpoint = hf.Checkpoint(**objects)
    with hf.CheckpointManager(run, checkpoint) as manager:
        assert manager.restore() is not None
    return {name: checkpoint[name] for name in objects}


def trained(steps: int = 2) -> dict[str, Any]:
    objects = build(1)
    train(objects, steps)
    return objects


def check_goes_on(objects: dict[str, Any]) -> None:
    """As if the training had never been interrupted."""
    expected = trained()
    assert equal_states(objects["optimizer"].state_dict(), expected["optimizer"].state_dict())
    train(objects, 3, seed=6)
    train(expected, 3, seed=6)
    assert equal_states(objects["model"].state_dict(), expected["model"].state_dict())
    assert objects["schedule"].state_dict() == expected["schedule"].state_dict()
    assert objects["epoch"] == 3


def test_training_resumes_from_a_torch_file(tmp_path: Path) -> None:
    torch.save(as_saved(trained()), tmp_path / "old.pt")
    document = call_json("import", tmp_path / "old.pt", tmp_path / "run", "--step", "2")
    assert (document["format"], document["step"]) == ("torch", 2)
    assert document["objects"] == ["model", "optimizer", "schedule", "epoch"]
    assert call("verify", tmp_path / "run").exit_code == 0
    check_goes_on(restore(tmp_path / "run"))


def test_job_resumes_from_an_import_and_saves_after_it(tmp_path: Path) -> None:
    objects = trained()
    torch.save(as_saved(objects), tmp_path / "old.pt")
    with pytest.raises(errors.UsageError, match="no object named 'modle'"):
        hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", only="modle")
    hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", step=5, only="model")
    fresh = build(2)["model"]
    with hf.resumable(tmp_path / "run", model=fresh, save_every=hf.Steps(1)) as run:
        assert run.step == 5
        assert equal_states(fresh.state_dict(), objects["model"].state_dict())
        for _ in run.steps(7):
            pass
    assert call_json("list", tmp_path / "run")["newest_step"] == 7


@pytest.mark.parametrize(
    ("entries", "step"),
    [
        ({"step": 17, "epoch": 3}, 17),
        ({"global_step": 5}, 5),
        ({"step": 1.5, "global_step": 6}, 6),
        ({"step": -1}, None),
        ({"iter_num": 7, "best_val_loss": torch.tensor(2.5)}, 7),
        ({"step": torch.tensor(900)}, 900),
        ({"iteration": np.int64(8)}, 8),
        ({"num_updates": torch.tensor([9.0])}, 9),
        ({"step": torch.tensor([1, 2]), "iter": np.array(3)}, 3),
        ({"step": True, "epoch": 4}, None),
    ],
)
def test_a_whole_step_at_the_top_of_a_file_is_the_step(
    tmp_path: Path, entries: dict[str, Any], step: int | None
) -> None:
    torch.save({"model": torch.nn.Linear(2, 1).state_dict(), **entries}, tmp_path / "old.pt")
    found = call("import", tmp_path / "old.pt", tmp_path / "run")
    assert f"step {step or 0} of" in found.stdout
    assert ("no step in the source" in found.stderr) is (step is None)
    step = step or 0
    with hf.resumable(tmp_path / "run", model=torch.nn.Linear(2, 1), strict=False) as run:
        assert run.step == step


def test_training_resumes_from_a_dcp_directory(tmp_path: Path) -> None:
    objects = trained()
    state = as_saved(objects) | {"optimizer": get_optimizer_state_dict(objects["model"], objects["optimizer"])}
    save_dcp(state, checkpoint_id=tmp_path / "old", **old_versions.alone(save_dcp))
    document = call_json("import", tmp_path / "old", tmp_path / "run")
    assert document["format"] == "dcp"
    check_goes_on(restore(tmp_path / "run"))


def test_there_and_back(tmp_path: Path) -> None:
    objects = {name: value for name, value in trained().items() if name not in ("rng", "own", "notes")}
    with hf.CheckpointManager(tmp_path / "first", hf.Checkpoint(**objects)) as manager:
        manager.save(2)
    hf.export_checkpoint(tmp_path / "first", tmp_path / "out.pt", to="torch")
    hf.export_checkpoint(tmp_path / "first", tmp_path / "out", to="dcp")
    for source in ("out.pt", "out"):
        made = hf.import_checkpoint(tmp_path / source, tmp_path / f"run-{source}")
        assert made.left_out == ()
        check_goes_on(restore(tmp_path / f"run-{source}"))


def test_a_bare_state_dict_is_one_object(tmp_path: Path) -> None:
    model = trained()["model"]
    torch.save(model.state_dict(), tmp_path / "old.pt")
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pt")
    for name in ("old", "wrapped"):
        made = hf.import_checkpoint(tmp_path / f"{name}.pt", tmp_path / name, name="net")
        assert (made.objects, made.renamed, made.has_step) == (("net",), (), False)
        fresh = build(2)["model"]
        with hf.CheckpointManager(tmp_path / name, hf.Checkpoint(net=fresh)) as manager:
            manager.restore()
        assert equal_states(fresh.state_dict(), model.state_dict())
        assert fresh.head.weight is fresh.embedding.weight


def test_safetensors_alone_and_in_several_files(tmp_path: Path) -> None:
    save_arrays({"a.w": np.arange(6.0).reshape(2, 3)}, tmp_path / "one.safetensors")
    large = tmp_path / "large"
    large.mkdir()
    save_arrays({"a.w": np.arange(6.0).reshape(2, 3)}, large / "model-00001-of-00002.safetensors")
    save_arrays({"b": np.zeros((0, 3))}, large / "model-00002-of-00002.safetensors")
    (large / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a.w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    for source, names in (("one.safetensors", {"a.w"}), ("large", {"a.w", "b"})):
        run = tmp_path / f"run-{source}"
        assert hf.import_checkpoint(tmp_path / source, run).format == "safetensors"
        arrays: dict[str, Any] = {name: np.ones((2, 3) if name == "a.w" else (0, 3)) for name in names}
        with hf.CheckpointManager(run, hf.Checkpoint(model=arrays)) as manager:
            manager.restore()
        assert arrays["a.w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {
        "turned": torch.arange(12).reshape(3, 4).T,
        "every other": base[1::2],
        "part": base[3:9].view(2, 3),
        "again": base[3:9].view(2, 3),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "parameter": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "small": torch.tensor(7, dtype=torch.uint16),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
        "empty": torch.zeros(2, 0),
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    torch.save({"tensors": state, "kind": torch.bfloat16, "where": torch.device("cpu")}, tmp_path / "old.pt")
    made = hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert made.arrays == len(state) - 1  # Two of them are one.
    live: dict[str, Any] = {"tensors": {}, "kind": None, "where": None}
    checkpoint = hf.Checkpoint(**live)
    with hf.CheckpointManager(tmp_path / "run", checkpoint) as manager:
        manager.restore()
    found: Any = checkpoint["tensors"]
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(
            found[name].float() if name == "eight" else found[name],
            tensor.float() if name == "eight" else tensor.detach(),
        )
    assert (checkpoint["kind"], checkpoint["where"]) == (torch.bfloat16, torch.device("cpu"))


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *old_versions.dtypes("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
]
RAW_DTYPES = [torch.complex128, torch.complex32, *old_versions.dtypes("float4_e2m1fn_x2")]
"""What safetensors lacks."""


def bytes_of(tensor: Any) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4),
    st.sampled_from(["safetensors", "torch", "dcp"]),
    st.randoms(use_true_random=False),
)
def test_any_tensors_go_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Any], to: Any, random: Any
) -> None:
    tensors = {}
    if to != "safetensors":
        kinds = [*kinds, (random.choice(RAW_DTYPES), (2, 3))]
    for number, (dtype, shape) in enumerate(kinds):
        count = int(np.prod(shape, dtype=int)) * dtype.itemsize
        data = bytearray(random.randbytes(count) if dtype is not torch.bool else bytes(count))
        flat = torch.frombuffer(data, dtype=torch.uint8) if count else torch.zeros(0, dtype=torch.uint8)
        tensors[f"t{number}"] = flat.clone().view(dtype).reshape(shape)
    there, back = MemoryStorage(), MemoryStorage()
    with hf.CheckpointManager(there, hf.Checkpoint(model=tensors)) as manager:
        manager.save(1)
    out = tmp_path_factory.mktemp("out") / ("m.safetensors" if to == "safetensors" else "m")
    hf.export_checkpoint(there, out, to=to, only="model")
    hf.import_checkpoint(out, back, step=4)
    fresh = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with hf.CheckpointManager(back, hf.Checkpoint(model=fresh)) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 4
    assert {name: bytes_of(one) for name, one in fresh.items()} == {
        name: bytes_of(one) for name, one in tensors.items()
    }


def test_workers_of_torchrun_there_and_back(tmp_path: Path) -> None:
    """Two workers of FSDP2 save with holdfast and with DCP; each is handed on to the other side."""
    old_versions.skip_without_fsdp_on_cpu()
    agent = PROGRAMS / "elastic.py"
    command: list[str | Path] = [sys.executable, agent, "fsdp_export_worker", "2", "0", tmp_path]
    ended = preloaded.run(command, preload=preloaded.TRAINING, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "whole.pt").exists(), ended.stderr
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    hf.export_checkpoint(tmp_path / "run", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert equal_states(found["model"], whole["model"])
    made = hf.import_checkpoint(tmp_path / "dcp", tmp_path / "imported", step=1)
    assert made.arrays == len(whole["model"]) + 3 * len(whole["model"])
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with hf.CheckpointManager(tmp_path / "imported", hf.Checkpoint(model=model, optimizer=optimizer)) as manager:
        manager.restore()
    assert equal_states(dict(model.state_dict()), whole["model"])
    assert equal_states(found["optimizer"]["state"], optimizer.state_dict()["state"])
    assert float(optimizer.state_dict()["state"][0]["exp_avg"].abs().sum()) > 0


def test_an_optimizer_that_is_another_is_refused(tmp_path: Path) -> None:
    torch.save(as_saved(trained()), tmp_path / "old.pt")
    hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    model = build(1)["model"]
    for parameters, text in (
        (model.norm.parameters(), "stored with groups of"),
        (
            [{"params": [torch.ones(2)] * 1 + [torch.ones(3)]}, {"params": [torch.ones(9) for _ in range(3)]}],
            "stored for a",
        ),
    ):
        optimizer = torch.optim.AdamW(parameters)
        with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(optimizer=optimizer)) as manager:
            with pytest.raises(errors.MismatchError, match=text):
                manager.restore(only="optimizer")
        assert not optimizer.state


def test_a_dict_of_tensors_that_was_saved_goes_into_a_module() -> None:
    storage, model = MemoryStorage(), nn.Linear(2, 3)
    with hf.CheckpointManager(storage, hf.Checkpoint(model=dict(model.state_dict()))) as manager:
        manager.save(1)
    fresh = nn.Linear(2, 3)
    with hf.CheckpointManager(storage, hf.Checkpoint(model=fresh)) as manager:
        manager.restore()
        assert equal_states(fresh.state_dict(), model.state_dict())
        manager.restore(only="model/weight")
    with hf.CheckpointManager(storage, hf.Checkpoint(model=nn.Linear(2, 4))) as manager:
        with pytest.raises(errors.MismatchError, match="stored \\[3, 2\\], live \\[4, 2\\]"):
            manager.restore()


def test_what_cannot_be_kept_is_refused_or_left_out(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(2)}, "rng": np.random.default_rng(1), "x": OrderedDict(a=1)}, tmp_path / "a.pt"
    )
    code, text = complaint("import", tmp_path / "a.pt", tmp_path / "run")
    assert code == 1
    assert "numpy" in text
    assert not (tmp_path / "run").exists()
    document = call_json("import", tmp_path / "a.pt", tmp_path / "run", "--skip-unknown")
    assert [one["path"] for one in document["left_out"]] == ["rng"]
    assert document["objects"] == ["model", "x"]
    torch.save({"w": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)}, tmp_path / "b.pt")
    code, text = complaint("import", tmp_path / "b.pt", tmp_path / "other")
    assert (code, "_rebuild_qtensor" in text) == (1, True), text


def test_job_without_the_left_out_values_resumes(tmp_path: Path) -> None:
    entries = {
        "model": {"w": torch.ones(2)},
        "args": nn.Identity(),
        "more": {"epoch": 3, "args": {1: {2}}, "own": nn.Identity()},
    }
    torch.save(entries, tmp_path / "a.pt")
    document = call_json("import", tmp_path / "a.pt", tmp_path / "run", "--skip-unknown", "--step", "7")
    assert [one["path"] for one in document["left_out"]] == ["args", "more/own"]
    assert document["objects"] == ["model", "more"]
    model, more = {"w": torch.zeros(2)}, {"epoch": 0, "args": {1: {5}}}
    with hf.resumable(tmp_path / "run", model=model, more=more) as run:
        assert run.step == 7
    assert (model["w"].tolist(), more) == ([1, 1], {"epoch": 3, "args": {1: {2}}})


def start(run: Path, **objects: Any) -> dict[str, Any]:
    """The objects after the first start from an imported run."""
    checkpoint = hf.Checkpoint(**objects)
    with hf.CheckpointManager(run, checkpoint) as manager:
        assert manager.restore() is not None
    return {name: checkpoint[name] for name in objects}


def test_one_tensor_at_the_top_of_a_file_makes_no_model_of_it(tmp_path: Path) -> None:
    model = build(1)["model"]
    others: dict[str, Any] = {"loss": torch.tensor(0.5), "rng": torch.get_rng_state(), "grid": np.eye(2)}
    for name, other in others.items():
        torch.save({"model": model.state_dict(), name: other}, tmp_path / f"{name}.pt")
        found = call_json("import", tmp_path / f"{name}.pt", tmp_path / name, "--only", "model")
        assert found["objects"] == ["model"]
        assert equal_states(start(tmp_path / name, model=build(2)["model"])["model"].state_dict(), model.state_dict())
    # A module's own extra state lies between its tensors; nothing but tensors is one state too.
    for name, state in {
        "extra": {"w": torch.ones(2), "a._extra_state": {"scale": 2}},
        "arrays": {"w": np.ones(2)},
    }.items():
        torch.save(state, tmp_path / f"{name}.pt")
        assert call_json("import", tmp_path / f"{name}.pt", tmp_path / name)["objects"] == ["model"]


def test_a_state_dict_of_an_object_has_the_name_of_the_object(tmp_path: Path) -> None:
    objects = trained()
    entries = {
        "epoch": 3,
        "model_state_dict": objects["model"].state_dict(),
        "optimizer_state_dict": objects["optimizer"].state_dict(),
        "schedule_state_dict": objects["schedule"].state_dict(),
    }
    torch.save(entries, tmp_path / "old.pt")
    assert call_json("import", tmp_path / "old.pt", tmp_path / "run")["objects"] == [
        *("epoch", "model", "optimizer", "schedule")
    ]
    check_goes_on(restore(tmp_path / "run"))
    # Under the name in the file, where that is asked for.
    made = hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "same", only="model_state_dict")
    assert made.objects == ("model_state_dict",)
    made = hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "new", rename={"model_state_dict": "net"}, only="net")
    assert made.objects == ("net",)
    torch.save({"state_dict": {"w": torch.ones(1)}, "arch": "a", "model": "b"}, tmp_path / "taken.pt")
    made = hf.import_checkpoint(tmp_path / "taken.pt", tmp_path / "taken")
    assert made.objects == ("state_dict", "arch", "model")


def test_names_of_wrappers_are_removed_unless_the_live_module_has_them(tmp_path: Path) -> None:
    class Average(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = build(1)["model"]
    for number, prefix in enumerate(("module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.")):
        path = tmp_path / f"{number}.pt"
        torch.save({prefix + name: value for name, value in model.state_dict().items()}, path)
        hf.import_checkpoint(path, tmp_path / f"{number}")
        assert equal_states(
            start(tmp_path / f"{number}", model=build(2)["model"])["model"].state_dict(), model.state_dict()
        )
    average = Average(model)
    torch.save({"ema": average.state_dict(), "wrapped": nn.DataParallel(average).state_dict()}, tmp_path / "ema.pt")
    hf.import_checkpoint(tmp_path / "ema.pt", tmp_path / "ema")
    both = start(tmp_path / "ema", ema=Average(build(2)["model"]), wrapped=Average(build(3)["model"]))
    assert all(equal_states(one.state_dict(), average.state_dict()) for one in both.values())
    with pytest.raises(errors.MismatchError, match="missing from the checkpoint"):
        start(tmp_path / "ema", ema=nn.Linear(2, 2), wrapped=Average(build(3)["model"]))


class Kind(enum.Enum):
    A = 1


OTHERS: dict[str, Any] = {
    "best": np.float64(0.5),
    "count": np.int32(-3),
    "is_best": np.bool_(True),
    "history": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty": np.zeros((0, 2)),
    "args": argparse.Namespace(lr=0.1, out=Path("/data"), inner=argparse.Namespace(seed=np.int64(1), names=["a"])),
    "numpy": np.random.RandomState(3).get_state(),
    "python": random.Random(3).getstate(),
    "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 678),
    "by_number": {np.int64(3): 1.0, Path("a"): 2, Kind.A.value: 3},
    "last": deque([1, 2], maxlen=2),
    "parts": {Path("a"), 2},
    "text": np.str_("a\u00e4\0b"),
    "no_text": np.str_(""),
    "bytes": np.bytes_(b"ab"),
    "day": np.datetime64("2026-01-02"),
    "pause": np.array(30, "m8[10s]")[()],
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2, 3, 4),
    "delta": datetime.timedelta(-3, 4, 5),
    "names": types.SimpleNamespace(lr=0.1, at=datetime.date(2026, 1, 2)),
    "exact": decimal.Decimal("-1.50"),
    "ratio": fractions.Fraction(1, 3),
    "id": uuid.UUID(int=5),
    "range": range(3, 9, 2),
    "frozen": frozenset({1, "a"}),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_next_to_the_model_are_data(tmp_path: Path, protocol: int) -> None:
    # In a pickle, one instance of NumPy's is like another: the values are made here, and no function is called.
    torch.save({"model": {"w": torch.ones(2)}, **OTHERS}, tmp_path / "a.pt", pickle_protocol=protocol)
    document = call_json("import", tmp_path / "a.pt", tmp_path / "run")
    assert document["left_out"] == []
    live = {name: copy.deepcopy(value) for name, value in OTHERS.items()}
    for name in ("history", "turned"):
        live[name][:] = 0
    found = start(tmp_path / "run", model={"w": torch.zeros(2)}, **live)
    for name, value in OTHERS.items():
        np.testing.assert_equal(found[name], value)
        assert type(found[name]) is type(value)


def test_arrays_of_texts_and_times_become_lists_and_generators_have_names(tmp_path: Path) -> None:
    days = np.array([["2026-01-02"], ["2026-01-03"]], "M8[D]")
    others: dict[str, Any] = {
        "texts": np.asfortranarray([["a", "bc"], ["", "d"]]),
        "days": days,
        "text": np.array("abc"),
    }
    hostile = Hostile(decimal.Decimal, ("x",)), Hostile(fractions.Fraction, (1, 0)), Hostile(range, (1, 2, 0))
    others |= {"draw": np.random.default_rng(1), "objects": np.array([None], object), "bad": [*hostile]}
    torch.save({"model": {"w": torch.ones(2)}, **others}, tmp_path / "a.pt")
    assert "draw is a numpy.random.Generator, which" in complaint("import", tmp_path / "a.pt", tmp_path / "run")[1]
    result = hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", skip_unknown=True)
    assert [one.path for one in result.left_out] == ["draw", "objects", "bad/0", "bad/1", "bad/2"]
    assert result.left_out[1].reason == "it is a numpy array of objects or records"
    live: dict[str, Any] = {"texts": [], "days": [], "text": ""}
    found = start(tmp_path / "run", model={"w": torch.zeros(2)}, **live)
    assert found["texts"] == [["a", "bc"], ["", "d"]]
    assert found["days"] == [[days[0, 0]], [days[1, 0]]]
    assert found["text"] == "abc"


class Hostile:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_a_file_that_is_a_list_is_split_into_objects(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    states = model.state_dict(), optimizer.state_dict()
    torch.save((*states, 5), tmp_path / "a.pt")
    result = hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    assert (result.step, result.objects) == (5, ("model", "optimizer", "step"))
    live = nn.Linear(2, 2)
    start(tmp_path / "a", model=live, optimizer=torch.optim.SGD(live.parameters(), 0.1, momentum=0.9))
    assert torch.equal(live.weight, model.weight)
    renamed = hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "b", rename={"0": "net"}, only=["net", "optimizer"])
    assert set(renamed.objects) == {"net", "optimizer"}
    torch.save([states[0], other.state_dict(), "note"], tmp_path / "two.pt")
    two = hf.import_checkpoint(tmp_path / "two.pt", tmp_path / "c", rename={"1": "critic"})
    assert set(two.objects) == {"0", "critic", "2"}
    # Neither a list of tensors nor one of many samples is a list of objects.
    for number, values in enumerate(([torch.ones(2)], [{"x": torch.ones(2)}] * 20)):
        torch.save(values, tmp_path / "one.pt")
        assert hf.import_checkpoint(tmp_path / "one.pt", tmp_path / f"one{number}").objects == ("model",)


def test_what_is_not_chosen_is_never_refused(tmp_path: Path) -> None:
    others: dict[str, Any] = {
        "kind": Kind.A,
        "whole": nn.Linear(2, 2),
        "generator": np.random.default_rng(1),
        "names": {Kind.A: 1},
        "objects": np.array([None, {}], object),
        "args": argparse.Namespace(kind=Kind.A),
        "hook": os.system,
    }
    torch.save({"model": {"w": torch.ones(2)}, **others, "step": 5}, tmp_path / "a.pt")
    code, text = complaint("import", tmp_path / "a.pt", tmp_path / "all")
    assert code == 1
    assert "--skip-unknown" in text
    assert "--only" in text
    assert not (tmp_path / "all").exists()
    document = call_json("import", tmp_path / "a.pt", tmp_path / "run", "--only", "model")
    assert (document["objects"], document["step"], document["left_out"]) == (["model"], 5, [])
    assert start(tmp_path / "run", model={"w": torch.zeros(2)})["model"]["w"].tolist() == [1, 1]
    for name in others:
        assert complaint("import", tmp_path / "a.pt", tmp_path / "one", "--only", name)[0] == 1, name
    document = call_json("import", tmp_path / "a.pt", tmp_path / "skipped", "--skip-unknown")
    assert document["objects"] == ["model", "args", "step"]
    assert [one["path"] for one in document["left_out"]] == [
        *("kind", "whole", "generator", "names", "objects", "args/kind", "hook")
    ]


def test_a_directory_of_checkpoints_is_named_with_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for step in (8, 16):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    code, text = complaint("import", tmp_path / "out", tmp_path / "run")
    assert (code, f"import {tmp_path}/out/checkpoint-16" in text.replace("\n", "")) == (2, True), text
    torch.save({"w": torch.ones(1)}, tmp_path / "out" / "last.ckpt")
    assert "last.ckpt" in complaint("import", tmp_path / "out", tmp_path / "run")[1]


def test_all_of_a_file_becomes_one_object_under_a_name(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    assert call_json("import", tmp_path / "a.pt", tmp_path / "run", "--rename", ".=state")["objects"] == ["state"]
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "epoch": 0}
    with hf.resumable(tmp_path / "run", state=state) as run:
        assert run.step == 0
    assert (state["model"]["w"].tolist(), state["epoch"]) == ([1, 1], 3)
    code, text = complaint("import", tmp_path / "a.pt", tmp_path / "other", "--rename", ".=a", "--rename", "model=b")
    assert (code, "no object named 'model'" in text) == (2, True), text


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text").write_text("no checkpoint at all")
    (tmp_path / "empty").mkdir()
    assert call("import", tmp_path / "a.pt", tmp_path / "run").exit_code == 0
    assert "copy of its manifest" not in call("verify", tmp_path / "run").output
    (tmp_path / "files").mkdir()
    shutil.copy(tmp_path / "a.pt", tmp_path / "files")
    for place, named in ((tmp_path / "a.pt", "a.pt"), (tmp_path / "files", "files/a.pt")):
        assert f"holdfast import {tmp_path / named} RUN" in complaint("show", place)[1]
    for arguments, code, text in (
        ((tmp_path / "a.pt", tmp_path / "run"), 2, "already contains checkpoints, the newest of step 0"),
        ((tmp_path / "nowhere", tmp_path / "new"), 3, "nowhere does not exist"),
        ((tmp_path / "old.pt", tmp_path / "new"), 2, "before version 1.6"),
        ((tmp_path / "text", tmp_path / "new"), 2, "not in a format that can be imported"),
        ((tmp_path / "empty", tmp_path / "new"), 2, "nothing that can be imported"),
        ((tmp_path / "run", tmp_path / "new"), 2, "It is a holdfast run already"),
        ((tmp_path / "a.pt", tmp_path / "new", "--step", "-1"), 2, "Invalid value for '--step'"),
    ):
        found, said = complaint("import", *arguments)
        assert (found, text in said) == (code, True), said
    assert not (tmp_path / "new").exists()


def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "old").mkdir()
    for run in ("run", "old"):
        with pytest.raises(KeyboardInterrupt):
            hf.import_checkpoint(tmp_path / "a.pt", tmp_path / run, watcher=Interrupting())
    assert not (tmp_path / "run").exists()
    # What it has not made stays.
    assert [*(tmp_path / "old").iterdir()] == []
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    assert call("verify", tmp_path / "run").exit_code == 0
