"""Metrics that were reported after a step's save had begun: records beside its manifest."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.errors import DamageError, NotFoundError
from holdfast.format.digests import unseal
from holdfast.format.names import join, metrics_name
from holdfast.format.records import MAX_GENERATION_BYTES, MAX_LATE_METRICS, LateMetrics, Manifest
from holdfast.storage.protocol import Storage


def add_late_metrics(storage: Storage, directory: str, manifest: Manifest) -> Manifest:
    """**Blocks.** Returns a step's manifest with its late metrics; records that are damaged, or another's, are ignored.

    Raises:
        StorageError: If one cannot be read.
    """
    metrics = manifest.metrics
    for number in range(MAX_LATE_METRICS):
        path = join(directory, metrics_name(number))
        try:
            late = unseal(LateMetrics, storage.read(path, MAX_GENERATION_BYTES), path=path)
        except NotFoundError:
            break
        except DamageError:
            continue
        if late.token == manifest.token:
            metrics = {**metrics, **late.metrics}
    return replace(manifest, metrics=metrics)
