"""Which part of a checkpoint to restore, by names and patterns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from holdfast.errors import UsageError


class Selection:
    """A predicate on leaf names that notes which of its patterns ever matched."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        self._matched: set[str] = set()

    def __call__(self, name: str) -> bool:
        """True if the leaf, or the object that it belongs to, was asked for."""
        matching = [pattern for pattern in self._patterns if _matches(name, pattern)]
        self._matched.update(matching)
        return bool(matching)

    def concerns(self, name: str) -> bool:
        """Whether something of the object of that name may be asked for."""
        return any(set(pattern) & set("*?[") or pattern.partition("/")[0] == name for pattern in self._patterns)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The patterns that have matched nothing so far."""
        return tuple(pattern for pattern in self._patterns if pattern not in self._matched)


def make_selection(only: str | Iterable[str] | None) -> Selection | None:
    """**Pure.** The predicate for names of objects, names of leaves, and patterns with `*`, `?` and `[...]`.

    Raises:
        UsageError: If it names nothing.
    """
    if only is None:
        return None
    patterns = (only,) if isinstance(only, str) else tuple(only)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"only={only!r} names nothing", hint='Give names such as "model" or "model/layers.0.*".')
    return Selection(patterns)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatchcase(name, pattern)
