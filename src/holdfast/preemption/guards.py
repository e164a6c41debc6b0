"""Which guard stands beside a loop."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import UsageError
from holdfast.preemption.final_save import Saves
from holdfast.preemption.guard import Guard
from holdfast.preemption.termination import TerminationConfig
from holdfast.save.handle import SaveHandle


def make_guard(manager: Saves, config: TerminationConfig, keep: Callable[[int], SaveHandle | None]) -> Guard:
    """The guard for a loop: one that agrees with those of the other workers, if there are any.

    The arguments are those of `Guard`.

    Raises:
        UsageError: If the first two are none.
    """
    if isinstance(manager, type) or not (hasattr(manager, "company") and hasattr(manager, "checkpoint")):
        raise UsageError(
            f"{manager!r} is no manager", hint="Give a CheckpointManager(directory, Checkpoint(model=model, ...))."
        )
    if not isinstance(config, TerminationConfig):
        raise UsageError(
            f"termination_config={config!r}",
            hint="It is a TerminationConfig, or None; sources of notices go into its sources=[...].",
        )
    if manager.company is None:
        return Guard(manager, config, keep)
    # Most programs have one worker, and do without what several need.
    from holdfast.preemption.joint_guard import JointGuard

    return JointGuard(manager, manager.company, config, keep)
