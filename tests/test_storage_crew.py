"""The threads that share out jobs: they do each job once, and survive an interrupt at any point of their lives."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from command_line import run_python
from holdfast.storage.crew import Crew


@pytest.mark.parametrize("size", [1, 2, 5])
def test_does_each_job_once(size: int) -> None:
    done: list[int] = []
    crew = Crew(size, "crew")
    crew.start()
    try:
        for _ in range(3):
            done.clear()
            crew.run(partial(done.append, number) for number in range(100))
            assert sorted(done) == list(range(100))
    finally:
        crew.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crew")]


def test_the_first_error_ends_the_round_and_not_the_crew() -> None:
    crew = Crew(3, "crew")
    crew.start()
    try:
        with pytest.raises(ZeroDivisionError):
            crew.run(partial(divmod, 1, number - 50) for number in range(100))
        done: list[int] = []
        crew.run([lambda: done.append(1)])
        assert done == [1]
    finally:
        crew.close()


def test_an_interrupt_at_any_point_leaves_nothing_to_hang_on() -> None:
    run = run_python(
        """
        import random, signal, threading
        from holdfast.storage.crew import Crew

        class Interrupted(BaseException):
            pass

        def interrupt(number, frame):
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        dice = random.Random(1)
        interrupted = 0
        for _ in range(2000):
            crew = Crew(4, "crew")
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 2e-3))
                    crew.start()
                    for _ in range(4):
                        crew.run([int] * 50)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
            crew.close()
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join(30)
        print(interrupted, threading.active_count())
        """
    )
    assert run.returncode == 0, run.stderr
    interrupted, alive = map(int, run.stdout.split())
    assert 0 < interrupted < 2000
    assert alive == 1
