"""The contract of a cluster, as tests: derive from `ClusterContract` in a module that pytest collects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.testing.cluster_scenarios import LOSS_SECONDS, PATIENCE_SECONDS, SCENARIOS
from holdfast.testing.processes import Workers


class ClusterContract:
    """The tests, each run by real processes. A subclass says how to start them; all of its tests must pass.

    Attributes:
        worker_count: How many workers a job has.
        exit_codes_without_store: The exit codes of a worker whose store's host was killed, if the engine kills it
            itself.
        keeps_store: True if a job that is started in the directory of an earlier one finds that one's store, like a job
            that its launcher restarts.
    """

    worker_count: ClassVar[int] = 3
    keeps_store: ClassVar[bool] = False
    exit_codes_without_store: ClassVar[tuple[int, ...]] = (0,)

    @classmethod
    def start(cls, workers: Workers, scenario: str, directory: Path) -> None:
        """Starts the processes of a new job, in order of rank, and then others that it needs.

        Each worker opens its cluster and calls `holdfast.testing.cluster_scenarios.play(cluster, scenario)`.
        """
        raise TypeError(f"{cls.__name__} must override start")

    @classmethod
    def store_host(cls) -> int | None:
        """Returns the number of the process that hosts the store; None if none can be killed for it."""
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def played(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, Any]]]]:
        """For each worker, by scenario, the result: one job has run all of them in turn."""
        directory = tmp_path_factory.mktemp("cluster")
        with Workers(directory) as workers:
            cls.start(workers, "all", directory)
            numbers = range(cls.worker_count)
            codes = workers.wait(len(SCENARIOS) * PATIENCE_SECONDS, numbers)
            assert codes == [0] * cls.worker_count, "\n".join(workers.report(number) for number in numbers)
            yield [
                {record["scenario"]: record for record in workers.records(number) if "scenario" in record}
                for number in numbers
            ]

    @pytest.mark.parametrize("scenario", list(SCENARIOS))
    def test_scenario(self, played: list[dict[str, dict[str, Any]]], scenario: str) -> None:
        """Every worker has found everything as expected; see the scenario's docstring."""
        errors = [records[scenario]["error"] for records in played]
        assert errors == [""] * self.worker_count, errors

    def test_a_restart_hears_nothing_of_the_start_before(self, tmp_path: Path) -> None:
        """Each start is an incarnation of its own, and finds none of the keys of another in the store."""
        if not self.keeps_store:
            pytest.skip("each job has a store of its own")
        with Workers(tmp_path) as workers:
            incarnations = []
            for first in (0, self.worker_count):
                numbers = range(first, first + self.worker_count)
                self.start(workers, "restarted", tmp_path)
                assert workers.wait(2 * PATIENCE_SECONDS, numbers) == [0] * self.worker_count
                assert [workers.records(number)[-1]["error"] for number in numbers] == [""] * self.worker_count
                incarnations.append({workers.wait_said(number, "incarnation", 0) for number in numbers})
        assert [len(each) for each in incarnations] == [1, 1]
        assert incarnations[0] != incarnations[1]

    def test_a_killed_worker_is_missed(self, tmp_path: Path) -> None:
        """The others find out which worker it was, within the given time."""
        if self.worker_count == 1:
            pytest.skip("a single worker cannot be missed")
        survivors = range(self.worker_count - 1)
        with Workers(tmp_path) as workers:
            self.start(workers, "bereaved", tmp_path)
            for number in range(self.worker_count):
                workers.wait_said(number, "ready", 2 * PATIENCE_SECONDS)
            workers.kill(self.worker_count - 1, signal.SIGKILL)
            for number in survivors:
                assert workers.wait_said(number, "scenario", LOSS_SECONDS + PATIENCE_SECONDS) == "bereaved"
                assert workers.records(number)[-1]["error"] == "", workers.report(number)

    def test_a_killed_store_is_missed(self, tmp_path: Path) -> None:
        """Every wait ends, with an error that says what is gone."""
        host = self.store_host()
        if host is None:
            pytest.skip("the store lives as long as its only worker")
        survivors = [number for number in range(self.worker_count) if number != host]
        with Workers(tmp_path) as workers:
            self.start(workers, "storeless", tmp_path)
            for number in range(self.worker_count):
                workers.wait_said(number, "ready", 2 * PATIENCE_SECONDS)
            workers.kill(host, signal.SIGKILL)
            codes = workers.wait(4 * PATIENCE_SECONDS, survivors)
            for number, code in zip(survivors, codes, strict=True):
                assert code in self.exit_codes_without_store, workers.report(number)
                if code == 0:
                    assert workers.records(number)[-1]["error"] == "", workers.report(number)
