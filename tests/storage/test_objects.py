"""The contract of a storage, on buckets: the client's own in memory, and a real S3 server where one is asked for."""

from __future__ import annotations

import uuid
from pathlib import Path

from obstore.store import MemoryStore

from holdfast.storage.objects import ObjectStorage
from holdfast.testing.storage_contract import StorageContract


class TestObjectsInMemory(StorageContract):
    """The client's own store, in memory."""

    def make_storage(self, tmp_path: Path) -> ObjectStorage:
        """Returns a new one."""
        return ObjectStorage(f"memory-objects://{uuid.uuid4().hex}", MemoryStore())
