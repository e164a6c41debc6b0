"""Starts Python programs as `subprocess` does, in forks of an interpreter that has imported what they need.

To import torch takes longer than most programs of the tests run. `Popen` and `run` are used as those of `subprocess`.
Only `sys.modules` tells the program the difference: it is a child of the process that starts it; it has the arguments,
the variables, the files and the signals that a fresh interpreter has; and it ends as a fresh interpreter ends.

A fresh interpreter runs what cannot be forked: options of Python, other variables that Python reads, a program that is
not Python. Tests use `subprocess` where they are about how an interpreter starts or ends, what is imported, or memory.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import linecache
import os
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from typing import Any, Final

HOLDFAST: Final = (
    "hashlib",
    "numpy.random",
    "holdfast.manager",
    "holdfast.training.resumable",
    "holdfast.training.run",
    "holdfast.preemption.guard",
    "holdfast.preemption.consensus.coordinator",
    "holdfast.restore.joint_agreement",
    "holdfast.save.joint.run_writer",
    "holdfast.state.numpy_arrays",
    "holdfast.state.numpy_random",
    "file_engine",
    "interrupts",
)
"""The modules of a program without a framework."""

TRAINING: Final = (*HOLDFAST, "torch._dynamo", "torch.distributed.launcher.api", "holdfast.integrations.torch")
"""Those of one that trains with torch, whose optimizers import much with their first step, and of torchrun's agent."""

JAX: Final = ("numpy.random", "jax", "jax.numpy", "jax.experimental.multihost_utils")
"""Those of one that computes with JAX; what holdfast has for it is imported when a program meets it."""

