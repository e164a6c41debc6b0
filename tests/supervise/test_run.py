"""`holdfast run`: real programs that end in each way, and what becomes of them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from patience import is_alive, wait_until

RUN = (sys.executable, "-m", "holdfast", "run")

COUNT = """
import os, sys
from pathlib import Path
from typing import NoReturn
starts = Path("starts")
with starts.open("a") as stream:
    stream.write(f"{os.getpid()}\\n")
count = len(starts.read_text().splitlines())
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(code: str, name: str = "train.py") -> None:
    Path(name).write_text(COUNT + code)


def run(*words: str, program: str = "train.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words, *([program] if program else [])], text=True, capture_output=True, timeout=60, check=False
    )


def count_starts() -> int:
    return len(Path("starts").read_text().splitlines())


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, while the program `train.py` runs, which is to write `ready` when it does."""
    process = subprocess.Popen([*RUN, *words, "train.py"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: Path("ready").exists())
        yield process
    finally:
        process.kill()
        process.communicate()


def is_pending(pid: int, number: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)


def read_pids() -> list[int]:
    return [int(line) for line in Path("starts").read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 42, 74, 130, 2])
def test_ends_that_are_passed_on(code: int) -> None:
    write(f"print('out', flush=True); print('err', file=sys.stderr); sys.exit({code})")
    done = run()
    assert (done.returncode, done.stdout) == (code, "out\n")
    assert count_starts() == 1
    assert done.stderr.splitlines()[0] == "err"
    assert len(done.stderr.splitlines()) == 1 + (code == 2)


def test_a_program_that_dies_is_started_again() -> None:
    write("os.kill(os.getpid(), 9) if count == 1 else os.abort() if count == 2 else sys.exit(0)")
    done = run()
    assert (done.returncode, count_starts()) == (0, 3)
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == [
        "holdfast: killed by SIGKILL",
        "holdfast: killed by SIGABRT",
        "holdfast: killed by SIGABRT",
    ]


def test_a_record_that_was_not_finished_is_removed() -> None:
    write("")
    assert run().returncode == 0
    (record,) = Path("cache/holdfast/imports").iterdir()
    record.with_suffix(f".{2**22 + 1}").touch()  # No process has this number.
    (living := record.with_suffix(".1")).touch()
    assert run().returncode == 0
    assert sorted(Path("cache/holdfast/imports").iterdir()) == sorted([record, living])


def test_a_traceback_that_repeats_is_shown_once() -> None:
    write("def step():\n    raise ValueError('boom')\nstep()")
    done = run()
    assert (done.returncode, count_starts()) == (1, 3)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("holdfast: the same error as before: ValueError: boom") == 2
    # As of a plain start: no line of holdfast's own in it.
    plain = subprocess.run([sys.executable, "train.py"], text=True, capture_output=True, timeout=60, check=False).stderr
    assert plain in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "holdfast: not started again: three times in a row it ended within 60 seconds; at last it failed with "
        "ValueError: boom"
    )


def test_after_a_rollback_it_is_started_again_and_after_a_third_one_not() -> None:
    write("""
from holdfast.errors import NotFiniteError, RolledBackError
def step():
    raise RolledBackError("run went back from step 9 to step 8", step=8, hint="Start the program again.")
if count == 4:
    raise NotFiniteError("training has gone back to step 8 twice", step=8)
step()""")
    done = run()
    assert (done.returncode, count_starts()) == (1, 4)  # Three quick failures would be the end.
    lines = done.stderr.splitlines()
    assert lines.count("holdfast: run went back from step 9 to step 8") == 3
    assert done.stderr.count("Traceback") == 1
    assert [line.partition(" again")[0] for line in lines if " again " in line] == ["holdfast: went back; started"] * 3
    assert lines[-1] == (
        "holdfast: not started again: it failed with holdfast.errors.NotFiniteError: training has gone back to step 8 "
        "twice, and would again"
    )


@pytest.mark.parametrize(
    ("end", "codes"),
    [
        ("print('more', flush=True)", (1, 120)),  # The second one, if Python cannot write it at the end, either.
        ("print('more')", (120,)),
        ("signal.signal(signal.SIGPIPE, signal.SIG_DFL); print('more', flush=True)", (141,)),
    ],
    ids=["error", "at_the_end", "signal"],
)
def test_a_program_whose_output_is_read_no_more_is_not_started_again(end: str, codes: tuple[int, ...]) -> None:
    write(f"import signal\nprint('out', flush=True)\nPath('ready').touch()\nsys.stdin.read()\n{end}")
    with subprocess.Popen([*RUN, "train.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"out\n"
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) in codes
    assert count_starts() == 1


def test_a_broken_pipe_elsewhere_is_a_failure_like_others() -> None:
    write("""
