"""Credentials that expire during a run: a profile has new ones issued, by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from ceph import CephServer
from places import PROGRAMS

BOTO3: Final = Path(__file__).parents[2] / ".boto3"
_LIFE_SECONDS: Final = 30
_LONGER_SECONDS: Final = 25


def read_command_lines() -> str:
    """Returns those of all processes of this machine."""
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(place.read_bytes())
        except OSError:
            continue  # It has ended.
    return b"\n".join(lines).decode(errors="replace")


def test_a_run_outlives_its_credentials(server: CephServer, url: str, tmp_path: Path) -> None:
    if not (BOTO3 / "boto3").exists():
        pytest.skip("needs boto3: make test-objects installs it")
    log, config = tmp_path / "issued", tmp_path / "config"
    log.touch()
    command = f"{sys.executable} {PROGRAMS / 'issue_keys.py'} {server.config} {log} {_LIFE_SECONDS}"
    config.write_text(f"[profile trainer]\ncredential_process = {command}\nregion = us-east-1\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_ACCESS")}
    environment.pop("AWS_SECRET_ACCESS_KEY")
    environment |= {"AWS_PROFILE": "trainer", "AWS_CONFIG_FILE": str(config), "PYTHONPATH": str(BOTO3)}
    job = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "saves_for_long.py"), url, str(log), str(_LONGER_SECONDS)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    ended, seen, revoked = threading.Event(), set[str](), set[str]()

    def revoke() -> None:
        """Takes each key back when its time is over, as the service of a cloud does."""
        while not ended.wait(0.3):
            seen.update(read_command_lines().splitlines())
            for line in log.read_text().splitlines():
                name, _, end = line.split()
                if float(end) < time.time() and name not in revoked:
                    revoked.add(name)
                    server.remove_key(name)

    revoking = threading.Thread(target=revoke)
    revoking.start()
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()
        ended.set()
        revoking.join()
    assert job.returncode == 0, output
    secrets = [line.split()[1] for line in log.read_text().splitlines()]
    assert 0 < len(revoked) < len(secrets)
    said = [output, *seen]
    assert not [text for text in said for secret in secrets if secret in text]
