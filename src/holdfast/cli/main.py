"""The command `holdfast`: runs a verb, and turns its errors into a message and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import Any, Final, NoReturn, TextIO

import click

from holdfast import __version__
from holdfast.cli.exit_codes import ExitCode, error_fields, holdfast_error_fields
from holdfast.errors import HoldfastError
from holdfast.tracebacks import TRACEBACK_VARIABLE

VERBS: Final = {
    "run": "Run a training program, and start it again when it dies.",
    "worker": "Run a training program as a worker of torchrun, which restarts it quickly.",
    "ask": "Ask a running job to save, to stop, or how it is.",
    "follow": "Run a command for each checkpoint of a run, as its job commits them.",
    "pin": "Keep a checkpoint, regardless of retention.",
    "unpin": "Let a checkpoint that was pinned be removed.",
    "init": "Write a script that trains and resumes, to begin with.",
    "list": "List the checkpoints of a run, or the runs in a directory.",
    "show": "Show what one checkpoint holds.",
    "stats": "Show where the time of a run went.",
    "diff": "Show what changed from one checkpoint to another.",
    "verify": "Read every byte of a checkpoint and check it.",
    "prune": "Remove checkpoints that you no longer want, and remains of unfinished saves.",
    "copy": "Copy a run, or steps of it, to another place, such as a bucket.",
    "rollback": "Make an earlier step the newest one, so that the job goes on from there.",
    "export": "Write a checkpoint as safetensors, torch.save, DCP or transformers files.",
    "import": "Make a checkpoint from files of torch.save, Lightning, transformers, Orbax, DCP or safetensors.",
    "doctor": "Check the installation and a directory, and recommend how often to save.",
    "completion": "Print a script that completes verbs, options, runs and steps in bash, zsh or fish.",
}
"""Each verb with its line of help. The module of a verb has the same name, and is imported only when the verb is
called: help is quick, and no verb imports libraries that only another one needs."""

_INSTEAD: Final = {
    **dict.fromkeys(("rm", "remove", "delete", "del", "clean", "gc"), "prune"),
    **dict.fromkeys(("compare", "cmp", "changes"), "diff"),
    **dict.fromkeys(("cp", "mv", "move", "sync", "upload", "download", "push", "pull"), "copy"),
    **dict.fromkeys(("cat", "inspect", "info", "describe", "print", "view"), "show"),
    **dict.fromkeys(("check", "validate", "fsck", "test"), "verify"),
    **dict.fromkeys(("ls", "dir", "runs", "steps"), "list"),
    **dict.fromkeys(("status", "stop", "signal", "kill"), "ask"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("undo", "revert", "reset", "restore"), "rollback"),
    **dict.fromkeys(("new", "create", "template", "example"), "init"),
    **dict.fromkeys(("diagnose", "benchmark", "bench", "env"), "doctor"),
}
"""Words that people write for a verb of another name."""

_RESUMING: Final = frozenset({"resume", "restart", "continue", "train", "start"})

_MODULES: Final = {
    "export": "conversion",
    "import": "conversion",
    "worker": "run",
    "pin": "follow",
    "unpin": "follow",
    "completion": "init",
}
"""Modules of verbs that are not named for one verb."""

_VERB: Final = "holdfast.verb"
_AS_JSON: Final = "holdfast.as_json"


class Verbs(click.Group):
    """The verbs, imported one at a time."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name, or None."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"holdfast.cli.verbs.{_MODULES.get(cmd_name, cmd_name)}")
        commands = (thing for thing in vars(module).values() if isinstance(thing, click.Command))
        return next(command for command in commands if command.name == cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb, or names the one that does what another word asks for."""
        word = args[0].lower()
        if word in _RESUMING:
            ctx.fail(f"No such command {args[0]!r}. A job resumes by itself: 'holdfast run TRAIN.PY' starts it.")
        if (verb := _INSTEAD.get(word)) is not None:
            ctx.fail(f"No such command {args[0]!r}. Use 'holdfast {verb}': {VERBS[verb]}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all verbs, in the order of the help."""
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options before the verb, and notes whether --json is given: usage errors are JSON then too."""
        options = args[: args.index("--")] if "--" in args else args
        ctx.meta[_VERB] = next((arg for arg in args if not arg.startswith("-")), None)
        ctx.meta[_AS_JSON] = "--json" in options
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        """Runs the verb, and turns each exception into its exit code."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except HoldfastError as error:
            _end(ctx, holdfast_error_fields(error))
        except KeyboardInterrupt as error:
            _end(ctx, error_fields(error, ExitCode.INTERRUPTED, "interrupted"))
        except BrokenPipeError:
            _silence(sys.stdout)
            _silence(sys.stderr)
            ctx.exit(ExitCode.BROKEN_PIPE)
        except OSError as error:
            _silence(sys.stdout)
            _end(ctx, error_fields(error, ExitCode.FAILED, f"cannot write the output: {error.strerror or error}"))
        except RecursionError as error:
            # Everything that holdfast itself writes is flat enough.
            text = "the checkpoint holds a value that is nested too deeply to show"
            _end(ctx, error_fields(error, ExitCode.DAMAGED, text, "holdfast did not write it."))
        except click.ClickException as error:
            text = " ".join(error.format_message().split())
            context = error.ctx if isinstance(error, click.UsageError) else None
            hint = f"Try '{context.command_path} --help' for help." if context is not None else ""
            fields = error_fields(error, error.exit_code, text, hint) | {"kind": "UsageError"}
            _write_error(ctx, fields)
            _complain_of_usage(error)
            ctx.exit(error.exit_code)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            text = f"{type(error).__name__}: {error}"
            hint = f"This is a bug in holdfast. Please report it; set {TRACEBACK_VARIABLE}=1 to see the traceback."
            _end(ctx, error_fields(error, ExitCode.BUG, text, hint))


def _end(ctx: click.Context, fields: dict[str, Any]) -> NoReturn:
    """Reports an error as text on the error stream, with `--json` on the output too, and ends the command."""
    _write_error(ctx, fields)
    _complain(fields["message"], fields["hint"])
    ctx.exit(fields["exit_code"])


def _write_error(ctx: click.Context, fields: dict[str, Any]) -> None:
    """Writes the JSON document of an error, if JSON is asked for and the verb has not written its own."""
    from holdfast.cli.screen import has_document, write_json

    if not ctx.meta.get(_AS_JSON) or has_document(ctx):
        return
    with contextlib.suppress(OSError, ValueError):
        write_json(sys.stdout, ctx.meta[_VERB], {"error": fields})
        sys.stdout.flush()


@click.group(
    cls=Verbs,
    commands={verb: click.Command(verb, short_help=line) for verb, line in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s", help="Show the version.")
def holdfast() -> None:
    """Inspect and manage the checkpoints of training jobs.

    RUN is the directory that a job saves into, and RUN@STEP is one of its checkpoints, such as runs/gpt@500, @latest
    or @best:val_loss. Every verb has a --help.
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
    if "_HOLDFAST_COMPLETE" in os.environ:
        importlib.import_module("holdfast.cli.completion")  # Has a class of its own for bash.
    holdfast(prog_name="holdfast")


def _complain(message: str, hint: str) -> None:
    """Flushes the output, then writes an error and its hint to the error stream."""
    from holdfast.cli.screen import BAD, FAINT, make_notes

    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        screen = make_notes()
        first, *rest = message.splitlines() or [""]
        screen.say(("holdfast: ", BAD), first)
        for line in rest:
            screen.say(line)
        if hint:
            screen.say(("  hint: ", FAINT), hint)


def _complain_of_usage(error: click.ClickException) -> None:
    """Writes click's message for a wrong command line, wrapped between words."""
    from holdfast.cli.screen import make_notes

    text = io.StringIO()
    error.show(text)
    with contextlib.suppress(OSError):
        for line in text.getvalue().splitlines() if sys.stderr is not None else ():
            make_notes().say(line.expandtabs(4))


def _silence(stream: TextIO) -> None:
    """Discards output that is not written yet, so that the end of the process does not fail over it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
