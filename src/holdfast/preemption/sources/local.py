"""Sources of notices that ask no server: a file that appears, a function of the user's, the clock of Slurm."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Demand, Notice, PolledSource


def check_function(what: str, function: object) -> None:
    """**Pure.** Checks that a function does its work when it is called.

    Args:
        what: The name of the argument, for the error.
        function: The function.

    Raises:
        UsageError: If it cannot be called, or only returns a coroutine or a generator, which is always true.
    """
    if not callable(function):
        raise UsageError(f"{what} must be a function, got {function!r}", hint="Pass a plain function.")
    for each in (function, type(function).__call__):
        is_async = inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        if is_async or inspect.isgeneratorfunction(each):
            kind = "async" if is_async else "a generator"
            raise UsageError(
                f"{what}={function!r} is {kind}: calling it would not run it",
                hint="Pass a plain function, without async, await and yield.",
            )


class FileAppears(PolledSource):
    """Gives a notice when a file appears or is touched again; a file that existed before gives none.

    So the file that stopped one process does not stop the next.
    """

    name = "file"

    def __init__(self, path: str | os.PathLike[str], *, interval_seconds: float = 0.5) -> None:
        """Reads the file's current state.

        Args:
            path: The file.
            interval_seconds: How often to look.

        Raises:
            UsageError: If the interval is not a valid time.
        """
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._path = os.fspath(path)
        self._seen = self._mark()

    def look(self) -> Iterable[Notice]:
        """Returns a notice if the file has appeared."""
        seen, self._seen = self._seen, self._mark()
        if self._seen is None or self._seen == seen:
            return ()
        return (Notice(source=self.name, text=f"{self._path} appeared"),)

    def _mark(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116  A path may be of any kind that the system takes.
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns


class Watcher(PolledSource):
    """Calls a function of the user's, and gives a notice once it returns something true.

    It may also return a `Notice`, with more detail.
    """

    name = "watcher"

    def __init__(self, function: Callable[[], object], *, interval_seconds: float = 1.0) -> None:
        """Stores the function.

        Args:
            function: Called repeatedly, in its own thread. If it raises, it is called again later.
            interval_seconds: How long to wait between two calls.

        Raises:
            UsageError: If it cannot be called, or is an `async def` or a generator; or the interval is invalid.
        """
        check_function("function", function)
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._function = function
        self._was_true = False

    def look(self) -> Iterable[Notice]:
        """**Blocks** as long as the function does, and raises what it raises."""
        answer = self._function()
        if inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer):
            if inspect.iscoroutine(answer):
                answer.close()
            raise TypeError(f"it returned {answer!r}, which is always true, instead of an answer")
        was_true, self._was_true = self._was_true, bool(answer)
        if not answer or was_true:
            return ()
        if isinstance(answer, Notice):
            return (answer,)
        name = getattr(self._function, "__qualname__", repr(self._function))
        return (Notice(source=self.name, text=f"{name} returned True", demand=Demand.LEAVE),)


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
