"""The runs below a directory, each in a line: its newest checkpoint, how many it has, and what they take."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from holdfast.catalog import Catalog, find_lost, read_catalog, read_opening
from holdfast.cli.survey import Found, State, look_at_step, time_fields
from holdfast.cli.target import belongs_to_run
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.records import Opening
from holdfast.storage import LocalStorage, Storage

RunState: TypeAlias = Literal["running", "ok", "damaged", "lost", "empty", "unreadable"]

MAX_DEPTH: Final = 3
"""How many levels below the directory are searched, as in `runs/experiment/model/seed-1`."""

_MOST_DIRECTORIES: Final = 20_000
_MOST_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

    Attributes:
        location: Its directory, as a person would write it.
        url: The same in full.
        state: `running` if the process that opened the newest generation is alive on this machine; `damaged` if the
            newest checkpoint, or the record of a generation, can be seen to be; `lost` if manifests are gone; `empty`
            if it has no checkpoint; `unreadable` if its directory cannot be read; else `ok`.
        newest: The newest checkpoint of the living line, or None.
        steps: How many checkpoints are on the living line.
        size_bytes: What all steps take, unfinished ones and those off the living line included.
        opening: Who opened the newest generation; None if that is not known.
        problem: Why it is `unreadable`; else empty.
    """

    location: str
    url: str
    state: RunState
    newest: Found | None = None
    steps: int = 0
    size_bytes: int = 0
    opening: Opening | None = None
    problem: str = ""

    def fields(self) -> dict[str, Any]:
        """**Pure.** The run in a JSON document."""
        manifest = self.newest.manifest if self.newest else None
        committed = time_fields("committed_at", manifest.committed_at_unix_seconds) if manifest else {}
        return {
            "run": self.url,
            "state": self.state,
            "newest_step": self.newest.name.step if self.newest and self.newest.name else None,
            **(committed or dict.fromkeys(("committed_at_unix_seconds", "committed_at"))),
            "steps": self.steps,
            "size_bytes": self.size_bytes,
            "workers": manifest.world_size if manifest else None,
            "metrics": manifest.metrics if manifest else None,
            "host": self.opening.host if self.opening else None,
            "process": self.opening.process if self.opening else None,
            "problem": self.problem or None,
        }


def find_runs(directory: Path) -> Iterator[Path]:
    """**Blocks.** The directories of runs at or below a directory, in the order of their names.

    Hidden directories are passed over, and so is what lies within a run.
    """
    left = _MOST_DIRECTORIES

    def search(place: Path, depth: int) -> Iterator[Path]:
        nonlocal left
        left -= 1
        try:
            if any(belongs_to_run(entry) for entry in LocalStorage(place).list("")):
                yield place
                return
            with os.scandir(place) as entries:
                inner = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except (StorageError, OSError):
            return  # One that may not be read hides no other.
        for name in inner if depth < MAX_DEPTH else ():
            if left > 0:
                yield from search(place / name, depth + 1)

    yield from search(directory, 0)


def summarize_run(location: str, storage: Storage) -> RunSummary:
    """**Blocks.** Looks at a run: the names of its steps, the sizes of files, and the newest manifest alone."""
    try:
        for _ in range(_MOST_LOOKS):
            catalog = read_catalog(storage)
            newest = catalog.newest
            looked = look_at_step(storage, newest.directory, newest, State.LIVING) if newest else None
            if newest is None or looked is not None:
                break  # Else a job that goes on has removed it just now.
        directories = [name.directory for name in (*catalog.committed, *catalog.unfinished, *catalog.lost)]
        size_bytes = sum(
            entry.size_bytes for directory in (*directories, *catalog.trash) for entry in storage.list(directory)
        )
        opening = None
        if catalog.generation:
            with suppress(HoldfastError):
                opening = read_opening(storage, catalog.generation)
        return RunSummary(
            location,
            storage.url,
            _find_state(storage, catalog, looked, opening),
            looked,
            len(catalog.living),
            size_bytes + (catalog.spare_bytes or 0),
            opening,
        )
    except HoldfastError as error:
        return RunSummary(location, storage.url, "unreadable", problem=error.message)


def _find_state(storage: Storage, catalog: Catalog, newest: Found | None, opening: Opening | None) -> RunState:
    if catalog.faults or (newest is not None and newest.damages):
        return "damaged"
    if catalog.lost or catalog.unfinished:
        lost = find_lost(storage, catalog)
        if lost and (catalog.newest is None or lost[-1] > catalog.newest):
            return "lost"
    if opening is not None and is_alive(opening):
        return "running"
    return "ok" if newest is not None else "empty"


def is_alive(opening: Opening) -> bool:
    """Whether the process that opened a generation is alive on this machine: a younger one may have its number."""
    if opening.host != socket.gethostname():
        return False
    with suppress(OSError, ValueError, IndexError):
        # The name of the program stands in brackets, and may hold anything.
        fields = Path(f"/proc/{opening.process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        booted_at = next(
            float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")
        )
        started_at = booted_at + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # A zombie has ended; the time of boot is given in whole seconds.
        return fields[0] != "Z" and started_at <= opening.opened_at_unix_seconds + 2
    return False
