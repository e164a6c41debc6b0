"""Another thread raises an error in the main thread."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.process.interrupt import Interrupter


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
