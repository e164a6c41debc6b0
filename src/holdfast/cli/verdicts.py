"""Reads checkpoints byte by byte and says which are whole."""

from __future__ import annotations

import enum
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TextIO

from holdfast.catalog import read_catalog
from holdfast.errors import DamageError, HoldfastError, StorageError
from holdfast.format.names import StepName
from holdfast.restore.verify import Checked, count_unread, open_step, spares_restore, verify_data
from holdfast.storage import Storage

_THREADS: Final = max(2, min(4, os.cpu_count() or 1))


class CheckOutcome(enum.StrEnum):
    """What came of reading a checkpoint."""

    WHOLE = "whole"
    """Every byte is as it was written."""
    RESTORABLE = "restorable"
    """Headers of data files are damaged, which other programs need and a restore does not; all else is whole."""
    DAMAGED = "damaged"
    """Something is not as it was written."""
    UNREADABLE = "unreadable"
    """The place failed, so that nothing can be said of what was not read."""
    REMOVED = "removed"
    """It was removed while it was being read."""


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """What came of reading one checkpoint.

    Attributes:
        directory: The name of its directory; empty where that itself was named.
        name: Which checkpoint it is; None where the directory may have any name and its manifest is damaged.
        outcome: What came of it.
        problems: What is damaged, in the order of the files, or what the place said.
        read_bytes: How much was read.
        seconds: How long that took.
    """

    directory: str
    name: StepName | None
    outcome: CheckOutcome
    problems: tuple[HoldfastError, ...]
    read_bytes: int
    seconds: float


def judge_step(
    storage: Storage,
    directory: str,
    name: StepName | None,
    label: str = "reading",
    *,
    beside: Storage | None = None,
    checked: Checked | None = None,
) -> CheckVerdict:
    """**Blocks.** Reads every byte of one checkpoint, with a bar on the error stream if that is a terminal.

    Args:
        storage: Where it lies.
        directory: Its directory; empty for the root.
        name: Which checkpoint it should be; None where its directory may have any name.
        label: What the bar says.
        beside: Where the steps lie that it refers to; None if that is `storage` too, or not known.
        checked: What was read of other steps, and is not read again.

    Raises:
        StorageError: If not even the directory can be looked at.
    """
    begun_at = time.monotonic()
    read_bytes = 0
    problems: list[HoldfastError] = []
    outcome = CheckOutcome.WHOLE
    checked = checked or Checked()
    try:
        opened = open_step(storage, directory, name)
        name = opened.name
        with reading_bar(sys.stderr, label, count_unread(opened, checked)) as advance:

            def count(just_read_bytes: int) -> None:
                # Called from several threads; should two of them collide, a figure for people is a little too small.
                nonlocal read_bytes
                read_bytes += just_read_bytes
                advance(just_read_bytes)

            problems.extend(
                verify_data(storage, opened, threads=_THREADS, progress=count, beside=beside, checked=checked)
            )
    except (DamageError, StorageError) as error:
        problems.append(error)
    if problems:
        is_failure = isinstance(problems[-1], StorageError)
        damaged = CheckOutcome.RESTORABLE if spares_restore(problems) else CheckOutcome.DAMAGED
        outcome = CheckOutcome.UNREADABLE if is_failure else damaged
        # A job that runs removes old steps, manifest first: what is missing then was not damaged.
        if directory and name not in read_catalog(storage).committed:
            outcome = CheckOutcome.REMOVED
    return CheckVerdict(directory, name, outcome, tuple(problems), read_bytes, time.monotonic() - begun_at)


@contextmanager
def reading_bar(stream: TextIO, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows how far reading has come while the body runs, if the stream is a terminal; gone afterwards.

    Args:
        stream: Where to show it.
        label: What is being read.
        total_bytes: How much there is to read.

    Yields:
        What is to be called, from any thread, with the number of bytes that were just read.
    """
    if not stream.isatty():
        yield lambda size_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.theme import Theme

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(complete_style="cyan", finished_style="cyan"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    quiet = Theme({"progress.download": "none", "progress.data.speed": "none", "progress.remaining": "dim"})
    with Progress(*columns, console=Console(file=stream, theme=quiet), transient=True) as progress:
        task = progress.add_task(label, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)
