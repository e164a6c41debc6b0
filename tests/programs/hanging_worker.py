"""Trains a few steps, and then hangs in the way that is named, until it is killed."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

import holdfast as hf

how, directory = sys.argv[1:3]


class Batches:
    """Batches, of which one does not come."""

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            if how == "data" and number == 4:
                os.read(os.pipe()[0], 1)
            yield number


class Slow:
    """State that cannot be read at the third save, or not be restored."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        self.count += 1
        if how == "copy" and self.count >= 3:
            time.sleep(3600)
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if how == "restore":
            time.sleep(3600)


def hang() -> None:
    """Hangs without and with the interpreter's lock."""
    if how == "sleeping":
        time.sleep(3600)
    if how == "first":
        time.sleep(3600)
    if how == "spinning":
        while True:
            pass
    if how == "locked":
        ctypes.PyDLL(None).usleep(2**31)
    if how == "searching":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if how == "commit":
        blocked.set()
    if how == "stopped":
        os.kill(os.getpid(), 19)


blocked = threading.Event()


def write_slowly(event: hf.events.Event) -> None:
    """A sink that keeps the thread which writes, as a dead disk does."""
    if blocked.is_set():
        time.sleep(3600)


with hf.resumable(directory, slow=Slow(), save_every=2, sinks=[write_slowly]) as run:
    for step, _ in zip(run.steps(20), run.batches(Batches()), strict=False):
        if step == (0 if how == "first" else 5):
            hang()
        if step == 8 and how != "commit":
            break
    if how == "leaving":
        time.sleep(3600)
