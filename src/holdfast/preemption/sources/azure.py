"""Preemption notices on Microsoft Azure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from holdfast.numbers import check_seconds
from holdfast.preemption.sources.metadata_server import MetadataSource, parse_record, unexpected
from holdfast.preemption.sources.protocol import Demand, Notice

DEFAULT_URL: Final = "http://169.254.169.254"

_EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS: Final = {"Metadata": "true"}
_FIRST_ANSWER_SECONDS: Final = 150.0
"""The first request of a machine starts the service, which may take two minutes."""

_PREEMPT_SECONDS: Final = 30.0
_ENDING: Final = {
    "Preempt": "this spot machine is being evicted",
    "Terminate": "this machine is being deleted",
    "Reboot": "this machine is being rebooted",
    "Redeploy": "this machine is being moved to another host, which loses its memory",
}

_NAME: Final = re.compile(r"(?!(?:null|true|false)$)[\w.-]{1,256}")
"""Matches the name of a machine, but neither a proxy's error page nor JSON."""


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    """A scheduled event. The optional fields only say how much time remains."""

    event_id: str
    event_type: str
    resources: list[str]
    event_status: Any = None
    not_before: Any = None


class Azure(MetadataSource):
    """Notices the scheduled events that concern this machine.

    A freeze, after which the machine continues, makes the job save and continue. Events are not acknowledged unless
    `acknowledge` is set: acknowledging lets them begin at once, for all machines that they name.
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
        """Stores the settings; sends no request.

        Args:
            machine: The machine's name in events; None to ask for it.
            acknowledge: True to acknowledge events that end this machine once the job has saved and exits.
            base_url: The metadata server.
            interval_seconds: How often to ask.
            timeout_seconds: How long one request may take; the first one for events may always take 150 s.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__(base_url, timeout_seconds)
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._machine = machine
        self._acknowledge = acknowledge
        self._is_on = False
        # What was reported, as `_shown` has it, and the events in it that end this machine.
        self._reported: set[tuple[str, ...]] = set()
        self._ending: set[str] = set()

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks for the events; events that cannot be understood are skipped.

        Raises:
            OSError: If the server fails.
        """
        machine = self._machine = self._machine or self._ask_name()
        limit_seconds = None if self._is_on else _FIRST_ANSWER_SECONDS
        answer = self._request(_EVENTS_PATH, _HEADERS, timeout_seconds=limit_seconds)
        url = self._url(_EVENTS_PATH)
        events = parse_record(url, answer).get("Events")
        if not isinstance(events, list):
            raise unexpected(url, answer)
        self._is_on = True
        notices: list[Notice] = []
        for record in events:
            try:
                event = msgspec.convert(record, _Event)
            except msgspec.ValidationError:
                continue
            is_here = machine.casefold() in {name.casefold() for name in event.resources}
            if is_here and (shown := _shown(event)) not in self._reported:
                notices.append(self._notice(event))
                self._reported.add(shown)
        return notices

    def note_leaving(self) -> None:
        """**Blocks.** Acknowledges the events that end this machine, if `acknowledge` is set.

        Raises:
            OSError: If the server fails.
        """
        if self._acknowledge and self._ending:
            body = json.dumps({"StartRequests": [{"EventId": event} for event in sorted(self._ending)]})
            answer = self._request(
                _EVENTS_PATH, {**_HEADERS, "Content-Type": "application/json"}, method="POST", body=body
            )
            if answer.status != 200:
                raise unexpected(self._url(_EVENTS_PATH), answer)

    def _ask_name(self) -> str:
        answer = self._request(_NAME_PATH, _HEADERS)
        name = answer.body.strip()
        if answer.status != 200 or not _NAME.fullmatch(name):
            raise unexpected(self._url(_NAME_PATH), answer)
        return name

    def _notice(self, event: _Event) -> Notice:
        kind = event.event_type
        if kind not in _ENDING:
            return Notice(source=self.name, text=f"this machine has a scheduled {kind}", demand=Demand.SAVE)
        self._ending.add(event.event_id)
        left_seconds = _left_seconds(event.not_before, kind, event.event_status)
        return Notice(source=self.name, text=_ENDING[kind], demand=Demand.LEAVE_BY, left_seconds=left_seconds)


def _shown(event: _Event) -> tuple[str, ...]:
    """Returns what identifies a reported event: an event that ends this machine may begin early, or be moved."""
    if event.event_type not in _ENDING:
        return event.event_id, event.event_type
    return event.event_id, event.event_type, str(event.event_status), str(event.not_before)


def _left_seconds(not_before: object, kind: str, status: object) -> float | None:
    """Returns the seconds until the event may begin, by the wall clock. An event that has begun names no time."""
    if not not_before:
        return 0.0 if status == "Started" else (_PREEMPT_SECONDS if kind == "Preempt" else None)
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(str(not_before)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return _PREEMPT_SECONDS