import socket
ours, theirs = socket.socketpair()
theirs.close()
if count == 1:
    ours.sendall(b"lost")""")
    assert (run().returncode, count_starts()) == (0, 2)


def test_after_an_error_of_syntax_it_is_not_started_again() -> None:
    write("def step(:\n    pass")
    done = run()
    assert (done.returncode, Path("starts").exists()) == (1, False)
    assert "SyntaxError" in done.stderr
    assert "and would again" in done.stderr


def test_options_for_codes_and_for_the_number_of_starts() -> None:
    write("sys.exit(0 if count == 2 else 42)")
    assert run("--on-code", "42=restart").returncode == 0
    Path("starts").unlink()
    write("sys.exit(7)")
    assert run("--on-code", "7=leave").returncode == 7
    assert count_starts() == 1
    assert run("--max-restarts", "1").returncode == 7
    assert count_starts() == 3


def test_usage_errors_name_what_is_wrong() -> None:
    assert (missing := run(program="missing.py")).returncode == 2
    assert "missing.py does not exist" in missing.stderr
    assert "holdfast run -- COMMAND" in missing.stderr
    assert (code := run("--on-code", "x", program="train.py")).returncode == 2
    assert "'x' is not such as 3=restart" in code.stderr
    assert (module := run("-m", program="no.such")).returncode == 2
    assert "no module named no.such" in module.stderr
    assert (command := run("--", program="no-such-command")).returncode == 2
    assert "no-such-command" in command.stderr


def test_modules_directories_and_commands_are_run() -> None:
    Path("package").mkdir()
    write("print(__name__, sys.argv[1:], Path(sys.argv[0]).name, __package__)", "package/__main__.py")
    assert run("-m", "package", program="--lr=1").stdout == "__main__ ['--lr=1'] __main__.py package\n"
    assert run("package", "a", program="").stdout == "__main__ ['a'] package \n"
    assert run("--", "sh", "-c", "echo $0", program="word").stdout == "word\n"
    assert run("--", "sh", "-c", program="exit 42").returncode == 42


def test_signals_reach_the_program_which_is_not_started_again() -> None:
    write("""
import signal
def leave(number, frame):
    os.write(1, b"heard %d\\n" % number)  # One signal may come while the other one is written.
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"usr1\\n"))
Path("ready").touch()
while True:
    signal.pause()
""")
    with running() as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "usr1\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "heard 15\n"
        assert process.returncode == 5


def test_if_the_supervisor_dies_the_program_hears_of_it() -> None:
    write("""
import signal
signal.signal(signal.SIGTERM, lambda *_: (Path("told").touch(), sys.exit(42)))
Path("ready").touch()
while True:
    signal.pause()
""")
    with running() as process:
        process.kill()
        wait_until(lambda: Path("told").exists() and not is_alive(read_pids()[0]))


def test_what_a_dead_program_leaves_is_ended_before_the_next_start() -> None:
    write("""
import subprocess
if count < 3:
    # A child, and one of that.
    child = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $! $$ >> children; touch ready; wait"])
    while not Path("ready").exists():
        pass
    Path("ready").unlink()
    os.kill(os.getpid(), 9)
""")
    assert run().returncode == 0
    children = [int(word) for word in Path("children").read_text().split()]
    assert len(children) == 4
    assert not any(map(is_alive, children))


class Shell:
    """The command in the foreground of a terminal, started by a shell of the fewest words, which says when it stops."""

    def __init__(self, *words: str) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            _play_shell([*RUN, *words])
        self._seen = b""

    def read_until(self, text: str) -> None:
        while text.encode() not in self._seen:
            data = os.read(self._master, 1 << 16)
            assert data, f"{text!r} never came: {self._seen!r}"
            self._seen += data
        self._seen = self._seen.partition(text.encode())[2]

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self) -> int:
        """Returns the exit code."""
        while True:
            try:
                if not os.read(self._master, 1 << 16):
                    break
            except OSError:
                break
        status = os.waitpid(self.pid, 0)[1]
        os.close(self._master)
        return os.waitstatus_to_exitcode(status)


def _play_shell(words: list[str]) -> NoReturn:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execv(words[0], words)
    while True:
        _, status = os.waitpid(command, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            os._exit(os.waitstatus_to_exitcode(status) % 256)
        wait_until(lambda: Path(f"/proc/{read_pids()[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        os.write(1, b"both are stopped")
        os.killpg(command, signal.SIGCONT)


def test_ctrl_c_ends_all_with_130() -> None:
    write("print('ready', flush=True)\nimport time\ntime.sleep(1000)")
    shell = Shell("train.py")
    shell.read_until("ready")
    shell.write("\x03")
    assert shell.wait() == 130
    assert count_starts() == 1


def test_a_second_ctrl_c_ends_a_program_that_goes_on() -> None:
    write("""
