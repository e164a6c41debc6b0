"""Whole runs in a bucket of a real S3 server: killed, raced for, in bad weather, and without the server."""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bucket_runs import SEED, SIZES, manager_of

import holdfast
from bad_weather import FAULTS, BadWeather
from ceph import CephServer
from command_line import call, call_json
from holdfast.errors import DamageError, FencedError, HoldfastError, SaveFailedError, StorageError
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage import open_storage
from holdfast.storage.objects import ObjectStorage
from holdfast.testing.storage_contract import StorageContract


class TestS3(StorageContract):
    """The contract of a storage."""

    @pytest.fixture(autouse=True)
    def reach(self, url: str) -> None:
        """Lets this process find the server."""

    def make_storage(self, tmp_path: Path) -> ObjectStorage:
        """Returns a new prefix of the bucket."""
        storage = open_storage(f"s3://trial/{uuid.uuid4().hex}")
        assert isinstance(storage, ObjectStorage)
        return storage

    def test_parts_that_come_in_any_order_of_threads(self, storage: ObjectStorage) -> None:
        """A file of several parts is what was written, and what is written from may be used again at once."""
        piece_bytes, count = 3 << 20, 9
        size_bytes = piece_bytes * count - 5
        writer = storage.create("file", size_bytes)
        data = np.random.default_rng(0).integers(0, 255, piece_bytes * count, dtype=np.uint8)

        def write(number: int) -> None:
            piece = data[number * piece_bytes : (number + 1) * piece_bytes].copy()
            writer.write_at(number * piece_bytes, memoryview(piece.data)[: size_bytes - number * piece_bytes])
            piece[:] = 0

        threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        writer.finish()
        assert storage.read("file", size_bytes) == data.tobytes()[:size_bytes]


@pytest.fixture
def weather(server: CephServer, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadWeather]:
    """A proxy before the server, which this process uses; `fault` says what it does."""
    rng = random.Random(SEED)
    faults = list(FAULTS)

    def choose(method: str, path: str) -> str:
        if rng.random() > 0.2:
            return ""
        fault = rng.choice(faults)
        # What is no data is XML or JSON over an insecure connection: no client can see that it was changed.
        is_unseen = fault == "wrong bytes" and ".safetensors" not in path
        return "" if is_unseen or (fault == "409" and method != "PUT") else fault

    proxy = BadWeather(server.endpoint, choose)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


def test_saves_in_bad_weather_are_committed_whole_or_not_at_all(
    weather: BadWeather, server: CephServer, url: str
) -> None:
    array, acknowledged = np.zeros(1_500_000), 0
    causes: set[type] = set()
    manager = manager_of(url, array, keep=holdfast.Latest(2), failures_allowed=1000)
    for step in range(1, 1 + 8 * SIZES):
        array[:] = step
        try:
            manager.save(step)
            manager.wait(120)
            acknowledged = step
        except SaveFailedError as error:
            causes.add(type(error.__cause__))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        found = np.zeros(1_500_000)
        with manager_of(url, found) as reader:
            restored = reader.restore()
        assert restored is not None
        assert restored.step >= acknowledged > 0
        assert (found == restored.step).all()
        for step in call_json("list", url)["steps"]:
            assert step["state"] in ("living", "committed", "kept"), step
    assert sum(weather.made.values()) > 10, weather.made
    assert FencedError not in causes, "no other job has opened the run"
    manager.close()


