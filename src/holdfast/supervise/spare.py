"""The spare: an interpreter that has imported what the program imports, and does nothing else but fork it.

It takes one request at a time over its channel, and lives as long as the other end is open. What makes it unfit to be
forked is found by looking, and reported with the module that did it; then the program is started afresh.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.supervise.board import ENVIRONMENT
from holdfast.supervise.imports import ImportNote, find_roots, is_installed, read_record
from holdfast.supervise.launch import forget_stub, receive, tell
from holdfast.supervise.linux import end_with_parent, list_children
from holdfast.supervise.program import Program, become_fresh, run, set_path
from holdfast.supervise.restarts import PREEMPTED

_HARMLESS_THREADS: Final = frozenset({"jemalloc_bg_thd"})
_SWEEPS: Final = frozenset({"__iter__", "copy"})
"""Functions that read the whole environment, by `os.environ.items()` and `os.environ.copy()`."""
_MAIN: Final = frozenset({"__main__", "__mp_main__"})
"""The program itself, and what multiprocessing calls it."""
_STREAMS: Final = 3
_TRIAL_SECONDS: Final = 10.0

_TERMINAL_SIGNALS: Final = (signal.SIGINT, signal.SIGTSTP, signal.SIGHUP, signal.SIGQUIT)


class Poison(NamedTuple):
    """The reason why this process must not be forked.

    Attributes:
        module: The module that did it; empty if that is not known.
        reason: The reason, for a line.
    """

    module: str
    reason: str


class Request(NamedTuple):
    """A request to fork the program.

    Attributes:
        program: What to run; its descriptors are those that come with the request.
        environment: The environment.
        directory: The working directory.
        supervisor: The process that becomes its parent, and without which it is to end.
        ignored: The signals that it ignores from the beginning, as after `nohup`.
    """

    program: list[Any]
    environment: dict[str, str]
    directory: str
    supervisor: int
    ignored: list[int]


def main(channel: int, record: str, left_out: list[str], program: list[Any]) -> None:
    """Imports, tells that it is ready, and forks the program as often as asked; in each child, runs it.

    Args:
        channel: The descriptor of the socket that the requests come from.
        record: The file with what to import.
        left_out: The modules not to import.
        program: What is run later: what imports look at is as it will be.
    """
    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    forget_stub()
    with socket.socket(fileno=channel) as connection:
        spare = Spare(connection)
        poison = spare.prepare(Program(*program), read_record(record), frozenset(left_out))
        tell(connection, {"ready": True} if poison is None else poison._asdict())
        served = spare.serve() if poison is None else None
    if served is not None:
        run(served, spare.noted)


def _is_written_since(moment_ns: int, file: str) -> bool:
    """True if a file was written after a moment, by this user."""
    try:
        facts = Path(file).stat()
    except OSError:
        return False
    # File systems round times.
    return facts.st_uid == os.geteuid() and facts.st_mtime_ns > moment_ns - 10_000_000


class Spare:
    """The modules that are imported here, and the state that they were imported in.

    Attributes:
        noted: What was imported, in order, with each change of the environment, for a record that goes on from here.
        read: The variables of the environment that were read while it was imported, by code in Python.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        self.noted: list[ImportNote] = []
        self.read: set[str] = set()
        self._connection = connection
        self._files: dict[str, tuple[int, int]] = {}
        self._made: dict[str, str] = {}
        self._origin: dict[int, str] = {}

    def prepare(self, program: Program, wanted: list[ImportNote], left_out: frozenset[str]) -> Poison | None:
        """Imports, in the order and with the environment of the program, then looks for what forbids a fork.

        Returns:
            What forbids it; None if nothing does.
        """
        roots, before, given = find_roots(), dict(os.environ), dict(os.environ)
        begun_at_ns, generated = time.time_ns(), set[str]()
        streams = [os.dup(number) for number in (1, 2)]
        with Path(os.devnull).open("wb") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
        set_path(program)
        paths = frozenset(sys.path)
        if not program.is_module:
            sys.modules["__main__"].__file__ = str(Path(program.target).absolute())
        plain = os.environ._data  # type: ignore[attr-defined]
        os.environ._data = _WatchedDict(plain, self.read)  # type: ignore[attr-defined]
        try:
            for one in wanted:
                self._replay(one, given)
                is_left_out = _is_within(one.name, left_out)
                is_new = one.name and one.name not in sys.modules and not is_left_out
                if is_new and (poison := self._import(one.name)):
                    return poison
                # The program meets what is left out by itself; the environment is as it was from there on.
                self.noted.append(ImportNote("", one.environment) if is_left_out else one)
            for name, module in [*sys.modules.items()]:
                file = str(getattr(module, "__file__", None) or "")
                if name in _MAIN or not Path(file).is_absolute() or is_installed(module, roots):
                    continue
                # Some packages write modules as they are imported, such as PyTorch 2.6, in a directory of the process.
                if str(Path(file).parent) in paths or not _is_written_since(begun_at_ns, file):
                    return Poison(name, f"{name} is not an installed package, but was imported by one")
                generated.add(file)
        finally:
            plain.clear()
            plain.update(os.environ._data)  # type: ignore[attr-defined]
            os.environ._data = plain  # type: ignore[attr-defined]
            for written in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    written.flush()
            for number, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)
        self._made = {name: value for name, value in os.environ.items() if given.get(name) != value}
        os.environ.clear()
        os.environ.update(before)
        for module in [*sys.modules.values()]:
            with suppress(OSError, TypeError, AttributeError):
                if module.__file__ in generated:
                    continue  # The first program that ends removes it.
                facts = Path(module.__file__).stat()  # type: ignore[arg-type]
                self._files[str(module.__file__)] = (facts.st_mtime_ns, facts.st_size)
        gc.collect()
        gc.freeze()
        return self._try_child() or self._check_threads()

    def _replay(self, one: ImportNote, given: dict[str, str]) -> None:
        """Sets the environment as it was at an import; what the imports themselves have set stays theirs."""
        for name, value in one.environment.items():
            if os.environ.get(name) == value:
                continue
            if value is None:
                os.environ.pop(name, None)
                given.pop(name, None)
            else:
                os.environ[name] = given[name] = value

    def _import(self, name: str) -> Poison | None:
        if self._connection is not None and not tell(self._connection, {"importing": name}):
            raise SystemExit(0)
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the program itself is to meet it.
            return Poison(name, f"importing {name} raised {type(error).__name__}")
        if list_children():
            return Poison(name, f"importing {name} starts a process")
        for number in list_threads():
            self._origin.setdefault(number, name)
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if (cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized()) or _has_gpu_open():
            return Poison(name, f"importing {name} touches the GPU")
        return None

    def _try_child(self) -> Poison | None:
        """Forks a child that works with several threads: after OpenMP has run in the parent, it would hang."""
        child = self.fork()
        if child == 0:
            try:
                _work_in_parallel()
            finally:
                os._exit(0)
        watch = os.pidfd_open(child)
        try:
            if select.select([watch], [], [], _TRIAL_SECONDS)[0]:
                return None
            os.kill(child, signal.SIGKILL)
            return Poison("", "a module runs parallel code when it is imported, after which a fork hangs")
        finally:
            os.close(watch)
            os.waitpid(child, 0)

    def _check_threads(self) -> Poison | None:
        for number, kind in list_threads().items():
            if kind not in _HARMLESS_THREADS:
                name = self._origin.get(number, "")
                return Poison(name, f"importing {name or 'a module'} starts a thread ({kind})")
        return None

    def _check_files(self) -> Poison | None:
        for file, known in self._files.items():
            try:
                facts = Path(file).stat()
                is_same = (facts.st_mtime_ns, facts.st_size) == known
            except OSError:
                is_same = False
            if not is_same:
                return Poison("", f"{file} has changed")
        return None

    def check(self) -> Poison | None:
        """Looks again, before a fork, for what forbids it."""
        return self._check_files() or self._check_threads()

    def fork(self) -> int:
        """Forks this process; returns the child in the parent, and 0 in the child."""
        with warnings.catch_warnings():
            # Libraries warn of threads that are not there.
            warnings.simplefilter("ignore")
            return os.fork()

    def serve(self) -> Program | None:
        """Answers requests, until the other end is closed; in a child that is to run the program, returns it."""
        assert self._connection is not None
        while True:
            received = receive(self._connection)
            if received is None:
                return None
            message, descriptors = received
            if poison := self.check():
                tell(self._connection, poison._asdict())
                return None
            child = self.fork()
            if child == 0:
                request = Request(**message)
                self._change_parent(request.supervisor)
                program = self.become(request, descriptors)
                if not tell(self._connection, {"pid": os.getpid()}):
                    os._exit(PREEMPTED)  # The supervisor waits no longer, and has started another one.
                return program
            os.waitpid(child, 0)
            for descriptor in descriptors:
                os.close(descriptor)

    def _change_parent(self, supervisor: int) -> None:
        """Goes on in a child of the one that was forked, which ends: so the supervisor becomes the parent."""
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0002)
        end_with_parent()
        if os.getppid() != supervisor:
            os._exit(PREEMPTED)  # The supervisor has died: nothing has begun.

    def become(self, request: Request, descriptors: list[int]) -> Program:
        """Makes a forked process the one that the request describes; returns what it is to run."""
        *streams, board, words = descriptors if len(descriptors) > _STREAMS else [*descriptors, -1, -1]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for written in (sys.stdout, sys.stderr):
            # As they are made for a terminal, or for a file.
            with suppress(OSError, ValueError, AttributeError):
                written.reconfigure(line_buffering=written is sys.stderr or written.isatty())  # type: ignore[union-attr]
        for number in _TERMINAL_SIGNALS:
            given = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request.ignored else given)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment | self._made)
        if board >= 0:
            os.environ[ENVIRONMENT] = f"{board}:0"
        program = Program(*request.program)._replace(board=board, words=words)
        become_fresh()
        return program


class _WatchedDict(dict[bytes, bytes]):
    """The environment, which notes what is asked of it by name: who goes through all of it looks for something else."""

    def __init__(self, values: dict[bytes, bytes], read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: bytes) -> bytes:
        if sys._getframe(2).f_code.co_name not in _SWEEPS:
            self._read.add(os.fsdecode(key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, bytes):
            self._read.add(os.fsdecode(key))
        return super().__contains__(key)


def _is_within(name: str, modules: frozenset[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _has_gpu_open() -> bool:
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def list_threads() -> dict[int, str]:
    """Returns the threads of this process, without the main one, with their names."""
    found = {}
    for entry in Path("/proc/self/task").iterdir():
        if entry.name != str(os.getpid()):
            with suppress(OSError):
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def _work_in_parallel() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        (torch.ones(1 << 20).exp() + torch.ones(1 << 20)).sum().item()
        torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.ones((256, 256)) @ numpy.ones((256, 256))
