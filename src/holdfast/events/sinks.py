"""Receivers of events: the log, files, running totals, and several at once."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from holdfast.errors import FormatError
from holdfast.events.kinds import (
    AnyEvent,
    Clocked,
    Committed,
    Diverged,
    Event,
    Failed,
    GenerationOpened,
    Held,
    Leaving,
    NotFinite,
    NoticeHeard,
    PassedOver,
    Resized,
    Restored,
    Retained,
    Skipped,
    Staged,
    Warned,
    WitnessAgreed,
    WitnessDiffers,
    Written,
)
from holdfast.numbers import check_whole, size_text, time_text

Sink: TypeAlias = Callable[[Event], None]
"""A function that is called with each event, in the thread in which the event happened. That may be the training
thread, so it should be quick.
"""

logger = logging.getLogger("holdfast")


def _name_where_nothing_does(record: logging.LogRecord) -> bool:
    """Names the logger in the text if no handler is configured: Python then prints only the text."""
    if not logger.hasHandlers():
        record.msg = f"holdfast: {record.msg}"
    return True


logger.addFilter(_name_where_nothing_does)

_LEVELS: dict[type[Event], int] = {  # Of all others: INFO.
    Staged: logging.DEBUG,
    Held: logging.DEBUG,
    Written: logging.DEBUG,
    Resized: logging.WARNING,
    Diverged: logging.WARNING,
    PassedOver: logging.WARNING,
    Retained: logging.DEBUG,
    Failed: logging.ERROR,
    Skipped: logging.WARNING,
    Warned: logging.WARNING,
    WitnessAgreed: logging.DEBUG,  # A line of the run says it.
    WitnessDiffers: logging.WARNING,
    NoticeHeard: logging.WARNING,
    Clocked: logging.DEBUG,
    NotFinite: logging.WARNING,
    Leaving: logging.DEBUG,  # The last line on standard error says it.
}


class LoggingSink:
    """**Thread-safe.** Writes each event as one line to the logger `holdfast`, at a level that fits its kind.

    Of workers that find the same, one logs it at that level, and the others at level INFO.
    """

    def __init__(self, *, is_leader: bool = True, is_second: bool = False) -> None:
        """Logs for one worker of a job; the second one, of rank 1, logs why the training of the leader has failed."""
        self._is_leader, self._is_second = is_leader, is_second

    def __call__(self, event: Event) -> None:
        """Logs the event."""
        level = _LEVELS.get(type(event), logging.INFO)
        if isinstance(event, Warned) and event.is_error:
            level = logging.ERROR
        elif isinstance(event, WitnessDiffers | Failed | NotFinite) and event.is_raised:
            level = logging.DEBUG
        elif isinstance(event, Failed) and event.stage == "retain":
            level = logging.WARNING  # No step is lost.
        elif isinstance(event, Failed) and event.stage == "training":
            # An error that was raised there is printed there.
            level = logging.ERROR if (self._is_second if event.rank == 0 else self._is_leader) else logging.INFO
        elif isinstance(event, NoticeHeard) and event.by_hand:
            level = logging.INFO  # Ctrl-C has said so itself.
        elif not self._is_leader and (
            isinstance(event, PassedOver | Resized | Failed) or getattr(event, "by_each", False)
        ):
            level = logging.INFO
        logger.log(level, "%s", event, extra={"event": event})


class Fanout:
    """**Thread-safe.** A sink that passes each event to several sinks.

    A sink that raises does not affect the others; its first error is logged.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        # Guards `_failed`, the places of the sinks whose error has been logged.
        self._lock = threading.Lock()
        self._failed: set[int] = set()

    def __call__(self, event: Event) -> None:
        """Passes the event to every sink, in the order in which they were given."""
        for place, sink in enumerate(self._sinks):
            try:
                sink(event)
            except (Exception, SystemExit):
                with self._lock:
                    is_first = place not in self._failed
                    self._failed.add(place)
                if is_first:
                    logger.exception("the event sink %r failed; its further errors are not logged", sink)


