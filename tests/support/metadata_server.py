"""A server on loopback that answers as a cloud's metadata server does, or fails as one may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from patience import PATIENCE_SECONDS

HANG = -1
"""A status that stands for silence."""
CUT = -2
"""A status that stands for an end in the middle of the answer."""
DRIP = -3
"""A status that stands for an answer whose body comes byte by byte, never long silent."""
DRIP_HEAD = -4
"""The same from its headers on."""

_DROPS = 3000
_DROP_SECONDS = 0.02


@dataclass
class Reply:
    """What the server says."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """What the server was asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: str = ""


class Cloud:
    """A running server. `answer` decides what it says; every request is kept."""

    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.released = threading.Event()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length).decode()
                request = Request(self.command, self.path, dict(self.headers.items()), body)
                cloud.requests.append(request)
                reply = cloud.answer(request)
                if reply.status == HANG:
                    cloud.released.wait(60)
                    return
                if reply.status in (DRIP, DRIP_HEAD):
                    self.drip(begins_with_headers=reply.status == DRIP_HEAD)
                    return
                data = reply.body.encode()
                self.send_response(200 if reply.status == CUT else reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) + (100 if reply.status == CUT else 0)))
                self.end_headers()
                self.wfile.write(data)

            def drip(self, *, begins_with_headers: bool) -> None:
                line = b"" if begins_with_headers else f"Content-Length: {_DROPS}\r\n\r\n".encode()
                self.wfile.write(b"HTTP/1.0 200 OK\r\n" + line)
                for _ in range(_DROPS):
                    try:
                        self.wfile.write(b"x")
                    except OSError:
                        return  # Nobody listens any more.
                    if cloud.released.wait(_DROP_SECONDS):
                        return

            do_GET = do_PUT = do_POST = serve  # noqa: N815  The names are those that http.server looks for.

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def serving(answer: Callable[[Request], Reply]) -> Iterator[Cloud]:
    """A server that runs within the block."""
    cloud = Cloud(answer)
    thread = threading.Thread(target=cloud.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield cloud
    finally:
        cloud.released.set()
        cloud.server.shutdown()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        cloud.server.server_close()
