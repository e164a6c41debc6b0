"""The step that text such as `runs/gpt@best:val_loss` names: a number, the newest one, or the best of a metric."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeAlias

from holdfast.catalog.stored_run import Catalog, StoredRun
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, UsageError
from holdfast.format.names import StepName
from holdfast.storage import Storage, open_storage
from holdfast.storage.checks import plain_path

Asked: TypeAlias = int | str | None
"""A step as it was asked for: its number, `latest`, `best`, or `best:`, `min:` or `max:` and a metric; or None."""

LATEST: Final = "latest"
EXAMPLES: Final = "@500, @latest, @best, @best:val_loss, @min:val_loss or @max:accuracy"
_PLACE: Final = re.compile(r"(.+?)@(\d{1,16}|latest|best|(?:best|min|max):.+)", re.ASCII | re.DOTALL)


def split_place(place: str | os.PathLike[str] | Storage) -> tuple[Storage, str, Asked]:
    """**Blocks.** Returns the storage of a run, its location as a person would write it, and its step after the `@`.

    If a directory of that name exists, `@` included, it is used.

    Raises:
        UsageError: If the storage is of an unknown kind.
    """
    storage = open_storage(place)
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else ""
    found = _PLACE.fullmatch(text)
    if found is None or (storage.list("") if storage.location is None else os.path.lexists(storage.location)):
        return storage, plain_path(text) if text else storage.url, None
    return open_storage(found[1]), plain_path(found[1]), int(found[2]) if found[2].isdigit() else found[2]


def find_step(run: StoredRun, catalog: Catalog, asked: Asked) -> StepName:
    """**Blocks.** Returns the checkpoint that was asked for, the newest of the current lineage by default.

    The best one is that of the current lineage, by the mode of the job's `Best`; of equal values the newest.

    Raises:
        NoCheckpointError: If there is none; or none has the metric, and the error names those that exist.
        UsageError: If nothing says which metric, or whether a low or a high value of it is better.
    """
    if isinstance(asked, int):
        return catalog.find(asked, run.url)
    if asked in (None, LATEST) or not catalog.living:
        if catalog.newest is None:
            raise NoCheckpointError(
                f"{run.url} has no checkpoint", hint="`holdfast list --all` shows what it contains."
            )
        return catalog.newest
    kind, _, metric = str(asked).partition(":")
    measured = _read_metrics(run, catalog)
    names = sorted({name for metrics in measured.values() for name in metrics})
    modes = _find_modes(run, catalog) if kind == "best" else {metric: kind}
    if not metric and len(modes) == 1:
        (metric,) = modes
    if metric and metric not in names:
        raise NoCheckpointError(
            f"no checkpoint of {run.url} has the metric {metric!r}",
            hint=f"The metrics are: {', '.join(names)}." if names else "No metric was reported.",
        )
    if metric not in modes:
        what = (
            f"whether a low or a high {metric} is better" if metric else "one metric that says which step is the best"
        )
        example = metric or next(iter(names), "val_loss")
        known = [f"@best:{mode}" for mode in modes if not metric] or [f"@min:{example}", f"@max:{example}"]
        later = f" A job with keep=holdfast.Best({metric!r}) records it." if metric else ""
        raise UsageError(f"{run.url} does not record {what}", hint=f"Write {' or '.join(known)}.{later}")
    sign = -1.0 if modes[metric] == "min" else 1.0
    return max((sign * metrics[metric], name) for name, metrics in measured.items() if metric in metrics)[1]


def _read_metrics(run: StoredRun, catalog: Catalog) -> dict[StepName, Mapping[str, float]]:
    """**Blocks.** Returns the metrics of the current lineage, without steps whose manifest cannot be read."""
    measured: dict[StepName, Mapping[str, float]] = {}
    for name in catalog.living:
        with suppress(NotFoundError, DamageError):
            measured[name] = run.step(name).manifest().metrics
    return measured


def _find_modes(run: StoredRun, catalog: Catalog) -> Mapping[str, str]:
    """**Blocks.** Returns the mode of each metric by which the newest job with a `Best` has kept its checkpoints."""
    generations = sorted({name.generation for name in catalog.living}, reverse=True)
    openings = filter(None, map(run.try_opening, generations))
    return next((opening.best for opening in openings if opening.best), {})
