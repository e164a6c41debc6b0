"""Creates the parts of a manager that depend on whether its job has other workers.

Most programs have one worker. Code for several workers is imported only if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from holdfast.catalog.deletion import FileRecycler
from holdfast.catalog.step_copier import StepCopier
from holdfast.cluster.discover import Choice, open_cluster
from holdfast.deadlines import JOIN_SECONDS
from holdfast.events import Sink, Warned
from holdfast.options import SaveOptions
from holdfast.policies import RetentionPolicy, SaveMoment, SavePolicy, is_by_step
from holdfast.save.run_writer import CheckpointWriter, RunWriter
from holdfast.storage import Storage

if TYPE_CHECKING:
    from holdfast.save.joint.participant import JointParticipant

Seen = TypeVar("Seen")


def open_participant(
    choice: Choice, look: Callable[[], Seen], *, liveness_seconds: float, timeout_seconds: float
) -> tuple[Seen, JointParticipant | None]:
    """**Collective.** **Blocks.** Returns the result of `look` on this worker, and the other workers, if there are any.

    A worker looks after it has joined them: if it fails, they learn why it leaves, and its error is raised.
    """
    cluster = open_cluster(choice, min(timeout_seconds, JOIN_SECONDS))
    is_own = cluster is not choice
    if cluster.world_size == 1:
        if is_own:
            cluster.close()
        return look(), None
    from holdfast.save.joint.participant import JointParticipant

    participant = JointParticipant(
        cluster, closes=is_own, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds
    )
    with explaining(participant):
        return look(), participant


@contextmanager
def explaining(participant: JointParticipant | None) -> Iterator[None]:
    """Use it with `with`: if the block ends with an error, or an exit, the other workers learn why this one leaves."""
    try:
        yield
    except BaseException as error:
        if participant is not None:
            participant.fail(error)
        raise


def try_plan_save(policy: SavePolicy, moment: SaveMoment, participant: JointParticipant | None) -> str | None:
    """Returns why to save now, or None; workers that could decide differently follow the plan for all of them."""
    if participant is not None and not is_by_step(policy):
        return participant.try_plan(policy, moment)
    decision = policy.decide_save(moment)
    return decision.reason if decision.save else None


def make_writer(
    storage: Storage,
    options: SaveOptions,
    participant: JointParticipant | None,
    emit: Sink,
    copier: StepCopier | None = None,
) -> tuple[CheckpointWriter, FileRecycler]:
    """Returns what writes the checkpoints of a run, by this worker or by all together; and the recycled files."""
    # One spare does not help many workers, whose shared file systems usually grant no leases.
    reuse_space = options.reuse_space and participant is None
    keep: RetentionPolicy = options.keep
    if copier is not None:
        keep = copier.keep
    writer = RunWriter(storage, keep, incremental=options.incremental, reuse_space=reuse_space, copier=copier)
    if participant is None:
        return writer, writer.recycler
    from holdfast.save.joint.run_writer import JointRunWriter

    participant.peers.set_warner(lambda text: emit(Warned(text=text)))
    joint = JointRunWriter(writer, storage, participant, emit, check_replicas=options.check_replicas)
    return joint, writer.recycler
