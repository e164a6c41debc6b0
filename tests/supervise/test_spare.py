"""The spare: what it forks is as what starts afresh, and what makes it unfit is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.supervise.imports import ImportNote, find_record, read_record
from places import PROGRAMS, ROOT

SOURCE = ROOT / "src" / "holdfast"


class Spare:
    """A spare that a process of its own has started."""

    def __init__(self, python: Path, imports: list[ImportNote], *words: str) -> None:
        Path("record").write_text(json.dumps({"version": 1, "imports": imports}))
        self.process = subprocess.Popen(
            [python, PROGRAMS / "spare_driver.py", SOURCE, "record", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.state = self.read()

    def read(self) -> dict[str, Any]:
        """The next line of the driver; lines of the program come before it."""
        assert self.process.stdout is not None
        lines: list[str] = []
        while line := self.process.stdout.readline():
            if line.startswith(('{"ready"', '{"code"')):
                return {**json.loads(line), "lines": lines}
            lines.append(line)
        raise AssertionError(f"it has ended: {lines}")

    def fork(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("fork\n")
        self.process.stdin.flush()
        return self.read()


@contextmanager
def spare(python: Path, imports: list[ImportNote], *words: str) -> Iterator[Spare]:
    started = Spare(python, imports, *words)
    try:
        yield started
    finally:
        started.process.communicate()
        assert started.process.returncode == 0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment of its own, into which modules can be installed."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True, with_pip=False)
    return place / "bin" / "python"


def install(python: Path, name: str, code: str) -> None:
    next(python.parents[1].glob("lib/python*/site-packages")).joinpath(f"{name}.py").write_text(code)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(*modules: str) -> list[ImportNote]:
    return [ImportNote(module, {}) for module in modules]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait).start()",
            "importing poison starts a thread",
        ),
        ("raise ValueError(1)", "importing poison raised ValueError"),
        ("raise SystemExit(33)", "importing poison raised SystemExit"),
        ("import os\nos._exit(3)", "importing poison ended the process"),
        ("import os\nos.kill(os.getpid(), 11)", "importing poison ended the process"),
        ("import own", "own is not an installed package"),
        ("import subprocess\nsubprocess.Popen(['sleep', '5'])", "importing poison starts a process"),
    ],
    ids=["thread", "error", "exit", "end", "signal", "own", "process"],
)
def test_a_module_that_makes_it_unfit_is_named(installed: Path, code: str, cause: str) -> None:
    Path("train.py").write_text("")
    Path("own.py").write_text("")
    install(installed, "poison", code)
    with spare(installed, names("json", "poison"), "train.py") as one:
        assert not one.state["ready"]
        assert one.state["cause"].startswith(cause)


def test_a_module_that_an_import_writes_is_taken_and_may_be_removed(installed: Path) -> None:
    """As by PyTorch 2.6 with DDP: each process removes its directory as it ends."""
    Path("train.py").write_text("import writes; print(writes.made.VALUE)")
    code = "import sys, tempfile\nplace = tempfile.TemporaryDirectory()\nsys.path.append(place.name)\n"
    install(installed, "writes", f"{code}open(place.name + '/made.py', 'w').write('VALUE = 3')\nimport made")
    with spare(installed, names("writes"), "train.py") as one:
        assert one.state["ready"], one.state
        for _ in range(2):
            assert one.fork()["lines"] == ["3\n"]


def test_a_file_that_changes_is_noticed_at_the_next_start(installed: Path) -> None:
    Path("train.py").write_text("import changing; print(changing.VALUE)")
    install(installed, "changing", "VALUE = 1")
    with spare(installed, names("changing"), "train.py") as one:
        assert one.fork()["lines"] == ["1\n"]
        install(installed, "changing", "VALUE = 12")
        after = one.fork()
        assert after["code"] is None
        assert after["cause"].endswith("changing.py has changed")


def test_the_environment_is_that_of_each_import(installed: Path) -> None:
    """What the script sets before an import is there at that import only; what a module sets stays."""
    install(installed, "reads", "import os\nBACKEND = os.environ.get('BACKEND')\nos.environ['MADE'] = 'by the module'")
    Path("train.py").write_text("""
import os
print(os.environ.get("BACKEND"), os.environ.get("MADE"))
os.environ["BACKEND"] = "torch"
import reads
print(reads.BACKEND, os.environ["MADE"])
""")
    with spare(installed, [ImportNote("reads", {"BACKEND": "torch"})], "train.py") as one:
        assert one.fork()["lines"] == ["None by the module\n", "torch by the module\n"]


def test_an_own_module_is_left_to_the_program(installed: Path) -> None:
    """Also one that is imported right after a variable was set: that is noted, and the module is not."""
    Path("train.py").write_text(
        "import os, sys, json.tool\nos.environ['KIND'] = 'x'\nimport own, statistics\n"
        "[f for f in sys.meta_path if type(f).__name__ == 'ImportRecorder'][0].finish_step()\n"
    )
    Path("own.py").write_text("import sys\nprint('own', sys.argv)")
    source = f"import sys, types; p = types.ModuleType('holdfast'); p.__path__ = [{str(SOURCE)!r}]; "
    source += "sys.modules['holdfast'] = p; from holdfast.supervise.program import main; "
    source += "main('train.py', False, [], [], 'record', -1, -1)"
    subprocess.run([installed, "-c", source], timeout=60, check=True)
    noted = read_record("record")
    assert ImportNote("", {"KIND": "x"}) in noted
    assert {"json.tool", "statistics"} <= {note.name for note in noted}
    assert "own" not in {note.name for note in noted}
    assert Path("record").stat().st_mode & 0o777 == 0o600
    with spare(installed, noted, "train.py") as one:
        assert one.state["ready"]
        assert one.fork()["lines"] == ["own ['train.py']\n"]
        # The next spare gets as much as this one got: what changed the environment, too.
        assert read_record("record")[: len(noted)] == noted


def test_multiprocessing_knows_the_program_as_main(installed: Path) -> None:
    """It keeps another name for it from when it is imported, which is no module of the user's own."""
    Path("train.py").write_text(
        "import multiprocessing, sys; print(sys.modules['__mp_main__'] is sys.modules['__main__'])"
    )
    with spare(installed, names("multiprocessing"), "train.py") as one:
        assert one.state["ready"], one.state["cause"]
        assert one.fork()["lines"] == ["True\n"]


