"""`holdfast import`: makes a checkpoint from files of other programs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from holdfast.cli.exit_codes import ending_on
from holdfast.cli.report import Report, name_fields, verb
from holdfast.cli.screen import FAINT, byte_progress, counted
from holdfast.convert.importer import import_checkpoint
from holdfast.errors import UsageError
from holdfast.events.kinds import time_text


@verb("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--step", type=click.IntRange(0), help="The step to resume from.  [default: the one in SOURCE, or 0]")
@click.option("--only", metavar="NAME", multiple=True, help="Import only this object. Can be repeated.")
@click.option("--name", default="model", show_default=True, help="Name of the model, or of the only object in SOURCE.")
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    help="Rename an object, a part such as state/params, or everything (.). Can be repeated.",
)
@click.option(
    "--strip-prefix", metavar="PREFIX", default="", help="Remove this prefix from the names of the model's arrays."
)
@click.option("--skip-unknown", is_flag=True, help="Leave out values of unknown classes.")
def command(
    report: Report,
    source: Path,
    run: str,
    step: int | None,
    only: tuple[str, ...],
    name: str,
    rename: tuple[str, ...],
    strip_prefix: str,
    skip_unknown: bool,
) -> None:
    """Make a checkpoint from files of another program.

    SOURCE is a file of torch.save or Lightning, a folder of the Hugging Face Trainer, a directory of Orbax or
    torch.distributed.checkpoint, a safetensors file, or a directory of safetensors files. Nothing in it is executed.

    RUN is a new directory, or one without checkpoints. A job that saves there resumes from the imported step.
    """
    if not name:
        raise UsageError("--name is empty", hint="Leave it out, or give a name.")
    names = dict(one.partition("=")[::2] for one in rename)
    if len(names) < len(rename) or not all(names.values()) or not all(names):
        raise UsageError(f"--rename {' '.join(rename)} is not understood", hint="Write OLD=NEW, each OLD once.")
    with ending_on(signal.SIGTERM, signal.SIGHUP), byte_progress(sys.stderr, "importing") as progress:
        made = import_checkpoint(
            source,
            run,
            step=step,
            only=only or None,
            name=name,
            rename=names,
            strip_prefix=strip_prefix,
            skip_unknown=skip_unknown,
            watcher=progress,
        )
    report.fields = {
        "run": made.run,
        **name_fields(made.name),
        "directory": made.name.directory,
        "format": made.format,
        "objects": list(made.objects),
        "arrays": made.arrays,
        "size_bytes": made.size_bytes,
        "seconds": made.seconds,
        "renamed": list(made.renamed),
        "has_step": made.has_step,
        "left_out": [{"path": one.path, "reason": one.reason} for one in made.left_out],
    }
    report.line(
        f"step {made.step} of {run}: {counted(made.arrays, 'array')}, {report.size(made.size_bytes)}",
        f", from {made.format}",
        (f"  {time_text(made.seconds)}" if report.is_page else "", FAINT),
    )
    report.line("  objects: ", ", ".join(made.objects))
    if not made.has_step:
        report.note(("no step in the source: ", FAINT), "the run begins at step 0; --step N sets another")
    for renamed in made.renamed:
        report.note(("renamed: ", FAINT), f"{renamed}: a common prefix was removed from its names")
    for one in made.left_out:
        report.note(("left out: ", FAINT), one.path, (f" ({one.reason})", FAINT))
