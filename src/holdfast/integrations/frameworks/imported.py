"""The first start of a framework's Trainer from a checkpoint that `holdfast import` has made of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError, NotFoundError, UsageError
from holdfast.events import Warned
from holdfast.format.names import IMPORTED, IMPORTED_FROM
from holdfast.storage import Storage, open_storage
from holdfast.training.run import Run


class ImportedStart(msgspec.Struct, frozen=True):
    """An imported checkpoint from which no job has saved yet.

    Attributes:
        step: The step.
        source: The name of the file or folder.
        objects: The names of its objects.
        progress: The progress that the framework has stored; None if the source has none of that framework.
    """

    step: int
    source: str
    objects: frozenset[str]
    progress: Any

    def pick(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """**Pure.** Returns the objects that the checkpoint has; it also names those that the program lacks."""
        return {name: obj for name, obj in objects.items() if name in self.objects}

    def add_rest(self, run: Run, objects: Mapping[str, Any]) -> None:
        """Adds the other objects to a run that has restored, so that its saves have them."""
        rest = {name: obj for name, obj in objects.items() if name not in self.objects}
        for name, obj in rest.items():
            run.checkpoint[name] = obj
        text = f"{self.source} was imported: it has no {', '.join(rest)}; these begin as the program made them"
        run.manager.emit(Warned(text=text))


def find_import(
    directory: str | os.PathLike[str] | Storage, options: Mapping[str, Any], format_name: str
) -> ImportedStart | None:
    """**Blocks.** Returns the newest checkpoint of a run if it was imported; None for any other.

    Raises:
        UsageError: If it has a step, but no progress of that framework.
    """
    storage = open_storage(directory)
    name = None if options.get("begin_anew") else max(StoredRun(storage).look().living, default=None)
    try:
        metadata = {} if name is None else StoredRun(storage).step(name).manifest().metadata
    except (DamageError, NotFoundError):
        return None  # The restore says so.
    kept = metadata.get(IMPORTED)
    if name is None or not isinstance(kept, dict) or not isinstance(kept.get("objects"), list):
        return None
    progress = kept.get("progress") if kept.get("format") == format_name else None
    if not progress and name.step:
        raise UsageError(
            f"{metadata.get(IMPORTED_FROM)} was imported at step {name.step}, without the progress of such a Trainer",
            hint="To train from its weights, import it with --step 0 --only model.",
        )
    return ImportedStart(name.step, str(metadata.get(IMPORTED_FROM)), frozenset(kept["objects"]), progress)
