"""What threads wait for, where signal handlers raise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from holdfast.process.latch import Latch
from patience import PATIENCE_SECONDS
from repetitions import repeated


class InterruptedWaitError(Exception):
    pass


@pytest.fixture
def raises_on_signal() -> Iterator[None]:
    def strike(number: int, frame: FrameType | None) -> None:
        raise InterruptedWaitError

    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("raises_on_signal")
def test_interrupted_wait_holds_up_no_other() -> None:
    for _ in range(repeated(5000, in_gate=400)):
        latch, begun = Latch(), threading.Barrier(3)
        came: list[bool] = []

        def wait(latch: Latch = latch, begun: threading.Barrier = begun, came: list[bool] = came) -> None:
            begun.wait()
            came.append(latch.wait(PATIENCE_SECONDS))

        def open_and_strike(latch: Latch = latch, begun: threading.Barrier = begun) -> None:
            begun.wait()
            latch.open()
            os.kill(os.getpid(), signal.SIGUSR1)

        threads = [threading.Thread(target=wait, daemon=True), threading.Thread(target=open_and_strike)]
        for thread in threads:
            thread.start()
        begun.wait()
        try:
            latch.wait(PATIENCE_SECONDS)
            threading.Event().wait(PATIENCE_SECONDS)  # For the signal, if it has not come.
        except InterruptedWaitError:
            pass
        for thread in threads:
            thread.join()
        assert came == [True]


def test_latch_lets_through_whenever_it_is_opened() -> None:
    latch = Latch()
    assert not latch.wait(0.0)
    latch.open()
    latch.open()
    assert latch.wait(0.0)
