"""Retention and sweeping behind a commit, and what there is to tell of them."""

from __future__ import annotations

import time

from holdfast.catalog import describe_lost
from holdfast.errors import FencedError, StorageError
from holdfast.events import Failed, Retained, Sink, Warned
from holdfast.format.names import StepName
from holdfast.save.commit.run_writer import Writer
from holdfast.save.failures import PendingFailures
from holdfast.save.records import Origin


class Cleaner:
    """Removes what is not kept. Its failure is told, but the checkpoint stands. Not thread-safe."""

    def __init__(self, writer: Writer, reports: PendingFailures, emit: Sink) -> None:
        self._writer = writer
        self._reports = reports
        self._emit = emit
        self._told_problems: set[str] = set()

    def clean(self, name: StepName, origin: Origin, *, at_end: bool = False) -> None:
        """**Blocks.** Cleans up after the commit of a step.

        Args:
            name: The step.
            origin: Where the run goes on from.
            at_end: Whether the run has ended well: then the step that it went on from needs no protection any more.
        """
        begun_at = time.monotonic()
        protected = dict.fromkeys(origin.sources, "this program has restored from it")
        if origin.base is not None and not at_end:
            protected[origin.base] = "the run goes on from it"
        protected[name] = "just committed"
        try:
            cleaning = self._writer.clean(name, protected)
            if cleaning is None:
                return
            problems: tuple[BaseException, ...] = cleaning.problems
        except FencedError:
            return  # The newer job cleans; the next save here says that this one is fenced.
        except BaseException as error:  # noqa: BLE001  The checkpoint stands, whatever went wrong behind it.
            problems = (error,)
        else:
            self._warn_of_absent(cleaning.absent)
            self._warn_of_lost(cleaning.lost)
            self._emit(
                Retained(
                    kept={kept.step: cleaning.kept[kept] for kept in sorted(cleaning.kept)},
                    removed=tuple(removed.step for removed in cleaning.removed),
                    background_seconds=time.monotonic() - begun_at,
                )
            )
        if problems:
            self._tell(problems[0], name)

    def _tell(self, problem: BaseException, name: StepName) -> None:
        reason = getattr(problem, "message", repr(problem))
        # What cannot be removed is tried again after each save; the same reason is an error only once.
        if reason not in self._told_problems:
            self._told_problems.add(reason)
            failure = StorageError(
                f"step {name.step} is committed, but cleaning up after it failed: {reason}",
                path=name.directory,
                hint="This is tried again after each save.",
            )
            failure.__cause__ = problem
            self._reports.add(failure)
        self._emit(Failed(stage="retain", error=reason, step=name.step, generation=name.generation))

    def _warn_of_absent(self, metrics: tuple[str, ...]) -> None:
        for metric in metrics:
            if metric not in self._told_problems:
                self._told_problems.add(metric)
                text = f"Best({metric!r}) keeps nothing: no checkpoint has that figure. Is it spelt as it is reported?"
                self._emit(Warned(text=text))

    def _warn_of_lost(self, lost: tuple[StepName, ...]) -> None:
        if lost and (text := describe_lost(lost)) not in self._told_problems:
            self._told_problems.add(text)
            self._emit(Warned(text=f"{text}, and kept until `holdfast prune --lost`"))
