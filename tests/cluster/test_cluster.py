"""Every cluster keeps the contract, played by real processes; and which of them a process is given."""

from __future__ import annotations

import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import preloaded
from holdfast.cluster import AloneCluster, open_cluster
from holdfast.cluster.discover import find_engine
from holdfast.errors import UsageError
from holdfast.testing.cluster_contract import ClusterContract
from holdfast.testing.processes import Workers, python
from jobs import PROGRAM, environment, find_port, start_like_torchrun
from places import PROGRAMS

TORCHRUN = environment(1, 4, 29500, agent=True)
LAUNCHER = environment(1, 4, 29500, agent=False)
TORCH_MODULE = "holdfast.integrations.torch.cluster"
JAX_MODULE = "holdfast.integrations.jax.cluster"

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")


class TestAlone(ClusterContract):
    worker_count = 1

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        workers.start(python(PROGRAM, "alone", scenario))


def on_another_machine() -> list[str]:
    """What a command begins with to see other numbers of processes, as on another machine; empty if it may not."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork", "--kill-child"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return []
    return command if allowed else []


class TestDirectory(ClusterContract):
    """Without any framework, and with the leader on another machine than the rest."""

    worker_count = 4
    keeps_store = True

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        for rank in range(cls.worker_count):
            told = environment(rank, cls.worker_count, 0, agent=False)
            place = on_another_machine() if rank == 0 else []
            workers.start([*place, *python(PROGRAM, f"directory:{directory}/store", scenario)], told, preloaded.Popen)


class TestAgentStore(ClusterContract):
    """As under torchrun: the store lives outside the workers."""

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        start_like_torchrun(workers, cls.worker_count, PROGRAM, "torchrun", scenario)

    @classmethod
    def store_host(cls) -> int | None:
        return cls.worker_count


class TestEnvironment(ClusterContract):
    """As other launchers start workers: rank 0 hosts the store."""

    worker_count = 2

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        port = find_port()
        for rank in range(cls.worker_count):
            told = environment(rank, cls.worker_count, port, agent=False)
            workers.start(python(PROGRAM, "environment", scenario), told, preloaded.TrainingPopen)

    @classmethod
    def store_host(cls) -> int | None:
        return 0


class TestProcessGroup(ClusterContract):
    """Without any launcher: what `init_process_group` was told."""

    worker_count = 2

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        cls.start_at(workers, scenario, f"tcp://127.0.0.1:{find_port()}")

    @classmethod
    def start_at(cls, workers: Workers, scenario: str, method: str) -> None:
        for rank in range(cls.worker_count):
            told = environment(rank, cls.worker_count, 0, agent=False)
            workers.start(python(PROGRAM, method, scenario), told, preloaded.TrainingPopen)

    @classmethod
    def store_host(cls) -> int | None:
        return 0

    @pytest.mark.long
    def test_a_killed_store_is_missed(self, tmp_path: Path) -> None:
        """As where the environment names the store: rank 0 hosts it."""
        super().test_a_killed_store_is_missed(tmp_path)


@pytest.mark.long
class TestProcessGroupOfFile(TestProcessGroup):
    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        cls.start_at(workers, scenario, f"file://{directory}/store")

    @classmethod
    def store_host(cls) -> int | None:
        return None


@needs_jax
class TestJax(ClusterContract):
    worker_count = 2
    # JAX itself ends a process whose coordinator is gone.
    exit_codes_without_store = (0, -signal.SIGABRT)

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        port = find_port()
        for rank in range(cls.worker_count):
            told = {"RANK": str(rank), "WORLD_SIZE": str(cls.worker_count)}
            workers.start(python(PROGRAM, f"jax:127.0.0.1:{port}", scenario), told, preloaded.JaxPopen)

    @classmethod
    def store_host(cls) -> int | None:
        return 0


# Which engine a process belongs to.


@pytest.mark.parametrize(
    ("told", "module", "function"),
    [
        ({}, None, None),
        (TORCHRUN, TORCH_MODULE, "open_environment"),
        (LAUNCHER, TORCH_MODULE, "open_environment"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, None, None),
        ({"WORLD_SIZE": "4"}, None, None),
    ],
)
def test_what_the_environment_says(told: dict[str, str], module: str | None, function: str | None) -> None:
    assert find_engine(told, {}) == ((module, function) if module else None)


def framework(**attributes: object) -> SimpleNamespace:
    """A stand-in for a framework's module, with what it says about its state."""
    return SimpleNamespace(**attributes)


