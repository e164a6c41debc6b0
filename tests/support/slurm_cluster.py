"""A real Slurm on this machine: four nodes on loopback, as root, with Debian's `slurm-wlm` and `munge`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3", "n4")
HOSTS = Path("/etc/hosts")

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits until its credential has expired.
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
StateSaveLocation={directory}/state
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=n[1-4] Default=YES PriorityTier=5 PreemptMode=OFF
PartitionName=grace Nodes=n[1-2] PriorityTier=1 GraceTime=10
PartitionName=nograce Nodes=n[1-2] PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=n[1-2] PriorityTier=9 PreemptMode=OFF
"""


class SlurmCluster:
    """Use it with `with`. The nodes' names are added to this machine's hosts while it runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hosts: str | None = None
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> Self:
        directory, host = self._directory, socket.gethostname().partition(".")[0]
        directory.mkdir(parents=True)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (directory / name).mkdir()
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(1 + len(NODES))]
            for probe in probes:
                probe.bind(("", 0))
            ports = [probe.getsockname()[1] for probe in probes]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        (directory / "slurm.conf").write_text(_CONF.format(host=host, ports=ports, directory=directory, nodes=nodes))
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._hosts = HOSTS.read_text()
        HOSTS.write_text(f"{self._hosts.rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
        files = [f"--{name}={directory}/munge.{end}" for name, end in (("socket", "sock"), ("key-file", "key"))]
        files += [f"--{name}={directory}/munge.{end}" for name, end in (("log-file", "log"), ("seed-file", "seed"))]
        self.call("munged", "--force", f"--pid-file={directory}/munged.pid", *files)
        self.call("slurmctld")
        for node in NODES:
            self.call("slurmd", "-N", node)
        self.wait("idle", lambda: self.call("sinfo", "-h", "-p", "main", "-o", "%t %D") == "idle 4")
        return self

    def __exit__(self, *_: object) -> None:
        self.call("scancel", "--quiet", "--full", "--signal=KILL", f"--user={os.environ.get('USER', 'root')}")
        for file in [
            *self._directory.glob("n*.pid"),
            self._directory / "slurmctld.pid",
            self._directory / "munged.pid",
        ]:
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        if self._hosts is not None:
            HOSTS.write_text(self._hosts)

    def call(self, *command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        """Runs a command, and returns what it prints."""
        environment = {**self.environment, **(variables or {})}
        ended = subprocess.run(
            command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=60
        )
        return ended.stdout.strip()

    def submit(self, place: Path, script: Path, *options: str, variables: Mapping[str, str] | None = None) -> str:
        """Queues a job that runs in a folder, and returns its number."""
        number = self.call("sbatch", "--parsable", *options, str(script), cwd=place, variables=variables)
        assert number.isdecimal(), f"sbatch said {number!r}"
        return number

    def state(self, job: str) -> dict[str, str]:
        """Returns what Slurm says of a job, or of a task of an array."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", "-o", job)))

    def wait_state(self, job: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of these states."""
        found = self.wait(f"{job} {states}", lambda: (now := self.state(job)).get("JobState") in states and now)
        assert isinstance(found, dict)
        return found

    def wait_text(self, file: Path, pattern: str) -> re.Match[str]:
        """Waits until a pattern is in a file."""
        found = self.wait(
            f"{pattern} in {file}", lambda: file.exists() and re.search(pattern, file.read_text(), re.MULTILINE)
        )
        assert isinstance(found, re.Match)
        return found

    def wait(self, what: str, ask: object, seconds: float = 120.0) -> object:
        """Asks again and again until the answer is true; Slurm has nothing that could be waited for."""
        assert callable(ask)
        deadline = time.monotonic() + seconds
        while not (answer := ask()):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self._describe()}"
            time.sleep(0.2)
        return answer

    def _describe(self) -> str:
        log = self._directory / "slurmctld.log"
        return self.call("squeue") + "\n" + "\n".join(log.read_text().splitlines()[-15:] if log.exists() else ())


def is_possible() -> bool:
    """Returns True if this machine has what it needs, and this process may use it."""
    return os.geteuid() == 0 and all(map(shutil.which, COMMANDS))
