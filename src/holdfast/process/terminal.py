"""Messages of holdfast to people, on standard error. They never raise: training continues even if printing fails."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from typing import TextIO

from holdfast.events.sinks import logger


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