class Sums(msgspec.Struct, frozen=True):
    """Sums over the events of a run.

    Attributes:
        blocked_seconds: How long saves blocked training.
        background_seconds: How long saves worked in the background.
        training_saved_seconds: The training time that a crash can no longer lose.
        written_bytes: The bytes written, including those of saves that failed later.
        saves_committed: The number of saves that succeeded.
        saves_failed: The number of saves that failed.
        saves_skipped: The number of requested saves that were skipped.
        restores: The number of restores.
        steps_passed_over: The number of damaged steps that were skipped.
        steps_kept: How many checkpoints the run has, as of the newest save; of several workers, rank 0 knows it.
        kept_bytes: Their size.
    """

    blocked_seconds: float = 0.0
    background_seconds: float = 0.0
    training_saved_seconds: float = 0.0
    written_bytes: int = 0
    saves_committed: int = 0
    saves_failed: int = 0
    saves_skipped: int = 0
    restores: int = 0
    steps_passed_over: int = 0
    steps_kept: int = 0
    kept_bytes: int = 0


class Totals:
    """**Thread-safe.** A sink that sums up events, for the report at the end of a run."""

    def __init__(self) -> None:
        # Guards `_sums`: events come from the training thread and from background threads.
        self._lock = threading.Lock()
        self._sums = Sums()

    @property
    def sums(self) -> Sums:
        """The sums so far."""
        with self._lock:
            return self._sums

    def __call__(self, event: Event) -> None:
        """Adds the event."""
        with self._lock:
            self._sums = add_event(self._sums, event)


def add_event(sums: Sums, event: Event) -> Sums:
    """**Pure.** Returns the sums with one more event."""
    match event:
        case Staged() | Held():
            return replace(sums, blocked_seconds=sums.blocked_seconds + event.blocked_seconds)
        case Written():
            return replace(sums, written_bytes=sums.written_bytes + event.size_bytes)
        case Committed():
            return replace(
                sums,
                background_seconds=sums.background_seconds + event.background_seconds,
                training_saved_seconds=sums.training_saved_seconds + event.training_saved_seconds,
                saves_committed=sums.saves_committed + 1,
            )
        case Failed(save_lost=True):
            return replace(
                sums,
                background_seconds=sums.background_seconds + event.background_seconds,
                saves_failed=sums.saves_failed + 1,
            )
        case Skipped():
            return replace(sums, saves_skipped=sums.saves_skipped + 1)
        case Restored():
            return replace(sums, restores=sums.restores + 1)
        case PassedOver():
            return replace(sums, steps_passed_over=sums.steps_passed_over + 1)
        case Retained():
            return replace(sums, steps_kept=len(event.kept) + event.more_kept, kept_bytes=event.kept_bytes)
    return sums


def describe_cost(sums: Sums, seconds: float) -> str:
    """**Pure.** Describes in one line what saving has cost a training of so many seconds; empty without a save."""
    if not sums.saves_committed:
        return ""
    percent = min(100 * sums.blocked_seconds / max(seconds, sums.blocked_seconds, 1e-9), 100.0)
    share = f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
    stopped = f"training stopped for {time_text(sums.blocked_seconds)} of {time_text(seconds)} ({share} %)"
    parts = [_count(sums.saves_committed, "save"), stopped]
    if sums.saves_failed:
        parts[0] += f", {sums.saves_failed} failed"
    if sums.steps_kept:
        parts.append(f"{_count(sums.steps_kept, 'checkpoint')}, {size_text(sums.kept_bytes)}")
    return "; ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode_event(event: Event) -> bytes:
    """**Pure.** Returns the event as one line of JSON, without the end of line."""
    try:
        return _ENCODER.encode(event)
    except UnicodeEncodeError:
        # A file name that is not UTF-8 reaches error texts as lone surrogates, which JSON cannot hold.
        texts = {name: value for name, value in msgspec.structs.asdict(event).items() if isinstance(value, str)}
        legible = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
        return _ENCODER.encode(msgspec.structs.replace(event, **legible))


def decode_event(line: bytes) -> AnyEvent:
    """**Pure.** Returns the event of a line of JSON; unknown fields are ignored.

    Raises:
        FormatError: If the line is damaged, or of a kind that this version does not know.
    """
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not an event: {error}") from error


DEFAULT_LIMIT_BYTES: Final = 8 << 20
"""The size at which the file is renamed: some tens of thousands of events."""

