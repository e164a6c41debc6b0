"""A job that gets signals while its main thread is in foreign code: MODE DIRECTORY [NUMBER]."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

import holdfast as hf
from holdfast.events import Event, NoticeHeard

LIBC = ctypes.CDLL(None)

# It is locked twice: foreign code that waits until it is unlocked, and that no signal ends.
LOCK = ctypes.create_string_buffer(64)

STATE = {"value": np.zeros(10)}
GRACE = hf.TerminationConfig(grace_period=10**6)


def unlock() -> None:
    LIBC.pthread_mutex_unlock(LOCK)


def send_to_waiting(numbers: tuple[int, ...], unlocks: bool) -> None:
    """Sends signals when the main thread waits for the lock."""
    call = Path(f"/proc/self/task/{threading.main_thread().native_id}/syscall")
    while f"{ctypes.addressof(LOCK):#x}" not in call.read_text().split():
        pass
    for number in numbers:
        os.kill(os.getpid(), number)
    if unlocks:
        unlock()


def wait_in_foreign_code(*numbers: int, unlocks: bool = False) -> None:
    threading.Thread(target=send_to_waiting, args=(numbers, unlocks), daemon=True).start()
    LIBC.pthread_mutex_lock(LOCK)
    LIBC.pthread_mutex_lock(LOCK)


def train_with_three_at_once(directory: str) -> None:
    """Python runs the handler of a signal that has come several times once."""
    with hf.resumable(directory, state=STATE, save_every=hf.Steps(100)) as run:
        for _ in run.steps(10):
            wait_in_foreign_code(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, unlocks=True)


def train_with_two_and_one(directory: str) -> None:
    """Two count in foreign code; the third, which comes there too, has no effect."""
    heard = []

    def insist(event: Event) -> None:
        if isinstance(event, NoticeHeard):
            heard.append(event)
            print(event.text.split()[0], run.should_stop(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM if len(heard) == 1 else signal.SIGUSR2)
            if len(heard) == 2:
                unlock()

    with hf.resumable(directory, state=STATE, preemption=GRACE, sinks=[insist]) as run:
        for _ in run.steps(1000):
            wait_in_foreign_code(signal.SIGTERM)


def train_until_heard(directory: str, number: int) -> None:
    """Foreign code does not end before the signal was heard. Twice: the first one is not taken for the second."""
    calls: list[int] = []
    heard = threading.Semaphore(0)
    before = signal.signal(number, lambda *_: calls.append(run.step))
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, before)

    def hear(event: Event) -> None:
        if isinstance(event, NoticeHeard):
            print(event.text.split()[0], run.should_stop(), calls, flush=True)
            heard.release()

    def unlock_when_heard() -> None:
        for _ in range(2):
            heard.acquire()
            unlock()

    threading.Thread(target=unlock_when_heard, daemon=True).start()
    with hf.resumable(directory, state=STATE, preemption=GRACE, sinks=[hear]) as run:
        for step in run.steps(1000):
            if step in (3, 6):
                wait_in_foreign_code(number if step == 3 else signal.SIGUSR1)
                unlock()
                print("went on in", step, calls, flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["three at once", directory]:
            train_with_three_at_once(directory)
        case ["two and one", directory]:
            train_with_two_and_one(directory)
        case ["until heard", directory, number]:
            train_until_heard(directory, int(number))
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
