"""A real S3 server on loopback: Ceph's RADOS Gateway with one monitor and one memory store, of Debian's packages.

`python -m ceph DIRECTORY` starts one, prints how to reach it, and stops it when its standard input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
_CONFIG: Final = """
[global]
fsid = {fsid}
run dir = {directory}
log file = {directory}/$name.log
admin socket = {directory}/$name.asok
keyring = {directory}/keyring
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd crush chooseleaf type = 0
osd memory target = 939524096
rgw thread pool size = 64
rgw multipart min part size = 5242880
rgw enable usage log = false
rgw gc obj min wait = 2
rgw gc processor period = 5
rgw gc processor max time = 5
"""


def is_installed() -> bool:
    """True if this machine has all programs, and they may be started."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


class CephServer:
    """A gateway that runs until `stop`.

    Attributes:
        endpoint: Its address.
        access_key: The user's name.
        secret_key: The user's secret.
    """

    def __init__(self, directory: Path, memory_bytes: int = 4 << 30) -> None:
        """**Blocks** for some 15 s. Starts all, below a directory that is empty."""
        self._directory = directory
        self._children: list[subprocess.Popen[bytes]] = []
        self.access_key, self.secret_key = "holdfast", uuid.uuid4().hex
        (self._port, mon_v1, mon_v2) = _free_ports(3)
        self.endpoint = f"http://127.0.0.1:{self._port}"
        config = _CONFIG.format(
            fsid=(fsid := str(uuid.uuid4())),
            directory=directory,
            mon_v1=mon_v1,
            mon_v2=mon_v2,
            memory_bytes=memory_bytes,
        )
        (directory / "ceph.conf").write_text(config)
        try:
            self._start_cluster(fsid, mon_v1, mon_v2)
            self.start_gateway()
            self._call("radosgw-admin", "user", "create", "--uid=trainer", "--display-name=trainer",
                       f"--access-key={self.access_key}", f"--secret-key={self.secret_key}")  # fmt: skip
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> CephServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def start_gateway(self) -> None:
        """**Blocks** until it answers."""
        self._gateway = self._spawn(
            "radosgw", "-f", "-n", "client.rgw.a", "-k", f"{self._directory}/keyring",
            f"--rgw-frontends=beast endpoint=127.0.0.1:{self._port} tcp_nodelay=1",
        )  # fmt: skip
        _wait(lambda: socket.create_connection(("127.0.0.1", self._port), 1).close(), self._gateway)

    def kill_gateway(self) -> None:
        """Kills it by SIGKILL; the objects stay."""
        self._gateway.send_signal(signal.SIGKILL)
        self._gateway.wait()

    def make_bucket(self, name: str) -> None:
        """Makes a bucket, by a signed request of its own: no client of objects can."""
        _signed_put(self, f"/{name}")

    def allow(self, ways: str) -> None:
        """Lets the user do these of `read,write,delete`, and nothing else."""
        self._call("radosgw-admin", "user", "modify", "--uid=trainer", f"--op-mask={ways}")

    @property
    def config(self) -> Path:
        """The file that its programs read."""
        return self._directory / "ceph.conf"

    def remove_key(self, name: str) -> None:
        """Takes a key of the user back."""
        self._call("radosgw-admin", "key", "rm", "--uid=trainer", "--key-type=s3", f"--access-key={name}")

    def stop(self) -> None:
        """Kills all."""
        for child in reversed(self._children):
            child.kill()
            child.wait()

    def _start_cluster(self, fsid: str, mon_v1: int, mon_v2: int) -> None:
        here, keyring = self._directory, f"{self._directory}/keyring"
        for name, caps in (
            ("mon.", {"mon": "allow *"}),
            ("client.admin", {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}),
            ("osd.0", {"mon": "allow profile osd", "osd": "allow *"}),
            ("client.rgw.a", {"mon": "allow *", "osd": "allow *"}),
        ):
            caps_args = [arg for part, cap in caps.items() for arg in ("--cap", part, cap)]
            create = [] if Path(keyring).exists() else ["--create-keyring"]
            _call("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps_args)
        address = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
        _call("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, f"{here}/monmap")
        (here / "mon").mkdir()
        _call(
            "ceph-mon",
            "--mkfs",
            "-i",
            "a",
            f"--mon-data={here}/mon",
            "--monmap",
            f"{here}/monmap",
            "-c",
            f"{here}/ceph.conf",
            "--keyring",
            keyring,
        )
        self._spawn("ceph-mon", "-f", "-i", "a", f"--mon-data={here}/mon", f"--public-addrv={address}")
        self._call("ceph", "--connect-timeout=30", "auth", "import", "-i", keyring)
        osd = str(uuid.uuid4())
        self._call("ceph", "osd", "new", osd, "0")
        (here / "osd").mkdir()
        _call(
            "ceph-osd",
            "--mkfs",
            "-i",
            "0",
            f"--osd-data={here}/osd",
            "--osd-uuid",
            osd,
            "-c",
            f"{here}/ceph.conf",
            "-k",
            keyring,
        )
        self._call("ceph", "osd", "crush", "add-bucket", "here", "host")
        self._call("ceph", "osd", "crush", "move", "here", "root=default")
        self._call("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=here")
        self._spawn("ceph-osd", "-f", "-i", "0", f"--osd-data={here}/osd")

    def _call(self, program: str, *args: str) -> str:
        return _call(program, "-c", f"{self._directory}/ceph.conf", *args)

    def _spawn(self, program: str, *args: str) -> subprocess.Popen[bytes]:
        output = (self._directory / f"{program}.out").open("ab")
        child = subprocess.Popen(
            [program, "-c", f"{self._directory}/ceph.conf", *args], stdout=output, stderr=output, start_new_session=True
        )
        self._children.append(child)
        return child


def _call(program: str, *args: str) -> str:
    done = subprocess.run([program, *args], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(args)}: {done.stderr[-2000:]}")
    return done.stdout


def _wait(attempt: Callable[[], object], child: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            attempt()
            return
        except OSError:
            if child.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _signed_put(server: CephServer, path: str) -> None:
    import datetime
    import hashlib
    import hmac
    import urllib.request

    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    host, body = server.endpoint.removeprefix("http://"), hashlib.sha256(b"").hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    request = f"PUT\n{path}\n\nhost:{host}\nx-amz-content-sha256:{body}\nx-amz-date:{now}\n\n{names}\n{body}"
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{server.secret_key}".encode()
    for part in (now[:8], "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    headers = {
        "x-amz-content-sha256": body,
        "x-amz-date": now,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={server.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}",
    }
    urllib.request.urlopen(urllib.request.Request(server.endpoint + path, method="PUT", headers=headers), timeout=60)


if __name__ == "__main__":
    with CephServer(Path(sys.argv[1])) as running:
        running.make_bucket("trial")
        sys.stdout.write(f"{json.dumps(running.environment)}\n")
        sys.stdout.flush()
        sys.stdin.read()
