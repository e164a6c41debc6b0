"""`holdfast export` and `holdfast import`: a checkpoint as files of other programs, and the other way round."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Final

import click
from msgspec import structs

from holdfast.cli.completion import RunPath
from holdfast.cli.report import Report, name_fields, verb
from holdfast.cli.screen import FAINT, counted, parse_size
from holdfast.cli.target import choose_step, find_target
from holdfast.convert.exporter import FILE_BYTES, ExportOptions, export_chosen, export_step
from holdfast.convert.importer import import_checkpoint
from holdfast.errors import DamageError, UsageError
from holdfast.numbers import time_text
from holdfast.process.exit import ending_on
from holdfast.process.progress import show_progress

_SHOWN: Final = 20


@verb("export")
@click.argument("run", metavar="RUN[@STEP]", type=RunPath())
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["safetensors", "transformers", "torch", "dcp"]),
    help="safetensors; transformers, a directory for from_pretrained; torch, a file for torch.load(weights_only=True); "
    "dcp, for torch.distributed.checkpoint.",
)
@click.option(
    "--only", metavar="NAME", multiple=True, help="Export only this object, array or pattern. Can be repeated."
)
@click.option("--keep-prefix", is_flag=True, help="Keep the object's name as a prefix even if --only names one object.")
@click.option("--repeat-shared", is_flag=True, help="safetensors: write shared arrays once for each of their names.")
@click.option("--file-size", metavar="SIZE", callback=parse_size, help="Start a new file at this size.  [default: 5GB]")
@click.option("--overwrite", is_flag=True, help="Replace an existing export.")
def export_command(
    report: Report,
    run: str,
    out: Path,
    to: str,
    only: tuple[str, ...],
    keep_prefix: bool,
    repeat_shared: bool,
    file_size: int | None,
    overwrite: bool,
) -> None:
    """Write a checkpoint as files for other programs.

    RUN is the directory that a job saves into. Its newest checkpoint is exported unless you add a step, as in
    runs/gpt@500. RUN can also be the directory of a single step, or a copy of one.

    OUT is a directory for safetensors, transformers and dcp, and a file for torch. For safetensors it is a single file
    if its name ends in .safetensors. Every byte is checked, and OUT appears only when it is complete.
    """
    if file_size is not None and (to == "torch" or (to == "safetensors" and out.name.endswith(".safetensors"))):
        raise UsageError(
            "--file-size needs a format of several files", hint="Leave it out, or name a directory as OUT."
        )
    if repeat_shared and to != "safetensors":
        raise UsageError("--repeat-shared works with safetensors only", hint="The other formats keep arrays shared.")
    target = find_target(run)
    options = ExportOptions(to, only or None, keep_prefix, repeat_shared, overwrite, file_size or FILE_BYTES)
    try:
        with ending_on(signal.SIGTERM, signal.SIGHUP), show_progress("exporting") as progress:
            options = structs.replace(options, watcher=progress)
            if target.is_step:
                export = export_step(target.storage, "", None, target.siblings, out, options)
            else:
                choose = partial(choose_step, target=target)
                export = export_chosen(target.storage, choose, out, options)
    except DamageError as error:
        if not (target.is_step or error.hint):
            error.hint = (
                f"`holdfast verify --all {target.location}` says which steps are whole; "
                f"export one of them as {target.location}@STEP."
            )
        raise
    except UsageError as error:
        error.hint = error.hint.replace("pass overwrite=True", "add --overwrite")
        raise
    report.fields = {
        **name_fields(export.name),
        "out": str(out.absolute()),
        "files": list(export.files),
        "arrays": export.arrays,
        "size_bytes": export.size_bytes,
        "seconds": export.seconds,
        "left_out": [{"path": one.path, "reason": one.reason} for one in export.left_out],
    }
    report.line(
        f"step {export.step}: {counted(export.arrays, 'array')}, {report.size(export.size_bytes)} in {export.out}",
        (f"  {time_text(export.seconds)}" if report.is_page else "", FAINT),
    )
    for file in export.files[:_SHOWN] if export.files != (out.name,) else ():
        report.line("  ", file)
    if len(export.files) > _SHOWN:
        report.line(f"  and {len(export.files) - _SHOWN} more files")
    for one in export.left_out[:_SHOWN]:
        report.note(("left out: ", FAINT), one.path, (f" ({one.reason})", FAINT))
    if len(export.left_out) > _SHOWN:
        report.note(("left out: ", FAINT), f"{len(export.left_out) - _SHOWN} more (--json names them all)")


@verb("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--step", type=click.IntRange(0), help="The step to resume from.  [default: the one in SOURCE, or 0]")
@click.option(
    "--only",
    metavar="NAME",
    multiple=True,
    help="Import only this object, by its name after --rename. Can be repeated.",
)
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
def import_command(
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
    with ending_on(signal.SIGTERM, signal.SIGHUP), show_progress("importing") as progress:
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
        report.note(
            ("no step in the source: ", FAINT), f"the run begins at step 0. For another, remove {run} and give --step N"
        )
    for renamed in made.renamed:
        report.note(("renamed: ", FAINT), f"{renamed}: a common prefix was removed from its names")
    for one in made.left_out:
        report.note(("left out: ", FAINT), one.path, (f" ({one.reason})", FAINT))
