"""The supervisor: starts a training program, and starts it again when it dies. One thread, the standard library alone.

It is the parent of the program, of the spare and of processes that the program has left. Signals come through a
descriptor, so that one loop waits for everything. If it is killed, the kernel sends the program SIGTERM, and the spare
ends.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.supervise.board import ENVIRONMENT, Board, Reading
from holdfast.supervise.launch import KEEPER, make_command, receive, tell
from holdfast.supervise.linux import adopt_orphans, end_with_parent, list_children, open_signals, read_signal
from holdfast.supervise.program import WORDS_BYTES, Program, read_words, show_as
from holdfast.supervise.restarts import INTERRUPTED, PREEMPTED, End, LastError, Options, RestartVerdict, decide
from holdfast.supervise.watcher import HangWatch, pause_of, report

_PASSED_ON: Final = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGTSTP,
)  # fmt: skip
_ASKING: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
"""Signals that ask for an end: after one of them the program is not started again."""

_SECOND_SECONDS: Final = 10.0
"""Within how long after a Ctrl-C another one is the second."""
_OUTLIVED_SECONDS: Final = 600.0
"""A program that runs so long after a Ctrl-C did not take it for the wish to end."""
_END_SECONDS: Final = 5.0
"""How long the program may take to end after a second Ctrl-C."""
_MEMORY_SECONDS: Final = 60.0
"""How long to wait at the end until what was in memory only is written."""
_ORPHANS_SECONDS: Final = 2.0
_ORPHANS_LOOK_SECONDS: Final = 0.001
_FORK_SECONDS: Final = 10.0
_IMPORT_SECONDS: Final = 120.0
"""How long the import of one module may take."""
_SAVE_SECONDS: Final = 30.0
"""How long a program that hangs may go on with its saves before it is killed."""
_LOOK_SECONDS: Final = 0.02
_POISONS: Final = 5
"""After so many unfit spares, and no program that was forked from one, none is started any more."""


class Supervised(NamedTuple):
    """A program or command, and how it is supervised.

    Attributes:
        command: Any command, which is run as it is; empty for a program of Python.
        program: The program.
        has_spare: True to keep a spare.
        max_restarts: See `Options`.
        on_code: Pairs of an exit code, and whether the program is started again.
    """

    command: list[str]
    program: list[Any]
    has_spare: bool
    max_restarts: int | None
    on_code: list[tuple[int, bool]]


class SpareProcess:
    """The spare, as the supervisor sees it.

    Attributes:
        pid: Its process; 0 if there is none.
        connection: The socket to it.
        is_ready: True if it can be forked.
        is_settled: True if nothing is to be started for now: it is there, or another one would do no better.
        cause: The reason why there is no spare, for a line; empty if there is none to tell.
    """

    def __init__(self, program: Program, mask: Iterable[int]) -> None:
        self.pid = 0
        self.connection: socket.socket | None = None
        self.is_ready = self.is_settled = False
        self.cause = "its imports are not recorded"
        self._program = program
        self._mask = mask
        self._left_out: list[str] = []
        self._poisons = 0
        self._importing = ""
        self._told_at = 0.0
        # A record of another run may be of other imports. File systems round times.
        self._begun_at_unix_ns = time.time_ns() - 1_000_000_000

    def start(self) -> None:
        """Starts it, unless it is settled, or too many were unfit, or it is not known yet what to import."""
        if self.pid or self.is_settled or self._poisons >= _POISONS or not self._is_recorded():
            return
        own, other = socket.socketpair()
        arguments = (other.fileno(), self._program.record, self._left_out, [*self._program])
        # Room for the program's own command line, which is written over this one.
        padding = ["-" * len(os.fsencode(word)) for word in self._program.shown]
        command = make_command("spare", *arguments, flags=self._program.flags, show=padding)
        self.is_settled = True
        with other:
            os.set_inheritable(other.fileno(), True)
            try:
                self.pid = os.posix_spawn(command[0], command, os.environ, setsigmask=self._mask)
            except OSError as error:
                self.cause = f"it cannot be started: {error.strerror}"
                own.close()
                return
        self.connection, self._importing, self._told_at = own, "", time.monotonic()
        self.cause = "it was not ready yet"

    def _is_recorded(self) -> bool:
        """Returns True if the program has recorded its imports since this supervisor began."""
        record = self._program.record
        try:
            return bool(record) and Path(record).stat().st_mtime_ns >= self._begun_at_unix_ns
        except OSError:
            return False

    def hear(self) -> None:
        """Reads what it tells."""
        if self.connection is None:
            return
        received = receive(self.connection)
        self._told_at = time.monotonic()
        message = {} if received is None else received[0]
        if "importing" in message:
            self._importing = message["importing"]
        elif "ready" in message:
            self.is_ready, self.cause = True, ""
        elif "reason" in message:
            self._reject(message["reason"], message["module"])
        elif received is None:
            self._find_out()

    def _find_out(self) -> None:
        """**Blocks.** Rejects one that has closed its end, as it is ending."""
        status, module = signal.SIGKILL.value, "" if self.is_ready else self._importing
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            status = os.waitpid(self.pid, 0)[1]
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            # By another process or a kernel that lacks memory: the module is not the reason.
            self._reject("it was killed", "")
            self.is_settled = False
        else:
            self._reject(f"importing {module} ended the process" if module else "it has ended", module)

    def look(self) -> None:
        """Gives up one that hangs in an import."""
        if self.pid and not self.is_ready and time.monotonic() - self._told_at > _IMPORT_SECONDS:
            self._reject(f"importing {self._importing} took more than {_IMPORT_SECONDS:.0f} s", self._importing)

    def _reject(self, cause: str, module: str) -> None:
        self.cause = cause
        self._poisons += 1
        self.is_settled = not module
        if module:
            self._left_out.append(module)
        self.end()

    def end(self) -> None:
        """Ends it."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid, self.is_ready = 0, False
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def fork(self, board: int, words: int, ignored: list[int]) -> int:
        """**Blocks.** Lets it fork the program; returns that process, or 0 if it can't."""
        connection = self.connection
        if connection is None or not self.is_ready:
            return 0
        request = {
            "program": list(self._program),
            "environment": dict(os.environ),
            "directory": str(Path.cwd()),
            "supervisor": os.getpid(),
            "ignored": ignored,
        }
        connection.settimeout(_FORK_SECONDS)
        try:
            if tell(connection, request, [0, 1, 2, board, words]) and (received := receive(connection)):
                if pid := received[0].get("pid"):
                    self._poisons = 0
                    return int(pid)
                self._reject(received[0]["reason"], received[0]["module"])
                return 0
        finally:
            if self.connection is not None:
                connection.settimeout(None)
        self._reject("it does not answer", "")
        return 0


