"""What a manager has beside it if its job has other workers.

Most programs have one worker. What several need is imported when there are several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from holdfast.cluster.discover import Choice, open_cluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import HoldfastError
from holdfast.events import Sink
from holdfast.policies import SaveMoment, SavePolicy, is_by_step
from holdfast.save.commit.run_writer import Line
from holdfast.storage import Storage

if TYPE_CHECKING:
    from holdfast.save.joint.participant import Company
    from holdfast.save.joint.run_writer import JointLine

Seen = TypeVar("Seen")


def open_company(
    choice: Choice, look: Callable[[], Seen], *, liveness_seconds: float, timeout_seconds: float
) -> tuple[Seen, Company | None]:
    """**Collective.** **Blocks.** What this worker sees, and the other workers, if there are any.

    A worker that cannot look joins them all the same, or they would wait for it in vain: so they hear why it leaves.

    Args:
        choice: As for `open_cluster`.
        look: Gives what this worker sees; for the rest it need not agree with the others.
        liveness_seconds: How long a worker may not be heard of before it is taken for dead.
        timeout_seconds: The deadline of each wait for workers that live.

    Raises:
        UsageError: If the choice is none.
        AbsentError: If other workers do not come.
        ClusterError: If the store of the job does not answer.
        HoldfastError: What the look has raised.
    """
    problem: HoldfastError | None = None
    try:
        seen = look()
    except HoldfastError as error:
        problem = error
    try:
        cluster = open_cluster(choice, min(timeout_seconds, JOIN_SECONDS))
    except HoldfastError:
        if problem is not None:
            raise problem from None
        raise
    is_own = cluster is not choice
    if cluster.world_size > 1:
        from holdfast.save.joint.participant import Company

        company = Company(cluster, closes=is_own, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds)
        if problem is None:
            return seen, company
        company.fail(problem)
    elif is_own:
        cluster.close()
    if problem is not None:
        raise problem
    return seen, None


def try_plan_save(policy: SavePolicy, moment: SaveMoment, company: Company | None) -> str | None:
    """Why to save now, or None; workers that could decide differently follow what is planned for all of them."""
    if company is not None and not is_by_step(policy):
        return company.try_plan(policy, moment)
    decision = policy.decide_save(moment)
    return decision.reason if decision.save else None


def join_line(
    line: Line,
    storage: Storage,
    company: Company | None,
    emit: Sink,
    *,
    check_replicas: bool | Literal["first"],
) -> JointLine | None:
    """The line that all workers write together, if there are several.

    Args:
        line: This worker's own hold on it.
        storage: Where the run lies.
        company: The others.
        emit: Told of what happens.
        check_replicas: At which saves the workers compare what they hold alike.
    """
    if company is None:
        return None
    from holdfast.save.joint.run_writer import JointLine

    return JointLine(line, storage, company, emit, check_replicas=check_replicas)
