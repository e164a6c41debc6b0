"""Two hosts of the tests' own on this machine: network namespaces, with a switch between them that can be unplugged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ADDRESSES = ("10.203.0.1", "10.203.0.2")


class Hosts:
    """Two network namespaces, host 0 and host 1. Files and processes are those of the machine."""

    def __init__(self, name: str) -> None:
        self._names = (f"{name}-0", f"{name}-1")
        self._switch = f"{name}-switch"

    def command(self, host: int, command: list[str | Path]) -> list[str | Path]:
        """A command as it runs on one of the hosts."""
        return [_tool(), "netns", "exec", self._names[host], *command]

    def cut(self) -> None:
        """Unplugs host 1: what is sent gets lost, and nobody is told."""
        _ip("-n", self._switch, "link", "set", "port1", "down")

    def heal(self) -> None:
        """Plugs it in again."""
        _ip("-n", self._switch, "link", "set", "port1", "up")

    def open(self) -> None:
        """Makes them."""
        for name in (self._switch, *self._names):
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            _ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Takes away what is there of them."""
        for name in (*self._names, self._switch):
            subprocess.run([_tool(), "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts for one test, which is skipped where they cannot be made."""
    if not _tool():
        pytest.skip("network namespaces cannot be made: there is no command ip (package iproute2)")
    hosts = Hosts(f"holdfast-{os.getpid()}")
    try:
        try:
            hosts.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.close()


def _tool() -> str:
    return shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) or ""


def _ip(*arguments: str) -> None:
    subprocess.run([_tool(), *arguments], check=True, capture_output=True, text=True)
