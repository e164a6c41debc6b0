"""Each script of `holdfast init` is killed and asked to leave, and ends as one that was left alone."""

from __future__ import annotations

import re
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from lives import Life, compiled, join_two  # noqa: F401

import preloaded
from command_line import call
from holdfast.cli.verbs.init import KINDS
from places import EXAMPLES

NEEDS = {"torch": "torch", "ddp": "torch", "trainer": "transformers", "jax": "flax"}
HOME = "holdfast.integrations.frameworks."
PRELOADED = {
    "torch": preloaded.TRAINING,
    "ddp": preloaded.TRAINING,
    "lightning": (*preloaded.TRAINING, "lightning.pytorch", f"{HOME}lightning.fit"),
    "trainer": (*preloaded.TRAINING, "transformers.trainer", "accelerate", f"{HOME}transformers.callback"),
    "accelerate": (*preloaded.TRAINING, "accelerate", f"{HOME}accelerate.loop"),
    "keras": (*preloaded.TRAINING, "keras", "keras.src.backend.torch.trainer", f"{HOME}keras.callbacks"),
    "jax": (*preloaded.HOLDFAST, *preloaded.JAX, "flax.nnx", "optax", "holdfast.integrations.jax.nnx"),
    "numpy": preloaded.HOLDFAST,
}
EACH = [
    pytest.param(
        kind,
        marks=[
            pytest.mark.skipif(find_spec(NEEDS.get(kind, kind)) is None, reason=f"needs {NEEDS.get(kind, kind)}"),
            *([pytest.mark.long] if kind == "accelerate" else []),
        ],
    )
    for kind in KINDS
]


class Script(Life):
    """A script that prints a line each 100 steps, or for each epoch."""

    def _take(self, line: str) -> None:
        self.last = line
        if line.startswith(("step ", "epoch ", "{'loss'")) and line.endswith("\n"):
            self.lines.append(line)


def write_script(kind: str, place: Path) -> Path:
    """Writes a script, and makes of it a training that ends within seconds, as its user would: in its first numbers."""
    script = place / "train.py"
    assert call("init", kind, "--output", str(script)).exit_code == 0
    text = script.read_text()
    text = re.sub(r"^STEPS = \d+(?:_\d+)?$", "STEPS = 600", text, flags=re.MULTILINE)
    text = re.sub(r"^EPOCHS = \d+$", "EPOCHS = 6", text, flags=re.MULTILINE).replace("save_every=500", "save_every=100")
    script.write_text(text)
    return script


def begin(kind: str, script: Path, directory: Path) -> list[Script]:
    """Starts the worker of a training, or its two workers; the first one prints the lines."""
    workers = join_two() if kind == "ddp" else ({"KERAS_BACKEND": "torch"},)
    return [Script(script, directory, preload=PRELOADED[kind], variables=variables) for variables in workers]


def end(scripts: list[Script], *codes: int) -> None:
    found = [script.end() for script in reversed(scripts)]
    assert not codes or set(found) <= set(codes), "\n".join(script.errors for script in scripts)


def test_kinds_of_init_are_the_examples() -> None:
    assert sorted(KINDS) == sorted(path.stem.removeprefix("train_") for path in EXAMPLES.glob("train_*.py"))


@pytest.mark.parametrize("kind", EACH)
def test_script_killed_and_asked_to_leave_ends_as_untouched(tmp_path: Path, kind: str) -> None:
    script = write_script(kind, tmp_path)
    untouched = begin(kind, script, tmp_path / "untouched")
    end(untouched, 0)
    lives = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        scripts = begin(kind, script, tmp_path / "other")
        # Two saves have begun by the third line, so that the first one is committed.
        scripts[0].wait_steps(3 if number == signal.SIGKILL else 1, ("step ", "epoch ", "{'loss'"))
        scripts[0].send(number)
        end(scripts, *([0, 42] if number == signal.SIGTERM else []))
        lives.append(scripts[0])
    scripts = begin(kind, script, tmp_path / "other")
    end(scripts, 0)
    lives.append(scripts[0])
    assert all(f"resumed {tmp_path / 'other'} at step " in life.errors for life in lives[1:])
    lines = [line for life in lives for line in life.lines]
    assert set(lines) == set(untouched[0].lines)
    assert lines[-1] == untouched[0].lines[-1]
