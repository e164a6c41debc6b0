"""An Azure Blob Storage server on loopback: Azurite, a package of npm."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_ACCOUNT: Final = "devstoreaccount1"
_VERSION: Final = "2023-11-03"


def find_azurite() -> str | None:
    """Returns the program: where `make test-objects` has installed it, or on the path."""
    return shutil.which("azurite-blob", path=f"{ROOT}/.azurite/node_modules/.bin:{os.environ.get('PATH', '')}")


class AzuriteServer:
    """A server that runs until `stop`; it keeps all in memory.

    Attributes:
        endpoint: Its address, with the account in it.
        key: The account's key.
    """

    def __init__(self) -> None:
        """**Blocks** until it answers."""
        program = find_azurite()
        assert program is not None
        self.key = base64.b64encode(os.urandom(32)).decode()
        options = ["--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        self._process = subprocess.Popen(
            [program, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{self.key}"},
        )
        assert self._process.stdout is not None
        said = ""
        while (found := re.search(r"listens on (\S+)", said)) is None:
            line = self._process.stdout.readline()
            assert line, f"azurite ended: {said}"
            said += line
        self.endpoint = f"{found[1]}/{_ACCOUNT}"

    def __enter__(self) -> AzuriteServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients find it."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def make_container(self, name: str) -> None:
        """Makes a container, by a signed request of its own: no client of objects can."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        named = "".join(f"{key}:{value}\n" for key, value in headers.items())
        text = f"PUT{chr(10) * 12}{named}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
        signature = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        headers |= {
            "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}",
            "Content-Length": "0",
        }
        address = f"{self.endpoint}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers), timeout=60)

    def stop(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
