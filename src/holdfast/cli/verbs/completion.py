"""`holdfast completion`: prints the script that completes the command in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.cli.completion import COMPLETE_VARIABLE
from holdfast.cli.report import Report, verb


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(report: Report, shell: str) -> None:
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
