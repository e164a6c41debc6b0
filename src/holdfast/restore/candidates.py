"""Chooses which checkpoints to try, in which order, and which part of them to restore. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from holdfast.catalog import Catalog, make_lost_error
from holdfast.errors import NoWholeCheckpointError, UsageError
from holdfast.format.names import StepName


def choose_candidates(catalog: Catalog, lost: Collection[StepName], step: int | None, url: str) -> tuple[StepName, ...]:
    """**Pure.** Returns the checkpoints to try, the best first; for a given step, only that one.

    Steps of the current lineage that have lost their manifests are among them, and are skipped like any other damage;
    `NoWholeCheckpointError` is raised if nothing else is there to resume from, or only another lineage.
    """
    if step is not None:
        if asked := [name for name in lost if name.step == step]:
            raise make_lost_error(asked, url)
        return (catalog.find(step),)
    if lost and not catalog.living:
        raise make_lost_error(sorted(lost), url)
    base = catalog.bases[max(catalog.bases)].name if catalog.bases else None
    if base is not None and catalog.committed and not catalog.living:
        raise NoWholeCheckpointError(
            f"{url}: step {base.step}, from which the newest job began, is gone; older lineages have "
            f"{len(catalog.committed)} checkpoints, which `holdfast list` names",
            damages=(),
            hint=f"Continue from one: `holdfast rollback {url}@{catalog.committed[-1].step}`; or start over: "
            "begin_anew=True.",
        )
    return tuple(sorted((*catalog.living, *lost), reverse=True))


class Selection:
    """A predicate on leaf names that notes which of its patterns ever matched."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        self._matched: set[str] = set()

    def __call__(self, name: str) -> bool:
        """Returns True if the leaf, or its object, was requested."""
        matching = [
            pattern
            for pattern in self._patterns
            if name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatchcase(name, pattern)
        ]
        self._matched.update(matching)
        return bool(matching)

    def concerns(self, name: str) -> bool:
        """Returns True if a part of the object of that name may be requested."""
        return any(set(pattern) & set("*?[") or pattern.partition("/")[0] == name for pattern in self._patterns)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The patterns that have matched nothing so far."""
        return tuple(pattern for pattern in self._patterns if pattern not in self._matched)


def make_selection(only: str | Iterable[str] | None) -> Selection | None:
    """**Pure.** Returns the predicate for names of objects and of leaves, and patterns; `UsageError` without any."""
    if only is None:
        return None
    patterns = (only,) if isinstance(only, str) else tuple(only)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"only={only!r} contains no name", hint='Pass names such as "model" or "model/layers.0.*".')
    return Selection(patterns)
