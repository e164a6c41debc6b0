"""Fails the test that leaves something open which hears notices.

It would hear the signals that later tests send for purposes of their own, save, leave, and so end the process of all.
A run that was left by a signal keeps its handlers for a minute, as the process is to exit: here they go at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from holdfast.preemption.sources.signals import Signals

_END_SECONDS: Final = 5.0

# What earlier tests have left open: each is reported once.
_told: list[object] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    for number in signal.valid_signals():
        owner = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(owner, Signals) and not owner.is_open:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    source = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    left: list[object] = [source]
    if not (isinstance(source, Signals) and source.is_open):
        # Those of other threads than the main one have no handlers.
        left = [thread for thread in threading.enumerate() if thread.name == "holdfast-guard" and _outlasts(thread)]
    if new := [each for each in left if each not in _told]:
        _told.extend(new)
        pytest.fail("what hears notices was left open: use it with `with`, or close it")


def _outlasts(thread: threading.Thread) -> bool:
    """Whether it lives on: one that has been told to end takes a moment."""
    if thread not in _told:
        thread.join(_END_SECONDS)
    return thread.is_alive()
