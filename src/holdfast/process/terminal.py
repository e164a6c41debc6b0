"""Messages of holdfast to people, on standard error. They never raise: training continues even if printing fails."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from holdfast.events.sinks import logger

_MOMENT_SECONDS: Final = 1.0
_BETWEEN_SECONDS: Final = 0.2
_BAR_WIDTH: Final = 20


def say(text: str) -> None:
    """**Thread-safe.** Prints lines, in one piece; they are lost if standard error is closed."""
    stream = sys.stderr
    if stream is None:
        return
    # The pipe has no reader, the disk is full, the stream was closed, or it is one of the user's own.
    with contextlib.suppress(Exception):
        try:
            stream.write(f"{text}\n")
            stream.flush()
        except OSError:
            if stream is sys.__stderr__:
                _lead_nowhere(sys.stderr)
            raise


def inform(text: str) -> None:
    """**Thread-safe.** Logs a line at level INFO; if logging is not configured, prints it.

    Python itself prints only warnings and errors then. A level that the program has set is respected.
    """
    if logger.hasHandlers():
        logger.info("%s", text)
    elif logger.level <= logging.INFO and logger.manager.disable < logging.INFO and not logger.disabled:
        say(f"holdfast: {text}")


@contextlib.contextmanager
def progress_shown(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with how much is done; a terminal shows it once that takes longer than a moment."""
    stream, begun_at = sys.stderr, time.monotonic()
    shown_at, width = begun_at + _MOMENT_SECONDS, 0

    def show(done: int) -> None:
        nonlocal shown_at, width
        if (now := time.monotonic()) < shown_at:
            return
        shown_at = now + _BETWEEN_SECONDS
        bar = "#" * (_BAR_WIDTH * done // max(total, 1))
        text = f"holdfast: {label} [{bar:<{_BAR_WIDTH}}] {done}/{total}, {done / (now - begun_at):.0f}/s"
        with contextlib.suppress(Exception):
            if stream is not None and stream.isatty():
                stream.write(f"\r{text}")
                stream.flush()
                width = len(text)

    try:
        yield show
    finally:
        if width:
            with contextlib.suppress(Exception):
                stream.write(f"\r{' ' * width}\r")


def keep_exit_code() -> None:
    """**Thread-safe.** Keeps the program's exit code, even if its output can no longer be written."""
    atexit.register(_lead_full_streams_nowhere)


def _lead_full_streams_nowhere() -> None:
    for stream in {sys.stdout, sys.stderr} & {sys.__stdout__, sys.__stderr__} - {None}:
        with contextlib.suppress(Exception):
            try:
                stream.flush()
            except OSError:
                _lead_nowhere(stream)


def _lead_nowhere(stream: TextIO) -> None:
    """Discards the buffer: Python would write it again at the end, and exit with 120 if that fails."""
    nowhere, lost = os.open(os.devnull, os.O_WRONLY), stream.fileno()
    if nowhere != lost:
        os.dup2(nowhere, lost)
        os.close(nowhere)
    stream.flush()


def say_from_signal_handler(text: str) -> None:
    """**Thread-safe.** Prints lines, also inside a signal handler that interrupted any code."""
    if sys.__stderr__ is None:
        return  # Started without one, so that the descriptor may be that of any file.
    # One write, past the stream: that may be what was interrupted.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
