"""Preemption notices on Amazon EC2."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from holdfast.numbers import check_seconds
from holdfast.preemption.sources.metadata_server import Answer, MetadataSource, parse_record, unexpected
from holdfast.preemption.sources.protocol import Demand, Notice

DEFAULT_URL: Final = "http://169.254.169.254"

_TOKEN_PATH: Final = "/latest/api/token"
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN_LASTS_SECONDS: Final = 21600
_NOTICE_SECONDS: Final = 120.0
"""How long before its end a spot instance gets its notice."""

_TOKEN: Final = re.compile(r"[!-~]{1,1024}")
"""Matches a token that can be sent as a header; a proxy's error page does not match."""


class AWS(MetadataSource):
    """Notices that a spot instance is about to be interrupted, or is at risk; uses a session token (IMDSv2).

    A rebalance recommendation means that an interruption has become likely: the state is saved, and training continues.
    The same holds for hibernation, because a hibernated instance comes back.
    """

    name = "aws"

    def __init__(
        self, *, base_url: str = DEFAULT_URL, interval_seconds: float = 5.0, timeout_seconds: float = 5.0
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
        super().__init__(base_url, timeout_seconds)
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._token = ""
        self._reported: set[str] = set()

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks whether the instance will be interrupted, or else whether that has become likely.

        The second is only advice: if the server fails there alone, the failure is ignored.

        Raises:
            OSError: If the server fails.
        """
        action = self._read(_ACTION_PATH)
        if action and (notice := self._action(action)).text not in self._reported:
            self._reported.add(notice.text)
            return (notice,)
        with suppress(OSError):
            text = "an interruption of this spot instance is likely"
            if text not in self._reported and self._read(_REBALANCE_PATH) is not None:
                self._reported.add(text)
                return (Notice(source=self.name, text=text, demand=Demand.SAVE),)
        return ()

    def _action(self, record: dict[str, Any]) -> Notice:
        action = record.get("action")
        if not isinstance(action, str):
            raise OSError(f"{self._url(_ACTION_PATH)} names no action: {str(record)[:200]}")
        if action == "hibernate":
            return Notice(source=self.name, text="this spot instance is being hibernated", demand=Demand.SAVE)
        text = f"this spot instance will {action} at {record.get('time')}"
        return Notice(
            source=self.name, text=text, demand=Demand.LEAVE_BY, left_seconds=_left_seconds(record.get("time"))
        )

    def _read(self, path: str) -> dict[str, Any] | None:
        """Returns a record, or None if there is none."""
        try:
            answer = self._ask(path)
            if answer.status == 401:
                # The token has run out, or is another instance's: this machine was restored from an image.
                self._token = ""
                answer = self._ask(path)
            return None if answer.status == 404 else parse_record(self._url(path), answer)
        except BaseException:
            self._token = ""  # The fault may be the token's, and another one costs little.
            raise

    def _ask(self, path: str) -> Answer:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LASTS_SECONDS)}
            answer = self._request(_TOKEN_PATH, lasts, method="PUT", body="")
            token = answer.body.strip()
            if answer.status != 200 or not _TOKEN.fullmatch(token):
                raise unexpected(self._url(_TOKEN_PATH), answer)
            self._token = token
        return self._request(path, {"X-aws-ec2-metadata-token": self._token})


def _left_seconds(time_text: object) -> float:
    """Returns the seconds until that time by the wall clock; the usual notice period if the time cannot be read."""
    try:
        return datetime.fromisoformat(str(time_text)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return _NOTICE_SECONDS
