"""The contract of a storage, as tests: derive from `StorageContract` in a module that pytest collects.

For failures that show both sides of a comparison, call
`pytest.register_assert_rewrite("holdfast.testing.storage_contract")` before the import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import DamageError, NotFoundError, StorageError, UsageError
from holdfast.format.digests import digest
from holdfast.storage.checks import choose_piece_bytes
from holdfast.storage.open import open_storage
from holdfast.storage.protocol import Entry, Storage

PAGE_BYTES = 4096
LIMIT_BYTES = 1 << 20
HOSTILE_PATHS = ["/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\0b", "x" * 256, "y/" * 600 + "y"]


class StorageContract:
    """The tests. A subclass says how to make an empty storage; all of its tests must pass."""

    def make_storage(self, tmp_path: Path) -> Storage:
        """Returns a new, empty storage, with a root that was never written to."""
        raise TypeError(f"{type(self).__name__} must override make_storage")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """The storage under test."""
        return self.make_storage(tmp_path)

    # An empty storage.

    def test_it_is_a_storage(self, storage: Storage) -> None:
        """It has all the methods."""
        assert open_storage(storage) is storage
        assert storage.url
        assert storage.location is None or str(storage.location) == storage.url

    def test_empty(self, storage: Storage) -> None:
        """It is empty, and looking does no harm."""
        assert storage.list("") == []
        assert storage.list("nowhere/at/all") == []
        assert storage.delete(["nowhere/file", "nowhere"]) is True
        assert storage.delete([]) is True
        storage.discard(["nowhere/file"], 1)
        storage.discard((), 0)
        for look in (lambda: storage.read("none", 10), lambda: storage.open_reader("none")):
            with pytest.raises(NotFoundError):
                look()
        if storage.traits.has_directories:
            with pytest.raises(NotFoundError):
                storage.retire("nowhere")
        assert storage.list("") == []
        assert storage.list("", deep=True) == []

    # Small files.

    def test_write_and_read(self, storage: Storage) -> None:
        """A file is read as it was written."""
        storage.make_directory("a/b")
        storage.write("a/b/small", b"bytes")
        storage.write("a/b/empty", b"")
        storage.sync_directory("a/b")
        storage.sync_directory("")
        assert storage.read("a/b/small", 5) == b"bytes"
        assert storage.read("a/b/empty", 0) == b""

    def test_write_never_overwrites(self, storage: Storage) -> None:
        """An existing file stays as it is."""
        storage.write("file", b"first")
        storage.make_directory("directory")
        for path in ("file", "directory") if storage.traits.has_directories else ("file",):
            with pytest.raises(StorageError):
                storage.write(path, b"second")
            with pytest.raises(StorageError):
                _create(storage, path, b"second")
        assert storage.read("file", LIMIT_BYTES) == b"first"

    def test_read_limit(self, storage: Storage) -> None:
        """A file larger than expected is damage, and is not read."""
        storage.write("file", b"12345")
        with pytest.raises(DamageError) as caught:
            storage.read("file", 4)
        assert caught.value.path == "file"

    def test_directory_is_no_file(self, storage: Storage) -> None:
        """A directory in place of a file is damage."""
        if not storage.traits.has_directories:
            pytest.skip("it has no directories")
        storage.make_directory("directory")
        with pytest.raises(DamageError):
            storage.read("directory", LIMIT_BYTES)
        with pytest.raises(DamageError):
            storage.open_reader("directory")

    def test_file_is_no_directory(self, storage: Storage) -> None:
        """There is nothing below a file, and nothing can be put there."""
        if not storage.traits.has_directories:
            pytest.skip("it has no directories")
        storage.write("file", b"")
        assert storage.list("file") == []
        for change in (
            lambda: storage.make_directory("file"),
            lambda: storage.make_directory("file/deeper"),
            lambda: storage.write("file/below", b""),
            lambda: storage.create("file/below", 1),
            lambda: storage.publish("file/below", b""),
            lambda: storage.delete(["file/below"]),
            lambda: storage.retire("file"),
        ):
            with pytest.raises(StorageError):
                change()
        with pytest.raises(DamageError):
            storage.read("file/below", LIMIT_BYTES)
        assert _entries(storage, "") == [Entry("file", False, 0)]

    # Directories.

    def test_make_directory_twice(self, storage: Storage) -> None:
        """An existing one is fine, with all its content."""
        storage.make_directory("a/b")
        storage.write("a/b/file", b"1")
        storage.make_directory("a/b")
        storage.make_directory("a")
        assert _entries(storage, "a/b") == [Entry("file", False, 1)]

    def test_list(self, storage: Storage) -> None:
        """Returns all entries of a directory, in order of name, with sizes."""
        _create(storage, "b/deep/file", b"12")
        storage.write("c", b"123")
        storage.write("a", b"")
        storage.write("b/inside", b"1")
        assert _entries(storage, "") == [Entry("a", False, 0), Entry("b", True, 0), Entry("c", False, 3)]
        assert _entries(storage, "b") == [Entry("deep", True, 0), Entry("inside", False, 1)]
        below = [Entry("deep/file", False, 2), Entry("inside", False, 1)]
        assert _entries(storage, "b", deep=True) == below
        in_b = [Entry(f"b/{one.name}", False, one.size_bytes) for one in below]
        assert _entries(storage, "", deep=True) == [Entry("a", False, 0), *in_b, Entry("c", False, 3)]

    def test_create_makes_directories(self, storage: Storage) -> None:
        """A new file needs no directory; once it is removed, the directories can be."""
        _create(storage, "a/b/file", b"1")
        _create(storage, "a/b/other", b"22")
        storage.sync_directory("a/b")
        storage.sync_directory("a")
        assert _entries(storage, "a/b") == [Entry("file", False, 1), Entry("other", False, 2)]
        with pytest.raises(StorageError, match="exists"):
            _create(storage, "a/b/file", b"2")
        assert storage.read("a/b/file", 1) == b"1"

    def test_large_file_is_not_overwritten(self, storage: Storage) -> None:
        """A second attempt at a name fails, and changes nothing."""
        size_bytes = 9 << 20
        _create(storage, "file", _pattern(size_bytes))
        with pytest.raises(StorageError, match="exists"):
            _create(storage, "file", bytes(size_bytes))
        assert storage.read("file", size_bytes) == _pattern(size_bytes)

    def test_delete(self, storage: Storage) -> None:
        """Files go, and directories that are empty by then; each may be missing."""
        _create(storage, "a/b/file", b"1")
        _create(storage, "a/b/other", b"1")
        is_gone = not storage.traits.has_directories
        assert storage.delete(["a/b"]) is is_gone
        assert storage.delete(["a/b", "a", "a/b/file"]) is is_gone
        assert _entries(storage, "a/b") == [Entry("other", False, 1)]
        assert storage.delete(["a", "a/b", "a/b/file", "a/b/other", "none"]) is True
        assert storage.delete(["a", "a/b", "a/b/file"]) is True
        assert storage.list("") == []

    def test_version(self, storage: Storage) -> None:
        """A file that was replaced has another version, if it has any."""
        storage.make_directory("a")
        storage.publish("a/record", b"1")
        first = storage.list("a")
        assert storage.list("a") == storage.list("a") == first
        storage.delete(["a/record"])
        storage.publish("a/record", b"2")
        (second,) = storage.list("a")
        assert (second.version != first[0].version) is bool(second.version)

    def test_discard(self, storage: Storage) -> None:
        """Files are gone, whether or not the space of one is kept for the next file."""
        size_bytes = 2 << 20
        for name in ("kept", "removed"):
            _create(storage, f"{name}/data", _pattern(size_bytes))
        storage.discard(["kept/data"], size_bytes)
        assert storage.list("kept") == []
        storage.discard(["removed/data"], 0)
        assert storage.list("", deep=True) == []
        _create(storage, "new/data", _pattern(size_bytes))
        assert storage.read("new/data", size_bytes) == _pattern(size_bytes)

    def test_retire(self, storage: Storage) -> None:
        """A directory disappears as a whole, and its name is free."""
        _create(storage, "run/step/file", b"old")
        aside = storage.retire("run/step")
        if not storage.traits.has_directories:
            assert aside == "run/step"
            return
        assert aside.startswith(".trash-")
        assert storage.list("run") == []
        assert storage.read(f"{aside}/file", LIMIT_BYTES) == b"old"
        for late in (storage.write, storage.publish):
            with pytest.raises(StorageError):
                late("run/step/late", b"")
        storage.make_directory("run/step")
        assert storage.retire("run/step") != aside

    # Files written in pieces.

    @pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES, 3 * PAGE_BYTES + 7, (2 << 20) + 11])
    def test_pieces_in_any_order(self, storage: Storage, size_bytes: int) -> None:
        """Pieces cover the file, from several threads, the last first; read back in one and in pieces."""
        data = _pattern(size_bytes)
        least = choose_piece_bytes(storage.traits, size_bytes, 1) if _limits_pieces(storage) else 1
        wanted = (0, size_bytes // 3, size_bytes // 2 // PAGE_BYTES * PAGE_BYTES, size_bytes * 3 // 4)
        cuts = sorted({cut if least == 1 else cut // least * least for cut in wanted} | {size_bytes})
        pieces = list(pairwise(cuts))
        writer = storage.create("file", size_bytes)
        _in_threads([partial(writer.write_at, start, memoryview(data)[start:end]) for start, end in reversed(pieces)])
        writer.finish()
        writer.abandon()
        assert _entries(storage, "") == [Entry("file", False, size_bytes)]
        reader = storage.open_reader("file")
        assert reader.size_bytes == size_bytes
        whole = bytearray(size_bytes)
        _in_threads([partial(reader.read_into, start, memoryview(whole)[start:end]) for start, end in pieces])
        reader.close()
        reader.close()
        assert whole == data

    @pytest.mark.parametrize("size_bytes", [5, PAGE_BYTES, PAGE_BYTES + 1, (1 << 20) + 1])
    def test_padding_is_no_part_of_the_file(self, storage: Storage, size_bytes: int) -> None:
        """A last piece may extend beyond the file's size up to a whole page."""
        padded = _pattern(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        writer = storage.create("file", size_bytes)
        writer.write_at(0, memoryview(padded))
        writer.finish()
        assert _entries(storage, "") == [Entry("file", False, size_bytes)]
        assert storage.read("file", size_bytes) == padded[:size_bytes]

    def test_empty_file(self, storage: Storage) -> None:
        """No piece is needed for no bytes."""
        writer = storage.create("file", 0)
        writer.write_at(0, memoryview(b""))
        writer.finish()
        assert storage.read("file", 0) == b""
        reader = storage.open_reader("file")
        reader.read_into(0, memoryview(bytearray()))
        reader.close()

    def test_pieces_outside_the_file(self, storage: Storage) -> None:
        """A piece that does not fit is the caller's mistake, and has no effect."""
        writer = storage.create("file", 10)
        for offset, length in ((-1, 5), (11, 1), (10, PAGE_BYTES), (0, 10 + PAGE_BYTES)):
            with pytest.raises(UsageError):
                writer.write_at(offset, memoryview(bytes(length)))
        with pytest.raises(UsageError):
            writer.write_at(0, memoryview(bytes(20))[::2])
        writer.write_at(0, memoryview(b"0123456789"))
        writer.finish()
        assert storage.read("file", 10) == b"0123456789"
        with pytest.raises(UsageError):
            storage.create("other", -1)

    def test_a_file_with_a_hole_is_not_finished(self, storage: Storage) -> None:
        """Bytes that were never written are not zeros."""
        half = choose_piece_bytes(storage.traits, 10, 1) if _limits_pieces(storage) else 5
        data = _pattern(half + 5)
        writer = storage.create("file", len(data))
        writer.write_at(0, memoryview(data)[:half])
        with pytest.raises(UsageError):
            writer.finish()
        writer.write_at(half, memoryview(data)[half:])
        writer.finish()
        assert storage.read("file", len(data)) == data

    def test_pieces_that_are_too_small(self, storage: Storage) -> None:
        """A storage that limits pieces takes those of the size that its traits name, and refuses smaller ones."""
        if not _limits_pieces(storage):
            pytest.skip("it takes pieces of any size")
        size_bytes = 3 * choose_piece_bytes(storage.traits, 1, 1) + 1
        piece_bytes = choose_piece_bytes(storage.traits, size_bytes, 1)
        data = _pattern(size_bytes)
        writer = storage.create("file", size_bytes)
        with pytest.raises(StorageError):
            writer.write_at(0, memoryview(data)[: piece_bytes - 1])
        writer.abandon()
        storage.delete(["file"])
        writer = storage.create("file", size_bytes)
        for begin in range(0, size_bytes, piece_bytes):
            writer.write_at(begin, memoryview(data)[begin : begin + piece_bytes])
        writer.finish()
        assert storage.read("file", size_bytes) == data

    def test_digests_of_what_is_written(self, storage: Storage) -> None:
        """Each part of memory is digested, also what is not written."""
        data = _pattern(PAGE_BYTES)
        parts = [memoryview(data)[:0], memoryview(data)[5:100], memoryview(data)[100:]]
        writer = storage.create("file", 300)
        assert writer.write_at(0, memoryview(data)[:300], parts) == [digest(part) for part in parts]
        writer.finish()
        assert storage.read("file", 300) == data[:300]

    def test_closed_writer(self, storage: Storage) -> None:
        """After its end a writer accepts nothing, and an abandoned file can be removed."""
        finished = storage.create("finished", 1)
        finished.write_at(0, memoryview(b"1"))
        finished.finish()
        abandoned = storage.create("abandoned", 1)
        abandoned.abandon()
        abandoned.abandon()
        for writer in (finished, abandoned):
            with pytest.raises(UsageError):
                writer.write_at(0, memoryview(b"2"))
            with pytest.raises(UsageError):
                writer.finish()
        storage.delete(["abandoned"])
        assert _entries(storage, "") == [Entry("finished", False, 1)]

    def test_multi_byte_elements(self, storage: Storage) -> None:
        """A piece is its bytes, for elements of any kind in the view."""
        writer = storage.create("file", 8)
        writer.write_at(0, memoryview(b"01234567").cast("I"))
        writer.finish()
        into = memoryview(bytearray(8)).cast("Q")
        reader = storage.open_reader("file")
        reader.read_into(0, into)
        reader.close()
        assert into.tobytes() == b"01234567"

    @pytest.mark.parametrize("lengths", [[], [0], [7], [0, 3, 0, 4], [1] * 3000, [3, (1 << 20) + 5, 0, 200_000, 1]])
    def test_many_places_in_one_read(self, storage: Storage, lengths: list[int]) -> None:
        """Places of memory are filled in their order, each with its own part of the file, and nothing beside them."""
        begin = 5
        data = _pattern(begin + sum(lengths) + 2)
        storage.write("file", data)
        memory = bytearray(b"-" * (1 + sum(lengths) + len(lengths)))
        expected = bytes(memory)
        parts = []
        at, place = 1, begin
        for length in lengths:
            parts.append(memoryview(memory)[at : at + length])
            expected = expected[:at] + data[place : place + length] + expected[at + length :]
            at += length + 1
            place += length
        reader = storage.open_reader("file")
        assert reader.read_digested(begin, parts) == [digest(part) for part in parts]
        assert memory == expected
        with pytest.raises(DamageError):
            reader.read_digested(begin, [*parts, memoryview(bytearray(3))])
        with pytest.raises(UsageError):
            reader.read_digested(-1, [memoryview(bytearray(1))])
        reader.close()
        with pytest.raises(UsageError):
            reader.read_digested(begin, [memoryview(bytearray(1))])

    def test_read_past_the_end(self, storage: Storage) -> None:
        """A file that ends early is damage, named with the place."""
        storage.write("file", b"12345")
        reader = storage.open_reader("file")
        for offset, length in ((0, 6), (5, 1), (100, 1)):
            with pytest.raises(DamageError) as caught:
                reader.read_into(offset, memoryview(bytearray(length)))
            assert caught.value.path == "file"
            assert caught.value.offset_bytes is not None
        with pytest.raises(UsageError):
            reader.read_into(-1, memoryview(bytearray(1)))
        reader.close()
        with pytest.raises(UsageError):
            reader.read_into(0, memoryview(bytearray(1)))

    # Publishing.

    def test_publish_once(self, storage: Storage) -> None:
        """The first wins, and is not changed."""
        storage.make_directory("run")
        assert storage.publish("run/manifest", b"first") is True
        assert storage.publish("run/manifest", b"second") is False
        assert storage.publish("run/manifest", b"first") is False
        assert storage.read("run/manifest", LIMIT_BYTES) == b"first"
        assert _entries(storage, "run") == [Entry("manifest", False, 5)]

    def test_publish_over_anything(self, storage: Storage) -> None:
        """Any existing entry counts."""
        storage.write("file", b"")
        assert storage.publish("file", b"new") is False
        assert storage.read("file", 0) == b""
        if not storage.traits.has_directories:
            return
        storage.make_directory("directory")
        assert storage.publish("directory", b"new") is False
        assert _entries(storage, "") == [Entry("directory", True, 0), Entry("file", False, 0)]

    def test_publish_race(self, storage: Storage) -> None:
        """Of many callers, with equal bytes or not, exactly one creates it."""
        for round_number in range(20):
            path = f"manifest-{round_number}"
            tokens = [b"same" if round_number % 2 else b"token %d" % number for number in range(8)]
            has_won: dict[int, bool] = {}

            def publish(number: int, path: str, token: bytes, has_won: dict[int, bool]) -> None:
                has_won[number] = storage.publish(path, token)

            _in_threads([partial(publish, number, path, token, has_won) for number, token in enumerate(tokens)])
            winners = [token for number, token in enumerate(tokens) if has_won[number]]
            assert len(winners) == 1
            assert storage.read(path, LIMIT_BYTES) == winners[0]
        assert len(storage.list("")) == 20

    # Paths.

    @pytest.mark.parametrize("path", [*HOSTILE_PATHS, ""])
    def test_hostile_paths(self, storage: Storage, path: str) -> None:
        """A path that leads out of the storage, or is malformed, is the caller's mistake."""
        calls: list[Callable[[], object]] = [
            lambda: storage.create(path, 1),
            lambda: storage.write(path, b""),
            lambda: storage.publish(path, b""),
            lambda: storage.read(path, 1),
            lambda: storage.open_reader(path),
            lambda: storage.delete([path]),
            lambda: storage.discard([path], 0),
            lambda: storage.retire(path),
        ]
        if path:
            calls += [
                lambda: storage.make_directory(path),
                lambda: storage.sync_directory(path),
                lambda: storage.list(path),
            ]
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert storage.list("") == []


def _entries(storage: Storage, path: str, *, deep: bool = False) -> list[Entry]:
    return [Entry(one.name, one.is_directory, one.size_bytes) for one in storage.list(path, deep=deep)]


def _create(storage: Storage, path: str, data: bytes) -> None:
    """Writes a file of one piece, with its directories."""
    writer = storage.create(path, len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()


def _limits_pieces(storage: Storage) -> bool:
    return storage.traits.least_piece_bytes > 1 or storage.traits.most_pieces > 0


def _pattern(size_bytes: int) -> bytes:
    """Returns bytes of which no two pages are equal."""
    return b"".join(number.to_bytes(8, "little") for number in range(size_bytes // 8 + 1))[:size_bytes]


def _in_threads(jobs: list[Callable[[], object]]) -> None:
    start = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def do(job: Callable[[], object]) -> None:
        start.wait(60)
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=do, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
