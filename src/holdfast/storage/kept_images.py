"""Images of saves in memory that outlives its process, as a storage that is only read.

An image has the bytes of one worker's data file. Its record is in memory of its own, and is there only
while the image is whole. Neither is trusted: the record has a digest, and the digests in it are those of the bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from holdfast.errors import DamageError, NotFoundError, UsageError
from holdfast.format.digests import SealedRecord, seal, unseal
from holdfast.format.index import MAX_INDEX_BYTES
from holdfast.format.names import StepName, data_name, generation_path, index_name, join
from holdfast.storage.checks import too_large_error
from holdfast.storage.local.streams import LocalReader
from holdfast.storage.protocol import Entry, FileReader, FileWriter, Traits

_PLACE: Final = Path("memory")
_LIMIT_BYTES: Final = 2 * MAX_INDEX_BYTES
_WRITTEN: Final = b"\n"


class ImageRecord(SealedRecord, frozen=True, kw_only=True):
    """The record beside a whole image.

    Attributes:
        step: The step.
        generation: Its generation.
        attempt: The attempt.
        rank: The worker.
        world_size: How many workers the save has.
        data_bytes: The size of the data file.
        index: The file of the index.
        opening: The file that opened the generation.
        manifest: The manifest, of one worker alone; empty otherwise.
        part: Of one of several workers, its report to the leader; empty otherwise.
        metrics: The metrics of the step.
        metadata: What the program stores with it.
        exempt: The leaves that were not finite in the run's first checkpoint; None if this is the first.
    """

    kind: ClassVar[str] = "image"

    step: int
    generation: int
    attempt: int
    rank: int
    world_size: int
    data_bytes: int
    index: bytes
    opening: bytes
    manifest: bytes = b""
    part: bytes = b""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    exempt: tuple[str, ...] | None = None

    @property
    def name(self) -> StepName:
        """The step."""
        return StepName(self.step, self.generation, self.attempt)

    @property
    def data_path(self) -> str:
        """The path of the data file."""
        return f"{self.name.directory}/{data_name(self.rank, self.world_size)}"


class KeptImage(NamedTuple):
    """Two descriptors of memory: that of an image, and that of its record."""

    data: int
    record: int

    def seal(self, record: ImageRecord) -> None:
        """Says that the image is whole. A crash in here leaves one that is not."""
        data = memoryview(seal(record))
        written_bytes = 0
        while written_bytes < len(data):
            written_bytes += os.pwrite(self.record, data[written_bytes:], written_bytes)

    def note_written(self) -> None:
        """Says that the step was committed in a tier: white space after the record. A crash before leaves one of which
        that is not known."""
        if not self.is_written:
            os.pwrite(self.record, _WRITTEN, os.fstat(self.record).st_size)

    @property
    def is_written(self) -> bool:
        """True if the step was committed in a tier, and may have been removed there since."""
        return os.pread(self.record, 1, max(os.fstat(self.record).st_size - 1, 0)) == _WRITTEN

    def unseal(self) -> None:
        """Says that the image is whole no more."""
        os.ftruncate(self.record, 0)

    def read(self) -> ImageRecord | None:
        """Returns the record of a whole image; None if it is not whole."""
        size_bytes = os.fstat(self.record).st_size
        if not 0 < size_bytes <= _LIMIT_BYTES:
            return None
        try:
            record = unseal(ImageRecord, os.pread(self.record, size_bytes, 0), path="memory")
        except DamageError:
            return None
        return record if 0 <= record.data_bytes <= os.fstat(self.data).st_size else None


class KeptImages:
    """**Thread-safe.** The whole images that this process can read, as a storage: a part of a few steps of a run.

    Attributes:
        url: `memory`.
        traits: See `Storage`.
        location: None.
    """

    url = "memory"
    traits = Traits(names_are_consistent=True)
    location = None

    def __init__(self) -> None:
        # Guards the rest.
        self._lock = threading.Lock()
        self._images: dict[str, KeptImage] = {}
        self._small: dict[str, bytes] = {}
        self._records: dict[str, ImageRecord] = {}

    def add(self, image: KeptImage, record: ImageRecord) -> None:
        """Adds an image, which is whole."""
        name = record.name
        with self._lock:
            self._images[record.data_path] = image
            self._records[record.data_path] = record
            self._small[f"{name.directory}/{index_name(record.rank, record.world_size)}"] = record.index
            self._small[generation_path(name.generation)] = record.opening
            if record.manifest:
                self._small[name.manifest_path] = record.manifest

    def add_manifest(self, name: StepName, data: bytes) -> None:
        """Adds the manifest of a step."""
        with self._lock:
            self._small[name.manifest_path] = data

    def remove(self, image: KeptImage) -> None:
        """Removes an image, which is about to be written over."""
        with self._lock:
            paths = [path for path, one in self._images.items() if one == image]
            for path in paths:
                record = self._records.pop(path)
                del self._images[path]
                self._small.pop(f"{record.name.directory}/{index_name(record.rank, record.world_size)}", None)
                if all(one.name != record.name for one in self._records.values()):
                    self._small.pop(record.name.manifest_path, None)

    def clear(self) -> None:
        """Removes all of them."""
        with self._lock:
            self._images, self._records, self._small = {}, {}, {}

    def forget(self, path: str) -> bool:
        """Removes the image of a data file, which is damaged; returns False if there is none."""
        with self._lock:
            image = self._images.get(path)
        if image is None:
            return False
        self.remove(image)
        return True

    def list_records(self) -> list[ImageRecord]:
        """Returns the records of all images."""
        with self._lock:
            return [*self._records.values()]

    def note_written(self, name: StepName) -> None:
        """Called when a step is committed in a tier: if it is removed there, its images do not bring it back."""
        with self._lock, suppress(OSError):
            for path, image in self._images.items():
                if self._records[path].name == name:
                    image.note_written()

    def is_written(self, record: ImageRecord) -> bool:
        """Returns True if the step of an image was committed in a tier, and may have been removed there since."""
        with self._lock:
            return record.data_path in self._images and self._images[record.data_path].is_written

    def find(self, path: str) -> FileReader | None:
        """Opens the data file of an image; None if there is none."""
        with self._lock:
            if path not in self._images:
                return None
            image, record = self._images[path], self._records[path]
            return LocalReader(os.dup(image.data), path, _PLACE, record.data_bytes, direct=False)

    # What follows is a `Storage`.

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """Returns what is in a directory; see `Storage`."""
        with self._lock:
            sizes = {one: len(data) for one, data in self._small.items()}
            sizes |= {one: record.data_bytes for one, record in self._records.items()}
        start = join(path, "") if path else ""
        names = {one[len(start) :]: size for one, size in sizes.items() if one.startswith(start)}
        found = {name: Entry(name, False, size) for name, size in names.items() if deep or "/" not in name}
        if not deep:
            found |= {(top := name.partition("/")[0]): Entry(top, True, 0) for name in names if "/" in name}
        return sorted(found.values(), key=lambda entry: entry.name)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Reads a whole small file; see `Storage`."""
        data = self._small.get(path)
        if data is None:
            raise NotFoundError(f"{path} is not in memory", path=path)
        if len(data) > limit_bytes:
            raise too_large_error(str(_PLACE / path), path, len(data), limit_bytes)
        return data

    def open_reader(self, path: str) -> FileReader:
        """Opens the data file of an image; see `Storage`."""
        if (reader := self.find(path)) is None:
            raise NotFoundError(f"{path} is not in memory", path=path)
        return reader

    def make_directory(self, path: str) -> None:
        """Does nothing: there are no directories."""

    def sync_directory(self, path: str) -> None:
        """Does nothing."""

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """Raises `UsageError`, like the rest: images are made by saves alone."""
        raise self._refuse(path)

    def write(self, path: str, data: bytes) -> None:
        """See `create`."""
        raise self._refuse(path)

    def publish(self, path: str, data: bytes) -> bool:
        """See `create`."""
        raise self._refuse(path)

    def delete(self, paths: Iterable[str]) -> bool:
        """See `create`."""
        raise self._refuse(", ".join(paths))

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """See `create`."""
        raise self._refuse(", ".join(paths))

    def retire(self, directory: str) -> str:
        """See `create`."""
        raise self._refuse(directory)

    def _refuse(self, path: str) -> UsageError:
        return UsageError(f"{path}: images in memory are only read")
