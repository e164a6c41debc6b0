"""Workers that save by `torch.distributed.checkpoint` through holdfast, with FSDP2; or load what others have saved.

python tests/programs/elastic.py dcp_job 2 1 save DIRECTORY -- 1 0 check DIRECTORY
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast as hf
from holdfast.testing.cluster_scenarios import say
from mesh_training import build, compare, read_state, train


class Training:
    """A `Stateful`, as torch's tutorial of DCP has it, with values of each worker's own making beside the tensors."""

    def __init__(self, layout: str) -> None:
        self.net, self.optimizer = build(layout)
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen, "name": ("a", 1.5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["name"] == ("a", 1.5)
        self.seen = state["seen"]

    def go(self, step: int) -> None:
        train(self.net, self.optimizer, step)
        self.seen += 1


class Killed(dcp.DefaultSavePlanner):
    """Is killed when it is asked for its first item."""

    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledAtEnd(hf.dcp.StorageWriter):
    """Is killed when all workers have written, and nothing is committed yet."""

    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_all(directory: Path) -> None:
    """Saves two steps; then it is killed in the middle of the third, at another moment each time."""
    training, run = Training("fsdp"), directory / "run"
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if start == "0":
        writer = hf.dcp.StorageWriter(run)
        for step in range(2):
            training.go(step)
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save({"app": training}, storage_writer=writer, planner=planner)
        expected = read_state(training.net, training.optimizer)
        training.go(2)
        future: Any = dcp.async_save({"app": training}, storage_writer=writer)
        future.result()
        refuse(training, writer)
        if dist.get_rank() == 0:
            assert writer.saved_step == 2
            save_file(expected, directory / "expected.safetensors")
        dist.barrier()
        planner = Killed() if dist.get_rank() == 1 else dcp.DefaultSavePlanner()
        dcp.save({"app": training}, storage_writer=writer, planner=planner)
        raise AssertionError("no process was killed")
    if start == "1":
        dcp.load({"app": training}, storage_reader=hf.dcp.StorageReader(run))
        assert training.seen == 3
        training.go(3)
        dcp.save({"app": training}, storage_writer=KilledAtEnd(run))
        raise AssertionError("no process was killed")


def refuse(training: Training, writer: Any) -> None:
    """What one worker cannot store is an error for all of them, which says where it stands."""
    own: Any = object() if dist.get_rank() == 1 else 1
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    told = ""
    try:
        dcp.save({"app": training, f"own{dist.get_rank()}": own}, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        told = str(error)
    assert "tree/own1: a value of type object cannot be stored" in told, told


def check(directory: Path, layout: str) -> None:
    """Loads the second step, with as many workers as there are now; saves and loads it once more.

    Two workers also load what one has saved before them, and each of them saves and loads something of its own.
    """
    expected = load_file(directory / "expected.safetensors")
    places = {directory / "run": 1}
    if dist.get_world_size() == 2:
        places[directory / "second"] = 0
        own = {"rank": dist.get_rank()}
        dcp.save(own, storage_writer=hf.dcp.StorageWriter(directory / f"own{dist.get_rank()}"), no_dist=True)
        back = {"rank": -1}
        dcp.load(back, storage_reader=hf.dcp.StorageReader(directory / f"own{dist.get_rank()}"), no_dist=True)
        assert back == own
    for place, step in places.items():
        training = Training(layout)
        training.go(7)
        dcp.load({"app": training}, storage_reader=hf.dcp.StorageReader(place, step=step))
        compare(read_state(training.net, training.optimizer), expected)
        assert training.seen == 2
    dcp.save({"app": training}, checkpoint_id=directory / "second", storage_writer=hf.dcp.StorageWriter())
    again, reader = Training(layout), hf.dcp.StorageReader(directory / "second")
    dcp.load({"app": again}, storage_reader=reader)
    compare(read_state(again.net, again.optimizer), expected)
    if dist.get_rank() == 0:
        say({"checked": dist.get_world_size(), "step": reader.loaded_step})


def main(mode: str, directory: str, layout: str = "fsdp") -> None:
    warnings.simplefilter("ignore", FutureWarning)
    hf.init_process_group("gloo")
    if mode == "save":
        save_all(Path(directory))
    else:
        check(Path(directory), layout)
    dist.barrier()
    dist.destroy_process_group()
