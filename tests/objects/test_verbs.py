"""The verbs of the command line on a bucket of a real S3 server."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import holdfast
from bad_weather import BadWeather
from ceph import CephServer
from command_line import PROGRAM, call, call_json
from holdfast.catalog import StoredRun
from holdfast.storage import open_storage
from whole_runs import check_whole, steps_of

SEED = int(os.environ.get("HOLDFAST_SEED", "1"))


def save(place: str | Path, *steps: int, size: int = 300, **options: object) -> None:
    array = np.zeros(size)
    with holdfast.CheckpointManager(place, holdfast.Checkpoint(array=array), **options) as manager:  # type: ignore[arg-type]
        manager.restore()
        for step in steps:
            array[:] = step
            manager.save(step, metrics={"loss": 1 / step})


def test_copied_run_continues_in_the_bucket_and_comes_back(url: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3, size=2_000_000, keep=holdfast.All())
    assert call("copy", tmp_path / "run", url).exit_code == 0
    again = call_json("copy", tmp_path / "run", url)
    assert [one["outcome"] for one in again["steps"]] == ["there"] * 3
    # With a policy: nothing that was copied is taken for the remains of a save.
    save(url, 4, size=2_000_000, keep=holdfast.Latest(3))
    assert check_whole(open_storage(url)) == [2, 3, 4]
    assert call("copy", f"{url}@latest", tmp_path / "run").exit_code == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert (holdfast.load(str(tmp_path / "run"))["array"] == 4).all()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ended_copy_offers_no_half_step_and_continues(url: str, tmp_path: Path, number: signal.Signals) -> None:
    save(tmp_path / "run", 1, 2, size=4_000_000)
    copying = subprocess.Popen([PROGRAM, "copy", tmp_path / "run", url], stderr=subprocess.PIPE, text=True)
    storage = open_storage(url)
    while not any("index" in entry.name for entry in storage.list("", deep=True)) and copying.poll() is None:
        pass
    copying.send_signal(number)
    _, text = copying.communicate(timeout=60)
    assert copying.returncode in (0, -9, 130, 143)
    assert copying.returncode in (0, -9) or "the same command continues" in text
    assert check_whole(storage) == [1, 2][: len(steps_of(storage))]
    assert call("copy", tmp_path / "run", url).exit_code == 0
    assert check_whole(storage) == [1, 2]


def test_copies_in_bad_weather_are_whole(
    server: CephServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 1, 2, size=3_000_000)
    rng, faults = random.Random(SEED), ["lost reply", "reset", "409", "503", "cut body"]

    def choose(method: str, path: str) -> str:
        fault = rng.choice(faults) if rng.random() < 0.2 else ""
        return "" if fault == "409" and method != "PUT" else fault

    proxy = BadWeather(server.endpoint, choose)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    for source, goal in ((tmp_path / "run", url), (url, tmp_path / "back")):
        for _ in range(20):
            if call("copy", source, goal).exit_code == 0:
                break
    assert sum(proxy.made.values()) > 5
    proxy.close()
    assert check_whole(tmp_path / "back") == [1, 2]


def test_wrong_bytes_from_a_bucket_are_never_copied(
    server: CephServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1, size=2_000_000)
    proxy = BadWeather(server.endpoint, lambda method, path: "wrong bytes" if ".safetensors" in path else "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    result = call("copy", url, tmp_path / "there")
    proxy.close()
    assert result.exit_code == 1
    assert "match" in result.stdout
    assert StoredRun(open_storage(tmp_path / "there")).look().committed == ()
