"""Saves and restores the nodes of a session on Ray: each actor its own part, and this process drives them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from holdfast.errors import HoldfastError, NodeLostError, UsageError
from holdfast.events import Fanout
from holdfast.events.kinds import decode_event
from holdfast.events.sinks import LoggingSink
from holdfast.jobs.keeper import CommonSaving, KeeperOptions, LoadOrder, NodeDurations
from holdfast.jobs.outcome import Outcome, check_outcomes
from holdfast.jobs.worker_keeper import check_save
from holdfast.storage import LocalStorage

_numbers: Final = itertools.count()


class Nodes(Protocol):
    """What is asked of a session.

    Attributes:
        start: How often the nodes have been started.
    """

    start: int

    def call_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """**Blocks.** Calls a method of all nodes at the same time."""
        ...

    def check_store(self) -> None:
        """**Blocks.** Makes sure that the nodes can agree; `NodeLostError` if they cannot any more."""
        ...


class RayKeeper:
    """A `Keeper` whose parts are with the actors."""

    def __init__(self, session: Nodes, nodes: Sequence[str], options: KeeperOptions) -> None:
        """**Blocks.** Has the actors join each other, and make their managers.

        Raises:
            UsageError: If the checkpoints are to lie where not all actors see them.
        """
        if type(options.storage) is not LocalStorage:
            raise UsageError(
                f"{options.storage.url} cannot be seen by other processes",
                hint="Give the path of a directory that all nodes see.",
            )
        self._session = session
        self._start = session.start
        self._closed = False
        # Tells the actors which keeper is meant: a session may serve one manager after the other.
        self._number = next(_numbers)
        self._emit = Fanout([LoggingSink(), *options.sinks])
        # Functions of this process stay here; the events of the first node come back and are told of here.
        rest = (options.keep, options.begin_anew, options.timeout_seconds, options.threads)
        check_outcomes(self._call("open_keeper", tuple(nodes), options.storage.url, *rest))

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> CommonSaving:
        """Has all nodes copy their state and returns; see `Keeper`."""
        check_outcomes(self._call("save", epoch, dict(metadata)))
        return CommonSaving(epoch, self.wait)

    def wait(self, epoch: int) -> NodeDurations:
        """**Blocks.** Waits until a save is committed for all nodes."""
        return check_save(epoch, self._call("wait"))

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Has nodes load their state; see `Keeper`."""
        return check_outcomes(self._call("load", order))

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** Has what is saved next follow this epoch; see `Keeper`."""
        check_outcomes(self._call("go_on_from", epoch))

    def close(self) -> None:
        """**Blocks.** Ends the parts of the actors that live; harmless twice."""
        if self._closed or self._session.start != self._start:
            return  # There, the nodes that had the parts are gone, all of them.
        self._closed = True
        with suppress(NodeLostError):
            check_outcomes(self._call("close_keeper"))

    def _call(self, method: str, *arguments: Any) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for node, (outcome, events) in self._session.call_all(method, self._number, *arguments).items():
            outcomes[node] = outcome
            for event in events:
                with suppress(HoldfastError):
                    self._emit(decode_event(event))
        if any(outcome.kind for outcome in outcomes.values()):
            # What the nodes say of it is long, and not that they would have to be replaced.
            self._session.check_store()
        return outcomes
