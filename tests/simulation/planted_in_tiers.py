"""Bugs of runs in tiers, planted one at a time: the simulation must find every one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest.mock import patch

import holdfast.storage.tiers
from holdfast.format.names import StepName
from holdfast.restore.copying import RunCopier
from holdfast.storage.tiers import Tiers
from holdfast.tiering.copier import TierCopier
from simulation.planted import Bug


def _plain_number() -> AbstractContextManager[object]:
    def find_least(self: Any) -> int:
        real(self)
        return 0

    real = Tiers.find_least
    return patch.object(Tiers, "find_least", find_least)


def _base_before_opening() -> AbstractContextManager[object]:
    def publish(self: Any, path: str, data: bytes) -> bool:
        is_alone = self._is_alone
        if path.endswith(".base.json"):
            self._is_alone = False
        try:
            return real(self, path, data)
        finally:
            self._is_alone = is_alone

    real = Tiers.publish
    return patch.object(Tiers, "publish", publish)


def _manifest_first() -> AbstractContextManager[object]:
    def copy_files(self: Any, opened: Any, progress: Any) -> None:
        name: StepName = opened.name
        data = self._source.storage.read(name.manifest_path, 1 << 20)
        self._goal.storage.publish(name.manifest_path, data)
        real(self, opened, progress)

    real = RunCopier._copy_files
    return patch.object(RunCopier, "_copy_files", copy_files)


def _never_passed() -> AbstractContextManager[object]:
    def note_generation(self: Any, generation: int, token: str) -> None:
        real(self, generation, token)
        for hop in self._hops:
            hop.owner, hop.cleaner.generation = None, 1 << 60

    real = TierCopier.note_generation
    return patch.object(TierCopier, "note_generation", note_generation)


def _copies_on() -> AbstractContextManager[object]:
    def note_generation(self: Any, generation: int, token: str) -> None:
        real(self, generation, token)
        for hop in self._hops:
            hop.owner = None

    real = TierCopier.note_generation
    return patch.object(TierCopier, "note_generation", note_generation)


def _returning(owner: object, name: str, result: object) -> AbstractContextManager[object]:
    return patch.object(owner, name, lambda *arguments, **options: result)


TIER_BUGS: Final[Mapping[str, Bug]] = {
    "parted": Bug(
        "two lines that have parted are taken for one",
        63,
        lambda: _returning(holdfast.storage.tiers, "find_parted", None),
    ),
    "plain-number": Bug(
        "a generation that is opened without the farthest tier takes the next number", 0, _plain_number
    ),
    "empty": Bug(
        "without the farthest tier a job begins with what the nearest one has",
        51,
        lambda: _returning(Tiers, "_has_newest", True),
    ),
    "base-early": Bug(
        "the base of a generation comes to a tier that does not know its opening", 795, _base_before_opening
    ),
    "copy-unchecked": Bug(
        "a copy does not check what it reads",
        84,
        lambda: patch("holdfast.restore.copying.find_damages", lambda *arguments: iter(())),
    ),
    "copy-manifest-first": Bug("a copy publishes the manifest before the data", 0, _manifest_first),
    "copy-fenced": Bug(
        "a job that was passed goes on to remove what its policy does not keep in the farther tier", 86, _never_passed
    ),
    "copy-passed": Bug("a job that was passed goes on to copy into the farther tier", 415, _copies_on),
}
