"""The workers of a job that torch has started, under torchrun or by `init_process_group`: store, and process groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch.distributed

from holdfast.cluster.protocol import ANSWER_SECONDS, Connect, EngineStore
from holdfast.cluster.store import JoinedCluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import UsageError
from holdfast.supervise.board import ENVIRONMENT

# What it exports depends on how torch was built, so that it has no types to go by.
dist: Any = torch.distributed

_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_hosted: list[Any] = []
"""The stores that this process hosts. They live as long as it does: other workers may need them to the end."""


def open_environment(timeout_seconds: float = JOIN_SECONDS) -> JoinedCluster:
    """**Collective.** **Blocks.** Returns the workers of the environment, as torchrun sets it.

    It needs no process group. Under torchrun the store is the agent's; otherwise rank 0 hosts it, and
    `init_process_group` finds it there when it comes later.

    Raises:
        UsageError: If the environment does not define this worker.
        AbsentError: If workers are missing; the error names them.
        ClusterError: If the store does not respond.
    """
    rank, world_size, port = (_read_number(os.environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    address = os.environ["MASTER_ADDR"]
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not is_agents
    return JoinedCluster(
        _fail_at_once(partial(_connect, address, port, hosts=hosts), address, port),
        rank,
        world_size,
        host=f"torchrun's agent at {address}:{port}" if is_agents else f"the process of rank 0 at {address}:{port}",
        timeout_seconds=timeout_seconds,
    )


def open_process_group(timeout_seconds: float = JOIN_SECONDS) -> JoinedCluster:
    """**Collective.** **Blocks.** Returns the workers of the default process group, over the store that it was created
    with.

    Raises:
        UsageError: If there is no process group.
        AbsentError: If workers are missing; the error names them.
        ClusterError: If the store does not respond.
    """
    if not is_initialized():
        raise UsageError("there is no process group", hint="Call torch.distributed.init_process_group first.")
    # There is no public way to the store that a job was started with.
    store = dist.distributed_c10d._get_default_store()
    return JoinedCluster(
        _connect_like(store),
        dist.get_rank(),
        dist.get_world_size(),
        host="the process that hosts the process group's store: rank 0, unless another store was passed",
        timeout_seconds=timeout_seconds,
    )


def is_initialized() -> bool:
    """True if there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


class TorchStore:
    """A connection to a store of torch. See `EngineStore`."""

    def __init__(self, store: Any) -> None:
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        self._store.set(key, _FILLED + value)
        # A set is not answered, and "succeeds" for long after the store is gone. This is asked on the same connection.
        self._store.check([key])

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        return _value_of(self._store.compare_set(key, "", _FILLED + value))

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        # `get` would wait for a key that is not there, and gives an empty value for one that is deleted at that moment.
        # This is one request, sets nothing, and gives what was expected where there is no value.
        found = self._store.compare_set(key, _NEVER, _NEVER)
        return None if found == _NEVER.encode() else _value_of(found)

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        return int(self._store.add(key, amount))

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._store.delete_key(key)


_FILLED: Final = b"="
"""Before each value: to torch, an empty one is missing."""

_NEVER: Final = "-"
"""A key that never has a value or a counter."""


def _value_of(data: bytes) -> bytes:
    return data.removeprefix(_FILLED)


def _connect(address: str, port: int, timeout_seconds: float, *, hosts: bool) -> TorchStore:
    timeout = timedelta(seconds=timeout_seconds)
    if hosts and not _hosted:
        # As `init_process_group` does it: whichever comes second joins the first.
        _hosted.append(
            dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        )
    return TorchStore(dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False))


def _connect_like(store: Any) -> Connect:
    """Returns how to create further connections to a store: while one thread waits for a key, no other can use it."""
    below = store
    while isinstance(below, dist.PrefixStore):
        below = below.underlying_store
    connect: Connect = lambda _: TorchStore(store)  # noqa: E731
    if hasattr(store, "clone"):
        connect = lambda _: TorchStore(store.clone())  # noqa: E731
    elif isinstance(below, dist.TCPStore):
        connect = partial(_connect, below.host, below.port, hosts=False)
    return _fail_at_once(connect, below.host, below.port) if isinstance(below, dist.TCPStore) else connect


def _fail_at_once(connect: Connect, address: str, port: int) -> Connect:
    """Like `_connect_like`, if the host of an existing store refuses a connection: torch retries until the timeout."""
    is_there = False

    def connect_again(timeout_seconds: float) -> EngineStore:
        nonlocal is_there
        if is_there:
            socket.create_connection((address, port), timeout_seconds).close()
        store = connect(timeout_seconds)
        is_there = True
        return store

    return connect_again


def _read_number(environment: Mapping[str, str], name: str) -> int:
    missing = [wanted for wanted in _ENVIRONMENT if not environment.get(wanted)]
    if missing:
        raise UsageError(
            f"the environment does not identify this worker: {', '.join(missing)} missing",
            hint="Start the workers with torchrun.",
        )
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{name}={environment[name]!r} in the environment is not a number") from None


_OWN_STORE: Final = ("store", "init_method", "rank", "world_size")


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """**Collective.** **Blocks.** Like `torch.distributed.init_process_group`, but safe where workers are restarted.

    torchrun keeps its store when it starts the workers again, with the keys of the previous process group. torch (2.13)
    does not distinguish the starts: a worker that is faster than another one reads the address of the dead one, and
    fails, or waits for half an hour. Here each start uses its own part of the store: the workers agree on its name
    first. Under `holdfast run`, too; elsewhere, or with your own store, it does what torch's function does.

    Args:
        backend: "nccl", "gloo" or another name that torch knows; None for all that suit the devices.
        timeout: How long a collective may take, and the other workers to join; None for torch's own limit, and 300 s.
        **options: Other arguments of torch's function.

    Raises:
        AbsentError: If workers are missing; the error names them.
        ClusterError: If torchrun's store does not respond.
    """
    if timeout is not None:
        options["timeout"] = timeout
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Under `holdfast run` a worker may be back before the others have ended, and meet the store of a dead rank 0.
    is_restarted = ENVIRONMENT in os.environ and all(os.environ.get(name) for name in _ENVIRONMENT)
    if not (is_agents or is_restarted) or any(name in options for name in _OWN_STORE):
        dist.init_process_group(backend, **options)
        return
    cluster = open_environment(JOIN_SECONDS if timeout is None else timeout.total_seconds())
    cluster.close()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"process-group/{cluster.incarnation}", store)
    dist.init_process_group(backend, store=own, rank=cluster.rank, world_size=cluster.world_size, **options)


def count_begun() -> int | None:
    """Returns how many collectives of the default process group this process has begun; None if that is not known."""
    try:
        # There is no public way to it, nor to those of a group with several backends.
        group = dist.distributed_c10d._get_default_group()
        backends = {id(one): one for one in map(group._get_backend, group._device_types)}
        return sum(int(one._get_sequence_number_for_group()) for one in backends.values())
    except Exception:  # noqa: BLE001  No group, or a backend that does not count.
        return None


def abort() -> None:
    """Aborts all process groups: a thread that waits in one gets an error. It may block; none can be used after it."""
    if not is_initialized():
        return
    # There is no public way to all of them.
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            group.abort()
        except Exception:  # noqa: BLE001  A backend that cannot: a thread that waits there is ended otherwise.
            continue
