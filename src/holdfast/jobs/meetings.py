"""The other workers of a session in which each runs the same program: met after each group, and watched meanwhile."""

from __future__ import annotations

import _thread
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.cluster import Cluster
from holdfast.cluster.heartbeat import INTERVAL_SECONDS, TIMEOUT_SECONDS, Heartbeat
from holdfast.cluster.rendezvous import LEADER, gather, make_absent_error
from holdfast.errors import AbsentError, HoldfastError

_FOR_EVER_SECONDS: Final = 1e9
"""An epoch lasts as long as it does. Those who wait look whether the others live."""

_LOOK_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.005
_FAREWELL_SECONDS: Final = 5.0
_INTERRUPT_SECONDS: Final = 1.0


class PeerFailedError(HoldfastError):
    """Another worker's task has failed while this one was at work; the session tells of it."""


class Meetings:
    """Meetings without a deadline, as epochs last as long as they do: who is dead or has left is noticed instead."""

    def __init__(
        self,
        cluster: Cluster,
        interval_seconds: float = INTERVAL_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.cluster = cluster
        self._heartbeat = Heartbeat(cluster, interval_seconds, timeout_seconds, name="job/heartbeat")
        self._number = 0

    def begin(self) -> None:
        """Called by all workers at the same place: what is met for from now on is something new."""
        self._number += 1

    def cry(self, text: str) -> None:
        """Tells the others at once that this worker's part has failed."""
        # Where the store does not answer, the others notice that by themselves.
        with suppress(HoldfastError):
            self.cluster.set(self._key("failed"), text.encode()[:10_000])

    def meet(self, record: bytes, patience_seconds: float | None = None) -> list[bytes]:
        """**Collective.** **Blocks.** The records of all workers, by rank, once all have come.

        Args:
            record: What this worker brings.
            patience_seconds: How long to wait for those that live and do not come; None for ever.

        Raises:
            AbsentError: If a worker is lost or has left, or has not come in that time.
            ClusterError: If the store does not answer any more.
        """
        timeout_seconds = _FOR_EVER_SECONDS if patience_seconds is None else patience_seconds
        try:
            records = gather(self.cluster, self._key("met"), record, timeout_seconds, check=self._heartbeat.check)
        except AbsentError as error:
            raise make_absent_error(self.cluster, error.ranks, "died, or left, amid the job's work") from error
        if self.cluster.rank == LEADER:
            self.cluster.delete(self._key("failed"))
        return records

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupts what runs in the main thread when another worker's part has failed, or a worker is gone.

        Elsewhere than in the main thread nothing can be interrupted: then that is noticed at the meeting. The interrupt
        is that of Ctrl-C, which a task may catch to tidy up.

        Raises:
            PeerFailedError: If another worker's part has failed.
            AbsentError: If a worker is gone.
        """
        in_main = threading.current_thread() is threading.main_thread()
        # Where Ctrl-C is not one, nothing can be interrupted either.
        if self.cluster.world_size == 1 or not in_main or not callable(signal.getsignal(signal.SIGINT)):
            yield
            return
        watch = _Watch(self.cluster, self._heartbeat, self._key("failed"))
        _thread.start_new_thread(watch.run, ())
        try:
            try:
                yield
            except KeyboardInterrupt:
                watch.end(awaits_interrupt=False)
                raise
            except BaseException:
                watch.end()
                raise
            watch.end()
        except KeyboardInterrupt:
            if watch.trouble is None:
                raise  # That was a person.
            raise watch.trouble from None

    def close(self, *, in_peace: bool) -> None:
        """**Blocks** for moments. Says goodbye. The leader may host the store, and so leaves last, if all went well."""
        if in_peace and self.cluster.rank == LEADER:
            end_at = time.monotonic() + _FAREWELL_SECONDS
            others = set(range(1, self.cluster.world_size))
            while time.monotonic() < end_at and not others <= {*self._heartbeat.gone, *self._heartbeat.lost}:
                time.sleep(_PAUSE_SECONDS)
        self._heartbeat.stop()

    def _key(self, part: str) -> str:
        return f"job/{self._number}/{part}"


class _Watch:
    """Looks at the others from a thread of its own, and interrupts the main thread once if there is trouble."""

    def __init__(self, cluster: Cluster, heartbeat: Heartbeat, failed_key: str) -> None:
        self._cluster = cluster
        self._heartbeat = heartbeat
        self._failed_key = failed_key
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Guards that no interrupt comes once the work has ended.
        self._lock = threading.Lock()
        self._armed = True
        self.trouble: HoldfastError | None = None

    def run(self) -> None:
        trouble: HoldfastError | None = None
        while trouble is None and self._is_on():
            try:
                self._heartbeat.check()
                text = self._cluster.try_get(self._failed_key)
                trouble = None if text is None else PeerFailedError(text.decode(errors="replace"))
            except HoldfastError as error:
                trouble = error
            if trouble is not None:
                with self._lock:
                    if self._armed:
                        self.trouble = trouble
                        # A real signal: only that ends a sleep, or a wait for the network.
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self, *, awaits_interrupt: bool = True) -> None:
        self._wake.put(None)
        with self._lock:
            self._armed = False
        # An interrupt that was asked for comes within a few instructions: here, and not where nobody expects it.
        end_at = time.monotonic() + _INTERRUPT_SECONDS
        while self.trouble is not None and awaits_interrupt and time.monotonic() < end_at:
            pass

    def _is_on(self) -> bool:
        try:
            self._wake.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return True
        return False
