"""Notices of the user's own: a file that appears, a function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Demand, Notice, PolledSource


def check_function(what: str, function: object) -> None:
    """**Pure.** Accepts what does its work when it is called.

    Args:
        what: What it is called, for the error.
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
    """A notice is given when a file appears, or is touched again; one that was there before says nothing.

    So the file that stopped one process does not stop the next.
    """

    name = "file"

    def __init__(self, path: str | os.PathLike[str], *, interval_seconds: float = 0.5) -> None:
        """Looks at the file as it is now.

        Args:
            path: The file.
            interval_seconds: How often to look.

        Raises:
            UsageError: If that is no time.
        """
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._path = os.fspath(path)
        self._seen = self._mark()

    def look(self) -> Iterable[Notice]:
        """Whether it has appeared."""
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
    """Asks a function of the user's. It gives a notice when it begins to return something true.

    That may be a `Notice`, which says more.
    """

    name = "watcher"

    def __init__(self, function: Callable[[], object], *, interval_seconds: float = 1.0) -> None:
        """Takes note of the function.

        Args:
            function: Called in a thread of its own, again and again. If it raises it is called again later.
            interval_seconds: How long to wait between two calls.

        Raises:
            UsageError: If it cannot be called, or is an `async def` or a generator; or the interval is no time.
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
