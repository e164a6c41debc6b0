"""What takes a directory takes the URL of a bucket, an open storage of one, and a `file://` URL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from ceph import CephServer
from holdfast.catalog import StoredRun
from holdfast.storage import open_storage
from places import PROGRAMS, TESTS

ENTRIES = ("resumable", "manager", "worker_state", "jobs", "trees", "dcp", "jax")
FRAMEWORKS = ("accelerate", "transformers", "lightning", "keras")


def run_twice(
    server: CephServer, program: Path, place: str, entry: str, *args: str
) -> subprocess.CompletedProcess[str]:
    """The first life finds the place by its URL, and dies; the second one has a storage, and only that the address."""
    by_option = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "ENDPOINT": server.endpoint}
    for further, variables in ((args, {}), (args[:-1], by_option if place.startswith("s3") else {})):
        done = subprocess.run(
            [sys.executable, program, place, entry, *further], capture_output=True, text=True, timeout=200, check=False,
            env={**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", **variables},
        )  # fmt: skip
        assert done.returncode == (-9 if further == args else 0), done.stderr
    return done


@pytest.mark.parametrize(("entry", "scheme"), [(entry, scheme) for entry in ENTRIES for scheme in ("s3", "file")])
def test_an_entry_resumes_what_was_killed(
    server: CephServer, url: str, tmp_path: Path, entry: str, scheme: str
) -> None:
    place = url if scheme == "s3" else f"{tmp_path.as_uri()}/run"
    done = run_twice(server, PROGRAMS / "bucket_entries.py", place, entry, "3")
    assert re.findall(r"begins (\d)", done.stdout) == ["3"], done.stderr
    assert f"end {(58.0).hex()}" in done.stdout


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
        for name in FRAMEWORKS
    ],
)
def test_a_framework_resumes_what_was_killed(server: CephServer, url: str, framework: str) -> None:
    program = TESTS / "frameworks" / "programs" / "plain_epochs.py"
    done = run_twice(server, program, url, framework, "4", "8")
    assert re.search(r"resumed \S+ at step 6", done.stderr), done.stderr
    assert [name.step for name in StoredRun(open_storage(url)).look().living] == [3, 6, 9, 12]


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
def test_a_framework_has_its_own_checkpoints_written_and_read(url: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "lightning_io.py", f"{url}.ckpt"],
        env=dict(os.environ), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(equal|ends) (.*)", done.stdout, re.M) == [("equal", "True"), ("ends", "8 12")]


@pytest.mark.parametrize("kind", ["URL", "storage", "file"])
def test_a_run_is_exported_and_imported(
    server: CephServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = f"{tmp_path.as_uri()}/run" if kind == "file" else url
    to: Any = (place, f"{place}-2")
    if kind == "storage":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        to = [open_storage(each, endpoint=server.endpoint) for each in to]
    with holdfast.CheckpointManager(to[0], holdfast.Checkpoint(a=np.arange(9.0)), cluster="alone") as manager:
        manager.save(1)
    holdfast.export_checkpoint(to[0], tmp_path / "out.pt", to="torch")
    holdfast.import_checkpoint(tmp_path / "out.pt", to[1])
    assert holdfast.load(to[1])["model"]["a"].tolist() == holdfast.load(to[0])["a"].tolist() == [*range(9)]
