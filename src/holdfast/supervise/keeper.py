"""Keeps memory of training programs beyond their deaths: one process for each run on this machine.

A worker connects, says who it is, and gets the memory that an earlier one of its place left; what it hands over is held
here from then on. A worker gets memory only when every process of an earlier start has ended, as the kernel says, so
no other one writes into it any more. If no start follows, a process that this one starts writes what was not written,
and the memory goes.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.supervise.launch import receive, tell
from holdfast.supervise.linux import open_signals, read_signal

PATIENCE_SECONDS: Final = 10.0
"""How long a start waits for the processes of the one before to end."""

_PEER: Final = struct.Struct("3i")
_TALK_SECONDS: Final = 10.0
_MOST_TRIES: Final = 12
"""How often the rest is tried to be written, as a disk may be full, or a bucket out of reach."""


@dataclass(eq=False)
class KeptClient:
    """A process that has connected.

    Attributes:
        connection: Its socket; closed once it has no more to say.
        watch: A descriptor that shows its end.
        start: What all workers of one start have in common; empty until it has said it.
        rank: Its rank.
        pid: The process.
        until: Until when it waits for the processes of other starts; 0 if it was answered.
    """

    connection: socket.socket
    watch: int
    start: str = ""
    rank: int = -1
    pid: int = 0
    until: float = 0.0


class Keeper:
    """The memory, and the processes that may write into it."""

    def __init__(
        self, listener: socket.socket, path: str, keep_seconds: float, finisher: list[str], directory: str
    ) -> None:
        """`finisher` is run in that directory."""
        self._listener, self._path, self._finisher, self._directory = listener, path, finisher, directory
        self._inode = Path(path).stat().st_ino
        self._keep_seconds = keep_seconds
        # By rank and number: the image, and its record.
        self._images: dict[tuple[int, int], list[int]] = {}
        self._clients: list[KeptClient] = []
        self._signals = open_signals([signal.SIGTERM])
        # When the last one has left; and what writes the rest.
        self._left_at = time.monotonic()
        self._is_new, self._is_last = True, False
        self._writing: subprocess.Popen[bytes] | None = None
        self._tries = 0

    def serve(self) -> None:
        """Serves until no client is left and nothing is kept."""
        while not self._is_over():
            now = time.monotonic()
            ends = [client.until for client in self._clients if client.until]
            if not self._clients and self._writing is None:
                ends.append(self._left_at + self._keep_seconds * (not self._is_last))
            limit = min(ends, default=now + 1.0) - now
            poll = select.poll()
            for descriptor in (self._listener.fileno(), self._signals):
                poll.register(descriptor, select.POLLIN)
            for client in self._clients:
                poll.register(client.watch, select.POLLIN)
                if client.connection.fileno() >= 0:
                    poll.register(client.connection, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(min(max(limit, 0.0), 1.0) * 1000)}
            if self._signals in ready and read_signal(self._signals) is not None:
                self._is_last = True
            for client in [*self._clients]:
                if client.connection.fileno() in ready:
                    self._hear(client)
                if client.watch in ready and client in self._clients:
                    self._forget(client)
            if self._listener.fileno() in ready:
                self._accept()
            self._answer()
            self._go_on()
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Removes the socket, and the file that those lock who connect. One who holds it has made a new socket, or is
        about to: what keeps the memory then removes both."""
        lock = Path(f"{self._path}.lock")
        with suppress(OSError), lock.open("r") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held.fileno()), lock.stat()):
                if Path(self._path).stat().st_ino == self._inode:
                    Path(self._path).unlink()
                lock.unlink()

    def _is_over(self) -> bool:
        if self._clients or self._writing is not None:
            return False
        # The first one is about to come.
        is_early = self._is_new and time.monotonic() < self._left_at + _TALK_SECONDS
        return not self._images and not is_early

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(_TALK_SECONDS)
        pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        try:
            watch = os.pidfd_open(pid) if user == os.getuid() else -1
        except OSError:
            watch = -1
        if watch < 0:
            connection.close()
            return
        self._clients.append(KeptClient(connection, watch, pid=pid))
        self._is_new = False

    def _hear(self, client: KeptClient) -> None:
        """Takes a message: who it is, memory to hold, or that it writes no more, and whether its memory may go."""
        received = receive(client.connection)
        if received is None:
            client.connection.close()
            return
        message, descriptors = received
        if "start" in message:
            client.start, client.rank = str(message["start"]), int(message["rank"])
            if self._writing is not None and client.pid != self._writing.pid:
                # A new start does that itself, and goes on with what is written by now.
                self._writing.kill()
                self._writing.wait()
                self._writing, self._is_last = None, False
            client.until = time.monotonic() + PATIENCE_SECONDS
        elif "image" in message and len(descriptors) == 2:
            place = client.rank, int(message["image"])
            self._drop(place)
            self._images[place], descriptors = descriptors, []
        elif "leave" in message:
            if message["leave"]:
                # An earlier start may have had more workers.
                others = {other.rank for other in self._clients if other is not client}
                for place in [place for place in self._images if place[0] not in others]:
                    self._drop(place)
            tell(client.connection, {})
            self._forget(client)
        for descriptor in descriptors:
            os.close(descriptor)

    def _answer(self) -> None:
        """Gives what is kept to those that wait, once no process of another start is left."""
        for client in self._clients:
            if not client.until:
                continue
            others = [other for other in self._clients if other.start not in ("", client.start) and not other.until]
            is_alone, is_own = not others, any(other.pid == client.pid for other in others)
            if not is_alone and not is_own and time.monotonic() < client.until:
                continue
            client.until = 0.0
            images = [*self._images.items()] if is_alone else []
            answer = {"images": len(images), "is_alone": is_alone, "is_own": is_own, "keeper": os.getpid()}
            tell(client.connection, answer)
            for (rank, number), descriptors in images:
                tell(client.connection, {"rank": rank, "number": number}, descriptors)
            if not is_alone:
                client.start = ""
                client.connection.close()

    def _forget(self, client: KeptClient) -> None:
        self._clients.remove(client)
        client.connection.close()
        os.close(client.watch)
        self._left_at = time.monotonic()

    def _go_on(self) -> None:
        """Starts what writes the rest, once no client has come for as long as memory is kept; again, if it fails."""
        if self._writing is not None and (code := self._writing.poll()) is not None:
            self._writing, self._left_at, self._is_last = None, time.monotonic(), False
            self._tries += 1
            if code == 0 or self._tries >= _MOST_TRIES:
                for place in [*self._images]:
                    self._drop(place)
        if self._clients or self._writing is not None or not self._images:
            return
        if not self._is_last and time.monotonic() < self._left_at + self._keep_seconds:
            return
        directory = self._directory if Path(self._directory).is_dir() else "/"
        nowhere = subprocess.DEVNULL
        self._writing = subprocess.Popen(self._finisher, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd=directory)

    def _drop(self, place: tuple[int, int]) -> None:
        for descriptor in self._images.pop(place, []):
            os.close(descriptor)


def main(descriptor: int, path: str, keep_seconds: float, finisher: list[str]) -> None:
    """Leaves the process that started it, and serves.

    Args:
        descriptor: The socket that it listens at.
        path: Its path.
        keep_seconds: How long memory is kept that no client comes for.
        finisher: The command that writes what was not written.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    directory = str(Path.cwd())
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    Keeper(socket.socket(fileno=descriptor), path, keep_seconds, finisher, directory).serve()
