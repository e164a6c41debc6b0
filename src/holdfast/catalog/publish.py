"""Publishes the manifest of a step: the moment from which it exists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from holdfast.catalog.stored_run import StoredRun
from holdfast.catalog.stored_step import remove_own_files
from holdfast.errors import StorageError
from holdfast.format.digests import seal
from holdfast.format.names import MANIFEST_NAME, StepName
from holdfast.format.records import (
    REFERENCES,
    SHARDS,
    Manifest,
    Nonfinite,
    Reference,
    WorkerRecord,
    choose_exempt,
)


class Receipts(msgspec.Struct, frozen=True):
    """Proof that all workers' bytes of one step are durable.

    Attributes:
        workers: What each worker wrote, in order of rank.
        references: The earlier steps whose bytes were not written again, in order.
        features: The features that a reader must know to read the indexes.
        values: The digest of the values of one worker's loose leaves; see `save/joint/coverage.py`.
        nonfinite: The leaves that are not finite, of those that training computes, with True for one that has nan; None
            if that is not known.
        nonfinite_count: How many there are, if they are not all named.
        blocked_seconds: Of one worker, how long its training was blocked.
        background_seconds: Of one worker, how long the rest took until its bytes were durable.
    """

    workers: tuple[WorkerRecord, ...]
    references: tuple[Reference, ...] = ()
    features: tuple[str, ...] = ()
    values: str = ""
    nonfinite: Mapping[str, bool] | None = None
    nonfinite_count: int = 0
    blocked_seconds: float = 0.0
    background_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """The bytes that were written, including indexes."""
        return sum(worker.data_bytes + worker.index_bytes for worker in self.workers)

    @property
    def referred_bytes(self) -> int:
        """The bytes of arrays in the data files of earlier steps."""
        return sum(reference.size_bytes for reference in self.references)


_FINITE: Final = Nonfinite()
_NAMED_LIBRARIES: Final = ("torch", "numpy", "jax", "keras")


def make_manifest(
    receipts: Receipts,
    name: StepName,
    *,
    metrics: Mapping[str, float],
    metadata: Mapping[str, Any],
    exempt: Collection[str] | None = None,
) -> Manifest:
    """Returns the manifest of a step whose bytes are known.

    The leaves that are not counted are `exempt`; None if this is the run's first checkpoint, which says it.
    """
    found = receipts.nonfinite
    nonfinite = None if found is None else _FINITE
    if found or exempt:
        exempt = choose_exempt(found or {}, name.step) if exempt is None else exempt
        nonfinite = Nonfinite.of(found or (), receipts.nonfinite_count, exempt)
    features = set(receipts.features)
    features |= {REFERENCES} if receipts.references else set()
    features |= {SHARDS} if len(receipts.workers) > 1 else set()
    # Of holdfast, of Python, and of those libraries that this process has in use.
    used = ("holdfast", *(library for library in _NAMED_LIBRARIES if library in sys.modules))
    return Manifest(
        step=name.step,
        generation=name.generation,
        attempt=name.attempt,
        token=os.urandom(16).hex(),
        committed_at_unix_seconds=time.time(),
        workers=receipts.workers,
        metrics=dict(metrics),
        metadata=dict(metadata),
        versions={"python": sys.version.split()[0], **{library: _version_of(library) for library in used}},
        features=tuple(sorted(features)),
        references=receipts.references,
        nonfinite=nonfinite,
    )


def commit(run: StoredRun, manifest: Manifest, *, token: str) -> None:
    """**Blocks.** Publishes the manifest of a step whose bytes are durable, and checks that it counts.

    A crash before the publication leaves debris; after it, a whole checkpoint that has not been reported yet. `token`
    is that of the generation's opener.

    Raises:
        FencedError: If a newer generation was opened: the step may exist, but must not be called committed, because the
            newer job may not have seen it when it began.
        StorageError: If the storage fails, or the run or a step that this one refers to was removed meanwhile.
    """
    name = manifest.name
    if not run.storage.publish(name.manifest_path, seal(manifest)):
        raise StorageError(
            f"{run.url}: {name.directory} has a manifest that this save did not write",
            path=name.manifest_path,
            hint="Two jobs act as the same job; give each its own directory.",
        )
    run.check_owned(name.generation, token)
    if manifest.references:
        check_references(run, manifest)


def check_references(run: StoredRun, manifest: Manifest) -> None:
    """**Blocks.** Checks that the steps to which a step refers are still committed; else takes it back.

    A crash in here leaves a step that no caller knows of, and that a restore may find damaged and skip.
    """
    for reference in manifest.references:
        if MANIFEST_NAME not in run.step(reference.name).list_names():
            run.step(manifest.name).withdraw()
            remove_own_files(run.storage, manifest.name.directory)
            raise StorageError(
                f"{run.url}: {reference.name.directory} was removed while step {manifest.step}, which refers "
                "to it, was being saved",
                path=reference.name.directory,
                hint="The next save writes everything that was stored there.",
            )


@cache
def _version_of(library: str) -> str:
    if known := getattr(sys.modules.get(library), "__version__", None):
        return str(known)
    # Imported here: it brings the parsers of e-mail along, which few saves need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