_MIN_LIMIT_BYTES: Final = 1024
_MAX_LINE_BYTES: Final = 1 << 20


class JsonLinesSink:
    """**Thread-safe.** Appends each event to a file as a line of JSON.

    If a file would exceed the limit, it is first renamed from `events.jsonl` to `events.1.jsonl`, which replaces the
    file that was renamed before; so both together stay below twice the limit. A crash can tear at most the last line;
    the next event begins a new line. Nothing is synced: restoring needs no events.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        follow_link: bool = True,
        makes_directory: bool = True,
    ) -> None:
        """Creates the sink; the first event creates the file and its directory.

        Args:
            path: The file.
            limit_bytes: Its largest size.
            follow_link: True if the path may be a link to the file.
            makes_directory: False to raise `OSError` if the file's directory is missing.

        Raises:
            UsageError: If the limit is too small for a line.
        """
        check_whole("limit_bytes", limit_bytes, _MIN_LIMIT_BYTES)
        self.path = Path(path)
        self._limit_bytes, self._makes_directory = limit_bytes, makes_directory
        # Without O_NONBLOCK a FIFO could hold up the thread that emits an event.
        self._flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
        # Guards the file: between looking at its end and appending to it, no other thread appends.
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Appends the event.

        Raises:
            OSError: If the file cannot be written, or is not a regular file.
        """
        line = encode_event(event) + b"\n"
        longest_bytes = min(self._limit_bytes, _MAX_LINE_BYTES) - 1
        if len(line) > longest_bytes:
            too_long = f"an event {type(event).__name__} of {len(line)} bytes is too long to record"
            line = encode_event(Warned(text=too_long, at_unix_seconds=event.at_unix_seconds)) + b"\n"
        with self._lock:
            if self._makes_directory:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not found: there is none yet, or another process has just put it aside.
            with suppress(FileNotFoundError):
                if self.path.stat().st_size + len(line) >= self._limit_bytes:
                    self.path.replace(_put_aside(self.path))
            # The file is opened each time: another process may move it, and nothing needs to be closed.
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
    """Returns the events of a file and of the one that was renamed before it, oldest first.

    Damaged lines are skipped, and so are kinds that this version does not know. Without a file there are none.
    """
    for part in (_put_aside(Path(path)), Path(path)):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            # In memory of bounded size: a line that is longer than any event comes in pieces.
            while line := file.readline(_MAX_LINE_BYTES):
                try:
                    yield decode_event(line)
                except FormatError:
                    continue


def _put_aside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.1{path.suffix}")


JOURNAL_NAME: Final = "events.jsonl"
JOURNAL_NAMES: Final = ("events.1.jsonl", JOURNAL_NAME)
"""The renamed file, if there is one, and the current one."""
_MAX_WAITING: Final = 100
_ENDS_SAVES: Final = frozenset({errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""By these a save fails as well, and says so."""


class RunJournal:
    """**Thread-safe.** Writes events into a run's directory once this process has opened a generation there, or has
    trained.

    Earlier events (a restore, for example) wait until then, so that a process that only reads leaves no trace. If the
    file cannot be written, one warning says so: saves and restores don't need it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = os.path.join(directory, JOURNAL_NAME)  # noqa: PTH118  The sink makes it a path.
        # Nothing outside the run's directory is written, even through a link that was put there; and what has gone is
        # not made again.
        self._sink = JsonLinesSink(path, follow_link=False, makes_directory=False)
        self._has_failed = False
        self._waiting: deque[Event] | None = deque(maxlen=_MAX_WAITING)
        # Guards what waits: an event that comes while the others are written is neither lost nor written before them.
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Writes the event, or keeps it until one comes that begins the journal."""
        with self._lock:
            if self._waiting is not None and not isinstance(event, GenerationOpened | Clocked):
                self._waiting.append(event)
                return
            waiting, self._waiting = self._waiting or (), None
            for one in (*waiting, event):
                try:
                    self._sink(one)
                except OSError as error:
                    if not self._has_failed:
                        self._has_failed = True
                        level = logging.DEBUG if error.errno in _ENDS_SAVES else logging.WARNING
                        logger.log(
                            level, "the run's events are not recorded (saves and restores don't need them): %s", error
                        )
