"""`holdfast export` and `holdfast.export_checkpoint`: what is written is read back by the programs that it is for."""

from __future__ import annotations

import io
import itertools
import json
import os
import queue
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file as load_arrays

import holdfast as hf
import old_versions
from command_line import DATA, call, call_json, complaint, flip_bit, run_python, show_on_terminal
from holdfast.convert.exporter import export_checkpoint
from holdfast.convert.files import InputFile
from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.convert.pickle_write import write_pickle
from holdfast.convert.torch_file import TorchArchive, tensor_call, write_archive
from holdfast.errors import NoCheckpointError, UsageError
from holdfast.restore.verify import open_step
from holdfast.storage import LocalStorage
from holdfast.storage.memory import MemoryStorage
from simulated_job import save_job

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, load_model  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp  # noqa: E402

from converted_model import Interrupting, build, equal_states, train  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("export") / "run"
    objects = build(1)
    train(objects, 2)
    with hf.CheckpointManager(directory, hf.Checkpoint(**objects)) as manager:
        manager.save(2)
    return directory, objects


def test_a_model_as_one_safetensors_file(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, objects = trained
    result = call("export", run, tmp_path / "model.safetensors", "--to", "safetensors", "--only", "model")
    assert result.exit_code == 0, result.stderr
    assert "model/head.weight (it is the same array as embedding.weight" in result.stderr
    found = load_file(tmp_path / "model.safetensors")
    state = objects["model"].state_dict()
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(equal_states(found[key], state[key]) for key in found)
    fresh = build(2)["model"]
    missing, unexpected = load_model(fresh, str(tmp_path / "model.safetensors"))
    assert not missing
    assert not unexpected
    assert equal_states(fresh.state_dict(), state)


def test_a_model_as_hugging_face_has_large_ones(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, objects = trained
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    document = call_json(
        *("export", run, out, "--to", "safetensors", "--only", "model", "--repeat-shared", "--file-size", "100")
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    state = objects["model"].state_dict()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{one:05d}-of-{len(names):05d}.safetensors" for one in range(1, len(names) + 1)]
    assert len(names) > 2
    assert sorted(document["files"]) == sorted([*names, "model.safetensors.index.json"])
    for key, name in index["weight_map"].items():
        assert equal_states(load_file(out / name)[key], state[key])
    assert index["weight_map"].keys() == state.keys()
    assert {one.name for one in out.iterdir()} == {"config.json", *document["files"]}


def test_a_file_that_torch_loads(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, objects = trained
    document = call_json("export", f"{run}@2", tmp_path / "all.pt", "--to", "torch")
    left = {one["path"]: one["reason"] for one in document["left_out"]}
    assert left == {"rng": "it differs per worker", "own": "it differs per worker"}
    for options in ({}, {"mmap": True}):
        found = torch.load(tmp_path / "all.pt", weights_only=True, **options)
        assert found.keys() == objects.keys() - {"rng", "own"}
        assert equal_states(found["model"], dict(objects["model"].state_dict()))
        assert found["model"]["head.weight"].data_ptr() == found["model"]["embedding.weight"].data_ptr()
        assert equal_states(found["optimizer"]["state"], objects["optimizer"].state_dict()["state"])
        assert (found["epoch"], found["notes"]) == (3, objects["notes"])
    fresh = build(2)
    fresh["model"].load_state_dict(found["model"])
    fresh["optimizer"].load_state_dict(found["optimizer"])
    fresh["schedule"].load_state_dict(found["schedule"])
    again = build(1)
    train(again, 2)
    train(again, 3, seed=6)
    train(fresh, 3, seed=6)
    assert equal_states(fresh["model"].state_dict(), again["model"].state_dict())


def test_one_object_is_the_file(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, objects = trained
    hf.export_checkpoint(run, tmp_path / "model.pt", to="torch", only="model")
    hf.export_checkpoint(run, tmp_path / "kept.pt", to="torch", only="model", keep_prefix=True)
    state = dict(objects["model"].state_dict())
    assert equal_states(torch.load(tmp_path / "model.pt", weights_only=True), state)
    assert equal_states(torch.load(tmp_path / "kept.pt", weights_only=True), {"model": state})


def test_a_directory_that_dcp_loads(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, objects = trained
    hf.export_checkpoint(run, tmp_path / "dcp", to="dcp", file_bytes=400)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 2
    fresh = build(2)
    state = {
        "model": fresh["model"].state_dict(),
        "optimizer": get_optimizer_state_dict(fresh["model"], fresh["optimizer"]),
        "epoch": 0,
        "notes": {"seen": []},
    }
    load_dcp(state, checkpoint_id=tmp_path / "dcp", **old_versions.alone(load_dcp))
    assert equal_states(state["model"], objects["model"].state_dict())
    expected = get_optimizer_state_dict(objects["model"], objects["optimizer"])
    assert equal_states(state["optimizer"]["state"], expected["state"])
    assert equal_states(state["optimizer"]["param_groups"], expected["param_groups"])
    assert (state["epoch"], state["notes"]["seen"]) == (3, [1, 2.5, "three"])


def sharded(rank: int, workers: int) -> dict[str, Any]:
    """Rows, columns and blocks of arrays, something that all hold, and something of each worker's own."""
    rows = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
    columns = np.arange(4 * 8, dtype=np.int16).reshape(4, 8)
    deep = np.arange(3 * 5 * 4, dtype=np.uint8).reshape(3, 5, 4)
    cuts = [7 * one // workers for one in range(workers + 1)]
    begin, end = cuts[rank], cuts[rank + 1]
    width = 8 // workers
    depth = 4 // workers
    return {
        "model": {
            "rows": hf.Shard(rows[begin:end], rows.shape, (begin, 0)),
            "columns": hf.Shard(columns[:, rank * width :][:, :width].copy(), columns.shape, (0, rank * width)),
            "deep": hf.Shard(deep[:, :, rank * depth :][:, :, :depth].copy(), deep.shape, (0, 0, rank * depth)),
            "same": np.ones(3),
        },
        "own": hf.PerWorker({"place": np.full(2, rank)}),
    }


def check_sharded(found: dict[str, Any]) -> None:
    assert found["rows"].tolist() == np.arange(42.0).reshape(7, 6).tolist()
    assert found["columns"].tolist() == np.arange(32).reshape(4, 8).tolist()
    assert found["deep"].tolist() == np.arange(60).reshape(3, 5, 4).tolist()
    assert found["same"].tolist() == [1, 1, 1]
    assert found.keys() == {"rows", "columns", "deep", "same"}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_export_joins_arrays_held_by_several_workers(workers: int, tmp_path: Path) -> None:
    storage = MemoryStorage()
    save_job(storage, [sharded(rank, workers) for rank in range(workers)])
    export = hf.export_checkpoint(storage, tmp_path / "one.safetensors", to="safetensors", only="model")
    assert (export.arrays, export.left_out) == (4, ())
    check_sharded(load_arrays(tmp_path / "one.safetensors"))
    hf.export_checkpoint(storage, tmp_path / "one.pt", to="torch", only="model")
    check_sharded(torch.load(tmp_path / "one.pt", weights_only=True))
    hf.export_checkpoint(storage, tmp_path / "dcp", to="dcp", only="model")
    state = {
        "rows": torch.zeros(7, 6),
        "columns": torch.zeros(4, 8, dtype=torch.int16),
        "deep": torch.zeros(3, 5, 4, dtype=torch.uint8),
        "same": torch.zeros(3, dtype=torch.float64),
    }
    load_dcp(state, checkpoint_id=tmp_path / "dcp", **old_versions.alone(load_dcp))
    check_sharded(state)


@pytest.mark.parametrize("window_bytes", [8, 24, 4096])
def test_windows_of_any_size_give_the_same_bytes(window_bytes: int) -> None:
    storage = MemoryStorage()
    manifest = save_job(storage, [sharded(rank, 4) for rank in range(4)])
    opened = open_step(storage, manifest.name.directory, manifest.name)
    reader = LeafReader(storage, opened, storage, window_bytes=window_bytes)
    found = {
        leaf: b"".join(bytes(piece) for piece in reader.stream([reader.whole(leaf)]))
        for leaf in ("model/rows", "model/columns", "model/deep")
    }
    reader.close()
    assert found["model/rows"] == np.arange(42, dtype=np.float32).tobytes()
    assert found["model/columns"] == np.arange(32, dtype=np.int16).tobytes()
    assert found["model/deep"] == np.arange(60, dtype=np.uint8).tobytes()


def test_what_an_incremental_step_refers_to_is_exported_too(tmp_path: Path) -> None:
    objects = {"model": {"frozen": np.arange(300_000.0), "trained": np.zeros(10)}}
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(**objects), incremental=True) as manager:
        for step in (1, 2):
            objects["model"]["trained"] += 1
            manager.save(step)
    assert call_json("show", tmp_path / "run")["references"]
    hf.export_checkpoint(tmp_path / "run", tmp_path / "out", to="safetensors", only="model")
    found = load_arrays(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(found["frozen"], np.arange(300_000.0))
    assert found["trained"].tolist() == [2.0] * 10
    assert call("export", tmp_path / "run" / "step-000000002.g0001", tmp_path / "a.pt", "--to", "torch").exit_code == 0


FORMATS = ["safetensors", "torch", "dcp"]


@pytest.mark.parametrize("to", FORMATS)
def test_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path, to: str) -> None:
    flip_bit(run / "step-000000300.g0002" / DATA, 5000)
    code, text = complaint("export", run, tmp_path / "out", "--to", to)
    assert code == 1
    assert "do not match their digest" in text
    assert f"`holdfast verify --all {run}` says which steps are whole" in text.replace("\n", " ")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["gpt"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_is_not_overwritten_unless_asked(run: Path, tmp_path: Path, to: Any) -> None:
    out = tmp_path / "out"
    assert call("export", run, out, "--to", to, "--only", "model").exit_code == 0
    before = {one.name: one.stat().st_ino for one in ([out] if out.is_file() else sorted(out.iterdir()))}
    code, text = complaint("export", f"{run}@200", out, "--to", to, "--only", "model")
    assert code == 2
    assert "already" in text
    assert "add --overwrite." in text
    assert "overwrite=True" not in text
    with pytest.raises(UsageError, match="pass overwrite=True"):
        export_checkpoint(run, out, to=to, only="model")
    if out.is_dir():
        (out / "README.md").write_text("mine")
    assert call("export", f"{run}@200", out, "--to", to, "--only", "model", "--overwrite").exit_code == 0
    after = {one.name: one.stat().st_ino for one in ([out] if out.is_file() else sorted(out.iterdir()))}
    assert after.keys() - {"README.md"} == before.keys()
    assert all(after[name] != inode for name, inode in before.items())
    assert not [one for one in tmp_path.iterdir() if one.name.endswith(".tmp")]


@pytest.mark.parametrize("to", FORMATS)
def test_an_interrupted_export_leaves_nothing(run: Path, tmp_path: Path, to: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        hf.export_checkpoint(run, tmp_path / "out", to=to, watcher=Interrupting())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["gpt"]


def test_a_disk_that_fills_up_leaves_nothing(run: Path, tmp_path: Path) -> None:
    program = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        from holdfast.cli.main import main
        sys.argv[1:] = ["export", sys.argv[1], sys.argv[2], "--to", sys.argv[3]]
        main()
    """
    for to in FORMATS:
        ended = run_python(program, str(run), str(tmp_path / "out"), to)
        assert ended.returncode == 4, ended.stderr
        assert "no file may grow that large" in ended.stderr
        assert sorted(one.name for one in tmp_path.iterdir()) == ["gpt"]


def test_the_command_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, code, text in (
        (("export", run, out), 2, "Missing option '--to'"),
        (("export", run, out, "--to", "onnx"), 2, "is not one of"),
        (("export", run, out, "--to", "torch", "--only", "modle"), 2, "no object or leaf named 'modle'"),
        (("export", f"{run}@7", out, "--to", "torch"), 3, "there is no checkpoint of step 7"),
        (("export", tmp_path / "nowhere", out, "--to", "torch"), 3, "there is no directory"),
        (("export", run, tmp_path / "no" / "out", "--to", "torch"), 2, f"{tmp_path}/no does not exist"),
        (("export", run, Path(__file__) / "no" / "out", "--to", "torch"), 2, f"{__file__} is not a directory"),
        (("export", run, tmp_path, "--to", "torch"), 2, "is not a file"),
        (("export", run, __file__, "--to", "dcp"), 2, "is not a directory"),
        (("export", run, run / "generations" / "0001.json", "--to", "torch", "--overwrite"), 2, "is inside the run"),
        (("export", run, out, "--to", "torch", "--file-size", "1GB"), 2, "needs a format of several files"),
        (("export", run, out, "--to", "dcp", "--repeat-shared"), 2, "works with safetensors only"),
    ):
        found, said = complaint(*arguments)
        assert (found, text in said) == (code, True), said
    assert not out.exists()


def test_names_that_would_be_one_are_refused(tmp_path: Path) -> None:
    with hf.CheckpointManager(
        tmp_path / "run", hf.Checkpoint(a={"b.c": np.ones(1), "b": {"c": np.ones(2)}})
    ) as manager:
        manager.save(1)
    for to in ("safetensors", "dcp"):
        code, text = complaint("export", tmp_path / "run", tmp_path / "out", "--to", to)
        assert code == 2
        assert "would both be named 'a.b.c'" in text


def test_a_terminal_sees_what_was_written(run: Path, tmp_path: Path) -> None:
    shown = show_on_terminal("export", run, tmp_path / "m", "--to", "safetensors", "--only", "model", columns=60)
    assert shown.exit_code == 0
    assert "model.safetensors" in shown.text


@pytest.mark.long
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    arrays = {str(one): np.full((32 << 20) // 8, one, np.float64) for one in range(8)}
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(model=arrays), threads=2) as manager:
        manager.save(1)
    del arrays
    program = """
        import resource, sys
        import numpy
        import holdfast as hf
        run, out = sys.argv[1:]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hf.export_checkpoint(run, out + "/m.safetensors", to="safetensors", only="model")
        hf.export_checkpoint(run, out + "/m.pt", to="torch", only="model")
        hf.export_checkpoint(run, out + "/dcp", to="dcp", only="model")
        for source in ("m.safetensors", "m.pt", "dcp"):
            hf.import_checkpoint(out + "/" + source, out + "/run-" + source)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "torch" in sys.modules)
    """
    ended = run_python(program, str(tmp_path / "run"), str(tmp_path), preload=None)
    assert ended.returncode == 0, ended.stderr
    grown_kib, has_torch = ended.stdout.split()
    # The state has 256 MiB, a window 64.
    assert int(grown_kib) < 160 << 10
    assert has_torch == "False"
    for one in (tmp_path / "run-m.pt", tmp_path / "run-dcp", tmp_path / "run-m.safetensors"):
        assert call("verify", one).exit_code == 0
        assert (one / "step-000000000.g0001" / DATA).stat().st_size >= 256 << 20


class SparseFile(io.FileIO):
    """Leaves holes where zeros are written."""

    def write(self, data: Any) -> int:
        if len(data) < len(ZEROS):
            return super().write(data)
        self.truncate(self.seek(len(data), os.SEEK_CUR))
        return len(data)


ZEROS = memoryview(bytes(64 << 20))


def test_an_archive_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sizes and places beyond 32 bits stand in fields of their own."""
    path, count = tmp_path / "large.pt", (4 << 30) // len(ZEROS) + 1
    small, large = StoredLeaf("F32", (3,)), StoredLeaf("U8", (count * len(ZEROS),))
    tensors = {"first": tensor_call("0", small), "large": tensor_call("1", large), "last": tensor_call("2", small)}
    storages: list[tuple[str, int, Iterable[bytes | memoryview]]] = [
        ("0", 12, [np.arange(3, dtype=np.float32).tobytes()]),
        ("1", large.size_bytes, itertools.repeat(ZEROS, count)),
        ("2", 12, [np.ones(3, np.float32).tobytes()]),
    ]
    with SparseFile(path, "xb") as file:
        write_archive(file, write_pickle(tensors), storages)
    found = torch.load(path, weights_only=True, mmap=True)
    assert (found["first"].tolist(), found["last"].tolist()) == ([0, 1, 2], [1, 1, 1])
    assert tuple(found["large"].shape) == large.shape
    with closing(InputFile(path)) as source:
        read = TorchArchive(source, 0, source.size_bytes)
        places = {name: place for name, made in read.value.items() if (place := read.tensor(made)) is not None}
        assert source.read(places["last"].begin, 12) == np.ones(3, np.float32).tobytes()
        assert places["large"].shape == large.shape


def test_step_removed_during_its_export_is_not_reported_as_damage(tmp_path: Path) -> None:
    class Beside(LocalStorage):
        """Here the job saves on as soon as somebody reads a step's index."""

        def read(self, path: str, limit_bytes: int) -> bytes:
            if "index" in path and not ahead.empty():
                manager.save(ahead.get()).wait_ended()
            return super().read(path, limit_bytes)

    ahead: queue.SimpleQueue[int] = queue.SimpleQueue()
    state = {"array": np.arange(5.0)}
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(state=state), keep=hf.Latest(1)) as manager:
        manager.save(1).wait_ended()
        for step in (2, 3):
            ahead.put(step)
        done = export_checkpoint(Beside(tmp_path / "run"), tmp_path / "out", to="safetensors")
        assert done.step == 3
        ahead.put(4)
        with pytest.raises(NoCheckpointError, match="removed while it was being read"):
            export_checkpoint(Beside(tmp_path / "run"), tmp_path / "other", to="safetensors", step=3)
    assert not (tmp_path / "other").exists()
