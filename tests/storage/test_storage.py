"""The contract of a storage, over every storage; locations; paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.storage import LocalStorage, MemoryStorage, Storage, open_storage
from holdfast.storage.checks import (
    MAX_PART_BYTES,
    MAX_PATH_BYTES,
    split_directory,
    split_path,
    temporary_name,
    trash_name,
)

pytest.register_assert_rewrite("holdfast.testing.storage_contract")

from faulty import FaultyStorage  # noqa: E402
from holdfast.testing.storage_contract import StorageContract  # noqa: E402
from object_storage import ObjectStorage  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")


class TestLocal(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "not/there/yet")


class TestLocalThroughThePageCache(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, direct=False)


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="there is no /dev/shm to write to")
class TestLocalInSharedMemory(StorageContract):
    @pytest.fixture(autouse=True)
    def _directory(self) -> Iterator[None]:
        self.directory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
        yield
        shutil.rmtree(self.directory)

    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(self.directory)


class TestMemory(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage()


class TestObjects(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return ObjectStorage()


class TestObjectsInParts(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return ObjectStorage(least_piece_bytes=2 * 4096, most_pieces=16)


class TestFaultyWithoutFault(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return FaultyStorage(MemoryStorage())


def test_directory_must_be_made_first() -> None:
    storage = MemoryStorage()
    for write in (
        lambda: storage.write("a/file", b""),
        lambda: storage.publish("a/file", b""),
    ):
        with pytest.raises(NotFoundError):
            write()
    with pytest.raises(NotFoundError):
        storage.sync_directory("a")


def test_memory_is_full() -> None:
    with pytest.raises(StorageFullError):
        MemoryStorage().create("file", 1 << 62)


def test_open_file_outlives_its_name() -> None:
    storage = MemoryStorage()
    storage.write("file", b"12")
    reader = storage.open_reader("file")
    storage.delete(["file"])
    into = bytearray(2)
    reader.read_into(0, memoryview(into))
    assert into == b"12"


def test_memory_file_in_place_of_a_directory() -> None:
    storage = MemoryStorage()
    storage.write("file", b"")
    with pytest.raises(StorageError, match="is a file"):
        storage.delete(["file/below"])


# Locations.


def test_open_storage_of_a_path(tmp_path: Path) -> None:
    for location in (
        str(tmp_path),
        tmp_path,
        f"file://{tmp_path}",
        f"file://localhost{tmp_path}",
        f"FILE://{tmp_path}",
    ):
        storage = open_storage(location)
        assert isinstance(storage, LocalStorage)
        assert storage.url == str(tmp_path)
        assert repr(storage) == f"LocalStorage({str(tmp_path)!r})"


def test_open_storage_expands_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert open_storage("~/runs/gpt").url == "/home/someone/runs/gpt"
    assert open_storage("runs/~").url == open_storage("runs").url + "/~"


def test_open_storage_decodes_a_file_url() -> None:
    assert open_storage("file:///a%20b/100%25").url == "/a b/100%"


def test_relative_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("runs/gpt")
    monkeypatch.chdir("/")
    assert storage.url == str(tmp_path / "runs/gpt")


def test_open_storage_of_a_storage() -> None:
    storage = MemoryStorage("mine")
    assert open_storage(storage) is storage
    assert repr(storage) == "MemoryStorage('mine')"


def test_named_memories_are_one() -> None:
    first = open_storage("memory://test-named")
    assert open_storage("memory://test-named") is first
    assert open_storage("memory://test-other") is not first
    assert first.url == "memory://test-named"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("hdfs://bucket/run", r"hdfs:// is not supported(.|\n)*file:///directory(.|\n)*s3://bucket/run"),
        ("s3://", "not the URL of a bucket"),
        ("gs://bucket/a/../b", "not the URL of a bucket"),
        ("az://name:secret@bucket/run", "not the URL of a bucket"),
        ("s3://bucket/run?versionId=1", "not the URL of a bucket"),
        ("memory://", "has no name"),
        ("file://host/run", "of this machine"),
        ("file://run", "of this machine"),
        ("file:///run?x", "of this machine"),
        ("file:///run#x", "of this machine"),
        (Path("s3://bucket/run"), "went through pathlib"),
        ("", "not the name of a directory"),
        ("a\0b", "not the name of a directory"),
        (7, "got int"),
        (None, "got NoneType"),
    ],
)
def test_open_storage_of_nothing_known(location: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_storage(location)


# Paths.

PARTS = st.text(min_size=1, max_size=30).filter(
    lambda part: part not in (".", "..") and not set(part) & {"/", "\0"} and part.isprintable()
)


@given(st.lists(PARTS, min_size=1, max_size=4))
def test_good_paths_come_apart(parts: list[str]) -> None:
    path = "/".join(parts)
    assert split_path(path) == tuple(parts)
    assert split_directory(path) == tuple(parts)


@given(st.text(st.sampled_from("a./\\\0~-\n\udc80\ud800"), max_size=12))
def test_any_path_stays_below_the_root_or_is_refused(path: str) -> None:
    try:
        parts = split_path(path)
    except UsageError:
        return
    assert "/".join(parts) == path
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"
    assert "\0" not in path
    assert os.fsencode(path)


@given(st.binary(min_size=1, max_size=MAX_PART_BYTES).filter(lambda name: not set(name) & set(b"/\0")))
def test_made_up_names_can_be_names(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    for made_up in (temporary_name(name), trash_name(name)):
        assert split_path(made_up) == (made_up,)
        assert made_up.startswith(".")


def test_length_of_paths() -> None:
    assert split_path("é" * 127)
    for path in ("é" * 128, "/".join(["x" * 200] * 6)):
        with pytest.raises(UsageError):
            split_path(path)
    assert len("/".join(["x" * 200] * 6)) > MAX_PATH_BYTES
    assert split_directory("") == ()


def test_import_takes_neither_numpy_nor_pytest() -> None:
    code = "import sys, holdfast.storage; print(sorted({'numpy', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
