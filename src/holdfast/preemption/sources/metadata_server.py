"""Queries the metadata server of a cloud machine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Hear, PolledSource

_MAX_BODY_BYTES: Final = 1 << 20


class Answer(msgspec.Struct, frozen=True):
    """An answer of the server; `headers` by name in lower case."""

    status: int
    headers: Mapping[str, str]
    body: str


def unexpected(url: str, answer: Answer) -> OSError:
    """**Pure.** Returns the error for an unexpected answer; the server is asked again later."""
    return OSError(f"{url} answered {answer.status}: {answer.body[:200]!r}")


def parse_record(url: str, answer: Answer) -> dict[str, Any]:
    """**Pure.** Returns the answer as a JSON object.

    Raises:
        OSError: If it is not one.
    """
    try:
        record = json.loads(answer.body) if answer.status == 200 else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise unexpected(url, answer)
    return record


class MetadataSource(PolledSource):
    """A source that queries one server, from one thread at a time; another thread may close it. It uses no proxy."""

    def __init__(self, base_url: str, timeout_seconds: float) -> None:
        """Stores the settings; sends no request.

        Args:
            base_url: For example `http://169.254.169.254`; a path in it is put before those that are requested.
            timeout_seconds: How long the server may be silent.

        Raises:
            UsageError: If the URL or the time is not valid.
        """
        check_seconds("timeout_seconds", timeout_seconds)
        parts = urlsplit(base_url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.query or parts.fragment:
            raise UsageError(
                f"{base_url!r} is not the URL of a metadata server", hint="Write http://HOST or http://HOST:PORT."
            )
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_seconds = timeout_seconds
        # Guards the two below, so that a connection is either not used any more or found and ended.
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_closed = False

    def _request(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """**Blocks.** Sends one request on its own connection.

        Raises:
            OSError: If the server cannot be reached, does not answer in time, or does not answer in HTTP.
        """
        from http.client import HTTPConnection, HTTPException

        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        connection = HTTPConnection(self._host, self._port, timeout=limit_seconds)
        try:
            connection.connect()
            with self._lock:
                self._connection = connection.sock
            self._refuse_closed()
            connection.request(method, self._base + path, body, dict(headers))
            with connection.getresponse() as reply:
                text = reply.read(_MAX_BODY_BYTES).decode("utf-8", "replace")
                self._refuse_closed()  # What was cut off then may look whole.
                return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, text)
        except TimeoutError:
            raise TimeoutError(f"{self._url(path)} did not answer within {limit_seconds:g} s") from None
        except HTTPException as error:
            raise OSError(f"{self._url(path)}: {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _url(self, path: str) -> str:
        return f"http://{self._host}:{self._port}{self._base}{path}"

    def open(self, hear: Hear) -> None:
        """Does nothing: the first request is sent by the first look."""
        with self._lock:
            self._is_closed = False

    def close(self) -> None:
        """Ends a request in progress, which then fails."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                with suppress(OSError):  # It may have ended by itself.
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _refuse_closed(self) -> None:
        with self._lock:
            if self._is_closed:
                raise OSError("the source is closed")
