"""The manifest: the record whose appearance commits a step. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import is_digest
from holdfast.format.envelope import seal, unseal
from holdfast.format.names import MAX_WORKERS, StepName

KIND: Final = "manifest"
MAX_MANIFEST_BYTES: Final = 256 << 20


class WorkerRecord(msgspec.Struct, frozen=True):
    """What one worker wrote, as the manifest vouches for it.

    Attributes:
        index_bytes: The size of its index.
        index_digest: The digest of its whole index file.
        data_bytes: The size of its data file.
    """

    index_bytes: int
    index_digest: str
    data_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """One committed step.

    Attributes:
        step: The step: how many were complete.
        generation: The generation that saved it.
        attempt: Which attempt of that generation.
        token: Random text that tells this publication from any other.
        committed_at_unix_seconds: The writer's clock; for people and for retention by age, never for order.
        workers: What each worker wrote, in order of rank.
        metrics: Figures given with the save, such as `val_loss`; nan and the infinities are left out.
        metadata: What else the user gave with the save: any JSON.
        versions: Which software wrote it.
        features: What a reader has to understand beyond version 1 to read the step rightly.
    """

    step: int
    generation: int
    attempt: int
    token: str
    committed_at_unix_seconds: float
    workers: tuple[WorkerRecord, ...]
    metrics: dict[str, float]
    metadata: dict[str, Any]
    versions: dict[str, str]
    features: tuple[str, ...] = ()

    @property
    def name(self) -> StepName:
        """Which checkpoint this is."""
        return StepName(self.step, self.generation, self.attempt)

    @property
    def world_size(self) -> int:
        """How many workers saved it."""
        return len(self.workers)

    @property
    def data_bytes(self) -> int:
        """The sizes of all data files together."""
        return sum(worker.data_bytes for worker in self.workers)


def encode_manifest(manifest: Manifest) -> bytes:
    """**Pure.** The bytes of a manifest."""
    return seal(KIND, manifest)


def decode_manifest(data: bytes, *, path: str, expected: StepName | None) -> Manifest:
    """**Pure.** The manifest that the bytes hold, checked for sense.

    Args:
        data: The bytes of the file.
        path: Where they came from, for errors.
        expected: The checkpoint that the directory's name promises; None where the directory was renamed by hand.

    Raises:
        FormatError: If it is damaged, needs a newer reader, or is another step's.
    """
    step = expected.step if expected else None
    manifest = unseal(KIND, Manifest, data, path=path, step=step)
    if manifest.features:
        raise FormatError(
            f"{path}: needs a reader that knows {', '.join(map(repr, manifest.features))}",
            path=path,
            step=step,
            hint="Read it with the version of holdfast that wrote it, or a newer one.",
        )
    problem = _find_problem(manifest, expected)
    if problem:
        raise FormatError(f"{path}: {problem}", path=path, step=step)
    return manifest


def _find_problem(manifest: Manifest, expected: StepName | None) -> str:
    if expected is not None and manifest.name != expected:
        return f"is the manifest of {manifest.name.directory}, not of this directory"
    if not 1 <= len(manifest.workers) <= MAX_WORKERS:
        return f"{len(manifest.workers)} workers cannot be"
    for rank, worker in enumerate(manifest.workers):
        if worker.index_bytes < 0 or worker.data_bytes < 0 or not is_digest(worker.index_digest):
            return f"the record of worker {rank} is malformed"
    if not math.isfinite(manifest.committed_at_unix_seconds):
        return "the time of the commit is not a number"
    return ""
