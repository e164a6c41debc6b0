"""A real S3 server for tests: the fixtures `server` and `url`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ceph import PROGRAMS as SERVER_PROGRAMS
from ceph import CephServer, is_installed


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    """A server with the bucket `trial`."""
    if "HOLDFAST_OBJECTS" not in os.environ:
        pytest.skip("takes long: make test-objects runs it")
    if not is_installed():
        pytest.skip(f"needs root, and {', '.join(SERVER_PROGRAMS)}: make test-objects installs them")
    # The path of a socket has at most 107 characters.
    with CephServer(Path(tmp_path_factory.mktemp("c"))) as running:
        running.make_bucket("trial")
        yield running


@pytest.fixture
def url(server: CephServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new run; this process, and those that it starts, find the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://trial/{uuid.uuid4().hex}/run"
