"""The other workers of a session in which each runs the same program: met after each group, and watched meanwhile."""

from __future__ import annotations

import _thread
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.cluster import Cluster
from holdfast.cluster.heartbeat import Heartbeat
from holdfast.cluster.rendezvous import LEADER, gather, make_absent_error
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import AbsentError, HoldfastError

_FOR_EVER_SECONDS: Final = 1e9
"""An epoch lasts as long as it does. Those who wait look whether the others live."""

_LOOK_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.005
_FAREWELL_SECONDS: Final = 5.0
_INTERRUPT_SECONDS: Final = 1.0
_BEATS: Final = 15
_TEXT_BYTES: Final = 10_000

_numbers: dict[tuple[str, int], int] = {}
"""How many sessions each worker of a cluster has had in this process, so that no two have the same keys."""


class PeerFailedError(HoldfastError):
    """Another worker's task has failed while this one was at work; the session tells of it."""


class Meetings:
    """Meetings without a deadline, as epochs last as long as they do: who is dead or has left is noticed instead."""

    def __init__(self, cluster: Cluster, liveness_seconds: float = LIVENESS_SECONDS) -> None:
        """Begins to give signs of life.

        Args:
            cluster: The workers. Each makes as many of these, in the same order.
            liveness_seconds: How long a worker may not be heard of before it is taken for dead.
        """
        self.cluster = cluster
        number = _numbers[cluster.incarnation, cluster.rank] = _numbers.get((cluster.incarnation, cluster.rank), 0) + 1
        self._scope = f"job-{number}"
        self._heartbeat = Heartbeat(
            cluster, liveness_seconds / _BEATS, liveness_seconds, name=f"{self._scope}/heartbeat"
        )
        self._number = 0

    def begin(self) -> None:
        """Called by all workers at the same place: what is met for from now on is something new."""
        self._number += 1

    def cry(self, text: str) -> None:
        """Tells the others at once that this worker's part has failed."""
        # Where the store does not answer, the others notice that by themselves.
        with suppress(HoldfastError):
            self.cluster.set(self._key("failed"), _encode(text))

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
            raise self._explain(error) from error
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
        watch = _Watch(self.cluster, self._check, self._key("failed"))
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

    def close(self, trouble: str = "") -> None:
        """**Blocks** for moments. Says goodbye. The leader may host the store, and so leaves last, if all went well.

        Args:
            trouble: Why this worker leaves, to be told to those who still wait for it; empty if all went well.
        """
        if trouble:
            with suppress(HoldfastError):
                self.cluster.set(self._key_of_trouble(self.cluster.rank), _encode(trouble))
        elif self.cluster.rank == LEADER:
            end_at = time.monotonic() + _FAREWELL_SECONDS
            others = set(range(1, self.cluster.world_size))
            while time.monotonic() < end_at and not others <= {*self._heartbeat.gone, *self._heartbeat.lost}:
                # The heartbeat's thread finds out who has left, and tells nobody of it.
                time.sleep(_PAUSE_SECONDS)
        self._heartbeat.stop()

    def _check(self) -> None:
        try:
            self._heartbeat.check()
        except AbsentError as error:
            raise self._explain(error) from error

    def _explain(self, error: AbsentError) -> AbsentError:
        """The same in words that say why, where those who left have told."""
        told = []
        for rank in error.ranks:
            with suppress(HoldfastError):
                text = self.cluster.try_get(self._key_of_trouble(rank))
                told += [] if text is None else [text.decode(errors="replace")]
        what = "left the job: " + "; ".join(told) if told else "died, or left, amid the job's work"
        return make_absent_error(self.cluster, error.ranks, what)

    def _key(self, part: str) -> str:
        return f"{self._scope}/{self._number}/{part}"

    def _key_of_trouble(self, rank: int) -> str:
        return f"{self._scope}/trouble/{rank}"


class _Watch:
    """Looks at the others from a thread of its own, and interrupts the main thread once if there is trouble."""

    def __init__(self, cluster: Cluster, check: Callable[[], object], failed_key: str) -> None:
        self._cluster = cluster
        self._check = check
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
                self._check()
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


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")[:_TEXT_BYTES]
