"""Another thread raises an error in the main thread."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.process.interrupt import SIGNAL, Interrupter


def test_interrupt_at_the_moment_of_a_sleep_ends_it() -> None:
    """Python runs its handler before the main thread blocks, or after: a signal in between is not noticed."""
    for _ in range(100):
        interrupter, begins = Interrupter(KeyboardInterrupt), threading.Event()

        def interrupt(interrupter: Interrupter = interrupter, begins: threading.Event = begins) -> None:
            while not begins.is_set():
                pass
            interrupter.interrupt()

        interrupter.open()
        try:
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  The moment is what counts.
                begins.set()
                time.sleep(600)  # What the interrupt ends.
            thread.join()
        finally:
            interrupter.close()


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_many_interrupts_before_an_answer_start_one_thread() -> None:
    """Here the signal is held back, as by a long call of a library."""
    interrupter, before = Interrupter(KeyboardInterrupt), count_threads()
    interrupter.open()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        for _ in range(1000):
            interrupter.interrupt()
        started = count_threads() - before
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  The signal is answered here, or at the next call.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
            time.sleep(600)
    finally:
        interrupter.close()
    assert started <= 2, "a thread, and the one that starts it"
