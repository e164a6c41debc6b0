"""What is told when a job is to be taken away."""

from __future__ import annotations

from holdfast.events.event import Event, time_text


class NoticeHeard(Event, frozen=True):
    """This process, or the machine that it runs on, is about to be taken away.

    Attributes:
        source: Where that was heard.
        text: What was heard.
        demand: What it asks for: `save`, `leave_by` or `leave`.
        left_seconds: When the process must be gone; None if that is not known.
    """

    source: str
    text: str
    demand: str
    left_seconds: float | None = None

    def __str__(self) -> str:
        left = "" if self.left_seconds is None else f", {time_text(max(self.left_seconds, 0.0))} left"
        return f"{self.text}{left}"


class Leaving(Event, frozen=True):
    """The process was asked to leave, and does.

    Attributes:
        step: The newest step that is saved; None if nothing was.
        exit_code: What it leaves with. After an interrupt in a notebook, or at a prompt, the process stays.
        reason: Why now.
        error: Why the state could not be saved; empty if it was.
        blocked_seconds: How long training was held up for the last save.
        saved: What is saved, as people read it: "step 500 is saved", say; empty if the state could not be saved.
    """

    step: int | None
    exit_code: int
    reason: str
    error: str = ""
    blocked_seconds: float = 0.0
    saved: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"leaving with exit code {self.exit_code}, and the state could not be saved: {self.error}"
        return f"leaving with exit code {self.exit_code}, {self.saved or f'step {self.step} is saved'} ({self.reason})"
