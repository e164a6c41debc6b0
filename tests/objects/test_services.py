"""What holds for a run in a bucket, on each service of which there is a server."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bucket_runs import SEED, SIZES, committed_steps, manager_of, run_job

from azurite import AzuriteServer, find_azurite
from command_line import call, call_json
from holdfast.errors import FencedError, SaveFailedError
from holdfast.storage import open_storage
from holdfast.storage.objects import ObjectStorage
from holdfast.testing.storage_contract import StorageContract


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzuriteServer]:
    """An Azure server with the container `trial`."""
    if find_azurite() is None:
        pytest.skip("needs azurite-blob: make test-objects installs it where there is npm")
    with AzuriteServer() as running:
        running.make_container("trial")
        yield running


@pytest.fixture
def azure_url(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new run; this process, and those that it starts, find the server."""
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    return f"az://trial/{uuid.uuid4().hex}/run"


class TestAzure(StorageContract):
    """The contract of a storage."""

    @pytest.fixture(autouse=True)
    def reach(self, azure_url: str) -> None:
        """Lets this process find the server."""

    def make_storage(self, tmp_path: Path) -> ObjectStorage:
        """Returns a new prefix of the container."""
        storage = open_storage(f"az://trial/{uuid.uuid4().hex}")
        assert isinstance(storage, ObjectStorage)
        return storage


@pytest.fixture(params=["url", "azure_url"], ids=["s3", "azure"])
def run_url(request: pytest.FixtureRequest) -> str:
    """The URL of a new run on each service."""
    return str(request.getfixturevalue(request.param))


def test_killed_jobs_resume_bit_identical_and_lose_nothing_acknowledged(run_url: str) -> None:
    untouched = run_job(f"{run_url}-untouched", 24)
    assert untouched.returncode == 0, untouched.stderr
    rng, newest = random.Random(SEED), 0
    for _ in range(3 * SIZES):
        first = max(newest + 1, 1)
        killed = run_job(run_url, 24, rng.randint(first, min(first + 9, 23)))
        assert killed.returncode == -9, killed.stderr
        resumed = re.search(r"resumed \S+ at step (\d+)", killed.stderr)
        assert int(resumed[1] if resumed else 0) >= newest, killed.stderr
        newest = max([newest, *committed_steps(killed.stdout)])
        if newest > 20:
            break
    end = run_job(run_url, 24)
    assert end.returncode == 0, end.stderr
    assert end.stdout.splitlines()[-1] == untouched.stdout.splitlines()[-1]
    assert [step["step"] for step in call_json("list", run_url)["steps"]] == [21, 24]
    assert "whole" in call("verify", run_url).stdout


def test_of_two_jobs_the_older_one_is_fenced_and_the_run_stays_whole(run_url: str) -> None:
    first, second = np.zeros(2000), np.zeros(2000)
    older, newer = manager_of(run_url, first), manager_of(run_url, second)
    older.save(1)
    older.wait(60)
    newer.restore()
    second[:] = 2
    newer.save(2)
    newer.wait(60)
    first[:] = 9
    older.save(3)
    with pytest.raises(SaveFailedError) as caught:
        older.wait(60)
    assert isinstance(caught.value.__cause__, FencedError)
    older.close()
    newer.close()
    found = np.zeros(2000)
    with manager_of(run_url, found) as reader:
        restored = reader.restore()
    assert restored is not None
    assert (restored.step, found[0]) == (2, 2)


def test_two_jobs_that_start_at_once_leave_one_whole_run(run_url: str) -> None:
    expected = run_job(f"{run_url}-untouched", 24).stdout.splitlines()[-1]
    for number in range(3 * SIZES):
        place = f"{run_url}-{number}"
        with ThreadPoolExecutor(2) as both:
            jobs = list(both.map(run_job, (place, place), (24, 24)))
        ended = [job for job in jobs if job.returncode == 0]
        assert ended, [job.stderr for job in jobs]
        assert {job.stdout.splitlines()[-1] for job in ended} == {expected}
        fenced = [job.stderr for job in jobs if job.returncode != 0]
        assert all("Only one job may save to a run" in text for text in fenced), fenced
        again = run_job(place, 24)
        assert again.stdout.splitlines()[-1] == expected, again.stderr
        assert not committed_steps(again.stdout)
        assert "whole" in call("verify", place).stdout
