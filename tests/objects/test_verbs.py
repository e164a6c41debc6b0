"""The verbs of the command line on a bucket of a real S3 server."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import holdfast
from bad_weather import BadWeather
from ceph import CephServer
from command_line import PROGRAM, call, call_json, complaint
from holdfast.catalog import StoredRun
from holdfast.cli.exit_codes import ExitCode
from holdfast.errors import SaveFailedError, StorageError
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
    save(tmp_path / "run", 1, 2, 3, size=1_200_000, keep=holdfast.All())
    assert call("copy", tmp_path / "run", url).exit_code == 0
    again = call_json("copy", tmp_path / "run", url)
    assert [one["outcome"] for one in again["steps"]] == ["there"] * 3
    # With a policy: nothing that was copied is taken for the remains of a save.
    save(url, 4, size=1_200_000, keep=holdfast.Latest(3))
    assert check_whole(open_storage(url)) == [2, 3, 4]
    assert call("copy", f"{url}@latest", tmp_path / "run").exit_code == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert (holdfast.load(str(tmp_path / "run"))["array"] == 4).all()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ended_copy_offers_no_half_step_and_continues(url: str, tmp_path: Path, number: signal.Signals) -> None:
    save(tmp_path / "run", 1, 2, size=2_500_000)
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


def test_doctor_measures_a_bucket_and_leaves_nothing_in_it(url: str) -> None:
    found = call_json("doctor", url)
    assert {one["name"]: one["status"] for one in found["findings"]} == dict.fromkeys(
        ("create-only", "clock", "ranges", "upload", "download", "permissions"), "ok"
    )
    figures = found["figures"]
    assert min(figures["write_bytes_per_second"], figures["read_bytes_per_second"], figures["publish_seconds"]) > 0
    assert "--bucket trial" in found["remains_rule"]
    assert open_storage(url).list("", deep=True) == []


@pytest.mark.parametrize(
    ("allowed", "lacking"),
    [
        ("read,write", ["s3:DeleteObject"]),
        ("read,delete", ["s3:PutObject"]),
        ("write,delete", ["s3:ListBucket", "s3:GetObject"]),
    ],
)
def test_doctor_names_each_permission_that_is_missing(
    server: CephServer, url: str, allowed: str, lacking: list[str]
) -> None:
    server.allow(allowed)
    try:
        found = call_json("doctor", url, exit_code=ExitCode.UNFIT)
    finally:
        server.allow("read,write,delete")
    hints = {one["name"]: one["hint"] for one in found["findings"] if one["status"] == "unfit"}
    assert hints.keys() == {"permissions"}
    assert hints["permissions"].partition(";")[0] == f"the credentials lack {', '.join(lacking)}"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("RequestTimeTooSkewed", "The clock of this machine is wrong"),
        ("ExpiredToken", "The credentials have expired"),
        ("SignatureDoesNotMatch", "The credentials are wrong"),
    ],
)
def test_doctor_tells_what_a_service_refuses_apart(
    monkeypatch: pytest.MonkeyPatch, url: str, code: str, said: str
) -> None:
    with refusing_server(code) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        exit_code, words = complaint("doctor", url)
    assert (exit_code, code in words, said in words) == (ExitCode.FAILED, True, True), words


@contextmanager
def refusing_server(code: str) -> Iterator[str]:
    class Refuse(BaseHTTPRequestHandler):
        """Answers a listing by an error."""

        def do_GET(self) -> None:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{service.server_port}"
        service.shutdown()


@pytest.mark.skipif(shutil.which("s3fs") is None or not Path("/dev/fuse").exists(), reason="needs s3fs and FUSE")
def test_bucket_that_is_mounted_is_named_with_what_to_do(server: CephServer, url: str, tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text(f"{server.access_key}:{server.secret_key}")
    secret.chmod(0o600)
    (place := tmp_path / "mount").mkdir()
    options = f"passwd_file={secret},url={server.endpoint},use_path_request_style"
    subprocess.run(["s3fs", "trial", place, "-o", options], check=True)
    try:
        with pytest.raises(StorageError) as caught, holdfast.resumable(place / "run", count=0) as run:
            list(run.steps(1))
        found = call_json("doctor", place, exit_code=ExitCode.UNFIT)
        with (
            pytest.raises(SaveFailedError) as saved,
            holdfast.CheckpointManager(place / "b", holdfast.Checkpoint(a=1)) as one,
        ):
            one.save(1)
    finally:
        subprocess.run(["umount", place], check=True)
    cause = saved.value.__cause__
    for hint in (caught.value.hint, found["findings"][0]["hint"], getattr(cause, "hint", saved.value.hint)):
        assert "mounted by s3fs, without atomic renames and links. Use s3:// instead" in hint


def test_list_shows_the_runs_below_a_prefix_and_completion_offers_them(url: str) -> None:
    for name in ("b", "a", "deep/c"):
        save(f"{url}/{name}", 1, 2)
    open_storage(url).write("notes.txt", b"no run")
    found = call_json("list", url)["runs"]
    assert [(one["run"], one["newest_step"], one["steps"]) for one in found] == [
        (f"{url}/{name}", 2, 2) for name in ("a", "b", "deep/c")
    ]
    assert f"{url}/deep/c" in call("list", url.removesuffix("/run")).stdout
    assert [one["run"] for one in call_json("list", f"{url}/a", f"{url}/b")["runs"]] == [f"{url}/a", f"{url}/b"]
    assert f"It holds runs: {url}/a" in call("verify", url).stderr
    assert "is empty" in call("list", f"{url}/nothing").stderr
    variables = {"COMP_WORDS": f"holdfast show {url}/", "COMP_CWORD": "2", "_HOLDFAST_COMPLETE": "zsh_complete"}
    offered = subprocess.run([PROGRAM], env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert [line for line in offered.stdout.splitlines() if "://" in line] == [
        f"{url}/{name}" for name in ("a", "b", "deep")
    ]


def test_rollback_in_a_bucket_is_undone_by_the_line_that_it_prints(url: str) -> None:
    save(url, 1, 2, 3)
    undo = next(line for line in call("rollback", f"{url}@1").stdout.splitlines() if "to undo this" in line)
    assert steps_of(open_storage(url)) == [1]
    assert call(*undo.partition("holdfast ")[2].split()).exit_code == 0
    assert steps_of(open_storage(url)) == [1, 2, 3]
