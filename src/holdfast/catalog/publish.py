"""Publishes the manifest of a step: the moment from which it exists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from holdfast.catalog import check_fence, check_in_place
from holdfast.catalog.deletion import remove_own_files, withdraw
from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError
from holdfast.format.digests import seal
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, join
from holdfast.format.records import (
    MAX_MANIFEST_BYTES,
    REFERENCES,
    SHARDS,
    Manifest,
    Reference,
    WorkerRecord,
    decode_manifest,
)
from holdfast.storage.protocol import Storage


class Receipts(msgspec.Struct, frozen=True):
    """Proof that all workers' bytes of one step are durable.

    Attributes:
        workers: What each worker wrote, in order of rank.
        references: The earlier steps whose bytes were not written again, in order.
        features: The features that a reader must know to read the indexes.
        values: The digest of the values of one worker's loose leaves; see `save/joint/coverage.py`.
    """

    workers: tuple[WorkerRecord, ...]
    references: tuple[Reference, ...] = ()
    features: tuple[str, ...] = ()
    values: str = ""

    @property
    def size_bytes(self) -> int:
        """The bytes that were written, including indexes."""
        return sum(worker.data_bytes + worker.index_bytes for worker in self.workers)

    @property
    def referred_bytes(self) -> int:
        """The bytes of arrays in the data files of earlier steps."""
        return sum(reference.size_bytes for reference in self.references)


_NAMED_LIBRARIES: Final = ("torch", "numpy", "jax", "keras")


def commit(
    receipts: Receipts,
    storage: Storage,
    name: StepName,
    *,
    token: str,
    metrics: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> Manifest:
    """**Blocks.** Publishes the manifest of a step whose bytes are durable, and checks that it counts.

    A crash before the publication leaves debris; after it, a whole checkpoint that has not been reported yet. `token`
    is that of the generation's opener.

    Raises:
        FencedError: If a newer generation was opened: the step may exist, but must not be called committed, because the
            newer job may not have seen it when it began.
        StorageError: If the storage fails, or the run or a step that this one refers to was removed meanwhile.
    """
    features = set(receipts.features)
    features |= {REFERENCES} if receipts.references else set()
    features |= {SHARDS} if len(receipts.workers) > 1 else set()
    manifest = Manifest(
        step=name.step,
        generation=name.generation,
        attempt=name.attempt,
        token=os.urandom(16).hex(),
        committed_at_unix_seconds=time.time(),
        workers=receipts.workers,
        metrics=dict(metrics),
        metadata=dict(metadata),
        versions=_name_versions(),
        features=tuple(sorted(features)),
        references=receipts.references,
    )
    if not storage.publish(name.manifest_path, seal(manifest)):
        raise StorageError(
            f"{storage.url}: {name.directory} has a manifest that this save did not write",
            path=name.manifest_path,
            hint="Two jobs act as the same job; give each its own directory.",
        )
    check_fence(storage, name.generation)
    check_in_place(storage, name.generation, token)
    if manifest.references:
        _check_references(storage, manifest)
    return manifest


def renew_copies(storage: Storage, names: Iterable[StepName]) -> list[HoldfastError]:
    """**Blocks.** Writes copies of the manifests of committed steps that are missing or damaged; returns problems."""
    problems: list[HoldfastError] = []
    for name in names:
        try:
            if not has_copy(storage, name.directory):
                data = storage.read(name.manifest_path, MAX_MANIFEST_BYTES)
                decode_manifest(data, path=name.manifest_path, expected=name, is_read=False)
                storage.remove(name.committed_path)
                storage.write(name.committed_path, data)
        except HoldfastError as error:
            problems.append(error)
    return problems


def has_copy(storage: Storage, directory: str) -> bool:
    """**Blocks.** Returns True if a committed step has a whole copy of its manifest, or its manifest is gone."""
    try:
        manifest = storage.read(join(directory, MANIFEST_NAME), MAX_MANIFEST_BYTES)
        return storage.read(join(directory, COMMITTED_NAME), MAX_MANIFEST_BYTES) == manifest
    except NotFoundError as error:
        return error.path.endswith(MANIFEST_NAME)
    except DamageError:
        return False


def _check_references(storage: Storage, manifest: Manifest) -> None:
    """**Blocks.** Checks that the steps to which a step refers are still committed; else takes it back.

    A crash in here leaves a step that no caller knows of, and that a restore may find damaged and skip.
    """
    for reference in manifest.references:
        if MANIFEST_NAME not in {entry.name for entry in storage.list(reference.name.directory)}:
            withdraw(storage, manifest.name)
            remove_own_files(storage, manifest.name.directory)
            raise StorageError(
                f"{storage.url}: {reference.name.directory} was removed while step {manifest.step}, which refers "
                "to it, was being saved",
                path=reference.name.directory,
                hint="The next save writes everything that was stored there.",
            )


def _name_versions() -> dict[str, str]:
    """Returns the versions of holdfast, of Python, and of those libraries that this process has in use."""
    used = ("holdfast", *(library for library in _NAMED_LIBRARIES if library in sys.modules))
    return {"python": sys.version.split()[0], **{library: _version_of(library) for library in used}}


@cache
def _version_of(library: str) -> str:
    if told := getattr(sys.modules.get(library), "__version__", None):
        return str(told)
    # Imported here: it brings the parsers of e-mail along, which few saves need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
