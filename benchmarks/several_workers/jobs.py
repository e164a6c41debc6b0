"""The jobs of one number of workers, in which contenders are opened and closed; one that fails is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from benchmarks.contender import ContenderError, ContenderMissingError
from benchmarks.results import Round
from benchmarks.several_workers.job import WorkersJob
from benchmarks.several_workers.orders import WorkerReply, WorkersOrder
from benchmarks.turns import Bench

ORDER_SECONDS: Final = 90.0
"""No order takes longer, or its contender has failed."""


class Jobs:
    """Jobs side by side.

    Attributes:
        live: The contenders that are open, and in which job.
    """

    def __init__(self, bench: Bench, workers: int, members: Mapping[str, Sequence[str]]) -> None:
        """Starts the jobs, all at once: most of a start is reading libraries.

        Args:
            bench: The run.
            workers: How many workers each job has.
            members: The contenders of each job.
        """
        self._bench = bench
        self._workers = workers
        self._members = members
        self._broken: dict[str, str] = {}
        self.live: dict[str, str] = {}
        self._jobs = {name: WorkersJob(name, workers, bench.guard) for name in members}
        for name in members:
            self._wait_ready(name)

    @contextmanager
    def opened(
        self, workload: str, names: Sequence[str], order: Callable[[str], WorkersOrder]
    ) -> Iterator[dict[str, list[WorkerReply]]]:
        """Opens those of the contenders that can be opened, and closes them; what each has said."""
        self._bench.slice += 1
        said: dict[str, list[WorkerReply]] = {}
        for job, members in self._members.items():
            for name in members:
                if name in names and self._revive(workload, job, name):
                    self.live[name] = job
                    self._open(workload, name, order(name), said)
        try:
            yield said
        finally:
            jobs = dict.fromkeys(self.live.values())
            self.live = {}
            for job in jobs:
                self._close(workload, job)

    def order(self, name: str, order: WorkersOrder, most_seconds: float = ORDER_SECONDS) -> list[WorkerReply]:
        """**Blocks.** Has a contender's workers do something.

        Raises:
            ContenderError: If one failed, or took longer than allowed. Then the job has been ended.
        """
        return self._jobs[self.live[name]].order(order, most_seconds)

    def attempt(self, workload: str, name: str, number: int, measure: Callable[[str, int], dict[str, float]]) -> None:
        """Measures one contender; if it fails, all of its job are out of this workload."""
        try:
            figures = measure(name, number)
        except ContenderError as error:
            self._drop(workload, name, str(error))
            return
        self._bench.results.rounds.append(
            Round(workload=workload, contender=name, number=number, slice=self._bench.slice, figures=figures)
        )
        shown = [f"{key} {value:.3g}" for key, value in figures.items() if not key.endswith("bytes")]
        self._bench.say(f"{workload}, round {number}, {name}: {', '.join(shown)}")

    def dismiss(self, workload: str, name: str) -> None:
        """Leaves one contender out of what is open."""
        self._bench.say(f"{workload}, {name}: a round takes it so long that there are no more")
        del self.live[name]

    def close(self) -> None:
        """Ends all jobs."""
        for job in self._jobs.values():
            job.close()

    def kill(self) -> None:
        """Ends all jobs at once; harmless twice."""
        for job in self._jobs.values():
            job.kill()

    def _open(self, workload: str, name: str, order: WorkersOrder, said: dict[str, list[WorkerReply]]) -> None:
        try:
            said[name] = self.order(name, order)
        except ContenderMissingError as error:
            del self.live[name]
            self._bench.results.missing[name] = str(error)
            self._bench.say(f"{workload}, {name}: cannot be measured: {error}")
        except ContenderError as error:
            self._drop(workload, name, str(error))
        else:
            if note := said[name][0].note:
                self._bench.results.makes_last[name] = note

    def _close(self, workload: str, job: str) -> None:
        if self._jobs[job].has_ended:
            return
        try:
            self._jobs[job].order(WorkersOrder(verb="close"), ORDER_SECONDS)
        except ContenderError as error:
            self._bench.say(f"{workload}, {job}: failed when it was closed: {error}")

    def _drop(self, workload: str, name: str, reason: str) -> None:
        """A job that has ended takes all of its contenders along."""
        job = self.live[name]
        for other in [one for one, place in self.live.items() if place == job]:
            del self.live[other]
            why = reason if other == name else f"it shares the job of {name}, which failed"
            self._fail(workload, other, why)

    def _revive(self, workload: str, job: str, name: str) -> bool:
        if job not in self._broken and self._jobs[job].has_ended:
            self._jobs[job] = WorkersJob(job, self._workers, self._bench.guard)
            self._wait_ready(job)
        if job in self._broken:
            self._fail(workload, name, self._broken[job])
        return job not in self._broken

    def _wait_ready(self, job: str) -> None:
        try:
            self._jobs[job].wait_ready()
        except ContenderError as error:
            # Another try would take as long again.
            self._broken[job] = str(error)

    def _fail(self, workload: str, name: str, reason: str) -> None:
        self._bench.results.failures.append((workload, name, reason))
        self._bench.say(f"{workload}, {name}: failed: {reason}")


@contextmanager
def open_jobs(bench: Bench, workers: int, members: Mapping[str, Sequence[str]]) -> Iterator[Jobs]:
    """Jobs that are ready; ends them."""
    jobs = Jobs(bench, workers, members)
    try:
        yield jobs
        jobs.close()
    finally:
        jobs.kill()
