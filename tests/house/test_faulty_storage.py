"""The storage that fails on purpose fails exactly where, and as, it was told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from faulty import Call, Fault, FaultyStorage, StoppedDead
from holdfast.errors import DamageError, StorageError, StorageFullError
from holdfast.storage import LocalStorage, MemoryStorage, Storage

OLD = b"old"
NEW = b"new"
OPEN_FILES = Path("/proc/self/fd")

Done: TypeAlias = Literal["nothing", "half", "all"]


def _prepared() -> MemoryStorage:
    inner = MemoryStorage()
    inner.make_directory("run/empty")
    inner.write("run/file", b"0123456789")
    return inner


CALLS: dict[str, Callable[[Storage], object]] = {
    "make_directory": lambda storage: storage.make_directory("run/made"),
    "create": lambda storage: storage.create("run/begun", 4),
    "write": lambda storage: storage.write("run/written", b"abcd"),
    "sync_directory": lambda storage: storage.sync_directory("run"),
    "publish": lambda storage: storage.publish("run/published", b"abcd"),
    "read": lambda storage: storage.read("run/file", 10),
    "open_reader": lambda storage: storage.open_reader("run/file"),
    "list": lambda storage: storage.list("run"),
    "delete": lambda storage: storage.delete(["run/file", "run/empty"]),
    "retire": lambda storage: storage.retire("run"),
}


def _seen(storage: Storage) -> list[str]:
    """All that lies in a storage, with the sizes, and with made-up names cut short."""
    seen = []
    for top in storage.list(""):
        for entry in storage.list(top.name):
            name = entry.name if entry.name[0] != "." else entry.name.rpartition(".")[2]
            seen.append(f"{top.name[:7]}/{name}:{entry.size_bytes}")
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_nothing_done(name: str) -> None:
    inner = _prepared()
    storage = FaultyStorage(inner, [Fault(1)])
    with pytest.raises(StorageError, match=f"call 1 was told to fail, with nothing of it done: {name} run"):
        CALLS[name](storage)
    assert _seen(inner) == ["run/empty:0", "run/file:10"]
    CALLS[name](storage)
    assert [call.name for call in storage.calls] == [name, name]
    assert not storage.is_dead


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("make_directory", ["run/empty:0", "run/file:10", "run/made:0"]),
        ("create", ["run/begun:4", "run/empty:0", "run/file:10"]),
        ("write", ["run/empty:0", "run/file:10", "run/written:4"]),
        ("publish", ["run/empty:0", "run/file:10", "run/published:4"]),
        ("read", ["run/empty:0", "run/file:10"]),
        ("open_reader", ["run/empty:0", "run/file:10"]),
        ("delete", []),
        ("retire", [".trash-/empty:0", ".trash-/file:10"]),
    ],
)
@pytest.mark.parametrize("stops_dead", [False, True])
def test_all_done_and_the_reply_lost(name: str, leaves: list[str], stops_dead: bool) -> None:
    inner = _prepared()
    storage = FaultyStorage(inner, [Fault(1, done="all", stops_dead=stops_dead)])
    with pytest.raises(StoppedDead if stops_dead else StorageError):
        CALLS[name](storage)
    assert _seen(inner) == leaves


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("create", ["run/begun:4", "run/empty:0", "run/file:10"]),
        ("write", ["run/empty:0", "run/file:10", "run/written:2"]),
        ("publish", ["run/tmp:2", "run/empty:0", "run/file:10"]),
        ("delete", ["run/empty:0"]),
        ("retire", ["run/empty:0", "run/file:10"]),
    ],
)
@pytest.mark.parametrize("stops_dead", [False, True])
def test_half_done(name: str, leaves: list[str], stops_dead: bool) -> None:
    inner = _prepared()
    storage = FaultyStorage(inner, [Fault(1, done="half", stops_dead=stops_dead)])
    with pytest.raises(StoppedDead if stops_dead else StorageError):
        CALLS[name](storage)
    assert _seen(inner) == leaves


@pytest.mark.parametrize("name", CALLS)
def test_after_death_nothing_has_any_effect(name: str) -> None:
    inner = _prepared()
    storage = FaultyStorage(inner, [Fault(1, stops_dead=True)])
    with pytest.raises(StoppedDead, match="at call 1: list"):
        storage.list("")
    assert storage.is_dead
    for _ in range(2):
        with pytest.raises(StoppedDead, match=f"before {name}"):
            CALLS[name](storage)
    assert storage.calls == (Call("list", ""),)
    assert _seen(inner) == ["run/empty:0", "run/file:10"]


def test_a_chosen_error_at_a_chosen_call() -> None:
    error = StorageFullError("no room", path="second")
    storage = FaultyStorage(MemoryStorage(), [Fault(2, error=error)])
    storage.write("first", b"")
    with pytest.raises(StorageFullError) as caught:
        storage.write("second", b"")
    assert caught.value is error
    storage.write("third", b"")
    assert storage.calls == (Call("write", "first"), Call("write", "second"), Call("write", "third"))


def test_what_the_call_says_itself_is_lost_too() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault(1, done="all", stops_dead=True)])
    with pytest.raises(StoppedDead):
        storage.read("none", 1)
    assert storage.is_dead


@pytest.mark.parametrize(("done", "content"), [("nothing", b"\0\0\0\0"), ("half", b"ab\0\0"), ("all", b"abcd")])
@pytest.mark.parametrize("stops_dead", [False, True])
def test_torn_write(done: Done, content: bytes, stops_dead: bool) -> None:
    inner = MemoryStorage()
    fault = Fault(2, done=done, stops_dead=stops_dead)
    storage = FaultyStorage(inner, [fault])
    writer = storage.create("file", 4)
    errors = []
    for attempt in (partial(writer.write_at, 0, memoryview(b"abcd")), writer.finish, writer.finish):
        with pytest.raises(StoppedDead if stops_dead else StorageError) as caught:
            attempt()
        errors.append(caught.value)
    assert stops_dead or errors[0] is errors[1] is errors[2]
    writer.abandon()
    assert inner.read("file", 4) == content


def test_finish_fails_for_good() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault(3, done="all")])
    writer = storage.create("file", 1)
    writer.write_at(0, memoryview(b"1"))
    for _ in range(2):
        with pytest.raises(StorageError, match="call 3"):
            writer.finish()


def test_torn_read() -> None:
    inner = MemoryStorage()
    inner.write("file", b"0123")
    storage = FaultyStorage(inner, [Fault(2, done="half")])
    reader = storage.open_reader("file")
    into = bytearray(4)
    with pytest.raises(StorageError):
        reader.read_into(0, memoryview(into))
    assert into == b"01\0\0"
    reader.read_into(0, memoryview(into))
    assert into == b"0123"
    assert storage.calls[1:] == (Call("read_into", "file"), Call("read_into", "file"))


def test_the_inner_error_comes_through() -> None:
    inner = MemoryStorage()
    inner.write("file", b"0123")
    with pytest.raises(DamageError):
        FaultyStorage(inner).read("file", 1)


def test_numbers_are_given_once_among_threads() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault(50, stops_dead=True)])
    outcomes: list[str] = []

    def work() -> None:
        for _ in range(20):
            try:
                storage.list("")
                outcomes.append("done")
            except StoppedDead:
                outcomes.append("dead")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("done") == 49
    assert outcomes.count("dead") == 160 - 49
    assert len(storage.calls) == 50


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="this system does not show which files are open")
def test_death_closes_open_files(tmp_path: Path) -> None:
    before = len(list(OPEN_FILES.iterdir()))
    storage = FaultyStorage(LocalStorage(tmp_path), [Fault(4, stops_dead=True)])
    storage.write("read", b"1")
    reader = storage.open_reader("read")
    writer = storage.create("written", 1)
    with pytest.raises(StoppedDead):
        writer.write_at(0, memoryview(b"1"))
    assert len(list(OPEN_FILES.iterdir())) == before
    writer.abandon()
    reader.close()


def _replace(storage: Storage) -> bool:
    """Puts a new version beside the old one, tells which is current by a publish, and then removes the old one."""
    writer = storage.create("v2/data", len(NEW))
    try:
        writer.write_at(0, memoryview(NEW))
        writer.finish()
    finally:
        writer.abandon()
    storage.sync_directory("v2")
    has_committed = storage.publish("v2/commit", b"token")
    storage.delete(["v1/commit"])
    storage.delete(["v1/data"])
    return has_committed


def _current(storage: Storage) -> bytes:
    for version in ("v2", "v1"):
        if any(entry.name == "commit" for entry in storage.list(version)):
            return storage.read(f"{version}/data", 100)
    raise AssertionError("neither version is there")


def _with_old() -> MemoryStorage:
    inner = MemoryStorage()
    inner.make_directory("v1")
    inner.write("v1/data", OLD)
    inner.publish("v1/commit", b"token")
    return inner


@pytest.mark.parametrize("done", ["nothing", "half", "all"])
@pytest.mark.parametrize("stops_dead", [False, True])
def test_every_call_can_be_the_last(done: Done, stops_dead: bool) -> None:
    """The form of a law test: for each call, the old version or the new one is there, whole."""
    counted = FaultyStorage(_with_old())
    assert _replace(counted)
    assert _current(counted) == NEW
    names = [call.name for call in counted.calls]
    assert names[:7] == ["create", "write_at", "finish", "sync_directory", "publish", "delete", "delete"]
    for number in range(1, 8):
        inner = _with_old()
        fault = Fault(number, done=done, stops_dead=stops_dead)
        with pytest.raises((StorageError, StoppedDead)):
            _replace(FaultyStorage(inner, [fault]))
        is_published = number > 5 or (number == 5 and done == "all")
        assert _current(inner) == (NEW if is_published else OLD)
