"""Calls to a store that may never return, each with a deadline nevertheless."""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from holdfast.cluster.polling import ONE_KEY, Backoff, poll
from holdfast.cluster.protocol import ANSWER_SECONDS, Connect, EngineStore
from holdfast.errors import ClosedError, ClusterError
from holdfast.process.exit import close_last
from holdfast.process.latch import Latch

_T = TypeVar("_T")

_MOST_CONNECTIONS: Final = 16
"""How many calls may be in progress. If the store is unreachable, no call returns, and threads must not pile up."""

_CLOSE_SECONDS: Final = 1.0


_open: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def close_all() -> None:
    """**Blocks** for a moment. Ends the connections of this process, because the interpreter is about to shut down.

    A thread that is in an engine's call then is ended by force on its way back into Python, through C++ frames that do
    not support that: the process would die of SIGABRT, regardless of its exit code.
    """
    for pool in list(_open):
        if pool.process == os.getpid():
            pool.close()


close_last(close_all)


class ConnectionPool:
    """**Thread-safe.** Threads with a connection each, which make calls for others.

    A call that is overdue is abandoned. Its connection is used again if the call returns after all.

    Attributes:
        process: The process that they belong to.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        """Starts nothing yet. Each thread calls `connect` for itself; `host` describes where the store is."""
        self._connect = connect
        self._hint = f"The store is in {host}: is it still running, and can this node reach it?"
        # Guards the lists of threads, and whether the pool is closed.
        self._lock = threading.Lock()
        self._idle: list[_Inbox] = []
        self._all: list[tuple[_Inbox, Latch]] = []
        self._closed = False
        self.process = os.getpid()
        _open.add(self)

    def prestart(self, count: int) -> None:
        """Starts threads in advance: once the interpreter shuts down, none can be started any more."""
        for _ in range(count):
            with self._lock:
                self._idle.append(self._start())

    def call(self, work: Callable[[EngineStore], _T], timeout_seconds: float, what: str) -> _T:
        """**Blocks.** Makes a call, which errors call `what`, and returns its result.

        The deadline is that of the call, including the time for a new connection.

        Raises:
            ClusterError: If the store does not respond in time, or responds with an error.
            ClosedError: If the pool is closed.
        """
        task = _Task(work, timeout_seconds)
        with self._lock:
            if self._closed:
                raise ClosedError("the cluster was closed before this call")
            if not self._idle and len(self._all) >= _MOST_CONNECTIONS:
                raise ClusterError(
                    f"{what}: {_MOST_CONNECTIONS} earlier calls are still waiting for an answer", hint=self._hint
                )
            inbox = self._idle.pop() if self._idle else self._start()
        inbox.put(task)
        if not task.done.wait(timeout_seconds):
            raise ClusterError(f"{what}: no answer within {timeout_seconds:.3g} s", hint=self._hint)
        if (error := task.error) is not None:
            text = (str(error).strip() or "no reason given").splitlines()[0]
            raise ClusterError(f"{what}: {type(error).__name__}: {text}", hint=self._hint) from error
        return task.result  # type: ignore[no-any-return]

    def wait_get(
        self,
        key: str,
        timeout_seconds: float,
        what: str,
        backoff: Backoff = ONE_KEY,
        begun_at: float | None = None,
    ) -> bytes | None:
        """**Blocks.** Returns the value of a key once it has one, or None if it has none within that time.

        The waits of engines occupy a connection, write to the log when they time out, and cannot be canceled, so the
        store is polled instead. Polling also detects in the middle of a wait that the store is unreachable.

        Raises:
            ClusterError, ClosedError: As in `call`.
        """
        end_at = time.monotonic() + timeout_seconds
        look = lambda: self.call(lambda store: store.try_get(key), ANSWER_SECONDS, what)  # noqa: E731
        return poll(look, backoff, end_at, begun_at)

    def close(self) -> None:
        """Ends the threads; a thread that hangs is abandoned. May be repeated."""
        with self._lock:
            self._closed = True
            ends = [ended for _, ended in self._all]
            for inbox, _ in self._all:
                inbox.put(None)
        end_at = time.monotonic() + _CLOSE_SECONDS
        for ended in ends:
            ended.wait(end_at - time.monotonic())

    def _start(self) -> _Inbox:
        """Starts a thread; called with the lock."""
        inbox: _Inbox = queue.SimpleQueue()
        ended = Latch()
        try:
            # Unlike `Thread.start` this cannot be interrupted half-way.
            _thread.start_new_thread(self._serve, (inbox, ended))
        except RuntimeError as error:
            raise ClusterError(f"cannot start a thread to query the store: {error}") from error
        self._all.append((inbox, ended))
        return inbox

    def _serve(self, inbox: _Inbox, ended: Latch) -> None:
        connection: EngineStore | None = None
        try:
            while (task := inbox.get()) is not None:
                try:
                    connection = connection or self._connect(task.timeout_seconds)
                    task.result = task.work(connection)
                except BaseException as error:  # noqa: BLE001  The caller gets any error.
                    task.error = error
                    # It is not known in what state an error leaves a connection.
                    connection = None
                # Before the caller goes on, so that one thread by itself needs one connection.
                with self._lock:
                    self._idle.append(inbox)
                task.done.open()
                # What the task has caught refers to this frame.
                del task
        finally:
            ended.open()


class _Task:
    def __init__(self, work: Callable[[EngineStore], Any], timeout_seconds: float) -> None:
        self.work = work
        self.timeout_seconds = timeout_seconds
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = Latch()


_Inbox: TypeAlias = "queue.SimpleQueue[_Task | None]"
