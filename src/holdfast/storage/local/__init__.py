"""A directory of this machine, or one that is mounted on it, as a storage."""

from holdfast.storage.local.directory import LocalStorage as LocalStorage
