"""Notices the end of a Slurm job's time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Final

from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Demand, Notice, PolledSource

DEFAULT_AHEAD_SECONDS: Final = 120.0


class Slurm(PolledSource):
    """Notices that the job's time limit is near, from `SLURM_JOB_END_TIME`, and how to requeue the job.

    Slurm 22.05 and older do not set that variable: name a signal there (`--signal`).
    Slurm's preemption itself arrives as `SIGTERM`, and `--signal` as the signal that it names: `Signals` handles those.
    """

    name = "slurm"
    interval_seconds = 1.0

    def __init__(
        self, ahead_seconds: float = DEFAULT_AHEAD_SECONDS, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Reads the environment.

        Args:
            ahead_seconds: How long before the end to report it: long enough for two saves and a step. At most half of
                the time that remains now.
            environment: The environment variables; None for the process's own.

        Raises:
            UsageError: If `ahead_seconds` is not a valid time.
        """
        check_seconds("ahead_seconds", ahead_seconds)
        variables = os.environ if environment is None else environment
        end_at = _read_seconds(variables.get("SLURM_JOB_END_TIME", ""))
        left_seconds = 0.0 if end_at is None else end_at - time.time()
        # A limit in the past is that of an earlier job, left over in a shell. Of a short one, half is for training.
        self._end_at_unix_seconds = end_at if left_seconds > 0 else None
        self._ahead_seconds = min(ahead_seconds, left_seconds / 2)
        self._advice = requeue_advice(variables)
        self._is_reported = False

    def look(self) -> Iterable[Notice]:
        """Reports once that the end is near."""
        if self._is_reported or self._end_at_unix_seconds is None:
            return ()
        left_seconds = self._end_at_unix_seconds - time.time()
        if left_seconds > self._ahead_seconds:
            return ()
        self._is_reported = True
        return (
            Notice(
                source=self.name,
                text="the job's time limit is near",
                demand=Demand.LEAVE_BY,
                left_seconds=left_seconds,
                advice=self._advice,
            ),
        )


def requeue_advice(environment: Mapping[str, str]) -> str:
    """**Pure.** Returns how to requeue this job, in words; an empty string outside of Slurm."""
    job = environment.get("SLURM_ARRAY_JOB_ID")
    if job is not None and "SLURM_ARRAY_TASK_ID" in environment:
        job = f"{job}_{environment['SLURM_ARRAY_TASK_ID']}"
    job = job or environment.get("SLURM_JOB_ID")
    return f"`scontrol requeue {job}` puts it back into the queue" if job else ""


def _read_seconds(text: str) -> float | None:
    """Returns a time that Slurm sets, or None; 0 and text that is not a number mean no limit."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None