def test_which_engine_goes_first() -> None:
    group = framework(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 4)
    no_group = framework(is_available=lambda: True, is_initialized=lambda: False)
    jax = framework(global_state=framework(client=object(), num_processes=4))
    no_jax = framework(global_state=framework(client=None, num_processes=4))
    both = {"torch.distributed": group, "jax._src.distributed": jax}
    assert find_engine(TORCHRUN, both) == (TORCH_MODULE, "open_environment")
    assert find_engine({}, both) == (TORCH_MODULE, "open_process_group")
    assert find_engine({}, both | {"torch.distributed": no_group}) == (JAX_MODULE, "open_distributed")
    assert find_engine(LAUNCHER, both | {"torch.distributed": no_group}) == (JAX_MODULE, "open_distributed")
    assert find_engine({}, {"torch.distributed": no_group, "jax._src.distributed": no_jax}) is None


def test_a_cluster_is_given_back() -> None:
    cluster = AloneCluster()
    assert open_cluster(cluster) is cluster
    assert isinstance(open_cluster("alone"), AloneCluster)
    assert isinstance(open_cluster(), AloneCluster)
    with pytest.raises(UsageError, match="auto"):
        open_cluster("torch")  # type: ignore[arg-type]


def test_alone_imports_no_framework(tmp_path: Path) -> None:
    script = (
        "import sys, json; from holdfast.cluster import open_cluster; open_cluster(); "
        "print(json.dumps({'modules': list(sys.modules)}))"
    )
    with Workers(tmp_path) as workers:
        workers.start(python("-c", script))
        modules = workers.wait_said(0, "modules", 30)
    assert not {"torch", "jax", "numpy"} & set(modules)


# torchrun itself.


ELASTIC = PROGRAMS / "elastic.py"

RESTARTED = """
import json, os, sys
from holdfast.cluster import open_cluster
from holdfast.testing.cluster_scenarios import gather, rendezvous, say

cluster = open_cluster("auto", 60)
# It is of this start, whatever the one before has left in the store, which is the same.
assert cluster.try_get("left") is None
incarnations = gather(cluster, "begin", cluster.incarnation.encode(), 60)
assert len(set(incarnations)) == 1
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
say({"rank": cluster.rank, "start": count, "incarnation": cluster.incarnation})
cluster.set("left", b"by start %d" % count)
cluster.set_once("leader", b"by start %d" % count)
assert cluster.try_get("leader") == b"by start %d" % count
rendezvous(cluster, "all", 60)
if count < 2:
    if cluster.rank == count:
        os.kill(os.getpid(), 9)
    cluster.wait_get("never", 60)
"""


def test_each_restart_by_torchrun_is_an_incarnation_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    with Workers(tmp_path) as workers:
        workers.start(python(ELASTIC, script, "2", "2"), popen=preloaded.TrainingPopen)
        assert workers.wait(120) == [0], workers.report(0)
        said = workers.records(0)
    starts = {record["start"]: record["incarnation"] for record in said}
    assert sorted(starts) == [0, 1, 2]
    assert len(set(starts.values())) == 3
    assert {(record["rank"], record["start"]) for record in said} == {(r, s) for r in range(2) for s in range(3)}


AROUND_A_GROUP = """
import os, torch, torch.distributed as dist
from holdfast.cluster import open_cluster
from holdfast.testing.cluster_scenarios import rendezvous, say

before = open_cluster("auto", 60)
dist.init_process_group("gloo")
after = open_cluster("auto", 60)
for cluster in (before, after):
    rendezvous(cluster, "all", 60)
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
dist.destroy_process_group()
for cluster in (before, after):
    rendezvous(cluster, "all-again", 60)
    cluster.close()
say({"ended": before.rank})
"""


@pytest.mark.parametrize("shares", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_before_and_after_the_process_group(tmp_path: Path, shares: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(AROUND_A_GROUP)
    with Workers(tmp_path) as workers:
        # With 1, torchrun's agent does not host the store, and rank 0 has to.
        workers.start(
            python(ELASTIC, script, "2", "0"), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shares}, preloaded.TrainingPopen
        )
        assert workers.wait(120) == [0], workers.report(0)
        assert sorted(record["ended"] for record in workers.records(0)) == [0, 1]


def test_who_does_not_join_is_named(tmp_path: Path) -> None:
    script = "import sys; from holdfast.cluster import open_cluster; open_cluster('auto', 10)"
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 2, "-c", script, world_size=3)
        assert workers.wait(60, (0, 1)) == [1, 1]
        for rank in (0, 1):
            assert "AbsentError: rank 2 of 3 did not join within 10 s" in workers.errors(rank)
            assert 'cluster="alone"' in workers.errors(rank)
