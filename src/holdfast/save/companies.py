"""What a manager has beside it if its job has other workers.

Most programs have one worker. What several need is imported when there are several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.opening import Choice, open_cluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.events import Sink
from holdfast.policies import SaveMoment, SavePolicy, is_by_step
from holdfast.save.line import Line
from holdfast.storage import Storage

if TYPE_CHECKING:
    from holdfast.save.company import Company
    from holdfast.save.joint import JointLine


def open_company(choice: Choice, *, liveness_seconds: float, timeout_seconds: float) -> Company | None:
    """**Collective.** **Blocks.** The other workers, if there are any.

    Args:
        choice: As for `open_cluster`.
        liveness_seconds: How long a worker may not be heard of before it is taken for dead.
        timeout_seconds: The deadline of each wait for workers that live.

    Raises:
        UsageError: If the choice is none.
        AbsentError: If other workers do not come.
        ClusterError: If the store of the job does not answer.
    """
    cluster = open_cluster(choice, min(timeout_seconds, JOIN_SECONDS))
    is_own = cluster is not choice
    if cluster.world_size > 1:
        from holdfast.save.company import Company

        return Company(cluster, closes=is_own, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds)
    if is_own:
        cluster.close()
    return None


def try_plan_save(policy: SavePolicy, moment: SaveMoment, company: Company | None) -> str | None:
    """Why to save now, or None; workers that could decide differently follow what is planned for all of them."""
    if company is not None and not is_by_step(policy):
        return company.try_plan(policy, moment)
    decision = policy.decide_save(moment)
    return decision.reason if decision.save else None


def join_line(
    line: Line, storage: Storage, company: Company | None, emit: Sink, *, checks_replicas: bool
) -> JointLine | None:
    """The line that all workers write together, if there are several.

    Args:
        line: This worker's own hold on it.
        storage: Where the run lies.
        company: The others.
        emit: Told of what happens.
        checks_replicas: Whether this worker was told to compare what workers hold alike.
    """
    if company is None:
        return None
    from holdfast.save.joint import JointLine

    return JointLine(line, storage, company, emit, checks_replicas=checks_replicas)
