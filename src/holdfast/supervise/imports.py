"""Records what a program imports until its first step is done, for the spare that imports it before the next start.

The record is in the user's own cache directory: others who may write into a run must not choose what is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

_VERSION: Final = 1


class ImportNote(NamedTuple):
    """One import of a program.

    Attributes:
        name: The module's full name.
        environment: The variables that differed from those at the import before, each with its value; None if removed.
    """

    name: str
    environment: dict[str, str | None]


class ImportRecorder(MetaPathFinder):
    """Notes each module that is looked for, in order, with what the environment was. It finds none itself."""

    def __init__(self, file: str, known: Sequence[ImportNote], after: Callable[[], object] | None = None) -> None:
        """Records from now on, until `finish`.

        Args:
            file: Where to write the record; empty for nowhere.
            known: What was imported before the program began.
            after: Called when a first step is done and the record is written.
        """
        self._after = after
        self._file = file
        self._imports = [*known]
        self._environment = dict(os.environ)
        self._is_hooked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Finds nothing, and notes that the module was looked for."""
        now = dict(os.environ)
        changes: dict[str, str | None] = {}
        if now != self._environment:
            changes = {name: value for name, value in now.items() if self._environment.get(name) != value}
            changes |= dict.fromkeys(self._environment.keys() - now.keys())
            self._environment = now
        self._imports.append(ImportNote(fullname, changes))
        pulse = getattr(sys.modules.get("holdfast.process.pulse"), "PULSE", None)
        if pulse is not None and not self._is_hooked:
            self._is_hooked, pulse.on_first_step = True, self.finish_step
        return None

    def finish_step(self) -> None:
        """Called when the first step is done."""
        if self.finish() and self._after is not None:
            self._after()

    def finish(self) -> bool:
        """Writes the record and stays out from now on; returns False if that was done before, or failed."""
        if self not in sys.meta_path:
            return False
        sys.meta_path.remove(self)
        if not self._file:
            return False
        roots = find_roots()
        # A copy: another thread may be importing.
        modules = dict(sys.modules)
        found = []
        for one in self._imports:
            if is_installed(modules.get(one.name), roots):
                found.append(one)
            elif one.environment:
                # The program imports its own modules itself; the environment is as it was from there on.
                found.append(ImportNote("", one.environment))
        with suppress(OSError):
            _write(Path(self._file), json.dumps({"version": _VERSION, "imports": found}).encode())
            return True
        return False


def find_record(program: str, arguments: Sequence[str]) -> str:
    """Returns the file for the record of a program, in a directory that only this user may write; empty without one.

    Args:
        program: The absolute path of a script, or the name of a module.
        arguments: Its arguments, which may choose what it imports.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "holdfast", "imports")
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except (OSError, RuntimeError):
        return ""
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        return ""
    words = [
        program,
        *arguments,
        sys.executable,
        sys.version,
        *sys.path,
        repr(sys.flags),
        os.environ.get("PYTHONPATH", ""),
    ]
    return str(folder / f"{hashlib.sha256('|'.join(words).encode()).hexdigest()[:32]}.json")


def read_record(file: str) -> list[ImportNote]:
    """Returns what a program imported the last time; nothing if that is not known."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        record: Any = json.loads(Path(file).read_bytes())
        if record["version"] == _VERSION:
            return [ImportNote(str(name), dict(environment)) for name, environment in record["imports"]]
    return []


def find_roots() -> tuple[str, ...]:
    """Returns the directories of the standard library, of installed packages and of holdfast itself."""
    paths = sysconfig.get_paths()
    found = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    found.update(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        found.add(site.getusersitepackages())
    found.add(str(Path(__file__).parents[1]))
    return tuple({f"{place}{os.sep}" for path in found if path for place in (path, os.path.realpath(path))})


def is_installed(module: ModuleType | None, roots: tuple[str, ...]) -> bool:
    """Returns True if a module comes from the interpreter, or from one of these directories."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(getattr(module, "__spec__", None), "origin", "") in ("built-in", "frozen")
    return str(file).startswith(roots)


def _write(file: Path, data: bytes) -> None:
    for part in file.parent.glob(f"{file.stem}.[0-9]*"):
        if not Path("/proc", part.suffix[1:]).exists():
            part.unlink(missing_ok=True)  # Its writer was killed.
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        # What the program has set in its environment may be a secret.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:  # noqa: PTH123
            stream.write(data)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
