"""Notices in a pod of Kubernetes."""

from __future__ import annotations

from typing import Final

from holdfast.numbers import check_seconds
from holdfast.preemption.sources.signals import Signals

DEFAULT_GRACE_SECONDS: Final = 30.0
"""Of a pod that names no `terminationGracePeriodSeconds`."""


class Kubernetes(Signals):
    """Hears signals, as `Signals` does, and knows when `SIGTERM` is followed by `SIGKILL`.

    A pod is not told its own grace period. It begins with the hook `preStop`, whose time is gone when `SIGTERM` comes.
    """

    name = "kubernetes"

    def __init__(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> None:
        """Takes note of the grace period.

        Args:
            grace_seconds: `terminationGracePeriodSeconds` of the pod, less what `preStop` takes.

        Raises:
            UsageError: If that is no time.
        """
        check_seconds("grace_seconds", grace_seconds)
        super().__init__(left_seconds=grace_seconds)
