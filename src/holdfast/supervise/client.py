"""The client: a launcher such as torchrun starts it instead of a worker, and it ends as the worker ends.

It asks the spare of the node to fork the worker. Where there is none, or the spare can't be forked for this worker, the
client becomes the worker itself, which starts the spare once its first step is done.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

from holdfast.supervise.imports import find_record
from holdfast.supervise.launch import find_flags, make_command, receive, tell
from holdfast.supervise.linux import open_signals, read_signal
from holdfast.supervise.node import ProcessLimits
from holdfast.supervise.program import Program
from holdfast.supervise.spare import Request

_PATIENCE_SECONDS: Final = 10.0
_LONGEST_PATH: Final = 95
"""Paths of sockets have at most 107 bytes, and the spare adds its number."""
_NOT_PASSED_ON: Final = frozenset({
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGABRT, signal.SIGTRAP, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU,
})  # fmt: skip


def main(program: Program, *, has_spare: bool) -> NoReturn:
    """Runs a program as a worker of a launcher, and ends this process as it ends."""
    path = find_socket(program) if has_spare and program.record else ""
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    reason = ""
    if path and (connection := _connect(path)) is not None:
        request = Request([*program], dict(os.environ), str(Path.cwd()), 0, ignored)
        message = {"request": request._asdict(), "process_limits": [*ProcessLimits.find()]}
        # From here on signals are for the worker.
        signals = open_signals(number for number in signal.valid_signals() if number not in _NOT_PASSED_ON)
        answer = receive(connection) if tell(connection, message, [0, 1, 2]) else None
        if answer is not None and "pid" in answer[0]:
            connection.settimeout(None)
            _follow(connection, signals, answer[0]["pid"])
        os.close(signals)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        reason = "it does not answer" if answer is None else answer[0]["reason"]
    elif path and (file := Path(f"{path}.reason")).exists():
        reason = file.read_text()
    if reason:
        sys.stderr.write(f"holdfast: started without the spare: {reason}\n")
        sys.stderr.flush()
    words = make_command("program", *program._replace(spare=path), flags=program.flags, show=program.shown)
    os.execv(words[0], words)


def run_script(script: str, arguments: list[str]) -> NoReturn:
    """Runs a script as a worker of a launcher, as `main` does."""
    record = find_record(os.path.realpath(script), arguments)
    main(Program(script, False, arguments, find_flags(), record, board=-1, words=-1), has_spare=True)


def find_socket(program: Program) -> str:
    """Returns the path of the socket of the spare for this program and this launcher; empty without a safe one."""
    place, launcher = find_own_place(), os.getppid()
    try:
        begun = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    if place is None:
        return ""
    words = [str(launcher), begun, program.record, *program.flags]
    path = str(place / f"holdfast-{hashlib.sha256('|'.join(words).encode()).hexdigest()[:24]}")
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else ""


def find_own_place() -> Path | None:
    """Returns a directory of this user's alone, for sockets; None if there is none."""
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/holdfast-{os.getuid()}")
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        facts = place.lstat()
    except OSError:
        return None
    return place if facts.st_uid == os.getuid() and not facts.st_mode & 0o077 else None


def _connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_PATIENCE_SECONDS)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _follow(connection: socket.socket, signals: int, worker: int) -> NoReturn:
    """**Blocks.** Passes signals on until the worker ends, and ends this process in the same way."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(signals, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == signals:
                if (received := read_signal(signals)) is not None:
                    tell(connection, {"signal": received.number})
                continue
            message = receive(connection)
            if message is None:
                # The spare has died, and with it what is known of the worker.
                os.killpg(worker, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                _end(os.waitstatus_to_exitcode(message[0]["status"]))


def _end(code: int) -> NoReturn:
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