def test_what_imports_print_is_not_shown(installed: Path) -> None:
    install(installed, "loud", "print('hello')")
    Path("train.py").write_text("print('out')")
    with spare(installed, names("loud"), "train.py") as one:
        assert one.state["lines"] == []
        assert one.fork()["lines"] == ["out\n"]


FACTS = """
import json, os, signal, sys, threading, atexit, random, multiprocessing
if __name__ == "__main__":
    found = []
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found += pool.map(abs, [-1])
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "file": __file__,
        "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n < 32},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "environment": {k: v for k, v in os.environ.items() if k != "HOLDFAST_BOARD"},
        "native": threading.main_thread().native_id == os.getpid(), "pools": found,
        "cmdline": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
        "holdfast": sorted(name for name in sys.modules if name.startswith("holdfast")),
    }
    drawn = [random.random(), os.urandom(4).hex()]
    MORE
    atexit.register(print, "at exit")
    threading.Timer(0.1, print, ("late",)).start()
    print(json.dumps(facts, sort_keys=True))
    print(drawn)
    sys.exit(7)
"""

TORCH = """
    import numpy, torch
    drawn += [numpy.random.random(), torch.rand(1).item()]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(512, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    facts |= {"losses": losses, "threads": torch.get_num_threads(), "batches": [batch.tolist() for batch in loader]}
"""


@pytest.mark.parametrize("kind", ["plain", pytest.param("torch", marks=pytest.mark.long)])
def test_a_forked_program_is_as_one_that_starts_afresh(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts, losses bit for bit, and processes of each kind; random generators begin anew in each."""
    # Without this, sums in MKL may depend on where in memory its arrays happen to begin, in plain starts too.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    Path("train.py").write_text(FACTS.replace("    MORE\n", TORCH if kind == "torch" else ""))
    plain = subprocess.run(
        [sys.executable, "train.py", "a b"], text=True, capture_output=True, timeout=120, check=False
    )
    assert plain.returncode == 7, plain.stderr
    torch = ["numpy", "torch", "torch._dynamo", "torch.utils.data"] if kind == "torch" else []
    with spare(Path(sys.executable), names(*torch, "multiprocessing.pool"), "train.py", "a b") as one:
        assert one.state == {"ready": True, "cause": "", "lines": []}
        starts = [one.fork(), one.fork()]
    fresh = plain.stdout.splitlines(keepends=True)
    all_drawn = json.loads(fresh[1].replace("'", '"'))
    for forked in starts:
        assert forked["code"] == 7
        facts, drawn, *rest = forked["lines"]
        for key, value in json.loads(fresh[0]).items():
            assert (key, json.loads(facts)[key]) == (key, value)
        assert rest == fresh[2:] == ["late\n", "at exit\n"]
        all_drawn += json.loads(drawn.replace("'", '"'))
    assert len(set(all_drawn)) == len(all_drawn)


def test_each_kind_of_end_is_that_of_a_plain_start(installed: Path) -> None:
    code = """
import os, signal, sys
how = sys.argv[1] if len(sys.argv) > 1 else ""
"""
    for how, expected in {
        "sys.exit('text')": 1, "raise KeyboardInterrupt": -2, "os.kill(os.getpid(), 15)": -15, "1 / 0": 1,
        "os._exit(9)": 9, "pass": 0,
    }.items():  # fmt: skip
        Path("train.py").write_text(code + how)
        with spare(installed, names("json"), "train.py") as one:
            assert one.fork()["code"] == expected, how
        done = subprocess.run([installed, "train.py"], stderr=subprocess.DEVNULL, timeout=60, check=False)
        assert done.returncode == expected


def test_a_record_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write where others may must not choose what is imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    file = find_record("/train.py", [])
    assert find_record("/train.py", ["--lr=1"]) != file
    assert Path(file).parent == Path("cache/holdfast/imports")
    assert Path(file).parent.stat().st_mode & 0o777 == 0o700
    assert read_record(file) == []
    Path(file).write_text('{"version": 1, "imports": [["json", {}]]}')
    assert read_record(file) == [ImportNote("json", {})]
    for damaged in ("", "[]", "{}", '{"version": 1, "imports": [1]}', '{"version": 9, "imports": []}'):
        Path(file).write_text(damaged)
        assert read_record(file) == []
    Path(file).parent.chmod(0o770)
    assert find_record("/train.py", []) == ""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert find_record("/train.py", []) == ""
