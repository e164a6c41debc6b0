"""Storage of bytes: a directory, memory or a bucket; and the interface of a storage."""

from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.open import open_storage as open_storage
from holdfast.storage.open import register_scheme
from holdfast.storage.protocol import Entry, FileReader, FileWriter, Storage, Traits

__all__ = [
    "Entry",
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "MemoryStorage",
    "Storage",
    "Traits",
    "register_scheme",
]
