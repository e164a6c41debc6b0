"""Turns a process into a training program, as the interpreter itself would run it.

A process that was started afresh and one that was forked from the spare both end here, so that they differ in nothing
but what is imported already.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn
from zipimport import ZipImportError, zipimporter

from holdfast.supervise.imports import ImportNote, ImportRecorder
from holdfast.supervise.launch import forget_stub, make_command

WORDS_BYTES: Final = 65536
"""The size of the memory in which a program leaves the error that ended it."""

_HOPELESS: Final = frozenset({"holdfast.errors.UsageError", "holdfast.errors.NotFiniteError"})
"""Another start would end by these again: the newest step stays what it is."""
_ROLLBACK: Final = "holdfast.errors.RolledBackError"

_ARGUMENTS: Final = (45, 46)
"""Positions in `/proc/PID/stat`, after the name of the program: where the memory of its arguments begins and ends."""


class Program(NamedTuple):
    """A program of Python, and how it is run.

    Attributes:
        target: The script, as the user wrote it, or the name of a module.
        is_module: True for a module, as with `python -m`.
        arguments: Its arguments.
        flags: The options of the interpreter.
        record: The file for the record of its imports; empty for none.
        board: The descriptor of the board; -1 for none.
        words: The descriptor of the memory for its last error; -1 for none.
        spare: The path of a socket; a spare that listens there is started after the first step. Empty for none.
    """

    target: str
    is_module: bool
    arguments: list[str]
    flags: list[str]
    record: str
    board: int
    words: int
    spare: str = ""

    @property
    def shown(self) -> list[str]:
        """The command line as of a plain start."""
        return [sys.executable, *self.flags, *(["-m"] if self.is_module else []), self.target, *self.arguments]


def set_path(program: Program) -> None:
    """Sets the arguments and the first entry of the path, as they are when a program begins."""
    sys.orig_argv = program.shown
    sys.argv = ["-m" if program.is_module else program.target, *program.arguments]
    place = Path(program.target).absolute()
    if sys.path and sys.path[0] == "":
        del sys.path[0]
    entry = str(Path.cwd()) if program.is_module else str(place if _is_collection(place) else place.resolve().parent)
    is_safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if (not is_safe or _is_collection(place)) and sys.path[:1] != [entry]:
        sys.path.insert(0, entry)


def _is_collection(place: Path) -> bool:
    """Returns True for a directory or an archive that is run."""
    if place.is_dir():
        return True
    try:
        zipimporter(str(place))
    except (ZipImportError, OSError):
        return False
    return True


def main(*fields: Any) -> None:
    """Runs a program in this process, which was started for it."""
    run(Program(*fields), [])


def run(program: Program, known: list[ImportNote]) -> None:
    """Runs a program in this process, to its end.

    Args:
        program: What to run.
        known: What is imported already.

    Raises:
        SystemExit: With the program's exit code.
        KeyboardInterrupt: If it ended by that; it is printed by then.
    """
    forget_stub()
    show_as(program.shown)
    for descriptor in (program.board, program.words):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    set_path(program)
    # A module object of its own, as the interpreter makes it: a thread that ends late still finds its names there.
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main_module  # As multiprocessing has it.
    start_spare = partial(_start_spare, program, dict(os.environ), os.getppid()) if program.spare else None
    sys.meta_path.insert(0, recorder := ImportRecorder(program.record, known, start_spare))
    ended_by: BaseException | None = None
    line = ""
    if "COVERAGE_PROCESS_START" in os.environ:
        with suppress(ImportError):
            importlib.import_module("coverage").process_startup()
    try:
        _run_main(program, main_module)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - it is shown and ends the process, as the interpreter does it.
        ended_by = error
        error.__traceback__ = _find_own(error.__traceback__, main_module)
        line = _tell(program.words, error)
    finally:
        recorder.finish()
    if ended_by is not None:
        _end(ended_by, line)


def _run_main(program: Program, module: ModuleType) -> None:
    place = Path(program.target).absolute()
    if program.is_module or _is_collection(place):
        import runpy

        if program.is_module:
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]
        else:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if place.suffix == ".pyc":
        compiled = SourcelessFileLoader("__main__", str(place))
        module.__dict__.update(__file__=str(place), __cached__=None, __loader__=compiled)
        code = compiled.get_code("__main__")
        assert code is not None
    else:
        loader = SourceFileLoader("__main__", str(place))
        module.__dict__.update(__file__=str(place), __cached__=None, __loader__=loader)
        code = compile(place.read_bytes(), str(place), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _start_spare(program: Program, environment: dict[str, str], launcher: int) -> None:
    """Starts the spare of this node, unless another worker has."""
    try:
        os.close(os.open(f"{program.spare}.begun", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        words = make_command("node", program.spare, launcher, program.record, [], [*program], flags=program.flags)
        streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        # It leaves this process at once, and ends with the launcher.
        os.waitpid(os.posix_spawn(words[0], words, environment, file_actions=streams), 0)
    except OSError:
        pass


def _find_own(trace: TracebackType | None, module: ModuleType) -> TracebackType | None:
    """Returns the part of a traceback that begins in the program."""
    own = trace
    while own is not None and own.tb_frame.f_globals is not module.__dict__:
        own = own.tb_next
    return own


def _end(error: BaseException, line: str) -> NoReturn:
    """Shows an error as the interpreter would, unless a line is enough, and ends with its code."""
    trace = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if line:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"holdfast: {line}\n")
    else:
        sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter then ends by the signal, as shells expect it.
        sys.excepthook = lambda *_: None
        raise error
    raise SystemExit(1)


def _tell(words: int, error: BaseException) -> str:
    """Leaves the error where the supervisor finds it; returns a line if that is enough of it for people."""
    if words < 0:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    is_hopeless = isinstance(error, SyntaxError) or not names.isdisjoint(_HOPELESS)
    before, text = read_words(words), "".join(traceback.format_exception_only(error)).strip()
    told = Words(os.getpid(), place, text[:2000], is_hopeless, _ROLLBACK in names)
    with suppress(OSError):
        data = json.dumps(told).encode()
        os.pwrite(words, len(data).to_bytes(4, "little") + data, 0)
    if told.is_rollback:
        return text.partition("\n")[0].removeprefix(f"{_ROLLBACK}: ")
    return f"the same error as before: {text}" if before is not None and before[1:] == told[1:] else ""


class Words(NamedTuple):
    """The error that ended a program: see `LastError`.

    Attributes:
        pid: The process that it ended.
    """

    pid: int
    place: str
    text: str
    is_hopeless: bool
    is_rollback: bool


def read_words(words: int) -> Words | None:
    """Returns the last error that a program has left in that memory; None if none has."""
    try:
        data = os.pread(words, WORDS_BYTES, 0)
        return Words(*json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")]))
    except (OSError, ValueError, TypeError):
        return None


def become_fresh() -> None:
    """Makes a process that was forked like one that was just started, as far as libraries look at it."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
        multiprocessing.current_process().authkey = os.urandom(32)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    time.tzset()
    importlib.invalidate_caches()
    # Python's own generator begins anew in each forked process; these were begun when they were imported.
    for name in ("numpy.random", "torch"):
        if (module := sys.modules.get(name)) is not None:
            module.seed()


def show_as(words: list[str]) -> None:
    """Writes the command line of a plain start over this process's own, for `ps`, `pgrep` and `pkill`."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = (int(fields[field]) for field in _ARGUMENTS)
        text = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write(text.ljust(end - begin, b"\0"))
    except (OSError, ValueError, IndexError):
        pass  # It shows as what it was started as.
