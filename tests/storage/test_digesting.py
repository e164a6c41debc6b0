"""Digests of what is read: the compiled ones and Python's are the same."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sysconfig
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from command_line import run_python
from holdfast.errors import DamageError, StorageError, UsageError
from holdfast.format.digests import digest
from holdfast.storage.digesting import NO_PAGES, find_native
from holdfast.storage.local.streams import LocalReader, LocalWriter

NATIVE = find_native()
PACKAGE = Path(holdfast.__file__).parent

COMPILED = pytest.mark.skipif(NATIVE is None, reason="it is not compiled here")
WAYS = [pytest.param(True, id="compiled", marks=COMPILED), pytest.param(False, id="python")]


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="this machine has no compiler, or not Python's header",
)
def test_where_a_compiler_is_an_installation_has_the_compiled_digests() -> None:
    assert NATIVE is not None, "an installation compiles it: `make clean test`, or `pip install -e .`"


def open_reader(file: Path, *, native: bool, direct: bool = False) -> LocalReader:
    """A reader of a file, which the page cache lets go of before if it is to be read past it."""
    descriptor = os.open(file, os.O_RDONLY)
    if direct:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return LocalReader(descriptor, file.name, file.parent, file.stat().st_size, direct=direct, native=native)


def lengths() -> st.SearchStrategy[int]:
    """With those next to where xxHash changes its way, and to what is read at a time."""
    edges = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1 << 20]
    return st.one_of(st.sampled_from(edges), st.integers(0, 100_000), st.integers(0, 3 << 20))


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("direct", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(lengths(), max_size=12), offset=st.integers(0, 5000), seed=st.integers(0, 250))
def test_each_byte_comes_where_it_belongs_with_its_digest(
    native: bool, direct: bool, tmp_path: Path, sizes: list[int], offset: int, seed: int
) -> None:
    total_bytes = sum(sizes)
    pattern = bytes((seed + 7 * number) % 251 for number in range(251))
    content = (pattern * ((offset + total_bytes) // 251 + 2))[: offset + total_bytes + 9]
    (tmp_path / "file").write_bytes(content)
    memory = bytearray(b"\xff" * (total_bytes + len(sizes) + 1))
    expected = bytearray(memory)
    parts = []
    for gap, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True), start=1):
        parts.append(memoryview(memory)[gap + end - size : gap + end])
        expected[gap + end - size : gap + end] = content[offset + end - size : offset + end]
    reader = open_reader(tmp_path / "file", native=native, direct=direct)
    try:
        digests = reader.read_digested(offset, parts)
    finally:
        reader.close()
    # What is compared is too much to be shown.
    is_right = memory == expected
    assert is_right
    assert digests == [digest(part) for part in parts]


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("held_bytes", [0, 1, 999, 1000, 4096, 300_000, 2_600_999])
def test_a_file_that_ends_early_is_damaged_where_it_ends(
    native: bool, direct: bool, tmp_path: Path, held_bytes: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2_602_000))
    reader = open_reader(file, native=native, direct=direct)
    os.truncate(file, held_bytes)
    try:
        with pytest.raises(DamageError) as caught:
            reader.read_digested(0, [memoryview(bytearray(size)) for size in (1000, 0, 2_600_000)])
        assert (caught.value.path, caught.value.offset_bytes) == ("file", held_bytes)
        os.truncate(file, 2_602_000)
        assert reader.read_digested(1000, [memoryview(bytearray(5))]) == [digest(bytes(5))]
    finally:
        reader.close()


@pytest.mark.parametrize("direct", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(lengths(), min_size=1, max_size=8),
    shift=st.sampled_from([0, 0, 1, 4096]),
    begins=st.lists(st.integers(0, 9 << 20), max_size=6),
)
def test_each_byte_comes_into_the_file_with_the_digests_asked_for(
    direct: bool, tmp_path: Path, sizes: list[int], shift: int, begins: list[int]
) -> None:
    """Pieces of any size, from memory that begins on a page and from other; parts in a piece and beyond it."""
    total_bytes = sum(sizes)
    memory = memoryview(mmap.mmap(-1, total_bytes + 2 * 4096))[shift:]
    pattern = bytes(number * 7 % 251 for number in range(251))
    memory[:total_bytes] = (pattern * (total_bytes // 251 + 1))[:total_bytes]
    (tmp_path / "file").unlink(missing_ok=True)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    writer = LocalWriter(descriptor, "file", tmp_path, total_bytes, direct)
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        own = sorted(begin for begin in begins if end - size <= begin < end)
        parts = [memory[begin : begin + 70_000 if begin % 2 else end] for begin in own]
        digests = writer.write_at(end - size, memory[end - size : end], parts)
        assert digests == [digest(part) for part in parts]
    writer.finish()
    is_right = (tmp_path / "file").read_bytes() == memory[:total_bytes]
    assert is_right


@COMPILED
@pytest.mark.parametrize(("page_bytes", "told"), [(1, errno.EFBIG), (4096, errno.EIO)])
def test_each_byte_comes_there_also_where_writes_are_cut_short(page_bytes: int, told: int, tmp_path: Path) -> None:
    """A limit of the file's size cuts a write short, and refuses the next one."""
    assert NATIVE is not None
    file, content = tmp_path / "file", memoryview(bytes(range(256)) * 80)
    done = run_python(
        """
        import os, resource, signal, sys
        from holdfast.storage.digesting import find_native

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        native, content = find_native(), memoryview(bytes(range(256)) * 80)
        file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        try:
            native.write(file, 0, content, [content], int(sys.argv[2]))
        except OSError as error:
            print(error.errno)
        """,
        str(file),
        str(page_bytes),
    )
    # It was cut short once, went on there, or at the beginning of that page, and was refused then.
    assert done.stdout.split() == [str(told)], done.stderr
    assert file.read_bytes() == content[:10_000]