_MESSAGE_BYTES: Final = 200_000
_PR_SET_CHILD_SUBREAPER: Final = 36


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`; `preload` names the modules that the program finds imported."""

    def __init__(self, args: Sequence[str | Path], *, preload: tuple[str, ...] = HOLDFAST, **options: Any) -> None:
        self._preload = preload
        super().__init__([str(part) for part in args], **options)

    def _execute_child(self, *given: Any) -> None:
        """What `subprocess` starts a process in, once it has opened its pipes."""
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        variables = dict(os.environ if asked["env"] is None else asked["env"])
        files = [asked[name] if asked[name] != -1 else number for number, name in enumerate(_FILES)]
        words = asked["args"]
        if not _can_be_forked(words, variables, asked):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        request = {
            "words": words,
            "variables": variables,
            "directory": os.fspath(asked["cwd"] or Path.cwd()),
            "starts_session": asked["start_new_session"],
        }
        self.pid = _server_of(self._preload).start(request, files)
        self._child_created = True
        pipes = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class TrainingPopen(Popen):
    """One whose program finds imported what those that train with torch need."""

    def __init__(self, args: Sequence[str | Path], **options: Any) -> None:
        super().__init__(args, preload=TRAINING, **options)


class JaxPopen(Popen):
    """One whose program finds JAX imported."""

    def __init__(self, args: Sequence[str | Path], **options: Any) -> None:
        super().__init__(args, preload=JAX, **options)


_FILES: Final = ("p2cread", "c2pwrite", "errwrite")

_UNASKED: Final[dict[str, tuple[Any, ...]]] = {
    "executable": (None,),
    "preexec_fn": (None,),
    "pass_fds": ((),),
    "shell": (False,),
    "gid": (None,),
    "gids": (None,),
    "uid": (None,),
    "umask": (-1,),
    "process_group": (-1,),
}


def run(
    command: Sequence[str | Path],
    *,
    preload: tuple[str, ...] = HOLDFAST,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, preload=preload, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def _can_be_forked(words: Sequence[str], variables: Mapping[str, str], asked: Mapping[str, Any]) -> bool:
    """Whether the command runs a program text, a module or a file with this Python, and asks for nothing special."""
    if words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
        return False
    if any(asked[name] not in usual for name, usual in _UNASKED.items()):
        return False
    names = {name for name in (*variables, *os.environ) if name.startswith(("PYTHON", "LD_"))}
    return all(variables.get(name) == os.environ.get(name) for name in names)


class _Server:
    """The interpreter that is forked, as this process sees it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._owner = os.getpid()
        self._variables = _read_at_start()
        self._turn = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # The threads of these libraries begin when they are imported; a process that has threads is not forked.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
            )

    def is_usable(self) -> bool:
        """Whether this process has started it, with the variables that Python reads now."""
        return self._owner == os.getpid() and self._variables == _read_at_start()

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Gives the number of a new process, a child of this one."""
        with self._turn, _adopts_orphans():
            socket.send_fds(self._line, [json.dumps(request).encode()], files)
            told = [self._line.recv(100), self._line.recv(100)]
        assert all(told), "the interpreter that is forked has ended"
        return int(told[0])

    def close(self) -> None:
        if self._owner == os.getpid():
            self._line.close()
            self._process.wait()


_servers: dict[tuple[str, ...], _Server] = {}
_opening = threading.Lock()


def _server_of(modules: tuple[str, ...]) -> _Server:
    with _opening:
        server = _servers.get(modules)
        if server is None or not server.is_usable():
            if server is not None:
                server.close()
            server = _servers[modules] = _Server(modules)
            atexit.register(server.close)
        return server


def _read_at_start() -> dict[str, str]:
    """The variables that Python and the system's linker read before a program begins."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_"))}


@contextlib.contextmanager
def _adopts_orphans() -> Iterator[None]:
    """The fork of a fork whose parent has ended is a child of this process."""
    system = ctypes.CDLL(None, use_errno=True)
    assert system.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        system.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# What follows runs in the interpreter that is forked, and in its forks.


def _serve(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks for each request; returns in the fork."""
    while True:
        data, files, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 3)
        if not data:
            os._exit(0)
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"{threads} threads run in the interpreter that is to be forked"
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child != 0:
                line.send(str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)  # Until it is the child of the process that has asked for it.
            return json.loads(data), files
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        line.send(b"started")


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Makes this process what a fresh interpreter is before it runs a program."""
    if request["starts_session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.stdin = sys.__stdin__ = _open_text(0, "r", "<stdin>")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _open_text(1, "w", "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_text(2, "w", "<stderr>")  # type: ignore[misc]
    main: Any = threading.main_thread()
    main._set_native_id()  # A fork may leave that of the process that was forked.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
    if torch := sys.modules.get("torch"):
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # What Python leaves behind at its end is not taken apart: for torch this takes a quarter of a second.
        system = ctypes.CDLL(None)
        system.on_exit(system._exit, None)
    importlib.invalidate_caches()


def _open_text(number: int, mode: str, name: str) -> io.TextIOWrapper:
    buffered: Any = open(number, f"{mode}b", closefd=False)  # noqa: SIM115
    buffered.raw.name = name
    errors = "backslashreplace" if number == 2 else sys.__stdin__.errors  # type: ignore[union-attr]
    is_line_buffered = number == 2 or buffered.isatty()
    text: Any = io.TextIOWrapper(
        buffered,
        encoding=sys.__stdin__.encoding,  # type: ignore[union-attr]
        errors=errors,
        newline=None if mode == "r" else "\n",
        line_buffering=is_line_buffered,
    )
    text.mode = mode
    return text  # type: ignore[no-any-return]


def _run_program(words: list[str]) -> None:
    """Runs what the interpreter would; ends as that would."""
    kind, *arguments = words[1:]
    sys.orig_argv = words
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    try:
        if kind == "-m":
            sys.argv = words[1:2] + arguments[1:]
            sys.path[0] = os.getcwd()  # noqa: PTH109
            # It is run as a program, as if nobody had imported it.
            sys.modules.pop(arguments[0], None)
            run_module: Any = importlib.import_module("runpy")
            run_module._run_module_as_main(arguments[0])
        elif kind == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path[0] = ""
            if sys.version_info >= (3, 13):  # From then on a traceback shows the lines of such a program.
                linecache.cache["<string>"] = (len(arguments[0]), None, arguments[0].splitlines(True), "<string>")
            exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = [kind, *arguments]
            place = os.path.abspath(kind)  # noqa: PTH100
            sys.path[0] = os.path.dirname(os.path.realpath(place))  # noqa: PTH120
            main.__dict__.update(__file__=place, __cached__=None, __loader__=SourceFileLoader("__main__", place))
            exec(compile(Path(place).read_bytes(), place, "exec", dont_inherit=True), main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # As Python ends with an error that nobody has caught, but for the lines that tell of this file.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    else:
        return
    sys.exit(code)


def _is_foreign(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("holdfast", "__main__")


def _leave_as_they_are(modules: dict[str, types.ModuleType]) -> None:
    """Called at the very end, as it is registered before all else: to take a framework's modules apart takes long."""
    for name in modules:
        sys.modules.pop(name, None)
    # For ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def _serve_and_run() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    kept: dict[str, types.ModuleType] = {}
    atexit.register(_leave_as_they_are, kept)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    kept.update((name, module) for name, module in sys.modules.items() if _is_foreign(name))
    gc.collect()
    # Its objects stay where they are: a fork that looked through them would copy them.
    gc.freeze()
    request, files = _serve(line)
    line.detach()
    _become(request, files)
    _run_program(request["words"])


if __name__ == "__main__":
    _serve_and_run()
