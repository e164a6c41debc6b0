"""The workers of a job that `jax.distributed.initialize` has joined, over its coordination service."""

from __future__ import annotations

from typing import Any

from jax._src import distributed
from jax.errors import JaxRuntimeError

from holdfast.cluster.store import JoinedCluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import UsageError


def open_distributed(timeout_seconds: float = JOIN_SECONDS) -> JoinedCluster:
    """**Collective.** **Blocks.** Returns the processes of this JAX job.

    Raises:
        UsageError: If `jax.distributed.initialize` was not called.
        AbsentError: If processes are missing; the error names them.
        ClusterError: If the coordination service does not respond.
    """
    # There is no public way to the coordination service.
    state = distributed.global_state
    if state.client is None:
        raise UsageError("this process has not joined a JAX job", hint="Call jax.distributed.initialize() first.")
    return JoinedCluster(
        lambda _: JaxStore(state.client),
        state.process_id,
        state.num_processes,
        host=f"the coordinator, process 0, at {state.coordinator_address}",
        timeout_seconds=timeout_seconds,
    )


class JaxStore:
    """The client of JAX's coordination service, which any number of threads may use. See `EngineStore`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        while True:
            try:
                self._client.key_value_set_bytes(key, value)
            except JaxRuntimeError as error:
                _pass_only(error, "ALREADY_EXISTS")
                standing = self.try_get(key)
                if standing is not None:
                    return standing
                # It was deleted between the two, so that this worker's may be written now.
            else:
                return value

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        try:
            return bytes(self._client.key_value_try_get_bytes(key))
        except JaxRuntimeError as error:
            _pass_only(error, "NOT_FOUND")
            return None

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        return int(self._client.key_value_increment(key, amount))

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._client.key_value_delete(key)


def _pass_only(error: JaxRuntimeError, status: str) -> None:
    """Raises an error again, unless it has only this message; JAX has one type for all of them."""
    if not str(error).startswith(f"{status}:"):
        raise error
