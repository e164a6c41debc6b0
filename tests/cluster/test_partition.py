"""The link between two hosts is cut in the middle of a commit, and healed: nothing is torn, nobody waits for long."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalog import StoredRun
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage
from holdfast.testing.processes import Workers, python
from network import ADDRESSES, Hosts, two_hosts
from places import PROGRAMS

WORKER = PROGRAMS / "partition_worker.py"
PATIENCE_SECONDS = 120.0

CUTS = int(os.environ.get("HOLDFAST_CUTS", "0"))
"""How often the link is cut at a random moment, beside those that are always tried."""


class Job:
    """Two workers on two hosts, which save when they are told to."""

    def __init__(self, workers: Workers, hosts: Hosts, directory: Path) -> None:
        self.run = directory / "run"
        self._orders = directory / "orders"
        self._orders.mkdir()
        self._workers = workers
        self.step = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        for rank in range(2):
            command = hosts.command(rank, python(WORKER, self.run, self._orders))
            workers.start(command, environment | {"RANK": str(rank)})
        for rank in range(2):
            assert workers.wait_said(rank, "worker", PATIENCE_SECONDS) == rank

    def begin_save(self) -> None:
        self.step += 1
        (self._orders / f"step-{self.step}").touch()

    def wait_ended(self) -> list[dict[str, Any]]:
        """What each has said of the save, by rank."""
        return [self._wait_record(rank) for rank in range(2)]

    @contextmanager
    def held(self, place: str, rank: int) -> Iterator[None]:
        """A save in whose middle a worker stands still, until the block is left.

        When the link has been mended, saves may still fail for a while, until the two have heard of each other.
        """
        order = self._orders / f"hold-{place}"
        order.touch()
        held = self._count_held(rank)
        while self._count_held(rank) == held:
            self.begin_save()
            self._wait(lambda: self._count_held(rank) > held or self._try_ended(rank) is not None, rank)
            if self._count_held(rank) == held:
                check_errors(*self.wait_ended())
        yield
        order.unlink()

    def _count_held(self, rank: int) -> int:
        return sum("held" in record for record in self._workers.records(rank))

    def _try_ended(self, rank: int) -> dict[str, Any] | None:
        return next((record for record in self._workers.records(rank) if record.get("ended") == self.step), None)

    def end(self) -> None:
        (self._orders / "end").touch()
        assert self._workers.wait(PATIENCE_SECONDS) == [0, 0], self._workers.report(0) + self._workers.report(1)

    def _wait_record(self, rank: int) -> dict[str, Any]:
        self._wait(lambda: self._try_ended(rank) is not None, rank)
        found = self._try_ended(rank)
        assert found is not None
        return found

    def _wait(self, look: Any, rank: int) -> None:
        end_at = time.monotonic() + PATIENCE_SECONDS
        while not look():
            assert time.monotonic() < end_at, self._workers.report(rank)
            time.sleep(0.005)  # The worker prints into a file, which nobody can wait for.


def check_errors(leader: dict[str, Any], other: dict[str, Any]) -> None:
    """The leader names the other worker; that one names it as well, or the place of the store that it cannot reach."""
    if leader["failed"] is not None:
        assert (leader["failed"], leader["rank"]) == ("PeerError", 1), leader
        assert other["failed"] is not None, other
    if other["failed"] is not None:
        named = other["failed"] == "PeerError" or (other["failed"] == "ClusterError" and ADDRESSES[0] in other["text"])
        assert named, other


@pytest.mark.long
def test_a_link_that_is_cut_in_the_middle_of_a_commit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    promised: list[int] = []
    with two_hosts() as hosts, Workers(tmp_path) as workers:
        job = Job(workers, hosts, tmp_path)

        def check_well() -> None:
            """Saves, and again as long as the two have not heard of each other again."""
            end_at = time.monotonic() + PATIENCE_SECONDS
            while True:
                job.begin_save()
                leader, other = job.wait_ended()
                check_errors(leader, other)
                promised.extend([job.step] if leader["failed"] is None else [])
                if leader["failed"] is None and other["failed"] is None:
                    return
                assert time.monotonic() < end_at, (leader, other)

        check_well()
        # Before the other host has said what it has written.
        with job.held("part", 1):
            hosts.cut()
        leader, other = job.wait_ended()
        assert leader["failed"] is not None
        check_errors(leader, other)
        assert [name.step for name in StoredRun(LocalStorage(job.run)).look().committed] == promised
        hosts.heal()
        check_well()
        # When all has been decided, and the leader is about to publish.
        with job.held("publish", 0):
            hosts.cut()
        leader, other = job.wait_ended()
        assert leader["failed"] is None
        check_errors(leader, other)
        assert other["failed"] is not None
        promised.append(job.step)
        hosts.heal()
        check_well()
        dice = random.Random(1)
        for _ in range(CUTS):
            job.begin_save()
            time.sleep(dice.random() * 0.1)  # The cut comes at any moment of the save.
            hosts.cut()
            leader, other = job.wait_ended()
            check_errors(leader, other)
            promised += [job.step] if leader["failed"] is None else []
            hosts.heal()
            check_well()
        job.end()
    storage = LocalStorage(job.run)
    catalog = StoredRun(storage).look()
    assert [name.step for name in catalog.committed] == promised
    for name in catalog.committed:
        assert not verify_data(storage, open_step(storage, name.directory, name))
