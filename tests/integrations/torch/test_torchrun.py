"""Real jobs of several workers under torchrun: FSDP2, meshes of two dimensions, replicas; killed, and gone on with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import holdfast as hf  # noqa: E402
import old_versions  # noqa: E402
import preloaded  # noqa: E402
from holdfast.catalog import StoredRun  # noqa: E402
from holdfast.restore.verify import open_step, verify_data  # noqa: E402
from holdfast.storage import LocalStorage  # noqa: E402
from holdfast.testing.processes import Workers, python  # noqa: E402
from places import PROGRAMS, ROOT, SUPPORT, TESTS  # noqa: E402

LAUNCH = python(PROGRAMS / "elastic.py", "mesh_training")
PATIENCE_SECONDS = 600.0

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}


# How many workers train in a layout, who of them is killed in step 7, and who restores that then.
TRAINED = {
    "fsdp": (3, "0:7", [(2, "check-stepped", "fsdp")]),
    "fsdp-2": (2, "0:7", [(4, "check", "hsdp"), (2, "check-stepped", "ddp")]),
    "2x2": (4, "3:7", [(4, "check-stepped", "2x2"), (3, "check", "fsdp")]),
    "hsdp": (4, "all:7", [(4, "check", "2x2"), (4, "check-stepped", "fsdp")]),
    "ddp": (3, "1:7", [(2, "check", "fsdp"), (3, "check-stepped", "fsdp")]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["fsdp", *(pytest.param(job, marks=pytest.mark.long) for job in ("2x2", "fsdp-2", "hsdp", "ddp"))]
)
def test_killed_job_resumes_like_any_other(job: str, tmp_path: Path) -> None:
    old_versions.skip_without_fsdp_on_cpu()
    count, death, checks = TRAINED[job]
    launch = [*LAUNCH, str(count), "1", "train", job.split("-")[0], tmp_path, death]
    # One after the other, by one launcher: to import torch takes longer than a job.
    for others, mode, layout in checks:
        launch += ["--", str(others), "0", mode, layout, tmp_path]
    with Workers(tmp_path) as workers:
        number = workers.start(launch, {"OMP_NUM_THREADS": "1"}, preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [number]) == [0], workers.report(number)
        records = workers.records(number)
        assert sorted(record["ended"] for record in records if "ended" in record) == list(range(count))
        # The save of step 6 may have been in flight.
        begun = {record["begun"] for record in records if record.get("start") == "1"}
        assert begun in ({3}, {6})
    storage = LocalStorage(tmp_path / "run")
    for name in StoredRun(storage).look().committed:
        assert not verify_data(storage, open_step(storage, name.directory, name))
    check_alone(tmp_path)


def check_alone(directory: Path) -> None:
    """One process goes on with it, without any process group."""
    from mesh_training import TOTAL, build, compare, read_state, train

    net, optimizer = build("plain")
    objects = {"model": net, "optimizer": optimizer, "rng": hf.RNG(), "own": hf.PerWorker({"rank": -1})}
    with hf.CheckpointManager(directory / "run", hf.Checkpoint(**objects)) as manager:
        assert manager.restore(TOTAL) is not None
        compare(read_state(net, optimizer), load_file(directory / "expected.safetensors"))
        train(net, optimizer, TOTAL)


@pytest.mark.slow
@pytest.mark.long
def test_workers_over_the_store_of_torch_are_struck_at_random_moments(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        program = python("-m", "crash.torch_joint", "--rounds", "3", "--directory", tmp_path / "crash")
        number = workers.start(program, {**ENVIRONMENT, "PYTHONPATH": f"{TESTS}:{SUPPORT}"})
        assert workers.wait(PATIENCE_SECONDS, [number]) == [0], workers.report(number)
        assert "3 rounds" in workers.text(number)