import signal, time
# By a call of the system: `print` may be under way when the signal comes.
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"no"))
os.write(1, b"ready")
while True:
    time.sleep(1000)
""")
    shell = Shell("train.py")
    shell.read_until("ready")
    shell.write("\x03")
    shell.read_until("no")
    # Two that come before the first is read are one, as for every process.
    supervisor = int(Path(f"/proc/{read_pids()[0]}/stat").read_text().rpartition(")")[2].split()[1])
    wait_until(lambda: not is_pending(supervisor, signal.SIGINT))
    shell.write("\x03")
    assert shell.wait() == 137


def test_a_program_reads_from_the_terminal_and_can_be_suspended() -> None:
    write("""
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
print(input("name: "), sys.stdin.isatty(), sys.stdout.isatty(), flush=True)
signal.sigwait({signal.SIGCONT})
print("back", flush=True)
""")
    shell = Shell("train.py")
    shell.read_until("name: ")
    shell.write("gpt\r")
    shell.read_until("gpt True True")
    shell.write("\x1a")
    shell.read_until("both are stopped")
    shell.read_until("back")
    assert shell.wait() == 0


def test_ignored_signals_stay_ignored() -> None:
    write("import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")
    done = subprocess.run(["nohup", *RUN, "train.py"], text=True, capture_output=True, timeout=60, check=False)
    assert done.stdout == "True\n"


def test_a_program_starts_as_from_python_itself() -> None:
    """The facts that a program can see are those of a plain start, but for its parent."""
    write("""
import json, signal, threading, multiprocessing
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags), "cwd": os.getcwd(),
    "main": {
        k: repr(v).partition(" at 0x")[0]
        for k, v in vars(sys.modules["__main__"]).items()
        if k.startswith("__") and k != "__builtins__"
    },
    "environment": {k: v for k, v in os.environ.items() if k != "HOLDFAST_BOARD"},
    "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n < 32},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "group": os.getpgrp() == os.getpgid(os.getppid()),
    "threads": [t.name for t in threading.enumerate()], "native": threading.main_thread().native_id == os.getpid(),
    "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(bytes(1)).decode().split(chr(0)),
    "holdfast": sorted(n for n in sys.modules if n.startswith("holdfast")),
    "meta": [repr(f).partition(" at 0x")[0] for f in sys.meta_path if "ImportRecorder" not in repr(f)],
    "context": multiprocessing.get_start_method(), "hook": repr(sys.excepthook), "is_main": __name__,
}
print(json.dumps(facts, sort_keys=True))
""")
    words = ["train.py", "--lr", "0.1", "a b", ""]
    supervised = subprocess.run([*RUN, *words], text=True, capture_output=True, timeout=60, check=False)
    plain = subprocess.run([sys.executable, *words], text=True, capture_output=True, timeout=60, check=False)
    assert supervised.returncode == 0, supervised.stderr
    first, second = json.loads(supervised.stdout), json.loads(plain.stdout)
    for key, value in second.items():
        assert (key, first[key]) == (key, value)


def test_closed_streams_and_long_command_lines_change_nothing() -> None:
    write("Path('ran').write_text(str(len(sys.argv)))")
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        command = f"{RUN[0]} -m holdfast run train.py {closed}"
        assert subprocess.run(command, shell=True, timeout=60, check=False).returncode == 0, closed
        assert Path("ran").read_text() == "1"
        Path("ran").unlink()
    assert run("train.py", *["é" * 50] * 3000, program="").returncode == 0
    assert Path("ran").read_text() == "3001"


def test_the_command_starts_no_slower_for_what_it_imports() -> None:
    """The supervisor is a process of its own kind: one thread, and nothing but the standard library."""
    write("""
import signal
Path("ready").touch()
signal.pause()
""")
    with running() as process:
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "site-packages" not in maps
