"""Notices of Microsoft's cloud."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, Final

from holdfast.preemption.metadata import MetadataSource, unexpected
from holdfast.preemption.notices import Demand, Notice

DEFAULT_URL: Final = "http://169.254.169.254"

_EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS: Final = {"Metadata": "true"}
_FIRST_ANSWER_SECONDS: Final = 150.0
"""The first request of a machine switches the service on, which may take two minutes."""

_PREEMPT_SECONDS: Final = 30.0
_ENDING: Final = {
    "Preempt": "this spot machine is taken away",
    "Terminate": "this machine is deleted",
    "Reboot": "this machine is rebooted",
    "Redeploy": "this machine is moved to another host, and its memory is lost",
}


class Azure(MetadataSource):
    """Hears the scheduled events that concern this machine.

    A freeze, after which everything goes on, makes it save and go on. Events are not acknowledged unless
    that is asked for: it lets them begin at once, for all machines that they name.
    """

    name = "azure"

    def __init__(
        self,
        *,
        machine: str | None = None,
        acknowledge: bool = False,
        base_url: str = DEFAULT_URL,
        interval_seconds: float = 1.0,
        timeout_seconds: float = 5.0,
    ) -> None:
        """Takes note of what to ask; nothing is sent.

        Args:
            machine: The machine's name as events have it; None to ask for it.
            acknowledge: Whether events that end this machine are acknowledged when the job has saved and leaves.
            base_url: The metadata server.
            interval_seconds: How often to ask.
            timeout_seconds: How long the server may be silent; the first request may take 150 s in any case.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__(base_url, timeout_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._machine = machine
        self._acknowledge = acknowledge
        self._is_on = False
        # The events that were told of, each with whether it ends this machine.
        self._told: dict[str, bool] = {}

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks for the events.

        Raises:
            OSError: If the server fails.
        """
        if self._machine is None:
            answer = self._server.ask(_NAME_PATH, _HEADERS)
            if answer.status != 200:
                raise unexpected(self._server.url(_NAME_PATH), answer)
            self._machine = answer.body.strip()
        limit_seconds = None if self._is_on else _FIRST_ANSWER_SECONDS
        answer = self._server.ask(_EVENTS_PATH, _HEADERS, timeout_seconds=limit_seconds)
        try:
            document = json.loads(answer.body) if answer.status == 200 else None
        except ValueError:
            document = None
        events = document.get("Events") if isinstance(document, dict) else None
        if not isinstance(events, list):
            raise unexpected(self._server.url(_EVENTS_PATH), answer)
        self._is_on = True
        return [notice for event in events if isinstance(event, dict) for notice in self._notices(event)]

    def note_leaving(self) -> None:
        """**Blocks.** If that was asked for, lets the events begin that end this machine.

        Raises:
            OSError: If the server fails.
        """
        ending = [event for event, ends in self._told.items() if ends]
        if self._acknowledge and ending:
            body = json.dumps({"StartRequests": [{"EventId": event} for event in ending]})
            answer = self._server.ask(
                _EVENTS_PATH, {**_HEADERS, "Content-Type": "application/json"}, method="POST", body=body
            )
            if answer.status != 200:
                raise unexpected(self._server.url(_EVENTS_PATH), answer)

    def _notices(self, event: dict[str, Any]) -> Iterable[Notice]:
        key, kind = str(event.get("EventId")), str(event.get("EventType"))
        if key in self._told or self._machine not in (event.get("Resources") or ()):
            return
        self._told[key] = kind in _ENDING
        if kind not in _ENDING:
            yield Notice(source=self.name, text=f"this machine has a {kind} ahead of it", demand=Demand.SAVE)
            return
        left_seconds = _left_seconds(event.get("NotBefore"), kind, str(event.get("EventStatus")))
        yield Notice(source=self.name, text=_ENDING[kind], demand=Demand.LEAVE_BY, left_seconds=left_seconds)


def _left_seconds(not_before: object, kind: str, status: str) -> float | None:
    """Until the event may begin, by the wall clock. An event that has begun names no time."""
    if not not_before:
        return 0.0 if status == "Started" else (_PREEMPT_SECONDS if kind == "Preempt" else None)
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(str(not_before)).timestamp() - time.time()
    except ValueError:
        return _PREEMPT_SECONDS
