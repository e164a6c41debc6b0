"""Says why a worker of pytest-xdist has died, and in which state: xdist itself says only which test it was at.

A worker's output goes nowhere. So what ends it from within (a fatal signal, `os._exit` of holdfast or of the net of
pytest-timeout) leaves the stacks of all threads in a file; what ends it from outside is seen in how the process ended.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

_FILE: Final = pytest.StashKey[Any]()
_DIRECTORY: Final = pytest.StashKey[Path]()
_DEATHS: Final = pytest.StashKey[list[tuple[str, str]]]()

_VMSTAT: Final = Path("/proc/vmstat")
_END_SECONDS: Final = 10.0


@pytest.hookimpl(trylast=True)  # pytest as well sets the handlers of fatal signals: these are to be the last.
def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is None:
        config.stash[_DEATHS] = []
        config.stash[_DIRECTORY] = Path(tempfile.mkdtemp(prefix="last-words-"))
    elif "last_words" in given:
        file = config.stash[_FILE] = Path(given["last_words"]).open("a", buffering=1)  # noqa: SIM115
        faulthandler.enable(file)
        os._exit = _exit_with_last_words(config, file)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _DIRECTORY in config.stash:
        shutil.rmtree(config.stash[_DIRECTORY], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["last_words"] = str(node.config.stash[_DIRECTORY] / node.gateway.id)
    node.workerinput["killed_for_memory"] = _count_killed_for_memory()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        words = Path(node.workerinput["last_words"])
        text = words.read_text(errors="replace") if words.exists() else ""
        node.config.stash[_DEATHS].append((f"{node.gateway.id} {_describe_end(node)}", text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for end, text in config.stash.get(_DEATHS, []):
        terminalreporter.section(end, red=True)
        terminalreporter.write_line(text.rstrip() or "It has left no last words.")


def _exit_with_last_words(config: pytest.Config, file: Any) -> Any:
    end, owner = os._exit, os.getpid()

    def leave(code: int) -> NoReturn:
        if os.getpid() == owner:  # And no fork of it.
            try:
                print(f"os._exit({code}) was called.", file=file)
                faulthandler.dump_traceback(file)
                capture = config.pluginmanager.getplugin("capturemanager")
                print("\nWhat the test had written:", *capture.read_global_capture(), sep="\n", file=file)
            finally:
                end(code)
        end(code)

    return leave


def _describe_end(node: Any) -> str:
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if process is None:
        return "has died, and does not run on this machine"
    code = process.wait(_END_SECONDS)
    if code >= 0:
        return f"has ended with exit code {code}"
    killed = _count_killed_for_memory() - node.workerinput["killed_for_memory"]
    why = f"; the kernel has killed {killed} processes meanwhile, for want of memory" if killed else ""
    return f"was killed by {signal.Signals(-code).name}{why}"


def _count_killed_for_memory() -> int:
    """How many processes the kernel has killed so far since it had no memory left."""
    lines = _VMSTAT.read_text().splitlines() if _VMSTAT.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
