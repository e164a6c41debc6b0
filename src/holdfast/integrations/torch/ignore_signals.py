"""Keeps a loader's workers at work when a signal goes to all processes of a job."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Final

from torch.utils.data import DataLoader

_PASSED_OVER: Final = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_BLOCKED_AT_START: Final = (signal.SIGTERM, *_PASSED_OVER)


class IgnoreSignals:
    """A `worker_init_fn` that lets a worker pass over signals that are meant for the training process.

    Schedulers send `SIGTERM` to every process of a job. Workers would die of it first, and the training process amid a
    step, for want of a batch. With this they serve until that process lets them go: it tells them to end, it ends
    itself, or it sends them `SIGTERM` as `Process.terminate` does.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        """Takes note of the user's own function, which is called afterwards."""
        self._then = then

    def __call__(self, worker: int) -> None:
        """Called in the worker, before it loads anything."""
        for number in _PASSED_OVER:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_OVER)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _thread.start_new_thread(_wait_for_parent, ())
        if self._then is not None:
            self._then(worker)


class SignalProofLoader(DataLoader[Any]):
    """A `DataLoader` whose workers begin with these signals blocked.

    A signal that is blocked in all threads of a process can be taken by one that waits for it, and is told who has sent
    it. Libraries start threads of their own when they are imported, so it has to be blocked before that.
    """

    def __iter__(self) -> Any:
        """Starts the workers."""
        is_forked = self.multiprocessing_context is None and multiprocessing.get_start_method() == "fork"
        if self.num_workers and not is_forked:
            # It unblocks signals when it starts, so it starts before they are blocked.
            resource_tracker.ensure_running()
        with _blocked():
            return super().__iter__()


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_AT_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if parent is None or sender in (parent.pid, os.getpid()):
            os._exit(0)
