"""`torch.distributed.checkpoint` through holdfast: what it saves is durable, what it loads is checked."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", "2.9", reason="holdfast.dcp needs torch 2.9")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

import holdfast as hf  # noqa: E402
import preloaded  # noqa: E402
from command_line import call, flip_bit  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.catalog import StoredRun  # noqa: E402
from holdfast.restore.verify import open_step, verify_data  # noqa: E402
from holdfast.storage import LocalStorage  # noqa: E402
from holdfast.testing.processes import Workers, python  # noqa: E402
from places import PROGRAMS  # noqa: E402
from whole_runs import steps_of  # noqa: E402

DATA = "data-00000-of-00001.safetensors"
PATIENCE_SECONDS = 300.0

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Own:
    """A `Stateful` with values of many kinds."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)
        self.state: dict[str, Any] = {
            "numbers": [1, 2, [3]],
            "tuple": (torch.full((3,), seed), "x", np.arange(seed)),
            "list": [torch.ones(2) * seed, {"a/b": seed, "$c": 2.5}],
            "type": torch.float16,
            "size": torch.Size([1, 2]),
            "ordered": OrderedDict(b=1, a=2),
            "none": None,
            "bytes": b"\0\1",
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])
        self.state = state


def make(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, without which torch starts no other process to save."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(run: Any, state: dict[str, Any], **options: Any) -> hf.dcp.StorageWriter:
    writer = hf.dcp.StorageWriter(run, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def load(run: Any, state: dict[str, Any], **options: Any) -> hf.dcp.StorageReader:
    reader = hf.dcp.StorageReader(run, **options)
    dcp.load(state, storage_reader=reader)
    return reader


def cause_of(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What a worker has raised, which torch hands on."""
    ((error, _),) = caught.value.failures.values()
    return error


def test_all_of_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    (net, optimizer), own = make(1), Own(5)
    state = {"model": net, "optim": optimizer.state_dict(), "own": own, "step": 7, "random": torch.get_rng_state()}
    writer = save(tmp_path, state)
    (other, fresh), another = make(2), Own(6)
    back = {
        "model": other,
        "optim": fresh.state_dict(),
        "own": another,
        "step": 0,
        "random": torch.zeros_like(state["random"]),
    }
    reader = load(tmp_path, back)
    assert (writer.saved_step, reader.loaded_step) == (0, 0)
    assert back["step"] == 7
    assert torch.equal(back["random"], state["random"])
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
    fresh.load_state_dict(back["optim"])
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert another.random.bytes(8) == own.random.bytes(8)
    assert str(another.state) == str({**own.state_dict(), "random": another.state["random"]})


def test_state_is_saved_in_the_background(tmp_path: Path) -> None:
    weights = torch.arange(1000.0)
    writer = hf.dcp.StorageWriter(tmp_path)
    future: Any = dcp.async_save({"weights": weights}, storage_writer=writer)
    weights += 1
    future.result()
    back = {"weights": torch.zeros(1000)}
    load(tmp_path, back)
    assert torch.equal(back["weights"], torch.arange(1000.0))


def test_saves_without_a_wait_are_made_one_after_the_other(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path)
    # Large enough to be written still when the next one begins.
    states = [{"a": torch.full((1 << 22,), float(number))} for number in range(4)]
    futures: list[Any] = [dcp.async_save(state, storage_writer=writer) for state in states]
    for future in futures:
        future.result()
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    found = set()
    for step in range(4):
        back = {"a": torch.zeros(1 << 22)}
        dcp.load(back, storage_reader=hf.dcp.StorageReader(tmp_path, step=step))
        assert bool((back["a"] == back["a"][0]).all())
        found.add(back["a"][0].item())
    assert found == {0.0, 1.0, 2.0, 3.0}


def test_tensors_of_other_types_and_layouts_take_the_values(tmp_path: Path) -> None:
    stored = {
        "wide": torch.randn(4, 6),
        "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).bfloat16(),
    }
    save(tmp_path, stored)
    back = {
        "wide": torch.zeros(6, 4).t(),
        "image": torch.zeros(2, 3, 4, 5),
        "scalar": torch.zeros((), dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.zeros(5),
    }
    load(tmp_path, back)
    for name, tensor in back.items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name


def test_the_command_line_takes_what_dcp_has_saved(tmp_path: Path) -> None:
    net, optimizer = make(1)
    save(tmp_path / "run", {"model": net, "optim": optimizer.state_dict()})
    assert "living" in call("list", tmp_path / "run").output
    assert "tree/model/0.weight" in call("show", tmp_path / "run", "--largest", "9").output
    assert "1 whole" in call("verify", tmp_path / "run").output
    call("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    exported = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert any(torch.equal(tensor, net.state_dict()["0.weight"]) for tensor in exported.values()), exported.keys()
    tree = hf.load(tmp_path / "run")
    assert (tree["model"]["2.bias"] == net.state_dict()["2.bias"].numpy()).all()


def test_what_hf_save_has_written_is_loaded_by_dcp(tmp_path: Path) -> None:
    net, _ = make(1)
    hf.save(tmp_path, {"model": net.state_dict(), "step": 3})
    other, _ = make(2)
    back = {"model": other, "step": 0}
    load(tmp_path, back)
    assert back["step"] == 3
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


def test_a_step_is_loaded_without_a_state_that_is_like_it(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"a.b": torch.arange(3), "c": [torch.ones(2), 5]}, "step": 4})
    found = _load_state_dict_from_keys(storage_reader=hf.dcp.StorageReader(tmp_path))
    assert str(found) == str({"model": {"a.b": torch.arange(3), "c": [torch.ones(2), 5]}, "step": 4})


def test_a_planner_that_does_not_flatten_is_served(tmp_path: Path) -> None:
    state = {"a.b": torch.arange(3), "c": {"d": [1, torch.ones(2)]}}
    dcp.save(
        state,
        storage_writer=hf.dcp.StorageWriter(tmp_path),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    )
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    back: dict[str, Any] = {"a.b": torch.zeros(3, dtype=torch.int64), "c": None}
    dcp.load(back, storage_reader=hf.dcp.StorageReader(tmp_path), planner=planner)
    assert str(planner.state_dict) == str(state)


def test_planners_that_cache_their_plans_write_each_step_in_full(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = hf.dcp.StorageWriter(tmp_path)
    states = [{"x": torch.full((4,), number), "step": number} for number in range(3)]
    states.append({**states[2], "y": torch.ones(2)})
    for number, state in enumerate(states):
        # As a program keeps it, or makes it for each save: torch keeps the plans with the class.
        planner = planner if number % 2 else dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, planner=planner)
    assert len(dcp.DefaultSavePlanner._cached_final_save_plan) == 1
    for number, state in enumerate(states):
        back = {name: torch.zeros_like(value) if name != "step" else 0 for name, value in state.items()}
        load(tmp_path, back, step=number)
        assert str(back) == str(state)
    assert load(tmp_path / StoredRun(LocalStorage(tmp_path)).look().living[0].directory, {"step": 0}).latest_step() == 0


def test_the_newest_step_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    reader = hf.dcp.StorageReader(tmp_path)
    assert reader.latest_step() is None
    save(tmp_path, {"x": 1}, step=7)
    assert reader.latest_step() == 7
    (tmp_path / StoredRun(LocalStorage(tmp_path)).look().living[0].manifest_path).unlink()
    with pytest.raises(errors.NoWholeCheckpointError):
        reader.latest_step()


def test_a_number_set_during_a_save_is_that_of_the_next(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path, step=5)

    class Later(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            writer.step = 10
            return super().resolve_data(write_item)

    dcp.save({"x": torch.ones(2)}, storage_writer=writer, planner=Later())
    for _ in range(2):
        dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    assert steps_of(tmp_path) == [5, 10, 11]


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_another_process_saves_what_shares_its_memory(tmp_path: Path) -> None:
    """As torchtitan does it: torch copies into shared memory, and a process that it starts calls the writer."""
    writer = hf.dcp.StorageWriter(tmp_path, step=10, keep=hf.Latest(2))
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    weights = torch.arange(1000.0)
    save(tmp_path, {"weights": weights})
    for number in range(3):
        answer: Any = dcp.async_save(
            {"weights": weights, "number": number},
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        answer.staging_completion.result()
        weights += 1
        answer.upload_completion.result()
        writer.step = {0: None, 1: 20}.get(number)
    stager.close()
    dcp.save({"weights": weights, "number": 3}, storage_writer=writer)
    assert steps_of(tmp_path) == [20, 21]
    for step, number in ((20, 2), (21, 3)):
        back = {"weights": torch.zeros(1000), "number": 0}
        load(tmp_path, back, step=step)
        assert torch.equal(back["weights"], torch.arange(1000.0) + number)
        assert back["number"] == number


def test_steps_are_numbered_and_a_lower_number_begins_a_line(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path, step=10)
    for number in range(3):
        dcp.save({"x": number}, storage_writer=writer)
    assert steps_of(tmp_path) == [10, 11, 12]
    save(tmp_path, {"x": 3})
    assert steps_of(tmp_path) == [10, 11, 12, 13]
    for run_writer in (hf.dcp.StorageWriter(tmp_path, step=12), hf.dcp.StorageWriter(tmp_path)):
        dcp.save({"x": 4}, storage_writer=run_writer)
    assert steps_of(tmp_path) == [10, 11, 12, 13]
    back = {"x": 0}
    assert load(tmp_path, back).loaded_step == 13
    assert back == {"x": 4}
    assert load(tmp_path, back, step=11).loaded_step == 11
    assert back == {"x": 1}


def test_what_is_not_kept_is_removed_after_a_save(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path, keep=hf.Latest(2))
    for number in range(4):
        dcp.save({"x": torch.full((3,), number)}, storage_writer=writer)
    assert steps_of(tmp_path) == [2, 3]


def test_a_save_that_fails_leaves_the_step_before(tmp_path: Path) -> None:
    writer = save(tmp_path, {"x": 1})
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": 2, "bad": {"thing": object()}}, storage_writer=writer)
    assert isinstance(cause_of(caught), errors.UnsupportedValueError)
    assert "tree/bad/thing: a value of type object" in str(caught.value)
    back = {"x": 0}
    load(tmp_path, back)
    assert back == {"x": 1}
    dcp.save({"x": 3}, storage_writer=writer)
    load(tmp_path, back)
    assert back == {"x": 3}


def test_an_error_can_be_sent_to_other_workers() -> None:
    unsupported = errors.UnsupportedValueError("it cannot be", path="tree/a", hint="Leave it.")
    damage = errors.DamageError("a bit flipped", step=3, path="data", offset_bytes=4096, tensor="tree/a")
    for error in (unsupported, damage):
        sent = copy.copy(error)  # As pickle does it.
        assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


def test_a_flipped_bit_is_named_and_an_older_step_is_loaded(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path)
    for number in (1.0, 2.0):
        dcp.save({"net": {"weight": torch.full((5000,), number)}}, storage_writer=writer)
    newest = StoredRun(LocalStorage(tmp_path)).look().living[-1]
    flip_bit(tmp_path / newest.directory / DATA, 4096 + 7000)
    back = {"net": {"weight": torch.zeros(5000)}}
    with pytest.raises(CheckpointException, match=rf"{DATA}.*tree/net/weight") as caught:
        load(tmp_path, back)
    assert isinstance(cause_of(caught), errors.DamageError)
    load(tmp_path, back, step=0)
    assert torch.equal(back["net"]["weight"], torch.ones(5000))


def test_a_step_with_damaged_records_is_passed_over(tmp_path: Path) -> None:
    writer = hf.dcp.StorageWriter(tmp_path)
    for number in (1, 2):
        dcp.save({"x": number}, storage_writer=writer)
    newest = StoredRun(LocalStorage(tmp_path)).look().living[-1]
    (tmp_path / newest.directory / "index-00000-of-00001.json").unlink()
    back = {"x": 0}
    with pytest.warns(UserWarning, match="step 1 is damaged and was skipped"):
        assert load(tmp_path, back).loaded_step == 0
    assert back == {"x": 1}
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, back, step=1)
    assert isinstance(cause_of(caught), errors.DamageError)


def test_missing_checkpoint_or_object_is_reported(tmp_path: Path) -> None:
    with hf.resumable(tmp_path / "loop", counter={"x": 1}, quiet=True) as run:
        run.save()
    wrong = {
        tmp_path / "nothing": (errors.NoCheckpointError, "contains no checkpoint"),
        tmp_path / "loop": (errors.UsageError, "contains a run of counter"),
        None: (errors.UsageError, "no path to load from was given"),
    }
    for place, (kind, text) in wrong.items():
        with pytest.raises(CheckpointException, match=text) as caught:
            load(place, {"x": 0})
        assert isinstance(cause_of(caught), kind)


def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="use_collectives"):
        dcp.save({"x": 1}, storage_writer=hf.dcp.StorageWriter(tmp_path), use_collectives=False)
    with pytest.raises(errors.UsageError, match="keep must be a policy"):
        hf.dcp.StorageWriter(tmp_path, keep="three")
    with pytest.raises(CheckpointException, match="no path to save to was given"):
        save(None, {"x": 1})
    with pytest.raises(CheckpointException, match="a StorageWriter has no tiers"):
        save(hf.Tiers(tmp_path, tmp_path / "far"), {"x": 1})
    assert steps_of(tmp_path) == []


def test_the_run_of_a_training_loop_is_left_alone(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, weights=torch.ones(2), quiet=True) as run:
        for _ in run.steps(2):
            pass
    with pytest.raises(CheckpointException, match="contains the run of a training loop"):
        save(tmp_path, {"x": 1}, keep=hf.Latest(1))
    assert steps_of(tmp_path) == [2]


def test_a_writer_that_another_job_has_followed_is_fenced_off(tmp_path: Path) -> None:
    writer = save(tmp_path, {"x": 1})
    save(tmp_path, {"x": 2})
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": 3}, storage_writer=writer)
    cause = cause_of(caught)
    assert isinstance(cause, errors.FencedError)
    assert "one StorageWriter for all saves" in cause.hint


@pytest.mark.slow
@pytest.mark.long
def test_workers_are_killed_in_saves_and_others_load_them(tmp_path: Path) -> None:
    launch = python(PROGRAMS / "elastic.py", "dcp_job", "2", "2", "save", tmp_path)
    launch += ["--", "1", "0", "check", tmp_path, "--", "2", "0", "check", tmp_path]
    with Workers(tmp_path) as workers:
        number = workers.start(launch, {"OMP_NUM_THREADS": "1"}, preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [number]) == [0], workers.report(number)
        assert workers.records(number) == [{"checked": 1, "step": 0}, {"checked": 2, "step": 1}]
    assert steps_of(tmp_path / "run") == [0, 1, 2]
    for run in ("run", "second"):
        storage = LocalStorage(tmp_path / run)
        for name in StoredRun(storage).look().committed:
            assert not verify_data(storage, open_step(storage, name.directory, name))
    assert sorted(hf.load(tmp_path / "run")["app"]) == ["model", "name", "optimizer", "seen"]
