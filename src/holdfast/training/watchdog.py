"""The watchdog of a run: what it is to do, and the process that does it where no supervisor watches."""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from holdfast.errors import UsageError
from holdfast.format.records import Worker
from holdfast.numbers import parse_time
from holdfast.process.exit import is_interactive
from holdfast.process.pulse import PULSE
from holdfast.supervise import board as board_module
from holdfast.supervise.board import BETWEEN, RESTORE, Board
from holdfast.supervise.hang import OFF, REPORT, RESTART, Limits
from holdfast.supervise.stacks import DUMP_NAME
from holdfast.training.ledger import Ledger

ENVIRONMENT: Final = "HOLDFAST_WATCHDOG"
"""Replaces the argument, for a program that is not to be edited."""

HANGS_DIRECTORY: Final = "hangs"
_ACTIONS: Final = {"off": OFF, "report": REPORT, "restart": RESTART}
_TIMES: Final = {"step": "least_seconds", "unmarked": "unmarked_seconds", "first": "first_step_seconds"}
_STUB: Final = (
    "import sys, types; package = types.ModuleType('holdfast'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['holdfast'] = package; from holdfast.supervise import watcher; watcher.main(*map(int, sys.argv[2:]))"
)
"""Begins a process without holdfast's own beginning."""

logger: Final = logging.getLogger("holdfast")


def read_watchdog(value: object, name: str = "watchdog") -> Limits:
    """**Pure.** Returns what a watchdog is to do.

    Args:
        value: "off", "report" or "restart"; after one of the last two also times, such as "report step=2min".
        name: What errors call it.

    Raises:
        UsageError: If it is something else.
    """
    word, *entries = (value.split() if isinstance(value, str) else []) or [""]
    limits = Limits(action=_ACTIONS.get(word.lower(), -1))
    for entry in entries:
        key, _, time = entry.partition("=")
        seconds = parse_time(time)
        if key not in _TIMES or not seconds:
            limits = limits._replace(action=-1)
            break
        limits = limits._replace(**{_TIMES[key]: seconds})
    if limits.action < 0:
        raise UsageError(
            f'{name} must be "report", "restart" or "off", got {value!r}',
            hint='With limits of your own: "report step=2min unmarked=30min first=1h".',
        )
    return limits


class Watchdog:
    """The watchdog of one run, in the process that trains. It belongs to the training thread.

    Attributes:
        ledger: Sums up the phases that are watched.
        dump_signal: The signal at which this process writes its stacks, from the first run on; 0 before. It stays: one
            that is under way when a run ends must not end the process.
    """

    dump_signal: ClassVar[int] = 0

    def __init__(self, value: object, url: str, worker: Worker, ledger: Ledger) -> None:
        """Checks what it is to do; the environment comes first."""
        limits = read_watchdog(value)
        if own := os.environ.get(ENVIRONMENT, ""):
            limits = read_watchdog(own, ENVIRONMENT)
        self._limits, self._url, self._rank = limits, url, "" if worker.is_alone else str(worker.rank)
        self._pipe = self._starter = 0
        self._text = ""
        self.ledger = ledger

    def open(self) -> None:
        """Lets the phases of this thread be watched, unless it is off or the platform lacks what that needs."""
        inherited = PULSE.join(make=self._limits.action != OFF and not is_interactive())
        if inherited is None or self._limits.action == OFF:
            return
        try:
            self._register()
        except (OSError, AttributeError, RuntimeError, ValueError) as error:
            logger.debug("the watchdog cannot ask for Python stacks: %s", error)
        is_local = "://" not in self._url
        directory = Path(self._url) / HANGS_DIRECTORY if is_local else Path(f"/tmp/holdfast-hangs-{os.getuid()}")
        self._text = f"{directory.absolute()}\n{self._url}\n{self._rank}"
        PULSE.enter(RESTORE)
        self._publish()
        if not PULSE.is_supervised:
            try:
                self._start(inherited)
            except (OSError, AttributeError, ValueError) as error:
                logger.debug("no watchdog: %s", error)

    def _publish(self) -> None:
        if PULSE.board is not None:
            PULSE.board.set_watch(tuple(self._limits), self._text, Watchdog.dump_signal, PULSE.dump_thread)

    def _register(self) -> None:
        """Has C code write the stacks at a signal that nothing else uses: it works while the interpreter is locked."""
        if Watchdog.dump_signal:
            return
        stacks = os.memfd_create(DUMP_NAME)
        fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
        for number in range(signal.SIGRTMAX - 4, signal.SIGRTMIN, -1):
            if signal.getsignal(number) == signal.SIG_DFL:
                faulthandler.register(number, file=stacks, all_threads=True)
                Watchdog.dump_signal = number
                return

    def _start(self, board: Board) -> None:
        """Starts the process that watches; it ends when this one does, or when the pipe is closed."""
        end, self._pipe = os.pipe()
        package = str(Path(board_module.__file__).parents[1])
        numbers = [str(one) for one in (board.fd, end, os.getpid())]
        nowhere = [(os.POSIX_SPAWN_OPEN, one, os.devnull, os.O_RDWR, 0) for one in range(2)]
        kept = [(os.POSIX_SPAWN_DUP2, one, one) for one in (board.fd, end)]
        try:
            command = [sys.executable, "-S", "-E", "-c", _STUB, package, *numbers]
            self._starter = os.posix_spawn(sys.executable, command, os.environ, file_actions=[*nowhere, *kept])
        finally:
            os.close(end)

    def begin(self, step: int, *, is_restored: bool) -> None:
        """Called when everything is restored, or begins at no step."""
        self._reap()
        if self._text:
            self._publish()  # The thread that writes stacks may be there only now.
        PULSE.enter(BETWEEN, step)
        if is_restored and PULSE.board is not None:
            PULSE.board.note_committed(step)

    def _reap(self, *, waits: bool = False) -> None:
        """Takes leave of the process that has started the watcher, which ends at once."""
        if self._starter:
            with suppress(ChildProcessError):
                if os.waitpid(self._starter, 0 if waits else os.WNOHANG)[0] == 0:
                    return
            self._starter = 0

    def close(self) -> None:
        """**Blocks** for milliseconds at most. The run is over, and no longer watched."""
        PULSE.end()
        if self._pipe:
            os.close(self._pipe)
            self._pipe = 0
        self._reap(waits=True)
