"""Events as lines of JSON in a file of bounded size, which outlives crashes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.errors import FormatError
from holdfast.events.event import Event
from holdfast.events.kinds import (
    AnyEvent,
    Warned,
    decode_event,
    encode_event,
)
from holdfast.numbers import check_whole

DEFAULT_LIMIT_BYTES: Final = 8 << 20
"""How large the file may become before it is put aside: some tens of thousands of events."""

_MIN_LIMIT_BYTES: Final = 1024
_MAX_LINE_BYTES: Final = 1 << 20


class JsonLinesSink:
    """**Thread-safe.** Appends each event to a file as a line of JSON.

    A file that would grow over the limit is first renamed, `events.jsonl` to `events.1.jsonl`, in place of the one
    renamed before, so both together stay below twice the limit. A crash can tear the last line at most; the next
    event begins a line of its own. Nothing is synced: events tell of a run, and restoring needs none of them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit_bytes: int = DEFAULT_LIMIT_BYTES, follow_link: bool = True
    ) -> None:
        """Makes the sink; the file and its directory are made by the first event.

        Args:
            path: The file.
            limit_bytes: How large it may become.
            follow_link: Whether it may be a link to the file that is meant.

        Raises:
            UsageError: If the limit is too small for a line.
        """
        check_whole("limit_bytes", limit_bytes, _MIN_LIMIT_BYTES)
        self.path = Path(path)
        self._limit_bytes = limit_bytes
        # Without O_NONBLOCK a FIFO could hold up whoever has an event to tell.
        self._flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
        # Guards the file: between looking at its end and appending to it, nobody else here does.
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Appends the event.

        Raises:
            OSError: If the file cannot be written, or is no plain file.
        """
        line = encode_event(event) + b"\n"
        longest_bytes = min(self._limit_bytes, _MAX_LINE_BYTES) - 1
        if len(line) > longest_bytes:
            too_long = f"an event {type(event).__name__} of {len(line)} bytes is too long to be kept"
            line = encode_event(Warned(text=too_long, at_unix_seconds=event.at_unix_seconds)) + b"\n"
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _size_bytes(self.path) + len(line) >= self._limit_bytes:
                # Not found: another process has just put it aside.
                with contextlib.suppress(FileNotFoundError):
                    self.path.replace(_put_aside(self.path))
            self._append(line)

    def _append(self, line: bytes) -> None:
        # The file is opened anew each time: another process may have put it aside, and there is nothing to close.
        descriptor = os.open(self.path, self._flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file", str(self.path))
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                line = b"\n" + line
            # One call, so that lines of two processes do not mix. A short write tears this line only.
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_events(path: str | os.PathLike[str]) -> Iterator[AnyEvent]:
    """The events in a file and in the one that was put aside before it, oldest first.

    Torn and damaged lines and kinds that this version does not know are left out. No file: no events.
    """
    for part in (_put_aside(Path(path)), Path(path)):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            for line in _lines(file):
                try:
                    yield decode_event(line)
                except FormatError:
                    continue


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, in memory of bounded size: one that is longer than any event comes in pieces."""
    while line := file.readline(_MAX_LINE_BYTES):
        yield line


def _put_aside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