class Supervisor:
    """One program, from its first start to its last end."""

    def __init__(self, task: Supervised) -> None:
        self._task = task
        self._program = Program(*task.program) if task.program else None
        self._options = Options(task.max_restarts, {int(code): bool(again) for code, again in task.on_code})
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = [int(n) for n in _PASSED_ON if signal.getsignal(n) == signal.SIG_IGN]
        self._signals = open_signals([*(n for n in _PASSED_ON if int(n) not in self._ignored), signal.SIGCHLD])
        self._board = Board.create()
        self._words = os.memfd_create("holdfast-words")
        os.truncate(self._words, WORDS_BYTES)
        self._spare = None
        if self._program is not None and task.has_spare:
            self._spare = SpareProcess(self._program, self._mask)
        self._pid = 0
        self._why_fresh = ""
        self._ended: dict[int, int] = {}
        self._asked = 0
        self._interrupted_at: list[float] = []

    def run(self) -> int:
        """**Blocks.** Runs the program until it needs no further start; returns the exit code."""
        adopt_orphans()
        ends: list[End] = []
        died_at = 0.0
        while True:
            begun_at = time.monotonic()
            is_forked = self._start()
            end = self._follow(ends, begun_at, died_at, is_forked=is_forked)
            died_at = time.monotonic()
            ends.append(end)
            interrupted_at = max(self._interrupted_at, default=died_at)
            if self._asked == signal.SIGINT and died_at > interrupted_at + _OUTLIVED_SECONDS:
                self._asked = 0
            verdict = decide(ends, self._options, is_asked=bool(self._asked))
            if not verdict.restarts:
                return self._finish(end, verdict)
            self._end_orphans()
            if verdict.pause_seconds:
                _say(f"{_describe_end(end)}; starts again in {verdict.pause_seconds:.0f} s")
                if self._pause(verdict.pause_seconds):
                    return INTERRUPTED if self._asked == signal.SIGINT else PREEMPTED

    def _start(self) -> bool:
        """Starts the program; returns True if it was forked from the spare."""
        self._board.clear()
        self._ended.clear()
        if self._spare is not None:
            if pid := self._spare.fork(self._board.fd, self._words, self._ignored):
                self._pid = pid
                return True
            self._why_fresh, self._spare.is_settled = self._spare.cause, False
        self._pid = self._start_afresh()
        return False

    def _start_afresh(self) -> int:
        if self._program is None:
            command = self._task.command
        else:
            program = self._program._replace(board=self._board.fd, words=self._words)
            command = make_command("program", *program, flags=program.flags, show=program.shown)
        supervisor = os.getpid()
        if child := os.fork():
            return child
        try:
            end_with_parent()
            if os.getppid() != supervisor:
                os._exit(PREEMPTED)  # It has died: nothing has begun.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            for descriptor in (self._board.fd, self._words):
                os.set_inheritable(descriptor, True)
            os.execvpe(command[0], command, os.environ | {ENVIRONMENT: f"{self._board.fd}:0"})
        except OSError as error:
            _say(f"cannot start {command[0]}: {error}")
        finally:
            os._exit(127)

    def _follow(self, ends: Sequence[End], begun_at: float, died_at: float, *, is_forked: bool) -> End:
        """**Blocks.** Waits until the program ends, and looks after the spare meanwhile; returns the end."""
        is_awaited = True  # The first step of this start.
        counts = bool(ends) and ends[-1].step is not None
        watch, hung, kill_at = HangWatch(), "", math.inf
        looked_at, pause = time.monotonic(), pause_of(self._board.read())
        while self._pid not in self._ended:
            self._turn(_LOOK_SECONDS if is_awaited or hung else pause)
            reading, now = self._board.read(), time.monotonic()
            if now >= looked_at + pause:
                verdict = watch.look(reading, now, pause)
                looked_at, pause = now, pause_of(reading)
                if verdict is not None:
                    _say(report(reading, verdict))
                    if verdict.restarts and not hung:
                        hung, kill_at = verdict.reason, now + _SAVE_SECONDS
            if hung and (not reading.saves_in_flight or now >= kill_at) and self._pid not in self._ended:
                os.kill(self._pid, signal.SIGKILL)
                kill_at = math.inf
            if is_awaited and (reading.first_step_at or not counts):
                is_awaited = False
                self._announce(ends, reading, died_at, begun_at, is_forked=is_forked)
            if self._spare is not None:
                self._spare.look()
                if reading.first_step_at or not counts:
                    self._spare.start()
        if is_awaited:
            self._announce(ends, self._board.read(), died_at, begun_at, is_forked=is_forked)
        reading = self._board.read()
        code = os.waitstatus_to_exitcode(self._ended[self._pid])
        words = read_words(self._words)
        failure = LastError() if words is None or words.pid != self._pid else LastError(*words[1:])
        return End(
            code=code,
            step=reading.step if reading.pid else None,
            seconds=time.monotonic() - begun_at,
            saved=reading.committed if reading.pid else -1,
            run=reading.text.split("\n")[1] if "\n" in reading.text else "",
            failure=failure,
            hung=hung if code == -signal.SIGKILL else "",
            has_reader=_has_reader(),
        )

    def _announce(
        self, ends: Sequence[End], reading: Reading, died_at: float, begun_at: float, *, is_forked: bool
    ) -> None:
        """Says that the program trains again after the last of these ends, or at least runs."""
        if not ends:
            return
        text = _describe_end(ends[-1])
        if reading.first_step_at:
            text += f"; trains again from step {reading.step - reading.steps_done}"
            text += f", {reading.first_step_at - died_at:.2f} s later"
        else:
            text += f"; started again {begun_at - died_at:.2f} s later"
        if self._spare is not None and not is_forked:
            text += f" (without the spare: {self._why_fresh})"
        _say(text)

    def _turn(self, seconds: float) -> None:
        """**Blocks.** Waits for something to happen, and handles it."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        if self._spare is not None and self._spare.connection is not None:
            poll.register(self._spare.connection, select.POLLIN)
        deadlines = [seconds]
        if len(self._interrupted_at) > 1:
            deadlines.append(self._interrupted_at[-1] + _END_SECONDS - time.monotonic())
            if deadlines[-1] <= 0 and self._pid and self._pid not in self._ended:
                os.kill(self._pid, signal.SIGKILL)
                self._interrupted_at.clear()
        for descriptor, _ in poll.poll(max(min(deadlines), 0.0) * 1000):
            if descriptor == self._signals:
                if (received := read_signal(self._signals)) is not None:
                    self._handle(received.number, is_sent=received.is_sent)
            elif self._spare is not None:
                self._spare.hear()

    def _handle(self, number: int, *, is_sent: bool) -> None:
        if number == signal.SIGCHLD:
            self._reap()
            return
        if number in _ASKING:
            self._asked = number
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = [at for at in self._interrupted_at if now - at < _SECOND_SECONDS] + [now]
        if is_sent and self._pid and self._pid not in self._ended:
            os.kill(self._pid, number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._ended[pid] = status

    def _end_orphans(self) -> None:
        """Ends processes that the program has left: it may hold memory, a GPU or a port that the next start needs."""
        until = time.monotonic() + _ORPHANS_SECONDS
        spare = self._spare.pid if self._spare is not None else 0
        # When one ends, its own children come here.
        while orphans := [child for child in list_children() if child != spare and not _keeps_memory(child)]:
            if time.monotonic() >= until:
                return
            for child in orphans:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(_ORPHANS_LOOK_SECONDS)
            self._reap()

    def _pause(self, seconds: float) -> bool:
        """**Blocks.** Waits; returns True if an end is asked for meanwhile."""
        self._pid = 0
        until = time.monotonic() + seconds
        while not self._asked and (left := until - time.monotonic()) > 0:
            self._turn(left)
        return bool(self._asked)

    def _finish(self, end: End, verdict: RestartVerdict) -> int:
        if self._spare is not None:
            self._spare.end()
        # No start follows: what lies in memory only is written now.
        until = time.monotonic() + _MEMORY_SECONDS
        for child in filter(_keeps_memory, list_children()):
            os.kill(child, signal.SIGTERM)
            while child not in self._ended and not self._interrupted_at[1:] and time.monotonic() < until:
                self._turn(until - time.monotonic())
            if child not in self._ended:
                _say("the newest save is in memory only; another process goes on to write it")
        if verdict.why:
            _say(f"not started again: {verdict.why}")
        return INTERRUPTED if self._asked == signal.SIGINT and end.code == -signal.SIGINT else end.exit_code


def _keeps_memory(pid: int) -> bool:
    """Returns True for what keeps images of saves for the next start."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return [word.decode(errors="replace") for word in words[-1 - len(KEEPER) : -1]] == KEEPER


def _has_reader() -> bool:
    """Returns False if the standard output, or that for errors, leads into a pipe that no process reads."""
    poll = select.poll()
    poll.register(1, 0)
    poll.register(2, 0)
    return not any(found & select.POLLERR for _, found in poll.poll(0))


def _describe_end(end: End) -> str:
    """**Pure.** Returns the end in words, as in "killed by SIGKILL at step 120"."""
    return end.reason + (f" at step {end.step}" if end.step else "")


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"holdfast: {text}\n".encode())


def main(*fields: Any) -> None:
    """Supervises one program, and ends this process with the code that it ended with."""
    task = Supervised(*fields)
    show_as(["holdfast", "run", *(Program(*task.program).shown[1:] if task.program else task.command)])
    code = Supervisor(task).run()
    os._exit(code)
