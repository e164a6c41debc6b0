"""How the workers of a job begin a run."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError


def check_alike(nodes: Sequence[str], beginnings: Sequence[Sequence[object]]) -> None:
    """**Pure.** Makes sure that all workers begin a run alike: with the same epoch, or all anew."""
    if any(beginning != beginnings[0] for beginning in beginnings):
        told = (
            f"{node} {'anew' if anew else 'from the newest epoch' if epoch is None else f'from epoch {epoch}'}"
            for node, (epoch, anew) in zip(nodes, beginnings, strict=True)
        )
        raise UsageError(
            f"the workers do not begin alike: {', '.join(told)}",
            hint="Give resume_from_epoch and begin_anew alike on all workers.",
        )
