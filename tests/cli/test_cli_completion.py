"""What a shell offers for the command `holdfast`: in a real bash, and by click's protocol for zsh and fish."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import PROGRAM, call, call_json, run_program
from holdfast.cli.exit_codes import ExitCode


class Bash:
    """A bash on a terminal, with the completion of the command."""

    def __init__(self, directory: Path) -> None:
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.chdir(directory)
            variables = {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "TERM": "dumb", "INPUTRC": "/dev/null"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, **variables, "PS1": "$ "})
        self._send('eval "$(holdfast completion bash)"; echo ready$((1))\n', "ready1\r\n$ ")

    def complete(self, line: str) -> str:
        """The line after a tab. The sign behind it shows that bash is done."""
        completed = self._send(f"{line}\t#", "#").removesuffix("#")
        self._send("\x15\n", "\n$ ")  # Forgets the line.
        return completed

    def close(self) -> None:
        os.write(self._terminal, b"exit\n")
        os.waitpid(self._process, 0)
        os.close(self._terminal)

    def _send(self, text: str, end: str) -> str:
        """Types a text, and gives what the terminal shows once that ends so."""
        os.write(self._terminal, text.encode())
        seen = ""
        while not seen.endswith(end):
            for character in os.read(self._terminal, 1 << 16).decode().replace("\x07", ""):
                seen = seen[:-1] if character == "\x08" else seen + character
        return seen


@pytest.fixture(scope="module")
def bash(made_run: Path) -> Iterator[Bash]:
    shell = Bash(made_run.parent)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("holdfast veri", "holdfast verify "),
        ("holdfast show --dep", "holdfast show --depth "),
        ("holdfast prune g", "holdfast prune gpt "),
        ("holdfast show g", "holdfast show gpt"),  # A space or an @ may follow.
        ("holdfast show gpt@25", "holdfast show gpt@250 "),
        ("holdfast diff gpt@100 gpt@l", "holdfast diff gpt@100 gpt@latest "),
        ("holdfast export gpt@be", "holdfast export gpt@best"),
        ("holdfast verify gpt@best:v", "holdfast verify gpt@best:val_loss "),
        ("holdfast rollback gpt@max:a", "holdfast rollback gpt@max:accuracy "),
        ("holdfast export gpt@250 out --to saf", "holdfast export gpt@250 out --to safetensors "),
        ("holdfast completion f", "holdfast completion fish "),
    ],
)
def test_bash_completes_verbs_options_runs_and_steps(bash: Bash, typed: str, completed: str) -> None:
    assert bash.complete(typed) == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_answered_with_runs_and_steps(made_run: Path, shell: str) -> None:
    def ask(*words: str) -> str:
        # The word to complete is the last one, for fish by itself.
        given = {"zsh": str(len(words) - 1), "fish": words[-1]}[shell]
        variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": given, "_HOLDFAST_COMPLETE": f"{shell}_complete"}
        return run_program(cwd=made_run.parent, env={**os.environ, **variables}).stdout

    assert "gpt" in ask("holdfast", "show", "g")
    answer = ask("holdfast", "show", "gpt@")
    assert [answer.index(f"gpt@{name}") for name in ("300", "250", "100", "latest", "best")]
    assert "gpt@300" not in ask("holdfast", "show", "gpt@2")
    assert "_HOLDFAST_COMPLETE" in call("completion", shell).stdout
    assert call_json("completion", shell)["script"] == call("completion", shell).stdout


def test_shell_that_is_not_known_is_refused() -> None:
    assert call("completion", "tcsh").exit_code == ExitCode.USAGE