@COMPILED
def test_the_compiled_write_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    from holdfast.storage import _digesting  # type: ignore[attr-defined]

    assert NATIVE is not None
    data = memoryview(b"x" * 8)
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(ValueError, match="five functions"):
            _digesting.write_digested(bytes(64), 1, file.fileno(), 0, data, [data], 1)
        for offset, page in ((-1, 1), (0, 0)):
            with pytest.raises(ValueError, match="begin at 0"):
                NATIVE.write(file.fileno(), offset, data, [data], page)
        with pytest.raises(TypeError):
            NATIVE.write(file.fileno(), 0, data, [5], 1)  # type: ignore[list-item]
        with pytest.raises(OSError, match="Bad file descriptor"):
            NATIVE.write(-1, 0, data, [data], 1)
        assert NATIVE.write(file.fileno(), 0, data, [], 1) == []
        assert NATIVE.write(-1, 0, NO_PAGES, [data, NO_PAGES], 1) == [digest(data), digest(b"")]
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("native", WAYS)
def test_what_the_device_says_is_an_error_of_the_storage(native: bool, tmp_path: Path) -> None:
    """A directory in place of a file: the system refuses to read it."""
    reader = LocalReader(os.open(tmp_path, os.O_RDONLY), "file", tmp_path, 1 << 20, direct=False, native=native)
    with pytest.raises(StorageError):
        reader.read_digested(0, [memoryview(bytearray(8))])
    with pytest.raises(UsageError):
        reader.read_digested(-1, [memoryview(bytearray(8))])
    reader.close()
    with pytest.raises(UsageError):
        reader.read_digested(0, [memoryview(bytearray(8))])


@COMPILED
def test_the_compiled_read_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    """Places that cannot be written, and other addresses than it needs: none is touched."""
    from holdfast.storage import _digesting  # type: ignore[attr-defined]

    (tmp_path / "file").write_bytes(bytes(100))
    assert NATIVE is not None
    with (tmp_path / "file").open("rb") as file:
        writable = bytearray(b"x" * 8)
        with pytest.raises((BufferError, TypeError)):
            NATIVE.read(file.fileno(), 0, [memoryview(writable), memoryview(b"read only")], NO_PAGES)
        with pytest.raises(TypeError):
            NATIVE.read(file.fileno(), 0, [memoryview(writable), 5], NO_PAGES)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="five functions"):
            _digesting.read_digested(bytes(64), file.fileno(), 0, [memoryview(writable)], NO_PAGES)
        with pytest.raises(ValueError, match="whole pages"):
            NATIVE.read(file.fileno(), 0, [memoryview(writable)], memoryview(bytearray(4097)))
        assert writable == b"x" * 8
        writable.append(0)  # No view of it is held any more.
        with pytest.raises(OSError, match="Bad file descriptor"):
            NATIVE.read(-1, 0, [memoryview(writable)], NO_PAGES)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_it_restores_and_finds_damage_without_a_compiled_read(tmp_path: Path, is_foreign: bool) -> None:
    """As where holdfast was installed without a compiler; or where what was compiled is of another version."""
    shutil.copytree(PACKAGE, tmp_path / "plain" / "holdfast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if is_foreign:
        # It reads, and gives other digests.
        (tmp_path / "plain" / "holdfast" / "storage" / "_digesting.py").write_text(
            "import os\n"
            "def read_digested(functions, file, offset, parts, pages):\n"
            "    return offset + os.preadv(file, parts, offset), ['0' * 32] * len(parts)\n"
            "def write_digested(functions, piece, file, offset, data, parts, page):\n"
            "    return ['0' * 32] * len(parts)\n"
        )
    done = run_python(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        import numpy as np, holdfast as hf
        from pathlib import Path
        from holdfast.storage.digesting import find_native

        assert hf.__file__.startswith(sys.argv[2]) and find_native() is None
        state = {f"w{size}": np.arange(size, dtype=np.float32) for size in (0, 1, 100, 40_000, 5_000_000)}
        before = {name: array.copy() for name, array in state.items()}
        with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state)) as manager:
            for step in (1, 2):
                manager.save(step).wait_committed()
        data = sorted(Path(sys.argv[1]).glob("step-*/data-*"))[-1]
        with data.open("r+b") as file:
            file.seek(-3, 2)
            file.write(b"!")
        for array in state.values():
            array[...] = -1
        with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state)) as manager:
            assert manager.restore().step == 1
        assert all(np.array_equal(state[name], array) for name, array in before.items())
        """,
        str(tmp_path / "run"),
        str(tmp_path / "plain"),
        preload=None,
    )
    assert done.returncode == 0, done.stderr
