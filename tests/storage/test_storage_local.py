"""A directory of this machine: what lies in it, hostile files, races, and writes that pass by the page cache."""

from __future__ import annotations

import inspect
import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preloaded
from holdfast.errors import DamageError, NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.storage import Entry, LocalStorage
from holdfast.storage.local.direct import PAGE_BYTES, Residency, try_direct_reads
from holdfast.storage.local.files import open_directory
from holdfast.storage.local.streams import LocalWriter, SharedDescriptor
from patience import read_line

OPEN_FILES = Path("/proc/self/fd")
DIRECT_BYTES = 2 << 20
LIMIT_BYTES = 1 << 20

needs_open_files = pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="this system does not show which files are open")


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = sorted(path.name for path in OPEN_FILES.iterdir())
    yield
    assert sorted(path.name for path in OPEN_FILES.iterdir()) == before


# Where things lie.


def test_root_is_made_by_the_first_write_only(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    storage = LocalStorage(root)
    assert storage.list("") == []
    storage.delete(["file"])
    with pytest.raises(NotFoundError):
        storage.read("file", 1)
    with pytest.raises(NotFoundError):
        storage.sync_directory("")
    assert list(tmp_path.iterdir()) == []
    storage.write("file", b"1")
    assert (root / "file").read_bytes() == b"1"


def test_root_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalStorage(tmp_path / "link").write("file", b"1")
    assert (tmp_path / "real" / "file").read_bytes() == b"1"


def test_root_that_goes_is_not_made_again(tmp_path: Path) -> None:
    """It was moved or unmounted: what is written in its place is found by nobody once it is back."""
    storage = LocalStorage(tmp_path / "root")
    storage.write("file", b"1")
    shutil.rmtree(tmp_path / "root")
    for write in (
        lambda: storage.write("file", b"2"),
        lambda: storage.publish("file", b"2"),
        lambda: storage.make_directory("a"),
        lambda: storage.create("file", 1),
    ):
        with pytest.raises(NotFoundError):
            write()
    assert not (tmp_path / "root").exists()


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    storage = LocalStorage(tmp_path / "root")
    assert storage.list("") == []
    with pytest.raises(StorageError, match="cannot write"):
        storage.write("file", b"1")
    with pytest.raises(DamageError):
        storage.read("file", 1)


def test_directory_must_be_made_first(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for write in (
        lambda: storage.write("a/file", b""),
        lambda: storage.publish("a/file", b""),
    ):
        with pytest.raises(NotFoundError) as caught:
            write()
        assert caught.value.path == "a/file"
        assert str(tmp_path / "a/file") in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)


def test_names_that_are_not_text_can_be_read_and_deleted(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\\\n")).write_bytes(b"1")
    storage = LocalStorage(tmp_path)
    (entry,) = storage.list("")
    assert storage.read(entry.name, 1) == b"1"
    storage.delete([entry.name])
    assert storage.list("") == []


def test_the_longest_name_can_be_published_and_set_aside(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_directory("d" * 255)
    assert storage.publish("d" * 255 + "/" + "m" * 255, b"1")
    assert storage.read(storage.retire("d" * 255) + "/" + "m" * 255, 1) == b"1"


def test_a_file_cut_short_under_its_reader(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("file", bytes(100))
    reader = storage.open_reader("file")
    os.truncate(tmp_path / "file", 60)
    with pytest.raises(DamageError) as caught:
        reader.read_into(10, memoryview(bytearray(90)))
    assert caught.value.offset_bytes == 60
    reader.close()


def test_set_aside_takes_the_way_from_a_late_writer(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_directory("step")
    late = storage.create("step/data", 3)
    aside = storage.retire("step")
    late.write_at(0, memoryview(b"abc"))
    late.finish()
    with pytest.raises(NotFoundError):
        storage.publish("step/manifest", b"")
    assert storage.list("") == [Entry(aside, True, 0)]
    assert storage.read(f"{aside}/data", 3) == b"abc"


# Hostile things.


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[LocalStorage]:
    """A root with things in it that are neither plain files nor directories, and something outside to be led to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "made-by-mistake")
    (root / "away").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(root, os.O_RDONLY)
        # The path of a socket has little room, which a temporary directory's may not fit.
        server.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
        yield LocalStorage(root)
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


SPECIAL = ["fifo", "link", "dangling", "away", "loop", "socket"]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="it goes by /proc")


@needs_linux
@needs_open_files
@pytest.mark.parametrize("name", SPECIAL)
def test_special_files_are_not_read(hostile: LocalStorage, name: str) -> None:
    with no_descriptor_left():
        with pytest.raises(DamageError) as caught:
            hostile.read(name, LIMIT_BYTES)
        assert caught.value.path == name
        with pytest.raises(DamageError):
            hostile.open_reader(name)


@needs_linux
@needs_open_files
@pytest.mark.parametrize("name", SPECIAL)
def test_special_files_are_not_written_or_entered(hostile: LocalStorage, name: str) -> None:
    changes: list[Callable[[], object]] = [
        lambda: hostile.write(name, b"1"),
        lambda: hostile.create(name, 1),
        lambda: hostile.make_directory(name),
        lambda: hostile.make_directory(f"{name}/deeper"),
        lambda: hostile.write(f"{name}/secret", b"1"),
        lambda: hostile.create(f"{name}/new", 1),
        lambda: hostile.publish(f"{name}/new", b"1"),
        lambda: hostile.delete([f"{name}/secret"]),
        lambda: hostile.delete(["none", f"{name}/secret"]),
        lambda: hostile.retire(name),
        lambda: hostile.retire(f"{name}/secret"),
        lambda: hostile.sync_directory(name),
    ]
    with no_descriptor_left():
        for change in changes:
            with pytest.raises(StorageError):
                change()
        with pytest.raises(DamageError):
            hostile.read(f"{name}/secret", LIMIT_BYTES)
        with pytest.raises(DamageError):
            hostile.open_reader(f"{name}/secret")
        assert hostile.publish(name, b"1") is False
        assert hostile.list(name) == []
        assert hostile.list(f"{name}/deeper") == []


@needs_linux
def test_special_files_are_listed_and_removed_themselves(hostile: LocalStorage) -> None:
    assert hostile.list("") == [Entry(name, False, 0) for name in sorted(SPECIAL)]
    for name in SPECIAL:
        assert hostile.delete([name])
    assert hostile.list("") == []


@needs_linux
@needs_open_files
def test_failures_leave_no_descriptor_and_no_debris(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_directory("directory")
    storage.write("file", b"12345")
    failures: list[Callable[[], object]] = [
        lambda: storage.write("file", b""),
        lambda: storage.write("file/below", b""),
        lambda: storage.write("none/file", b""),
        lambda: storage.create("file", 1),
        lambda: storage.create("huge", 1 << 60),
        lambda: storage.publish("none/file", b""),
        lambda: storage.make_directory("file"),
        lambda: storage.read("directory", 1),
        lambda: storage.read("file", 4),
        lambda: storage.open_reader("directory"),
        lambda: storage.delete(["file/below"]),
        lambda: storage.retire("file"),
        lambda: storage.sync_directory("file"),
    ]
    with no_descriptor_left():
        for fail in failures:
            with pytest.raises((StorageError, DamageError)):
                fail()
        assert storage.publish("file", b"") is False
        with pytest.raises(UsageError):
            storage.create("file", -1)
    assert storage.list("") == [Entry("directory", True, 0), Entry("file", False, 5)]


# Descriptors and threads.


def test_a_descriptor_in_use_is_not_closed(tmp_path: Path) -> None:
    shared = SharedDescriptor(os.open(tmp_path, os.O_RDONLY), "it")
    with shared.use() as descriptor:
        with shared.use():
            assert shared.users == 2
        shared.close()
        shared.close()
        with pytest.raises(UsageError, match="it is closed"), shared.use():
            pass
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_publish_among_processes(tmp_path: Path) -> None:
    """Of eight processes that publish each of fifty names, exactly one makes each of them."""
    code = f"""
import sys
from holdfast.storage import LocalStorage
storage = LocalStorage({str(tmp_path / "root")!r})
print("ready", flush=True)
sys.stdin.readline()
print("".join("01"[storage.publish(f"manifest-{{number}}", sys.argv[1].encode())] for number in range(50)))
"""
    children = [
        preloaded.Popen(
            [sys.executable, "-c", code, f"child {number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(8)
    ]
    for child in children:
        assert read_line(child) == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    outcomes = [child.communicate(timeout=120)[0].strip() for child in children]
    storage = LocalStorage(tmp_path / "root")
    for number in range(50):
        (winner,) = [child for child, outcome in enumerate(outcomes) if outcome[number] == "1"]
        assert storage.read(f"manifest-{number}", 100) == f"child {winner}".encode()
    assert len(storage.list("")) == 50


# Direct writes.


def _direct_writer(root: Path, size_bytes: int) -> LocalWriter:
    writer = LocalStorage(root).create("file", size_bytes)
    if not writer.is_direct:
        writer.abandon()
        pytest.skip("the file system of the temporary directory has no direct writes")
    return writer


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    size_bytes=st.integers(1 << 20, (1 << 20) + 3 * PAGE_BYTES),
    address_bytes=st.sampled_from([0, 1, 512, 4095]),
    is_padded=st.booleans(),
)
def test_direct_pieces_of_any_form(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size_bytes: int, address_bytes: int, is_padded: bool
) -> None:
    root = tmp_path_factory.mktemp("direct")
    cut = st.one_of(
        st.integers(0, size_bytes),
        st.integers(0, size_bytes // PAGE_BYTES).map(lambda page: page * PAGE_BYTES),
        st.integers(0, 64).map(lambda near: size_bytes // 2 + near),
    )
    cuts = sorted({0, size_bytes, *data.draw(st.lists(cut, max_size=12))})
    end_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES if is_padded else size_bytes
    content = b"".join(number.to_bytes(4, "little") for number in range(end_bytes // 4 + 1))[:end_bytes]
    memory = memoryview(mmap.mmap(-1, end_bytes + PAGE_BYTES))[address_bytes : address_bytes + end_bytes]
    memory[:] = content
    writer = _direct_writer(root, size_bytes)
    pieces = [(start, end_bytes if end == size_bytes else end) for start, end in pairwise(cuts)]
    for start, end in data.draw(st.permutations(pieces)):
        writer.write_at(start, memory[start:end])
    writer.finish()
    assert (root / "file").read_bytes() == content[:size_bytes]
    shutil.rmtree(root)


def test_direct_pieces_from_many_threads(tmp_path: Path) -> None:
    piece_bytes = 100_003
    size_bytes = 40 * piece_bytes
    content = os.urandom(size_bytes)
    writer = _direct_writer(tmp_path, size_bytes)
    starts = iter(range(0, size_bytes, piece_bytes))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            writer.write_at(start, memoryview(content)[start : start + piece_bytes])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    writer.finish()
    assert (tmp_path / "file").read_bytes() == content


def test_direct_bytes_are_on_the_device(tmp_path: Path) -> None:
    writer = _direct_writer(tmp_path, DIRECT_BYTES)
    content = os.urandom(DIRECT_BYTES)
    memory = memoryview(mmap.mmap(-1, DIRECT_BYTES))
    memory[:] = content
    writer.write_at(0, memory)
    writer.finish()
    descriptor = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    back = mmap.mmap(-1, DIRECT_BYTES)
    assert os.preadv(descriptor, [back], 0) == DIRECT_BYTES
    os.close(descriptor)
    assert back[:] == content


def test_small_files_and_wishes_go_through_the_page_cache(tmp_path: Path) -> None:
    small = LocalStorage(tmp_path).create("small", PAGE_BYTES)
    large = LocalStorage(tmp_path, direct=False).create("large", DIRECT_BYTES)
    assert not small.is_direct
    assert not large.is_direct
    small.abandon()
    large.abandon()


def test_more_than_there_is_on_the_disk(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    free_bytes = shutil.disk_usage(tmp_path).free
    with pytest.raises(StorageFullError, match=rf"hint: {free_bytes * 100} bytes are needed and \d+ bytes are free"):
        storage.create("file", free_bytes * 100)
    assert storage.list("") == []


@pytest.mark.parametrize("direct", [True, False])
def test_reads_that_pass_by_the_cache_see_the_same_bytes(tmp_path: Path, direct: bool) -> None:
    size_bytes = (20 << 20) + 123
    content = os.urandom(1 << 20) * 21
    content = content[:size_bytes]
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = LocalStorage(tmp_path, direct=direct).open_reader("file")
    try:
        for offset, length in [
            (0, size_bytes),
            (1, size_bytes - 1),
            (4096, 9 << 20),
            (4095, (8 << 20) + 2),
            (size_bytes - (2 << 20), 2 << 20),
            ((19 << 20) + 7, 1 << 20),
        ]:
            into = bytearray(length)
            reader.read_into(offset, memoryview(into))
            assert into == content[offset : offset + length]
        with pytest.raises(DamageError):
            reader.read_into(size_bytes - (1 << 20), memoryview(bytearray(2 << 20)))
    finally:
        reader.close()


def test_an_interrupt_on_the_way_closes_no_file_of_another(tmp_path: Path) -> None:
    """A number that was given back may be another file's by the time that Ctrl-C is acted on."""
    deepest = tmp_path / "one" / "two"
    deepest.mkdir(parents=True)
    others: list[int] = []

    def interrupt() -> None:
        # What another thread may do now: it gets the lowest number that is free.
        others.append(os.open(tmp_path, os.O_RDONLY))
        raise KeyboardInterrupt

    for point, striking in strikes({inspect.unwrap(open_directory).__code__}, "opcode", interrupt):
        with striking, suppress(KeyboardInterrupt), open_directory(tmp_path, ("one", "two")) as descriptor:
            assert os.path.samestat(os.fstat(descriptor), deepest.stat())
        while others:
            other = others.pop()
            assert os.path.samestat(os.fstat(other), tmp_path.stat()), f"closed under it at point {point}"
            os.close(other)
    assert point > 20


@needs_linux
def test_an_interrupt_while_a_file_is_opened_leaves_none_open(tmp_path: Path) -> None:
    """To look whether it can be read past the page cache may take as long as the disk likes, and is interrupted."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_bytes(bytes(2 << 20))
    storage = LocalStorage(tmp_path)
    storage.open_reader("one/file").close()
    functions = (try_direct_reads, LocalStorage.open_reader, LocalStorage._open_plain, Residency.__init__)
    codes = {function.__code__ for function in functions}
    count = len(list(OPEN_FILES.iterdir()))
    for point, striking in strikes(codes, "line", interrupt):
        with striking, suppress(KeyboardInterrupt):
            storage.open_reader("one/file").close()
        assert len(list(OPEN_FILES.iterdir())) == count, f"at point {point}"
    assert point > 15


def strikes(
    codes: set[CodeType], event: str, strike: Callable[[], None]
) -> Iterator[tuple[int, AbstractContextManager[None]]]:
    """For each point of some functions a context that calls `strike` there; ends once there is no such point."""
    struck = True

    @contextmanager
    def striking(left: int) -> Iterator[None]:
        def trace(frame: FrameType, found: str, _: Any) -> Any:
            nonlocal left, struck
            if frame.f_code not in codes:
                return None
            frame.f_trace_opcodes = event == "opcode"
            if found == event:
                left -= 1
                if left < 0:
                    struck = True
                    strike()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)

    point = 0
    while struck:
        struck = False
        yield point, striking(point)
        point += 1


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_directory_that_cannot_exist_is_refused_with_what_to_check() -> None:
    with pytest.raises(NotFoundError) as refused:
        LocalStorage("/proc/runs").publish("a", b"")
    assert refused.value.hint.startswith("Check the path")
