"""Preemption notices of clouds, from the metadata servers of AWS, Azure and Google Cloud."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds
from holdfast.preemption.sources.protocol import Demand, Hear, Notice, PolledSource

_LINK_LOCAL_URL: Final = "http://169.254.169.254"
_GOOGLE_URL: Final = "http://metadata.google.internal"
_MAX_BODY_BYTES: Final = 1 << 20


class _Meaning(NamedTuple):
    """The meaning of an event for a job; `usual_seconds` remain if the event names no time of its own."""

    text: str
    demand: Demand = Demand.LEAVE_BY
    usual_seconds: float | None = None


_PREEMPTED: Final = "preempted"
_MAINTENANCE: Final = "maintenance-event"

_EVENTS: Final = {
    ("aws", "hibernate"): _Meaning("this spot instance is being hibernated", Demand.SAVE),
    ("aws", "rebalance"): _Meaning("an interruption of this spot instance is likely", Demand.SAVE),
    ("azure", "Preempt"): _Meaning("this spot machine is being evicted", usual_seconds=30.0),
    ("azure", "Terminate"): _Meaning("this machine is being deleted"),
    ("azure", "Reboot"): _Meaning("this machine is being rebooted"),
    ("azure", "Redeploy"): _Meaning("this machine is being moved to another host, which loses its memory"),
    (_PREEMPTED, "TRUE"): _Meaning("this machine is being preempted", usual_seconds=30.0),
    (_MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE"): _Meaning(
        "this machine is being stopped for maintenance of its host", usual_seconds=60.0
    ),
    (_MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE"): _Meaning("this machine is being moved to another host", Demand.SAVE),
}
"""The events by source, or by attribute of Google's server, and name."""


class Answer(msgspec.Struct, frozen=True):
    """An answer of the server; `headers` by name in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: str

    def make_error(self, more: str = "") -> OSError:
        """**Pure.** Returns the error for an answer that was not expected; the server is asked again later."""
        return OSError(f"{self.url} answered {self.status}: {self.body[:200]!r}{more}")

    def parse(self) -> dict[str, Any]:
        """**Pure.** Returns the body as a JSON object.

        Raises:
            OSError: If it is not one.
        """
        try:
            record = json.loads(self.body)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise self.make_error()
        return record


class MetadataSource(PolledSource):
    """A source that queries one server, from one thread at a time; another thread may close it. It uses no proxy."""

    def __init__(self, base_url: str, timeout_seconds: float, interval_seconds: float) -> None:
        """Stores the settings; sends no request.

        Args:
            base_url: For example `http://169.254.169.254`; a path in it is put before those that are requested.
            timeout_seconds: How long the server may be silent.
            interval_seconds: How often to ask.

        Raises:
            UsageError: If the URL or a time is not valid.
        """
        check_seconds("timeout_seconds", timeout_seconds)
        parts = urlsplit(base_url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.query or parts.fragment:
            raise UsageError(
                f"{base_url!r} is not the URL of a metadata server", hint="Write http://HOST or http://HOST:PORT."
            )
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._url = f"http://{self._host}:{port}{self._base}"
        self._timeout_seconds = timeout_seconds
        self.interval_seconds: float | None = interval_seconds
        # Guards the two below, so that a connection is either not used any more or found and ended.
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_closed = False

    def _request(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: str | None = None,
        timeout_seconds: float | None = None,
        accepted: Collection[int] = (200,),
    ) -> Answer:
        """**Blocks.** Sends one request on its own connection.

        Raises:
            OSError: If the server cannot be reached, does not answer in time, does not answer in HTTP, or answers with
                a status that is not accepted.
        """
        from http.client import HTTPConnection, HTTPException

        url = self._url + path
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        connection = HTTPConnection(self._host, self._port, timeout=limit_seconds)
        try:
            connection.connect()
            with self._lock:
                self._connection = connection.sock
            self._refuse_closed()
            connection.request(method, self._base + path, body, dict(headers))
            with connection.getresponse() as reply:
                text = reply.read(_MAX_BODY_BYTES).decode("utf-8", "replace")
                self._refuse_closed()  # What was cut off then may look whole.
                answer = Answer(url, reply.status, {name.lower(): value for name, value in reply.getheaders()}, text)
        except TimeoutError:
            raise TimeoutError(f"{url} did not answer within {limit_seconds:g} s") from None
        except HTTPException as error:
            raise OSError(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._connection = None
            connection.close()
        if answer.status not in accepted:
            raise answer.make_error()
        return answer

    def open(self, hear: Hear) -> None:
        """Does nothing: the first request is sent by the first look."""
        with self._lock:
            self._is_closed = False

    def close(self) -> None:
        """Ends a request in progress, which then fails."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                with suppress(OSError):  # It may have ended by itself.
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _refuse_closed(self) -> None:
        with self._lock:
            if self._is_closed:
                raise OSError("the source is closed")


