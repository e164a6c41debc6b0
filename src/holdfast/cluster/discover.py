"""Finds the cluster of this process, from its environment and the frameworks in use."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias

from holdfast.cluster.polling import IN_MEMORY, poll
from holdfast.cluster.protocol import Cluster, check_amount, check_key, check_value
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import ClosedError, DeadlineError, UsageError

Choice: TypeAlias = Cluster | Literal["auto", "alone"]

_TORCH: Final = "holdfast.integrations.torch.cluster"
_JAX: Final = "holdfast.integrations.jax.cluster"
"""Imported by name, and only if the framework is in use."""


def open_cluster(choice: Choice = "auto", timeout_seconds: float = JOIN_SECONDS) -> Cluster:
    """**Collective.** **Blocks.** Returns the workers that this process belongs to.

    `"auto"` is the first of these that applies: the job that torchrun started; the default process group of torch; the
    processes of `jax.distributed`; the job that `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in the
    environment define; this process alone. A job with a single worker is alone.

    Args:
        choice: `"auto"`; `"alone"` for a worker that is independent of the others, if there are any; or a cluster.
        timeout_seconds: How long to wait for the other workers.

    Raises:
        AbsentError: If workers are missing; the error names them.
        ClusterError: If the store that they share does not respond.
        UsageError: If the choice is something else.
    """
    if isinstance(choice, Cluster):
        return choice
    if choice == "alone":
        return AloneCluster()
    if choice != "auto":
        raise UsageError(
            f'cluster must be "auto", "alone" or a cluster, got {choice!r}',
            hint='Pass "auto", "alone", or a cluster that you have opened.',
        )
    found = find_engine(os.environ, sys.modules)
    if found is None:
        return AloneCluster()
    module, function = found
    cluster: Cluster = getattr(import_module(module), function)(timeout_seconds)
    return cluster


def find_engine(environment: Mapping[str, str], modules: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the engine that started this process as one of several workers.

    Args:
        environment: Its environment variables.
        modules: The modules that are imported.

    Returns:
        The module and the function that open its cluster; None if the process is alone.
    """
    is_configured = all(environment.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    is_several = is_configured and environment.get("WORLD_SIZE", "1") != "1"
    if is_several and "TORCHELASTIC_RUN_ID" in environment:
        return _TORCH, "open_environment"
    torch = modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1:
        return _TORCH, "open_process_group"
    jax = getattr(modules.get("jax._src.distributed"), "global_state", None)
    if jax is not None and jax.client is not None and jax.num_processes > 1:
        return _JAX, "open_distributed"
    return (_TORCH, "open_environment") if is_several else None


def describe_lone_task(environment: Mapping[str, str]) -> str:
    """**Pure.** Returns a warning if Slurm or MPI started this process as one of several, but it is to save alone."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    # The shell of a Slurm job has the number of its tasks as well; those that `srun` starts are in a step of the job.
    in_shell = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if not (in_shell and environment.get("SLURM_PROCID", "0") == "0"):
        names.append("SLURM_NTASKS")
    name = next((name for name in names if environment.get(name, "").isdecimal() and int(environment[name]) > 1), "")
    if not name:
        return ""
    rank = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK", "SLURM_NTASKS": "SLURM_PROCID"}[
        name
    ]
    return (
        f"this process is one of {environment[name]} tasks ({name}) and saves alone: tasks that share a directory take "
        f"the run over from each other. If they train together, start each with RANK=${rank} WORLD_SIZE=${name} "
        "MASTER_ADDR=... MASTER_PORT=... (docs/recipes/slurm.md has the lines). If each has a directory of its own, "
        'pass cluster="alone"'
    )


class AloneCluster:
    """**Thread-safe.** A worker without others. Its store is in its own memory, and so always available."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.node = socket.gethostname()
        self.incarnation = os.urandom(8).hex()
        # Guards the two dictionaries.
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._closed = False

    def node_of(self, rank: int) -> str:
        """See `Cluster`."""
        return self.node

    def set(self, key: str, value: bytes) -> None:
        """See `Cluster`."""
        self._check_open()
        check_value(check_key(key), value)
        with self._lock:
            self._values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `Cluster`."""
        self._check_open()
        check_value(check_key(key), value)
        with self._lock:
            return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        """See `Cluster`."""
        self._check_open()
        with self._lock:
            return self._values.get(check_key(key))

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        """See `Cluster`."""
        value = poll(lambda: self.try_get(key), IN_MEMORY, time.monotonic() + timeout_seconds)
        if value is None:
            raise DeadlineError(f"{key} was not set within {timeout_seconds:g} s")
        return value

    def add(self, key: str, amount: int) -> int:
        """See `Cluster`."""
        self._check_open()
        check_amount(check_key(key), amount)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def delete(self, key: str) -> None:
        """See `Cluster`."""
        self._check_open()
        check_key(key)
        with self._lock:
            self._values.pop(key, None)
            self._counters.pop(key, None)

    def close(self) -> None:
        """See `Cluster`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the cluster was closed before this call")
