"""Preemption notices on Google Compute Engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.metadata_server import MetadataSource, unexpected
from holdfast.preemption.sources.protocol import Demand, Notice

DEFAULT_URL: Final = "http://metadata.google.internal"

_HEADERS: Final = {"Metadata-Flavor": "Google"}
_PREEMPTED: Final = "preempted"
_MAINTENANCE: Final = "maintenance-event"


class GCP(MetadataSource):
    """Notices that a spot machine is about to be preempted, or that its host goes into maintenance.

    A source waits for one attribute with a long poll: `GCP()` for `preempted`, and `GCP("maintenance-event")` for
    `maintenance-event`. Use both.
    """

    def __init__(
        self,
        attribute: str = _PREEMPTED,
        *,
        base_url: str = DEFAULT_URL,
        left_seconds: float | None = None,
        wait_seconds: float = 60.0,
        timeout_seconds: float = 5.0,
    ) -> None:
        """Stores the settings; sends no request.

        Args:
            attribute: `preempted` or `maintenance-event`.
            base_url: The metadata server.
            left_seconds: The time from the notice until the machine is gone; None for 30 s after a preemption notice,
                and 60 s before maintenance. Machines with GPUs get notice an hour before: use 3600 there.
            wait_seconds: How long one request waits for a change.
            timeout_seconds: How long one request may take beyond that.

        Raises:
            UsageError: If an argument is wrong.
        """
        if attribute not in (_PREEMPTED, _MAINTENANCE):
            raise UsageError(f"the attribute must be {_PREEMPTED!r} or {_MAINTENANCE!r}, got {attribute!r}")
        super().__init__(base_url, timeout_seconds)
        self.name = f"gcp {attribute}"
        self.interval_seconds = 0.0
        self._attribute = attribute
        usual_seconds = 30.0 if attribute == _PREEMPTED else 60.0
        self._left_seconds = (
            usual_seconds if left_seconds is None else check_seconds("left_seconds", left_seconds, least=0)
        )
        self._wait_seconds = wait_seconds
        self._etag: str | None = None
        self._value = ""

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Waits until the attribute changes, or for as long as one request may wait.

        Raises:
            OSError: If the server fails, or is not Google's.
        """
        path = f"/computeMetadata/v1/instance/{self._attribute}"
        limit_seconds = self._timeout_seconds
        etag, self._etag = self._etag, None  # After a failure none is sent: it may be what the server fails at.
        if etag is not None:
            # Headers are read as Latin-1, so that the server gets its own bytes back.
            last_etag = quote(etag, safe="", encoding="latin-1")
            path += f"?wait_for_change=true&timeout_sec={max(round(self._wait_seconds), 1)}&last_etag={last_etag}"
            limit_seconds += self._wait_seconds
        asked_at = time.monotonic()
        answer = self._request(path, _HEADERS, timeout_seconds=limit_seconds)
        if answer.status != 200:
            raise unexpected(self._url(path), answer)
        if answer.headers.get("metadata-flavor") != "Google":
            raise OSError(
                f"{unexpected(self._url(path), answer)}, without the header 'Metadata-Flavor: Google': this is "
                "not Google's metadata server (perhaps a proxy)"
            )
        waited_seconds = time.monotonic() - asked_at
        before, self._value = self._value, answer.body.strip()
        self._etag = answer.headers.get("etag")
        # A server that answers at once without a change does not know how to wait, and is not to be asked all the time.
        hasty = etag is not None and self._value == before and waited_seconds < 1.0
        self.interval_seconds = 1.0 if hasty or self._etag is None else 0.0
        return () if self._value == before else self._notices(self._value)

    def _notices(self, value: str) -> Iterable[Notice]:
        match self._attribute, value:
            case "preempted", "TRUE":
                text, demand = "this machine is being preempted", Demand.LEAVE_BY
            case "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE":
                text, demand = "this machine is being stopped for maintenance of its host", Demand.LEAVE_BY
            case "maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE":
                text, demand = "this machine is being moved to another host", Demand.SAVE
            case _:
                return ()
        left_seconds = self._left_seconds if demand is Demand.LEAVE_BY else None
        return (Notice(source=self.name, text=text, demand=demand, left_seconds=left_seconds),)
