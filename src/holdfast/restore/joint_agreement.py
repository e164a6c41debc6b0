"""Makes the workers of a job restore the same checkpoint, or nothing at all.

A restore has stages. All workers complete one before any begins the next, so no live object is changed before all have
seen the checkpoint and found that it fits, and damage that one finds makes all use the older one.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from holdfast.catalog import StoredRun
from holdfast.cluster.barrier import LEADER
from holdfast.cluster.peers import Failure, Peers, make_sendable
from holdfast.cluster.polling import ELSEWHERE_HINT, FILES, find_patience, poll
from holdfast.errors import DamageError, HoldfastError, NoCheckpointError, NotFoundError, StorageError, UsageError
from holdfast.format.digests import digest
from holdfast.format.names import StepName, parse_step_directory
from holdfast.format.records import MAX_MANIFEST_BYTES
from holdfast.restore.agreement import Agreement
from holdfast.restore.passing import Passing
from holdfast.storage.protocol import Storage
from holdfast.tracebacks import print_elsewhere

_FIRST_PATIENCE_SECONDS: Final = 0.05
_MOST_NAMES: Final = 10_000
_DAMAGED: Final = "damaged"


class _Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker's report at the end of a stage.

    Attributes:
        failure: Its error, if it has one.
        is_damage: True if that is damage of the checkpoint.
        step: The requested step.
        names: The directories that it would try, the best first.
        seen: The digest of the manifest that it sees; empty if it sees none.
        is_open: True if it should be looked at again.
        is_open_elsewhere: The same for workers that were given another path than the leader.
        is_gone: True if the checkpoint has been removed.
        url: Its URL of the run.
        path: The damaged file.
        offset_bytes: Where in it the damage begins.
        tensor: The damaged leaf.
    """

    failure: Failure | None = None
    is_damage: bool = False
    step: int | None = None
    names: tuple[str, ...] = ()
    seen: str = ""
    is_open: bool = False
    is_open_elsewhere: bool = False
    is_gone: bool = False
    url: str = ""
    path: str = ""
    offset_bytes: int | None = None
    tensor: str = ""


class JointAgreement(Agreement):
    """Several workers. Each method is collective.

    Each raises `PeerError` if another worker has failed, `AbsentError` if one does not come or dies, and `ClusterError`
    if the job's store does not respond.
    """

    def __init__(self, peers: Peers, url: str) -> None:
        self._peers = peers
        self._url = make_sendable(url)

    def choose(self, step: int | None, find: Callable[[], tuple[StepName, ...]]) -> tuple[StepName, ...]:
        """See `Agreement`; the leader's choice counts for all."""
        asked = _Report(step=step, url=self._url)

        def look() -> _Report:
            # Of the others it is enough to know whether they see any.
            names = find()[: _MOST_NAMES if self._peers.is_leader else 1]
            return replace(asked, names=tuple(name.directory for name in names))

        answer = self._ask(asked, look, _decide_names)
        return tuple(name for directory in answer.names if (name := parse_step_directory(directory)) is not None)

    def see(self, storage: Storage, name: StepName) -> None:
        """See `Agreement`.

        What the leader sees may become visible to the others later. But it may also be removed meanwhile, for all of
        them: so the leader looks again as often as they do, and if it sees nothing, no worker waits.
        """
        timeout_seconds = self._peers.timeout_seconds
        begun_at = time.monotonic()
        patience_seconds = 0.0
        asked = _Report(names=(name.manifest_path,), url=self._url)

        def look() -> _Report:
            seen = self._find_seen(storage, name, patience_seconds)
            passed_seconds = time.monotonic() - begun_at
            return replace(
                asked,
                seen=seen,
                is_open=passed_seconds < find_patience(timeout_seconds),
                is_open_elsewhere=passed_seconds < find_patience(timeout_seconds, is_elsewhere=True),
            )

        while self._ask(asked, look, _decide_seen).is_open:
            patience_seconds = min(2 * patience_seconds + _FIRST_PATIENCE_SECONDS, find_patience(timeout_seconds) / 4)

    def is_gone(self, storage: Storage, name: StepName) -> bool:
        """See `Agreement`; the leader's look counts for all."""

        def look() -> _Report:
            return _Report(is_gone=self._peers.is_leader and not StoredRun(storage).step(name).is_committed())

        return self._ask(_Report(), look, operator.itemgetter(LEADER)).is_gone

    def any(self, flag: bool) -> bool:
        """See `Agreement`."""

        def decide(reports: list[_Report]) -> _Report:
            return _Report(is_open=any(report.is_open for report in reports))

        return self._ask(_Report(), lambda: _Report(is_open=flag), decide).is_open

    def run(self, stage: Callable[[], None]) -> DamageError | None:
        """See `Agreement`."""
        error: Exception | None = None
        try:
            stage()
        except Exception as problem:  # noqa: BLE001  Any error: the others have to hear of it.
            error = problem
        report = _Report(self._describe(error))
        if isinstance(error, DamageError):
            path, tensor = make_sendable(error.path), make_sendable(error.tensor)
            report = replace(report, is_damage=True, path=path, offset_bytes=error.offset_bytes, tensor=tensor)
        answer = self._confer(report, _decide_stage)
        failure = answer.failure
        if failure is None:
            return None
        if not answer.is_damage:
            self._raise(failure, None if report.is_damage else error)
        if isinstance(error, DamageError):
            return error
        node = self._peers.cluster.node_of(failure.rank)
        return DamageError(
            f"{failure.text} (found by rank {failure.rank}{f' on {node}' if node else ''})",
            path=answer.path,
            offset_bytes=answer.offset_bytes,
            tensor=answer.tensor,
            hint=failure.hint,
        )

    def open_passing(self, storage: Storage) -> Passing | None:
        """See `Agreement`."""
        if not storage.traits.passes_on:
            return None
        return Passing(self._peers.open_namespace("passing"), self._peers.rank, self._peers.world_size)

    def _ask(self, asked: _Report, look: Callable[[], _Report], decide: Callable[[list[_Report]], _Report]) -> _Report:
        """Returns the conclusion from what all have found; if one cannot look, all raise its error."""
        error: HoldfastError | None = None
        try:
            report = look()
        except HoldfastError as problem:
            error, report = problem, replace(asked, failure=self._describe(problem))
        answer = self._confer(report, decide)
        if answer.failure is not None:
            self._raise(answer.failure, error)
        return answer

    def _confer(self, report: _Report, decide: Callable[[list[_Report]], _Report]) -> _Report:
        def decide_encoded(records: list[bytes]) -> bytes:
            return msgspec.json.encode(decide([msgspec.json.decode(record, type=_Report) for record in records]))

        answer = self._peers.gather_decide_broadcast(msgspec.json.encode(report), decide_encoded, "the restore")
        return msgspec.json.decode(answer, type=_Report)

    def _find_seen(self, storage: Storage, name: StepName, patience_seconds: float) -> str:
        def look() -> str | None:
            try:
                return digest(storage.read(name.manifest_path, MAX_MANIFEST_BYTES))
            except NotFoundError:
                # What the leader does not see is not there.
                return "" if self._peers.is_leader else None
            except DamageError:
                return _DAMAGED  # All that see the same will find out what it is.

        return poll(look, FILES, time.monotonic() + patience_seconds) or ""

    def _describe(self, error: BaseException | None) -> Failure | None:
        return None if error is None else self._peers.failures.describe(error)

    def _raise(self, failure: Failure, own: Exception | None) -> None:
        self._peers.wait_heard()
        if own is None:
            raise self._peers.failures.make_error(failure)
        here, cluster = self._describe(own), self._peers.cluster
        is_same = here is not None and (here.kind, here.text) == (failure.kind, failure.text)
        if is_same and failure.rank != cluster.rank and cluster.node_of(failure.rank) == cluster.node:
            print_elsewhere(own, f"rank {failure.rank}")
        raise own


