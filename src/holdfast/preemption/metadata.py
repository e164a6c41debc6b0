"""Asks the server that a cloud's machine has for what concerns the machine itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from http.client import HTTPConnection

_MAX_BODY_BYTES: Final = 1 << 20


class Answer(msgspec.Struct, frozen=True):
    """What the server said.

    Attributes:
        status: The status of HTTP.
        headers: By name in lower case.
        body: The text.
    """

    status: int
    headers: Mapping[str, str]
    body: str


def unexpected(url: str, answer: Answer) -> OSError:
    """**Pure.** What to raise when the server says what it should not; whoever looked tries again later."""
    return OSError(f"{url} answered {answer.status}: {answer.body[:200]!r}")


class MetadataServer:
    """One server, asked by one thread at a time; another may close it. Proxies of the environment are not used."""

    def __init__(self, base_url: str, timeout_seconds: float) -> None:
        """Takes note of the place; nothing is sent.

        Args:
            base_url: Such as `http://169.254.169.254`; a path in it stands before those that are asked for.
            timeout_seconds: How long the server may be silent.

        Raises:
            UsageError: If that is no such place.
        """
        parts = urlsplit(base_url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.query or parts.fragment:
            raise UsageError(
                f"{base_url!r} is no URL of a metadata server", hint="Write http://HOST or http://HOST:PORT."
            )
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_seconds = timeout_seconds
        # Guards the two below, so that a connection is either not made any more or found and ended.
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._is_closed = False

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """**Blocks.** Sends one request on a connection of its own.

        Raises:
            OSError: If the server cannot be reached, does not answer in time, or says what is no HTTP.
        """
        from http.client import HTTPConnection, HTTPException

        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        connection = HTTPConnection(self._host, self._port, timeout=limit_seconds)
        with self._lock:
            if self._is_closed:
                raise OSError("the source is closed")
            self._connection = connection
        try:
            connection.request(method, self._base + path, body, dict(headers))
            reply = connection.getresponse()
            text = reply.read(_MAX_BODY_BYTES).decode("utf-8", "replace")
            return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, text)
        except HTTPException as error:
            raise OSError(f"{self.url(path)}: {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def url(self, path: str) -> str:
        """The whole URL of a path, for people."""
        return f"http://{self._host}:{self._port}{self._base}{path}"

    def open(self) -> None:
        """Lets it be asked again after `close`."""
        with self._lock:
            self._is_closed = False

    def close(self) -> None:
        """**Thread-safe.** Ends a request under way, which fails then."""
        with self._lock:
            self._is_closed = True
            live = self._connection.sock if self._connection is not None else None
            if live is not None:
                try:
                    live.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # It has ended by itself.


class MetadataSource:
    """What sources have in common that ask such a server."""

    def __init__(self, base_url: str, timeout_seconds: float) -> None:
        if not timeout_seconds > 0:
            raise UsageError(f"timeout_seconds={timeout_seconds!r} is no time to wait for an answer")
        self._server = MetadataServer(base_url, timeout_seconds)

    def open(self, hear: object) -> None:
        """Nothing is asked before the first look."""
        self._server.open()

    def note_leaving(self) -> None:
        """There is nobody to be told."""

    def close(self) -> None:
        """Ends a request under way."""
        self._server.close()
