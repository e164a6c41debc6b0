"""`holdfast init` and `holdfast completion`: write a script that trains, and print one that completes the command."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from holdfast.cli.completion import COMPLETE_VARIABLE
from holdfast.cli.report import Report, verb
from holdfast.cli.screen import FAINT, GOOD, NOTABLE
from holdfast.errors import UsageError

KINDS: Final = {
    "torch": "a loop of your own in PyTorch",
    "ddp": "the same on several GPUs or machines, with torchrun",
    "lightning": "Lightning's Trainer",
    "trainer": "the Trainer of Hugging Face's transformers",
    "accelerate": "a loop of Accelerate",
    "keras": "`fit` of Keras",
    "jax": "JAX with Flax and optax",
    "numpy": "NumPy alone",
}
"""Each kind of script, and what it trains with. Its text is the example `train_KIND.py`."""

_IN_PACKAGE: Final = Path(__file__).parents[1] / "templates"
_IN_CHECKOUT: Final = Path(__file__).parents[4] / "examples"
"""Places of the examples: setup.py copies them into the package, but an editable install has no copy."""


@verb("init")
@click.argument("kind", type=click.Choice(list(KINDS)), default="torch", metavar="[KIND]")
@click.option("--output", metavar="FILE", default="train.py", show_default=True, help="The file to write.")
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def command(report: Report, kind: str, output: str, force: bool) -> None:
    """Write a script that trains something small and resumes exactly: a beginning for your own.

    Comments in it say what to replace. KIND is torch, ddp, lightning, trainer, accelerate, keras, jax or numpy; the
    default is torch, a loop of your own in PyTorch.
    """
    place = _IN_PACKAGE if _IN_PACKAGE.exists() else _IN_CHECKOUT
    text = (place / f"train_{kind}.py").read_text(encoding="utf-8")
    text = text.replace(f"examples/train_{kind}.py", shlex.quote(output))
    start = next(line for line in text.splitlines() if line.endswith(shlex.quote(output)))
    file = Path(output)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError) and file.is_file():
            hint = "--output FILE writes to another file, and --force overwrites this one."
            raise UsageError(f"{output} exists already", hint=hint) from None
        raise UsageError(f"cannot write {output}: {error.strerror}", hint="--output FILE names a file.") from error
    packages = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    lacking = sorted({name for name in packages if find_spec(name) is None})
    others = [one for one in KINDS if one != kind]
    report.fields = {"kind": kind, "file": output, "command": start, "missing_packages": lacking, "other_kinds": others}
    report.line((f"wrote {output}", GOOD), f": {KINDS[kind]} (or: holdfast init {'|'.join(others)})")
    if lacking:
        report.line((f"not installed: {', '.join(lacking)}; first: pip install {' '.join(lacking)}", NOTABLE))
    report.line(
        ("run it: ", FAINT), start, ("; kill it at any moment (Ctrl-C, kill -9), run the same again: it resumes", FAINT)
    )


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion(report: Report, shell: str) -> None:
    """Print a script that completes verbs, options, runs, and steps after RUN@.

    In ~/.bashrc, or in ~/.zshrc with zsh: eval "$(holdfast completion bash)"

    In ~/.config/fish/config.fish: holdfast completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    script = kind(click.get_current_context().find_root().command, {}, "holdfast", COMPLETE_VARIABLE).source()
    report.fields = {"shell": shell, "script": script}
    if not report.is_json:
        click.echo(script, nl=False)