def _decide_names(reports: list[_Report]) -> _Report:
    leader = reports[LEADER]
    for rank, report in enumerate(reports):
        if report.step != leader.step:
            text = f"it restores {_name_request(report.step)}, but rank 0 restores {_name_request(leader.step)}"
            return _Report(Failure.of(rank, UsageError.__name__, text, "All workers must restore the same step."))
    for rank, report in enumerate(reports):
        if report.failure is not None and not (leader.names and report.failure.kind == NoCheckpointError.__name__):
            # What the leader sees and another one does not may come into sight yet.
            return _Report(report.failure)
        if report.names and not leader.names:
            return _Report(_blame(rank, report, leader, "is visible to it, but rank 0 sees no checkpoint"))
    return leader


def _decide_seen(reports: list[_Report]) -> _Report:
    """**Pure.** Checks whether all see the same manifest. If the leader sees none, all will find that there is none."""
    leader = reports[LEADER]
    for report in reports:
        if report.failure is not None:
            return _Report(report.failure)
    for rank, report in enumerate(reports):
        if leader.seen and report.seen != leader.seen:
            is_open = leader.is_open if report.url == leader.url else leader.is_open_elsewhere
            if not report.seen and is_open:
                return _Report(is_open=True)
            what = "differs from what rank 0 sees" if report.seen else "is visible to rank 0, but not to it"
            return _Report(_blame(rank, report, leader, what))
    return _Report()


def _blame(rank: int, report: _Report, leader: _Report, what: str) -> Failure:
    if report.url == leader.url:
        return Failure.of(rank, StorageError.__name__, f"{report.url}/{report.names[0]} {what}", _SIGHT_HINT)
    text = f"it restores from {report.url}, but rank 0 from {leader.url}: {report.names[0]} {what}"
    return Failure.of(rank, StorageError.__name__, text, ELSEWHERE_HINT)


def _decide_stage(reports: list[_Report]) -> _Report:
    """**Pure.** Returns the result of a stage: an error takes precedence over damage, because it ends the restore."""
    failed = [report for report in reports if report.failure is not None]
    return min(failed, key=lambda report: report.is_damage, default=_Report())


def _name_request(step: int | None) -> str:
    return "the newest step" if step is None else f"step {step}"


_SIGHT_HINT: Final = "All workers must use one directory: is it on a file system that all nodes share?"
