"""The threads that share out jobs: they do each job once, and survive an interrupt at any point of their lives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from command_line import run_file
from holdfast.process.worker_pool import WorkerPool
from patience import PATIENCE_SECONDS


@pytest.mark.parametrize("size", [1, 2, 5])
def test_does_each_job_once(size: int) -> None:
    done: list[int] = []
    pool = WorkerPool(size, "pool")
    pool.start()
    try:
        for _ in range(3):
            done.clear()
            pool.run(partial(done.append, number) for number in range(100))
            assert sorted(done) == list(range(100))
    finally:
        pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pool")]


@pytest.mark.parametrize("most_helpers", [0, 1])
def test_no_more_threads_help_than_may(most_helpers: int) -> None:
    pool = WorkerPool(4, "pool")
    pool.start()
    seen: set[int] = set()
    try:
        for _ in range(50):
            pool.run((lambda: seen.add(threading.get_ident()) for _ in range(50)), most_helpers)
            assert len(seen) <= 1 + most_helpers
            seen.clear()
    finally:
        pool.close()


def test_the_first_error_ends_the_round_and_not_the_pool() -> None:
    pool = WorkerPool(3, "pool")
    pool.start()
    try:
        with pytest.raises(ZeroDivisionError):
            pool.run(partial(divmod, 1, number - 50) for number in range(100))
        done: list[int] = []
        pool.run([lambda: done.append(1)])
        assert done == [1]
    finally:
        pool.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_survives_what_it_was_given() -> None:
    pool = WorkerPool(3, "pool")
    assert pool.start()
    for _ in range(3):
        pool.put(partial(divmod, 1, 0))
    seen: set[int] = set()
    gathered = threading.Barrier(3)

    def meet() -> None:
        gathered.wait(PATIENCE_SECONDS)
        seen.add(threading.get_ident())

    pool.begin([meet] * 3).wait()
    assert len(seen) == 3
    pool.close()


def test_threads_do_jobs_while_their_owner_continues() -> None:
    pool = WorkerPool(2, "pool")
    assert pool.start()
    assert pool.start(), "harmless twice"
    go_on = threading.Event()
    done: list[int] = []
    round = pool.begin([lambda: go_on.wait(PATIENCE_SECONDS), *(partial(done.append, number) for number in range(9))])
    go_on.set()
    round.wait()
    assert sorted(done) == list(range(9))
    with pytest.raises(ZeroDivisionError):
        pool.begin([partial(divmod, 1, 0)]).wait()
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pool")]


def test_error_of_the_jobs_iterator_is_raised_to_the_caller() -> None:
    gathered = threading.Barrier(2)

    def jobs() -> Iterator[Callable[[], object]]:
        # Both threads are in the round, so that either may be the one to meet the error.
        yield gathered.wait
        yield gathered.wait
        raise ZeroDivisionError

    pool = WorkerPool(2, "pool")
    pool.start()
    try:
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                pool.run(jobs())
    finally:
        pool.close()


def test_an_interrupt_at_any_point_leaves_nothing_to_hang_on() -> None:
    run = run_file("interrupted", "pools")
    assert run.returncode == 0, run.stderr
    interrupted, alive = map(int, run.stdout.split())
    assert 0 < interrupted < 2000
    assert alive == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of this process is looked up in /proc")
def test_threads_that_lack_memory_to_begin_are_not_waited_for() -> None:
    done = run_file("scarce_threads", preload=None)
    assert done.returncode == 0, done.stderr


def test_one_that_lives_until_the_interpreters_end_says_nothing_there() -> None:
    """Its module's names are gone by then."""
    done = run_file("kept_pool", preload=None)
    assert (done.returncode, done.stderr) == (0, "")
