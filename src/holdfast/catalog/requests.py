"""Requests to the job of a run, such as to save now, and its replies: small files in the run's directory.

A request is one file, and so is each reply: that it was heard, and what came of it. Who asks removes them all in the
end. Nothing here is synced for its own sake: a request that a power cut loses was never heard.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from typing import ClassVar, Final, Literal, TypeAlias

from holdfast.errors import DamageError, NotFoundError
from holdfast.format.digests import SealedRecord, seal, unseal
from holdfast.storage.protocol import Storage

REQUESTS_DIRECTORY: Final = "requests"
COMMANDS: Final = ("save", "stop", "status")

_MOST_BYTES: Final = 4096
_MOST_LISTED: Final = 64
_NAME: Final = re.compile(r"([0-9a-f]{16})\.(request|heard|reply)\.json")

Command: TypeAlias = Literal["save", "stop", "status"]
Part: TypeAlias = Literal["request", "heard", "reply"]


class RunRequest(SealedRecord, frozen=True):
    """A request to the job of a run.

    Attributes:
        command: What to do.
        generation: The newest generation of the run when this was asked; 0 if there was none.
        asked_by: Who asks, in words.
    """

    kind: ClassVar[str] = "request"

    command: Command
    generation: int
    asked_by: str


class Reply(SealedRecord, frozen=True, kw_only=True):
    """The reply of a job to a request.

    Attributes:
        outcome: `heard` while it is at it, `done`, `failed`, or `declined` if another start of the run was meant.
        step: How many steps are complete.
        committed_step: The newest committed step that the job knows; None if there is none.
        doing: What training does now, in words.
        since_seconds: How long it has done so, in seconds; None if that is not known.
        step_seconds: How long the longest of the last steps took, in seconds; None before the first.
        workers: How many workers the job has.
        host: Its machine.
        process: Its process there.
        boot_id: As in `Opener`.
        pid_namespace: Likewise.
        started_at_ticks: Likewise.
        problem: Why it failed or was declined; else empty.
    """

    kind: ClassVar[str] = "reply"

    outcome: Literal["heard", "done", "failed", "declined"]
    step: int
    committed_step: int | None = None
    doing: str = ""
    since_seconds: float | None = None
    step_seconds: float | None = None
    workers: int = 1
    host: str = ""
    process: int = 0
    boot_id: str = ""
    pid_namespace: str = ""
    started_at_ticks: int = 0
    problem: str = ""


class RequestBox:
    """The requests of one run. Each method **blocks**, and raises `StorageError` if the storage fails."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def list(self) -> dict[str, set[Part]]:
        """Returns which parts there are of each request, by its name."""
        found: dict[str, set[Part]] = {}
        for entry in self.storage.list(REQUESTS_DIRECTORY):
            match = None if entry.is_directory else _NAME.fullmatch(entry.name)
            if match is not None and (match[1] in found or len(found) < _MOST_LISTED):
                found.setdefault(match[1], set()).add(match[2])  # type: ignore[arg-type]
        return found

    def ask(self, request: RunRequest) -> str:
        """Asks, and returns the name of the request."""
        self.storage.make_directory(REQUESTS_DIRECTORY)
        if (place := self.storage.location) is not None:
            # All who may write to the run may ask and reply.
            with suppress(OSError):
                (place / REQUESTS_DIRECTORY).chmod(place.stat().st_mode & 0o7777)
        name = os.urandom(8).hex()
        self.storage.publish(make_path(name, "request"), seal(request))
        return name

    def read(self, name: str) -> RunRequest | None:
        """Returns a request; None if it was withdrawn, or cannot be read."""
        path = make_path(name, "request")
        try:
            return unseal(RunRequest, self.storage.read(path, _MOST_BYTES), path=path)
        except (NotFoundError, DamageError):
            return None

    def reply(self, name: str, part: Literal["heard", "reply"], reply: Reply) -> None:
        """Replies to a request."""
        self.storage.publish(make_path(name, part), seal(reply))

    def read_reply(self, name: str, part: Literal["heard", "reply"]) -> Reply | None:
        """Returns a reply; None if there is none yet."""
        path = make_path(name, part)
        try:
            return unseal(Reply, self.storage.read(path, _MOST_BYTES), path=path)
        except (NotFoundError, DamageError):
            return None

    def withdraw(self, name: str) -> None:
        """Removes the request alone: from now on no job begins to act on it."""
        self.storage.delete([make_path(name, "request")])

    def remove(self, name: str) -> None:
        """Removes a request and the replies to it."""
        self.storage.delete([make_path(name, part) for part in ("request", "heard", "reply")])


def make_path(name: str, part: str) -> str:
    """**Pure.** Returns the path of a part of a request."""
    return f"{REQUESTS_DIRECTORY}/{name}.{part}.json"


def name_asker() -> str:
    """Returns who asks: the user, the machine and the process."""
    user = "someone"
    with suppress(KeyError, OSError, ImportError):  # Containers may have no name for their user.
        import getpass

        user = getpass.getuser()
    return f"{user} on {socket.gethostname()}, process {os.getpid()}"[:200]
