"""The command `holdfast`: finds the verb, and turns its end, good or bad, into a line of text and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Final, TextIO

import click

from holdfast.cli.exit_codes import ExitCode, exit_code_of
from holdfast.errors import HoldfastError
from holdfast.tracebacks import TRACEBACK_VARIABLE

VERBS: Final = {
    "list": "List the checkpoints of a run.",
    "show": "Show what one checkpoint holds.",
    "verify": "Read every byte and say whether it is what was written.",
    "prune": "Remove steps that are no longer wanted, and what unfinished saves left.",
    "export": "Write a checkpoint as safetensors, for torch.load, or for torch.distributed.checkpoint.",
    "import": "Make a checkpoint of such files.",
    "doctor": "Say whether a directory is fit for checkpoints, what a save costs there, and how often to save.",
}
"""Each verb with its line of help. Its module, of the same name, is imported when the verb is called, not before: help
is quick, and no verb pays for what another needs."""

_MODULES: Final = {"import": "importing"}
"""Where a verb is no name for a module."""


class Verbs(click.Group):
    """The verbs, imported one at a time."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name, or None."""
        if cmd_name not in VERBS:
            return None
        found = importlib.import_module(f"holdfast.cli.verbs.{_MODULES.get(cmd_name, cmd_name)}").command
        assert isinstance(found, click.Command)
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all verbs, in the order of the help."""
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> None:
        """Runs the verb; every way for it to end has its exit code."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except HoldfastError as error:
            _complain(error.message, error.hint)
            ctx.exit(exit_code_of(error))
        except KeyboardInterrupt:
            _complain("interrupted", "")
            ctx.exit(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            _silence(sys.stdout)
            _silence(sys.stderr)
            ctx.exit(ExitCode.BROKEN_PIPE)
        except OSError as error:
            _silence(sys.stdout)
            _complain(f"cannot write the output: {error.strerror or error}", "")
            ctx.exit(ExitCode.FAILED)
        except RecursionError:
            # Everything that holdfast itself writes is flat enough.
            _complain("what is stored is nested too deep to be shown", "It was not written by holdfast.")
            ctx.exit(ExitCode.DAMAGED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            _complain(
                f"{type(error).__name__}: {error}",
                f"This is a fault of holdfast, please report it; {TRACEBACK_VARIABLE}=1 shows where it happens.",
            )
            ctx.exit(ExitCode.BUG)


def _print_version(ctx: click.Context, param: click.Parameter, is_asked: bool) -> None:
    if not is_asked or ctx.resilient_parsing:
        return
    from holdfast import __version__

    click.echo(f"holdfast {__version__}")
    ctx.exit()


@click.group(
    cls=Verbs,
    commands={verb: click.Command(verb, short_help=line) for verb, line in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def holdfast() -> None:
    """Look after the checkpoints of training jobs.

    RUN is the directory that a job saves into, RUN@STEP one of its checkpoints. Every verb has a --help of its own.
    """


def main() -> None:
    """Runs the command with this process's arguments, and ends the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            # A terminal that cannot show a character gets its number, not an error.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdout is None:
        _complain("cannot write the output: it is closed", "Send it to /dev/null if it is not wanted.")
        raise SystemExit(ExitCode.FAILED)
    holdfast(prog_name="holdfast")


def _complain(message: str, hint: str) -> None:
    from holdfast.cli.screen import BAD, FAINT, Screen

    """Says what went wrong, on the error stream, after what was put out before."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        screen = Screen(sys.stderr)
        first, *rest = message.splitlines() or [""]
        screen.say(("holdfast: ", BAD), first)
        for line in rest:
            screen.say(line)
        if hint:
            screen.say(("  hint: ", FAINT), hint)


def _silence(stream: TextIO) -> None:
    """Lets what is still to be written go nowhere, so that the end of the process does not fail over it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
