"""`holdfast export`: writes a checkpoint as files that other programs read."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click
from msgspec import structs

from holdfast.cli.exit_codes import ending_on
from holdfast.cli.report import Report, name_fields, verb
from holdfast.cli.screen import FAINT, byte_progress, counted, parse_size
from holdfast.cli.target import choose_step, find_target
from holdfast.convert.exporter import FILE_BYTES, ExportOptions, export_chosen, export_step
from holdfast.errors import DamageError, UsageError
from holdfast.events.kinds import time_text

_SHOWN: Final = 20


@verb("export")
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
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
def command(
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
        with ending_on(signal.SIGTERM, signal.SIGHUP), byte_progress(sys.stderr, "exporting") as progress:
            options = structs.replace(options, watcher=progress)
            if target.is_step:
                export = export_step(target.storage, "", None, target.beside, out, options)
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
    for file in export.files[:_SHOWN]:
        report.line("  ", file)
    if len(export.files) > _SHOWN:
        report.line(f"  and {len(export.files) - _SHOWN} more files")
    for one in export.left_out[:_SHOWN]:
        report.note(("left out: ", FAINT), one.path, (f" ({one.reason})", FAINT))
    if len(export.left_out) > _SHOWN:
        report.note(("left out: ", FAINT), f"{len(export.left_out) - _SHOWN} more (--json names them all)")