_AWS_TOKEN_PATH: Final = "/latest/api/token"
_AWS_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_AWS_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_AWS_TOKEN_LASTS_SECONDS: Final = 21600
_AWS_NOTICE_SECONDS: Final = 120.0
"""How long before its end a spot instance gets its notice."""

_AWS_TOKEN: Final = re.compile(r"[!-~]{1,1024}")
"""Matches a token that can be sent as a header; a proxy's error page does not match."""


class AWS(MetadataSource):
    """Notices that a spot instance is about to be interrupted, or is at risk; uses a session token (IMDSv2).

    A rebalance recommendation means that an interruption has become likely: the state is saved, and training continues.
    The same holds for hibernation, because a hibernated instance comes back.
    """

    name = "aws"

    def __init__(
        self, *, base_url: str = _LINK_LOCAL_URL, interval_seconds: float = 5.0, timeout_seconds: float = 5.0
    ) -> None:
        """Stores the settings; sends no request.

        Args:
            base_url: The metadata server.
            interval_seconds: How often to ask.
            timeout_seconds: How long one request may take. In a container, the instance's hop limit must be at least 2,
                or the server does not answer.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__(base_url, timeout_seconds, check_seconds("interval_seconds", interval_seconds))
        self._token = ""
        self._reported: set[str] = set()

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks whether the instance will be interrupted, or else whether that has become likely.

        The second is only advice: if the server fails there alone, the failure is ignored.

        Raises:
            OSError: If the server fails.
        """
        record = self._read(_AWS_ACTION_PATH)
        if record and (notice := self._describe(record)).text not in self._reported:
            self._reported.add(notice.text)
            return (notice,)
        text, demand, _ = _EVENTS["aws", "rebalance"]
        with suppress(OSError):
            if text not in self._reported and self._read(_AWS_REBALANCE_PATH) is not None:
                self._reported.add(text)
                return (Notice(source=self.name, text=text, demand=demand),)
        return ()

    def _describe(self, record: dict[str, Any]) -> Notice:
        action, time_text = record.get("action"), str(record.get("time"))
        if not isinstance(action, str):
            raise OSError(f"{self._url}{_AWS_ACTION_PATH} names no action: {str(record)[:200]}")
        # It is stopped or terminated, by what is known today.
        ends = _Meaning(f"this spot instance will {action} at {time_text}", usual_seconds=_AWS_NOTICE_SECONDS)
        text, demand, left_seconds = _EVENTS.get(("aws", action), ends)
        if left_seconds is not None:
            with suppress(ValueError, OverflowError):
                left_seconds = datetime.fromisoformat(time_text).timestamp() - time.time()
        return Notice(source=self.name, text=text, demand=demand, left_seconds=left_seconds)

    def _read(self, path: str) -> dict[str, Any] | None:
        """Returns a record, or None if there is none."""
        try:
            answer = self._ask(path, (200, 401, 404))
            if answer.status == 401:
                # The token has run out, or is another instance's: this machine was restored from an image.
                self._token = ""
                answer = self._ask(path, (200, 404))
            return None if answer.status == 404 else answer.parse()
        except BaseException:
            self._token = ""  # The fault may be the token's, and another one costs little.
            raise

    def _ask(self, path: str, accepted: Collection[int]) -> Answer:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_LASTS_SECONDS)}
            answer = self._request(_AWS_TOKEN_PATH, lasts, method="PUT", body="")
            token = answer.body.strip()
            if not _AWS_TOKEN.fullmatch(token):
                raise answer.make_error()
            self._token = token
        return self._request(path, {"X-aws-ec2-metadata-token": self._token}, accepted=accepted)


_AZURE_EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_HEADERS: Final = {"Metadata": "true"}
_AZURE_FIRST_ANSWER_SECONDS: Final = 150.0
"""The first request of a machine starts the service, which may take two minutes."""

_AZURE_UNREADABLE_SECONDS: Final = 30.0
"""The time that is taken to remain if that of an event cannot be read: the shortest notice."""

