"""Notebooks: cells of a real kernel that are run again, fail, and are interrupted; and other prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import KernelManager

from patience import PATIENCE_SECONDS
from places import PROGRAMS


class Kernel:
    """A kernel, as a notebook has one."""

    def __init__(self, directory: Path) -> None:
        self._manager: Any = KernelManager(transport="ipc", ip=str(directory / "ipc"))
        self._manager.connection_file = str(directory / "kernel.json")
        # Within pytest a kernel would not show what is written past its streams, as signal handlers do.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._manager.start_kernel(env={**inherited, "IPYTHONDIR": str(directory)})
        self._client: Any = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_SECONDS)
        self._cell = self.output = self.error = self.text = ""

    def begin(self, cell: str, until: str = "") -> None:
        """Runs a cell until it has printed something; without that, to its end."""
        self._cell, self.output, self.error, self.text = self._client.execute(cell), "", "", ""
        self.wait(until)

    def wait(self, until: str = "") -> None:
        """Waits until the cell has printed something, or for its end."""
        while not until or until not in self.output:
            message = self._client.get_iopub_msg(timeout=PATIENCE_SECONDS)
            content = message["content"]
            if message["parent_header"].get("msg_id") != self._cell:
                continue
            if message["msg_type"] == "stream":
                self.output += content["text"]
            elif message["msg_type"] == "execute_result":
                self.output += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                self.error, self.text = content["ename"], content["evalue"]
            elif content.get("execution_state") == "idle":
                assert not until, self.output + self.error + self.text
                return

    def run(self, cell: str) -> str:
        """Runs a cell that raises nothing, and gives what it has printed."""
        self.begin(cell)
        assert not self.error, f"{self.error}: {self.text}"
        return self.output

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def test_a_cell_is_interrupted_fails_and_is_run_again(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run((PROGRAMS / "notebook_cells.py").read_text() + f"directory = {str(tmp_path)!r}\nmake()")
    expected = kernel.run("train(directory + '/uninterrupted')").splitlines()[-1]
    assert expected.startswith("ends with")
    kernel.run("make()")
    # The step in progress ends and is saved; then the cell is interrupted, and the kernel goes on.
    kernel.begin("train(directory + '/run', interrupt)", until="waits")
    kernel.interrupt()
    kernel.wait()
    assert (kernel.error, kernel.text) == ("KeyboardInterrupt", "step 7 is saved")
    assert "step 7 is saved; raising KeyboardInterrupt." in kernel.output
    # Of a step that fails, and of one whose save is given up, nothing counts.
    kernel.begin("train(directory + '/run', fail)")
    assert (kernel.error, kernel.output) == ("ValueError", "begins at 7\n")
    kernel.begin("train(directory + '/run', insist)", until="waits")
    assert kernel.output.startswith("begins at 8\n")
    kernel.interrupt()
    kernel.wait("A second interrupt stops at once")
    kernel.wait("goes on")
    kernel.interrupt()
    kernel.wait()
    assert (kernel.error, kernel.text) == ("KeyboardInterrupt", "")
    # A run that is made and never entered holds nothing.
    for _ in range(2):
        kernel.run("run = hf.resumable(directory + '/run', state=state, sampler=sampler)")
    again = kernel.run("train(directory + '/run')")
    assert again.startswith("begins at 8\n")
    assert again.splitlines()[-1] == expected
    assert kernel.run("train(directory + '/run')").splitlines() == ["begins at 20", expected]
    assert kernel.run("[each.name for each in threading.enumerate() if 'holdfast' in each.name]") == "[]"
    assert kernel.run("signal.getsignal(signal.SIGTERM) is signal.SIG_DFL") == "True"
    # Where the step cannot be saved, that is the error.
    kernel.begin("train(directory + '/lost', lose)")
    assert kernel.error == "SaveFailedError"
    assert "step 3 could NOT be saved" in kernel.text
    # Nobody sits at a child that is forked from the kernel, as notebook launchers do.
    child = "multiprocessing.get_context('fork').Process(target=train, args=(directory + '/child', ask(signal.SIGINT)))"
    assert "\n130" in kernel.run(f"child = {child}; child.start(); child.join(); child.exitcode")
    # The kernel is to end.
    kernel.begin("make(); train(directory + '/last', ask(signal.SIGTERM))")
    assert kernel.text == "42"
    assert "step 3 is saved; leaving with exit code 42" in kernel.output


def test_a_program_at_a_prompt_is_interrupted_and_the_prompt_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i", PROGRAMS / "at_a_prompt.py", tmp_path],
        input="print('stays after', sys.last_type.__name__, run.step)",
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout == "stays after KeyboardInterrupt 4\n", done.stderr
    assert done.returncode == 0
