"""Reads of a directory of this machine: many places at once, past the page cache, and the memory that they take."""

from __future__ import annotations

import gc
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from command_line import flip_bit
from holdfast.convert.exporter import export_checkpoint
from holdfast.errors import DamageError
from holdfast.format.digests import digest
from holdfast.restore.verify import CheckOutcome, judge_step
from holdfast.storage import LocalStorage
from holdfast.storage.buffers import Scratch, address_of, parts_beyond, take_pages
from holdfast.storage.local.direct import PAGE_BYTES, Residency
from holdfast.storage.local.streams import LocalReader


@pytest.mark.parametrize("native", [True, False])  # Without a compiler, through the cache.
def test_many_places_are_filled_past_the_cache(native: bool, tmp_path: Path) -> None:
    size_bytes = (9 << 20) + 123
    content = os.urandom(1 << 20) * 10
    content = content[:size_bytes]
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = LocalReader(os.open(tmp_path / "file", os.O_RDONLY), "file", tmp_path, size_bytes, native=native)
    try:
        for offset in (0, 4096, 4097):
            lengths = [7, 0, 5 << 20, 200_000, *[1000] * 2000, (1 << 20) + 1]
            memory = bytearray(sum(lengths))
            view = memoryview(memory)
            parts = [view[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
            assert reader.read_digested(offset, parts) == list(map(digest, parts))
            assert memory == content[offset : offset + len(memory)]
    finally:
        reader.close()


@given(st.lists(st.integers(1, 5), min_size=1), st.data())
def test_what_is_left_to_fill_begins_where_the_last_read_ended(lengths: list[int], data: st.DataObject) -> None:
    filled_bytes = data.draw(st.integers(0, sum(lengths) - 1))
    content = memoryview(bytes(range(sum(lengths) % 251 + 1)) * 251)
    parts = [content[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
    assert b"".join(parts_beyond(parts, filled_bytes)) == content[filled_bytes : sum(lengths)]


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_for_what_is_on_its_way(size_bytes: int) -> None:
    memory = take_pages(size_bytes)
    assert address_of(memory) % PAGE_BYTES == 0
    assert (len(memory), memory.readonly, memory.format) == (size_bytes, False, "B")
    memory[:] = b"x" * size_bytes
    scratch = Scratch()
    first = scratch.take(size_bytes)
    assert address_of(scratch.take(size_bytes)) == address_of(first)
    assert len(scratch.take(2 * size_bytes)) == 2 * size_bytes


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 62, 1 << 63])
def test_more_memory_than_there_is(size_bytes: int) -> None:
    with pytest.raises(MemoryError):
        take_pages(size_bytes)


def test_what_was_just_read_is_in_memory(tmp_path: Path) -> None:
    size_bytes = (70 << 20) + 5
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(size_bytes)
        file.seek(0)
        while file.read(8 << 20):
            pass
        residency = Residency(file.fileno(), size_bytes)
        assert all(residency.holds(begin, begin + 1) for begin in range(0, size_bytes, 1 << 20))
        assert residency.holds(size_bytes - 1, size_bytes)
        assert residency.holds(0, size_bytes)
        residency.close()
        assert residency.holds(0, size_bytes)


def held_below(directory: Path) -> list[str]:
    """The files in a directory that this process has open or mapped."""
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [path for path in [*files, *lines] if str(directory) in path]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it looks into /proc")
def test_no_file_is_held_after_its_read_without_garbage_collection(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = {"array": np.ones(3 << 20, np.uint8)}
    with hf.CheckpointManager(run, hf.Checkpoint(state=state)) as manager:
        for step in (1, 2):
            manager.save(step).wait_ended()
    directories = sorted(run.glob("step-*"))
    for file in (next(directory.glob("data-*")) for directory in directories):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    gc.disable()
    try:
        with hf.CheckpointManager(run, hf.Checkpoint(state=state)) as manager:
            for _ in range(2):  # From the disk, and from the page cache.
                manager.restore()
            assert judge_step(LocalStorage(run), directories[0].name, None).outcome is CheckOutcome.WHOLE
            export_checkpoint(run, tmp_path / "out", to="safetensors")
            flip_bit(next(directories[1].glob("data-*")), 2 << 20)
            restored = manager.restore()
            assert restored is not None
            assert restored.step == 1
            assert judge_step(LocalStorage(run), directories[1].name, None).outcome is CheckOutcome.DAMAGED
            with pytest.raises(DamageError):
                export_checkpoint(run, tmp_path / "other", to="safetensors", step=2)
            assert held_below(run) == []
    finally:
        gc.enable()
