"""Notices of Amazon's cloud."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
"""How long before its end a spot instance has its notice."""

_TOKEN: Final = re.compile(r"[!-~]{1,1024}")
"""What can be sent as a header. What else a proxy may say in the service's place is no token."""

_LONGEST_PAUSE_LOOKS: Final = 8


@dataclass(eq=False)
class _Question:
    """One of the things that are asked for. When it fails and another does not, it is left out, ever longer.

    Attributes:
        ask: Asks.
        is_told: Whether it was told that this one fails while another does not.
        pause_looks: How many looks leave it out when it fails next.
        left_looks: How many still do.
    """

    ask: Callable[[], Iterable[Notice]]
    is_told: bool = False
    pause_looks: int = 1
    left_looks: int = 0


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
            timeout_seconds: How long one request may take. In a container the instance's hop limit has to be 2 or
                more, or the server stays silent.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__(base_url, timeout_seconds)
        check_seconds("interval_seconds", interval_seconds)
        self.interval_seconds: float | None = interval_seconds
        self._token = ""
        self._told: set[str] = set()
        self._questions = (_Question(self._hear_action), _Question(self._hear_rebalance))

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Asks for both, each on its own: one that fails takes nothing from what the other says.

        Nor does what has been heard wait for the other one's answer. One that goes on failing alone is asked ever more
        seldom, and raises once, in a look that has nothing to say. There is always one that does not rest, so a server
        that fails altogether is the caller's business.

        Raises:
            OSError: If the server fails.
        """
        fresh: list[Notice] = []
        failures: dict[_Question, Exception] = {}
        is_answered = False
        for question in self._questions:
            if fresh:
                break
            if question.left_looks:
                question.left_looks -= 1
                continue
            try:
                fresh = [notice for notice in question.ask() if notice.text not in self._told]
            except Exception as error:  # noqa: BLE001  Whatever it is, the other one is to be heard.
                failures[question] = error
            else:
                is_answered = True
                question.pause_looks = 1
        self._told.update(notice.text for notice in fresh)
        try:
            if failures and not is_answered:
                raise next(iter(failures.values()))
            for question in failures:
                question.left_looks = question.pause_looks
                question.pause_looks = min(2 * question.pause_looks, _LONGEST_PAUSE_LOOKS)
                if not (fresh or question.is_told):
                    question.is_told = True
                    raise failures[question]
        finally:
            failures.clear()  # An error keeps this frame, which would keep the error.
        return fresh

    def _hear_action(self) -> Iterable[Notice]:
        action = self._read(_ACTION_PATH)
        return (self._action(action),) if action else ()

    def _hear_rebalance(self) -> Iterable[Notice]:
        if self._read(_REBALANCE_PATH) is None:
            return ()
        text = "an interruption of this spot instance is likely"
        return (Notice(source=self.name, text=text, demand=Demand.SAVE),)

    def _action(self, record: dict[str, Any]) -> Notice:
        action = record.get("action")
        if not isinstance(action, str):
            raise OSError(f"{self._url(_ACTION_PATH)} names no action: {str(record)[:200]}")
        if action == "hibernate":
            return Notice(source=self.name, text="this spot instance is hibernated", demand=Demand.SAVE)
        text = f"this spot instance is to {action} at {record.get('time')}"
        return Notice(
            source=self.name, text=text, demand=Demand.LEAVE_BY, left_seconds=_left_seconds(record.get("time"))
        )

    def _read(self, path: str) -> dict[str, Any] | None:
        """A record, or None if there is none."""
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
    """Until that time by the wall clock; what a notice gives if the time cannot be read."""
    try:
        return datetime.fromisoformat(str(time_text)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return _NOTICE_SECONDS
