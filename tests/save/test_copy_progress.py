"""Who writes a snapshot that is still being copied sees no byte of it before it is there."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import CalledOffError, CopyProgress
from repetitions import repeated


class Writer(threading.Thread):
    """Waits for the image up to some byte, and notes how many copies were made by then."""

    def __init__(self, copied: CopyProgress, end: int, made: list[int]) -> None:
        super().__init__(daemon=True)
        self._copied = copied
        self._made = made
        self.end = end
        self.seen: set[int] | None = None

    def run(self) -> None:
        self._copied.wait(self.end)
        self.seen = set(self._made)


@settings(deadline=None, max_examples=repeated(60, in_gate=20))
@given(
    begins=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    ends=st.lists(st.integers(0, 120), max_size=4),
    seed=st.integers(0, 1000),
)
def test_wait_for_a_part_ends_when_all_of_it_is_copied(begins: list[int], ends: list[int], seed: int) -> None:
    copied, made = CopyProgress(begins), list[int]()
    writers = [Writer(copied, end, made) for end in ends]
    for writer in writers:
        writer.start()
    order = random.Random(seed).sample(range(len(begins)), len(begins))
    for count in range(len(order) + 1):
        level = min((begins[number] for number in order[count:]), default=1000)
        for writer in writers:
            if writer.end <= level:
                writer.join(60)
                assert writer.seen is not None
        if count < len(order):
            copied.make(order[count], lambda number=order[count]: made.append(number))  # type: ignore[misc]
    for writer in writers:
        assert writer.seen is not None
        assert {number for number, begin in enumerate(begins) if begin < writer.end} <= writer.seen


def test_all_of_it_is_there_when_the_last_copy_is_made() -> None:
    copied = CopyProgress([0, 8])
    copied.begin()
    seen: list[str] = []

    def write() -> None:
        copied.wait()
        seen.append("written")

    thread = threading.Thread(target=write)
    thread.start()
    copied.make(1, list)
    copied.make(0, lambda: seen.append("copied"))
    thread.join(60)
    assert seen == ["copied", "written"]
    assert copied.copy_ended.is_open
    assert copied.error is None


def test_where_nothing_is_to_be_copied_it_has_ended_when_it_begins() -> None:
    copied = CopyProgress()
    assert not copied.copy_ended.wait(0)
    copied.begin()
    assert copied.copy_ended.wait(0)
    copied.wait()


@pytest.mark.parametrize("is_called_off", [True, False])
def test_no_thread_waits_for_a_copy_that_will_never_be_complete(is_called_off: bool) -> None:
    copied = CopyProgress([0, 8])
    ended: list[int] = []
    expected = CalledOffError if is_called_off else ZeroDivisionError

    def write(end: int) -> None:
        with pytest.raises(expected):
            copied.wait(end)
        ended.append(end)

    threads = [threading.Thread(target=write, args=(end,)) for end in (1, 9, 20)]
    for thread in threads:
        thread.start()
    if is_called_off:
        copied.call_off()
    with pytest.raises(expected):
        copied.make(0, lambda: 1 // 0)
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == [1, 9, 20]
    assert copied.copy_ended.is_open


def test_what_is_complete_can_no_longer_be_called_off() -> None:
    copied = CopyProgress([0])
    copied.make(0, list)
    copied.call_off()
    copied.fail(ZeroDivisionError())
    copied.wait()
    assert copied.error is None


def test_what_is_not_taken_before_all_is_copied_is_left() -> None:
    copied = CopyProgress([0])
    done: list[str] = []
    jobs = iter([lambda: done.append("first"), lambda: copied.make(0, list), lambda: done.append("last")])
    WorkerPool(1, "one").run(copied.while_copied(jobs))
    assert done == ["first"]
    WorkerPool(1, "one").run(jobs)
    assert done == ["first", "last"]