_AZURE_NAME: Final = re.compile(r"(?!(?:null|true|false)$)[\w.-]{1,256}")
"""Matches the name of a machine, but neither a proxy's error page nor JSON."""


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    """A scheduled event. The optional fields only say how much time remains."""

    event_id: str
    event_type: str
    resources: list[str]
    event_status: Any = None
    not_before: Any = None

    @property
    def meaning(self) -> _Meaning:
        return _EVENTS.get(("azure", self.event_type)) or _Meaning(
            f"this machine has a scheduled {self.event_type}", Demand.SAVE
        )

    def find_left_seconds(self) -> float | None:
        """Returns the seconds until it may begin, by the wall clock. An event that has begun names no time."""
        if not self.not_before:
            return 0.0 if self.event_status == "Started" else self.meaning.usual_seconds
        from email.utils import parsedate_to_datetime

        try:
            return parsedate_to_datetime(str(self.not_before)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return _AZURE_UNREADABLE_SECONDS


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
        base_url: str = _LINK_LOCAL_URL,
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
        super().__init__(base_url, timeout_seconds, check_seconds("interval_seconds", interval_seconds))
        self._machine = machine
        self._acknowledge = acknowledge
        self._is_on = False
        # What identifies the reported events, and those of them that end this machine.
        self._reported: set[tuple[str, ...]] = set()
        self._ending: set[str] = set()

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks for the events; events that cannot be understood are skipped.

        Raises:
            OSError: If the server fails.
        """
        machine = self._machine = self._machine or self._ask_name()
        limit_seconds = None if self._is_on else _AZURE_FIRST_ANSWER_SECONDS
        answer = self._request(_AZURE_EVENTS_PATH, _AZURE_HEADERS, timeout_seconds=limit_seconds)
        events = answer.parse().get("Events")
        if not isinstance(events, list):
            raise answer.make_error()
        self._is_on = True
        notices: list[Notice] = []
        for record in events:
            try:
                event = msgspec.convert(record, _Event)
            except msgspec.ValidationError:
                continue
            if machine.casefold() in {name.casefold() for name in event.resources}:
                notices += self._report(event)
        return notices

    def note_leaving(self) -> None:
        """**Blocks.** Acknowledges the events that end this machine, if `acknowledge` is set.

        Raises:
            OSError: If the server fails.
        """
        if self._acknowledge and self._ending:
            body = json.dumps({"StartRequests": [{"EventId": event} for event in sorted(self._ending)]})
            headers = {**_AZURE_HEADERS, "Content-Type": "application/json"}
            self._request(_AZURE_EVENTS_PATH, headers, method="POST", body=body)

    def _ask_name(self) -> str:
        answer = self._request(_AZURE_NAME_PATH, _AZURE_HEADERS)
        name = answer.body.strip()
        if not _AZURE_NAME.fullmatch(name):
            raise answer.make_error()
        return name

    def _report(self, event: _Event) -> list[Notice]:
        """Returns the notice of an event, unless it was reported. One that ends this machine may begin early, or be
        moved, and is then reported again."""
        text, demand, _ = event.meaning
        shown: tuple[str, ...] = (event.event_id, event.event_type)
        left_seconds = None
        if demand is Demand.LEAVE_BY:
            self._ending.add(event.event_id)
            shown += (str(event.event_status), str(event.not_before))
            left_seconds = event.find_left_seconds()
        if shown in self._reported:
            return []
        self._reported.add(shown)
        return [Notice(source=self.name, text=text, demand=demand, left_seconds=left_seconds)]


class GCP(MetadataSource):
    """Notices that a spot machine is about to be preempted, or that its host goes into maintenance.

    A source waits for one attribute with a long poll: `GCP()` for `preempted`, and `GCP("maintenance-event")` for
    `maintenance-event`. Use both.
    """

    def __init__(
        self,
        attribute: str = _PREEMPTED,
        *,
        base_url: str = _GOOGLE_URL,
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
        super().__init__(base_url, timeout_seconds, interval_seconds=0.0)
        self.name = f"gcp {attribute}"
        self._attribute = attribute
        self._left_seconds = None if left_seconds is None else check_seconds("left_seconds", left_seconds, least=0)
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
        answer = self._request(path, {"Metadata-Flavor": "Google"}, timeout_seconds=limit_seconds)
        if answer.headers.get("metadata-flavor") != "Google":
            raise answer.make_error(
                ", without the header 'Metadata-Flavor: Google': this is not Google's metadata server (perhaps a proxy)"
            )
        waited_seconds = time.monotonic() - asked_at
        before, self._value = self._value, answer.body.strip()
        self._etag = answer.headers.get("etag")
        # A server that answers at once without a change does not know how to wait, and is not to be asked all the time.
        hasty = etag is not None and self._value == before and waited_seconds < 1.0
        self.interval_seconds = 1.0 if hasty or self._etag is None else 0.0
        meaning = None if self._value == before else _EVENTS.get((self._attribute, self._value))
        if meaning is None:
            return ()
        text, demand, left_seconds = meaning
        if demand is Demand.LEAVE_BY and self._left_seconds is not None:
            left_seconds = self._left_seconds
        return (Notice(source=self.name, text=text, demand=demand, left_seconds=left_seconds),)
