"""The steps that a run has committed, and that all of them are whole."""

from __future__ import annotations

from pathlib import Path

from holdfast.catalog import StoredRun
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import Storage, open_storage


def steps_of(location: Path | Storage) -> list[int]:
    """The steps of a run's current lineage."""
    return [name.step for name in StoredRun(open_storage(location)).look().living]


def check_whole(location: Path | Storage) -> list[int]:
    """Reads every byte of every checkpoint of a run; gives the steps of its current lineage."""
    storage = open_storage(location)
    catalog = StoredRun(storage).look()
    for name in catalog.committed:
        assert verify_data(storage, open_step(storage, name.directory, name)) == [], name
    return [name.step for name in catalog.living]


def remove_manifests(place: Path, steps: str = "*") -> None:
    """Removes the manifests of these steps by hand, or of all; their data stays."""
    for manifest in place.glob(f"step-{steps}/manifest.json"):
        manifest.unlink()
