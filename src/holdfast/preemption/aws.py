"""Notices of Amazon's cloud."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from holdfast.preemption.metadata import Answer, MetadataSource, unexpected
from holdfast.preemption.notices import Demand, Notice

DEFAULT_URL: Final = "http://169.254.169.254"

_TOKEN_PATH: Final = "/latest/api/token"
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN_LASTS_SECONDS: Final = 21600
_NOTICE_SECONDS: Final = 120.0
"""How long before its end a spot instance is told."""


class AWS(MetadataSource):
    """Hears that a spot instance is taken away, and that one is at risk; with a session token (IMDSv2).

    A rebalance recommendation says that an interruption has become likely: the state is saved, and training goes on.
    So it does when the instance is to be hibernated, since it comes back then.
    """

    name = "aws"

    def __init__(
        self, *, base_url: str = DEFAULT_URL, interval_seconds: float = 5.0, timeout_seconds: float = 5.0
    ) -> None:
        """Takes note of what to ask; nothing is sent.

        Args:
            base_url: The metadata server.
            interval_seconds: How often to ask.
            timeout_seconds: How long the server may be silent. In a container the instance's hop limit has to be 2 or
                more, or the server stays silent.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__(base_url, timeout_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._token = ""
        self._told: set[str] = set()

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks for both.

        Raises:
            OSError: If the server fails.
        """
        notices = []
        if action := self._read(_ACTION_PATH):
            notices.append(self._action(action))
        if self._read(_REBALANCE_PATH) is not None:
            notices.append(
                Notice(source=self.name, text="an interruption of this spot instance is likely", demand=Demand.SAVE)
            )
        fresh = [notice for notice in notices if notice.text not in self._told]
        self._told.update(notice.text for notice in fresh)
        return fresh

    def _action(self, record: dict[str, Any]) -> Notice:
        action = str(record.get("action"))
        if action == "hibernate":
            return Notice(source=self.name, text="this spot instance is hibernated", demand=Demand.SAVE)
        text = f"this spot instance is to {action} at {record.get('time')}"
        return Notice(
            source=self.name, text=text, demand=Demand.LEAVE_BY, left_seconds=_left_seconds(record.get("time"))
        )

    def _read(self, path: str) -> dict[str, Any] | None:
        """A record, or None if there is none."""
        answer = self._ask(path)
        if answer.status == 401:
            # The token has run out, or is another instance's: this machine was restored from an image.
            self._token = ""
            answer = self._ask(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise unexpected(self._server.url(path), answer)
        try:
            record = json.loads(answer.body)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise unexpected(self._server.url(path), answer)
        return record

    def _ask(self, path: str) -> Answer:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LASTS_SECONDS)}
            answer = self._server.ask(_TOKEN_PATH, lasts, method="PUT", body="")
            if answer.status != 200:
                raise unexpected(self._server.url(_TOKEN_PATH), answer)
            self._token = answer.body.strip()
        return self._server.ask(path, {"X-aws-ec2-metadata-token": self._token})


def _left_seconds(time_text: object) -> float:
    """Until that time by the wall clock; what a notice gives if the time cannot be read."""
    try:
        return datetime.fromisoformat(str(time_text)).timestamp() - time.time()
    except ValueError:
        return _NOTICE_SECONDS
