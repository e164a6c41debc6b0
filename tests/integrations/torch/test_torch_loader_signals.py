"""A signal to all processes of a job does not take the loader's workers away from the step in progress."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

import preloaded
from command_line import run_python
from holdfast.catalog import StoredRun
from holdfast.storage import LocalStorage

pytest.importorskip("torch")

METHODS = ("fork", "spawn", "forkserver")

PROGRAM = """
import os, subprocess, sys, torch, holdfast as hf

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.full((3,), float(index))

def note(worker):
    # The user's own function is called as well.
    open(f"{sys.argv[1]}-{worker}", "w").close()

def main():
    directory, number, method = sys.argv[1:]
    loader = hf.ResumableDataLoader(
        Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method, worker_init_fn=note
    )
    state = {"sum": torch.zeros(3)}
    with hf.resumable(directory, state=state, loader=loader, save_every=hf.Steps(1000)) as run:
        batches = loader.stream()
        for step in run.steps(1000):
            if step == 5:
                # Somebody else sends it, to the whole group, in the middle of a step that needs more batches.
                subprocess.run(["bash", "-c", f"trap '' {number}; kill -{number} -- -{os.getpgid(0)}"], check=True)
            for _ in range(20):
                state["sum"] += next(batches).sum()

if __name__ == "__main__":
    main()
"""


WAYS = [(number, method) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) for method in METHODS]
# Each signal and each way to start workers, once.
FIRST = [(signal.SIGUSR1, "fork"), (signal.SIGINT, "spawn"), (signal.SIGTERM, "forkserver")]


@pytest.mark.parametrize(
    ("number", "method"), [*FIRST, *(pytest.param(*way, marks=pytest.mark.long) for way in WAYS if way not in FIRST)]
)
def test_a_signal_to_the_whole_group(tmp_path: Path, number: signal.Signals, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    ended = preloaded.run(
        [sys.executable, program, tmp_path / "run", str(number.value), method],
        preload=preloaded.TRAINING,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert ended.returncode == (130 if number is signal.SIGINT else 42), ended.stderr
    assert [name.step for name in StoredRun(LocalStorage(tmp_path / "run")).look().living] == [6]
    assert (tmp_path / "run-0").exists()
    assert (tmp_path / "run-1").exists()


def test_loader_worker_ends_when_its_process_terminates_it() -> None:
    program = """
    import multiprocessing, signal, time
    from holdfast.integrations.torch.loader import IgnoreSignals

    def serve(ready):
        IgnoreSignals(None)(0)
        ready.set()
        while True:
            time.sleep(60)

    ready = multiprocessing.get_context("fork").Event()
    worker = multiprocessing.get_context("fork").Process(target=serve, args=(ready,))
    worker.start()
    ready.wait(30)
    worker.terminate()
    worker.join(30)
    print(worker.exitcode)
    """
    ended = run_python(program, preload=preloaded.TRAINING)
    assert ended.stdout == "0\n", ended.stderr
