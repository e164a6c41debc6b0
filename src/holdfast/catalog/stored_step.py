"""One step of a run on its storage: its records, and whether it counts."""

from __future__ import annotations

from contextlib import suppress

from msgspec.structs import replace

from holdfast.errors import DamageError, NotFoundError, StorageError
from holdfast.format.digests import digest, unseal
from holdfast.format.index import MAX_INDEX_BYTES, Index
from holdfast.format.index_checks import decode_index, decode_object_names
from holdfast.format.names import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    StepName,
    index_name,
    is_own,
    is_own_file,
    is_part,
    join,
    metrics_name,
)
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_LATE_METRICS,
    MAX_MANIFEST_BYTES,
    LateMetrics,
    Manifest,
    decode_manifest,
)
from holdfast.storage.protocol import Storage


class StoredStep:
    """One step on its storage. Each method that blocks raises `StorageError` if the storage fails.

    Attributes:
        storage: The storage of the run.
        directory: The path of the step's directory; empty if the storage's root is that directory.
        name: The name that its manifest must have; None for any.
    """

    def __init__(self, storage: Storage, directory: str, name: StepName | None = None) -> None:
        self.storage = storage
        self.directory = directory
        self.name = name

    def list_names(self) -> set[str]:
        """**Blocks.** Returns the names in the directory."""
        return {entry.name for entry in self.storage.list(self.directory)}

    def has(self, file_name: str) -> bool:
        """**Blocks.** Returns True if a file of the step exists, whole or damaged."""
        try:
            self.storage.open_reader(join(self.directory, file_name)).close()
        except NotFoundError:
            return False
        except DamageError:
            return True
        return True

    def has_data(self) -> bool:
        """**Blocks.** Returns True if a worker's data or index is there."""
        return any(map(is_part, self.list_names()))

    def is_committed(self) -> bool:
        """**Blocks.** Returns True if the step has a manifest. Listing its directory would look at each file of each
        worker."""
        try:
            self.storage.open_reader(join(self.directory, MANIFEST_NAME)).close()
        except NotFoundError:
            return False
        except (DamageError, StorageError):  # A manifest exists; its reader reports any damage.
            return any(one.name == MANIFEST_NAME and not one.is_directory for one in self.storage.list(self.directory))
        return True

    def manifest(self) -> Manifest:
        """**Blocks.** Returns the manifest, with metrics that were reported after the save had begun.

        Raises:
            NotFoundError: If the step is not committed.
            DamageError: If the manifest is damaged or another step's.
        """
        manifest = self._decode_manifest(MANIFEST_NAME)
        metrics = manifest.metrics
        for number in range(MAX_LATE_METRICS):
            path = join(self.directory, metrics_name(number))
            try:
                late = unseal(LateMetrics, self.storage.read(path, MAX_GENERATION_BYTES), path=path)
            except NotFoundError:
                break
            except DamageError:
                continue
            if late.token == manifest.token:
                metrics = {**metrics, **late.metrics}
        return replace(manifest, metrics=metrics)

    def references(self) -> tuple[StepName, ...]:
        """**Blocks.** Returns the steps that this one needs; also if a newer holdfast has written it.

        If the manifest is gone, the copy of it is used.

        Raises:
            NotFoundError: If the step is not committed.
            DamageError: If its manifest is damaged or another step's.
        """
        manifest = self._decode_manifest(MANIFEST_NAME if self.has(MANIFEST_NAME) else COMMITTED_NAME, is_read=False)
        return tuple(reference.name for reference in manifest.references)

    def index(self, manifest: Manifest, rank: int) -> Index:
        """**Blocks.** Returns the index of one worker, checked against the step's manifest.

        Raises:
            NotFoundError: If it is missing.
            DamageError: If it is not the index that was written.
        """
        path, data = self._read_index(manifest, rank)
        index = decode_index(data, path=path, step=manifest.step)
        stands_for = (index.name, index.rank, index.world_size, index.data_bytes)
        if stands_for != (manifest.name, rank, manifest.world_size, manifest.workers[rank].data_bytes):
            raise DamageError(f"{path} belongs to another checkpoint or worker", step=manifest.step, path=path)
        return index

    def object_names(self) -> list[str]:
        """**Blocks.** Returns the names of all workers' objects, in their order, holdfast's own left out.

        What the indexes say of the objects and of arrays is neither decoded nor checked. Raises as `index` does.
        """
        manifest = self.manifest()
        names: dict[str, None] = {}
        for rank in range(manifest.world_size):
            path, data = self._read_index(manifest, rank)
            names |= dict.fromkeys(decode_object_names(data, path=path, step=manifest.step))
        return [name for name in names if not is_own(name)]

    def _read_index(self, manifest: Manifest, rank: int) -> tuple[str, bytes]:
        """**Blocks.** Returns the path and the bytes of an index, which are those that the manifest names."""
        worker, step = manifest.workers[rank], manifest.step
        path = join(self.directory, index_name(rank, manifest.world_size))
        if worker.index_bytes > MAX_INDEX_BYTES:
            raise DamageError(f"{path} should have {worker.index_bytes} bytes", step=step, path=path)
        data = self.storage.read(path, worker.index_bytes)
        if len(data) != worker.index_bytes or digest(data) != worker.index_digest:
            raise DamageError(f"{path} does not match the digest in the manifest", step=step, path=path)
        return path, data

    def has_copy(self) -> bool:
        """**Blocks.** Returns True if there is a whole copy of the manifest, or the manifest is gone."""
        try:
            manifest = self.storage.read(join(self.directory, MANIFEST_NAME), MAX_MANIFEST_BYTES)
            return self.storage.read(join(self.directory, COMMITTED_NAME), MAX_MANIFEST_BYTES) == manifest
        except NotFoundError as error:
            return error.path.endswith(MANIFEST_NAME)
        except DamageError:
            return False

    def renew_copy(self) -> None:
        """**Blocks.** Writes the copy of the manifest again, if that is missing or damaged.

        Raises:
            DamageError: If the manifest itself is damaged.
        """
        if self.has_copy():
            return
        data = self.storage.read(join(self.directory, MANIFEST_NAME), MAX_MANIFEST_BYTES)
        path = join(self.directory, COMMITTED_NAME)
        decode_manifest(data, path=join(self.directory, MANIFEST_NAME), expected=self.name, is_read=False)
        self.storage.delete([path])
        self.storage.write(path, data)

    def withdraw(self) -> None:
        """**Blocks.** Removes the manifest of a committed step. Its data stays: a save in progress may refer to it.

        After this, the caller checks again whether another step may have come to refer to it, and only then removes the
        data. A job that has committed a step checks again whether those that it refers to still have their manifests.
        So of two that do this at the same time, at least one sees the other.

        A crash after this leaves a directory without a manifest, which the next sweep removes.
        """
        # First: a step without a manifest that has this file is one that has lost it, and is kept.
        self.storage.delete([join(self.directory, COMMITTED_NAME)])
        self.storage.delete([join(self.directory, MANIFEST_NAME)])
        # The manifest must be gone for good before the data goes: the other order would leave half a checkpoint.
        with suppress(NotFoundError):  # Another process has removed it all, as `holdfast prune` may.
            self.storage.sync_directory(self.directory)

    def discard(self) -> bool:
        """**Blocks.** Removes the directory of a step that was never committed, or that a person gives up.

        It is moved aside first, so that a writer that is still alive finds its directory gone and fails, rather than
        publishing a manifest next to removed data. If foreign files keep the directory, it gets its name back, and the
        result is False.
        """
        if any(not is_own_file(name) for name in self.list_names()):
            return remove_own_files(self.storage, self.directory)
        try:
            aside = self.storage.retire(self.directory)
        except NotFoundError:
            return True  # Another process has removed it, as `holdfast prune` may.
        return remove_own_files(self.storage, aside)

    def _decode_manifest(self, file_name: str, *, is_read: bool = True) -> Manifest:
        path = join(self.directory, file_name)
        data = self.storage.read(path, MAX_MANIFEST_BYTES)
        return decode_manifest(data, path=path, expected=self.name, is_read=is_read)


def remove_own_files(storage: Storage, directory: str) -> bool:
    """**Blocks.** Removes holdfast's own files from a directory, and it if nothing else is there; returns True if all
    went."""
    entries = storage.list(directory)
    own = [entry.name for entry in entries if not entry.is_directory and is_own_file(entry.name)]
    is_gone = storage.delete([*(f"{directory}/{name}" for name in own), directory])
    return is_gone and (storage.traits.has_directories or len(own) == len(entries))
