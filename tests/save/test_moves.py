"""Copies between addresses: the compiled ones and those by way of the C library do the same."""

from __future__ import annotations

import ctypes
import shutil
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from command_line import run_python
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.copy_plan import NATIVE, Move, plan_copies

PACKAGE = Path(holdfast.__file__).parent

WAYS = [
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(NATIVE is None, reason="it is not compiled here")),
    pytest.param(False, id="library"),
]


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="this machine has no compiler, or not Python's header",
)
def test_where_a_compiler_is_an_installation_has_the_compiled_copy() -> None:
    assert NATIVE is not None, "an installation compiles it: `make clean test`, or `pip install -e .`"


def sizes() -> st.SearchStrategy[int]:
    """From nothing to more than one part, with those next to where another way is taken."""
    edges = [0, 1, 63, 64, 65, 4096, 4 * 4096, 4 * 4096 + 63, 4 * 4096 + 64, 4 * 4096 + 65, (4 << 20) + 1]
    return st.one_of(st.sampled_from(edges), st.integers(0, 300_000), st.integers(0, 5 << 20))


@pytest.mark.parametrize("native", WAYS)
@given(
    pieces=st.lists(st.tuples(sizes(), st.integers(0, 130), st.integers(0, 130)), max_size=20),
    seed=st.integers(0, 255),
)
def test_each_byte_comes_where_it_belongs_and_no_other_is_touched(
    native: bool, pieces: list[tuple[int, int, int]], seed: int
) -> None:
    room = sum(size + max(gaps) for size, *gaps in pieces) + 1
    pattern = bytes((seed + 7 * number) % 251 for number in range(251))
    source = ctypes.create_string_buffer((pattern * (room // len(pattern) + 1))[:room], room)
    target = ctypes.create_string_buffer(b"\xff" * room, room)
    expected = bytearray(b"\xff" * room)
    moves: list[Move] = []
    begin, origin = 0, 0
    for size, gap, other_gap in pieces:
        begin, origin = begin + gap, origin + other_gap
        moves.append((ctypes.addressof(target) + begin, ctypes.addressof(source) + origin, size))
        expected[begin : begin + size] = memoryview(source)[origin : origin + size]
        begin, origin = begin + size, origin + size
    for copy in plan_copies(moves, native=native):
        copy.run()
    is_right = memoryview(target).cast("B") == expected
    # What is compared is too much to be shown.
    assert is_right


@pytest.mark.parametrize("native", WAYS)
def test_several_threads_share_out_pieces_of_all_sizes(native: bool) -> None:
    counts = [size * 7919 % 20_000 + 1 for size in range(3000)] + [300_000, 20 << 20]
    total_bytes = sum(counts)
    source = ctypes.create_string_buffer((bytes(range(251)) * (total_bytes // 251 + 1))[:total_bytes], total_bytes)
    target = ctypes.create_string_buffer(total_bytes)
    moves: list[Move] = []
    begin = 0
    for size in counts:
        moves.append((ctypes.addressof(target) + begin, ctypes.addressof(source) + begin, size))
        begin += size
    copies = plan_copies(moves, native=native)
    assert len(copies) > 6
    pool = WorkerPool(3, "test-moves")
    pool.start()
    try:
        pool.run(copy.run for copy in copies)
    finally:
        pool.close()
    # As bytes: what has another type is compared one by one, in seconds.
    is_right = memoryview(target).cast("B") == memoryview(source).cast("B")
    assert is_right


@pytest.mark.parametrize("is_foreign", [False, True])
def test_it_saves_and_restores_without_a_compiled_copy(tmp_path: Path, is_foreign: bool) -> None:
    """As where holdfast was installed without a compiler; or where what was compiled is of another version."""
    shutil.copytree(PACKAGE, tmp_path / "plain" / "holdfast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if is_foreign:
        (tmp_path / "plain" / "holdfast" / "save" / "_moves.py").write_text("other = 1\n")
    done = run_python(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        import numpy as np, holdfast as hf
        from holdfast.save.copy_plan import NATIVE

        assert hf.__file__.startswith(sys.argv[2]) and NATIVE is None
        state = {f"w{size}": np.arange(size, dtype=np.float32) for size in (0, 1, 100, 5_000, 40_000, 5_000_000)}
        state |= {f"small{number}": np.full(50, number) for number in range(100)}
        with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state)) as manager:
            manager.save(1).wait_committed()
        before = {name: array.copy() for name, array in state.items()}
        for array in state.values():
            array[...] = -1
        with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state)) as manager:
            manager.restore()
        assert all(np.array_equal(state[name], array) for name, array in before.items())
        """,
        str(tmp_path / "run"),
        str(tmp_path / "plain"),
        preload=None,
    )
    assert done.returncode == 0, done.stderr
