"""Figures of a run for Prometheus, in a file that its node exporter reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.events.kinds import Clocked, Committed, Event, Failed, Leaving, Restored, Skipped
from holdfast.events.sinks import Sums, add_event

_COUNTERS: Final = {
    "saves_committed": "saves_total",
    "saves_failed": "saves_failed_total",
    "saves_skipped": "saves_skipped_total",
    "restores": "restores_total",
    "blocked_seconds": "save_blocked_seconds_total",
    "written_bytes": "written_bytes_total",
}
_PHASES: Final = {
    "train_seconds": "train", "data_seconds": "data", "save_seconds": "save", "restore_seconds": "restore",
    "setup_seconds": "setup", "leave_seconds": "leave",
}  # fmt: skip


class PrometheusSink:
    """**Thread-safe.** Writes the figures of this process into a text file, whole each time, after each commit.

    Give the file to the node exporter: `--collector.textfile.directory` with its directory. Figures: the step, when
    it was committed, the time of each phase of this start, and counts of saves, failures and restores.
    """

    def __init__(self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None) -> None:
        """Creates the sink; the first commit creates the file.

        Args:
            path: The file, whose name must end in `.prom`; one for each run.
            labels: Labels of each figure, such as `{"run": "gpt"}`.
        """
        self.path = Path(path)
        self._labels = dict(labels or {})
        # Guards the figures: events come from several threads.
        self._lock = threading.Lock()
        self._sums = Sums()
        self._committed: Committed | None = None
        self._clocked: Clocked | None = None

    def __call__(self, event: Event) -> None:
        """Adds the event, and writes the file where that changes what it says.

        Raises:
            OSError: If the file cannot be written.
        """
        with self._lock:
            self._sums = add_event(self._sums, event)
            if isinstance(event, Committed):
                self._committed = event
            elif isinstance(event, Clocked):
                self._clocked = event
            if isinstance(event, Clocked | Committed | Failed | Leaving | Restored | Skipped):
                part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
                part.write_text(self._render(), encoding="utf-8")
                part.replace(self.path)

    def _render(self) -> str:
        lines = []
        for field, name in _COUNTERS.items():
            lines += [f"# TYPE holdfast_{name} counter", self._line(name, getattr(self._sums, field))]
        if self._committed is not None:
            lines += ["# TYPE holdfast_committed_step gauge", self._line("committed_step", self._committed.step)]
            lines += ["# TYPE holdfast_committed_timestamp_seconds gauge"]
            lines += [self._line("committed_timestamp_seconds", self._committed.at_unix_seconds)]
        if self._clocked is not None:
            lines += ["# TYPE holdfast_step gauge", self._line("step", self._clocked.step)]
            lines += ["# TYPE holdfast_start_seconds_total counter"]
            for field, phase in _PHASES.items():
                lines.append(self._line("start_seconds_total", getattr(self._clocked, field), phase=phase))
        return "".join(f"{line}\n" for line in lines)

    def _line(self, name: str, value: float, **more: str) -> str:
        labels = ",".join(f'{key}="{_escape(text)}"' for key, text in (self._labels | more).items())
        return f"holdfast_{name}{f'{{{labels}}}' if labels else ''} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
