"""The end of a training of several workers: all reach it, and then the leader removes the checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from holdfast.catalog import StoredRun
from holdfast.catalog.deletion import Clearing, clear_run
from holdfast.cluster import Cluster, open_cluster
from holdfast.cluster.discover import Choice
from holdfast.cluster.peers import Failure, Peers
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import ClusterError, DeadlineError, HoldfastError
from holdfast.storage import Storage

_THE_REMOVAL: Final = "the removal of the checkpoints"


class JointDelete:
    """The workers of a job that end it together. Each creates as many of these, in the same order.

    Attributes:
        cluster: The workers.
    """

    def __init__(self, choice: Choice, *, liveness_seconds: float, timeout_seconds: float) -> None:
        """**Collective.** **Blocks.** Waits for the others, if there are any; like `open_participant`."""
        self.cluster: Cluster = open_cluster(choice, min(timeout_seconds, JOIN_SECONDS))
        self._is_own = self.cluster is not choice
        self._peers: Peers | None = None
        if self.cluster.world_size > 1:
            self._peers = Peers(self.cluster, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds)

    def agree_to_clear(self, objection: str) -> str:
        """**Collective.** **Blocks.** Waits until all workers agree to remove the checkpoints.

        A worker that has not come may still need them: if it dies on the way, the job resumes from them. Returns the
        first `objection` by rank, the same on all workers; empty if there is none.

        Raises:
            AbsentError: If a worker does not come in time, or dies.
            ClusterError: If the job's store does not respond.
        """
        if self._peers is None:
            return objection
        return self._peers.gather_decide_broadcast(objection.encode(), _find_first, "the end of the training").decode()

    def clear(self, storage: Storage, known_generation: int, *, keeps_files: bool = False) -> Clearing:
        """**Collective.** **Blocks.** Lets the leader remove all checkpoints of a run; see `clear_run`.

        Returns:
            The result on the leader; an empty one on other workers.

        Raises:
            FencedError: On the leader, if another job now saves there; nothing has been removed.
            PeerError: On the others, if the leader had an error, could not remove everything, or dies.
        """
        peers = self._peers
        if peers is not None and not peers.is_leader:
            failure = peers.gather_decide_broadcast(b"", _find_first, _THE_REMOVAL)
            if failure:
                raise peers.failures.make_error(msgspec.json.decode(failure, type=Failure))
            return Clearing()
        try:
            clearing = clear_run(StoredRun(storage), known_generation, keeps_files=keeps_files)
        except HoldfastError as error:
            self._report(error)
            raise
        self._report(next(iter(clearing.problems), None))
        return clearing

    def close(self) -> None:
        """**Blocks** for a moment. Signs off; a second call does nothing."""
        if self._peers is not None:
            self._peers.close()
        if self._is_own:
            self.cluster.close()

    def _report(self, error: HoldfastError | None) -> None:
        if self._peers is not None:
            record = b"" if error is None else msgspec.json.encode(self._peers.failures.describe(error))
            # The removal is done, even if a worker dies before it is notified.
            with suppress(DeadlineError, ClusterError):
                self._peers.gather_decide_broadcast(record, _find_first, _THE_REMOVAL)


def _find_first(records: list[bytes]) -> bytes:
    return next(filter(None, records), b"")