def test_a_lost_reply_to_a_publish_counts_as_ours(
    server: CephServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: Counter[str] = Counter()

    def choose(method: str, path: str) -> str:
        lost[path] += method == "PUT"
        return "lost reply" if method == "PUT" and lost[path] == 1 else ""

    proxy = BadWeather(server.endpoint, choose)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    storage = open_storage(url)
    for number in range(3 * SIZES):
        assert storage.publish(f"one-{number}", b"same") is True
        assert storage.publish(f"one-{number}", b"same") is False
    assert proxy.made["lost reply"] == 3 * SIZES
    proxy.close()


def test_wrong_bytes_of_a_read_are_never_restored(
    server: CephServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(1_500_000.0)
    with manager_of(url, array) as manager:
        manager.save(1)
    proxy = BadWeather(server.endpoint, lambda method, path: "wrong bytes" if ".safetensors" in path else "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    with manager_of(url, np.zeros(1_500_000)) as reader, pytest.raises((DamageError, HoldfastError)) as caught:
        reader.restore()
    assert "damage" in str(caught.value).lower() or "digest" in str(caught.value).lower()
    assert proxy.made["wrong bytes"] > 0
    proxy.close()


def test_a_server_that_ignores_conditions_is_refused(
    server: CephServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(url)
    assert isinstance(storage, ObjectStorage)

    class Forgetful(ObjectStorage):
        """As a service does that knows no conditions."""

        def publish(self, path: str, data: bytes) -> bool:
            self.delete([path])
            return super().publish(path, data)

    checkpoint = holdfast.Checkpoint(array=np.zeros(3))
    manager = holdfast.CheckpointManager(Forgetful(storage.url, storage._store), checkpoint, cluster="alone")
    manager.save(1)
    with pytest.raises(SaveFailedError, match="was to be created only if there is none"):
        manager.close()


def test_training_survives_a_server_that_is_killed(server: CephServer, url: str) -> None:
    array = np.zeros(400_000)
    with manager_of(url, array, failures_allowed=10) as manager:
        manager.save(1)
        manager.wait(60)
        server.kill_gateway()
        array[:] = 2
        timer = threading.Timer(2.0, server.start_gateway)
        timer.start()
        manager.save(2)
        manager.wait(120)
        timer.join()
    found = np.zeros(400_000)
    with manager_of(url, found) as reader:
        restored = reader.restore()
    assert restored is not None
    assert (restored.step, found[0]) == (2, 2)


@pytest.mark.parametrize(
    ("bucket", "variable", "value", "said"),
    [
        ("nowhere", "AWS_REGION", "us-east-1", "There is no such bucket"),
        ("trial", "AWS_SECRET_ACCESS_KEY", "wr0ngs3cret", "The credentials are wrong"),
        ("trial", "AWS_ACCESS_KEY_ID", "AKIAWRONG", "The credentials are wrong"),
    ],
)
def test_what_cannot_be_read_is_not_taken_for_a_new_run(
    url: str, monkeypatch: pytest.MonkeyPatch, bucket: str, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    there = url.replace("trial", bucket)
    with pytest.raises(StorageError) as caught, manager_of(there, np.zeros(3)) as manager:
        manager.restore()
    assert said in caught.value.hint
    everything = f"{caught.value!r} {caught.value}"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in everything
    result = call("list", there)
    assert result.exit_code != 0
    assert said in result.stderr


def test_verbs_of_the_command_line_take_the_url_of_a_bucket(url: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        array = np.full(1000, float(len(name)))
        with manager_of(f"{url}/{name}", array, keep=holdfast.All()) as manager:
            for step in (1, 2, 3):
                array += 1
                manager.save(step, metrics={"loss": 1 / step})
                manager.wait(60)
    assert "array" in call("show", f"{url}/a@2").stdout
    assert "array" in call("diff", f"{url}/a@1", f"{url}/a@2").stdout
    assert call("verify", f"{url}/a").exit_code == 0
    assert call("export", f"{url}/a@3", "--to", "safetensors", str(tmp_path / "out")).exit_code == 0
    assert (holdfast.load(f"{url}/a")["array"] == 4).all()
    assert call("prune", f"{url}/a", "--steps", "1", "--yes").exit_code == 0
    assert [one["step"] for one in call_json("list", f"{url}/a")["steps"]] == [2, 3]
    assert open_storage(f"{url}/a").list("step-000000001.g0001") == []
    assert MANIFEST_NAME in [one.name for one in open_storage(f"{url}/a").list("step-000000002.g0001")]
