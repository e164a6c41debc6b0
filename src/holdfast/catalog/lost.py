"""Steps that were committed and whose manifests are gone, by hand say: their data is kept, and they are named."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from holdfast.catalog.listing import Catalog, is_committed, list_names, make_lost_error, read_catalog
from holdfast.errors import DamageError, FormatError, NotFoundError
from holdfast.events.kinds import Committed, Retained
from holdfast.events.sinks import JOURNAL_NAMES, decode_event
from holdfast.format.names import StepName, is_part
from holdfast.format.records import choose_living
from holdfast.storage.protocol import Storage

_MOST_JOURNAL_BYTES: Final = 64 << 20


def find_lost(storage: Storage, catalog: Catalog) -> tuple[StepName, ...]:
    """**Blocks.** Returns the committed steps of the current lineage that have lost their manifests, in order of step.

    The file `committed` in a step's directory proves that it was committed. Older runs have no such file. There, a step
    newer than all others with a manifest was committed if a generation began from it, or if the run's journal of events
    says so: retention never removes the newest one.

    Raises:
        StorageError: If the storage cannot be read.
    """
    if not (catalog.lost or catalog.unfinished):
        return ()
    lost = set(choose_living((*catalog.committed, *catalog.lost), catalog.bases)) & set(catalog.lost)
    newest_step = -1 if catalog.newest is None else catalog.newest.step
    line = choose_living((*catalog.committed, *catalog.unfinished), catalog.bases)
    newer = [name for name in line if name.step > newest_step and name in catalog.unfinished]
    if newer:
        known = {base.name for base in catalog.bases.values()}
        journal = _read_committed(storage)
        lost.update(
            name
            for name in newer
            if (name in known or (name.step, name.generation) in journal)
            and any(map(is_part, list_names(storage, name)))
            and not is_committed(storage, name)
        )
    return tuple(sorted(lost))


def find_journaled(storage: Storage, catalog: Catalog) -> tuple[StepName, ...]:
    """**Blocks.** Returns unfinished steps that the run's journal of events lists as committed, in order of step.

    Most have lost their manifest and the file `committed` by hand. An interrupted removal leaves the same, so jobs
    remove such steps, and the listing shows a person what they are.

    Raises:
        StorageError: If the storage cannot be read.
    """
    there = {(name.step, name.generation) for name in (*catalog.committed, *catalog.lost)}
    unfinished = [name for name in catalog.unfinished if (name.step, name.generation) not in there]
    journal = _read_committed(storage) if unfinished else ()
    return tuple(
        name
        for name in sorted(unfinished)
        if (name.step, name.generation) in journal and any(map(is_part, list_names(storage, name)))
    )


def check_nothing_lost(storage: Storage) -> None:
    """**Blocks.** Checks that a run without any checkpoint to resume from has none because none was saved.

    Raises:
        NoWholeCheckpointError: If checkpoints were committed, but have lost their manifests.
        StorageError: If the storage cannot be read.
    """
    catalog = read_catalog(storage)
    lost = () if catalog.living else find_lost(storage, catalog)
    if lost:
        raise make_lost_error(lost, storage.url)


def _read_committed(storage: Storage) -> set[tuple[int, int]]:
    """Returns the steps and generations in the run's journal, without those that were removed later.

    Unreadable parts of it are ignored.
    """
    told: set[tuple[int, int]] = set()
    for name in JOURNAL_NAMES:
        with suppress(NotFoundError, DamageError):
            for line in storage.read(name, _MOST_JOURNAL_BYTES).splitlines():
                if b'"committed"' not in line and b'"retained"' not in line:
                    continue  # To decode them all would take long.
                with suppress(FormatError):
                    event = decode_event(line)
                    if isinstance(event, Committed):
                        told.add((event.step, event.generation))
                    elif isinstance(event, Retained):
                        told = {one for one in told if one[0] not in event.removed}
    return told
