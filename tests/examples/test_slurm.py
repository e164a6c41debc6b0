"""The recipes on a real Slurm: what ends a job, what queues it again, where it goes on. `make test-slurm` runs this."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import EXAMPLES
from slurm_cluster import SlurmCluster, is_possible

if "HOLDFAST_SLURM" not in os.environ:
    pytest.skip("starts a Slurm of its own: make test-slurm", allow_module_level=True)

RECIPES = EXAMPLES / "recipes"
ALONE = ("slurm.sh", "--nodes=1", "--ntasks-per-node=2")
TORCHRUN = ("slurm_torchrun.sh", "--nodes=1")
VARIABLES = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if not is_possible():
        pytest.fail("needs root, and Debian's packages: apt-get install slurm-wlm munge")
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


class Place:
    """A folder in which a recipe trains, slowly enough to be asked to leave."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        (directory / "runs").mkdir(parents=True)
        program = (RECIPES / "training.py").read_text()
        slow = program.replace(
            "            optimizer.step()\n", "            optimizer.step()\n            time.sleep(0.02)\n"
        )
        (directory / "training.py").write_text(slow.replace("import sys\n", "import sys\nimport time\n"))
        self.log = directory / "log"

    def submit(self, recipe: tuple[str, ...], *options: str) -> str:
        script, *sizes = recipe
        variables = VARIABLES | {"SLURM_GPUS_ON_NODE": "2"}
        both = [*sizes, f"--output={self.log}", "--time=10", *options]
        return self.cluster.submit(self.directory, RECIPES / script, *both, variables=variables)

    def begun(self) -> list[int]:
        """The steps with which the lives of worker 0 began."""
        return [
            int(step)
            for step in re.findall(r"worker 0 of 2, process \d+, begins with step (\d+)", self.log.read_text())
        ]

    def left(self) -> list[int]:
        return [int(step) for step in re.findall(r"step (\d+) is saved; calling exit_fn", self.log.read_text())]

    def losses(self) -> dict[str, str]:
        return dict(re.findall(r"^step (\d+): loss (\S+)$", self.log.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The losses of two workers that nothing ends."""
    directory = tmp_path_factory.mktemp("untouched")
    shutil.copy(RECIPES / "training.py", directory)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "training.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, text=True)
    return dict(re.findall(r"^step (\d+): loss (\S+)$", ended.stdout, re.MULTILINE))


@pytest.mark.parametrize("recipe", [ALONE, TORCHRUN], ids=["tasks", "torchrun"])
def test_job_with_a_signal_before_its_limit_ends_with_the_same_bits(
    cluster: SlurmCluster, tmp_path: Path, untouched: dict[str, str], recipe: tuple[str, ...]
) -> None:
    place = Place(cluster, tmp_path / "place")
    job = place.submit(recipe)
    cluster.wait_text(place.log, r"^step 99:")
    cluster.call("scancel", f"--signal={'USR1' if recipe is ALONE else 'TERM'}", job)
    cluster.wait("another life", lambda: len(place.begun()) == 2)
    assert cluster.wait_state(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", place.log.read_text()
    assert place.begun()[1] == place.left()[0] >= 100
    assert place.losses() == untouched


@pytest.mark.parametrize("recipe", [ALONE, TORCHRUN], ids=["tasks", "torchrun"])
def test_canceled_job_stays_ended(cluster: SlurmCluster, tmp_path: Path, recipe: tuple[str, ...]) -> None:
    place = Place(cluster, tmp_path / "place")
    job = place.submit(recipe)
    cluster.wait_text(place.log, r"^step 19:")
    cluster.call("scancel", job)
    found = cluster.wait_state(job, "CANCELLED", "PENDING", "FAILED", "COMPLETED")
    assert found["JobState"] == "CANCELLED", place.log.read_text()
    assert found["Restarts"] == "0"
    assert place.left(), "the state was saved all the same"


def test_one_task_of_an_array_is_queued_again_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    place = Place(cluster, tmp_path / "place")
    logs = [tmp_path / "place" / f"log-{task}" for task in (1, 2)]
    own_folder = "t=$SLURM_ARRAY_TASK_ID; mkdir -p $t; cp training.py $t; cd $t"
    own = tmp_path / "array.sh"
    own.write_text((RECIPES / "slurm.sh").read_text().replace("trap :", f"{own_folder}; trap :", 1))
    options = ["--nodes=1", "--ntasks-per-node=1", "--array=1-2", f"--output={tmp_path}/place/log-%a", "--time=10"]
    job = cluster.submit(place.directory, own, *options, variables=VARIABLES)
    for log in logs:
        cluster.wait_text(log, r"^step 19:")
    cluster.call("scancel", "--signal=USR1", f"{job}_1")
    cluster.wait("another life", lambda: logs[0].read_text().count("begins with step") == 2)
    cluster.wait_text(logs[0], r"^step 999:")
    cluster.wait_text(logs[1], r"^step 999:")
    assert logs[1].read_text().count("begins with step") == 1


@pytest.mark.parametrize("partition", ["grace", "nograce"])
@pytest.mark.parametrize("recipe", [ALONE, TORCHRUN], ids=["tasks", "torchrun"])
def test_preempted_job_saves_and_resumes(
    cluster: SlurmCluster, tmp_path: Path, recipe: tuple[str, ...], partition: str
) -> None:
    """Without a grace time Slurm signals the workers twice and their launcher once more, and waits for KillWait."""
    place = Place(cluster, tmp_path / "place")
    job = place.submit(recipe, f"--partition={partition}", "--cpus-per-task=1", "--nodelist=n1")
    cluster.wait_text(place.log, r"^step 99:")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    cluster.submit(place.directory, urgent, "--partition=urgent", "--nodelist=n1", "--exclusive", "--output=/dev/null")
    cluster.wait("another life", lambda: len(place.begun()) == 2, 180)
    assert place.begun()[1] == place.left()[0] >= 100, place.log.read_text()
    cluster.wait_state(job, "COMPLETED")


def test_signals_that_are_repeated_kill_no_worker(cluster: SlurmCluster, tmp_path: Path) -> None:
    """As often as Slurm repeats a signal, the workers save, and the job is queued again."""
    place = Place(cluster, tmp_path / "place")
    job = place.submit(ALONE)
    cluster.wait_text(place.log, r"^step 19:")
    for _ in range(4):
        cluster.call("scancel", f"--signal={signal.SIGTERM.name[3:]}", job)
    cluster.wait("another life", lambda: len(place.begun()) == 2)
    assert place.begun()[1] == place.left()[0] > 0
    cluster.call("scancel", job)
    cluster.wait_state(job, "CANCELLED")


def test_a_worker_that_is_killed_is_back_within_the_job(
    cluster: SlurmCluster, tmp_path: Path, untouched: dict[str, str]
) -> None:
    """`holdfast run` starts it again, and the other one, which ends with an error."""
    place = Place(cluster, tmp_path / "place")
    job = place.submit(ALONE)
    cluster.wait_text(place.log, r"^step 199:")
    os.kill(int(re.findall(r"worker 1 of 2, process (\d+)", place.log.read_text())[-1]), signal.SIGKILL)
    assert cluster.wait_state(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", place.log.read_text()
    # One more, if the first to come back has met the other one before its end.
    assert len(re.findall("; (trains|started) again", place.log.read_text())) >= 2
    assert place.losses() == untouched
