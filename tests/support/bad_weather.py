"""A proxy in front of an HTTP server, on loopback, that makes the faults of a network and of a busy service."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

FAULTS: Final = ("lost reply", "reset", "409", "503", "429", "cut body", "wrong bytes")

_BUSY: Final = "HTTP/1.1 {code}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
_BODY: Final = "<?xml version='1.0'?><Error><Code>{code}</Code></Error>"
_CODES: Final = {
    "409": ("409 Conflict", "ConditionalRequestConflict"),
    "503": ("503 Slow Down", "SlowDown"),
    "429": ("429 Too Many Requests", "TooManyRequests"),
}


class BadWeather:
    """Passes requests on to one server, a connection each; some of them meet a fault.

    Attributes:
        endpoint: Its address.
        made: How often each fault was made.
    """

    def __init__(self, endpoint: str, choose: Callable[[str, str], str]) -> None:
        """Begins to listen.

        Args:
            endpoint: The address of the server.
            choose: Returns the fault of a request from its method and path; "" for none.
        """
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server, self._choose = (host, int(port)), choose
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.made: Counter[str] = Counter()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends listening."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while request := _read_message(client):
                    if not self._answer(client, request):
                        return
            except OSError:
                return

    def _answer(self, client: socket.socket, request: bytes) -> bool:
        """Returns True if the connection may be used again."""
        method, path = request.split(b" ", 2)[:2]
        fault = self._choose(method.decode(), path.decode())
        if fault in ("cut body", "wrong bytes") and method != b"GET":
            fault = ""
        if fault:
            self.made[fault] += 1
        if fault == "reset":
            return False
        if fault in _CODES:
            status, code = _CODES[fault]
            body = _BODY.format(code=code)
            client.sendall(_BUSY.format(code=status, length=len(body), body=body).encode())
            return False
        with socket.create_connection(self._server, 60) as server:
            server.sendall(request)
            reply = _read_message(server, is_reply_to=method)
        if fault == "lost reply":
            return False
        head, _, body_bytes = reply.partition(b"\r\n\r\n")
        if fault == "cut body" and body_bytes:
            client.sendall(head + b"\r\n\r\n" + body_bytes[: len(body_bytes) // 2])
            return False
        if fault == "wrong bytes" and body_bytes:
            at = random.randrange(len(body_bytes))
            body_bytes = body_bytes[:at] + bytes([body_bytes[at] ^ 1]) + body_bytes[at + 1 :]
        client.sendall(head + b"\r\n\r\n" + body_bytes)
        return True


def _read_message(stream: socket.socket, is_reply_to: bytes = b"") -> bytes:
    """Returns one request, or one reply, with its body; b"" at the end of the stream."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = stream.recv(1 << 16)
        if not got:
            return b""
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    if re.search(rb"\r\nexpect: *100-continue", head, re.I):
        stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if is_reply_to == b"HEAD" or b" 204 " in head.split(b"\r\n")[0] + b" ":
        return data
    if re.search(rb"\r\ntransfer-encoding: *chunked", head, re.I):
        while not body.endswith(b"0\r\n\r\n"):
            body += stream.recv(1 << 16)
        return head + b"\r\n\r\n" + body
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
    length = int(found[1]) if found else 0
    chunks, size = [body], len(body)
    while size < length:
        got = stream.recv(1 << 20)
        if not got:
            raise OSError("the body ended early")
        chunks.append(got)
        size += len(got)
    return head + b"\r\n\r\n" + b"".join(chunks)
