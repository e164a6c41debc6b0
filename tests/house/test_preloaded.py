"""A forked program cannot tell that its interpreter is not fresh, and who started it cannot either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import preloaded

SURROUNDINGS = """
import gc, json, os, resource, signal, sys, threading

streams = [sys.stdin, sys.stdout, sys.stderr]
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, sys.flags, sys.warnoptions],
    "path": sys.path,
    "directory": os.getcwd(),
    "variables": dict(os.environ),
    "main": [sorted(globals()), __name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals()],
    "files": sorted(os.listdir("/proc/self/fd")),
    "signals": {int(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
    "thread": threading.main_thread().native_id == os.getpid(),
    "streams": [[each.name, each.mode, each.encoding, each.errors, each.line_buffering] for each in streams],
    "same": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.excepthook is sys.__excepthook__],
    "process": [os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)],
    "collector": [gc.isenabled(), gc.get_threshold()],
}))
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_program_finds_what_a_fresh_interpreter_gives_it(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(SURROUNDINGS)
    command = [sys.executable, *{"-c": ["-c", SURROUNDINGS], "-m": ["-m", "program"]}.get(kind, [str(program)]), "a b"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    options |= {"cwd": tmp_path, "env": {**os.environ, "MINE": "ü\udcff"}, "start_new_session": kind != "-m"}
    fresh = subprocess.run(command, check=True, **options)
    forked = preloaded.run(command, check=True, **options)
    assert json.loads(forked.stdout) == json.loads(fresh.stdout)


ENDS = [
    "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(3)",
    "import sys; sys.exit('words')",
    "def fail():\n    raise ValueError('x')\ntry:\n    fail()\nexcept ValueError as e:\n    raise KeyError(1) from e",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('a thread'))).start()",
    "class Last:\n    def __del__(self):\n        print('collected')\nlast = Last()",
    "import os; os.close(1); print('lost')",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os; os.abort()",
    "no program",
]


@pytest.mark.parametrize("program", ENDS)
def test_a_program_ends_as_in_a_fresh_interpreter(program: str) -> None:
    fresh, forked = (
        run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        for run in (subprocess.run, preloaded.run)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_a_program_that_is_interrupted_dies_of_the_signal() -> None:
    program = "print('ready', flush=True)\nimport time\ntime.sleep(60)"
    with preloaded.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].endswith(b"KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


def test_what_cannot_be_forked_gets_a_fresh_interpreter() -> None:
    asked = [sys.executable, "-c", "import sys; print('numpy' in sys.modules, sys.flags.utf8_mode)"]
    assert preloaded.run(asked, capture_output=True, text=True).stdout == "True 0\n"
    optional = [sys.executable, "-X", "utf8", *asked[1:]]
    assert preloaded.run(optional, capture_output=True, text=True).stdout == "False 1\n"
    told = {**os.environ, "PYTHONUTF8": "1"}
    assert preloaded.run(asked, capture_output=True, text=True, env=told).stdout == "False 1\n"
