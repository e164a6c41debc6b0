"""Chooses the step at which all workers save, without blocking the training thread."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.cluster.barrier import LEADER
from holdfast.cluster.mailbox import Watch
from holdfast.cluster.peers import Failure, Peers, make_sendable
from holdfast.cluster.polling import PLANS
from holdfast.cluster.protocol import Cluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import HoldfastError
from holdfast.format.names import START_NAME
from holdfast.format.records import Worker
from holdfast.policies import SaveMoment, SavePolicy
from holdfast.save.joint.coverage import find_holders
from holdfast.save.joint.protocol import CommitProtocol, SaveIdAllocator
from holdfast.save.joint.shared_storage_check import check_token, try_put_token
from holdfast.storage.protocol import Storage

_NOTICE_LOOKS: Final = 3
"""How many looks of the others before its step a plan is made, so that all know of it by then."""

_MOST_NOTICES: Final = 64


class _Plan(msgspec.Struct, frozen=True):
    """A save that the leader has planned in advance.

    Attributes:
        number: The number of the plan, from 1.
        epoch: How often the run had been restored.
        step: The save is made at this step, or the first one after it.
        reason: Why, in the words of the policy.
    """

    number: int
    epoch: int
    step: int
    reason: str


class _Start(msgspec.Struct, frozen=True):
    """A worker's report when its manager is created, and the leader's answer.

    Attributes:
        url: The URL of the run on that worker.
        token: The content of the file that the leader has created there; empty if it has created none.
        names: The names of its objects; in the answer those of all workers, or once if these are the same.
    """

    url: str
    token: str
    names: list[list[str]]


class JointParticipant:
    """The other workers, as the training thread knows them.

    A policy that depends on steps alone gives the same answer on all workers. One that depends on the clock does not:
    then the leader decides. Its answer takes time, so the leader plans the save for a later step, and each worker that
    knows the plan in time saves there. If one learns of it too late, it reports that; then the save is skipped, and the
    next one is planned further ahead.

    Attributes:
        worker: The rank of this worker among all.
        peers: The communication with the others.
        named: The names of the objects of all workers at the start, in order of rank; once if they were the same.
        holders: The ranks of the workers that hold an object, for objects that not all of them hold.
        left_behind: Saves that ended for the leader before they began, and not yet for all others.
    """

    def __init__(self, cluster: Cluster, *, closes: bool, liveness_seconds: float, timeout_seconds: float) -> None:
        """Starts the threads that communicate with the others, and give signs of life. `closes`: the cluster, too."""
        self.worker = Worker(cluster.rank, cluster.world_size)
        self.peers = peers = Peers(cluster, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds)
        self._closes = closes
        self.left_behind: queue.SimpleQueue[CommitProtocol] = queue.SimpleQueue()
        self.named: list[frozenset[str]] = []
        self.holders: dict[str, tuple[int, ...]] = {}
        self._places = SaveIdAllocator()
        # Guards the rest. No slow work is done while it is held.
        self._lock = threading.Lock()
        self._step = -1
        self._plan: _Plan | None = None
        self._planned = 0
        self._notices = 1
        self._watched = ""
        self._notice_seconds = _NOTICE_LOOKS * PLANS.spread(peers.world_size).longest_seconds
        if not peers.is_leader:
            peers.mailbox.watch(Watch(self._look, PLANS))

    @property
    def saves(self) -> int:
        """How many saves this worker has come to."""
        return self._places.count

    def start(self, storage: Storage, names: Collection[str], *, is_new: bool) -> None:
        """**Collective.** **Blocks.** Begins the job: exchanges names of objects, and checks the common directory.

        If there is something to resume from (not `is_new`), the directory is checked by the restore.

        Raises:
            AbsentError: If a worker does not come.
            StorageError: If this worker does not see what the leader writes.
            PeerError: If another one does not, or has failed.
        """
        token = try_put_token(storage) if is_new and self.peers.is_leader else ""
        try:
            start = self._meet(names, _Start(make_sendable(storage.url), token, [sorted(map(make_sendable, names))]))
            if start.token:
                self._check_place(storage, start)
        finally:
            if token:
                with suppress(HoldfastError):
                    storage.delete([START_NAME])

    def _meet(self, names: Collection[str], start: _Start) -> _Start:

        def put_together(records: list[bytes]) -> bytes:
            starts = [msgspec.json.decode(one, type=_Start) for one in records]
            named = [one.names[0] for one in starts]
            # Mostly all are the same.
            if all(one == named[0] for one in named):
                named = named[:1]
            return msgspec.json.encode(msgspec.structs.replace(starts[LEADER], names=named))

        timeout_seconds = min(self.peers.timeout_seconds, JOIN_SECONDS)
        answer = self.peers.gather_decide_broadcast(
            msgspec.json.encode(start), put_together, "the start of the job", timeout_seconds
        )
        agreed = msgspec.json.decode(answer, type=_Start)
        self.named = list(map(frozenset, agreed.names))
        holders = find_holders(self.named)
        self.holders = {name: holders[sent] for name in names if (sent := make_sendable(name)) in holders}
        return agreed

    def _check_place(self, storage: Storage, start: _Start) -> None:
        problem: HoldfastError | None = None
        who = f"rank {self.peers.rank} on {self.peers.cluster.node}"
        try:
            check_token(storage, start.token, start.url, who, self.peers.timeout_seconds)
        except HoldfastError as error:
            problem = error
        record = b"" if problem is None else msgspec.json.encode(self.peers.failures.describe(problem))
        failed = self.peers.gather_decide_broadcast(
            record, lambda records: next(filter(None, records), b""), "the start of the job"
        )
        if problem is not None:
            raise problem
        if failed:
            raise self.peers.failures.make_error(msgspec.json.decode(failed, type=Failure))

    def try_plan(self, policy: SavePolicy, moment: SaveMoment) -> str | None:
        """Returns why to save at this step, or None, if the workers must agree on that. It does not block."""
        with self._lock:
            self._step = moment.step
            plan = self._plan
            if plan is not None and plan.step <= moment.step:
                self._plan = None
                if moment.last_saved_step == moment.step:
                    return None  # All have saved it meanwhile, for another reason.
                self._watched = self._key_of_missed(plan.number) if self.peers.is_leader else ""
                return plan.reason
            if plan is not None or not self.peers.is_leader:
                return None
            decision = policy.decide_save(moment)
            if not decision.save:
                return None
            self._planned += 1
            ahead_steps = (
                self._notices * math.ceil(self._notice_seconds / moment.step_seconds) if moment.step_seconds else 0
            )
            plan = _Plan(self._planned, self._places.epoch, moment.step + 1 + ahead_steps, decision.reason)
            self._plan = plan
        self.peers.mailbox.post(lambda: self.peers.cluster.set(self.peers.key("plan"), msgspec.json.encode(plan)))
        return None

    def begin(self, step: int) -> CommitProtocol:
        """Called when the save of a step begins here, or would; it does not block."""
        with self._lock:
            watched, self._watched = self._watched, ""
        return CommitProtocol(self.peers, self._places.take(step), watched)

    def report_failure(self, protocol: CommitProtocol, error: BaseException) -> None:
        """Reports to the others, soon, that the save has failed here before it began."""
        self._send_end(protocol, lambda: protocol.report_failure(error))

    def report_left_out(self, protocol: CommitProtocol, reason: str) -> None:
        """Reports to the others, soon, that this worker cannot take part in a save."""
        self._send_end(protocol, lambda: protocol.report_left_out(reason))

    def note_left_out(self, protocol: CommitProtocol) -> None:
        """Called when a save was skipped; if that was because a plan came too late, the next one comes earlier."""
        if protocol.was_missed:
            with self._lock:
                self._notices = min(2 * self._notices, _MOST_NOTICES)

    def begin_epoch(self) -> None:
        """Called when all workers together have restored the run: from now on steps may come again."""
        self._places.begin_epoch()
        with self._lock:
            self._step, self._plan = -1, None

    def leave(self) -> None:
        """Signs off without waiting."""
        self.peers.mailbox.post(self.peers.leave)

    def fail(self, error: BaseException) -> None:
        """**Blocks** for a moment. Tells the others why this worker leaves, and leaves."""
        self.peers.failures.explain(error)
        self.close()

    def close(self) -> None:
        """**Blocks** for a moment. Writes what was posted, signs off, and ends the threads."""
        self.peers.mailbox.close()
        self.peers.wait_heard()
        self.peers.close()
        if self._closes:
            self.peers.cluster.close()

    def _send_end(self, protocol: CommitProtocol, say: Callable[[], object]) -> None:
        self.peers.mailbox.post(say)
        self.peers.mailbox.post(protocol.leave)
        if self.peers.is_leader:
            self.left_behind.put(protocol)

    def _look(self) -> None:
        """Reads what the leader has planned; called in the mailbox's thread."""
        if self._step < 0:
            return  # The leader has not asked yet, and where each worker decides by itself, it never will.
        data = self.peers.cluster.try_get(self.peers.key("plan"))
        if data is None:
            return
        plan = msgspec.json.decode(data, type=_Plan)
        with self._lock:
            # This worker may not have noted yet that the run is restored: then it looks again later.
            if plan.number <= self._planned or plan.epoch > self._places.epoch:
                return
            self._planned = plan.number
            step = self._step
            is_missed = plan.epoch == self._places.epoch and step >= plan.step
            if plan.epoch == self._places.epoch and not is_missed:
                self._plan = plan
        if is_missed:
            # Otherwise those who were there would seem to be as far as this worker is when it saves next.
            self._places.pass_by()
            reason = f"rank {self.peers.rank} was already at step {step} when it learned of a save at step {plan.step}"
            self.peers.cluster.set(self._key_of_missed(plan.number), reason.encode())

    def _key_of_missed(self, number: int) -> str:
        return self.peers.key(f"plan-missed/{number}")
