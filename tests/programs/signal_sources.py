"""What a process does to which signals come while sources hear them; the first argument names the program."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from holdfast.preemption import Kubernetes, Notice, Signals
from holdfast.process.wakeup import Wakeup


def declines_the_third() -> None:
    heard: list[Notice] = []

    def note(notice: Notice) -> bool:
        heard.append(notice)
        return len(heard) < 3

    Signals().open(note)
    for _ in range(3):
        print("alive", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    print("too far")


def ignores_one() -> None:
    def note(notice: Notice) -> bool:
        print(notice.text.split()[0], notice.left_seconds, notice.by_hand)
        return True

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    source = Kubernetes(12)
    source.open(note)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    source.close()
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM))


def forks() -> None:
    heard: list[Notice] = []

    def note(notice: Notice) -> bool:
        heard.append(notice)
        return True

    Signals().open(note)
    bell = Wakeup()
    bell.take_signals()
    child = os.fork()
    if not child:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os._exit(7)
    print(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), heard, bell.listen(0.2))


def hangs_in_foreign_code() -> None:
    Signals().open(lambda notice: True)
    bell = Wakeup()
    bell.take_signals()

    def listen() -> None:
        print(bell.listen(60), flush=True)
        os._exit(0)

    threading.Thread(target=listen).start()
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    # A lock that is taken twice: foreign code that waits for ever, and that no signal ends.
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


PROGRAMS = {program.__name__: program for program in (declines_the_third, ignores_one, forks, hangs_in_foreign_code)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
