"""Storage of bytes: a directory, or memory; and the interface of a storage."""

from holdfast.storage.local import LocalStorage
from holdfast.storage.locations import find_location, local_directory, open_storage, pass_on_warnings
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.protocol import Entry, FileReader, FileWriter, Storage

__all__ = [
    "Entry",
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "MemoryStorage",
    "Storage",
    "find_location",
    "local_directory",
    "open_storage",
    "pass_on_warnings",
]
