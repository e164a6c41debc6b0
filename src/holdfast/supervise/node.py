"""The spare of a node: all workers that a launcher such as torchrun starts here are forked from it.

The launcher starts a client for each worker (`client.py`), which asks this process to fork the program, passes signals
on, and ends as the program ends. If a client is killed, its worker and all processes of its group are killed too. This
process ends with the launcher.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.supervise.imports import read_record
from holdfast.supervise.launch import forget_stub, make_command, receive, tell
from holdfast.supervise.linux import end_with_parent
from holdfast.supervise.program import Program, run
from holdfast.supervise.spare import Request, Spare

_OWN_VARIABLES: Final = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OWN_PREFIXES: Final = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")
"""Variables that each worker has of its own; if an import reads one, only workers with the same value are forked."""

_PATIENCE_SECONDS: Final = 10.0
_MOST_LEFT_OUT: Final = 5
_LOOK_SECONDS: Final = 5.0
_PEER: Final = struct.Struct("3i")


class ProcessLimits(NamedTuple):
    """The limits of a process that a fork can't change. A worker in others than the spare's is started afresh."""

    groups: str
    cores: list[int]
    limits: list[list[int]]

    @classmethod
    def find(cls) -> ProcessLimits:
        """Returns those of this process."""
        groups = ""
        with suppress(OSError):
            groups = Path("/proc/self/cgroup").read_text()
        kinds = (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE)
        limits = [list(resource.getrlimit(kind)) for kind in kinds]
        return cls(groups, sorted(os.sched_getaffinity(0)), limits)


class ForkedWorker(NamedTuple):
    """A worker that was forked.

    Attributes:
        pid: Its process, which leads a group of its own.
        watch: A descriptor that shows its end.
        client: The socket of its client.
    """

    pid: int
    watch: int
    client: socket.socket


def main(path: str, launcher: int, record: str, left_out: list[str], fields: list[Any]) -> None:
    """Leaves the process that started it, imports, and serves the clients of one launcher.

    Args:
        path: The socket to listen at.
        launcher: The process to end with.
        record: The file with what to import.
        left_out: The modules not to import.
        fields: The program.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    forget_stub()
    try:
        watch = os.pidfd_open(launcher)
    except OSError:
        return
    spare = Spare(None)
    if (poison := spare.prepare(Program(*fields), read_record(record), frozenset(left_out))) is not None:
        Path(f"{path}.reason").write_text(poison.reason)
        if poison.module and len(left_out) < _MOST_LEFT_OUT:
            flags = fields[Program._fields.index("flags")]
            words = make_command("node", path, launcher, record, [*left_out, poison.module], fields, flags=flags)
            os.execv(words[0], words)
        return
    program = NodeSpare(spare, path, watch).serve()
    if program is not None:
        run(program, spare.noted)


class NodeSpare:
    """The socket, and the workers that run."""

    def __init__(self, spare: Spare, path: str, launcher: int) -> None:
        self._spare = spare
        self._path = path
        self._launcher = launcher
        self._own = ProcessLimits.find()
        self._environment = dict(os.environ)
        self._workers: dict[int, ForkedWorker] = {}
        # Under a name of its own first: at the path there is never a socket that no process listens at.
        passing = f"{path}.{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(passing)
        Path(passing).chmod(0o600)
        self._listener.listen(128)
        self._inode = Path(passing).stat().st_ino
        Path(passing).rename(path)

    def serve(self) -> Program | None:
        """Forks and watches workers until the launcher has ended; in a child that is to run the program, returns it."""
        is_left = False
        while self._workers or not (is_left or self._is_replaced()):
            poll = select.poll()
            for descriptor in [self._listener.fileno(), *([] if is_left else [self._launcher])]:
                poll.register(descriptor, select.POLLIN)
            for worker in self._workers.values():
                poll.register(worker.watch, select.POLLIN)
                poll.register(worker.client, select.POLLIN)
            events = poll.poll(_LOOK_SECONDS * 1000)
            for descriptor, _ in events[:1]:
                if descriptor == self._launcher:
                    is_left = True
                elif descriptor == self._listener.fileno():
                    program = self._accept()
                    if program is not None:
                        return program
                else:
                    self._follow(descriptor)
        if not self._is_replaced():
            for end in ("", ".begun", ".reason"):
                Path(f"{self._path}{end}").unlink(missing_ok=True)
        return None

    def _is_replaced(self) -> bool:
        """Returns True if another spare has taken the path over, or it was removed."""
        try:
            return Path(self._path).stat().st_ino != self._inode
        except OSError:
            return True

    def _accept(self) -> Program | None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return None
        client.settimeout(_PATIENCE_SECONDS)
        user = _PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
        received = receive(client) if user == os.getuid() else None
        if received is None:
            client.close()
            return None
        message, descriptors = received
        request, process_limits = Request(**message["request"]), ProcessLimits(*message["process_limits"])
        reason = self._find_difference(request, process_limits)
        child = 0 if reason else self._spare.fork()
        if not reason and child == 0:
            return self._become(client, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if reason:
            tell(client, {"reason": reason})
            client.close()
            return None
        tell(client, {"pid": child})
        self._workers[child] = ForkedWorker(child, os.pidfd_open(child), client)
        return None

    def _find_difference(self, request: Request, process_limits: ProcessLimits) -> str:
        """Returns why a worker must be started afresh; empty if it can be forked."""
        if poison := self._spare.check():
            return poison.reason
        if process_limits != self._own:
            return "its cores, its control group or its limits differ from the spare's"
        own, other = self._environment, request.environment
        for name in sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name)):
            is_each_ones = name in _OWN_VARIABLES or name.startswith(_OWN_PREFIXES)
            if not is_each_ones:
                return f"{name} is not what it was when the spare was started"
            if name in self._spare.read:
                return f"an import reads {name}, which differs from worker to worker"
        return ""

    def _become(self, client: socket.socket, request: Request, descriptors: list[int]) -> Program:
        os.setsid()
        client.close()
        self._listener.close()
        os.close(self._launcher)
        for worker in self._workers.values():
            worker.client.close()
            os.close(worker.watch)
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self._spare.become(request, descriptors)

    def _follow(self, descriptor: int) -> None:
        worker = next(one for one in self._workers.values() if descriptor in (one.watch, one.client.fileno()))
        if descriptor == worker.watch:
            _, status = os.waitpid(worker.pid, 0)
            tell(worker.client, {"status": status})
            worker.client.close()
            os.close(worker.watch)
            del self._workers[worker.pid]
            return
        received = receive(worker.client)
        number = signal.SIGKILL if received is None else int(received[0]["signal"])
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, number)
        if received is None:
            # It is reaped at once: the client's end is not looked at again.
            _, _ = os.waitpid(worker.pid, 0)
            worker.client.close()
            os.close(worker.watch)
            del self._workers[worker.pid]
